"""What the kernel said about GPUs: Xid errors, the driver's watchdog, hung tasks, kills for lack of memory.

Three ways are tried: /dev/kmsg, `dmesg`, `journalctl -k`. A log that can't be read is unavailable, not empty: then
`available` is false and `why` says what stood in the way.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Callable

from .child import Completed, run_command
from .deadline import Deadline


@dataclass(frozen=True)
class KernelEvent:
    """One message. `seconds` since boot (the log's own clock), `time` the same as seconds since 1970."""

    kind: str  # 'xid' | 'rc_watchdog' | 'gpu_lost' | 'hung_task' | 'out_of_memory'
    seconds: float
    time: float
    text: str
    xid: int | None = None
    pci_bus_id: str = ""  # as printed: '0000:3b:00'
    pid: int | None = None
    name: str = ""


@dataclass(frozen=True)
class KernelLog:
    available: bool
    why: str  # why it could not be read, or which way it was read
    events: list[KernelEvent]


_KINDS = (
    ("xid", re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")),
    ("rc_watchdog", re.compile(r"NVRM:.*RC watchdog")),
    (
        "gpu_lost",
        re.compile(r"NVRM:.*?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)?:? ?GPU has fallen off"),
    ),
    ("hung_task", re.compile(r"INFO: task (?P<name>.+):(?P<pid>\d+) blocked for more than")),
    ("out_of_memory", re.compile(r"Killed process (?P<pid>\d+) \((?P<name>.*?)\)")),
)
_XID_PID = re.compile(r"\bpid=['\"]?(?P<pid>\d+)")
_XID_NAME = re.compile(r"\bname=['\"]?(?P<name>[^,'\"<>]+)")
_STAMPED = re.compile(r"^(?:<\d+>)?\[\s*(?P<seconds>\d+\.\d+)\](?: \S+ kernel:)? ?(?P<text>.*)$")


def read(
    deadline: Deadline,
    since: float = 0.0,
    kmsg: str = "/dev/kmsg",
    run: Callable[[list[str], Deadline], Completed] = run_command,
    boot_time: float | None = None,
) -> KernelLog:
    """The events since `since` (seconds since 1970; 0: all that the log still holds), oldest first.

    `boot_time` is when the log's clock stood at 0; measured here unless given. (/proc/uptime is no help: lxcfs shows
    the guest's own.)
    """
    boot = time.time() - time.monotonic() if boot_time is None else boot_time
    reasons = []
    for name, way in (
        (kmsg, lambda: _from_kmsg(kmsg, deadline)),
        ("dmesg", lambda: _from_command(run(["dmesg", "--raw"], deadline), "dmesg")),
        ("journalctl", lambda: _from_command(run(_JOURNAL, deadline), "journalctl")),
    ):
        try:
            lines = way()
        except _Unreadable as reason:
            reasons.append(f"{name}: {reason}")
            continue
        return KernelLog(True, f"read from {name}", parse(lines, boot, since))
    return KernelLog(False, "The kernel log can't be read here (" + "; ".join(reasons) + ").", [])


def parse(lines: Iterable[tuple[float, str]], boot_time: float, since: float = 0.0) -> list[KernelEvent]:
    """Events in (seconds since boot, text) lines."""
    events = []
    for seconds, text in lines:
        if boot_time + seconds < since:
            continue
        for kind, pattern in _KINDS:
            found = pattern.search(text)
            if found:
                events.append(_event(kind, found.groupdict(), seconds, boot_time + seconds, text))
                break
    return events


def _event(kind: str, parts: dict[str, str | None], seconds: float, when: float, text: str) -> KernelEvent:
    pid, name = parts.get("pid"), parts.get("name")
    if kind == "xid":
        by_pid, by_name = _XID_PID.search(text), _XID_NAME.search(text)
        pid = by_pid.group("pid") if by_pid else None
        name = by_name.group("name") if by_name else None
    xid = parts.get("xid")
    return KernelEvent(
        kind=kind,
        seconds=seconds,
        time=when,
        text=text.strip(),
        xid=None if xid is None else int(xid),
        pci_bus_id=(parts.get("pci") or "").rstrip(":"),
        pid=None if pid is None else int(pid),
        name=(name or "").strip(),
    )


class _Unreadable(Exception):
    pass


_JOURNAL = ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"]


def _from_kmsg(path: str, deadline: Deadline) -> list[tuple[float, str]]:
    """Every record of the ring buffer, one a read: `6,1234,5678901,-;text`, the third number in microseconds."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _Unreadable(error.strerror) from None
    try:
        if not stat.S_ISCHR(os.fstat(number).st_mode):
            raise _Unreadable("no kernel log device (a container's stand-in)")
        records = []
        while not deadline.expired():
            try:
                record = os.read(number, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: go on with the oldest that is left
                    continue
                raise _Unreadable(error.strerror) from None
            if not record:
                break
            records.append(record)
    finally:
        os.close(number)
    lines = parse_records(records)
    if not lines:
        raise _Unreadable("it holds no kernel message (a container's stand-in)")
    return lines


def parse_records(records: Iterable[bytes]) -> list[tuple[float, str]]:
    lines = []
    for record in records:
        head, separator, text = record.decode("utf-8", "replace").partition(";")
        fields = head.split(",")
        if separator and len(fields) >= 3 and fields[2].isdigit():
            lines.append((int(fields[2]) / 1e6, text.split("\n", 1)[0]))
    return lines


def _from_command(done: Completed, name: str) -> list[tuple[float, str]]:
    if done.trouble:
        raise _Unreadable(done.trouble)
    lines = parse_stamped(done.stdout)
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip() or "it printed no kernel message").splitlines()[0]
        raise _Unreadable(said)
    return lines


def parse_stamped(text: str) -> list[tuple[float, str]]:
    """Lines of `dmesg --raw` or of `journalctl -o short-monotonic`."""
    found = [_STAMPED.match(line) for line in text.splitlines()]
    return [(float(one.group("seconds")), one.group("text")) for one in found if one]
