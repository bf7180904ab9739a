"""Runs that were ended: which of their hosts get a record later, and which."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_control import breaker, gate, interrupted, records
from gpu_control.interrupted import Note, settle_dead

PLAN = {"id": "p1", "schedule": "nightly"}


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def tally(tmp_path: Path) -> breaker.Tally:
    (tmp_path / "tmp").mkdir()
    return breaker.Tally(gate.tally_folder(tmp_path / "tmp", "p1"))


def kept(artifacts: Path) -> list[dict[str, Any]]:
    file = artifacts / records.FILE_NAME
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def record(artifacts: Path, host: str, **values: Any) -> None:
    records.append(artifacts / records.FILE_NAME, [records.record({"verdict": "clean", "play": "p1", **values}, host)])


@contextmanager
def another_run(artifacts: Path, tally: breaker.Tally, *hosts: str) -> Iterator[int]:
    """A process that left a note of its run; its pid. It is gone afterwards, without its last act."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        Note(artifacts, PLAN, hosts, tally.folder)
        os.write(tell, b"x")
        signal.pause()
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def notes(artifacts: Path) -> list[str]:
    return [path.name for path in (artifacts / interrupted.FOLDER).iterdir()]


def test_a_run_that_goes_on_is_left_alone_and_told_of_once_it_is_gone(artifacts: Path, tally: breaker.Tally) -> None:
    with another_run(artifacts, tally, "a", "b", "c", "d"):
        record(artifacts, "a")
        record(artifacts, "b", play="p0")
        tally.decide("b", "")
        tally.decide("c", "held out (reset_held_out)")
        assert settle_dead(artifacts) == []
        assert len(kept(artifacts)) == 2 and notes(artifacts) == ["p1.json"]
    (told,) = settle_dead(artifacts)
    assert told.startswith("The run of the schedule nightly that began 20")
    assert told.endswith("b: begun, and the run did not tell what came of it; c, d: not begun.")
    new = kept(artifacts)[2:]
    assert [(one["host"], one["verdict"], one["play"], one["schedule"]) for one in new] == [
        ("b", "unknown", "p1", "nightly"),
        ("c", "skipped", "p1", "nightly"),
        ("d", "skipped", "p1", "nightly"),
    ]
    assert new[1]["reason"] == "held out (reset_held_out)"
    assert settle_dead(artifacts) == [] and notes(artifacts) == []
    assert len(kept(artifacts)) == 5


def test_what_outlives_its_run_begins_no_further_host(artifacts: Path, tally: breaker.Tally) -> None:
    plan: dict[str, Any] = {**PLAN, "held_out": [], "not_after": None, "share": 0.2, "fleet": "f", "count": 2}
    head, other = (gate.Gate(plan, host, ["a", "b"], tally.folder.parent, artifacts) for host in "ab")
    with another_run(artifacts, tally, "a", "b"):
        assert head.begin(["a", "b"], lambda node: "") == ""
    settle_dead(artifacts)
    assert [(one["host"], one["verdict"]) for one in kept(artifacts)] == [("a", "unknown"), ("b", "skipped")]
    assert other.begin(["a", "b"], lambda node: "") == interrupted.NOT_BEGUN
    assert head.begin(["a", "b"], lambda node: "") == ""


def test_a_run_settles_its_own_hosts_but_those_it_knows(artifacts: Path, tally: breaker.Tally) -> None:
    note = Note(artifacts, PLAN, ["a", "b"], tally.folder)
    assert settle_dead(artifacts) == []
    assert [one["host"] for one in note.settle({"a": [{}]})] == ["b"]
    note.close()
    assert [one["host"] for one in kept(artifacts)] == ["b"] and notes(artifacts) == []


def test_where_the_decisions_are_gone_a_host_is_not_told_to_be_not_begun(artifacts: Path, tally: breaker.Tally) -> None:
    with another_run(artifacts, tally, "a"):
        pass
    tally.folder.parent.rmdir()
    settle_dead(artifacts)
    (one,) = kept(artifacts)
    assert (one["verdict"], one["reason"]) == ("unknown", interrupted.NOT_KNOWN)


def test_records_that_were_rotated_meanwhile_count_and_where_they_are_gone_nothing_is_made_up(
    artifacts: Path, tally: breaker.Tally
) -> None:
    file = artifacts / records.FILE_NAME
    record(artifacts, "z", play="p0")
    with another_run(artifacts, tally, "a", "b"):
        record(artifacts, "a")
        file.rename(artifacts / "resets.jsonl.1")
        record(artifacts, "b")
    (artifacts / "resets.jsonl.1").rename(artifacts / "elsewhere")
    (told,) = settle_dead(artifacts)
    assert "was rotated while that run went on" in told and "p1.json" in told
    assert [one["host"] for one in kept(artifacts)] == ["b"] and notes(artifacts) == ["p1.json"]
    (artifacts / "elsewhere").rename(artifacts / "resets.jsonl.1")
    assert settle_dead(artifacts) == []
    assert [one["host"] for one in kept(artifacts)] == ["b"] and notes(artifacts) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"play": "p9"}'])
def test_a_broken_note_is_named_and_stops_nothing(artifacts: Path, tally: breaker.Tally, text: str) -> None:
    with another_run(artifacts, tally, "a"):
        pass
    (artifacts / "running/p0.json").write_text(text)
    told = settle_dead(artifacts)
    assert len(told) == 2 and "p0.json can't be used" in told[0] and "remove it" in told[0]
    assert [one["host"] for one in kept(artifacts)] == ["a"]
