"""What the module serving_benchmark adds to SGLang's own client run by hand: same real server, same words, in turn."""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

import pytest

from tests.bench import ratios
from tests.rehearsal import environment, measured
from tests.rehearsal.measured import Load

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(not environment.PYTHON.exists(), reason="no real SGLang here: make rehearsal installs it"),
]
LOADS = {"c1": Load(1, 6, 192), "c4": Load(4, 16, 192)}
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "8"))
MOST = 1.02
# Figure: where it is in a measurement, in the client's own report, and whether more of it is better.
FIGURES = {
    "tokens per second": (("output_tokens_per_s",), "output_throughput", True),
    "time to the first token": (("ttft_ms", "mean"), "mean_ttft_ms", False),
    "time per token": (("tpot_ms", "mean"), "mean_tpot_ms", False),
}


def figure(measurement: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = measurement
    for key in path:
        value = value[key]
    return float(value)


def test_the_module_changes_no_measured_figure_by_more_than_2_percent() -> None:
    pairs: dict[str, list[tuple[float, float]]] = {}
    load_average = []
    with measured.host() as made, measured.server(made), measured.warm_client(made) as python:
        command = {name: measured.measure(made, load, python)["command"] for name, load in LOADS.items()}
        for number in range(ROUNDS):
            load_average.append(measured.machine()["load_1_min"])
            for name, load in LOADS.items():
                if number % 2:
                    ours, theirs = measured.measure(made, load, python), measured.by_hand(made, python, command[name])
                else:
                    theirs, ours = measured.by_hand(made, python, command[name]), measured.measure(made, load, python)
                for what, (path, key, _) in FIGURES.items():
                    pairs.setdefault(f"{what}, {name}", []).append((figure(ours, path), float(theirs[key])))
    rows = {}
    for what, found in pairs.items():
        better = FIGURES[what.split(",")[0]][2]
        worse = [theirs / ours if better else ours / theirs for ours, theirs in found]
        mean, low, high = measured.interval(worse)
        rows[what] = {
            "module": round(statistics.median(ours for ours, _ in found), 3),
            "by_hand": round(statistics.median(theirs for _, theirs in found), 3),
            "ratio": round(statistics.median(worse), 4),
            "mean_ratio": round(mean, 4),
            "interval": [round(low, 4), round(high, 4)],
        }
        print(f"  {what:<34} {rows[what]}")
    result = {"name": "benchmark-overhead", "rounds": ROUNDS, "load_average": load_average, "figures": rows}
    ratios.RESULTS.mkdir(exist_ok=True)
    (ratios.RESULTS / "benchmark-overhead.json").write_text(json.dumps(result, indent=1) + "\n")
    assert {what: row["ratio"] for what, row in rows.items() if row["ratio"] > MOST} == {}
