"""What a timer runs: the wrapper around ansible-runner, with real plays over a stand-in for the reset itself."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from gpu_control import breaker, scheduled
from gpu_control.scheduled import Settings
from gpu_host import schedule_units, schedules
from gpu_host.schedule_units import Place

from .control_project import Project
from .test_interrupted import another_run

NOW = datetime(2026, 1, 5, 3, 0, tzinfo=UTC)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "checkout")


Write = Callable[..., Path]


@pytest.fixture
def write(project: Project, tmp_path: Path) -> Write:
    """Writes the settings of a schedule over the project's inventory."""

    def settings(**given: Any) -> Path:
        (one,), problems = schedules.parse(
            [{"name": "nightly", "calendar": "daily", "inventory": "inventory", "policy": "force", **given}]
        )
        assert problems == []
        checkout = str(project.folder)
        place = Place(checkout, sys.executable, "", "", str(tmp_path / "data"), "", f"{checkout}/artifacts")
        file = tmp_path / "nightly.json"
        file.write_text(schedule_units.settings(one, place))
        project.write_inventory()
        return file

    return settings


def run(project: Project, settings: Path) -> subprocess.CompletedProcess[str]:
    program = project.folder / "plugin_utils/gpu_control/scheduled.py"
    words = [sys.executable, "-I", str(program), "run", str(settings)]
    return subprocess.run(
        words, env={"PATH": "/usr/bin:/bin", "HOME": "/"}, capture_output=True, text=True, timeout=120
    )


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    """The parameters of every gpu_reset of the runs that are kept, in their order."""
    found = []
    for run_folder in sorted((tmp_path / "data/nightly/runner/artifacts").iterdir()):
        for file in run_folder.glob("job_events/*.json"):
            event = json.loads(file.read_text()).get("event_data", {})
            if saw := (event.get("res") or {}).get("saw"):
                found.append(saw["params"])
    return found


def test_no_stranger_is_ended_whatever_the_inventory_and_files_in_the_runners_folder_say(project, write, tmp_path):
    project.host("a", gpu_reset_kill_strangers=True)
    settings = write()
    planted = tmp_path / "data/nightly/runner"
    (planted / "env").mkdir(parents=True)
    for folder in (tmp_path / "data/nightly", planted):
        folder.chmod(0o700)
    (planted / "env/extravars").write_text('{"gpu_reset_kill_strangers": true}')
    (planted / "env/cmdline").write_text("-e gpu_reset_kill_strangers=true")
    (planted / "args").write_text("touch /tmp/must-not-run")
    done = run(project, settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (params,) = calls(tmp_path)
    assert params["kill_strangers"] is False
    # Without the schedule the same inventory does.
    assert "kill_strangers: true" in project.play("-vvv").output


def test_the_last_line_and_the_status_are_those_of_the_play_and_old_runs_go(project, write, tmp_path):
    project.host("a", {"verdict": "dirty", "reason": "GPU 7 is used by train.py (pid 99)"})
    settings = write(keep=1)
    for _ in range(2):
        done = run(project, settings)
        assert done.returncode == 2
        assert done.stdout.splitlines()[-1] == "Exit status 2. Verdicts - dirty: a"
    last = json.loads((tmp_path / "data/nightly/last-run.json").read_text())
    assert (last["exit_status"], last["last_line"]) == (2, "Verdicts - dirty: a")
    assert len(list((tmp_path / "data/nightly/runner/artifacts").iterdir())) == 1
    assert len((project.folder / "artifacts/resets.jsonl").read_text().splitlines()) == 2


def test_every_run_computes_its_window_anew(project, write, tmp_path):
    project.host("a")
    settings = write(window="2h")
    run(project, settings)
    extravars = tmp_path / "data/nightly/runner/env/extravars"
    first = json.loads(extravars.read_text())["reset_not_after"]
    extravars.write_text("{}")
    run(project, settings)
    second = json.loads(extravars.read_text())["reset_not_after"]
    assert first <= second and datetime.fromisoformat(second) > datetime.now(UTC)


def test_a_second_run_at_once_says_so_and_does_nothing(project, write, tmp_path):
    project.host("a")
    settings = write()
    (tmp_path / "data/nightly").mkdir(parents=True, mode=0o700)
    with open(tmp_path / "data/nightly/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(project, settings)
    assert done.returncode == 3
    assert done.stdout == "Nothing was done: the run of this schedule that began just now is still going on.\n"
    assert not (tmp_path / "data/nightly/runner").exists()


def test_outside_of_its_window_nothing_is_begun(project, write, tmp_path):
    project.host("a")
    settings = write(window=f"{datetime.now() - timedelta(minutes=2):%H:%M}")
    done = run(project, settings)
    assert done.returncode == 0
    assert done.stdout.startswith("Nothing was begun: the window ")
    assert not (tmp_path / "data/nightly/runner").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "the settings can't be read"),
        ("{}", "the settings can't be read"),
        (
            '{"schedule": {"name": "x"}, "repository": "/", "folder": "/", "artifacts": "/"}',
            "Schedule 'x' lacks calendar",
        ),
    ],
)
def test_settings_that_are_none_are_told_in_one_sentence_and_nothing_is_done(project, tmp_path, text, sentence):
    file = tmp_path / "broken.json"
    file.write_text(text)
    done = run(project, file)
    assert done.returncode == 5 and done.stderr == ""
    assert done.stdout.startswith(f"Nothing was done: {sentence}") and len(done.stdout.splitlines()) == 1
    assert run(project, tmp_path / "missing.json").returncode == 5


def test_a_run_that_takes_longer_than_its_timeout_is_ended_with_all_that_it_started(project, write, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        project.host("a", ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=silent.getsockname()[1])
        facts = json.loads(write(environment={"ANSIBLE_TIMEOUT": 60}).read_text())
        settings = Settings.read(json.dumps(facts))
        settings = replace(settings, schedule=replace(settings.schedule, timeout=2))
        said: list[str] = []
        status, last = scheduled._play(settings, {"reset_confirmed": True}, "one", said.append)
    assert (status, last.split(",")[0]) == (124, "The run was ended after 2 s")


def test_what_a_run_could_not_record_since_it_was_killed_is_recorded_by_its_schedule(write, tmp_path, monkeypatch):
    settings = Settings.read(write().read_text())

    def killed(*_: Any) -> tuple[int, str]:
        with another_run(settings.artifacts, breaker.Tally(tmp_path / "reset-p1"), "a", "b"):
            return 124, "The run was ended after 2 s, its timeout."

    monkeypatch.setattr(scheduled, "_play", killed)
    monkeypatch.setattr(scheduled, "_adopt_children", lambda: None)
    monkeypatch.setattr(scheduled, "_end_children", lambda: None)
    settings.folder.mkdir(parents=True)
    said: list[str] = []
    assert scheduled._run_alone(settings, said.append) == 124
    assert said[-2].endswith("was killed. Recorded now - a, b: not begun.") and said[-1].startswith("Exit status 124.")
    lines = (settings.artifacts / "resets.jsonl").read_text().splitlines()
    assert [json.loads(line)["host"] for line in lines] == ["a", "b"]


def chosen(**given: Any) -> dict[str, Any] | None:
    (one,), problems = schedules.parse([{"name": "n", "calendar": "daily", "inventory": "i", **given}])
    assert problems == []
    return scheduled.variables(one, NOW)


def test_a_schedule_sets_its_own_variables_and_nothing_that_it_does_not_say():
    forced = {"gpu_reset_kill_strangers": False, "reset_confirmed": True, "reset_schedule_name": "n"}
    assert chosen() == {**forced, "gpu_reset_policy": "drain"}
    full = chosen(
        window="2h",
        held_out=["b"],
        serial="10%",
        breaker_share=0.1,
        hook=["/bin/page"],
        variables={"gpu_reset_grace": 9},
    )
    assert full == {
        **forced,
        "gpu_reset_policy": "drain",
        "gpu_reset_grace": 9,
        "reset_not_after": "2026-01-05T05:00:00Z",
        "reset_held_out": ["b"],
        "reset_serial": "10%",
        "reset_breaker_share": 0.1,
        "reset_hook": ["/bin/page"],
    }
    assert (chosen(hook="https://pager/x") or {})["reset_hook"] == "https://pager/x"
    assert (chosen(breaker_share=0) or {})["reset_breaker_share"] == 0


def test_host_keys_are_checked_unless_the_schedule_says_otherwise(write, project):
    settings = Settings.read(write().read_text())
    assert scheduled.environment(settings)["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    settings = Settings.read(write(environment={"ANSIBLE_HOST_KEY_CHECKING": "False"}).read_text())
    assert scheduled.environment(settings)["ANSIBLE_HOST_KEY_CHECKING"] == "False"


def test_secrets_are_named_by_path_only(write):
    settings = Settings.read(write(vault_password_file="/etc/it's secret", ssh_key="/home/ops/key").read_text())
    words = ["--vault-password-file", "/etc/it's secret", "--private-key", "/home/ops/key"]
    assert shlex.split(scheduled.options(settings.schedule)) == words


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"limit": "a,nobody"}, "limit: 'nobody' is no host or group"),
        ({"limit": "a:!nobody"}, "limit: 'nobody' is no host or group"),
        ({"held_out": ["nobody"]}, "held_out: 'nobody' is no host or group"),
        ({"held_out": ["a", "b"]}, "no host of the group gpu_hosts"),
        ({"limit": "a:!a"}, "no host of the group gpu_hosts"),
        ({"inventory": "elsewhere"}, "elsewhere is not there"),
        ({"vault_password_file": "/nowhere"}, "vault_password_file: /nowhere is no file"),
        ({"hook": ["no-such-program"]}, "hook: there is no program 'no-such-program'"),
        ({"variables": {"gpu_reset_graze": 3}}, "variables: the role gpu_reset has no gpu_reset_graze."),
    ],
    ids=str,
)
def test_what_a_schedule_names_and_is_not_there_is_told(project, write, given, problem):
    project.host("a")
    project.host("b")
    (found,) = look(project, write(**given))["problems"]
    assert problem in found


def test_the_hosts_of_a_schedule_are_told(project, write):
    project.host("a")
    project.host("b")
    assert look(project, write(held_out=["b"])) == {"hosts": ["a"], "problems": []}
    assert look(project, write(limit="a,b")) == {"hosts": ["a", "b"], "problems": []}


def look(project: Project, settings: Path) -> dict[str, Any]:
    program = project.folder / "plugin_utils/gpu_control/scheduled.py"
    words = [sys.executable, "-I", str(program), "look"]
    done = subprocess.run(words, input=settings.read_text(), capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def test_records_that_a_worker_brought_back_are_added_once_and_a_broken_line_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path / "artifacts"))
    brought = tmp_path / "resets.jsonl"
    brought.write_text('{"run_id": "r1", "host": "a", "verdict": "clean"}\n{"run_id": "r2"\n')
    assert scheduled.main(["collect", str(brought)]) == 1
    assert f"{brought}, line 2, is no record and was left out." in capsys.readouterr().out
    assert scheduled.main(["collect", str(brought)]) == 1
    assert scheduled.main(["collect", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl could not be read (No such file or directory)" in capsys.readouterr().out
    lines = (tmp_path / "artifacts/resets.jsonl").read_text().splitlines()
    assert [json.loads(line)["run_id"] for line in lines] == ["r1"]


def test_what_a_play_leaves_behind_ends_with_the_run():
    program = (
        "import subprocess, sys; sys.path[:0] = sys.argv[1:]\n"
        "from gpu_control import scheduled\n"
        "scheduled._adopt_children()\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 600 & echo $!'])\n"
        "scheduled._end_children()\n"
    )
    folders = [str(scheduled.REPOSITORY / name) for name in ("plugin_utils", "module_utils")]
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(f"/proc/{int(done.stdout)}")
