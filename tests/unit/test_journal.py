from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from gpu_host import journal
from gpu_host.journal import Journal, unrecorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAIN = {"pid": 10, "start_time": 5, "name": "python -m sglang.launch_server", "class": "server", "why": "main"}
WORKER = {"pid": 11, "start_time": 6, "name": "sglang::scheduler", "class": "server", "why": "child of 10"}


def finished_run(folder: Path, run_id: str, **facts: Any) -> dict[str, Any]:
    record = {"schema": 1, "run_id": run_id, "verdict": "clean", **facts}
    entry = Journal(str(folder), run_id)
    entry.begun({"host": "h"})
    entry.finished(record)
    assert entry.problem == ""
    return record


def test_finished_runs_after_the_last_recorded_one_are_told_as_they_are(tmp_path: Path) -> None:
    records = [finished_run(tmp_path, f"run-{n}") for n in range(3)]
    assert unrecorded(str(tmp_path), "run-0") == records[1:]
    assert unrecorded(str(tmp_path), "run-2") == []
    assert unrecorded(str(tmp_path), "never-heard-of") == records
    assert unrecorded(str(tmp_path)) == records


def test_a_run_that_died_is_told_with_what_it_did_and_what_it_announced(tmp_path: Path) -> None:
    died = Journal(str(tmp_path), "died")
    died.begun({"host": "gpu1", "policy": "force", "servers": ["port-30000"]})
    died.will_signal([MAIN, WORKER])
    died.signalled([{**MAIN, "signal": "TERM", "seconds": None}])
    died.signalled([{**MAIN, "signal": "KILL", "seconds": 0.1}])
    died.removed({"path": "/dev/shm/psm_1", "why": "no owner"})
    (record,) = unrecorded(str(tmp_path))
    assert record["verdict"] == "unknown"
    assert record["failed"] and record["changed"]
    assert (record["host"], record["policy"], record["servers"], record["run_id"]) == (
        "gpu1",
        "force",
        ["port-30000"],
        "died",
    )
    assert record["killed"][0] == {**MAIN, "signal": "KILL", "seconds": 0.1}
    assert record["killed"][1]["pid"] == 11 and "announced" in record["killed"][1]["why"]
    assert record["cleaned"] == [{"path": "/dev/shm/psm_1", "why": "no owner"}]
    assert "never finished" in record["reason"]


def test_the_live_run_is_not_told_as_an_earlier_one(tmp_path: Path) -> None:
    first = finished_run(tmp_path, "first")
    live = Journal(str(tmp_path), "live")
    live.begun({})
    live.will_signal([MAIN])
    assert unrecorded(str(tmp_path), "", live_run="live") == [first]


def test_a_line_that_a_dying_writer_left_unfinished_spoils_nothing(tmp_path: Path) -> None:
    first = finished_run(tmp_path, "first")
    with open(journal.journal_path(str(tmp_path)), "ab") as file:
        file.write(b'{"run_id": "torn", "event": "beg')
    second = finished_run(tmp_path, "second")
    assert unrecorded(str(tmp_path)) == [first, second]


def test_an_intention_is_on_disk_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fdatasync

    def note(number: int) -> None:
        real(number)
        synced.append(Path(journal.journal_path(str(tmp_path))).read_bytes())

    monkeypatch.setattr(os, "fdatasync", note)
    entry = Journal(str(tmp_path), "run")
    entry.begun({})
    entry.will_signal([MAIN])
    assert json.loads(synced[-1].splitlines()[-1])["processes"] == [MAIN]


def test_only_the_last_twenty_runs_are_kept(tmp_path: Path) -> None:
    for n in range(45):
        finished_run(tmp_path, f"run-{n:02d}")
    kept = [record["run_id"] for record in unrecorded(str(tmp_path))]
    assert kept == [f"run-{n:02d}" for n in range(25, 45)]
    assert stat.S_IMODE(os.stat(journal.journal_path(str(tmp_path))).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["journal.jsonl"]


def test_a_disk_that_takes_nothing_is_told_and_stops_no_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    entry = Journal(str(tmp_path), "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        entry.begun({})
        entry.will_signal([MAIN])
    assert "No space left" in entry.problem
    entry.signalled([MAIN])
    assert unrecorded(str(tmp_path))[0]["killed"] == [MAIN], "it goes on once there is space again"
    assert Journal("/nonexistent/folder", "x").problem == ""
    assert unrecorded("/nonexistent/folder") == []


def test_a_journal_that_another_user_could_have_written_is_not_believed(tmp_path: Path) -> None:
    finished_run(tmp_path, "first")
    os.chmod(journal.journal_path(str(tmp_path)), 0o666)
    assert unrecorded(str(tmp_path)) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.recursive(
                st.none() | st.text(max_size=5) | st.integers(),
                lambda inner: (
                    st.lists(inner, max_size=2)
                    | st.dictionaries(
                        st.sampled_from(["run_id", "event", "process", "processes", "record", "facts", "item"]),
                        inner,
                        max_size=4,
                    )
                ),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
        ),
        max_size=6,
    )
)
def test_any_rubbish_in_the_journal_is_survived(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\n".join(lines))
    path.chmod(0o600)
    record = finished_run(tmp_path, "after")
    assert unrecorded(str(tmp_path))[-1] == record
