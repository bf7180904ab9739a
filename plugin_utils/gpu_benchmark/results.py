"""A run as data: the table, the verdicts, what explains them. What results.json holds, and every other form shows.

`None` is not measurable, never 0; `not_measured` of a row says why.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import yaml
from gpu_control import records

from . import arithmetic, compare, statistics, verdict
from .runs import Measurement, Run
from .variants import Cell, Variant, cell_from, variant_from

SCHEMA = 1
HEAD_ALONE = "Memory and power are read on {head} alone, and the server's GPUs are on {number} hosts."
ACCEPT_LENGTHS = Path(__file__).resolve().parent.parent.parent / "data/accept-lengths.yml"

# Columns of results.csv, which are those of a row.
COLUMNS = (
    "host", "variant", "reference", "nccl_profile", "steps", "concurrency", "prompt_set", "input_length",
    "output_length", "rounds", "measurements", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms",
    "tokens_per_s_per_request", "tokens_per_s", "accept_length", "accept_length_source", "published_accept_length",
    "step_ms", "speed_up", "speed_up_low", "speed_up_high", "state", "predicted_speed_up", "watts", "tokens_per_joule",
    "gpu_memory_mib", "same_texts",
)  # fmt: skip
# A row's figure and where it is in a measurement; the median over all measurements is shown.
_FIGURES = {
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "ttft_mean_ms": ("ttft_ms", "mean"),
    "itl_p50_ms": ("itl_ms", "p50"),
    "itl_p99_ms": ("itl_ms", "p99"),
    "tokens_per_s_per_request": ("output_tokens_per_s_per_request",),
    "accept_length": ("accept_length",),
    "step_ms": ("step_ms",),
    "watts": ("gpu", "watts_mean"),
    "tokens_per_joule": ("gpu", "tokens_per_joule"),
}


def build(run: Run, earlier: Run | None = None, now: float | None = None) -> dict[str, Any]:
    """Everything that is known of the run, of all its hosts."""
    head = run.head()
    hosts = [made for host in run.hosts() if (made := host_results(run, host, earlier))]
    return {
        "schema": SCHEMA,
        "run": run.name,
        "started": head.get("started", ""),
        "who": head.get("who", ""),
        "written": records.timestamp(now),
        "compared_to": earlier.name if earlier else "",
        "hosts": hosts,
    }


def host_results(run: Run, host: str, earlier: Run | None = None) -> dict[str, Any] | None:
    kept = run.plan(host)
    if kept is None:
        return None
    variants = [variant_from(one) for one in kept["variants"]]
    cells = [cell_from(one) for one in kept["cells"]]
    rules = verdict.rules_of(kept["settings"])
    measured = run.measurements(host)
    failures = [asdict(one) for one in run.failures(host)]
    found = verdict.judge(variants, cells, measured, rules)
    paired = {
        (one.name, cell.name): _paired(measured, one, cell) for one in variants for cell in cells if one.speculates
    }
    rows = _rows(host, variants, cells, measured, found, paired)
    shared = kept.get("nodes", [])
    if shared:
        rows = [_without_part(row, HEAD_ALONE.format(head=host, number=len(shared))) for row in rows]
    shown = [_variant(one, measured) for one in variants]
    notes = list(kept.get("notes", ()))
    if not kept.get("starts"):
        notes += _how_to_go_on(run.name, found, rules, max((one.round for one in measured), default=0))
    simulated = any(str(_version(one, "driver")).endswith("-simulated") for one in measured)
    return {
        "host": host,
        **({"nodes": shared} if shared else {}),
        "simulated": simulated,
        "verdict": _verdict(found, simulated, variants, measured, failures, notes),
        "certainty": rules.certainty,
        "smallest_effect": rules.smallest_effect,
        "loads": [_load(cell) for cell in cells if cell.concurrency == cells[0].concurrency],
        "concurrencies": sorted({cell.concurrency for cell in cells}),
        "rows": rows,
        "comparisons": [one.as_dict() for one in found.comparisons],
        "explanations": _explanations(variants, rows, paired),
        "failures": failures,
        "failed": _failed(failures),
        "variants": shown,
        "effort": _effort(run, host, measured, kept.get("starts")),
        "remarks": [*_on_texts(shown, rows), *_on_sources(rows), *_remarks(measured)],
        "comparison": compare.hosts(run, earlier, host, rules.certainty) if earlier else None,
    }


def _version(one: Measurement, name: str) -> Any:
    return {**(one.data.get("versions") or {}), **(one.server.get("versions") or {})}.get(name, "")


def _load(cell: Cell) -> dict[str, Any]:
    lengths = f"{cell.output_length} tokens" + (f", prompts up to {cell.input_length}" if cell.input_length else "")
    return {"prompt_set": cell.prompt_set, "input_length": cell.input_length, "output_length": cell.output_length,
            "title": f"{cell.prompt_set}, {lengths}"}  # fmt: skip


def _verdict(
    found: verdict.Verdict,
    simulated: bool,
    variants: Sequence[Variant],
    measured: Sequence[Measurement],
    failures: Sequence[Mapping[str, Any]],
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """`more`: notes that the plan itself brings."""
    there = {one.variant for one in measured}
    causes = {one["variant"]: one["cause"] for one in failures}
    notes = [*more, *found.notes]
    for one in variants:
        if one.name not in there:
            notes.append(f"{one.name} was not measured" + (f": {causes[one.name]}" if one.name in causes else "."))
        elif one.name in causes:
            notes.append(f"{one.name} failed in {sum(f['variant'] == one.name for f in failures)} of its starts.")
    crossing = found.crossover
    return {
        "kind": found.kind,
        "sentence": ("SIMULATED: " if simulated else "") + found.sentence,
        "variant": found.variant,
        "steps": found.steps,
        "nccl_profile": found.nccl_profile,
        "from_concurrency": found.from_concurrency,
        "up_to_concurrency": found.up_to_concurrency,
        "crossover": {"at": crossing.at, "low": crossing.low, "high": crossing.high} if crossing else None,
        "more_repeats": found.more_rounds,
        "notes": notes,
    }


def _how_to_go_on(run: str, found: verdict.Verdict, rules: verdict.Rules, rounds: int) -> list[str]:
    """What to type where the verdict is open."""
    if found.kind != verdict.NOT_CERTAIN or not found.more_rounds:
        return []
    if found.more_rounds >= verdict.MOST_ROUNDS:
        return [
            f"The host's noise hides {100 * rules.smallest_effect:g} %: measure while nothing else runs there, or ask "
            f"for less with -e benchmark_run={run} -e benchmark_smallest_effect={2 * rules.smallest_effect:g}."
        ]
    most = max(rules.last_look, rounds + found.more_rounds)
    return [f"To go on: -e benchmark_run={run} -e benchmark_max_rounds={most}."]


# The table


def _rows(
    host: str,
    variants: Sequence[Variant],
    cells: Sequence[Cell],
    measured: Sequence[Measurement],
    found: verdict.Verdict,
    paired: Mapping[tuple[str, str], Paired],
) -> list[dict[str, Any]]:
    compared = {(one.variant, one.cell): one for one in found.by_load}
    published = _published()
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for one in variants:
        for cell in cells:
            mine = [each for each in measured if each.variant == one.name and each.cell == cell.name]
            if mine:
                row = _row(host, one, cell, mine, compared.get((one.name, cell.name)))
                row["published_accept_length"] = _published_for(published, one)
                made[one.name, cell.name] = row
    for (name, cell_name), row in made.items():
        explained = arithmetic.explain(*paired[name, cell_name]) if row["speculates"] else None
        row["predicted_speed_up"] = (explained.predicted or explained.predicted_decode) if explained else None
        row["same_texts"] = _same_texts(measured, name, row["reference"], cell_name)
    return list(made.values())


Paired = tuple[Mapping[str, Any], Mapping[str, Any]]


def _paired(measured: Sequence[Measurement], one: Variant, cell: Cell) -> Paired:
    """What the arithmetic takes of a variant and of its reference: geometric means over the rounds that both have, of
    the medians within each. Speed-ups are compared within rounds, so a host that changes from round to round must fall
    out here as well."""
    rounds: dict[str, dict[int, list[Measurement]]] = {one.name: {}, one.reference: {}}
    for each in measured:
        if each.cell == cell.name and each.variant in rounds:
            rounds[each.variant].setdefault(each.round, []).append(each)
    shared = sorted(set(rounds[one.name]) & set(rounds[one.reference]))

    def figures(name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"output_length": cell.output_length}
        for key in ("accept_length", "step_ms", "ttft_mean_ms"):
            values = [_middle(rounds[name][number], _FIGURES[key]) for number in shared]
            known = [value for value in values if value]
            found[key] = geometric_mean(known) if known and len(known) == len(values) else None
        return found

    return figures(one.name), figures(one.reference)


def _row(
    host: str, one: Variant, cell: Cell, mine: Sequence[Measurement], compared: verdict.Comparison | None
) -> dict[str, Any]:
    interval = compared.interval if compared else None
    starts: dict[int, list[float]] = {}
    for each in mine:
        starts.setdefault(each.round, []).append(float(each.data["output_tokens_per_s"]))
    sources = Counter(str(each.data.get("accept_length_source")) for each in mine if each.data.get("accept_length"))
    reasons: dict[str, str] = {}
    for each in mine:
        reasons.update({str(key): str(why) for key, why in (each.data.get("not_measured") or {}).items()})
    figures = {name: _middle(mine, path) for name, path in _FIGURES.items()}
    if not one.speculates:
        figures["accept_length"] = None
    memory = [sum((each.data.get("gpu") or {}).get("memory_mib", {}).values()) for each in mine
              if (each.data.get("gpu") or {}).get("memory_mib")]  # fmt: skip
    return {
        "host": host,
        "variant": one.name,
        "reference": one.reference,
        "nccl_profile": one.nccl_profile,
        "steps": one.steps,
        "speculates": one.speculates,
        "concurrency": cell.concurrency,
        "cell": cell.name,
        "prompt_set": cell.prompt_set,
        "input_length": cell.input_length,
        "output_length": cell.output_length,
        "rounds": len(starts),
        "measurements": len(mine),
        "tokens_per_s": math.exp(fmean(statistics.start_value(each) for each in starts.values())),
        **figures,
        "accept_length_source": sources.most_common(1)[0][0] if sources and one.speculates else None,
        "gpu_memory_mib": max(memory, default=None),
        "speed_up": compared.speed_up if compared else None,
        "speed_up_low": interval[0] if interval else None,
        "speed_up_high": interval[1] if interval else None,
        "state": compared.state if compared else "reference",
        "not_measured": {key: why for key, why in sorted(reasons.items()) if one.speculates or key != "accept_length"},
    }


def _without_part(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Without the figures of GPUs, of which only the head's were read."""
    unknown = dict.fromkeys(("watts", "tokens_per_joule", "gpu_memory_mib"))
    return {**row, **unknown, "not_measured": {**row["not_measured"], "power": why}}


def _middle(mine: Iterable[Measurement], path: Sequence[str]) -> float | None:
    found = []
    for one in mine:
        value: Any = one.data
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))
    return median(found) if found else None


def _same_texts(measured: Sequence[Measurement], name: str, reference: str, cell: str) -> bool | None:
    """Whether the answers are the reference's, word for word; None where the reference's own differ or aren't known."""
    mine = {one.data.get("output_sha256") for one in measured if one.variant == name and one.cell == cell}
    other = {one.data.get("output_sha256") for one in measured if one.variant == reference and one.cell == cell}
    if not reference or None in mine | other or len(other) != 1:
        return None
    return mine == other


def _published() -> list[dict[str, Any]]:
    return yaml.safe_load(ACCEPT_LENGTHS.read_text(encoding="utf-8")) or []


def _published_for(book: Sequence[Mapping[str, Any]], one: Variant) -> float | None:
    if not one.speculates or one.steps is None:
        return None
    for entry in book:
        if re.search(entry["drafter"], Path(one.drafter).name, re.IGNORECASE):
            value = entry["published"].get(one.steps)
            return float(value) if value is not None else None
    return None


# What explains it


def _explanations(
    variants: Sequence[Variant], rows: Sequence[Mapping[str, Any]], paired: Mapping[tuple[str, str], Paired]
) -> list[dict[str, Any]]:
    measured = {(row["variant"], row["cell"]) for row in rows}
    result = []
    for one in variants:
        for row in (each for each in rows if each["variant"] == one.name and one.speculates):
            if (one.reference, row["cell"]) not in measured:
                continue
            mine, other = paired[one.name, row["cell"]]
            place = {"variant": one.name, "concurrency": row["concurrency"], "cell": row["cell"]}
            explained = arithmetic.explain(mine, other)
            if explained is None:
                lacking = [
                    name
                    for name, value in (
                        ("accept length", mine["accept_length"]),
                        ("step time", mine["step_ms"]),
                        ("baseline's step time", other["step_ms"]),
                    )
                    if not value
                ]
                listed = " and ".join(part for part in (", ".join(lacking[:-1]), lacking[-1]) if part)
                sentence = f"Not measurable here: {listed}."
                result.append({**place, "measured": row["speed_up"], "sentences": [sentence]})
                continue
            sentences = explained.sentences()
            predicted = explained.predicted or explained.predicted_decode
            if row["speed_up"] and abs(math.log(predicted / row["speed_up"])) > math.log(1.05):
                sentences.append(
                    f"Measured is {row['speed_up']:.2f}, more than 5 % away from the arithmetic's {predicted:.2f}: "
                    "the measurement counts; requests that wait or differ in length are not in the arithmetic."
                )
            result.append({**place, **explained.as_dict(), "measured": row["speed_up"], "sentences": sentences})
    return result


# The rest


def _variant(one: Variant, measured: Sequence[Measurement]) -> dict[str, Any]:
    """What was started, from its newest measurement; what the plan says where there is none."""
    mine = [each for each in measured if each.variant == one.name]
    newest = mine[-1] if mine else None
    data: Mapping[str, Any] = newest.data if newest else {}
    server: Mapping[str, Any] = newest.server if newest else {}
    command = server.get("command") or data.get("server_command") or ""
    return {
        "name": one.name,
        "reference": one.reference,
        "nccl_profile": one.nccl_profile,
        "speculation": dict(one.speculation),
        "drafter": one.drafter,
        "arguments": dict(one.arguments),
        "server_command": " ".join(command) if isinstance(command, list) else command,
        "environment": dict(server.get("environment") or data.get("environment") or {}),
        "versions": {**(data.get("versions") or {}), **(server.get("versions") or {})},
        "client_command": data.get("command", ""),
        "client_module": data.get("client_module", ""),
    }


def _failed(failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The failures, those of one variant with one cause as one."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in failures:
        alike.setdefault((one["variant"], one["cause"]), []).append(one)
    made = []
    for group in alike.values():
        numbers = [str(one["round"]) for one in group]
        made.append({**group[-1], "rounds": f"round{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"})
    return made


def _effort(run: Run, host: str, measured: Sequence[Measurement], starts: int | None = None) -> dict[str, Any]:
    """`starts` where the plan tells it, since they are not one for each round and variant."""
    steps = run.progress(host).get("steps", [])
    return {
        "rounds": max((one.round for one in measured), default=0),
        "starts": starts or len({(one.round, one.variant) for one in measured}),
        "measurements": len(measured),
        "minutes": round(sum(float(one.get("seconds", 0)) for one in steps) / 60, 1),
        "plays": len({one.session for one in measured}),
    }


def _on_texts(variants: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where speculation changes the answers; made-up acceptance does by its nature."""
    found = []
    for one in variants:
        mine = [row for row in rows if row["variant"] == one["name"] and row["speculates"]]
        other = sorted({row["concurrency"] for row in mine if row["same_texts"] is False})
        if other and "SGLANG_SIMULATE_ACC_LEN" not in one["environment"]:
            found.append(
                f"{one['name']} answers other texts than {one['reference']} at {', '.join(map(str, other))} requests "
                "at a time. Near-ties that are rounded otherwise do that now and then; see that its answers make sense."
            )
    return found


def _on_sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    words = {"server_counters": "the server's counters", "log": "the server's log"}
    found = []
    for source, where in words.items():
        names = list(dict.fromkeys(row["variant"] for row in rows if row["accept_length_source"] == source))
        if names:
            found.append(
                f"The accept length of {', '.join(names)} is from {where}, which move every 40 decode steps: an "
                "average of what ran meanwhile, not of the requests."
            )
    return found


def _remarks(measured: Sequence[Measurement]) -> list[str]:
    """What the measurements themselves remark, each once, with how often."""
    found: Counter[str] = Counter()
    for one in measured:
        found.update({str(text) for text in one.data.get("problems") or []})
        jump = one.data.get("clock_jump_s") or 0
        if abs(jump) >= 1:
            found[
                "The host's clock jumped during a measurement; times are taken by a clock that does not, so they hold."
            ] += 1
    return [text if count == 1 else f"{text} ({count} measurements)" for text, count in found.most_common(20)]
