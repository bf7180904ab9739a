"""What a run did on this host, written down as it is done, so that no kill stays untold.

One JSON object a line in `<state folder>/journal.jsonl`. An intention is on disk before the signal is sent. When the
control process dies, the next run finds here what the control node never recorded. All under the host lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Callable

from .storage import StorageError, read_private, write_all, write_private

KEEP_RUNS = 20
BEGUN, WILL_SIGNAL, SIGNALLED, REMOVED, FINISHED = "begun", "will_signal", "signalled", "removed", "finished"


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class Journal:
    """The journal of one run. Nothing here raises for a full or broken disk: a reset must still end the server.

    What could not be written is in `problem`, for the run's record.
    """

    def __init__(self, state_folder: str, run_id: str, now: Callable[[], datetime] = _utc_now) -> None:
        self.path = journal_path(state_folder)
        self.run_id = run_id
        self.problem = ""
        self._now = now
        self._number: int | None = None

    def begun(self, facts: Mapping[str, Any]) -> None:
        """First entry of the run: what a record needs that later entries don't say (host, servers, policy, ...)."""
        self._rotate()
        self._write(BEGUN, {"facts": dict(facts)})

    def will_signal(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Before the first signal: each as in the record's `killed`."""
        self._write(WILL_SIGNAL, {"processes": [dict(process) for process in processes]})

    def signalled(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Signals were sent: each as in the record's `killed`. The last one for a process counts."""
        self._write(SIGNALLED, {"processes": [dict(process) for process in processes]})

    def removed(self, item: Mapping[str, Any]) -> None:
        """A file was deleted: `path` and `why`."""
        self._write(REMOVED, {"item": dict(item)})

    def finished(self, record: Mapping[str, Any]) -> None:
        """Last entry: the whole run record."""
        self._write(FINISHED, {"record": dict(record)})
        self.close()

    def close(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            os.close(number)

    def _write(self, event: str, entry: dict[str, Any]) -> None:
        head = {"at": self._now().isoformat(timespec="milliseconds"), "run_id": self.run_id, "event": event}
        try:
            line = json.dumps({**head, **entry}, default=str).encode() + b"\n"
            if self._number is None:
                self._number = _open_at_line_start(self.path)
            write_all(self._number, line)
            os.fdatasync(self._number)
        except (OSError, StorageError) as error:
            self.problem = f"The journal {self.path} could not be written ({event}): {error}"
            self.close()

    def _rotate(self) -> None:
        """Keep the last runs only, so that the file stays bounded."""
        try:
            entries = read(self.path)
            order = _order(entries)
            if len(order) < KEEP_RUNS:
                return
            keep = set(order[-(KEEP_RUNS - 1) :])
            lines = [json.dumps(entry) + "\n" for entry in entries if entry["run_id"] in keep]
            write_private(self.path, "".join(lines))
        except FileNotFoundError:
            pass
        except (OSError, StorageError) as error:
            self.problem = f"The journal {self.path} could not be shortened: {error}"


def journal_path(state_folder: str) -> str:
    return os.path.join(state_folder, "journal.jsonl")


def _open_at_line_start(path: str) -> int:
    """Open for appending; a line that a dying writer left unfinished is ended first, so that it spoils nothing."""
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(number).st_size
        if size and os.pread(number, 1, size - 1) != b"\n":
            write_all(number, b"\n")
    except BaseException:
        os.close(number)
        raise
    return number


def read(path: str) -> list[dict[str, Any]]:
    """All entries that can be read, oldest first; broken lines are passed over. FileNotFoundError when none exists."""
    entries = []
    for line in read_private(path).split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("run_id"), str) and isinstance(entry.get("event"), str):
            entries.append(entry)
    return entries


def _order(entries: list[dict[str, Any]]) -> list[str]:
    """Run ids in the order in which the runs began."""
    return list(dict.fromkeys(entry["run_id"] for entry in entries))


def unrecorded(state_folder: str, last_recorded_run: str = "", live_run: str = "") -> list[dict[str, Any]]:
    """Records of the runs that the control node has not recorded, oldest first.

    Those after `last_recorded_run` (all that the journal still has, when it doesn't know that one), without
    `live_run`. A run that never finished becomes a record with verdict unknown and what it had done until then.
    """
    try:
        entries = read(journal_path(state_folder))
    except (OSError, StorageError):
        return []
    order = _order(entries)
    if last_recorded_run in order:
        order = order[order.index(last_recorded_run) + 1 :]
    runs: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in order if run_id != live_run}
    for entry in entries:
        if entry["run_id"] in runs:
            runs[entry["run_id"]].append(entry)
    return [_record(run_id, run) for run_id, run in runs.items()]


def _record(run_id: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    announced: dict[Any, dict[str, Any]] = {}
    sent: dict[Any, dict[str, Any]] = {}
    cleaned: list[dict[str, Any]] = []
    for entry in entries:
        event = entry["event"]
        record = entry.get("record")
        if event == FINISHED and isinstance(record, dict):
            return record
        if event == BEGUN and isinstance(entry.get("facts"), dict):
            facts = entry["facts"]
        elif event == WILL_SIGNAL:
            announced.update((_identity(process), process) for process in _dicts(entry.get("processes")))
        elif event == SIGNALLED:
            sent.update((_identity(process), process) for process in _dicts(entry.get("processes")))
        elif event == REMOVED:
            cleaned += _dicts([entry.get("item")])
    killed = list(sent.values()) + [
        {**process, "why": f"{process.get('why', '')} (announced; whether it was still signalled isn't known)".strip()}
        for identity, process in announced.items()
        if identity not in sent
    ]
    began = entries[0].get("at", "an unknown time")
    return {
        "schema": 1,
        "gpus": [],
        "spared": [],
        "kept": [],
        "servers": [],
        "evidence": "",
        "kernel_events": [],
        "seconds": {},
        "simulated": False,
        "started": began,
        **facts,
        "run_id": run_id,
        "verdict": "unknown",
        "reason": f"The reset that began at {began} never finished; its last entry is of {entries[-1].get('at', '?')}.",
        "killed": killed,
        "cleaned": cleaned,
        "changed": bool(killed or cleaned),
        "failed": True,
    }


def _identity(process: Mapping[str, Any]) -> tuple[Any, Any]:
    return process.get("pid"), process.get("start_time")


def _dicts(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
