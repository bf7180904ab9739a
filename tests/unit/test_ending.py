"""The kill phase on real processes of this machine, kept to the test's own folder by the scope."""
from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_host.ending import Ending, Outcome, planned
from gpu_host.managers import Managers
from gpu_host.nvml import Reader
from gpu_host.processes import Finding, Patterns
from gpu_host.procfs import Proc, Process
from gpu_host.scope import Scope
from gpu_host.survey import Survey

from tests.unit.real_processes import Nursery, wait_for


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    nursery.close()


def survey_of(nursery: Nursery) -> Survey:
    return Survey(Proc(), Patterns(), Scope(folder=str(nursery.folder)), Reader())


class Diary:
    """Notes for each signal whether the process lived when it was announced and when it was reported."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.announced: list[int] = []
        self.reported: list[int] = []

    def will_signal(self, processes: Sequence[Mapping[str, Any]]) -> None:
        assert all(row["pid"] in self.nursery.living() for row in processes)
        self.announced += [row["pid"] for row in processes]

    def signalled(self, processes: Sequence[Mapping[str, Any]]) -> None:
        self.reported += [row["pid"] for row in processes]


def end(nursery: Nursery, grace: float = 5.0, diary: Diary | None = None) -> Outcome:
    survey = survey_of(nursery)

    def look() -> tuple[Mapping[int, Process], Mapping[int, Finding]]:
        now = survey.look()
        return now.processes, now.chosen

    return Ending(survey.proc, look, Managers(survey.proc), diary or Diary(nursery), grace, 5.0).run()


def test_an_orderly_server_ends_by_term_to_its_main_alone(nursery: Nursery) -> None:
    main = nursery.server()
    outcome = end(nursery)
    signals = {row["pid"]: row["signal"] for row in outcome.killed}
    assert signals.pop(main) == "TERM"
    assert set(signals.values()) == {"none"}
    assert len(signals) == 2
    assert not outcome.forced
    assert not nursery.living()


def test_a_server_that_ignores_term_is_killed_after_the_grace_and_not_before(nursery: Nursery) -> None:
    nursery.server("deaf")
    outcome = end(nursery, grace=1.0)
    assert {row["signal"] for row in outcome.killed} == {"KILL"}
    assert all(row["seconds"] >= 1.0 for row in outcome.killed)
    assert not nursery.living()


def test_a_stopped_main_is_killed(nursery: Nursery) -> None:
    os.kill(nursery.server(), signal.SIGSTOP)
    end(nursery, grace=0.3)
    assert not nursery.living()


def test_orphans_are_killed_at_once_without_any_grace(nursery: Nursery) -> None:
    main = nursery.server(STAY="1")
    os.kill(main, signal.SIGKILL)
    wait_for(lambda: main not in nursery.living())
    outcome = end(nursery, grace=30.0)
    assert {row["class"] for row in outcome.killed} == {"orphan"}
    assert {row["signal"] for row in outcome.killed} == {"KILL"}
    assert max(row["seconds"] for row in outcome.killed) < 3
    assert not nursery.living()


def test_workers_that_stay_after_their_main_left_in_order_are_killed(nursery: Nursery) -> None:
    main = nursery.server(STAY="1")
    outcome = end(nursery, grace=20.0)
    signals = {row["pid"]: row["signal"] for row in outcome.killed}
    assert signals.pop(main) == "TERM"
    assert set(signals.values()) == {"KILL"}
    assert not nursery.living()


def test_bystanders_in_the_same_session_live_on(nursery: Nursery) -> None:
    nursery.server(under="sleep 300 & tail -f /dev/null & {} & wait")
    before = nursery.living()
    outcome = end(nursery)
    assert len(outcome.killed) == 3
    assert sorted(nursery.living().values()) == sorted(
        line for line in before.values() if line.startswith(("sleep", "tail", "bash"))
    )


def test_a_loop_that_starts_the_server_again_is_named(nursery: Nursery) -> None:
    nursery.server(under="while true; do {}; sleep 1; done")
    outcome = end(nursery)
    assert len(outcome.respawners) == 1
    assert outcome.respawners[0].startswith("bash (")
    assert "started a server again" in outcome.respawners[0]


def test_a_parent_that_lives_on_without_starting_anything_is_named_as_a_doubt(nursery: Nursery) -> None:
    nursery.server(under="{}; sleep 300")
    outcome = end(nursery)
    assert "lives on" in outcome.respawners[0]


def test_a_shell_that_ends_with_its_server_is_no_respawner(nursery: Nursery) -> None:
    nursery.server(under="{}; true")
    assert end(nursery).respawners == []


def test_every_process_is_announced_before_it_is_signalled_and_reported_after(nursery: Nursery) -> None:
    main = nursery.server()
    diary = Diary(nursery)
    end(nursery, diary=diary)
    assert diary.announced == diary.reported == [main]


def test_what_is_planned_is_what_happens(nursery: Nursery) -> None:
    nursery.server()
    plan = planned(survey_of(nursery).look().chosen)
    outcome = end(nursery)
    assert {(row["pid"], row["signal"]) for row in plan} == {(row["pid"], row["signal"]) for row in outcome.killed}
