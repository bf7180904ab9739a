"""Loaded by every Python process of the rehearsed server: what real SGLang needs where there is no GPU.

All of it are doubles, chosen by environment variables; SGLang's own code is as installed.

- torchvision's operators, which PyPI's torchvision would have declared in a CUDA library.
- REHEARSAL_AMX=1: torch says that the processor has AMX. SGLang then takes its intel_amx paths, EAGLE-3 among them;
  their kernels are the plain torch of sgl_kernel/ beside this file, so no AMX instruction is ever executed.
- REHEARSAL_GPU_MIB: a scheduler takes so many MiB of a simulated GPU (GPU_SIMULATOR_STATE) when it gets its title, and
  opens the device nodes in REHEARSAL_FOLDER/dev. It never computes there.
- REHEARSAL_FOLDER becomes the working folder, by which a reset with gpu_reset_scope_folder tells these processes.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

GPU_STATE = Path(__file__).resolve().parents[3] / "simulator" / "gpu_state.py"
_kept: list[Any] = []


def _torchvision() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("roi_align(Tensor input, Tensor rois, float s, int ph, int pw, int sr, bool a) -> Tensor")
    _kept.append(library)


def _sglang() -> None:
    if os.environ.get("REHEARSAL_AMX") == "1":
        import torch

        torch.cpu._is_amx_tile_supported = lambda: True
    if os.environ.get("REHEARSAL_GPU_MIB"):
        import setproctitle

        real = setproctitle.setproctitle

        def titled(title: str) -> None:
            real(title)
            if title.startswith("sglang::scheduler"):
                _take_gpu(int(os.environ["REHEARSAL_GPU_MIB"]))

        setproctitle.setproctitle = titled


def _take_gpu(mib: int) -> None:
    name = "simulated_gpu_state"
    spec = importlib.util.spec_from_file_location(name, GPU_STATE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    nodes = Path(os.environ["REHEARSAL_FOLDER"]) / "dev"
    _kept.extend(os.open(node, os.O_RDWR | os.O_CLOEXEC) for node in nodes.iterdir() if node.is_file())
    _kept.append(module.GpuState(os.environ["GPU_SIMULATOR_STATE"]).allocate(0, mib))


class _Before(importlib.abc.MetaPathFinder):
    """Runs something just before a module is imported for the first time."""

    def __init__(self, module: str, action: Any) -> None:
        self.module, self.action = module, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.module:
            sys.meta_path.remove(self)
            self.action()


sys.meta_path.insert(0, _Before("torchvision", _torchvision))
sys.meta_path.insert(0, _Before("sglang", _sglang))
if os.environ.get("REHEARSAL_FOLDER"):
    with contextlib.suppress(OSError):
        os.chdir(os.environ["REHEARSAL_FOLDER"])
