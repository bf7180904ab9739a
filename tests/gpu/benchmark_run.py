"""Makes a benchmark's run folder of a recorded session: ``python -m tests.gpu.benchmark_run SESSION.jsonl RUN``.

RUN is made as ``artifacts/benchmarks/<name>`` would be (plugin_utils/gpu_benchmark/runs.py), so that the report is that
of playbooks/benchmark.yml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
for _folder in ("module_utils", "plugin_utils"):
    sys.path.insert(0, str(REPOSITORY / _folder))

HOST = "real-gpu"


def lines_of(session: Path) -> list[dict[str, Any]]:
    """A last line that was cut off is passed over."""
    found = []
    for text in session.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def build(lines: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """The run's folder, with everything in it but the report."""
    from gpu_benchmark import runs, settings
    from gpu_control import records

    head = next(line for line in lines if line["kind"] == "session")
    plan = next(line for line in lines if line["kind"] == "benchmark")
    measured = [line for line in lines if line["kind"] == "measurement"]
    rounds = max((line["round"] for line in measured), default=1)
    run = runs.Run(folder)
    runs.write(
        folder / "run.json",
        {"schema": runs.SCHEMA, "run": folder.name, "started": records.timestamp(plan["time"]), "who": "tests/gpu"},
    )
    chosen, problems = settings.read(
        {
            "concurrencies": [cell["concurrency"] for cell in plan["cells"]],
            "output_lengths": [plan["shape"]["output_length"]],
            "rounds": rounds,
            "max_rounds": rounds,
            "repeats_per_start": 1,
        }
    )
    if problems:
        raise ValueError(" ".join(problems))
    run.write_plan(HOST, {"settings": chosen, "variants": plan["variants"], "cells": plan["cells"]})
    for line in measured:
        result = line["result"]
        if result.get("failed") or not result.get("measurement"):
            failure = runs.Failure(variant=line["variant"], round=line["round"], cause=str(result.get("msg")))
            run.write_failure(HOST, failure)
            continue
        data = result["measurement"]
        server = {
            "command": data.get("server_command"),
            "environment": data.get("environment"),
            "versions": data.get("versions"),
        }
        run.write_measurement(
            HOST,
            runs.Measurement(
                variant=line["variant"],
                round=line["round"],
                cell=line["cell"],
                repeat=line["repeat"],
                data=data,
                server=server,
                session=head["date"],
            ),
        )
    return folder


if __name__ == "__main__":
    print(build(lines_of(Path(sys.argv[1])), Path(sys.argv[2])))
