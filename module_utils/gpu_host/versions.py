"""Version numbers compared as numbers, for hosts whose Python has no packaging library."""

from __future__ import annotations

import re

_RELEASE = re.compile(r"\s*v?(\d+(?:\.\d+)*)")


def release(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end: '2.14.1+cu130' is (2, 14, 1); () when there are none.

    What follows them (rc1, post2, +cu130) is left out: builds of one release share their interface.
    """
    found = _RELEASE.match(text or "")
    numbers = [int(part) for part in found.group(1).split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def older(version: str | None, than: str) -> bool:
    """Whether the version is known and lower than the other one."""
    numbers = release(version)
    return bool(numbers) and numbers < release(than)


def same_release(one: str | None, other: str | None) -> bool:
    return release(one) == release(other)


def major_minor(text: str | None) -> str:
    """'12.8' for '12.8.93'; '' when there are no numbers."""
    found = _RELEASE.match(text or "")
    return ".".join((found.group(1) + ".0").split(".")[:2]) if found else ""
