"""What a real compilation needs: nvcc on this machine, and wheels of the build tools, downloaded once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "tests/kernel_package"
CACHE = Path(os.environ.get("LAB_CACHE") or ROOT / ".lab-cache") / "kernel-wheels"
WHEELS = ("scikit-build-core>=0.10", "cmake>=3.26", "ninja", "wheel", "nvidia-cuda-cuobjdump>=13.2")


def require_nvcc() -> None:
    """Skip with the reason where this machine can't compile CUDA code."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc (the CUDA toolkit, 12.8 or newer)")


def wheels() -> Path:
    """The folder with the wheels of the build tools; a network is needed the first time only."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (CACHE / ".complete").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "-d", CACHE, *WHEELS]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs the wheels of the build tools once: {done.stderr.strip().splitlines()[-1:]}")
            (CACHE / ".complete").touch()
    return CACHE


def server_python(folder: Path) -> Path:
    """A Python of its own with pip, as the server's, and cuobjdump beside it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--find-links",
        wheels(),
        "nvidia-cuda-cuobjdump",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return python
