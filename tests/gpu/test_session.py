"""`make test-gpu`: the parts of the session that need no SGLang, on the GPU of this machine (README.md)."""

from __future__ import annotations

import os
from pathlib import Path

from tests.gpu import run


def test_the_reset_frees_this_machines_gpu_and_spares_the_bystanders(tmp_path: Path) -> None:
    out = Path(os.environ.get("OUT", tmp_path)) / "gpu-session"
    words = ["--out", str(out), "--bundle", str(tmp_path / "bundle"), "--scenarios", "torch"]
    python = os.environ.get("GPU_SERVER_PYTHON")
    status = run.main([*words, *(["--server-python", python] if python else [])])
    assert status != 2, "no NVIDIA GPU can be read on this machine: make test-gpu needs one, with its driver"
    assert status == 0, f"some checks failed, see above and {out}/session.jsonl"
