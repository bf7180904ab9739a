"""The run records of resets: one JSON line a run and host in ``artifacts/resets.jsonl`` on the control node."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
REPOSITORY = Path(__file__).resolve().parent.parent.parent
FILE_NAME = "resets.jsonl"

# The keys of a record in the order in which they are written; ``host`` early, where a search finds it.
KEYS = (
    "schema",
    "run_id",
    "host",
    "play",
    "schedule",
    "servers",
    "policy",
    "router",
    "started",
    "verdict",
    "reason",
    "simulated",
    "gpus",
    "killed",
    "spared",
    "cleaned",
    "kept",
    "evidence",
    "kernel_events",
    "respawners",
    "ports",
    "shm_free_mib",
    "source",
    "seconds",
    "earlier",
)
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(("servers", "gpus", "killed", "spared", "cleaned", "kept", "kernel_events"), ()),
    **dict.fromkeys(("respawners", "ports", "earlier"), ()),
    **dict.fromkeys(("play", "schedule", "reason", "evidence", "policy", "source"), ""),
    "simulated": False,
    "shm_free_mib": None,
    "seconds": {},
    "router": {},
}


def artifacts_folder(environment: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """Where records are kept: ``GPU_ARTIFACTS`` where it is set, else ``artifacts`` in the repository."""
    return Path(environment.get("GPU_ARTIFACTS") or REPOSITORY / "artifacts")


def new_run_id(now: float | None = None) -> str:
    """An id for one reset of one host: sorts by time, never twice the same, fit for a folder name."""
    now = time.time() if now is None else now
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{moment}.{int(now * 1000) % 1000:03d}Z-{secrets.token_hex(6)}"


def timestamp(now: float | None = None) -> str:
    """ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))


def who() -> str:
    """Who runs this on the control node."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def record(result: dict[str, Any], host: str, **overrides: Any) -> dict[str, Any]:
    """A complete record from what a reset returned; what it did not say is empty, never missing."""
    known = {**_EMPTY, **{key: result[key] for key in KEYS if result.get(key) is not None}}
    known.update(schema=SCHEMA, host=host, **overrides)
    known.setdefault("verdict", "unknown")
    known["run_id"] = known.get("run_id") or new_run_id()
    known["started"] = known.get("started") or timestamp()
    extra = {key: value for key, value in overrides.items() if key not in KEYS}
    return {**{key: known[key] for key in KEYS}, **extra}


def line(one: dict[str, Any]) -> bytes:
    return json.dumps(one, ensure_ascii=True, default=str).encode() + b"\n"


@dataclass(frozen=True)
class Place:
    """How far a file of records was written at some moment: its inode and its bytes, nothing where it was not there."""

    inode: int = 0
    size: int = 0

    @classmethod
    def at_the_end_of(cls, file: Path) -> Place:
        try:
            facts = file.stat()
        except OSError:
            return cls()
        return cls(facts.st_ino, facts.st_size)


START = Place()


def append(file: Path, new: Iterable[dict[str, Any]], since: Place = START) -> list[dict[str, Any]]:
    """Append records whose run id and host are not in the file yet; returns those written.

    ``since`` is where the file ended before these runs began: what was written before, years of it, is not searched.
    Under a lock, so that concurrent runs lose no line; nothing already written is ever changed. A last line that
    was cut short (a full disk, a crash) is ended by a newline first, so that it does not swallow the next one.
    Raises OSError where the file can't be written; then nothing of these records is in it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        facts = os.fstat(descriptor)
        size = facts.st_size
        same_file = since.inode == facts.st_ino and since.size <= size  # or was it rotated meanwhile?
        first = since.size if same_file else 0
        written: list[dict[str, Any]] = []
        for one in new:
            if not any(_same_run(one, other) for other in written) and not _holds(descriptor, first, size, one):
                written.append(one)
        text = b"".join(line(one) for one in written)
        if text and size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if text:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        return written
    finally:
        os.close(descriptor)  # releases the lock


def _same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["run_id"], one["host"]) == (other["run_id"], other["host"])


def _holds(descriptor: int, first: int, size: int, one: dict[str, Any]) -> bool:
    """Whether the record is in the file, at its byte ``first`` or after it."""
    if first >= size:
        return False
    needle = f'"run_id": {json.dumps(one["run_id"])}, "host": {json.dumps(one["host"])}'.encode()
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as content:
        return content.find(needle, first) >= 0


def last_recorded_run(file: Path, host: str) -> str:
    """The run id of a host's newest record, '' where it has none: the host then knows what was never recorded.

    A run that never reached the host, or left it alone, is not in the host's own journal.
    """
    found = _newest(file, host, lambda one: one.get("verdict") not in ("skipped", "unreachable"))
    return str(found["run_id"]) if found else ""


def last_state(file: Path, host: str) -> str:
    """What a host was when it was last judged, ``clean`` or ``dirty``; '' where it never was."""
    found = _newest(file, host, lambda one: one.get("verdict") in ("clean", "dirty") and "guest" not in one)
    return str(found["verdict"]) if found else ""


def hosts_of_play(file: Path, play: str, first: int = 0) -> set[str]:
    """The hosts that have a record of a run of the play.

    ``first`` is the inode of the file at the run's beginning: where it was rotated since, both are read. Raises
    LookupError where that one is gone.
    """
    there = [one for one in file.parent.glob(f"{file.name}*") if one.is_file()]
    inodes = {one.stat().st_ino for one in there}
    if first and first not in inodes:
        raise LookupError(f"{file} was rotated while that run went on, and what was in it can't be read here")
    return {host for one in there for host in _hosts_of_play(one, play)}


def _hosts_of_play(file: Path, play: str) -> set[str]:
    needle = f'"play": {json.dumps(play)}, '.encode()
    found = set()
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(needle)
            while at >= 0:
                stop = content.find(b"\n", at)
                stop = stop if stop >= 0 else len(content)
                with contextlib.suppress(ValueError, AttributeError):  # a broken line
                    one = json.loads(content[content.rfind(b"\n", 0, at) + 1 : stop])
                    if one.get("play") == play:
                        found.add(str(one.get("host")))
                at = content.find(needle, stop)
    except (OSError, ValueError):  # ValueError: an empty file can't be mapped
        pass
    return found


def unrecorded(file: Path, some: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those records whose run and host are not in the file."""
    some = list(some)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return some
    try:
        size = os.fstat(descriptor).st_size
        return [one for one in some if not _holds(descriptor, 0, size, one)]
    finally:
        os.close(descriptor)


def _newest(file: Path, host: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """A host's newest record of those wanted.

    Searches from the end, since the file grows for years and each host's process asks for its own line.
    """
    needle = f'"host": {json.dumps(host)}, '.encode()
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            while (at := content.rfind(needle, 0, end)) >= 0:
                start = content.rfind(b"\n", 0, at) + 1
                stop = content.find(b"\n", at)
                try:
                    found = json.loads(content[start : stop if stop >= 0 else len(content)])
                    if found.get("host") == host and isinstance(found.get("run_id"), str) and wanted(found):
                        return dict(found)
                except (ValueError, AttributeError):
                    pass  # a broken line: the one before it counts
                end = start
    except (OSError, ValueError):  # ValueError: an empty file can't be mapped
        pass
    return None
