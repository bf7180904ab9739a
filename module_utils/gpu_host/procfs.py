"""Read-only view of /proc: processes as plain data, read under any root folder.

Every reader answers ``None`` (or an empty string) for what could not be read, never an invented value: a process
may vanish, belong to another user, or have blanked its environment between two looks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from .command_line import file_name, short_name

PF_KTHREAD = 0x00200000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Inode of the PID namespace that the kernel itself starts with (PROC_PID_INIT_INO in linux/proc_ns.h).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
EXEC_SECONDS = 0.005  # longer than an exec shows an empty command line on an idle machine
EXEC_LOOKS = 10  # on a busy one it may not be its turn for a while


@dataclass(frozen=True)
class Process:
    """One process as a snapshot saw it.

    ``start_ticks`` is the raw start time (clock ticks since boot) of /proc/<pid>/stat: together with ``pid`` it
    names a process for good, which a pid alone does not. ``namespaced_pid`` is the pid inside the process's own
    PID namespace. ``exe`` is empty where the link could not be read.
    """

    pid: int
    ppid: int
    start_ticks: int
    state: str
    comm: str
    session: int
    group: int
    tty: int
    threads: int
    kernel_thread: bool
    argv: tuple[str, ...]
    exe: str
    uid: int
    namespaced_pid: int

    @property
    def title(self) -> str:
        """The first word of the command line: what setproctitle sets."""
        return self.argv[0] if self.argv else ""

    @property
    def exe_name(self) -> str:
        """File name of the executable, also when it was replaced on disk while running."""
        name = file_name(self.exe)
        return name[: -len(" (deleted)")] if name.endswith(" (deleted)") else name

    @property
    def name(self) -> str:
        """A short name for people, without options."""
        return short_name(self.argv) if self.argv else self.comm

    @property
    def gone(self) -> bool:
        """Dead but not yet reaped: holds nothing any more. A dead leader's threads can live on."""
        return self.state in ("Z", "X") and self.threads <= 1


class Proc:
    """A /proc folder. ``root`` is another folder in tests and for a process view seen from elsewhere."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._wordless: set[tuple[int, int]] = set()  # pid and start of those known to have no command line

    def _bytes(self, pid: int | str, name: str) -> bytes | None:
        try:
            descriptor = os.open(f"{self.root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            parts: list[bytes] = []
            while True:
                part = os.read(descriptor, 65536)
                if not part:
                    return b"".join(parts)
                parts.append(part)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _link(self, pid: int, name: str) -> str:
        try:
            return os.readlink(f"{self.root}/{pid}/{name}")
        except OSError:
            return ""

    def pids(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.root) if name.isdigit())

    def snapshot(self) -> dict[int, Process]:
        """Every process that can be seen, by pid. Processes that vanish meanwhile are left out.

        A process shows no command line for an instant while it is executing another program, and would be judged
        as nobody: those without one are looked at again.
        """
        found = {pid: process for pid in self.pids() if (process := self.process(pid)) is not None}
        for _ in range(EXEC_LOOKS):
            blank = [process for process in found.values() if self._may_be_executing(process)]
            if not blank:
                return found
            time.sleep(EXEC_SECONDS)
            for process in blank:
                again = self.process(process.pid)
                if again is None:
                    del found[process.pid]
                else:
                    found[process.pid] = again
        self._wordless |= {(one.pid, one.start_ticks) for one in found.values() if self._may_be_executing(one)}
        return found

    def _may_be_executing(self, process: Process) -> bool:
        if process.argv or process.kernel_thread or process.state in ("Z", "X"):
            return False
        return (process.pid, process.start_ticks) not in self._wordless

    def process(self, pid: int) -> Process | None:
        """The process under this pid, or None when there is none."""
        stat = self._bytes(pid, "stat")
        if stat is None:
            return None
        try:
            # comm may hold blanks and parentheses: the last ")" ends it.
            head, _, tail = stat.decode("utf-8", "replace").rpartition(")")
            comm = head.partition("(")[2]
            fields = tail.split()
            kernel_thread = bool(int(fields[6]) & PF_KTHREAD)
            status = b"" if kernel_thread else self._bytes(pid, "status")
            if status is None:
                return None
            return Process(
                pid=pid,
                ppid=int(fields[1]),
                start_ticks=int(fields[19]),
                state=fields[0],
                comm=comm,
                session=int(fields[3]),
                group=int(fields[2]),
                tty=int(fields[4]),
                threads=int(fields[17]),
                kernel_thread=kernel_thread,
                argv=() if kernel_thread else _words(self._bytes(pid, "cmdline") or b""),
                exe="" if kernel_thread else self._link(pid, "exe"),
                uid=0 if kernel_thread else int(_status_words(status, b"Uid:")[0]),
                namespaced_pid=int((_status_words(status, b"NSpid:") or [b"%d" % pid])[-1]),
            )
        except (IndexError, ValueError):
            return None

    def start_ticks(self, pid: int) -> int | None:
        """Start time of whoever has this pid now, in clock ticks since boot."""
        stat = self._bytes(pid, "stat")
        if stat is None:
            return None
        try:
            return int(stat.rpartition(b")")[2].split()[19])
        except (IndexError, ValueError):
            return None

    def environ(self, pid: int) -> dict[str, str] | None:
        """The environment at exec, or None when it cannot be known.

        setproctitle can overwrite the area with zeros, and a process between two images shows nothing: neither
        says that a variable is absent.
        """
        raw = self._bytes(pid, "environ")
        if raw is None or not raw.strip(b"\0"):
            return None
        pairs = (word.partition("=") for word in _words(raw))
        return {name: value for name, _, value in pairs}

    def maps(self, pid: int) -> tuple[str, ...] | None:
        """Paths of the files that the process has mapped, once each; None when unreadable."""
        raw = self._bytes(pid, "maps")
        if raw is None:
            return None
        paths = set()
        for line in raw.decode("utf-8", "replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.add(fields[5])
        return tuple(sorted(paths))

    def open_files(self, pid: int) -> tuple[str, ...] | None:
        """Link texts of the open files, once each; None when unreadable."""
        folder = f"{self.root}/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return None
        links = set()
        for name in names:
            try:
                links.add(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
        return tuple(sorted(links))

    def open_file(self, pid: int, descriptor: int) -> str:
        """Link text behind one file descriptor, or an empty string."""
        return self._link(pid, f"fd/{descriptor}")

    def cwd(self, pid: int) -> str | None:
        return self._link(pid, "cwd") or None

    def cgroups(self, pid: int | str) -> tuple[str, ...]:
        """Control group paths of the process in every mounted hierarchy, once each."""
        raw = self._bytes(pid, "cgroup") or b""
        paths = {line.split(":", 2)[2] for line in raw.decode("utf-8", "replace").splitlines() if line.count(":") >= 2}
        return tuple(sorted(paths))

    def systemd_cgroup(self, pid: int) -> str:
        """The control group in which systemd keeps the process: its own hierarchy on v1, the only one on v2."""
        unified = ""
        for line in (self._bytes(pid, "cgroup") or b"").decode("utf-8", "replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "name=systemd":
                return path
            if controllers == "":
                unified = path
        return unified

    def pid_namespace(self, pid: int | str = "self") -> int | None:
        """Inode of a process's PID namespace."""
        try:
            return os.stat(f"{self.root}/{pid}/ns/pid").st_ino
        except OSError:
            return None

    def in_guest(self) -> bool:
        """Whether we stand in a PID namespace of our own (a container or an LXC guest)."""
        inode = self.pid_namespace()
        return inode is not None and inode != INITIAL_PID_NAMESPACE

    def boot_id(self) -> str:
        return (self._bytes("sys", "kernel/random/boot_id") or b"").decode().strip()

    def start_time_epoch(self, process: Process) -> float:
        """Start time in seconds since 1970. Not from /proc/uptime or btime: lxcfs falsifies both in a guest."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + process.start_ticks / CLOCK_TICKS


def _words(raw: bytes) -> tuple[str, ...]:
    text = raw.rstrip(b"\0")
    return tuple(text.decode("utf-8", "surrogateescape").split("\0")) if text else ()


def _status_words(status: bytes, name: bytes) -> list[bytes]:
    """The words of one line of /proc/<pid>/status, none where the line is missing."""
    return status.partition(b"\n" + name)[2].partition(b"\n")[0].split()
