"""One value of a JSON file changed in place: everything else, its indentation and order too, stays byte for byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json import decoder
from typing import Any

_DECODER = json.JSONDecoder()


def replace(text: str, path: Sequence[str], value: Any) -> str:
    """The text with the value at `path` (keys of nested objects) replaced, or put in first where its key is missing.

    ValueError: no JSON, or an object on the way is missing. Of a key given twice the last counts, as for readers.
    """
    start, objects = _skip(text, 0), list(path[:-1])
    for key in objects:
        start = _members(text, start)[key][0]
    members = _members(text, start)
    new = json.dumps(value)
    if path[-1] in members:
        begin, end = members[path[-1]]
        return text[:begin] + new + text[end:]
    inside = _skip(text, start + 1)
    between = text[start + 1 : inside]  # line break and indentation, as before the object's first member
    comma = "," if members else ""
    if not between and members:
        comma = ", "
    return text[: start + 1] + between + json.dumps(path[-1]) + ": " + new + comma + text[start + 1 :]


def _members(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Where the values of the object that begins at `start` stand."""
    if text[start : start + 1] != "{":
        raise ValueError(f"no object at character {start}")
    found: dict[str, tuple[int, int]] = {}
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
        begin = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        found[key] = (begin, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at
