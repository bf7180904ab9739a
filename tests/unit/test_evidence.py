from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_host import evidence
from gpu_host.deadline import Deadline
from gpu_host.procfs import Proc, Process

SERVER = """
import sys, time

def waiting_for_a_lock_that_nobody_gives_back():
    while True:
        time.sleep(0.05)

print("server_args=ServerArgs(model_path='/m', api_key='S3CR3T', port=30000)", flush=True)
for n in range(500):
    print("line", n, "token=S3CR3T", flush=True)
print("up", flush=True)
waiting_for_a_lock_that_nobody_gives_back()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    environment = {**os.environ, "NCCL_PROTO": "LL", "SGLANG_API_KEY": "S3CR3T", "UNRELATED": "S3CR3T"}
    log = tmp_path / "server.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "--api-key", "S3CR3T"],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=tmp_path,
        )
    until = time.monotonic() + 10
    while not log.read_text().endswith("up\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    found = Proc().process(process.pid)
    assert found is not None
    yield found
    process.kill()
    process.wait()


def parts_of(folder: str) -> dict[str, str]:
    return json.loads((Path(folder) / "parts.json").read_text())


def test_everything_about_a_hung_server_is_kept_and_nothing_secret(tmp_path: Path, server: Process) -> None:
    state = tmp_path / "state"
    started = time.monotonic()
    folder = evidence.collect(str(state), "run-1", Proc(), [server], {"gpus": [1]}, {"events": []}, Deadline(5))
    assert time.monotonic() - started < 5
    assert folder == str(state / "evidence/run-1")
    assert set(parts_of(folder).values()) == {"written"}
    assert sorted(os.listdir(folder)) == sorted([*parts_of(folder), "parts.json"])
    (row,) = json.loads((Path(folder) / "processes.json").read_text())
    assert row["pid"] == server.pid
    assert row["cwd"] == str(tmp_path)
    assert row["argv"][-2:] == ["--api-key", "***"]
    assert row["environ"]["NCCL_PROTO"] == "LL" and "UNRELATED" not in row["environ"]
    assert row["threads"] == 1 and row["rss_mib"] > 1 and row["state"] in "SR"
    tail = (Path(folder) / "log-tail.txt").read_text()
    assert str(tmp_path / "server.log") in tail
    assert tail.count("line") == 199 and tail.rstrip().endswith("up")
    assert json.loads((Path(folder) / "gpus.json").read_text()) == {"gpus": [1]}
    for path in Path(folder).iterdir():
        assert "S3CR3T" not in path.read_text(), path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@pytest.mark.skipif(not shutil.which("py-spy"), reason="needs py-spy")
def test_the_python_stacks_of_a_stopped_server_are_told_and_it_stays_as_it_was(tmp_path: Path, server: Process) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    text = evidence.stacks(Proc(), [server], shutil.which("py-spy") or "", Deadline(5))
    assert "waiting_for_a_lock_that_nobody_gives_back" in text
    after = Proc().process(server.pid)
    assert after is not None and after.state == "T"


def test_without_py_spy_the_kernel_says_where_each_thread_waits(server: Process) -> None:
    text = evidence.stacks(Proc(), [server], "", Deadline(5))
    assert "py-spy is not installed" in text
    assert f"thread {server.pid} " in text and "wchan" in text


def test_a_py_spy_that_fails_or_hangs_is_no_reason_to_know_nothing(tmp_path: Path, server: Process) -> None:
    for body in ("echo boom >&2; exit 1", "exec sleep 60"):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        started = time.monotonic()
        text = evidence.stacks(Proc(), [server], str(program), Deadline(0.5))
        assert time.monotonic() - started < 2
        assert f"thread {server.pid} " in text
        assert ("boom" in text) or ("did not end in time" in text)


def test_a_py_spy_that_others_could_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert evidence.find_py_spy() == str(program)
    program.chmod(0o757)
    assert evidence.find_py_spy() == ""


def test_a_part_that_hangs_or_fails_costs_nothing_but_itself(tmp_path: Path) -> None:
    def hangs(within: Deadline) -> str:
        time.sleep(60)
        return ""

    def fails(within: Deadline) -> str:
        raise RuntimeError("token=S3CR3T")

    started = time.monotonic()
    became = evidence.gather(str(tmp_path), {"a": hangs, "b": fails, "c": lambda within: "text"}, Deadline(1.0))
    assert time.monotonic() - started < 1.5
    assert became == {"a": "not there at the deadline", "b": "failed: RuntimeError: token=***", "c": "written"}
    assert (tmp_path / "c").read_text() == "text"


def test_a_process_that_hangs_when_it_is_read_hides_no_other(
    tmp_path: Path, server: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = replace(server, pid=server.pid + 100_000)
    real = evidence.describe

    def describe(proc: Proc, process: Process) -> dict[str, Any]:
        if process == stuck:
            time.sleep(60)
        return real(proc, process)

    monkeypatch.setattr(evidence, "describe", describe)
    folder = evidence.collect(str(tmp_path / "state"), "r", Proc(), [stuck, server], deadline=Deadline(1.5), py_spy="")
    assert parts_of(folder)["processes.json"] == "written"
    rows = json.loads((Path(folder) / "processes.json").read_text())
    assert "did not return" in rows[0]["unread"]
    assert rows[1]["pid"] == server.pid and rows[1]["rss_mib"] > 1


def test_a_process_that_is_gone_or_unreadable_is_told_so(tmp_path: Path, server: Process) -> None:
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    folder = evidence.collect(str(tmp_path / "state"), "r", Proc(), [server], deadline=Deadline(5), py_spy="")
    assert set(parts_of(folder).values()) == {"written"}
    (row,) = json.loads((Path(folder) / "processes.json").read_text())
    assert row["state"] == "gone" and row["environ"] == "could not be read"
    assert "no process writes" in (Path(folder) / "log-tail.txt").read_text()


def test_a_deleted_log_is_read_through_its_descriptor(tmp_path: Path, server: Process) -> None:
    (tmp_path / "server.log").unlink()
    text = evidence.log_tails(Proc(), [server], Deadline(5))
    assert "(deleted)" in text and text.rstrip().endswith("up")


def test_a_secret_cut_in_half_at_the_start_of_the_tail_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("api_key='" + "S3CR3T" * 20 + "'\nafter\n")
    monkeypatch.setattr(evidence, "LOG_BYTES", 40)
    assert evidence._file_tail(str(path), set()) == "after"


def test_a_pipe_is_never_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert evidence._file_tail(str(tmp_path / "pipe"), set()) is None


def test_only_the_evidence_of_the_last_twenty_runs_is_kept(tmp_path: Path) -> None:
    for n in range(25):
        folder = tmp_path / f"evidence/run-{n:02d}"
        folder.mkdir(parents=True)
        (folder / "parts.json").write_text("{}")
        os.utime(folder, (n, n))
    (tmp_path / "outside").mkdir()
    (tmp_path / "evidence/link").symlink_to(tmp_path / "outside")
    evidence.collect(str(tmp_path), "newest", Proc(), [], deadline=Deadline(2), py_spy="")
    left = sorted(path.name for path in (tmp_path / "evidence").iterdir() if not path.is_symlink())
    assert left == ["newest"] + [f"run-{n:02d}" for n in range(6, 25)]
    assert (tmp_path / "outside").exists()


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "."])
def test_a_run_id_that_leads_elsewhere_keeps_nothing(tmp_path: Path, run_id: str) -> None:
    assert evidence.collect(str(tmp_path), run_id, Proc(), [], deadline=Deadline(1)) == ""
    assert evidence.collect("/proc/nowhere", "run", Proc(), [], deadline=Deadline(1)) == ""
