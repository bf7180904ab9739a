"""A point in time by which work must have ended, passed down through every wait."""

from __future__ import annotations

import time
from typing import Callable


class Deadline:
    """Ends `seconds` after it was made, by a monotonic clock that tests may replace."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + max(0.0, float(seconds))

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock())

    def expired(self) -> bool:
        return self._clock() >= self._end

    def capped(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, or this one where this one ends earlier."""
        return Deadline(min(max(0.0, float(seconds)), self.remaining()), self._clock)
