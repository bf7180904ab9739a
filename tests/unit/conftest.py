"""Fixtures of several unit tests: a simulated host's GPUs, asked in this very process."""

from __future__ import annotations

import ctypes

import pytest

from simulator.build import build
from simulator.gpu_state import GpuState


@pytest.fixture(scope="session")
def nvml_double(tmp_path_factory):
    """The double, loaded under its soname: a forked child that asks for libnvidia-ml.so.1 gets this one."""
    path = build(tmp_path_factory.mktemp("nvml"))
    ctypes.CDLL(str(path))
    return path


@pytest.fixture
def host(nvml_double, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_SIMULATOR_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi to fall back to
    return GpuState(tmp_path / "state").create(gpus=4, minors=[3, 2, 0, 1])
