"""Medians and ratios of runs that alternate, so that what else the machine does falls on both sides alike."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpu_benchmark.statistics import t_quantile

RESULTS = Path(__file__).parent / "results"


def alternate(contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's runs, one of each in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and the ends of its 95 % interval."""
    logarithms = [math.log(one) for one in ratios]
    middle = statistics.fmean(logarithms)
    if len(ratios) < 2:
        return math.exp(middle), 0.0, math.inf
    half = t_quantile(0.05, len(ratios) - 1) * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def report(name: str, seconds: Mapping[str, list[float]], peer: str, **more: object) -> dict[str, object]:
    """Print and keep median, spread and ratio to the peer of each contestant."""
    against = statistics.median(seconds[peer])
    rows = {
        one: {
            "median_s": round(statistics.median(values), 3),
            "least_s": round(min(values), 3),
            "most_s": round(max(values), 3),
            "ratio": round(statistics.median(values) / against, 3),
            "runs": len(values),
        }
        for one, values in seconds.items()
    }
    print(f"\n{name} (ratio to {peer})")
    for one, row in rows.items():
        spread = f"({row['least_s']:.3f} to {row['most_s']:.3f})"
        print(f"  {one:<44} {row['median_s']:7.3f} s  {spread}  {row['ratio']:.3f}")
    for key, value in more.items():
        print(f"  {key}: {value}")
    result: dict[str, object] = {"name": name, "peer": peer, "runs": rows, **more}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
