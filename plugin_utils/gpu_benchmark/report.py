"""The report of a run, in all its forms: report.html, report.md, charts/*.png, results.json, results.csv, and the few
lines on the terminal. All show the data of results.py; nothing is computed here.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from gpu_control import table, whole_file

from . import charts, results, runs

TEMPLATES = Path(__file__).resolve().parent / "templates"
SIGNS = {"enable": "✔", "do_not_enable": "✘", "not_certain": "?", "no_result": "–"}
NOT_MEASURABLE = "not measurable"
MARKS = {"faster": "▲", "slower": "▼"}


def write(run: runs.Run, earlier: runs.Run | None = None, now: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """Write everything into the run's folder. Returns the data, and a sentence for what could not be drawn. OSError."""
    data = results.build(run, earlier, now)
    drawn, troubles = _draw(data)
    folder = run.folder
    for host_charts in drawn.values():
        for chart in host_charts:
            whole_file.write(folder / "charts" / f"{chart.name}.png", chart.png)
    runs.write(folder / "results.json", data)
    whole_file.write(folder / "results.csv", as_csv(data))
    whole_file.write(folder / "report.md", as_markdown(data, drawn))
    whole_file.write(folder / "report.html", as_html(data, drawn))
    return data, troubles


def _draw(data: Mapping[str, Any]) -> tuple[dict[str, list[charts.Chart]], list[str]]:
    try:
        return {host["host"]: charts.draw(host) for host in data["hosts"]}, []
    except ImportError as error:
        name = error.name or "matplotlib"
        words = f"The report has no charts, since {name} is not installed: pip install -r requirements.txt"
        return {host["host"]: [] for host in data["hosts"]}, [words]


def as_csv(data: Mapping[str, Any]) -> str:
    """One line a variant and load; an empty field is not measurable."""
    text = io.StringIO()
    writer = csv.DictWriter(text, results.COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for host in data["hosts"]:
        writer.writerows(host["rows"])
    return text.getvalue()


def _environment(html: bool) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=html, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters.update(number=number, json=lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True))
    made.globals.update(
        cells_of=cells_of, headings=HEADINGS, signs=SIGNS, marks=MARKS, several_loads=several_loads, at_load=at_load,
        not_measurable=not_measurable,
    )  # fmt: skip
    return made


def as_html(data: Mapping[str, Any], drawn: Mapping[str, Sequence[charts.Chart]]) -> str:
    return _environment(True).get_template("report.html.j2").render(data=data, charts=drawn)


def as_markdown(data: Mapping[str, Any], drawn: Mapping[str, Sequence[charts.Chart]]) -> str:
    return _environment(False).get_template("report.md.j2").render(data=data, charts=drawn)


# The columns as people read them: heading, and under it the unit.
HEADINGS = (
    ("variant", ""),
    ("NCCL profile", ""),
    ("requests", "at a time"),
    ("TTFT p50 / p99", "ms"),
    ("ITL p50 / p99", "ms"),
    ("tokens/s", "a request"),
    ("tokens/s", "total"),
    ("accept length", "(published)"),
    ("verify step", "ms"),
    ("speed-up", "interval"),
    ("power", "W"),
    ("tokens", "a joule"),
)


def several_loads(host: Mapping[str, Any]) -> bool:
    return len(host["loads"]) > 1


def not_measurable(host: Mapping[str, Any]) -> list[str]:
    """Why figures are missing, each reason once with all that it is the reason of."""
    found: dict[str, list[str]] = {}
    for row in host["rows"]:
        for key, why in row["not_measured"].items():
            if key not in found.setdefault(why, []):
                found[why].append(key)
    return [f"Not measurable: {', '.join(key.replace('_', ' ') for key in keys)}. {why}" for why, keys in found.items()]


def at_load(host: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """How many requests at a time, and of which load where there are several."""
    return f"{one['concurrency']} ({one['cell']})" if several_loads(host) else str(one["concurrency"])


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """A row's texts, in the order of HEADINGS."""
    return [
        row["variant"],
        row["nccl_profile"],
        str(row["concurrency"]),
        _pair(row["ttft_p50_ms"], row["ttft_p99_ms"]),
        _pair(row["itl_p50_ms"], row["itl_p99_ms"]),
        number(row["tokens_per_s_per_request"]),
        number(row["tokens_per_s"]),
        _accept(row),
        number(row["step_ms"]),
        _speed_up(row),
        number(row["watts"]),
        number(row["tokens_per_joule"]),
    ]


def number(value: Any, digits: int = 3) -> str:
    """Three significant digits; whole numbers from 100 on, thousands apart."""
    if value is None:
        return NOT_MEASURABLE
    value = float(value)
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    if value == 0:
        return "0"
    places = max(0, digits - 1 - int(f"{value:e}".split("e")[1]))
    return f"{value:.{places}f}"


def _pair(first: Any, second: Any) -> str:
    if first is None and second is None:
        return NOT_MEASURABLE
    return f"{number(first)} / {number(second)}"


def _accept(row: Mapping[str, Any]) -> str:
    if not row["speculates"]:
        return "–"
    published = row.get("published_accept_length")
    shown = f"{row['accept_length']:.2f}" if row["accept_length"] is not None else NOT_MEASURABLE
    return f"{shown} ({published:.2f})" if published is not None else shown


def _speed_up(row: Mapping[str, Any]) -> str:
    if row["speed_up"] is None:
        return "1 (reference)" if row["state"] == "reference" else NOT_MEASURABLE
    if row["speed_up_low"] is None:
        return f"{row['speed_up']:.2f} (one round)"
    return f"{row['speed_up']:.2f} ({row['speed_up_low']:.2f} to {row['speed_up_high']:.2f})"


def terminal(data: Mapping[str, Any]) -> list[str]:
    """The short table and the verdict of each host."""
    lines: list[str] = []
    for host in data["hosts"]:
        profiles = len({row["nccl_profile"] for row in host["rows"]}) > 1
        loads = several_loads(host)
        head = ["variant", "at a time", "tokens/s", "a request", "TTFT ms", "accept", "step ms", "speed-up"]
        rows = [head + (["load"] if loads else [])]
        for row in host["rows"]:
            accept = "-" if not row["speculates"] else number(row["accept_length"])
            rows.append(
                [
                    row["variant"]
                    + ("" if not profiles or row["nccl_profile"] in row["variant"] else f" {row['nccl_profile']}"),
                    str(row["concurrency"]),
                    number(row["tokens_per_s"]),
                    number(row["tokens_per_s_per_request"]),
                    number(row["ttft_p50_ms"]),
                    accept,
                    number(row["step_ms"]),
                    _speed_up(row),
                    *([f"{row['prompt_set']} {row['input_length'] or ''} {row['output_length']}"] if loads else []),
                ]
            )
        lines.append(f"{', '.join(host.get('nodes', [host['host']]))}:")
        lines += [f"  {text}" for text in table.columns(rows, right=range(1, 7))] if len(rows) > 1 else []
        lines += [f"  {note}" for note in host["verdict"]["notes"]]
        lines += [f"  {text}" for text in _compared(host)]
        lines.append(f"  {SIGNS[host['verdict']['kind']]} {host['verdict']['sentence']}")
    return lines


def _compared(host: Mapping[str, Any]) -> list[str]:
    comparison = host["comparison"]
    if not comparison:
        return []
    worse = [row for row in comparison["rows"] if row["state"] == "regression"]
    texts = [
        f"REGRESSION against {comparison['run']}: {row['variant']} at {at_load(host, row)}, {row['ratio']:.2f} times "
        f"({row['low']:.2f} to {row['high']:.2f})"
        for row in worse
    ]
    if texts:
        return texts
    if not comparison["rows"]:
        why = "; ".join(text.rstrip(".") for text in comparison["remarks"]) or "no measurement is in both"
        return [f"Nothing can be compared with {comparison['run']}: {why}."]
    vague = sum(row["state"] == "unknown" for row in comparison["rows"])
    if vague:
        return [f"Against {comparison['run']} {vague} of {len(comparison['rows'])} figures rest on one round and tell "
                "nothing; the others are no regression beyond the interval."]  # fmt: skip
    return [f"No regression against {comparison['run']} beyond the interval."]
