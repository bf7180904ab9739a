"""The breaker: more newly dirty hosts than a stated share stop a run, and the next ones, until a person clears it.

A host is newly dirty when it is dirty now and was not when its state was last recorded. What is stopped outlives the
run, in ``breaker.json`` beside the records, one entry for each inventory: people and schedules share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import whole_file

FILE_NAME = "breaker.json"
SCHEMA = 1
LEAST_DIRTY = 2  # one host is no pattern
# What a host of a run counts as.
NEWLY_DIRTY, SKIPPED, DONE = "newly dirty", "skipped", "done"


@dataclass(frozen=True)
class Trip:
    """A run that was stopped."""

    fleet: str  # the inventory, by its paths
    since: str  # ISO 8601, UTC
    play: str
    schedule: str
    share: float
    hosts: int  # that the run was to reset
    newly_dirty: tuple[str, ...]

    @property
    def sentence(self) -> str:
        run = f"the schedule {self.schedule}" if self.schedule else "a run"
        named = ", ".join(self.newly_dirty[:10]) + (", ..." if len(self.newly_dirty) > 10 else "")
        are = "is newly dirty" if len(self.newly_dirty) == 1 else "are newly dirty"
        return (
            f"the breaker stopped {run} at {self.since}, since {len(self.newly_dirty)} of {self.hosts} hosts {are} or"
            f" did not get their server back ({named}), more than {self.share:.0%}"
        )


class Unreadable(Exception):
    """The breaker's file is there and can't be understood; the text says what to do."""


def fleet(sources: Sequence[str]) -> str:
    """The name of an inventory: the real paths of its sources, or the host lists as they were given."""
    return ", ".join(one if "," in one else os.path.realpath(one) for one in sources)


def tripped(file: Path, name: str) -> Trip | None:
    """What stopped runs over this inventory, None where nothing did. Raises Unreadable: in doubt, nothing is begun."""
    return next((one for one in _read(file) if one.fleet == name), None)


def trip(file: Path, new: Trip) -> None:
    """Keep that a run was stopped; the first one stays. Raises OSError or Unreadable."""
    with _locked(file):
        others = _read(file)
        if all(one.fleet != new.fleet for one in others):
            _write(file, [*others, new])


def clear(file: Path, name: str) -> Trip | None:
    """Let runs over this inventory go on; returns what had stopped them. Raises OSError or Unreadable."""
    if not file.exists():
        return None
    with _locked(file):
        there = _read(file)
        _write(file, [one for one in there if one.fleet != name])
        return next((one for one in there if one.fleet == name), None)


def _read(file: Path) -> list[Trip]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [Trip(**{**one, "newly_dirty": tuple(one["newly_dirty"])}) for one in content["stopped"]]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(
            f"{file} can't be read ({type(error).__name__}: {error}), so nobody knows whether the breaker stopped runs"
            " over these hosts: look at it, and remove it when they may go on"
        ) from error


def _write(file: Path, stopped: Sequence[Trip]) -> None:
    content = {"schema": SCHEMA, "stopped": [asdict(one) for one in stopped]}
    whole_file.write(file, json.dumps(content, indent=1) + "\n")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def too_many(newly_dirty: int, hosts: int, share: float) -> bool:
    """Whether that many newly dirty ones of the hosts that a run resets are more than the share allows."""
    return newly_dirty > share * hosts and (newly_dirty >= LEAST_DIRTY or share == 0)


class Tally:
    """What one run has come to so far, in a folder that its worker processes share and that ends with the run.

    Each host is counted by its own worker before that worker takes another host, so no host is begun on an old count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def decide(self, unit: str, reason: str) -> str:
        """What was decided first for a unit of hosts: '' to go on, or why it is skipped. It holds for all of them."""
        file = self._file("decided", unit)
        self.folder.mkdir(exist_ok=True)
        temporary = self.folder / f".{os.getpid()}"
        temporary.write_text(reason, encoding="utf-8")
        try:
            os.link(temporary, file)  # appears with its content, unlike a file that is opened and then written
            return reason
        except FileExistsError:
            return file.read_text(encoding="utf-8")
        finally:
            temporary.unlink()

    def decided(self, unit: str) -> str | None:
        """The decision for a unit, None where there is none yet."""
        return _text(self._file("decided", unit))

    def ended(self, host: str, verdict: str) -> None:
        """Let the other nodes of a host's server know what came of it."""
        temporary = self.folder / f".{os.getpid()}"
        temporary.write_text(verdict, encoding="utf-8")
        temporary.replace(self._file("ended", host))

    def outcome(self, host: str) -> str | None:
        """The verdict that another node of the server ended with, None while it goes on."""
        return _text(self._file("ended", host))

    def count(self, host: str, kind: str) -> dict[str, str]:
        """Count a host as one of the kinds; returns what each host so far counts as, by its last entry."""
        self.folder.mkdir(exist_ok=True)
        descriptor = os.open(self.folder / "tally", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps([host, kind]).encode() + b"\n")
            entries = os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines() if kind != DONE else []
        finally:
            os.close(descriptor)
        return dict(json.loads(entry) for entry in entries) if entries else {host: kind}

    def stop(self, sentence: str) -> None:
        """Begin no further host in this run, also where the breaker's own file can't be written."""
        (self.folder / "stopped").write_text(sentence, encoding="utf-8")

    def stopped(self) -> str:
        return _text(self.folder / "stopped") or ""

    def _file(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
