"""Which GPU architectures a library has code for, read from its fat binaries as cuobjdump lists them.

A host needs no CUDA tool for it. The layout is not documented by NVIDIA; what is used here (a header with its size, and
in each entry kind, sizes, architecture and the flags for 'a' and 'f') was read off nvcc 13.0's output, compressed and
not, and a test holds it against cuobjdump.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from . import elf

_MAGIC = b"\x50\xed\x55\xba"
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_KINDS = {1: "ptx", 2: "sass"}
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21


@dataclass(frozen=True)
class Code:
    """Architectures as nvcc names them without 'sm_' ('120a', '90'): machine code, and PTX that the driver compiles."""

    sass: frozenset[str]
    ptx: frozenset[str]

    def __or__(self, other: Code) -> Code:
        return Code(self.sass | other.sass, self.ptx | other.ptx)


NONE = Code(frozenset(), frozenset())


def read(path: str) -> Code:
    """elf.ElfError or OSError where the file can't be read; a library without GPU code gives empty sets."""
    places = elf.sections(path, _SECTIONS)
    found: dict[str, set[str]] = {"ptx": set(), "sass": set()}
    if places:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for offset, size in places:
                _scan(content, offset, min(offset + size, len(content)), found)
    return Code(frozenset(found["sass"]), frozenset(found["ptx"]))


def _scan(content: mmap.mmap, at: int, end: int, found: dict[str, set[str]]) -> None:
    while True:
        at = content.find(_MAGIC, at, end)
        if at < 0 or at + _HEADER.size > end:
            return
        _, version, header, size = _HEADER.unpack_from(content, at)
        stop = at + header + size
        if version != 1 or header < _HEADER.size or stop > end:
            at += len(_MAGIC)
            continue
        entry = at + header
        while entry + _ENTRY.size <= stop:
            kind, _, head, length, number, flags = _ENTRY.unpack_from(content, entry)
            if head < _ENTRY.size or not 20 <= number <= 999:
                break
            suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
            if kind in _KINDS:
                found[_KINDS[kind]].add(f"{number}{suffix}")
            entry += head + length
        at = stop


def runs_on(code: Code, compute_capability: str) -> str:
    """'sass' when there is machine code for it, 'ptx' when the driver must compile at first use, '' for neither.

    Machine code runs on the same major version and a minor that is not lower; 'a' on exactly its own, 'f' on its family
    (the same major and a minor that is not lower).
    """
    major, _, minor = compute_capability.partition(".")
    own = int(major) * 10 + int(minor or 0)
    for name in code.sass:
        number = int(name.rstrip("af"))
        if number == own or (not name.endswith("a") and number // 10 == own // 10 and number <= own):
            return "sass"
    for name in code.ptx:
        number = int(name.rstrip("af"))
        if number == own or (not name.endswith(("a", "f")) and number <= own):
            return "ptx"
    return ""
