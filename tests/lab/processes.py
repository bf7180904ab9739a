"""The processes of a host, read from the machine's own /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process of a host, seen from outside. `pid` and `ppid` are the host's own numbers; ticks are 1/100 s."""

    pid: int
    ppid: int
    state: str
    command: tuple[str, ...]
    comm: str
    uid: int
    start_ticks: int
    outside_pid: int

    @property
    def line(self) -> str:
        return " ".join(self.command) or f"[{self.comm}]"


def in_namespace(init: int) -> list[Process]:
    """Every process of the PID namespace of `init`, in the order of their own pids."""
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    found = (_process(int(entry.name), namespace) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    known = {process.outside_pid: process for process in found if process is not None}
    inside = {outside: process.pid for outside, process in known.items()}
    renumbered = [replace(process, ppid=inside.get(process.ppid, 0)) for process in known.values()]
    return sorted(renumbered, key=lambda process: process.pid)


def _process(outside: int, namespace: str) -> Process | None:
    """One process of a PID namespace, with the outer parent's pid as `ppid`; None for others and for those gone."""
    folder = Path(f"/proc/{outside}")
    try:
        if os.readlink(folder / "ns" / "pid") != namespace:
            return None
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        rest = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
    except (OSError, IndexError):
        return None
    return Process(
        pid=int(status["NSpid"].split()[-1]),
        ppid=int(status["PPid"]),
        state=status["State"][0],
        command=tuple(command.split("\0")) if command else (),
        comm=status["Name"],
        uid=int(status["Uid"].split()[0]),
        start_ticks=int(rest[19]),
        outside_pid=outside,
    )


def start_ticks(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def ancestors() -> set[int]:
    """This process and those above it."""
    found = {os.getpid()}
    pid = os.getppid()
    while pid > 0:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found
