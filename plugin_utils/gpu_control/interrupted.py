"""What becomes of a run of resets that is ended from outside: each of its hosts has a record all the same.

While a run goes on, a note of its hosts lies beside the records, locked by the run's processes. Whoever finds a note
that nobody holds any more adds the records that are missing: the run itself as its last act (Ctrl-C, SIGTERM), what ran
it (scheduled.py), or else the next run. Whether a host was begun is known by the gate: where it had not decided yet, it
is decided here that the host is not begun, and a process that outlived its run obeys that.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import breaker, records

FOLDER = "running"
NOT_BEGUN = "not begun: the run was ended before its turn"
BEGUN = (
    "the run was ended before it could tell what came of this host: a reset that had reached it goes on there by"
    " itself, and the next run over the host records it"
)
NOT_KNOWN = "the run was ended, and whether this host was begun is not known: reset it again"


@dataclass(frozen=True)
class Run:
    """A run that goes on, or was ended. ``records`` is the inode of the file of records at its beginning, 0 for none.

    ``tally`` is the folder of the gate's decisions (breaker.Tally).
    """

    play: str
    schedule: str
    since: str  # ISO 8601, UTC
    hosts: tuple[str, ...]
    tally: str
    records: int

    def missing(self, file: Path, known: Collection[str] = ()) -> list[dict[str, Any]]:
        """The records of those hosts that have none and are not ``known``. Raises LookupError where it can't be seen.

        Decides that hosts which are not begun are not begun any more.
        """
        told = {*known, *records.hosts_of_play(file, self.play, self.records)}
        tally = breaker.Tally(Path(self.tally))
        return [self._record(host, *_outcome(tally, host)) for host in self.hosts if host not in told]

    def _record(self, host: str, verdict: str, reason: str) -> dict[str, Any]:
        run = {"play": self.play, "schedule": self.schedule, "started": self.since}
        return records.record({}, host, verdict=verdict, reason=reason, **run)


def _outcome(tally: breaker.Tally, host: str) -> tuple[str, str]:
    if not tally.folder.parent.is_dir():  # a machine that was rebooted, say
        return "unknown", NOT_KNOWN
    reason = tally.decide(host, NOT_BEGUN)
    return ("skipped", reason) if reason else ("unknown", BEGUN)


class Note:
    """The note of this run. Its lock is held by this process and those that it forks, and goes with the last one."""

    def __init__(self, artifacts: Path, plan: Mapping[str, Any], hosts: Sequence[str], tally: Path) -> None:
        """Raises OSError where it can't be written."""
        self.pid = os.getpid()
        self._artifacts = artifacts
        self._path = artifacts / FOLDER / f"{plan['id']}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number = records.Place.at_the_end_of(artifacts / records.FILE_NAME).inode
        self._run = Run(plan["id"], plan["schedule"], records.timestamp(), tuple(hosts), str(tally), number)
        passing = self._path.with_suffix(f".{os.getpid()}")
        self._descriptor = os.open(passing, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, json.dumps(asdict(self._run)).encode())
        passing.replace(self._path)  # never there without its lock

    def settle(self, known: Collection[str]) -> list[dict[str, Any]]:
        """Record what is missing of hosts that are not ``known``; those records. Raises OSError or LookupError."""
        file = self._artifacts / records.FILE_NAME
        return records.append(file, self._run.missing(file, known))

    def close(self) -> None:
        """Every host has its record."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def settle_dead(artifacts: Path) -> list[str]:
    """Record what is missing of runs that are there no more; one sentence for each of them."""
    told = []
    for path in sorted((artifacts / FOLDER).glob("*.json")):
        try:
            with _abandoned(path) as text:
                if text is None:
                    continue
                told.append(_settle(artifacts, text))
                path.unlink()
        except (OSError, LookupError, ValueError, TypeError) as error:
            told.append(f"What an earlier run did not record is not known: {path} can't be used ({error}); remove it.")
    return [sentence for sentence in told if sentence]


@contextmanager
def _abandoned(path: Path) -> Iterator[str | None]:
    """The text of a note that nobody holds, under its lock; None where a run goes on, or another one was quicker."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        facts = os.fstat(descriptor)
        yield os.pread(descriptor, facts.st_size, 0).decode() if facts.st_nlink else None
    finally:
        os.close(descriptor)


def _settle(artifacts: Path, text: str) -> str:
    content = json.loads(text)
    run = Run(**{**content, "hosts": tuple(content["hosts"])})
    file = artifacts / records.FILE_NAME
    added = records.append(file, run.missing(file))
    if not added:
        return ""
    words = []
    for verdict, what in (("unknown", "begun, and the run did not tell what came of it"), ("skipped", "not begun")):
        if hosts := [one["host"] for one in added if one["verdict"] == verdict]:
            words.append(f"{', '.join(hosts[:10])}{f' and {len(hosts) - 10} more' if len(hosts) > 10 else ''}: {what}")
    whose = f"The run of the schedule {run.schedule}" if run.schedule else "The run"
    return f"{whose} that began {run.since} was killed. Recorded now - {'; '.join(words)}."
