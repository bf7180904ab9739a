"""Loads the library for the GPU that is there, as sgl_kernel does: sm90 on compute capability 9.0, else sm100."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

FOLDER = Path(__file__).parent
VARIANT = "sm90" if os.environ.get("TINY_KERNEL_CAPABILITY") == "9.0" else "sm100"
LIBRARY = ctypes.CDLL(str(FOLDER / VARIANT / "common_ops.abi3.so"))


def scale(values: list[float], factor: float) -> list[float]:
    """RuntimeError with CUDA's error number."""
    array = (ctypes.c_float * len(values))(*values)
    error = LIBRARY.tiny_scale(array, len(values), ctypes.c_float(factor))
    if error:
        raise RuntimeError(f"CUDA error {error}")
    return list(array)


def total(values: list[float]) -> float:
    """RuntimeError with CUDA's error number."""
    array, answer = (ctypes.c_float * len(values))(*values), ctypes.c_float()
    error = LIBRARY.tiny_sum(array, len(values), ctypes.byref(answer))
    if error:
        raise RuntimeError(f"CUDA error {error}")
    return answer.value
