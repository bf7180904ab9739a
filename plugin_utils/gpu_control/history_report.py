"""The history of resets for people and for Prometheus: text for a terminal, one HTML file, a textfile of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import history, records, table
from .history import Summary

TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_HOSTS = 40  # rows of the terminal's table; the HTML file has all
MOST_PROBLEMS = 10
STRIP = 30  # newest resets of a host shown as a strip


def ordered(verdicts: Iterable[str]) -> list[str]:
    """The known verdicts, worst first, and others that the records hold."""
    return [*table.VERDICTS, *sorted(set(verdicts) - set(table.VERDICTS))]


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def counted(counts: Counter[Any], name: str = "") -> str:
    """`79 (3), 31`: what was seen, with how often where that is more than once."""
    return ", ".join(
        f"{name}{what}" + (f" ({count})" if count > 1 else "")
        for what, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
        if count
    )


# ---- terminal ----


def text(summary: Summary) -> str:
    """The report for a terminal, most urgent first."""
    sections = [
        _head(summary),
        _bad_now(summary),
        _worse(summary),
        _hosts(summary),
        _gpus(summary),
        _schedules(summary),
        _notes(summary),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(summary: Summary) -> list[str]:
    total = "; ".join(f"{verdict}: {number(summary.verdicts[verdict])}" for verdict in _present(summary))
    mark = " SIMULATED" if summary.simulated else ""
    return [
        f"{_count(summary.resets, 'reset')} of {_count(len(summary.hosts), 'host')}{mark} on record, "
        f"{records.timestamp(summary.first)} to {records.timestamp(summary.last)} - {total}"
    ]


def _count(value: int, what: str) -> str:
    return f"{number(value)} {what}{'' if value == 1 else 's'}"


def _present(summary: Summary) -> list[str]:
    return [verdict for verdict in ordered(summary.verdicts) if summary.verdicts[verdict]]


def _bad_now(summary: Summary) -> list[str]:
    bad = [host.last for host in summary.hosts if host.last.bad]
    if not bad:
        return ["The newest reset of every host ended clean or was skipped."]
    rank = {verdict: place for place, verdict in enumerate(ordered(one.verdict for one in bad))}
    bad.sort(key=lambda one: (rank[one.verdict], one.host))
    lines = [(one.host, one.verdict, one.started, one.reason) for one in bad[:MOST_HOSTS]]
    more = [f"  and {len(bad) - MOST_HOSTS} more"] if len(bad) > MOST_HOSTS else []
    return ["Not clean after its newest reset:", *[f"  {row}" for row in table.columns(lines)], *more]


def _worse(summary: Summary) -> list[str]:
    rows = [(host.host, "; ".join(host.worse)) for host in summary.worse]
    told = [f"  {row}" for row in table.columns(rows)] if rows else ["  none"]
    return ["Hosts that get worse:", *told, f"  ({summary.rule})"]


def _hosts(summary: Summary) -> list[str]:
    shown = [host for host in summary.hosts if not host.always_clean or summary.filters.hosts]
    quiet = len(summary.hosts) - len(shown)
    shown.sort(key=lambda host: (-sum(one.bad for one in host.resets), host.host))
    names = _present(summary)
    rows = [("host", "resets", *names, "killed", "orphans", "Xids", "median s", "slowest s")]
    rows += [
        (
            host.host,
            number(sum(host.verdicts.values())),
            *(number(host.verdicts[name]) for name in names),
            number(host.killed),
            number(host.orphans),
            counted(host.xids),
            seconds(host.median_seconds),
            seconds(host.slowest_seconds),
        )
        for host in shown[:MOST_HOSTS]
    ]
    lines = table.columns(rows, right=[*range(1, len(names) + 4), len(names) + 5, len(names) + 6]) if shown else []
    if len(shown) > MOST_HOSTS:
        lines.append(f"and {len(shown) - MOST_HOSTS} more; the HTML file has all of them")
    if quiet:
        lines.append(f"{'and ' if shown else ''}{quiet} host{'s' if quiet > 1 else ''} with clean resets only")
    return lines


def _gpus(summary: Summary) -> list[str]:
    troubled = summary.troubled_gpus
    if not troubled:
        return []
    troubled.sort(key=lambda gpu: (-gpu.not_free, gpu.host, gpu.index or 0))
    rows = [("host", "GPU", "resets", "not free", "now", "Xids", "what it was")]
    for gpu in troubled[:MOST_HOSTS]:
        bad = Counter({verdict: count for verdict, count in gpu.verdicts.items() if verdict not in history.CLEAN_GPU})
        index = "?" if gpu.index is None else str(gpu.index)
        rows.append(
            (gpu.host, index, number(gpu.seen), number(gpu.not_free), gpu.last, counted(gpu.xids), counted(bad))
        )
    more = [f"and {len(troubled) - MOST_HOSTS} more"] if len(troubled) > MOST_HOSTS else []
    return ["GPUs that a reset left not free, or that had an Xid:", *table.columns(rows, right=(1, 2, 3)), *more]


def _schedules(summary: Summary) -> list[str]:
    schedules = summary.schedules()
    if not any(schedules):
        return []
    return ["By schedule:", *[f"  {name or 'by hand'}: {counted(counts)}" for name, counts in schedules.items()]]


def _notes(summary: Summary) -> list[str]:
    problems = summary.history.problems
    lines = [f"No reset of {name} is on record." for name in summary.missing]
    lines += [f"{note}." for note in summary.history.notes]
    if problems:
        lines.append(f"{len(problems)} line{'s' if len(problems) > 1 else ''} passed over, left as they are:")
        lines += [f"  {problem}" for problem in problems[:MOST_PROBLEMS]]
        lines += [f"  and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
    return lines


# ---- HTML ----


def html(summary: Summary, now: str) -> str:
    """One file that needs nothing else: no script, no font, no picture from elsewhere."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=number, seconds=seconds, counted=counted, time=records.timestamp)
    days = summary.days()
    return environment.get_template("resets.html.j2").render(
        summary=summary,
        now=now,
        names=_present(summary),
        days=days,
        most_a_day=max((sum(counts.values()) for _day, counts in days), default=1),
        known=set(table.VERDICTS),
        strip=STRIP,
        clean_gpu=history.CLEAN_GPU,
    )


# ---- Prometheus ----


def metrics(summary: Summary) -> str:
    """The text format that node_exporter's textfile collector reads. Counters count what the files hold."""
    hosts = summary.hosts
    families: list[tuple[str, str, str, list[tuple[dict[str, Any], float]]]] = [
        (
            "gpu_reset_resets_total",
            "counter",
            "Resets on record by how they ended.",
            [
                ({"host": host.host, "verdict": verdict}, host.verdicts[verdict])
                for host in hosts
                for verdict in ordered(host.verdicts)
            ],
        ),
        (
            "gpu_reset_last_verdict",
            "gauge",
            "1 for the verdict of the newest reset, 0 for the others.",
            [
                ({"host": host.host, "verdict": verdict}, int(host.last.verdict == verdict))
                for host in hosts
                for verdict in ordered([host.last.verdict])
            ],
        ),
        (
            "gpu_reset_last_timestamp_seconds",
            "gauge",
            "When the newest reset began, in seconds since 1970.",
            [({"host": host.host}, host.last.when) for host in hosts],
        ),
        (
            "gpu_reset_last_duration_seconds",
            "gauge",
            "How long the newest reset took on the host.",
            [({"host": host.host}, host.last.seconds) for host in hosts if host.last.seconds is not None],
        ),
        (
            "gpu_reset_killed_processes_total",
            "counter",
            "Processes that resets ended.",
            [({"host": host.host}, host.killed) for host in hosts],
        ),
        (
            "gpu_reset_orphans_total",
            "counter",
            "Orphans of servers among them.",
            [({"host": host.host}, host.orphans) for host in hosts],
        ),
        (
            "gpu_reset_xids_total",
            "counter",
            "Xid errors in the kernel log when resets looked.",
            [({"host": host.host, "xid": xid}, count) for host in hosts for xid, count in sorted(host.xids.items())],
        ),
        (
            "gpu_reset_gpu_not_free_total",
            "counter",
            "Resets that left this GPU neither free nor held by protected processes only.",
            [({"host": gpu.host, "gpu": gpu.index, "uuid": gpu.uuid}, gpu.not_free) for gpu in summary.gpus],
        ),
        (
            "gpu_reset_host_gets_worse",
            "gauge",
            "1 for a host that gets worse by the rule of report-resets.yml.",
            [({"host": host.host}, int(bool(host.worse))) for host in hosts],
        ),
        (
            "gpu_reset_history_lines",
            "gauge",
            "Lines of the history that were looked at.",
            [({}, summary.history.lines)],
        ),
        (
            "gpu_reset_history_broken_lines",
            "gauge",
            "Lines of the history that can't be read.",
            [({}, len(summary.history.problems))],
        ),
    ]
    lines = []
    for name, kind, told, samples in families:
        if samples:
            lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
            lines += [_sample(name, labels, value) for labels, value in samples]
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, Any], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(of)}"' for key, of in labels.items())
    return f"{name}{'{' + inside + '}' if inside else ''} {value:.15g}"


def _escaped(value: Any) -> str:
    return str("?" if value is None else value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# ---- all of it ----


def problems_of(metrics_file: str) -> str:
    """What is wrong with the name of a metrics file, or nothing."""
    if metrics_file and not metrics_file.endswith(".prom"):
        return f"report_resets_metrics: {metrics_file!r} does not end in .prom; node_exporter reads no other files."
    return ""


def rows(summary: Summary) -> Sequence[dict[str, Any]]:
    """The hosts as plain data, for what a task registers."""
    return [
        {
            "host": host.host,
            "resets": sum(host.verdicts.values()),
            "verdicts": dict(host.verdicts),
            "last_verdict": host.last.verdict,
            "last_started": host.last.started,
            "last_reason": host.last.reason,
            "killed": host.killed,
            "orphans": host.orphans,
            "xids": {str(xid): count for xid, count in sorted(host.xids.items())},
            "median_seconds": host.median_seconds,
            "slowest_seconds": host.slowest_seconds,
            "worse": host.worse,
        }
        for host in summary.hosts
    ]
