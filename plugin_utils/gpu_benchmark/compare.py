"""This run against an earlier one, on the same host: what got slower beyond the interval is a regression.

The two runs had no rounds in common, so their starts are compared as two samples (Welch), and all comparisons of the
report hold together (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, variance
from typing import Any

from . import settings, statistics
from .runs import Measurement, Run

WORSE, BETTER, SAME, UNKNOWN = "regression", "improvement", "same", "unknown"


def hosts(run: Run, earlier: Run, host: str, certainty: float) -> dict[str, Any]:
    """By variant and load; `remarks` say why the two runs may not be alike."""
    before, now = earlier.plan(host), run.plan(host)
    if before is None or now is None:
        return {"run": earlier.name, "rows": [], "remarks": [f"Run {earlier.name} has no host {host}."]}
    old, new = earlier.measurements(host), run.measurements(host)
    old_cells = {one["name"]: one for one in before["cells"]}
    places = [
        (variant["name"], cell)
        for variant in now["variants"]
        for cell in now["cells"]
        if cell["name"] in old_cells and any(one["name"] == variant["name"] for one in before["variants"])
    ]
    share = (1 - certainty) / max(len(places), 1)
    rows = []
    for variant, cell in places:
        mine, other = _starts(new, variant, cell["name"]), _starts(old, variant, cell["name"])
        if not mine or not other:
            continue
        low, ratio, high = ratio_of(mine, other, share)
        rows.append(
            {
                "variant": variant,
                "concurrency": cell["concurrency"],
                "cell": cell["name"],
                "tokens_per_s": math.exp(fmean(mine)),
                "earlier_tokens_per_s": math.exp(fmean(other)),
                "ratio": ratio,
                "low": low,
                "high": high,
                "state": _state(low, high),
            }
        )
    remarks = _only_in_one(before, now) + _remarks(before, now, old, new, old_cells)
    return {"run": earlier.name, "rows": rows, "remarks": remarks}


def _only_in_one(before: Any, now: Any) -> list[str]:
    """What is compared with nothing: variants and loads go by their names."""
    found = []
    for what, key in (("variant", "variants"), ("load", "cells")):
        was, here = ([one["name"] for one in plan[key]] for plan in (before, now))
        for names, where in (([name for name in here if name not in was], "this run"),
                             ([name for name in was if name not in here], "the earlier run")):  # fmt: skip
            if names:
                found.append(f"Only {where} has the {what}{'s' if len(names) > 1 else ''} {', '.join(names)}.")
    return found


def ratio_of(
    mine: Sequence[float], other: Sequence[float], error_rate: float
) -> tuple[float | None, float, float | None]:
    """Low end, ratio, high end from the logarithms of the starts; no ends where one side was started once."""
    gap = fmean(mine) - fmean(other)
    if len(mine) < 2 or len(other) < 2:
        return None, math.exp(gap), None
    least = statistics.LEAST_NOISE**2
    parts = [max(variance(side), least) / len(side) for side in (mine, other)]
    total = sum(parts)
    freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (mine, other), strict=True))
    half = statistics.t_quantile(error_rate, round(freedom, 3)) * math.sqrt(total)
    return math.exp(gap - half), math.exp(gap), math.exp(gap + half)


def _state(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return UNKNOWN
    return WORSE if high < 1 else BETTER if low > 1 else SAME


def _starts(measured: Sequence[Measurement], variant: str, cell: str) -> list[float]:
    by_round: dict[int, list[float]] = {}
    for one in measured:
        if one.variant == variant and one.cell == cell:
            by_round.setdefault(one.round, []).append(float(one.data["output_tokens_per_s"]))
    return [median(math.log(speed) for speed in speeds) for _, speeds in sorted(by_round.items())]


def _remarks(
    before: Any, now: Any, old: Sequence[Measurement], new: Sequence[Measurement], old_cells: Any
) -> list[str]:
    found = []
    for name in ("sglang", "torch", "driver"):
        was, here = _versions(old, name), _versions(new, name)
        if was != here and was and here:
            found.append(f"{name} was {', '.join(sorted(was))} and is {', '.join(sorted(here))}.")
    if any(old_cells.get(cell["name"], cell)["num_prompts"] != cell["num_prompts"] for cell in now["cells"]):
        found.append("The number of prompts differs.")
    was_prompts, here_prompts = _prompts(old), _prompts(new)
    if was_prompts and here_prompts and was_prompts != here_prompts:
        found.append("The prompts differ, so accept lengths and times may too.")
    was_asked, asked = before.get("asked", {}), now.get("asked", {})
    names = [f"serving_benchmark_{name}" for name in settings.ASKED]
    found += [f"{name} differs." for name in names if was_asked.get(name) != asked.get(name)]
    arguments = {one["name"]: one["arguments"] for one in before["variants"]}
    if any(arguments.get(one["name"], one["arguments"]) != one["arguments"] for one in now["variants"]):
        found.append("The server's arguments differ.")
    return found


def _versions(measured: Sequence[Measurement], name: str) -> set[str]:
    return {str(one.data["versions"][name]) for one in measured if (one.data.get("versions") or {}).get(name)}


def _prompts(measured: Sequence[Measurement]) -> set[str]:
    return {str(one.data["prompt_set"]["sha256"]) for one in measured if isinstance(one.data.get("prompt_set"), dict)}
