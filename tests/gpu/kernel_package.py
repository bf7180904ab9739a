"""A kernel package built by kernel_build, run on a real GPU; and the functional all-reduce over NCCL.

    python3 -m tests.gpu.kernel_package build FOLDER      # where nvcc and a network are: a wheel for sm_90a
    python3 -m tests.gpu.kernel_package run WHEEL         # on a Hopper GPU: its kernels compute, its code is listed
    python3 -m tests.gpu.kernel_package all-reduce        # on two or more free GPUs, with a Python that has torch

Each prints one JSON object; exit status 0 when everything held, 1 when something did not, 2 when it can't be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "module_utils"))

from gpu_host import all_reduce, arguments, kernel_build, kernel_package, readings  # noqa: E402
from gpu_host.deadline import Deadline  # noqa: E402

PACKAGE = ROOT / "tests/kernel_package"
COUNT = 100_003
PROGRAM = f"""
import json, tiny_kernel
values = [float(number % 97) for number in range({COUNT})]
scaled = tiny_kernel.scale(values, 3.0)
print(json.dumps({{
    'variant': tiny_kernel.VARIANT,
    'scaled': scaled == [3.0 * value for value in values],
    'total': abs(tiny_kernel.total(values) - sum(values)) < 1e-4 * sum(values),
}}))
"""


def build(folder: str, capability: str) -> dict[str, Any]:
    """The wheel for one architecture, kept in FOLDER/wheels/<key>/."""
    values = {name: spec.get("default") for name, spec in arguments.KERNEL_BUILD.items()}
    given = {
        "state": "built",
        "python": sys.executable,
        "package": "tiny_kernel",
        "source": str(PACKAGE),
        "compute_capability": capability,
        "dependencies": str(PACKAGE / "dependencies"),
        "build_folder": os.path.abspath(folder),
        "timeout": 600,
    }
    answer = kernel_build.run({**values, **given})
    return {"held": not answer["failed"], **{key: answer.get(key) for key in ("wheel", "architecture", "msg")}}


def run(wheel: str, capability: str) -> dict[str, Any]:
    """Import it, list its code, compute with it."""
    if not capability:
        seen = readings.read(Deadline(20))
        capability = next((gpu.compute_capability for gpu in seen.gpus if gpu.compute_capability), None) or ""
        if not capability:
            return {"held": None, "msg": seen.error or "no GPU"}
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        extra = {"PYTHONPATH": folder, "TINY_KERNEL_CAPABILITY": capability}
        report = kernel_package.inspect(sys.executable, "tiny_kernel", capability, Deadline(120), "", extra)
        environment = {**os.environ, **extra}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    computed = json.loads(done.stdout) if done.returncode == 0 else {}
    kept = ("usable", "architectures", "ptx", "tool", "cause", "msg", "loaded")
    return {
        "held": bool(report["usable"] and computed.get("scaled") and computed.get("total")),
        "compute_capability": capability,
        "report": {key: report.get(key) for key in kept},
        "computed": computed,
        "error": done.stderr[-2000:],
    }


def reduce(python: str, seconds: float) -> dict[str, Any]:
    """NCCL among all GPUs of the machine."""
    seen = readings.read(Deadline(20))
    if len(seen.gpus) < 2:
        return {"held": None, "msg": f"needs two GPUs, there are {len(seen.gpus)}"}
    answer = all_reduce.diagnose(python, [gpu.uuid for gpu in seen.gpus], {}, seconds)
    return {"held": answer["verdict"] == all_reduce.OK, **answer}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run", "all-reduce"])
    parser.add_argument("path", nargs="?", default="", help="folder of the build, or the wheel")
    parser.add_argument("--capability", default="", help="compute capability (build: 9.0 unless given)")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch, for all-reduce")
    parser.add_argument("--seconds", type=float, default=120)
    chosen = parser.parse_args()
    if chosen.what == "build":
        answer = build(chosen.path or ".kernel-build", chosen.capability or "9.0")
    elif chosen.what == "run":
        answer = run(chosen.path, chosen.capability)
    else:
        answer = reduce(chosen.python, chosen.seconds)
    print(json.dumps(answer, indent=1))
    return {True: 0, False: 1, None: 2}[answer["held"]]


if __name__ == "__main__":
    sys.exit(main())
