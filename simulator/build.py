"""Build the NVML double: ``python -m simulator.build FOLDER`` leaves FOLDER/libnvidia-ml.so.1.

Needs a C compiler (``cc``, or what the variable CC names) and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).resolve().parent / "nvml" / "nvml.c"


class BuildError(Exception):
    """The library could not be built; the message says what to do."""


def build(folder: str | os.PathLike[str]) -> Path:
    """Compile the double into `folder` unless a newer one is there; safe when several builds run at once."""
    target = Path(folder) / SONAME
    if target.exists() and target.stat().st_mtime >= SOURCE.stat().st_mtime:
        return target
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise BuildError("No C compiler found for the simulated NVML library: apt install gcc, or set CC.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        made = Path(work) / SONAME
        command = [
            *compiler.split(), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC",
            "-fvisibility=hidden", "-shared", f"-Wl,-soname,{SONAME}", "-o", str(made), str(SOURCE),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{compiler} could not build {SOURCE}:\n{done.stderr}")
        made.replace(target)
    return target


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m simulator.build FOLDER", file=sys.stderr)
        return 2
    try:
        print(build(arguments[0]))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
