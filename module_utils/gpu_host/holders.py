"""Who has a file open, mapped, or as its working folder: by device and inode, over all processes that can be seen."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Callable

from .filesystems import mounts
from .procfs import Proc, Process

FileId = tuple[int, int]  # device and inode, as stat tells them

# These run as the user but let nobody look into them (they are not dumpable), and hold no file of anybody else.
SESSION_HELPERS = frozenset(("(sd-pam)", "sshd", "sshd-session", "sshd-auth", "ssh-agent", "gpg-agent", "fusermount3"))
# A line of /proc/<pid>/maps with a file behind it: device, inode, path.
_MAPPED_FILE = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*) *(.*)$", re.MULTILINE)
_NO_FILES = ("socket:", "pipe:", "anon_inode:", "/dev/nvidia", "/dev/null", "/dev/pts/", "/proc/", "/sys/")


@dataclass
class Holders:
    """One look. ``unreadable`` are the processes whose open files or mappings could not be read.

    ``processes`` are all that live, also those outside of the scope that was looked at.
    """

    open: dict[FileId, set[int]] = field(default_factory=dict)
    mapped: dict[FileId, set[int]] = field(default_factory=dict)
    mapped_names: dict[str, set[int]] = field(default_factory=dict)
    working_in: dict[FileId, set[int]] = field(default_factory=dict)
    unreadable: list[Process] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)

    def of(self, file: FileId, name: str) -> list[int]:
        """Pids that have the file open or mapped.

        A mapping counts by its file name as well: on overlay and btrfs /proc/<pid>/maps shows other device numbers
        than stat does.
        """
        found = self.open.get(file, set()) | self.mapped.get(file, set()) | self.mapped_names.get(name, set())
        return sorted(found)

    def could_hold(self, facts: os.stat_result) -> list[Process]:
        """The unreadable processes that may open this file: its owner's, root's, and all when others may read it."""
        for_others = bool(facts.st_mode & 0o066)
        return [process for process in self.unreadable if for_others or process.uid in (0, facts.st_uid)]

    def named(self, pids: Collection[int]) -> str:
        """The processes for a message: at most three, with their names."""
        first = [f"{self.processes[pid].name} (pid {pid})" for pid in sorted(pids)[:3]]
        more = len(pids) - len(first)
        return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def look(
    proc: Proc, sees: Callable[[Process], bool] = lambda process: True, as_if_dead: Collection[int] = ()
) -> Holders:
    """Look at every process that `sees` admits, but for those to be judged as dead."""
    holders = Holders()
    networks: dict[str, tuple[str, ...]] = {}
    holders.processes = {pid: process for pid, process in proc.snapshot().items() if pid not in as_if_dead}
    for pid, process in holders.processes.items():
        if process.kernel_thread or process.gone or not sees(process):
            continue
        base = _readable_task(proc, process)
        space = _link(f"{base}/ns/mnt")
        if space not in networks:
            networks[space] = tuple(mount.point for mount in mounts(proc.root, pid) if mount.may_hang)
        if not _read_one(holders, base, pid, networks[space]):
            again = proc.process(pid)
            still_there = again is not None and again.start_ticks == process.start_ticks and not again.gone
            if still_there and not _holds_nothing(process):
                holders.unreadable.append(process)
    return holders


def _holds_nothing(process: Process) -> bool:
    """Unreadable, but no holder of a server's files: an init with more rights than our root, a session's helper."""
    return process.comm in SESSION_HELPERS or (process.pid == 1 and process.uid == 0 and os.geteuid() == 0)


def _readable_task(proc: Proc, process: Process) -> str:
    """The process's folder, or that of a living thread where its first thread has ended before the others."""
    base = f"{proc.root}/{process.pid}"
    if process.state not in ("Z", "X"):
        return base
    try:
        tasks = sorted(os.listdir(f"{base}/task"), key=int)
    except (OSError, ValueError):
        return base
    for task in tasks:
        try:
            with open(f"{base}/task/{task}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state not in (b"Z", b"X"):
            return f"{base}/task/{task}"
    return base


def _read_one(holders: Holders, base: str, pid: int, networks: tuple[str, ...]) -> bool:
    """Note what this process holds; False when something of it could not be read."""
    try:
        numbers = os.listdir(f"{base}/fd")
        with open(f"{base}/maps", "rb") as file:
            maps = file.read()
    except OSError:
        return False
    for number in numbers:
        file_id = _target(f"{base}/fd/{number}", networks)
        if file_id is not None:
            holders.open.setdefault(file_id, set()).add(pid)
    for major, minor, inode, path in set(_MAPPED_FILE.findall(maps)):
        file_id = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
        holders.mapped.setdefault(file_id, set()).add(pid)
        name = os.fsdecode(path.rpartition(b"/")[2]).removesuffix(" (deleted)")
        holders.mapped_names.setdefault(name, set()).add(pid)
    folder = _target(f"{base}/cwd", networks)
    if folder is not None:
        holders.working_in.setdefault(folder, set()).add(pid)
    return True


def _target(link: str, networks: tuple[str, ...]) -> FileId | None:
    """What the link of /proc leads to; None for what is no file or lies where asking may hang (a dead NFS server)."""
    text = _link(link)
    if not text.startswith("/") or text.startswith(_NO_FILES):
        return None
    if any(text == point or text.startswith(point.rstrip("/") + "/") for point in networks if point != "/"):
        return None
    try:
        facts = os.stat(link)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
