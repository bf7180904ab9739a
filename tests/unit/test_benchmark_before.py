"""What a host had before a benchmark: given back also after a run that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_benchmark import before, calls
from gpu_benchmark.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "benchmarks" / "a-run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return Run(folder)


def call(run: Run, check_mode: bool = False, **given: Any) -> list[str]:
    parameters = {"run": str(run.folder), "state": "noted", "servers": [], **given}
    context = calls.Context(run.folder, run.folder, "host/../a", 0.0, calls.this_clock(), check_mode)
    returned = calls.CALLS["benchmark_before"](parameters, context)
    assert not returned.get("failed"), returned
    return list(returned["servers"])


def test_what_runs_now_is_noted_for_each_host_by_itself(run: Run) -> None:
    assert call(run, servers=["kimi", "a"]) == ["a", "kimi"]
    assert before.note(run, "another", ["b"]) == ["b"]
    assert before.noted(run, "host/../a") == {"host": "host/../a", "servers": ["a", "kimi"], "given_back": False}
    assert {path.parent.name for path in run.folder.rglob("*.json")} == {"a-run", "before"}


def test_a_run_that_was_interrupted_still_owes_what_it_ended(run: Run) -> None:
    call(run, servers=["kimi"])
    assert call(run) == ["kimi"]  # resumed: its own server alone is left
    assert call(run, servers=["started-meanwhile"]) == ["kimi", "started-meanwhile"]


def test_a_run_that_gave_everything_back_owes_nothing_when_it_is_resumed(run: Run) -> None:
    call(run, servers=["kimi"])
    call(run, state="given_back")
    assert call(run) == []
    assert call(run, servers=["other"]) == ["other"]


def test_check_mode_notes_nothing(run: Run) -> None:
    assert call(run, check_mode=True, servers=["kimi"]) == ["kimi"]
    call(run, check_mode=True, state="given_back")
    assert before.noted(run, "host/../a") == {}


def test_a_run_that_is_not_there_is_refused_by_name(run: Run) -> None:
    context = calls.Context(run.folder, run.folder, "a", 0.0, calls.this_clock())
    given = {"run": str(run.folder / "x"), "state": "noted", "servers": []}
    assert "There is no benchmark run" in calls.CALLS["benchmark_before"](given, context)["msg"]
