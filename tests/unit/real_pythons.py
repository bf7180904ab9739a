"""The interpreters on which a managed host may run the modules."""

from __future__ import annotations

import sys
from pathlib import Path


def pythons() -> list[str]:
    """This Python, and the newest of each of 3.9 to 3.13 that pyenv has."""
    found = {sys.executable}
    for minor in range(9, 14):
        found.update(map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))[-1:]))
    return sorted(found)
