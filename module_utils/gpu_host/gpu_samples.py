"""GPU memory and power through a span of time: looks at the GPUs at an interval, in a thread beside the work.

Energy is the area under the power readings (trapezoids), cut at the span's ends. The driver's own power figure is an
average over up to a second, so a span shorter than a few looks has no energy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable

from .deadline import Deadline
from .nvml import Reader
from .readings import Readings, UnknownGpu, select

# Of one look; a driver that hangs costs a look, not the measurement.
_LOOK_SECONDS = 5.0
_FEWEST = 3


@dataclass(frozen=True)
class Sample:
    """One look: seconds of the monotonic clock, watts and MiB by UUID (those that could be read)."""

    at: float
    watts: dict[str, float] = field(default_factory=dict)
    mib: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Energy:
    """Of all GPUs together. None: not measurable, and `why` says why."""

    joules: float | None
    watts_mean: float | None
    why: str = ""


class Sampler:
    """Looks at these GPUs (UUIDs; none for all) every `interval` seconds between start() and stop()."""

    def __init__(self, uuids: Sequence[str], interval: float, reader: Reader | None = None) -> None:
        self._uuids = list(uuids)
        self._interval = interval
        self._reader = reader or Reader()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []
        self.trouble = ""
        self.driver = ""

    def start(self) -> None:
        """Make the first look before anything else (NVML starts then), the others in the thread."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(_LOOK_SECONDS + self._interval + 1)
        self._reader.close()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._look()
        self._look()

    def _look(self) -> None:
        began = time.monotonic()
        readings = self._reader.read(Deadline(_LOOK_SECONDS))
        sample, self.trouble = sample_of(readings, self._uuids, (began + time.monotonic()) / 2, self.trouble)
        self.driver = readings.driver_version or self.driver
        if sample is not None:
            self.samples.append(sample)


def sample_of(readings: Readings, uuids: Sequence[str], at: float, trouble: str = "") -> tuple[Sample | None, str]:
    """The sample in one reading, None when it has no GPU; and why something is missing ('' or as it was)."""
    try:
        gpus = select(readings, uuids)
    except UnknownGpu as error:
        return None, str(error)
    if not gpus:
        return None, readings.error or "The host has no GPU that can be read."
    missing = next((gpu for gpu in gpus if gpu.power_watts is None), None)
    if missing is not None:
        words = missing.errors.get("power_watts") or missing.errors.get("gpu") or readings.error or "no reason given"
        trouble = f"GPU {missing.index} does not tell its power ({words})."
    return (
        Sample(
            at,
            {gpu.uuid: gpu.power_watts for gpu in gpus if gpu.power_watts is not None},
            {gpu.uuid: gpu.used_mib for gpu in gpus if gpu.used_mib is not None},
        ),
        trouble,
    )


def most_mib(samples: Sequence[Sample]) -> dict[str, int]:
    """The most memory of each GPU in use at any look, MiB."""
    found: dict[str, int] = {}
    for sample in samples:
        for uuid, mib in sample.mib.items():
            found[uuid] = max(mib, found.get(uuid, 0))
    return found


def energy(samples: Sequence[Sample], began: float, ended: float, trouble: str = "") -> Energy:
    """Between these two moments of the monotonic clock. A GPU whose power is missing spoils the sum."""
    inside = [sample for sample in samples if began <= sample.at <= ended]
    if not samples:
        return Energy(None, None, trouble or "The GPUs could not be read.")
    if len(inside) < _FEWEST:
        return Energy(
            None,
            None,
            f"The run of {ended - began:.1f} s saw {len(inside)} readings of the power; {_FEWEST} are needed.",
        )
    gpus = {uuid for sample in samples for uuid in (*sample.mib, *sample.watts)}
    total = 0.0
    for uuid in gpus:
        line = [(sample.at, sample.watts[uuid]) for sample in samples if uuid in sample.watts]
        if not line or (len(line) < len(samples) and trouble):
            return Energy(None, None, trouble or "A GPU does not tell its power.")
        total += _area(line, began, ended)
    return Energy(total, total / (ended - began))


def _area(line: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Under a line of (moment, watts), held level before its first and after its last point; joules."""
    value = _value(line)
    inner = [(at, watts) for at, watts in line if began < at < ended]
    points = [(began, value(began)), *inner, (ended, value(ended))]
    return sum((b - a) * (one + other) / 2 for (a, one), (b, other) in zip(points, points[1:]))


def _value(line: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    def at(moment: float) -> float:
        before = [point for point in line if point[0] <= moment]
        after = [point for point in line if point[0] >= moment]
        if not before or not after:
            return (after[0] if after else before[-1])[1]
        (a, one), (b, other) = before[-1], after[0]
        return one if a == b else one + (other - one) * (moment - a) / (b - a)

    return at
