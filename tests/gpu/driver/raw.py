"""Raw readings of the driver: what nvidia-smi printed and what NVML answered, untouched.

Nothing is interpreted here: bytes stay bytes, an error stays NVML's own words. `tests/unit/test_gpu_recordings.py`
derives the verdicts from these again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from . import procs


def _run(command: list[str]) -> dict[str, Any]:
    if not shutil.which(command[0]):
        return {"rc": 127, "out": "", "error": f"{command[0]} is not on this machine"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return {"rc": done.returncode, "out": done.stdout, "error": done.stderr}


def _asked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # NVML's words are part of the reading
        return {"error": str(error)}


def _fields(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"error"}:
        return value
    return {name: getattr(value, name) for name, *_ in type(value)._fields_ if isinstance(getattr(value, name), int)}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _processes(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    return [{"pid": one.pid, "usedGpuMemory": one.usedGpuMemory} for one in value]


def _nvml_gpu(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "uuid": _text(_asked(lambda: pynvml.nvmlDeviceGetUUID(handle))),
        "minor": _asked(lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "name": _text(_asked(lambda: pynvml.nvmlDeviceGetName(handle))),
        "pci_bus_id": _text(_asked(lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        "compute_capability": _asked(lambda: list(pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "memory_v1": _fields(_asked(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))),
        "memory_v2": _fields(_asked(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))),
        "compute_processes": _processes(_asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        "graphics_processes": _processes(_asked(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle))),
        "utilization": _fields(_asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))),
        "power_milliwatts": _asked(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        "persistence": _asked(lambda: pynvml.nvmlDeviceGetPersistenceMode(handle)),
        "mig": _asked(lambda: list(pynvml.nvmlDeviceGetMigMode(handle))),
    }


def nvml() -> dict[str, Any]:
    """Every GPU through nvidia-ml-py, one started and ended NVML session; bytes and milliwatts as NVML gives them."""
    try:
        import pynvml
    except ImportError as error:
        return {"error": str(error)}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    try:
        gpus = [_nvml_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver_version": _text(pynvml.nvmlSystemGetDriverVersion()),
            "nvml_version": _text(pynvml.nvmlSystemGetNVMLVersion()),
            "gpus": gpus,
        }
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    finally:
        pynvml.nvmlShutdown()


def brief() -> list[tuple[int | None, list[int]]]:
    """For each GPU its used MiB (NVML v2) and the pids that NVML lists: cheap enough for twice a second."""
    answer = nvml()
    found = []
    for gpu in answer.get("gpus", []):
        used = gpu["memory_v2"].get("used")
        listed = gpu["compute_processes"] if isinstance(gpu["compute_processes"], list) else []
        found.append((None if used is None else used // 2**20, [one["pid"] for one in listed]))
    return found


def reading() -> dict[str, Any]:
    """One full reading: nvidia-smi as people see it, its XML, NVML, and every process with a device node open."""
    return {
        "time": time.time(),
        "nvidia_smi": _run(["nvidia-smi"]),
        "nvidia_smi_xml": _run(["nvidia-smi", "-q", "-x"]),
        "nvidia_smi_csv": _run(["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]),
        "nvml": nvml(),
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
        "node_holders": procs.plain(one for one in procs.all_facts(nodes=True) if one.nodes),
    }
