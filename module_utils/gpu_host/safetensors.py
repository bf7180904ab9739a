"""Headers of safetensors files, read without torch: what a shard holds, and whether it is whole.

The format: 8 bytes (length of the header, little-endian), the header (a JSON object: tensor name -> dtype, shape,
data_offsets), then the data of all tensors without a gap. So a file is whole when 8 + header length + the largest
offset is its size, and that is known after reading a few KiB.
"""

from __future__ import annotations

import array
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The format's own bound (safetensors, MAX_HEADER_SIZE).
MOST_HEADER_BYTES = 100_000_000
# Bits of an element by dtype (safetensors' Dtype). Another name is a newer format: its size is not compared.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_POINTER = b"version https://git-lfs.github.com/spec/"


class HeaderError(Exception):
    """The file is no whole safetensors file; the text says why, without the file's name."""


@dataclass(frozen=True)
class Tensor:
    """`start` and `end` are bytes from the beginning of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """`data_start`: bytes before the first tensor; `file_bytes`: the size that the whole file has."""

    tensors: Mapping[str, Tensor]
    data_start: int
    file_bytes: int


def is_pointer(start: bytes) -> bool:
    """Whether a file that begins so is a git-lfs pointer, the place holder of a file that was not fetched."""
    return start.startswith(_POINTER)


def read(path: str) -> Header:
    """The header of a file. OSError: unreadable; HeaderError: no header, or one that contradicts itself.

    The file's size is for the caller to compare: a truncated file mostly has a whole header.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(256)
        if is_pointer(start):
            raise HeaderError("it is a git-lfs pointer, not the file itself")
        if size < 8:
            raise HeaderError(f"it has {size} bytes, too few for a header" if size else "it is empty")
        length = int.from_bytes(start[:8], "little")
        if not any(start):
            raise HeaderError("it begins with zeros: space was allocated, the beginning never written")
        if length > MOST_HEADER_BYTES or length < 2 or (len(start) > 8 and start[8:9] != b"{"):
            raise HeaderError("it does not begin with a safetensors header")
        if 8 + length > size:
            raise HeaderError(f"it ends within its header ({size} of {8 + length} bytes)")
        text = start[8 : 8 + length]
        while len(text) < length:
            part = file.read(length - len(text))
            if not part:
                raise HeaderError("it ended while it was read")
            text += part
    return parse(text, 8 + length)


def parse(text: bytes, data_start: int) -> Header:
    """The header from its JSON text."""
    try:
        entries = json.loads(text)
    except ValueError as error:  # also text that is no UTF-8
        raise HeaderError(f"its header is damaged ({error})") from error
    if not isinstance(entries, dict):
        raise HeaderError("its header is no JSON object")
    tensors = {name: _tensor(name, entry) for name, entry in entries.items() if name != "__metadata__"}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise HeaderError(f"its header leaves a gap or an overlap before the tensor {name}")
        end = tensor.end
    return Header(tensors, data_start, data_start + end)


def _tensor(name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        elements = 1
        for length in shape:
            if type(length) is not int or length < 0:
                raise TypeError
            elements *= length
        if type(start) is not int or type(end) is not int or not isinstance(dtype, str) or not 0 <= start <= end:
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise HeaderError(f"its header describes the tensor {name} wrongly") from None
    bits = BITS.get(dtype)
    if bits is not None and (elements * bits) != (end - start) * 8:
        takes = f"which takes {elements * bits // 8} bytes and not {end - start}"
        raise HeaderError(f"its tensor {name} is {dtype} {list(shape)}, {takes}")
    return Tensor(dtype, shape, start, end)


def read_integers(path: str, header: Header, name: str) -> array.array[int] | None:
    """All values of a tensor of integers or booleans; None for another dtype. OSError; HeaderError: cut short."""
    tensor = header.tensors[name]
    code = {"BOOL": "B", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q"}
    if tensor.dtype not in code:
        return None
    with open(path, "rb") as file:
        file.seek(header.data_start + tensor.start)
        data = file.read(tensor.end - tensor.start)
    if len(data) != tensor.end - tensor.start:
        raise HeaderError(f"it ends within the tensor {name}")
    values = array.array(code[tensor.dtype])
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
