"""The dynamic symbols of a shared library, read from the file: what it needs from others and what it offers.

Tells without loading anything (and so without a GPU) whether a compiled extension fits the torch beside it. 64-bit
little-endian ELF only, which is every Linux host with an NVIDIA GPU.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_DYNAMIC, _DYNSYM, _NOBITS = 6, 11, 8
_DT_NEEDED = 1
_WEAK = 2
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ENTRY = struct.Struct("<qQ")
_MOST_BYTES = 512 << 20


class ElfError(Exception):
    """The file is no library that can be read here; the text says why."""


@dataclass(frozen=True)
class Library:
    """`undefined` must come from others (weak ones may stay away and are left out), `defined` is offered to others."""

    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]


@dataclass(frozen=True)
class _Part:
    name: int
    kind: int
    offset: int
    size: int
    link: int


def read(path: str) -> Library:
    """ElfError or OSError where the file can't be read as a library."""
    with open(path, "rb") as file:
        try:
            return _read(file.fileno())
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise ElfError(f"{path} is no whole ELF file: {error}") from error


def sections(path: str, names: Iterable[str]) -> list[tuple[int, int]]:
    """Where the sections of these names lie in the file: (offset, bytes). ElfError or OSError as for read()."""
    wanted = set(names)
    with open(path, "rb") as file:
        try:
            parts, texts = _parts(file.fileno())
            return [(one.offset, one.size) for one in parts if one.kind != _NOBITS and _name(texts, one.name) in wanted]
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise ElfError(f"{path} is no whole ELF file: {error}") from error


def _parts(file: int) -> tuple[list[_Part], bytes]:
    """The sections, and the texts that their names stand in."""
    header = os.pread(file, _HEADER.size, 0)
    if header[:4] != b"\x7fELF":
        raise ElfError("it does not begin as an ELF file does")
    if header[4:6] != b"\x02\x01":
        raise ElfError("it is not 64-bit little-endian")
    fields = _HEADER.unpack(header)
    start, size, count, names = fields[6], fields[11], fields[12], fields[13]
    table = os.pread(file, size * count, start)
    parts = []
    for number in range(count):
        name, kind, _, _, offset, length, link, _, _, _ = _SECTION.unpack_from(table, number * size)
        parts.append(_Part(name, kind, offset, length, link))
    return parts, _content(file, parts[names]) if parts else b""


def _read(file: int) -> Library:
    parts, _ = _parts(file)
    needed: list[str] = []
    undefined: set[str] = set()
    defined: set[str] = set()
    for part in parts:
        if part.kind == _DYNAMIC:
            names = _content(file, parts[part.link])
            content = _content(file, part)
            needed += [
                _name(names, value)
                for tag, value in _ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size])
                if tag == _DT_NEEDED
            ]
        elif part.kind == _DYNSYM:
            names = _content(file, parts[part.link])
            for at, info, _, section, _, _ in _SYMBOL.iter_unpack(_content(file, part)):
                if not at:
                    continue
                if section:
                    defined.add(_name(names, at))
                elif info >> 4 != _WEAK:
                    undefined.add(_name(names, at))
    return Library(tuple(needed), frozenset(undefined), frozenset(defined))


def _content(file: int, part: _Part) -> bytes:
    if part.kind == _NOBITS:
        return b""
    if part.size > _MOST_BYTES:
        raise ElfError(f"a section of {part.size} bytes is too large")
    return os.pread(file, part.size, part.offset)


def _name(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode("utf-8", "replace")
