"""Data jobs on hosts with a real systemd: started beside a server, told, resumed, stopped, and spared by a reset."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_control import lean
from gpu_host import arguments

from tests.lab.host import Host
from tests.lab.resets import PACKAGE, assert_clean, reset, until
from tests.lab.test_deploy import Target

# Writes to its log until /run/go is there; ends with the status in /run/status.<name>, 0 without one.
WORK = """#!/bin/sh
trap 'echo told to stop; exit 0' TERM
echo "$1 begins in $PWD as $(id -un) on GPUs '$CUDA_VISIBLE_DEVICES' $SECRET"
while [ ! -e /run/go ] && [ ! -e /run/go.$1 ]; do sleep 0.05; done
echo "done $1"
exit "$(cat /run/status.$1 2> /dev/null || echo 0)"
"""
# What the word in a command line, a folder or a title of a script must never cost a job.
WORDS = ["/usr/local/bin/work", "sglang-prompts", "--module", "sglang.launch_server", "sglang::scheduler_TP0"]


FULL = {name: option.get("default") for name, option in arguments.DATA_JOBS["jobs"]["options"].items()}


def job(name: str, *command: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": list(command or ["/usr/local/bin/work", name]), **more}


class Jobs:
    """A host on which the play runs jobs."""

    def __init__(self, host: Host) -> None:
        self.host = host
        host.write("/usr/local/bin/work", WORK, "0755")

    def play(
        self, *jobs: dict[str, Any], words: Sequence[str] = (), path: str = "playbooks/run-jobs.yml", **more: Any
    ) -> subprocess.CompletedProcess[str]:
        variables = {"run_jobs": list(jobs), **{f"run_jobs_{name}": value for name, value in more.items()}}
        return self.host.playbook(path, variables, *words)

    def call(self, *jobs: dict[str, Any], check: bool = False, **given: Any) -> dict[str, Any]:
        """The module on the host, without Ansible's own time."""
        params = {name: option.get("default") for name, option in arguments.DATA_JOBS.items()} | given
        params["jobs"] = [FULL | one for one in jobs]
        program = lean.program(sources(), "data_jobs", params, check_mode=check, diff=False)
        command = self.host.enter(["/usr/bin/python3", "-c", lean.BOOTSTRAP])
        done = subprocess.run(command, input=program, capture_output=True, timeout=60)
        found = dict(json.loads(done.stdout))
        assert "exception" not in found, found["exception"]
        return found

    def status(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.call(state="status")["jobs"]}

    def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in self.status().items()}

    def until(self, name: str, state: str) -> dict[str, Any]:
        until(lambda: self.states().get(name) == state, f"{name} to be {state}: {self.states()}", 30)
        return self.status()[name]

    def go(self, name: str = "") -> None:
        self.host.write(f"/run/go.{name}" if name else "/run/go", "")

    def journal(self, name: str) -> str:
        return self.host.exec(["journalctl", f"--identifier=datajob-{name}", "--output=cat", "--no-pager"]).stdout


@functools.cache
def sources() -> bytes:
    return lean.sources(PACKAGE, "data_jobs")


def changed(done: subprocess.CompletedProcess[str]) -> int:
    found = re.search(r"\bchanged=(\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return int(found.group(1))


@pytest.fixture
def jobs(gpu_host: Host) -> Jobs:
    return Jobs(gpu_host)


def test_jobs_run_in_parallel_a_second_run_leaves_them_alone_and_what_succeeded_is_not_run_again(jobs: Jobs) -> None:
    host = jobs.host
    host.write("/etc/prep.env", "SECRET=from-the-file\n", "0600")
    wanted = [
        job("a", user="engineer", folder="/tmp", environment_file="/etc/prep.env", cpus=1.5, memory_mib=512),
        job("b", environment={"SECRET": 'say "x" $HOME %h', "CUDA_VISIBLE_DEVICES": 0}),
        job("c", "/bin/echo", "$HOME", "%h", "${X}", "a b"),
        job("last", after=["a", "c"]),
    ]
    checked = jobs.play(*wanted, words=["--check", "--diff"])
    assert checked.returncode == 0 and changed(checked) == 1, checked.stdout + checked.stderr
    assert "a: would be started" in checked.stdout and host.exec("ls /var/log/data-jobs", check=False).returncode != 0

    done = jobs.play(*wanted)
    assert done.returncode == 0 and changed(done) == 1, done.stdout + done.stderr
    assert jobs.until("c", "succeeded")["last_line"] == "$HOME %h ${X} a b"
    assert jobs.states() == {"a": "running", "b": "running", "c": "succeeded", "last": "waiting"}
    asked = host.exec("systemctl show datajob-a -p CPUQuotaPerSecUSec,MemoryMax,Slice,OOMScoreAdjust,User").stdout
    assert set(asked.split()) == {
        *("CPUQuotaPerSecUSec=1.500000s", "MemoryMax=536870912", "Slice=datajobs.slice", "OOMScoreAdjust=500"),
        "User=engineer",
    }
    pids = {name: one["pid"] for name, one in jobs.status().items()}
    again = jobs.play(*wanted)
    assert again.returncode == 0 and changed(again) == 0, again.stdout
    assert {name: one["pid"] for name, one in jobs.status().items()} == pids
    predicted = jobs.call(*wanted, check=True)
    assert predicted["changed"] is False and "a: running" in predicted["would"], predicted

    jobs.go()
    jobs.until("last", "succeeded")
    log = host.read("/var/log/data-jobs/a.log")
    assert "a begins in /tmp as engineer on GPUs '' from-the-file\ndone a\n" in log
    assert "as root on GPUs '0' say \"x\" $HOME %h\ndone b" in host.read("/var/log/data-jobs/b.log")
    # Nothing of a job is left in systemd, and what it said is in the journal, the last line too.
    left = "systemctl list-units --all --plain --no-legend 'datajob-*'"
    until(lambda: host.exec(left).stdout == "", "the units to go")
    until(lambda: "done a" in jobs.journal("a"), "the journal")
    assert "a begins in /tmp" in jobs.journal("a") and jobs.journal("c").splitlines() == ["$HOME %h ${X} a b"]
    assert jobs.call(*wanted)["changed"] is False
    assert jobs.call(*wanted, again=["c"])["changed"] is True
    assert (jobs.until("c", "succeeded")["attempt"], jobs.status()["a"]["attempt"]) == (2, 1)


def test_a_failed_job_is_named_what_follows_it_is_blocked_and_the_next_run_resumes_it(jobs: Jobs) -> None:
    host = jobs.host
    resume = ["/bin/echo", "resumed"]
    wanted = [job("prep", resume_command=resume), job("merge", after=["prep"]), job("other")]
    host.write("/run/status.prep", "3")
    jobs.go("prep")
    jobs.go("other")
    followed = jobs.play(*wanted, wait=True)
    assert followed.returncode == 2 and changed(followed) == 0, followed.stdout
    told = " ".join((followed.stdout + followed.stderr).split())
    assert "prep failed: it ended with exit status 3, see /var/log/data-jobs/prep.log" in told, told
    assert "merge blocked: prep did not succeed" in told
    assert jobs.states() == {"prep": "failed", "merge": "blocked", "other": "succeeded"}
    jobs.go()
    done = jobs.play(*wanted, wait=True)
    assert done.returncode == 0 and changed(done) == 1, done.stdout + done.stderr
    now = jobs.status()
    assert (now["prep"]["resumed"], now["prep"]["last_line"], now["prep"]["attempt"]) == (True, "resumed", 2)
    assert (now["merge"]["state"], now["other"]["attempt"]) == ("succeeded", 1)


def test_a_job_that_is_killed_stopped_or_lost_with_its_host_runs_again(jobs: Jobs) -> None:
    host = jobs.host
    wanted = [job("killed"), job("stopped"), job("after", after=["stopped"]), job("lost")]
    assert jobs.call(*wanted)["changed"] is True
    host.kill(jobs.status()["killed"]["pid"])
    assert jobs.until("killed", "failed")["why"] == "it was ended by SIGKILL"
    two = ["stopped", "after"]
    checked = jobs.call(*wanted, state="stopped", only=two, check=True)
    assert "stopped: would be stopped" in checked["would"] and jobs.states()["stopped"] == "running"
    done = jobs.play(*wanted, state="stopped", only=two)
    assert done.returncode == 0 and changed(done) == 1, done.stdout
    # It handled the signal and ended with 0, and still has not done its work.
    assert "told to stop" in host.read("/var/log/data-jobs/stopped.log")
    assert {**jobs.states(), "killed": ""} == {
        "killed": "",
        "stopped": "stopped",
        "after": "stopped",
        "lost": "running",
    }
    assert jobs.call(*wanted, state="stopped", only=two)["changed"] is False
    # As after a power cut: the process is gone and nobody noted its end.
    host.exec("systemctl stop datajob-lost; rm /var/lib/gpu-host/jobs/lost.end")
    assert "the host was restarted" in jobs.status()["lost"]["why"] and jobs.states()["lost"] == "lost"
    jobs.go()
    resumed = jobs.call(*wanted, wait=True)
    assert not resumed.get("failed"), resumed
    assert {(one["state"], one["attempt"]) for one in jobs.status().values()} == {("succeeded", 2)}


def test_a_job_that_can_not_be_run_is_told_at_once_and_bad_input_changes_nothing(jobs: Jobs) -> None:
    host = jobs.host
    host.write("/usr/local/bin/no-interpreter", "#!/none/sh\n", "0755")
    done = jobs.play(job("odd", "/usr/local/bin/no-interpreter"))
    assert done.returncode == 2
    assert "odd failed: it could not be started: its program can't be run" in " ".join(done.stdout.split()), done.stdout
    bad = [
        (job("a", "/none/program"), "a: there is no program /none/program on this host"),
        (job("a", user="nobody-here"), "a: there is no user nobody-here on this host"),
        (job("a", folder="/none"), "a: there is no folder /none on this host"),
        (job("a", environment_file="/none.env"), "a: there is no environment file /none.env on this host"),
    ]
    for one, sentence in bad:
        found = jobs.call(one)
        assert str(found["msg"]).startswith("Nothing was done.") and sentence in str(found["msg"]), found
    assert list(jobs.states()) == ["odd"]


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    return tmp_path


def test_the_eagle3_server_makes_way_for_the_baseline_ten_jobs_start_beside_it_and_a_reset_spares_them(
    gpu_host: Host, artifacts: Path
) -> None:
    target, jobs = Target(gpu_host), Jobs(gpu_host)
    assert target.deploy("eagle3").status == 0
    speculating = target.main_pid()
    ask = """import time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:30000/v1/models").read()
    except OSError as error:
        print(error)
    time.sleep(0.1)
"""
    gpu_host.write("/data/sglang.launch_server/prompts.py", ask)
    wanted = [job(f"prepare-{number}") for number in range(7)]
    wanted += [
        job(
            "prompts", "/usr/bin/python3", "/data/sglang.launch_server/prompts.py", folder="/data/sglang.launch_server"
        ),
        job("words", *WORDS),
        job(
            "shell", "/bin/bash", "-c", "while true; do sleep 1000; done # python3 -m sglang.launch_server --port 30000"
        ),
    ]
    done = gpu_host.playbook("playbooks/prepare-data.yml", {**target.variables(), "run_jobs": wanted})
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.main_pid() not in (0, speculating) and target.deployment()["speculation"] == {}
    states = jobs.states()
    assert len(states) == 10 and set(states.values()) == {"running"}
    pids = {one["pid"] for one in jobs.status().values()}
    record = reset(gpu_host)
    assert_clean(gpu_host, record)
    assert jobs.states() == states and {one["pid"] for one in jobs.status().values()} == pids
    assert not pids & {row["pid"] for row in [*record["killed"], *record["spared"]]}
