from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host import server_record
from gpu_host.procfs import Proc
from gpu_host.server_record import ServerRecord
from gpu_host.storage import StorageError

RECORD = ServerRecord(
    name="port-30000",
    argv=("python", "-m", "sglang.launch_server", "--api-key", "S3CR3T"),
    cwd="/srv",
    environment={"HF_TOKEN": "S3CR3T", "NCCL_PROTO": "LL"},
    gpu_uuids=("GPU-1",),
    port=30000,
    main_pid=10,
)


def test_a_record_comes_back_as_it_was_saved_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    where = server_record.save(RECORD, str(tmp_path / "state"))
    assert server_record.load(str(tmp_path / "state"), "port-30000") == RECORD
    assert stat.S_IMODE(os.stat(where).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(where)).st_mode) == 0o700
    assert os.listdir(os.path.dirname(where)) == ["port-30000.json"], "no half-written file stays"


def test_nothing_secret_leaves_the_host() -> None:
    shown = json.dumps(RECORD.public())
    assert "S3CR3T" not in shown
    assert "HF_TOKEN" in shown and "sglang.launch_server" in shown


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\nb", "x" * 200])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError):
        server_record.load(str(tmp_path), name)


def test_records_that_cannot_be_used_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    server_record.save(RECORD, str(tmp_path))
    for name, text in {
        "a": "{",
        "b": "[]",
        "c": '{"name": "c", "schema": 9}',
        "d": '{"name": "d", "schema": 1, "argv": "x"}',
    }.items():
        (tmp_path / f"servers/{name}.json").write_text(text)
        (tmp_path / f"servers/{name}.json").chmod(0o600)
    (tmp_path / "servers/e.json").write_text('{"name": "e", "schema": 1}')
    (tmp_path / "servers/e.json").chmod(0o666)
    records, problems = server_record.load_all(str(tmp_path))
    assert records == [RECORD]
    assert [next(n for n in "abcde" if f"servers/{n}.json" in problem) for problem in problems] == list("abcde")


def test_a_newer_field_is_passed_over(tmp_path: Path) -> None:
    record = server_record.parse(b'{"name": "x", "schema": 1, "colour": "red", "port": 1}', "x.json")
    assert (record.name, record.port) == ("x", 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen]:
    environment = {"PATH": "/usr/bin:/bin", "HF_TOKEN": "S3CR3T", "SSH_CONNECTION": "1 2 3 4", "NCCL_PROTO": "LL"}
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)", "--port", "30007"],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    proc = Proc()
    until = time.monotonic() + 5
    while (found := proc.process(process.pid)) is None or "30007" not in found.argv:
        assert time.monotonic() < until
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_the_record_of_a_server_that_we_did_not_launch_is_filled_from_its_main(
    tmp_path: Path, server: subprocess.Popen
) -> None:
    proc = Proc()
    main = proc.process(server.pid)
    assert main is not None
    record = server_record.from_process(proc, main, ["GPU-b", "GPU-a"], run_id="r", who="alice")
    assert record is not None
    assert record.name == "port-30007"
    assert record.argv == main.argv
    assert record.cwd == str(tmp_path)
    assert record.log == str(tmp_path / "server.log")
    assert record.environment == {"PATH": "/usr/bin:/bin", "HF_TOKEN": "S3CR3T", "NCCL_PROTO": "LL"}
    assert record.gpu_uuids == ("GPU-a", "GPU-b")
    assert record.uid == os.getuid()
    assert record.main_alive(proc)
    server.kill()
    server.wait()
    assert not record.main_alive(proc)
    assert server_record.from_process(proc, main) is None, "no record of whoever may have the pid now"


def test_a_reused_pid_is_not_the_main(server: subprocess.Popen) -> None:
    proc = Proc()
    main = proc.process(server.pid)
    assert main is not None
    record = server_record.from_process(proc, main, unit="sglang.service")
    assert record is not None and record.name == "sglang"
    other = ServerRecord(**{**vars(record), "main_start_ticks": record.main_start_ticks - 1})
    assert not other.main_alive(proc)


@pytest.mark.parametrize(
    ("argv", "port"),
    [
        (["python", "-m", "sglang.launch_server"], 30000),
        (["sglang", "serve", "--port", "1", "--port=31000"], 31000),
        (["sglang", "serve", "--port", "x"], 30000),
        (["vllm", "serve", "m"], 8000),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--port"], 8000),
    ],
)
def test_the_port_is_the_one_asked_for_or_the_default(argv: list[str], port: int) -> None:
    assert server_record.port_of(argv) == port
