"""The functional all-reduce with a real torch.distributed, over gloo on the CPU.

Needs a Python with torch: GPU_SERVER_PYTHON, else that of the rehearsal.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from gpu_host import all_reduce

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def python() -> str:
    for candidate in (os.environ.get("GPU_SERVER_PYTHON", ""), str(ROOT / ".rehearsal/venv/bin/python")):
        if candidate and os.path.exists(candidate):
            check = [candidate, "-c", "import torch.distributed as d; assert d.is_gloo_available()"]
            if subprocess.run(check, capture_output=True).returncode == 0:
                return candidate
    pytest.skip("needs a Python with torch: set GPU_SERVER_PYTHON")


def test_two_ranks_sum_correctly_over_gloo(python):
    answer = all_reduce.run(python, ["cpu", "cpu"], {}, 90, backend="gloo", sizes=(1, 4))
    assert (answer["verdict"], answer["phases"]) == ("ok", ["done", "done"]), answer
    assert set(answer["milliseconds"]) == {"1", "4"} and all(value > 0 for value in answer["milliseconds"].values())


def test_a_peer_that_stops_in_the_middle_is_a_hang_that_ends_at_the_deadline(python, tmp_path):
    """Rank 1 joins, and is stopped by the kernel before its first collective: rank 0 waits as for a broken link."""
    wrapper = tmp_path / "python"
    patch = (
        "import os, signal, sys; import torch.distributed as d; real = d.all_reduce; "
        "d.all_reduce = (lambda *a: os.kill(os.getpid(), signal.SIGSTOP)) if os.environ['RANK'] == '1' else real"
    )
    run = f'exec {python} -c "{patch}; program = sys.argv.pop(1); exec(program)" "$program" "$@"'
    wrapper.write_text(f"#!/bin/sh\nshift\nprogram=$1\nshift\n{run}\n")
    wrapper.chmod(0o755)
    started = time.monotonic()
    answer = all_reduce.run(str(wrapper), ["cpu", "cpu"], {}, 25, backend="gloo")
    assert time.monotonic() - started < 33
    assert answer["verdict"] == "hangs", answer
    assert answer["phases"] == ["first", "first"]
    assert "rank 0, 1 of 2 had not finished (phase first)" in answer["detail"]
