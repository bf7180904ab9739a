"""Processes of this machine as plain facts, and the ones that the session itself started.

Reads /proc on its own, not through the code under test: what a process is, the session knows from having
started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Put into the environment of everything that belongs to one server, so that orphans are found again.
MARK = "GPU_SESSION_MARK"


@dataclass(frozen=True)
class Facts:
    """One process at one moment. `start_ticks` (clock ticks since boot) tells reused pids apart."""

    pid: int
    ppid: int
    start_ticks: int
    state: str
    comm: str
    session: int
    group: int
    argv: tuple[str, ...] = ()
    exe: str = ""
    nodes: dict[str, int] = field(default_factory=dict)  # /dev/nvidia<x> -> open file descriptors

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    @property
    def title(self) -> str:
        return self.argv[0] if self.argv else ""

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def read_facts(pid: int, *, nodes: bool = False) -> Facts | None:
    """What /proc says of one process, or None when there is none."""
    folder = Path("/proc", str(pid))
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        argv = tuple((folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
    except OSError:
        return None
    try:
        exe = os.readlink(folder / "exe")
    except OSError:
        exe = ""
    return Facts(
        pid=pid,
        ppid=int(fields[1]),
        start_ticks=int(fields[19]),
        state=fields[0],
        comm=head.partition("(")[2],
        session=int(fields[3]),
        group=int(fields[2]),
        argv=argv if argv != ("",) else (),
        exe=exe,
        nodes=open_nodes(pid) if nodes else {},
    )


def open_nodes(pid: int) -> dict[str, int]:
    """How many file descriptors the process has on each NVIDIA device node."""
    counts: dict[str, int] = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return counts
    for name in names:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if link.startswith("/dev/nvidia"):
            counts[link] = counts.get(link, 0) + 1
    return counts


def all_facts(*, nodes: bool = False) -> list[Facts]:
    """Every process that can be seen now."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [facts for facts in (read_facts(pid, nodes=nodes) for pid in pids) if facts is not None]


def is_alive(key: tuple[int, int]) -> bool:
    """Whether this very process (pid and start time) still runs; a zombie does not."""
    facts = read_facts(key[0])
    return facts is not None and facts.start_ticks == key[1] and facts.alive


def variable(pid: int, name: str) -> str:
    """What the environment that the process was started with has for this name, or an empty string."""
    try:
        raw = Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return ""
    for word in raw.split(b"\0"):
        if word.startswith(name.encode() + b"="):
            return word.split(b"=", 1)[1].decode(errors="replace")
    return ""


def mark_of(pid: int) -> str:
    """The session's mark in the environment that the process was started with, or an empty string."""
    return variable(pid, MARK)


def wait_until(condition: Callable[[], object], seconds: float, interval: float = 0.05) -> bool:
    """Poll until the condition holds; False when it did not within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(interval)


def adopter() -> Facts | None:
    """Who gets a process of this session whose parent ends: the machine's init, or a subreaper on the way."""
    done = subprocess.run(
        ["bash", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    orphan = read_facts(int(done.stdout))
    if orphan is None:
        return None
    found = read_facts(orphan.ppid)
    os.kill(orphan.pid, signal.SIGKILL)
    return found


class Tracker(threading.Thread):
    """Follows, every 0.2 s, all processes that ever belonged to a server of this session.

    A member is a descendant of a root process or carries the server's mark; once seen it stays a member, so an
    orphan is still known when its parent is gone.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._lock = threading.Lock()
        self._roots: dict[str, tuple[int, int]] = {}
        self._members: dict[str, dict[tuple[int, int], Facts]] = {}
        self._stop = threading.Event()

    def add(self, name: str, root: tuple[int, int]) -> None:
        with self._lock:
            self._roots[name] = root
            self._members.setdefault(name, {})
        self.look()

    def look(self) -> None:
        """One pass over /proc."""
        with self._lock:
            now = {facts.pid: facts for facts in all_facts()}
            marks = {pid: mark_of(pid) for pid in now}
            for name, members in self._members.items():
                inside = {
                    key[0]
                    for key in (*members, self._roots[name])
                    if key[0] in now and now[key[0]].start_ticks == key[1]
                }
                grew = True
                while grew:
                    fresh = {
                        pid
                        for pid, facts in now.items()
                        if pid not in inside and (facts.ppid in inside or marks[pid] == name)
                    }
                    grew = bool(fresh)
                    inside |= fresh
                for pid in inside:
                    members[now[pid].key] = now[pid]

    def members(self, name: str) -> list[Facts]:
        """All processes that ever belonged to the server, as last seen."""
        with self._lock:
            return sorted(self._members[name].values(), key=lambda facts: facts.start_ticks)

    def alive(self, name: str) -> list[Facts]:
        """Those of them that run now, looked at afresh."""
        self.look()
        return [facts for facts in self.members(name) if is_alive(facts.key)]

    def names(self) -> list[str]:
        with self._lock:
            return list(self._members)

    def run(self) -> None:
        while not self._stop.wait(0.2):
            self.look()

    def close(self) -> None:
        self._stop.set()


def plain(facts: Iterable[Facts]) -> list[dict[str, Any]]:
    """For a JSON line."""
    return [asdict(one) for one in facts]
