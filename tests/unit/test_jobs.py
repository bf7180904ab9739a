"""Long work on a host: jobs that outlive the call, the loop that follows them, reports that are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_control import progress, reports
from gpu_host import job
from gpu_host.procfs import Proc


def steps(*commands: str) -> list[job.Step]:
    return [
        job.Step(f"step {number}", ["sh", "-c", command], dict(os.environ)) for number, command in enumerate(commands)
    ]


def test_steps_run_in_order_and_their_output_is_kept(tmp_path):
    job.start(str(tmp_path), steps("echo one", "echo two >&2"), 30)
    assert job.wait(str(tmp_path), 10).state == "done"
    assert job.log_tail(str(tmp_path)) == "== step 0\none\n== step 1\ntwo\n"


def test_a_step_that_fails_ends_the_job_and_is_named(tmp_path):
    job.start(str(tmp_path), steps("true", "exit 7", "touch never"), 30)
    now = job.wait(str(tmp_path), 10)
    assert (now.state, now.step, now.code) == ("failed", "step 1", 7)
    assert not (tmp_path / "never").exists()


def test_a_command_that_is_not_there_fails(tmp_path):
    job.start(str(tmp_path), [job.Step("only", ["/nonexistent/nvcc"], {})], 30)
    assert job.wait(str(tmp_path), 10).code == 127
    assert "No such file" in job.log_tail(str(tmp_path))


def test_a_job_outlives_the_call_that_started_it(tmp_path):
    go = tmp_path / "go"
    step = f"job.Step('s', ['sh', '-c', 'until [ -e {go} ]; do sleep 0.05; done; echo end'], dict(os.environ))"
    code = f"import os\nfrom gpu_host import job\njob.start({str(tmp_path)!r}, [{step}], 30)"
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert job.status(str(tmp_path)).state == "running"
    go.touch()
    assert job.wait(str(tmp_path), 10).state == "done"


def test_a_job_whose_process_was_killed_is_gone_and_not_running(tmp_path):
    job.start(str(tmp_path), steps("sleep 30"), 60)
    assert job.wait(str(tmp_path), 0.3).state == "running"
    owner = json.loads((tmp_path / "owner.json").read_text())
    group = int((tmp_path / "group").read_text())
    os.kill(owner["pid"], signal.SIGKILL)
    try:
        assert job.wait(str(tmp_path), 5).state == "gone"
    finally:
        os.killpg(group, signal.SIGKILL)


def test_a_pid_that_was_given_to_somebody_else_is_no_running_job(tmp_path):
    (tmp_path / "owner.json").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))
    assert job.status(str(tmp_path)).state == "gone"


def test_a_step_that_runs_out_of_time_is_ended_with_its_children(tmp_path):
    job.start(str(tmp_path), steps("sleep 31.75 & sleep 31.5"), 0.3)
    now = job.wait(str(tmp_path), 10)
    assert (now.state, now.code) == ("failed", 124)
    left = [
        process.argv
        for process in Proc().snapshot().values()
        if process.argv[:1] == ("sleep",) and process.argv[1] in ("31.75", "31.5")
    ]
    assert left == []


def test_stop_ends_a_running_job(tmp_path):
    job.start(str(tmp_path), steps("sleep 32.5", "touch never"), 60)
    job.wait(str(tmp_path), 0.3)
    job.stop(str(tmp_path))
    assert job.wait(str(tmp_path), 5).state == "gone"
    time.sleep(0.1)
    assert not (tmp_path / "never").exists()
    assert not any(process.argv[:2] == ("sleep", "32.5") and not process.gone for process in Proc().snapshot().values())


def test_the_environment_of_a_step_is_on_no_command_line_and_in_no_file_that_stays(tmp_path):
    job.start(
        str(tmp_path),
        [job.Step("s", ["sh", "-c", "cat /proc/$PPID/cmdline; sleep 0.2"], {**os.environ, "HF_TOKEN": "hf_abcdef"})],
        30,
    )
    assert job.wait(str(tmp_path), 10).state == "done"
    assert "hf_abcdef" not in job.log_tail(str(tmp_path))
    assert not (tmp_path / "plan.json").exists()


# ---- the loop on the control node ----


def test_unfinished_work_is_called_again_and_told_each_time():
    answers = iter(
        [{"unfinished": True, "progress": "1 of 3"}, {"unfinished": True, "progress": "2 of 3"}, {"changed": True}]
    )
    told: list[str] = []
    assert progress.follow(lambda: next(answers), told.append, "gpu01") == {"changed": True}
    assert told == ["  gpu01: 1 of 3", "  gpu01: 2 of 3"]


def test_a_failure_in_between_ends_the_loop():
    answers = iter(
        [{"unfinished": True, "progress": "1 of 3"}, {"failed": True, "unfinished": True, "msg": "out of memory"}]
    )
    assert progress.follow(lambda: next(answers), lambda line: None, "a")["msg"] == "out of memory"


def test_work_without_news_is_said_to_have_none():
    answers = iter([{"unfinished": True, "progress": "x"}, {"unfinished": True, "progress": "x"}, {}])
    told: list[str] = []
    progress.follow(lambda: next(answers), told.append, "a")
    assert told == ["  a: x", "  a: x (no change)"]


def test_a_line_comes_at_least_every_15_seconds():
    assert progress.PATIENCE <= 14


# ---- reports ----


REPORT = {
    "part": "host",
    "passed": True,
    "findings": [{"severity": "warning", "code": "x", "found": "It is odd.", "cure": "Look."}],
    "switched_off": [],
    "facts": {"a": 1},
    "changed": False,
}


def test_a_report_is_kept_by_host_and_part_and_its_warnings_are_shown(tmp_path):
    returned: dict[str, Any] = dict(REPORT)
    path = reports.write("gpu01", returned, tmp_path)
    assert path == str(tmp_path / "preflight/gpu01-host.json")
    kept = json.loads((tmp_path / "preflight/gpu01-host.json").read_text())
    assert (kept["host"], kept["passed"], kept["facts"]) == ("gpu01", True, {"a": 1})
    assert returned["warnings"] == ["gpu01: It is odd. Look. (x)"]


def test_the_facts_of_a_host_that_failed_are_in_the_report_and_not_on_the_screen(tmp_path):
    returned: dict[str, Any] = {**REPORT, "failed": True}
    path = reports.write("a", returned, tmp_path)
    assert "facts" not in returned and "facts" in json.loads(Path(path).read_text())


def test_a_hosts_name_can_not_lead_elsewhere(tmp_path):
    assert reports.path_of("../../etc/x", "host", tmp_path).parent == tmp_path / "preflight"


def test_a_call_that_judged_nothing_leaves_no_report(tmp_path):
    assert reports.write("a", {"failed": True, "msg": "no such GPU"}, tmp_path) == ""
    assert not (tmp_path / "preflight").exists()


def test_a_report_that_can_not_be_written_is_a_warning(tmp_path):
    (tmp_path / "preflight").write_text("in the way")
    returned: dict[str, Any] = dict(REPORT, findings=[])
    assert reports.write("a", returned, tmp_path) == ""
    assert "could not be written" in returned["warnings"][0]
