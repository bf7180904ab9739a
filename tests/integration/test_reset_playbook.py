"""playbooks/reset.yml on the simulated host, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def simulator(action: str, folder: Path) -> str:
    command = [sys.executable, "-m", "simulator", action, "--folder", str(folder)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=action != "status"
    ).stdout


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("simulated") / "host"
    simulator("start", folder)
    yield folder
    simulator("stop", folder)


def play(host: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ansible-playbook", f"playbooks/{name}.yml", *arguments],
        cwd=ROOT,
        env={**os.environ, "SIMULATED_HOST": str(host), "GPU_ARTIFACTS": str(host.parent / "artifacts")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def reset(host: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Run the play; returns it and the newest record."""
    done = play(host, "reset", *arguments)
    file = host.parent / "artifacts/resets.jsonl"
    return done, json.loads(file.read_text().splitlines()[-1]) if file.exists() else {}


def alive(host: Path) -> dict[int, str]:
    """The processes of the simulated host by pid."""
    return {int(pid): line for pid, line in re.findall(r"^ +(\d+)  (.*)$", simulator("status", host), re.MULTILINE)}


def test_check_mode_then_a_reset_then_nothing_left_to_do(host):
    before = alive(host)
    assert any("sglang" in line for line in before.values())

    checked, _none = reset(host, "--check")
    assert alive(host).keys() == before.keys()
    assert "would be killed" in checked.stdout
    predicted = json.loads((host.parent / "artifacts/last-reset.json").read_text())[0]
    memory = play(host, "report-gpus")
    assert "1 host SIMULATED (1 read) - 8 GPUs, 8 with processes" in memory.stdout, memory.stdout
    assert not (host.parent / "artifacts/resets.jsonl").exists()

    done, record = reset(host)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == "Verdicts - clean: simulated-gpu-host (SIMULATED)"
    assert (record["verdict"], record["simulated"]) == ("clean", True)
    assert [gpu["verdict"] for gpu in record["gpus"]] == ["free"] * 8
    assert {one["pid"] for one in record["killed"]} == {one["pid"] for one in predicted["killed"]}
    left = alive(host)
    assert left.keys() == before.keys() - {one["pid"] for one in record["killed"]}
    assert left, "the bystanders of the scenario live on"

    again, record = reset(host)
    assert again.returncode == 0
    assert "changed=0" in again.stdout
    assert (record["verdict"], record["killed"], record["cleaned"]) == ("clean", [], [])

    reports = [play(host, "report-gpus"), play(host, "report-resets")]
    assert [one.returncode for one in reports] == [0, 0]
    assert re.search(r"8 GPUs, \d with processes; \d+ of 783 096 MiB used", reports[0].stdout), reports[0].stdout
    assert "2 resets of 1 host SIMULATED on record" in reports[1].stdout, reports[1].stdout
    assert {"gpus.json", "resets.html"} <= {file.name for file in (host.parent / "artifacts").iterdir()}
