"""nvidia-smi's output, one recorded case a sentence (cases/nvidia_smi.yml), and the tool when it hangs or is absent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from gpu_host import nvidia_smi
from gpu_host.child import Completed
from gpu_host.deadline import Deadline
from gpu_host.readings import GpuProcess

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "nvidia_smi.yml").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_output_is_read_as_it_is_meant(case):
    done = Completed(case["returncode"], case["stdout"], case.get("stderr", ""), "")
    readings = nvidia_smi.parse(done, nvidia_smi.parse_fixed(case.get("csv", "")))
    if "error" in case:
        assert readings.source == "none" and readings.gpus == ()
        assert readings.error.endswith(".") or readings.error.endswith(").")
        for words in case["error"]:
            assert words in readings.error
        return
    assert (readings.source, readings.error) == ("nvidia-smi", None)
    assert readings.driver_version == case.get("driver_version", readings.driver_version)
    assert [gpu.index for gpu in readings.gpus] == [gpu["index"] for gpu in case["gpus"]]
    for gpu, expected in zip(readings.gpus, case["gpus"], strict=True):
        for field in expected.pop("errors_in", []):
            assert field in gpu.errors
        if expected.get("processes"):
            expected["processes"] = [GpuProcess(*one) for one in expected["processes"]]
        for field, value in expected.items():
            found = getattr(gpu, field)
            assert (list(found) if isinstance(found, tuple) else found) == value, field


def tool(folder, text):
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_a_tool_that_hangs_is_left_at_the_deadline(tmp_path):
    started = time.monotonic()
    readings = nvidia_smi.Reader(tool(tmp_path, "exec sleep 60\n")).read(Deadline(0.3))
    assert time.monotonic() - started < 1.5
    assert readings.source == "none" and "did not end in time" in readings.error


def test_a_tool_that_leaves_a_child_with_its_output_open_is_left_too(tmp_path):
    started = time.monotonic()
    readings = nvidia_smi.Reader(tool(tmp_path, "sleep 3 &\nexit 0\n")).read(Deadline(0.3))
    assert time.monotonic() - started < 1.5
    assert readings.source == "none"


def test_a_host_without_the_tool_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia_smi, "_PLACES", (str(tmp_path),))
    readings = nvidia_smi.Reader().read(Deadline(1))
    assert readings.source == "none" and "install the NVIDIA driver" in readings.error


def test_what_never_changes_is_asked_for_once(tmp_path):
    log = tmp_path / "calls"
    csv = CASES[0]["csv"].strip()
    (tmp_path / "xml").write_text(CASES[0]["stdout"])
    text = f'echo "$1" >> {log}\nif [ "$1" = -q ]; then cat {tmp_path}/xml; else echo "{csv}"; fi\n'
    reader = nvidia_smi.Reader(tool(tmp_path, text))
    for _ in range(3):
        assert reader.read(Deadline(10)).gpus[0].compute_capability == "12.0"
    assert log.read_text().split() == ["-q", "--query-gpu=index,uuid,compute_cap", "-q", "-q"]
