"""What a CUDA process shows to the host: open device nodes, mapped memory, memory on the GPU."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

OWN_DESCRIPTORS, OTHER_DESCRIPTORS = 23, 7
"""Measured: descriptors that a process with a CUDA context has on the node of its GPU and on each other GPU's."""

CONTEXT_MIB = 527
"""What a CUDA context takes before any weights."""


def open_nodes(folder: str, own_minor: int | None = None) -> list[mmap.mmap]:
    """Open every GPU's node and nvidiactl; with a context on `own_minor`, as often and mapped as measured.

    Returns the mapped memory, which lasts as long as that is kept. Nodes that can't be opened are left out.
    """
    mapped: list[mmap.mmap] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return mapped
    for name in sorted(names):
        if not re.fullmatch(r"nvidia(\d+|ctl|-uvm)", name):
            continue
        path = os.path.join(folder, name)
        minor = int(name[6:]) if name[6:].isdigit() else None
        times = 1
        if own_minor is not None and minor is not None:
            times = OWN_DESCRIPTORS if minor == own_minor else OTHER_DESCRIPTORS
        for _ in range(times):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                break
        else:
            if own_minor is not None and minor is not None:
                mapped += _mapped(descriptor, 3 if minor == own_minor else 2)
    return mapped


def _mapped(descriptor: int, times: int) -> list[mmap.mmap]:
    try:
        return [mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for _ in range(times)]
    except (OSError, ValueError):
        return []  # a node over the null device can't be mapped


def gpu_state(folder: str) -> Any:
    """The simulator's `GpuState`, loaded from its file: only the stand-in is on the path of a server."""
    name = "simulated_gpu_state"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[3] / "gpu_state.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} can't be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name].GpuState(folder)


def chosen_gpu(state: Any, ordinal: int) -> Any:
    """The GPU behind a CUDA ordinal: CUDA_VISIBLE_DEVICES reorders and hides. Raises IndexError as CUDA would."""
    gpus = state.gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus[ordinal]
    name = visible.split(",")[ordinal].strip()
    return next(gpu for gpu in gpus if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name)))
