"""The code of the reset on the simulated host: under every Python of a managed host, by each way it gets there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_control import lean
from gpu_host import arguments

from simulator.host import SimulatedHost, wait_for
from tests.unit.real_pythons import pythons

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("simulated") / "host").create() as host:
        yield host


def parameters(host: SimulatedHost, **given: Any) -> dict[str, Any]:
    return host.parameters(arguments.GPU_RESET, **{"grace": 0.2, **given})


def by_the_lean_path(python: str, host: SimulatedHost) -> dict[str, Any]:
    package = lean.sources(ROOT / "module_utils" / "gpu_host", "reset")
    program = lean.program(package, "reset", parameters(host), check_mode=False, diff=False)
    command = [python, "-c", lean.BOOTSTRAP]
    done = subprocess.run(
        command, input=program, capture_output=True, env=os.environ | host.reset_environment(), timeout=60
    )
    return dict(json.loads(done.stdout))


def by_an_import(python: str, host: SimulatedHost, **given: Any) -> dict[str, Any]:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from gpu_host import reset;"
        " print(json.dumps(reset.run(json.loads(sys.argv[2]), False)))"
    )
    done = subprocess.run(
        [python, "-c", program, str(ROOT / "module_utils"), json.dumps(parameters(host, **given))],
        capture_output=True,
        env=os.environ | host.reset_environment(),
        timeout=60,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parent.parent.name)
@pytest.mark.parametrize("way", [by_the_lean_path, by_an_import])
def test_a_hung_server_ends_and_the_bystander_lives(way: Any, python: str, host: SimulatedHost) -> None:
    server = host.start_server("hung", gpus=[0, 1], tp=2, IGNORE_TERM=1).wait_ready()
    job = host.start_data_job()
    record = way(python, host)
    assert record["verdict"] == "clean", record["reason"]
    assert record["simulated"]
    assert server.main_pid in {row["pid"] for row in record["killed"]}
    assert job.alive()
    assert not server.processes()


def test_an_orphan_that_has_no_gpu_yet_is_not_ended_for_one_gpu_and_makes_the_host_dirty(host: SimulatedHost) -> None:
    server = host.start_server("importing", gpus=[0, 1], tp=2, import_seconds=600)
    wait_for(lambda: len(server.processes()) >= 4, "children that import", 10)
    os.kill(server.main_pid, signal.SIGKILL)
    wait_for(lambda: server.main_pid not in server.processes(), "the main's end", 10)
    orphans = set(server.processes())
    record = by_an_import(sys.executable, host, gpus=["5"])
    assert record["verdict"] == "dirty"
    assert "may still take" in record["reason"]
    assert not record["killed"]
    # One that its main had not told yet what to run leaves by itself.
    assert server.processes() and set(server.processes()) <= orphans
    assert by_an_import(sys.executable, host)["verdict"] == "clean"
    assert not server.processes()


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_done(host: SimulatedHost) -> None:
    server = host.start_server("well", gpus=[0]).wait_ready()
    record = by_an_import(sys.executable, host, gpus=["99"])
    assert record["refused"] and record["failed"]
    assert record["reason"].startswith("Nothing was done. GPU 99 is not on this host")
    assert server.processes() and not record["killed"]
