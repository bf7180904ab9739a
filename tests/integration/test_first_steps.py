"""What a new user types first, in a clone that has never been used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.real_processes import Nursery

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "host"
    make("simulator-stop", tmp_path / "host")


def make(target: str, host: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", target, f"SIMULATED_HOST={host}"],
        cwd=ROOT,
        env={**os.environ, "SIMULATED_HOST": str(host), "GPU_ARTIFACTS": str(host.parent / "artifacts")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def ad_hoc(module: str, host: Path) -> str:
    return subprocess.run(
        ["ansible", "gpu_hosts", "-m", module, "--check"],
        cwd=ROOT,
        env={**os.environ, "SIMULATED_HOST": str(host), "GPU_ARTIFACTS": str(host.parent / "artifacts")},
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_make_demo_works_where_nothing_was_built_before_and_again_where_it_was(new_host: Path) -> None:
    for _ in range(2):
        done = make("demo", new_host)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Verdicts - clean: simulated-gpu-host (SIMULATED)" in done.stdout


def test_a_host_that_was_stopped_is_no_clean_host(new_host: Path) -> None:
    make("simulator-start", new_host)
    make("simulator-stop", new_host)
    assert "The simulated GPU host is not running" in ad_hoc("gpu_reset", new_host)


def test_a_call_outside_of_the_plays_keeps_to_what_the_inventory_says_of_the_host(
    new_host: Path, tmp_path: Path
) -> None:
    make("simulator-start", new_host)
    assert "simulated: true" in ad_hoc("gpu_memory", new_host)
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Nursery(tmp_path / "elsewhere")
    try:
        foreign = elsewhere.server()
        listed = ad_hoc("gpu_reset", new_host)
    finally:
        elsewhere.close()
    assert "sglang::scheduler_TP7" in listed
    assert str(foreign) not in listed
