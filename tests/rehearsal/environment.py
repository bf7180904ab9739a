"""What the rehearsal runs on, made once and kept in .rehearsal/: sglang in an environment of its own, and tiny models.

``python -m tests.rehearsal.environment`` makes what is missing and says how long it took.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / ".rehearsal"
VENV = FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
COMPILED = FOLDER / "compiled"
"""What torch compiled for servers, kept for the next ones."""
KIT = HERE / "kit"
REQUIREMENTS = HERE / "requirements.txt"
TORCH = "torch==2.13.0"
"""Installed first, with what it needs; sglang 0.5.23 pins another one, hence --no-deps for the rest."""
SGLANG = "0.5.23"
INTERPRETERS = ("python3.11", "python3.12", "python3")
"""The pinned requirements were tried with 3.11."""


class NotReady(Exception):
    """What the rehearsal needs can't be made; the text says what to do."""


def virtual_environment() -> Path:
    """The interpreter that has sglang; installed where it is missing or the requirements changed (2 to 5 minutes)."""
    stamp = VENV / f".installed-{_digest(TORCH.encode(), REQUIREMENTS.read_bytes())}"
    if stamp.exists():
        return PYTHON
    shutil.rmtree(VENV, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    _run([_interpreter(), "-m", "venv", str(VENV)])
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, TORCH])
    _run([*pip, "--no-deps", "-r", str(REQUIREMENTS)])
    stamp.touch()
    return PYTHON


def _interpreter() -> str:
    for name in INTERPRETERS:
        check = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))"
        if shutil.which(name) and subprocess.run([name, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
            return name
    raise NotReady("The rehearsal needs Python 3.11 or 3.12 with venv: sudo apt-get install python3 python3-venv")


def models() -> Path:
    """The folder with target/ and drafter/; trained where missing, and anew when script or text changed (2 minutes)."""
    script, text = HERE / "make_models.py", HERE / "text.txt"
    folder = FOLDER / "models" / _digest(script.read_bytes(), text.read_bytes())
    if not (folder / "made.json").exists():
        passing = folder.with_suffix(f".{os.getpid()}")
        try:
            _run([str(virtual_environment()), str(script), str(passing)])
            shutil.rmtree(folder, ignore_errors=True)
            passing.rename(folder)
        finally:
            shutil.rmtree(passing, ignore_errors=True)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def made(folder: Path) -> dict[str, Any]:
    """How well the models learnt: known_by_heart of so many answers, right_drafts by place, tokens, seconds."""
    facts: dict[str, Any] = json.loads((folder / "made.json").read_text())
    return facts


def has_amx() -> bool:
    """Whether this processor has AMX tiles."""
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(["nice", *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(KIT)})
    if done.returncode:
        raise NotReady(f"This failed with status {done.returncode}: {' '.join(command)}")


def main() -> int:
    """Make everything; exit status 1 with a sentence where that can't be."""
    try:
        for what, make in (("sglang's environment", virtual_environment), ("the tiny models", models)):
            began = time.monotonic()
            print(f"Rehearsal: {what} in {make()} ({time.monotonic() - began:.0f} s)", flush=True)
    except NotReady as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
