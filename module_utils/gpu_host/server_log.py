"""What a server's log tells about its start-up and its last batch, read from the end and never more than needed.

A log may be appended to by one start after another, so a ready line counts only when no later start follows it, and
only when it is not older than the process. Files are read, not mapped: a log that is truncated meanwhile would end us.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import dataclass
from typing import Callable

READY = b"The server is fired up and ready to roll!"
VLLM_READY = b"Application startup complete."
# Of one server over several hosts the first alone serves; the others print this once their ranks are loaded.
LATER_RANK_READY = b"Dummy health check server started in background thread"
STARTS = (b"server_args=", b"vLLM API server version")
DRAINING = b"Draining requests and shutting down"
_BATCH = re.compile(rb"^.*(?:Prefill|Decode) batch.*$", re.MULTILINE)
_STAMP = re.compile(rb"^\[?(?:INFO )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_CHUNK = 1 << 20
_TAIL = 256 << 10
MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class LogSight:
    """One look at a log. `ready` is None when the log can't tell; `batch_at` is where its last batch line stands
    (bytes from the start, None without one), `batch_age` its age in seconds where that is certain."""

    readable: bool = False
    ready: bool | None = None
    draining: bool = False
    batch_at: int | None = None
    batch_age: float | None = None
    lines: tuple[str, ...] = ()


def look(path: str, ready_line: bytes, started: float, now: float | None = None) -> LogSight:
    """Read the log once. `started` is when the main process started, `now` the time, both in seconds since 1970."""
    moment = time.time() if now is None else now
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return LogSight()
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode):
            return LogSight()
        tail_at = max(0, facts.st_size - _TAIL)
        tail = os.pread(number, _TAIL, tail_at)
        ready, line = _ready(number, facts.st_size, ready_line)
        stamps = _STAMP.findall(tail)
        to_epoch = _clock(stamps[-1] if stamps else b"", facts.st_mtime)
        if ready and line:
            said = to_epoch(line)
            # One second less: stamps are cut to whole seconds.
            if said is not None and said < started - 1:
                ready = False  # the ready line of an earlier start
        batches = list(_BATCH.finditer(tail))
        last = batches[-1] if batches else None
        stamp = _STAMP.search(last.group()) if last else None
        said = to_epoch(stamp.group(1)) if stamp else None
        return LogSight(
            readable=True,
            ready=ready,
            draining=bool(ready) and DRAINING in tail[tail.rfind(ready_line) + 1 :],
            batch_at=tail_at + last.start() if last else None,
            batch_age=max(0.0, moment - said) if said is not None else None,
            lines=tuple(tail[-8192:].decode("utf-8", "replace").splitlines()[-20:]),
        )
    except OSError:
        return LogSight()
    finally:
        os.close(number)


def tail_lines(path: str, count: int, after: int = 0) -> tuple[str, ...]:
    """The last lines of a log behind the byte `after`; nothing when it can't be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(after, size - 65536, 0))
            text = file.read(65536).decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-count:]


def _ready(number: int, size: int, ready_line: bytes) -> tuple[bool | None, bytes]:
    """Whether the last start in the log got ready, and the stamp of the line that says so."""
    longest = max(len(ready_line), *(len(mark) for mark in STARTS)) + 64
    end = size
    lowest = max(0, size - MOST_BYTES)
    while end > lowest:
        begin = max(lowest, end - _CHUNK)
        block = os.pread(number, end - begin + longest, begin)
        at = block.rfind(ready_line)
        start = max(block.rfind(mark) for mark in STARTS)
        if at >= 0 and at > start:
            line = block[block.rfind(b"\n", 0, at) + 1 : at]
            stamp = _STAMP.match(line)
            return True, stamp.group(1) if stamp else b""
        if start >= 0:
            return False, b""
        end = begin
    return None, b""


def _clock(last_stamp: bytes, written: float) -> Callable[[bytes], float | None]:
    """How to turn a stamp (local time of the server, without a zone) into seconds since 1970.

    The last stamp can't be later than the moment of the last write: if it were in our zone, the server has another,
    and its distance to the last write (in quarters of an hour, as zones are) tells which.
    """

    def local(stamp: bytes) -> float | None:
        try:
            return time.mktime(time.strptime(stamp.decode("ascii"), "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            return None

    last = local(last_stamp)
    shift = 0.0
    if last is not None and last > written + 5:
        shift = round((written - last) / 900) * 900.0

    def convert(stamp: bytes) -> float | None:
        moment = local(stamp)
        return None if moment is None else moment + shift

    return convert
