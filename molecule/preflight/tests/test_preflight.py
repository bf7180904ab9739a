"""After converge: each fault is named with its cure, in a report on the control node."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(os.environ["GPU_ARTIFACTS"])


def report(host: Any, part: str) -> dict[str, Any]:
    name = host.backend.get_pytest_id().split("://")[-1]
    return json.loads((ARTIFACTS / f"preflight/{name}-{part}.json").read_text())


@pytest.mark.parametrize(
    ("part", "severity", "code"),
    [
        ("host", "error", "secret_mode"),
        ("host", "error", "disk_small"),
        ("host", "error", "gpu_memory_small"),
        ("host", "warning", "port_ephemeral"),
        ("plan", "error", "kernel_missing"),
        ("plan", "error", "flashinfer_versions"),
        ("plan", "error", "backend_not_on_gpu"),
        ("plan", "error", "counts_incomplete"),
        ("plan", "warning", "profile_without_patch"),
    ],
)
def test_a_fault_is_named_with_its_cure_and_its_switch(host: Any, part: str, severity: str, code: str) -> None:
    (row,) = [row for row in report(host, part)["findings"] if row["code"] == code][:1]
    assert row["severity"] == severity
    assert row["found"].endswith(".") and row["cure"]
    assert row["switch"] == f"preflight_skip: [{code}]"


@pytest.mark.parametrize("code", ["driver_old", "nvcc_old", "nvcc_missing", "gpu_unreadable", "compute_capability"])
def test_what_is_fine_is_not_found(host: Any, code: str) -> None:
    assert code not in [row["code"] for row in report(host, "host")["findings"]]


@pytest.mark.parametrize(
    "code", ["torch_cpu_only", "torch_missing", "sglang_missing", "port_in_use", "open_without_key"]
)
def test_what_is_well_planned_is_not_found(host: Any, code: str) -> None:
    assert code not in [row["code"] for row in report(host, "plan")["findings"]]


def test_the_facts_that_it_rests_on_are_kept(host: Any) -> None:
    facts = report(host, "host")["facts"]
    assert len(facts["gpus"]) == 8 and facts["gpus"][0]["compute_capability"] == "12.0"
    assert facts["nvcc"] == {"path": "/usr/local/cuda/bin/nvcc", "version": "13.0.88", "why": ""}
    assert report(host, "plan")["facts"]["packages"]["torch"]["cuda"] == "13.0"


def test_the_key_itself_is_in_no_report(host: Any) -> None:
    assert "not-a-real-key" not in json.dumps([report(host, "host"), report(host, "plan")])


def test_nothing_was_left_on_the_host(host: Any) -> None:
    assert not host.file("/var/lib/gpu-host").exists
    assert host.file("/root/key").mode == 0o644
