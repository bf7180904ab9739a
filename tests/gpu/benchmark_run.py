"""Makes a benchmark's run folder and report of a session: ``python -m tests.gpu.benchmark_run SESSION.jsonl RUN``.

RUN is made as ``artifacts/benchmarks/<name>`` would be (plugin_utils/gpu_benchmark/runs.py), so that the report is that
of playbooks/benchmark.yml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import shorten

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
    return shorten.whole(found)


def notes(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of such a session before he looks at the table."""
    plan = next(line for line in lines if line["kind"] == "benchmark")
    gpus = [
        gpu["name"] for line in lines if line["kind"] == "reading" for gpu in line["reading"]["nvml"].get("gpus", [])
    ]
    where = f"one {gpus[0]}" if gpus else "one GPU"
    found = [
        f"Each server was started once, all {len(plan['variants'])} side by side on {where}, and they were measured in "
        "turn, round after round. The rounds are not starts of their own: the intervals tell how the host changes "
        "from minute to minute, not how starts differ."
    ]
    if any("SGLANG_SIMULATE_ACC_LEN" in one.get("environment", {}) for one in plan["variants"]):
        drawn = "the model's weights are drawn at random" if plan["shape"].get("size") else "the model is tiny"
        found.append(
            f"The accept lengths are simulated (SGLANG_SIMULATE_ACC_LEN) and {drawn}: the table shows what a report "
            "looks like and that the arithmetic holds, not what a drafter is worth."
        )
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
    names = {line["variant"] for line in measured}
    content = {"settings": chosen, "variants": plan["variants"], "cells": plan["cells"]}
    run.write_plan(HOST, {**content, "starts": len(names), "notes": notes(lines)})
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


def repeats(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Tokens a second of the baseline by load, for each round that has all loads. The form of
    tests/recorded/*/benchmark-repeats.json, where a start of the server stands for a round."""
    plan = next(line for line in lines if line["kind"] == "benchmark")
    loads = {cell["name"]: f"c{cell['concurrency']}" for cell in plan["cells"]}
    found: dict[int, dict[str, list[float]]] = {}
    for line in lines:
        if line["kind"] == "measurement" and line["variant"] == "baseline":
            speed = round(line["result"]["measurement"]["output_tokens_per_s"], 2)
            found.setdefault(line["round"], {}).setdefault(loads[line["cell"]], []).append(speed)
    return [one for one in found.values() if len(one) == len(loads)]


def main(session: Path, folder: Path) -> None:
    from gpu_benchmark import report, runs

    lines = lines_of(session)
    data, troubles = report.write(runs.Run(build(lines, folder)), now=lines[-1]["time"])
    print("\n".join([*report.terminal(data), *troubles]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
