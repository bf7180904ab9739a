"""Runs over several hosts: batches, the breaker, hosts left out, with a stand-in for the reset itself."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .control_project import Outcome, Project

DIRTY = {"verdict": "dirty", "reason": "GPU 7 is used by train.py (pid 99)"}
TOUCHED = {"raise": "the host was touched"}
UNREACHABLE = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
CONSENT = ("-e", "reset_confirmed=true")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def variables(**values: object) -> tuple[str, str]:
    return "-e", json.dumps({"reset_confirmed": True, **values})


def text(outcome: Outcome) -> str:
    return " ".join(outcome.output.split())


def test_no_batch_stops_the_others_whatever_becomes_of_its_hosts(project):
    project.host("gone", **UNREACHABLE)
    project.host("bad", DIRTY)
    project.host("odd", {"exit": 3})
    project.host("kept", {"verdict": "skipped", "reason": "2 requests are running"})
    project.host("good")
    project.host("out", TOUCHED)
    outcome = project.play(*variables(reset_serial=1, reset_held_out=["ou*:!good"], reset_schedule_name="nightly"))
    assert (
        outcome.last_line == "Verdicts - dirty: bad; unreachable: gone; unknown: odd; skipped: kept, out; clean: good"
    )
    assert outcome.status == 2
    assert outcome.output.count("PLAY [Reset GPU hosts]") == 6
    assert [one["host"] for one in outcome.records] == ["bad", "gone", "good", "kept", "odd", "out"]
    assert {one["schedule"] for one in outcome.records} == {"nightly"}
    (play,) = {one["play"] for one in outcome.records}
    assert play
    assert outcome.records[-1]["reason"] == "held out (reset_held_out)"

    again = project.play(*variables(reset_serial=[1, 2]), "--limit", "gone,good", playbook="playbooks/reset.yml")
    assert (again.status, again.last_line) == (4, "Verdicts - unreachable: gone; clean: good")
    assert again.records[-1]["play"] not in ("", play)


def test_hosts_that_become_dirty_stop_the_run_and_all_further_ones_until_a_person_clears_it(project):
    for name in "abcdef":
        project.host(name, DIRTY)
    project.inventory["e"]["gpu_host_environment"] = {"STUB_RESULT": ""}  # would fail if it were touched
    project.inventory["f"]["gpu_host_environment"] = {"STUB_RESULT": ""}
    stopped = project.play(*variables(reset_serial=2, reset_breaker_share="50%"))
    assert stopped.last_line == "Verdicts - dirty: a, b, c, d; skipped: e, f"
    assert stopped.status == 2
    assert "4 of 6 hosts are newly dirty or did not get their server back (a, b, c, d)" in text(stopped)
    assert "more than 50%" in stopped.records[-1]["reason"]
    kept = json.loads((project.folder / "artifacts/breaker.json").read_text())["stopped"]
    assert [one["newly_dirty"] for one in kept] == [["a", "b", "c", "d"]]
    assert {one["play"] for one in stopped.records} == {kept[0]["play"]}

    refused = project.play("--limit", "a", *CONSENT)
    assert (refused.status, refused.last_line) == (2, "Verdicts - skipped: a")
    assert "Nothing was done: the breaker stopped a run" in text(refused)
    assert "say -e reset_breaker_clear=true" in refused.records[-1]["reason"]
    assert len(refused.records) == 7

    schedule = project.play("--limit", "a", *variables(reset_breaker_clear=True, reset_schedule_name="nightly"))
    assert "a schedule must not clear the breaker" in text(schedule)

    cleared = project.play("--limit", "a,b", *variables(reset_breaker_clear=True))
    assert cleared.last_line == "Verdicts - dirty: a, b"  # as dirty as before: no news
    assert project.play("--limit", "a", *CONSENT).last_line == "Verdicts - dirty: a"


def test_a_server_that_does_not_start_again_is_no_success_and_counts_for_the_breaker(project):
    for name in "abc":
        project.host(name, {"killed": [{"pid": 7, "name": "sglang::scheduler"}]})
    outcome = project.play(*variables(reset_serial=1), playbook="playbooks/restart.yml")
    assert (outcome.status, outcome.last_line) == (2, "Verdicts - skipped: c; clean: a, b")
    assert "failed after its reset: a is clean, but nothing was started" in text(outcome)
    assert "2 of 3 hosts are newly dirty or did not get their server back (a, b)" in text(outcome)


def test_hosts_of_one_server_are_left_alone_together(project):
    for name in ("a", "z"):
        project.host(name, TOUCHED, sglang_nodes=["z", "a"])
    project.host("m")
    held = project.play(*variables(reset_held_out=["z"]))
    assert (held.status, held.last_line) == (0, "Verdicts - skipped: a, z; clean: m")
    assert "a: skipped - its server runs over z, a, which are reset together or not at all, and z is held out" in text(
        held
    )
    alone = project.play("--limit", "a,m")
    assert (alone.status, alone.last_line) == (0, "Verdicts - skipped: a; clean: m")
    assert "and z is not in this run" in text(alone)


@pytest.mark.parametrize("head", ["skipped", "clean"])
def test_the_other_nodes_of_a_server_wait_for_what_comes_of_its_first_one(project, head):
    project.host("a", TOUCHED if head == "skipped" else {}, sglang_nodes=["z", "a"])
    project.host("m")
    project.host("z", {"verdict": head, "reason": ""}, sglang_nodes=["z", "a"])
    outcome = project.play(*variables(reset_serial=1, gpu_reset_policy="idle_only"))
    if head == "skipped":
        assert outcome.last_line == "Verdicts - skipped: a, z; clean: m"
        assert "a: skipped - its server runs over z, a, and z, which answers for it, is skipped" in text(outcome)
    else:
        assert outcome.last_line == "Verdicts - clean: a, m, z"
    assert outcome.status == 0
    assert [one["host"] for one in outcome.records][2] == "m"  # the first batch was both nodes
    policies = {one["host"]: one["policy"] for one in outcome.records}
    assert policies == {"z": "idle_only", "m": "idle_only", "a": "idle_only"}


def test_a_hypervisor_is_left_alone_in_a_batch_too_where_the_guest_is_not_told_from_the_others(project):
    ownerless = {
        "verdict": "dirty",
        "reason": "memory",
        "gpus": [{"index": 0, "uuid": "G", "verdict": "unowned_memory"}],
    }
    project.host("guest", ownerless, gpu_hypervisor="pve", gpu_hypervisor_guest="/lxc")
    project.host("other")
    project.host("pve", TOUCHED)
    outcome = project.play(*variables(reset_serial=1), "--limit", "guest,other")
    assert (outcome.status, outcome.last_line) == (2, "Verdicts - dirty: guest; clean: other")
    assert [one["host"] for one in outcome.records] == ["guest", "other"]
    assert "Nothing was done on pve: gpu_hypervisor_guest of guest is" in text(outcome)


def test_a_host_whose_turn_comes_after_the_window_is_not_touched(project):
    late = project.folder / "plugin_utils/gpu_control/gate.py"
    late.write_text(late.read_text().replace("float] = time.time", "float] = lambda: time.time() + 7200"))
    project.host("a", TOUCHED)
    outcome = project.play("-e", "reset_not_after=" + in_an_hour())
    assert (outcome.status, outcome.last_line) == (0, "Verdicts - skipped: a")
    assert "a: skipped - not begun: it was its turn after" in text(outcome)
    checked = project.play("--check", "-e", "reset_not_after=" + in_an_hour())
    assert checked.last_line == "Verdicts now, nothing was changed - skipped: a"
    assert len(checked.records) == 1


def in_an_hour() -> str:
    return str(int(time.time() + 3600))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"reset_not_after": "2020-01-01T05:00"}, "reset_not_after is 2020-01-01T05:00, and that is over since"),
        ({"reset_held_out": ["c"]}, "reset_held_out names c, and the inventory has no such host or group"),
        ({"reset_serial": "some"}, "reset_serial is 'some': give the hosts of a batch as a number"),
        ({"reset_breaker_share": 20}, "reset_breaker_share is '20': give a share"),
        ({"reset_seriell": 5}, "there is no variable reset_seriell. The plays know reset_breaker_clear"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_that_makes_no_sense_is_refused_in_one_sentence_and_every_host_named(project, values, sentence):
    project.host("a", TOUCHED)
    project.host("b", TOUCHED)
    outcome = project.play(*variables(**values))
    assert outcome.status == 2 and "Verdicts - skipped: a, b" in outcome.output
    assert f"a, b: skipped - Nothing was done: {sentence}" in text(outcome)
    assert outcome.records == [] and "the host was touched" not in outcome.output


# A run that is ended from outside


def until_begun(folder: Path, play: subprocess.Popen[str]) -> None:
    """Until the host `second` hangs in its reset."""
    deadline = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert play.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def end_what_hangs(folder: Path) -> None:
    """End the reset that hangs, and wait until the worker that outlived its run has gone, too."""
    os.kill(int((folder / "begun").read_text()), signal.SIGKILL)
    (note,) = (folder / "artifacts/running").iterdir()
    with note.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)


def three_hosts(project: Project) -> tuple[str, ...]:
    """One that is done, one that hangs, and one whose turn does not come."""
    project.host("first")
    project.host("second", {"hang": str(project.folder / "begun")})
    project.host("third", TOUCHED)
    return variables(reset_serial=1, reset_schedule_name="nightly")


ENDED = [("first", "clean"), ("second", "unknown"), ("third", "skipped")]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 99), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_run_that_is_told_to_end_has_a_record_of_each_host_and_says_which_were_not_begun(project, number, status):
    play = project.start(*three_hosts(project))
    until_begun(project.folder, play)
    play.send_signal(number)
    ended = project.outcome(play)
    assert ended.status == status, ended.output
    assert "Verdicts - unknown: second; skipped: third; clean: first" in ended.output
    assert sorted((one["host"], one["verdict"]) for one in ended.records) == ENDED
    assert len({one["play"] for one in ended.records}) == 1
    assert {one["schedule"] for one in ended.records} == {"nightly"}
    reasons = {one["host"]: one["reason"] for one in ended.records}
    assert reasons["third"] == "not begun: the run was ended before its turn"
    assert reasons["second"].startswith("the run was ended before it could tell what came of this host")
    assert list((project.folder / "artifacts/running").iterdir()) == []
    assert "the host was touched" not in ended.output


def test_what_a_killed_run_did_not_record_the_next_one_does_once_and_says_so(project):
    play = project.start(*three_hosts(project))
    until_begun(project.folder, play)
    play.kill()
    killed = project.outcome(play)
    assert [one["host"] for one in killed.records] == ["first"]
    end_what_hangs(project.folder)
    (note,) = (project.folder / "artifacts/running").iterdir()
    assert json.loads(note.read_text())["play"] == killed.records[0]["play"]
    done = project.play("--limit", "first")
    assert "The run of the schedule nightly that began 20" in text(done)
    assert "second: begun, and the run did not tell what came of it; third: not begun." in text(done)
    assert done.status == 0 and "Verdicts - clean: first" in done.output
    assert [(one["host"], one["verdict"]) for one in done.records] == [*ENDED, ("first", "clean")]
    assert len({one["play"] for one in done.records[:3]}) == 1
    assert list((project.folder / "artifacts/running").iterdir()) == []
