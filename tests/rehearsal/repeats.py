"""Starts one server again and again and measures each start: ``python -m tests.rehearsal.repeats INTO.json``.

What comes of it is how alike repeats are: those of one start, and starts of the same server. The tests of the verdict
draw from it (tests/unit/test_benchmark_verdict.py): a variant compared with itself must have no winner. Each start is
written as soon as it is measured; a file that is not complete is gone on with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.aiperf import Load
from tests.rehearsal import measured

LOADS = {"c1": Load(1, 4, 192), "c4": Load(4, 12, 192)}
REPEATS = 3


def one_start(made: measured.RehearsalHost, python: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Tokens a second by load, and what the machine did."""
    began = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in LOADS}
    with measured.server(made):
        ready = time.monotonic()
        for _ in range(REPEATS):
            for name, load in LOADS.items():
                found[name] += measured.speeds([measured.measure(made, load, python)])
    about = {
        **measured.machine(),
        "ready_s": round(ready - began, 1),
        "measured_s": round(time.monotonic() - ready, 1),
    }
    return found, about


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure many starts of one server.")
    parser.add_argument("into", type=Path)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--quiet", type=float, default=0, help="begin a start only at a lower load average (0: always)")
    asked = parser.parse_args()
    data: dict[str, Any] = {
        "what": "sglang 0.5.23 on a CPU (tests/rehearsal), baseline: tokens a second of each repeat of each start",
        "loads": {name: vars(load) for name, load in LOADS.items()},
        "starts": [],
        "machine": [],
    }
    if asked.into.exists():
        before = json.loads(asked.into.read_text())
        data = before if len(before["starts"]) < asked.starts else data
    with measured.host() as made, measured.warm_client(made) as python:
        while len(data["starts"]) < asked.starts:
            while asked.quiet and os.getloadavg()[0] > asked.quiet:
                time.sleep(5)
            found, about = one_start(made, python)
            data["starts"].append(found)
            data["machine"].append(about)
            write(asked.into, data)
            print(f"start {len(data['starts'])}: {found} {about}", flush=True)
    return 0


def write(path: Path, data: dict[str, Any]) -> None:
    """A line a start."""
    rows = {key: ",\n  ".join(json.dumps(one) for one in data[key]) for key in ("starts", "machine")}
    head = json.dumps({key: value for key, value in data.items() if key not in rows}, indent=1)[:-2]
    text = head + "".join(f',\n "{key}": [\n  {lines}\n ]' for key, lines in rows.items()) + "\n}\n"
    passing = path.with_suffix(".new")
    passing.write_text(text)
    passing.replace(path)


if __name__ == "__main__":
    sys.exit(main())
