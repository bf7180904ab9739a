"""The kill phase on real processes of this machine, kept to the test's own folder by the scope."""
from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_host import ending, later_rank
from gpu_host.deadline import Deadline
from gpu_host.ending import Ending, Outcome, planned
from gpu_host.managers import Manager, Managers, Stop
from gpu_host.nvml import Reader
from gpu_host.processes import Finding, Patterns, classify
from gpu_host.procfs import Proc, Process
from gpu_host.scope import Scope
from gpu_host.signals import Target
from gpu_host.survey import Survey

from tests.unit.fake_proc import FakeProc
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


def end(
    nursery: Nursery,
    grace: float = 5.0,
    diary: Diary | None = None,
    managers: Managers | None = None,
    kill_timeout: float = 5.0,
) -> Outcome:
    survey = survey_of(nursery)

    def look() -> tuple[Mapping[int, Process], Mapping[int, Finding]]:
        now = survey.look()
        return now.processes, now.chosen

    managers = managers or Managers(survey.proc)
    return Ending(survey.proc, look, managers, diary or Diary(nursery), grace, kill_timeout).run()


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


def test_a_later_rank_gets_no_grace_once_its_first_one_is_gone(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "LINGER_SECONDS", 0.3)
    asked: list[set[int]] = []

    def head_is_gone(_proc: Proc, argv: Sequence[str], pids: Sequence[int]) -> bool:
        asked.append(set(pids))
        return "--node-rank=1" in argv

    monkeypatch.setattr(later_rank, "head_is_gone", head_is_gone)
    later = nursery.server("deaf", words=("--node-rank=1",))
    other = nursery.server("deaf")
    outcome = end(nursery, grace=3.0)
    seconds = {row["pid"]: row["seconds"] for row in outcome.killed}
    assert {row["signal"] for row in outcome.killed} == {"KILL"} and len(seconds) == 6
    assert seconds[later] < 3.0 <= seconds[other]
    assert sum(one < 3.0 for one in seconds.values()) == 3
    assert all(later not in pids or other not in pids for pids in asked)
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


def test_a_server_typed_into_a_shell_leaves_the_shell_and_its_jobs_alone_and_undoubted(nursery: Nursery) -> None:
    shell = nursery.typed("sleep 300 & {} &")
    outcome = end(nursery)
    assert outcome.respawners == []
    assert sorted(nursery.living().values()) == ["bash", "sleep 300"]
    assert shell in nursery.living()


def test_a_loop_typed_into_a_shell_is_named(nursery: Nursery) -> None:
    nursery.typed("while true; do {}; sleep 1; done")
    assert "started a server again" in end(nursery).respawners[0]


class OneUnit(Managers):
    """Says that a unit keeps the server; stops it as systemd would with KillMode=mixed."""

    def __init__(self, stoppable: bool) -> None:
        super().__init__(Proc())
        self.stoppable = stoppable
        self.stopped = False

    def plan(
        self, chosen: Mapping[int, Finding], processes: Mapping[int, Process], deadline: Deadline
    ) -> tuple[list[Stop], list[Manager]]:
        self.main = next(pid for pid, finding in chosen.items() if finding.main)
        manager = Manager("unit", "sglang.service", self.main, "always", "systemctl")
        return ([Stop(manager, frozenset(chosen))], []) if self.stoppable else ([], [manager])

    def stop(self, manager: Manager, grace: float, deadline: Deadline) -> None:
        self.stopped = True
        os.kill(self.main, signal.SIGTERM)

    def settle(self, manager: Manager, deadline: Deadline) -> str:
        return "unit sglang.service is activating"


def test_what_a_unit_keeps_is_stopped_by_the_unit_and_by_no_signal_of_ours(nursery: Nursery) -> None:
    nursery.server()
    unit, diary = OneUnit(stoppable=True), Diary(nursery)
    outcome = end(nursery, managers=unit, diary=diary)
    assert unit.stopped
    assert {row["signal"] for row in outcome.killed} == {"TERM"}
    assert len(diary.announced) == 3
    assert outcome.notes == ["unit sglang.service is activating"]
    assert outcome.respawners == []


def test_a_unit_that_restarts_its_server_and_may_not_be_stopped_is_named_with_what_to_type(nursery: Nursery) -> None:
    nursery.server()
    outcome = end(nursery, managers=OneUnit(stoppable=False))
    assert "systemctl stop sglang.service" in outcome.respawners[0]


def test_a_process_that_outlives_kill_is_returned_as_alive_by_the_deadline(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = nursery.server("deaf")
    monkeypatch.setattr(ending, "send", lambda proc, target, signum: True)
    outcome = end(nursery, grace=0.1, kill_timeout=0.5)
    assert main in {finding.process.pid for finding in outcome.alive}
    assert not outcome.killed


def test_a_process_that_may_not_be_signalled_is_told_and_not_waited_for(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(proc: Proc, target: Target, signum: signal.Signals) -> bool:
        raise PermissionError

    main = nursery.server()
    monkeypatch.setattr(ending, "send", refuse)
    outcome = end(nursery, grace=0.1, kill_timeout=60)
    assert f"({main}) belongs to another user" in outcome.notes[0]
    assert len(outcome.alive) == 3


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [
        ("-bash", True),
        ("bash -i", True),
        ("/bin/zsh -l", True),
        ("bash --norc --init-file /x/init.sh -i", True),
        ("bash loop.sh", False),
        ("bash -c true", False),
        ("sh -ec true", False),
        ("python3", False),
        ("", False),
    ],
)
def test_a_shell_at_a_prompt_has_neither_a_script_nor_a_command(argv: str, prompt: bool, tmp_path: Path) -> None:
    FakeProc(tmp_path).add(100, argv=argv.split())
    process = Proc(str(tmp_path)).process(100)
    assert process is not None
    assert ending.at_a_prompt(process) is prompt


@pytest.mark.parametrize("parent", ["/usr/bin/tmux", "/usr/bin/screen", "/usr/sbin/sshd"])
def test_a_parent_that_starts_nothing_by_itself_is_not_watched(parent: str, tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=[parent])
    fake.add(101, ppid=100, argv=["/usr/bin/python3", "-m", "sglang.launch_server"])
    fake.add(102, argv=["/usr/bin/supervisord"])
    fake.add(103, ppid=102, argv=["/usr/bin/python3", "-m", "sglang.launch_server"])
    proc = Proc(str(tmp_path))
    processes = proc.snapshot()
    findings = classify(processes, proc, Patterns(), own_pid=9999)
    assert [process.pid for process in ending.surviving_parents(processes, findings)] == [102]
