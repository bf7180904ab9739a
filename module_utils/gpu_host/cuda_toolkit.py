"""The CUDA compiler of a host, and which CUDA and driver a GPU's architecture asks for."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import versions
from .child import run_command
from .deadline import Deadline

_RELEASE = re.compile(r"\brelease (\d+\.\d+)(?:, V(\d+\.\d+\.\d+))?")

# First CUDA whose compiler knows the architecture, and first driver branch that runs it (CUDA release notes).
_FIRST_CUDA = {"12": ("12.8", "570.86"), "11": ("13.0", "580.65"), "10": ("12.8", "570.86"), "9": ("11.8", "520.61")}
# Driver that a CUDA release came with; within one major version older drivers from the first of it do as well.
_MAJOR_DRIVER = {"13": "580.65", "12": "525.60", "11": "450.80"}
# FlashInfer's JIT passes sm_120f, which nvcc knows from 12.9 on, and below it says "requires GPUs with sm75 or higher".
FLASHINFER_NVCC = "12.9"


@dataclass(frozen=True)
class Nvcc:
    """A compiler that was found; `version` is '' where it does not run, `why` says so then."""

    path: str
    version: str
    why: str = ""


def first_cuda(compute_capability: str) -> str:
    """The first CUDA that can build for it; '' when nothing special is known."""
    return _FIRST_CUDA.get(compute_capability.split(".")[0], ("", ""))[0]


def first_driver(compute_capability: str) -> str:
    return _FIRST_CUDA.get(compute_capability.split(".")[0], ("", ""))[1]


def driver_for_cuda(cuda: str) -> str:
    """The lowest driver for programs built with this CUDA; '' when unknown."""
    return _MAJOR_DRIVER.get(cuda.split(".")[0], "")


def architecture(compute_capability: str) -> str:
    """The name of the GPU's own code in nvcc's spelling: '12.0' is '120a', '9.0' is '90a', '8.9' is '89'.

    From 9.0 on kernels use instructions that only the architecture-specific target ('a') has.
    """
    major, _, minor = compute_capability.partition(".")
    return f"{int(major)}{int(minor or 0)}{'a' if int(major) >= 9 else ''}"


def parse_version(text: str) -> str:
    """The version that nvcc prints, '' where it prints none."""
    found = _RELEASE.search(text)
    return (found.group(2) or found.group(1)) if found else ""


def candidates(environment: Mapping[str, str], path: str, packages: str = "") -> list[str]:
    """Where a JIT compiler looks for nvcc, in its order: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, then the wheels.

    `packages` is the site-packages folder of the server's Python, '' when unknown.
    """
    found = [f"{environment[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    found += [f"{folder}/nvcc" for folder in path.split(":") if folder.startswith("/")]
    found.append("/usr/local/cuda/bin/nvcc")
    found += sorted(glob.glob("/usr/local/cuda-*/bin/nvcc"), key=_folder_version, reverse=True)
    if packages:
        found += sorted(glob.glob(f"{packages}/nvidia/cu*/bin/nvcc"), reverse=True)
    return list(dict.fromkeys(found))


def _folder_version(path: str) -> tuple[int, ...]:
    return versions.release(path.split("/cuda-")[-1].split("/")[0])


def find(deadline: Deadline, environment: Mapping[str, str], path: str = "", packages: str = "") -> Nvcc | None:
    """The compiler that a JIT compiler would take; None when there is none."""
    for candidate in candidates(environment, path or os.environ.get("PATH", ""), packages):
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            done = run_command([candidate, "--version"], deadline.capped(10))
            version = parse_version(done.stdout)
            why = "" if version else (done.trouble or done.stderr.strip().split("\n")[0] or "it prints no version")
            return Nvcc(candidate, version, why)
    return None


def home(nvcc: str, deadline: Deadline) -> str:
    """The toolkit's folder by nvcc's own word (/usr/local/bin/nvcc may be a wrapper), else the one that it lies in."""
    done = run_command([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], deadline.capped(10))
    top = re.search(r"^#\$ TOP=(.+?)\s*$", done.stderr + done.stdout, re.M)
    return os.path.normpath(top.group(1)) if top else os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
