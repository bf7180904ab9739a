"""Data jobs: refused in one sentence, rendered as a transient unit, and told how they ended. tests/lab has the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from gpu_host import arguments, data_jobs, job_unit
from gpu_host.job_unit import Ended, Job

CASES = yaml.safe_load((Path(__file__).parent / "cases/data_jobs.yml").read_text())


def params(**given: Any) -> dict[str, Any]:
    validated = ArgumentSpecValidator(arguments.DATA_JOBS).validate(given)
    assert validated.error_messages == []
    return dict(validated.validated_parameters)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:60])
def test_jobs_that_make_no_sense_are_refused_in_one_sentence(case):
    given = {name: value for name, value in case.items() if name != "refused"}
    found = data_jobs.problems(params(**given))
    assert len(found) == (1 if "refused" in case else 0), found
    assert all(case["refused"] in sentence for sentence in found)


def start(one: Job, waits: dict[str, str] | None = None) -> list[str]:
    return job_unit.start_command(
        one, one.command, "a1", "/state/jobs", "/log/a.log", "datajobs.slice", 30, waits or {}
    )


def test_no_value_of_an_environment_and_no_dollar_that_systemd_would_replace_stands_on_the_command_line():
    one = Job(
        "a", ("/bin/prep", "$HOME", "%h", "a b"), environment={"TOKEN": "s3cret"}, environment_file="/etc/prep.env"
    )
    words = start(one)
    assert "s3cret" not in " ".join(words)
    assert words[words.index("--") + 1 :] == ["/bin/prep", "$$HOME", "%h", "a b"]
    files = [word for word in words if word.startswith("--property=EnvironmentFile=")]
    assert files == ["--property=EnvironmentFile=/state/jobs/a.env", "--property=EnvironmentFile=/etc/prep.env"]


def test_limits_are_asked_for_where_they_are_given_and_only_there():
    limited = start(Job("a", ("x",), cpus=2.5, memory_mib=100, max_seconds=60, folder="/data"))
    wanted = {"CPUQuota=250%", "MemoryMax=100M", "TimeoutStartSec=60", "WorkingDirectory=/data"}
    assert {f"--property={one}" for one in wanted} <= set(limited)
    free = " ".join(start(Job("a", ("x",))))
    assert not any(name in free for name in ("CPUQuota", "MemoryMax", "TimeoutStartSec", "WorkingDirectory"))


def test_a_job_after_another_waits_in_systemds_queue_and_never_starts_that_one():
    words = start(Job("b", ("x",), after=("a",)), {"a": "a7"})
    assert "--property=After=datajob-a.service" in words and "Requires" not in " ".join(words)
    assert "--property=ExecStartPre=+/bin/sh /state/jobs/note-begin b a1 a:a7" in words


@pytest.mark.parametrize(
    ("ended", "stop", "begins"),
    [
        ("a7 success exited 0 1700000000\n", "", True),
        ("a7 exit-code exited 3 1700000000\n", "", False),
        ("a6 success exited 0 1700000000\n", "", False),  # an attempt before
        ("a7 success exited 0 1700000000\n", "a7\n", False),  # ended by a stop, with 0
        ("a7 success exited 0 1700000000\n", "a6\n", True),
        ("", "", False),
    ],
)
def test_a_job_begins_only_when_that_before_it_succeeded(tmp_path, ended, stop, begins):
    (tmp_path / "bin").mkdir()
    run = tmp_path / "bin/systemd-run"
    run.write_text("#!/bin/sh\nexit 1\n")  # the copy into the journal must never cost the job
    run.chmod(0o755)
    (tmp_path / "b.log").write_text("12345")
    script = tmp_path / "note-begin"
    script.write_text(job_unit.begin_script(str(tmp_path), str(tmp_path), "datajobs.slice", "s/a/b/"))
    for name, text in (("a.end", ended), ("a.stop", stop)):
        if text:
            (tmp_path / name).write_text(text)
    words = ["/bin/sh", str(script), "b", "b1", "a:a7"]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode == 0) is begins, done.stderr
    began = tmp_path / "b.begun"
    assert began.exists() is begins
    assert not begins or job_unit.begun(began.read_text(), "b1") is not None
    assert not begins or job_unit.begun(began.read_text(), "b2") is None


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"SERVICE_RESULT": "success", "EXIT_CODE": "exited", "EXIT_STATUS": "0"}, ""),
        ({"SERVICE_RESULT": "exit-code", "EXIT_CODE": "exited", "EXIT_STATUS": "3"}, "ended with exit status 3"),
        ({"SERVICE_RESULT": "exit-code", "EXIT_CODE": "exited", "EXIT_STATUS": "203"}, "its program can't be run"),
        ({"SERVICE_RESULT": "signal", "EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}, "was ended by SIGKILL"),
        ({"SERVICE_RESULT": "core-dump", "EXIT_CODE": "dumped", "EXIT_STATUS": "SEGV"}, "was ended by SIGSEGV"),
        ({"SERVICE_RESULT": "oom-kill", "EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}, "memory (memory_mib: 512)"),
        ({"SERVICE_RESULT": "timeout", "EXIT_CODE": "killed", "EXIT_STATUS": "TERM"}, "too long (max_seconds: 60)"),
        ({"SERVICE_RESULT": "exit-code"}, "could not be started (exit-code)"),
    ],
    ids=str,
)
def test_how_a_job_ended_is_kept_by_its_last_script_and_told_in_words(tmp_path, told, why):
    script = tmp_path / "note-end"
    script.write_text(job_unit.end_script(str(tmp_path)))
    environment = {"PATH": "/usr/bin:/bin", **told}
    subprocess.run(["/bin/sh", str(script), "a", "a1"], env=environment, check=True)
    found = job_unit.ended((tmp_path / "a.end").read_text())
    assert found is not None and found.attempt == "a1" and found.at > 1e9
    assert found.succeeded is (why == "")
    assert why in found.why(512, 60) if why else found.why(0, 0) == ""


@pytest.mark.parametrize("text", ["", "a1 success", "a1 success exited 0 soon", "a b c d e f"])
def test_a_half_written_end_is_none(text):
    assert job_unit.ended(text) is None


def test_the_last_line_is_that_of_this_attempt_without_secrets_or_control_characters(tmp_path):
    log = tmp_path / "a.log"
    old = "an older attempt\n"
    log.write_text(f"{old}10%\r57%\r58% \x1b[31mapi_key='s3cr3t'\r\n\n")
    assert data_jobs._last_line(str(log), len(old)) == "58% api_key='***'"
    assert data_jobs._last_line(str(log), log.stat().st_size) == ""
    assert data_jobs._last_line(str(tmp_path / "none"), 0) == ""
    log.write_text("x" * 100_000)
    assert len(data_jobs._last_line(str(log), 0)) == 160


def test_jobs_begin_in_the_order_in_which_they_wait_for_each_other():
    jobs = [Job("c", ("x",), after=("b",)), Job("a", ("x",)), Job("b", ("x",), after=("a",))]
    assert [one.name for one in data_jobs._in_order(jobs)] == ["a", "b", "c"]


def test_the_summary_names_what_ended_first():
    states = ["running", "failed", "running", "succeeded"]
    found = [data_jobs.Status(str(number), state) for number, state in enumerate(states)]
    assert data_jobs.summary(found) == "4 data jobs: 1 succeeded, 1 failed, 2 running"


def test_a_definition_differs_by_what_runs_and_not_by_its_limits():
    one = Job("a", ("x",), cpus=1)
    assert data_jobs.digest(one) == data_jobs.digest(Job("a", ("x",), cpus=2, max_seconds=5))
    assert data_jobs.digest(one) != data_jobs.digest(Job("a", ("x",), environment={"A": "1"}))


def test_an_end_of_another_kind_is_no_exit_status():
    assert Ended("a", "signal", "killed", "KILL", 1.0).exit_status is None
