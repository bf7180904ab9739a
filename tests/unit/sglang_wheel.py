"""The pinned SGLang as a wheel: taken from a cache folder, else downloaded once with pip."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PINNED = "0.5.23"
CACHE = Path(os.environ.get("SGLANG_WHEEL_CACHE") or ROOT / ".lab-cache/wheels")


@cache
def wheel() -> Path | str:
    """The wheel's path, or why there is none."""
    for folder in (CACHE,):
        if found := sorted(folder.glob(f"sglang-{PINNED}-*.whl")):
            return found[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--retries", "1", "--timeout", "10", "--only-binary", ":all:", "--dest", str(CACHE)]
    command += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--platform", "any"]
    try:
        done = subprocess.run([*command, f"sglang=={PINNED}"], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return f"pip did not download sglang {PINNED} within 180 s"
    found = sorted(CACHE.glob(f"sglang-{PINNED}-*.whl"))
    return found[0] if found else f"pip can't download sglang {PINNED}: {done.stderr.strip()[-200:]}"


def texts(archive: zipfile.ZipFile, file: str) -> list[tuple[int, int, str]]:
    """First line, last line and text of every string in a source file of the wheel; {} for what is filled in."""
    tree = ast.parse(archive.read(f"sglang/{file}").decode("utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        found.append((node.lineno, node.end_lineno or node.lineno, text))
    return found
