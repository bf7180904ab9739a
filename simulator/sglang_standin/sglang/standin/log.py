"""SGLang's log lines: one write each, so that lines of many processes do not mix."""

from __future__ import annotations

import contextlib
import os
import time


class Log:
    """Writes to stderr as SGLang's logger does; `prefix` is empty or like ' TP0'."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def line(self, text: str) -> None:
        """A line with time and rank."""
        raw(time.strftime("[%Y-%m-%d %H:%M:%S") + f"{self.prefix}] {text}\n")


def raw(text: str) -> None:
    """Text as it is: warnings, progress bars."""
    # The log's reader may be gone; a server does not die of that.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
