"""The plays, the role and the plugins, with a stand-in for the reset itself (control_project.py)."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import server_record

from .control_project import Project

GPU = {
    "index": 0,
    "uuid": "GPU-12345678-1234-1234-1234-123456789abc",
    "used_mib_before": 95000,
    "used_mib_after": 0,
    "verdict": "free",
    "cure": "",
    "pids": [],
}
DIRTY = {"verdict": "dirty", "reason": "GPU 7 is used by train.py (pid 99)"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def module_play(project: Project, arguments: dict | None = None, **keywords: Any) -> Path:
    """A play of one gpu_reset task on all hosts, whose result is kept in the host's file <name>.json."""
    keep = {
        "ansible.builtin.copy": {
            "content": "{{ result | to_json }}",
            "dest": f"{project.folder}/{{{{ inventory_hostname }}}}.json",
        },
        "delegate_to": "localhost",
        "check_mode": False,
        "diff": False,
        "become": False,
        "vars": {"ansible_connection": "local"},
    }
    task = {"gpu_reset": arguments or {}, "register": "result", "ignore_errors": True, **keywords}
    play = [{"hosts": "gpu_hosts", "environment": "{{ gpu_host_environment }}", "tasks": [task, keep]}]
    file = project.folder / "module.yml"
    file.write_text(yaml.safe_dump(play))
    return file


def returned(project: Project, host: str = "a") -> dict:
    return json.loads((project.folder / f"{host}.json").read_text())


def test_a_clean_host_ends_in_exit_status_0_a_record_and_its_verdict_on_the_last_line(project):
    project.host("a", {"gpus": [GPU], "simulated": True})
    outcome = project.play()
    assert outcome.status == 0, outcome.output
    assert outcome.last_line == "Verdicts - clean: a (SIMULATED)"
    assert [(one["host"], one["verdict"], one["gpus"]) for one in outcome.records] == [("a", "clean", [GPU])]
    assert "a       0      95 000      0  free" in outcome.output
    assert json.loads((project.folder / "artifacts/last-reset.json").read_text())[0]["host"] == "a"


def test_every_host_gets_its_verdict_and_none_stops_the_others(project):
    project.host("good")
    project.host("bad", DIRTY)
    project.host("gone", ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
    project.host("odd", {"exit": 3})
    project.host("held", gpu_host_not_ready="Held out until its riser is replaced.")
    outcome = project.play("-e", "reset_confirmed=true")
    assert outcome.status != 0
    assert outcome.last_line == "Verdicts - dirty: bad; unreachable: gone; unknown: held, odd; clean: good"
    assert "bad is dirty: GPU 7 is used by train.py (pid 99)" in outcome.output
    assert "held: unknown - Held out until its riser is replaced." in outcome.output
    recorded = {one["host"]: one["verdict"] for one in outcome.records}
    assert recorded == {"good": "clean", "bad": "dirty", "gone": "unreachable", "odd": "unknown"}
    assert len({one["run_id"] for one in outcome.records}) == 4


def test_a_skipped_host_is_recorded_as_skipped_with_the_reason_of_the_module(project):
    project.host("a", {"verdict": "skipped", "reason": "2 requests are running"})
    outcome = project.play()
    assert (outcome.status, outcome.last_line) == (0, "Verdicts - skipped: a")
    assert outcome.records[0]["reason"] == "2 requests are running"


def test_check_mode_reaches_the_host_and_records_nothing(project):
    project.host("a", DIRTY)
    outcome = project.play("--check")
    assert outcome.records == []
    assert outcome.last_line == "Verdicts now, nothing was changed - dirty: a"


def test_several_hosts_are_refused_where_nobody_can_answer_and_the_variable_is_named(project):
    project.host("a")
    project.host("b")
    outcome = project.play()
    assert outcome.status != 0
    assert "a reset of 2 hosts needs consent." in outcome.output and "reset_confirmed=true" in outcome.output
    assert "Verdicts - skipped: a, b" in outcome.output.splitlines()
    assert outcome.records == []


@pytest.mark.parametrize("consent", [["--limit", "a,b"], ["-e", "reset_confirmed=true"]])
def test_limit_or_the_variable_is_consent(project, consent):
    project.host("a")
    project.host("b")
    outcome = project.play(*consent)
    assert (outcome.status, outcome.last_line) == (0, "Verdicts - clean: a, b")


@pytest.mark.parametrize(("answer", "records"), [("yes", 2), ("no", 0)])
def test_at_a_terminal_the_play_asks_and_does_what_the_answer_says(project, answer, records):
    project.host("a")
    project.host("b")
    project.play("--list-hosts")  # writes the inventory
    status, shown = at_a_terminal(project, answer)
    assert "This ends the servers on 2 hosts (a, b)" in shown
    file = project.folder / "artifacts/resets.jsonl"
    assert len(file.read_text().splitlines() if file.exists() else []) == records
    assert (status == 0) == (records > 0)


def at_a_terminal(project: Project, answer: str) -> tuple[int, str]:
    """Run the reset on a pseudo-terminal and answer its question."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "ANSIBLE_HOME": str(project.folder / ".ansible"), "ANSIBLE_NOCOLOR": "1"}
    command = ["ansible-playbook", "-i", "inventory", "playbooks/reset.yml"]
    with subprocess.Popen(
        command,
        cwd=project.folder,
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(follower)
        shown, end = "", time.monotonic() + 30
        try:
            while time.monotonic() < end:
                if select.select([leader], [], [], 0.5)[0]:
                    try:
                        shown += os.read(leader, 65536).decode(errors="replace")
                    except OSError:  # the other end is closed
                        break
                elif "Type yes to go on" in " ".join(shown.split()):
                    # Again until it is taken: what was typed before the prompt reads is thrown away.
                    os.write(leader, f"{answer}\r".encode())
            process.wait(timeout=10)
        finally:
            process.kill()
    os.close(leader)
    return process.returncode, " ".join(shown.split())


def test_an_empty_fleet_is_no_success(project):
    outcome = project.play()
    assert outcome.status == 2
    assert "matches no host. Put hosts into the group gpu_hosts" in outcome.output


def test_a_limit_outside_of_the_group_is_no_success(project):
    project.host("a")
    (project.folder / "inventory").mkdir()
    (project.folder / "inventory/others.yml").write_text("all: {hosts: {elsewhere: }}\n")
    outcome = project.play("--limit", "elsewhere")
    assert outcome.status == 2
    assert "matches no host" in outcome.output


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ({"gpu_reset_phases": ["evidence", "destroy"]}, "destroy"),
        ({"gpu_reset_grace": -1}, "Nothing was done: gpu_reset_grace: -1.0 is no time to wait"),
        ({"gpu_reset_grace": "abc"}, "Nothing was done: gpu_reset_grace is 'abc', not a number."),
        (
            {"gpu_reset_lock_timeout": 1e9},
            "gpu_reset_lock_timeout: 1000000000.0 is no time to wait; give seconds from 0",
        ),
        ({"gpu_reset_free_mib": -1}, "gpu_reset_free_mib: -1 is no amount of memory"),
        ({"gpu_reset_ports": [99999]}, "gpu_reset_ports: 99999 is no port"),
        ({"gpu_reset_server_modules": ["python3"]}, "'python3' would match unrelated processes"),
        ({"gpu_reset_gpu": [4]}, "has no variable gpu_reset_gpu"),
        ({"reset_confirmed": "perhaps"}, "perhaps"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_the_host_is_touched(project, variable, sentence):
    project.host("a", {"raise": "the host was touched"})
    outcome = project.play("-e", json.dumps(variable))
    assert outcome.status != 0
    assert sentence in " ".join(outcome.output.split()), outcome.output
    assert "the host was touched" not in outcome.output
    assert outcome.records == []


def test_what_one_host_alone_says_wrongly_is_refused_at_that_host(project):
    project.host("a", {"raise": "the host was touched"}, gpu_reset_grace=1e9, gpu_reset_policy="force")
    project.host("b")
    outcome = project.play("-e", "reset_confirmed=true")
    assert outcome.last_line == "Verdicts - unknown: a; clean: b"
    assert "grace: 1000000000.0 is no time to wait" in " ".join(outcome.output.split())
    assert [one["host"] for one in outcome.records] == ["b"]


def test_what_the_host_itself_refuses_has_a_verdict_and_no_record(project):
    earlier = {"run_id": "r0", "host": "own-name", "verdict": "dirty", "started": "2026-01-01T00:00:00Z"}
    refusal = {"verdict": "unknown", "reason": "Nothing was done. GPU 99 is not on this host", "refused": True}
    project.host("a", {**refusal, "earlier": [earlier]})
    outcome = project.play()
    assert (outcome.status, outcome.last_line, outcome.records) == (2, "Verdicts - unknown: a", [])
    assert "Nothing was done. GPU 99 is not on this host" in " ".join(outcome.output.split())


def test_the_lean_path_and_the_ordinary_module_return_the_same(project):
    arguments = {
        "gpus": [3, "GPU-12345678-1234-1234-1234-123456789abc"],
        "grace": "7.5",
        "run_id": "r1",
        "last_recorded_run": "r0",
    }
    project.host("lean", {"gpus": [GPU], "reason": "Ünïcode, 'quotes' and \"more\" {{ braces }}"})
    project.host(
        "ordinary", {"gpus": [GPU], "reason": "Ünïcode, 'quotes' and \"more\" {{ braces }}"}, ansible_pipelining=False
    )
    outcome = project.play("--diff", playbook=module_play(project, arguments))
    assert outcome.status == 0, outcome.output
    lean, ordinary = returned(project, "lean"), returned(project, "ordinary")
    assert (lean["saw"].pop("basic"), ordinary["saw"].pop("basic")) == (False, True)
    for one in (lean, ordinary):
        del one["saw"]["argv"], one["saw"]["command_line"]
        for internal in ("_diff_peek", "_ansible_no_log"):
            one.pop(internal, None)
    assert lean == ordinary
    assert lean["saw"]["diff"] is True
    assert lean["saw"]["params"]["gpus"] == ["3", "GPU-12345678-1234-1234-1234-123456789abc"]
    assert lean["reason"].endswith("{{ braces }}")


def test_parameters_stand_on_no_command_line(project):
    project.host("a")
    project.play(playbook=module_play(project, {"protected": ["known-only-to-me"]}))
    saw = returned(project)["saw"]
    assert saw["params"]["protected"] == ["known-only-to-me"]
    assert saw["command_line"] and "known-only-to-me" not in saw["command_line"]


def test_async_runs_the_ordinary_module(project):
    project.host("a")
    outcome = project.play(playbook=module_play(project, {}, **{"async": 30, "poll": 1}))
    assert outcome.status == 0, outcome.output
    assert returned(project)["saw"]["basic"] is True
    assert outcome.records[0]["verdict"] == "clean"


def test_an_unpinned_interpreter_is_discovered_as_usual(project):
    project.host("a", ansible_python_interpreter="auto_silent")
    # Discovery takes the newest Python by name, and a version manager's shims are no Pythons.
    plain = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    outcome = project.play(playbook=module_play(project), PATH=plain)
    assert outcome.status == 0, outcome.output
    assert returned(project)["verdict"] == "clean"


# What sudo does, without its configuration: drop the options, become the user, run the command.
SUDO = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -u ] && shift; shift; done
exec setpriv --reuid nobody --clear-groups -- "$@"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user without a password needs root")
def test_become_reaches_the_lean_path(project):
    sudo = project.folder / "sudo"
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    become = {"ansible_become": True, "ansible_become_user": "nobody", "ansible_become_exe": str(sudo)}
    project.host("a", ansible_python_interpreter="/usr/bin/python3", **become)
    outcome = project.play(playbook=module_play(project))
    assert outcome.status == 0, outcome.output
    saw = returned(project)["saw"]
    assert (saw["uid"] != 0, saw["basic"]) == (True, False)


def test_no_log_hides_the_result_from_output_and_record(project):
    project.host("a", {"reason": "hidden-word"})
    outcome = project.play("-vvv", playbook=module_play(project, no_log=True))
    assert "hidden-word" not in outcome.output.replace("STUB_RESULT", "").partition("PLAY RECAP")[2]
    assert "hidden-word" not in json.dumps(outcome.records)
    assert outcome.records[0]["verdict"] == "unknown"


@pytest.mark.parametrize(
    ("result", "variables", "sentence"),
    [
        (
            {},
            {"ansible_python_interpreter": "/nonexistent/python3"},
            "interpreter '/nonexistent/python3' was not found",
        ),
        ({"exit": 3}, {}, "Segmentation fault"),
        ({"raise": "disk on fire"}, {}, "RuntimeError: disk on fire"),
    ],
    ids=["no interpreter", "no JSON", "an exception"],
)
def test_what_goes_wrong_on_a_host_is_told_as_ansible_tells_it(project, result, variables, sentence):
    project.host("a", result, **variables)
    outcome = project.play()
    assert outcome.status == 2
    assert sentence in outcome.output
    assert outcome.last_line == "Verdicts - unknown: a"


def test_a_python_too_old_for_the_reset_says_so(project):
    old = next((p for p in (Path.home() / ".pyenv/versions").glob("3.[678].*/bin/python3")), None)
    if old is None:
        pytest.skip("no Python before 3.9 is installed")
    project.host("a", ansible_python_interpreter=str(old))
    outcome = project.play()
    assert "is too old on this host; set ansible_python_interpreter" in outcome.output


def test_a_reset_tells_the_host_which_of_its_runs_was_recorded_last(project):
    project.host("a")
    first = project.play().records[0]["run_id"]
    project.play(playbook=module_play(project))
    assert returned(project)["saw"]["params"]["last_recorded_run"] == first


def test_runs_that_were_never_recorded_are_recorded_by_the_next_one_and_once_only(project):
    lost = {"run_id": "lost-1", "verdict": "unknown", "killed": [{"pid": 7}]}
    project.host("a", {"earlier": [lost]})
    assert project.play().records[0]["run_id"] == "lost-1"
    outcome = project.play()
    assert [one["run_id"] for one in outcome.records].count("lost-1") == 1
    assert [(one["host"], one["earlier"]) for one in outcome.records] == [
        ("a", []),
        ("a", ["lost-1"]),
        ("a", []),
    ]


def test_a_record_that_can_not_be_written_costs_no_verdict_and_fails_the_run(project):
    project.host("a")
    (project.folder / "artifacts").write_text("a file where the folder should be")
    status, output = subprocess_play(project)
    assert "Verdicts - clean: a" in output
    assert "The record of a could not be written" in output
    assert status == 2


def subprocess_play(project: Project) -> tuple[int, str]:
    """Exit status and output of a play whose records can't be read back."""
    project.play("--list-hosts", GPU_ARTIFACTS="/nonexistent")
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", "inventory", "playbooks/reset.yml"],
        cwd=project.folder,
        env={**os.environ, "ANSIBLE_HOME": str(project.folder / ".ansible"), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


OWNERLESS = {**GPU, "used_mib_after": 95000, "verdict": "unowned_memory"}


def guest_and_hypervisor(project: Project, after: dict, on_hypervisor: dict, **variables) -> None:
    guest = {
        "verdict": "dirty",
        "reason": "GPU 0: memory without an owner",
        "gpus": [OWNERLESS],
        "by_phases": {"verify": after},
    }
    project.host("guest", guest, gpu_hypervisor="pve", gpu_hypervisor_guest="101", **variables)
    project.host("pve", on_hypervisor)


def test_ownerless_memory_of_a_guest_is_cleaned_from_its_hypervisor_in_the_guests_own_cgroup(project):
    victim = {
        "pid": 4321,
        "name": "sglang::scheduler",
        "class": "orphan",
        "why": "title",
        "signal": "KILL",
        "seconds": 0.1,
    }
    guest_and_hypervisor(
        project, {"verdict": "clean", "reason": "", "gpus": [GPU]}, {"killed": [victim], "verdict": "dirty"}
    )
    outcome = project.play("--limit", "guest", "-vvv")
    assert outcome.status == 0, outcome.output
    assert outcome.last_line == "Verdicts - clean: guest"
    assert "4321  sglang::scheduler" in outcome.output
    assert '"scope_cgroup": "/lxc/101"' in outcome.output.replace(
        "scope_cgroup: /lxc/101", '"scope_cgroup": "/lxc/101"'
    )
    assert [(one["host"], one["verdict"], one.get("guest")) for one in outcome.records] == [
        ("guest", "dirty", None),
        ("pve", "dirty", "guest"),
        ("guest", "clean", None),
    ]


def test_a_guest_that_stays_dirty_after_its_hypervisor_was_asked_fails(project):
    guest_and_hypervisor(project, {}, {"verdict": "clean"})
    outcome = project.play("--limit", "guest")
    assert (outcome.status, outcome.last_line) == (2, "Verdicts - dirty: guest")


@pytest.mark.parametrize("guest", ["", "/lxc", "/lxc/", "/", "lxc/101", None])
def test_a_hypervisor_is_left_alone_where_the_guest_is_not_told_from_the_others(project, guest):
    guest_and_hypervisor(project, {"verdict": "clean", "gpus": [GPU]}, {"verdict": "clean"})
    named = [] if guest is None else ["--extra-vars", json.dumps({"gpu_hypervisor_guest": guest})]
    if guest is None:
        project.host("guest", {"verdict": "dirty", "gpus": [OWNERLESS]}, gpu_hypervisor="pve")
    outcome = project.play("--limit", "guest", *named)
    assert (outcome.status, outcome.last_line) == (2, "Verdicts - dirty: guest")
    assert [one["host"] for one in outcome.records] == ["guest"]
    assert "Nothing was done on pve: gpu_hypervisor_guest of guest is" in " ".join(outcome.output.split())


@pytest.mark.parametrize("guest", [101, "/lxc/101/ns", "/lxc.payload.gpu02", "/machine.slice/libpod-1.scope"])
def test_a_guest_is_told_by_its_id_or_by_the_path_of_its_control_group(project, guest):
    guest_and_hypervisor(project, {"verdict": "clean", "gpus": [GPU]}, {"verdict": "clean"})
    outcome = project.play("--limit", "guest", "--extra-vars", json.dumps({"gpu_hypervisor_guest": guest}))
    assert [one["host"] for one in outcome.records] == ["guest", "pve", "guest"], outcome.output


def test_a_hypervisor_is_not_asked_about_memory_whose_owner_is_known(project):
    project.host(
        "guest", {**DIRTY, "gpus": [{**GPU, "verdict": "in_use"}]}, gpu_hypervisor="pve", gpu_hypervisor_guest="101"
    )
    project.host("pve")
    outcome = project.play("--limit", "guest")
    assert [(one["host"], one["verdict"]) for one in outcome.records] == [("guest", "dirty")]


def test_restart_says_so_when_no_record_tells_what_to_start(project):
    project.host("a", {"killed": [{"pid": 7, "name": "sglang::scheduler"}]})
    outcome = project.play(playbook="playbooks/restart.yml")
    assert outcome.status == 2
    assert "a is clean, but nothing was started" in " ".join(outcome.output.split())
    assert outcome.last_line == "Verdicts - clean: a"


def test_restart_names_the_recorded_servers_where_none_is_to_start(project):
    state = project.folder / "state"
    (state / "servers").mkdir(parents=True, mode=0o700)
    state.chmod(0o700)
    server_record.save(
        server_record.ServerRecord(name="kimi", uid=os.getuid(), argv=("python", "-m", "sglang.launch_server")),
        str(state),
    )
    project.host("a", gpu_reset_state_folder=str(state), gpu_reset_own_processes_only=True)
    outcome = project.play(playbook="playbooks/restart.yml")
    assert outcome.status == 2
    assert "On record and not running: kimi. Name a recorded one with" in " ".join(outcome.output.split())


def test_a_server_that_is_named_and_not_recorded_is_the_reason_of_its_host(project):
    project.host("a", {"raise": "the host was touched"}, gpu_reset_state_folder=str(project.folder / "state"))
    outcome = project.play("-e", '{"restart_servers": ["nope"]}', playbook="playbooks/restart.yml")
    assert outcome.status == 2 and outcome.last_line == "Verdicts - unknown: a"
    (line,) = [one for one in outcome.output.splitlines() if one.startswith("a: unknown")]
    assert "nope" in line and "One or more items failed" not in line
