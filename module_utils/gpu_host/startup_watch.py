"""Slow or stuck: whether a server that starts does anything. Pure; clocks and readings come from outside.

A start of 25 minutes is no failure, and neither is silence: weights are repacked, kernels compiled, graphs captured
without a line in the log. Stuck means that none of these was seen for a time: a log line that is no access line, CPU
time of the server's processes, a compiler among them, bytes read, GPU memory that changes, a process that came or went.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TICKS = 100  # clock ticks in a second of CPU time, as /proc counts
# CPU time below this share of one core is what a waiting server uses: timers, polling, a lock that is tried again.
IDLE_SHARE = 0.03
LEAST_TICKS = 10
LEAST_READ = 64 << 10  # bytes
LEAST_MIB = 2
COMPILERS = ("nvcc", "ninja", "cicc", "ptxas", "cc1plus", "cudafe++", "fatbinary", "nvlink")
# Seconds for which CPU time alone is a sign of work, by phase; elsewhere for ever. Ranks that spin in a first
# collective which never ends (peer-to-peer broken by ACS or IOMMU) keep a core busy each, with the GPUs at 100 %.
CPU_ALONE = {"distributed": 120.0}


@dataclass(frozen=True)
class Look:
    """The server's processes at one moment. `at` in seconds; counters only ever grow while `pids` stay the same.

    `log_lines` counts lines that are no access lines; `gpu_mib` is None where it can't be read."""

    at: float
    phase: str
    log_lines: int
    cpu_ticks: int
    read_bytes: int
    compilers: tuple[str, ...] = ()
    gpu_mib: int | None = None
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Watch:
    """`mark` is the look at which work was last seen, `strong_at` the moment of the last sign besides CPU time."""

    mark: Look
    worked_at: float
    strong_at: float
    sign: str = "its start"

    def idle(self, now: float) -> float:
        """Seconds without any sign of work."""
        return max(0.0, now - self.worked_at)

    def to_dict(self) -> dict[str, Any]:
        mark = {**self.mark.__dict__, "pids": sorted(self.mark.pids), "compilers": list(self.mark.compilers)}
        return {"mark": mark, "worked_at": self.worked_at, "strong_at": self.strong_at, "sign": self.sign}


def begin(look: Look) -> Watch:
    return Watch(mark=look, worked_at=look.at, strong_at=look.at)


def from_dict(data: Mapping[str, Any]) -> Watch:
    mark = dict(data["mark"])
    mark.update(pids=frozenset(mark["pids"]), compilers=tuple(mark["compilers"]))
    return Watch(Look(**mark), data["worked_at"], data["strong_at"], data["sign"])


def advance(watch: Watch, look: Look) -> Watch:
    """The watch after one more look."""
    strong = _strong(watch.mark, look)
    if strong:
        return Watch(look, look.at, look.at, strong)
    if _cpu(watch.mark, look) and look.at - watch.strong_at <= CPU_ALONE.get(look.phase, float("inf")):
        return Watch(look, look.at, watch.strong_at, "CPU time")
    return watch


def _strong(mark: Look, look: Look) -> str:
    """The sign of work between the two looks besides CPU time, or an empty string."""
    if look.log_lines != mark.log_lines or look.phase != mark.phase:
        return "a log line"
    if look.compilers:
        return f"a compiler ({', '.join(look.compilers)})"
    if look.pids != mark.pids:
        return "a process that came or went"
    if look.read_bytes - mark.read_bytes >= LEAST_READ:
        return "disk reads"
    if look.gpu_mib is not None and mark.gpu_mib is not None and abs(look.gpu_mib - mark.gpu_mib) >= LEAST_MIB:
        return "GPU memory"
    return ""


def _cpu(mark: Look, look: Look) -> bool:
    used = look.cpu_ticks - mark.cpu_ticks
    return used >= max(LEAST_TICKS, IDLE_SHARE * TICKS * (look.at - mark.at))
