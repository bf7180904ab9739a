"""The end of a play for people: what was on each GPU before and after, what was ended and spared, one verdict a host.

Pure functions over run records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Worst first: the order in which hosts are named on the last line.
VERDICTS = ("dirty", "unreachable", "unknown", "skipped", "clean")


def merge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One host's records of one play as one: GPUs from the first look to the last, all that was ended and deleted.

    More than one comes of a reset that went on to the hypervisor and verified on the guest afterwards.
    """
    merged = dict(records[-1])
    merged["gpus"] = list(merged.get("gpus", []))
    before = {gpu["uuid"]: gpu.get("used_mib_before") for gpu in reversed_gpus(records)}
    merged["gpus"] = [{**gpu, "used_mib_before": before.get(gpu["uuid"])} for gpu in merged["gpus"]]
    for key in ("killed", "cleaned", "kept", "spared", "respawners"):
        unique = {tuple(sorted((k, str(v)) for k, v in one.items())): one for r in records for one in r.get(key, [])}
        merged[key] = list(unique.values())
    return merged


def reversed_gpus(records: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """All GPU entries, the first record's last, so that a dict keeps the first look at each."""
    return (gpu for one in reversed(records) for gpu in one.get("gpus", []))


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows as aligned text; columns in ``right`` are aligned to the right, the last one is never padded."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(rows[0]))]
    right = set(right)
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def mib(value: Any) -> str:
    """MiB for people, ? where they are not known."""
    return "?" if value is None else f"{value:,}".replace(",", " ")


def gpu_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Host, GPU, MiB before and after, verdict, cure."""
    rows = [("host", "GPU", "MiB before", "after", "verdict", "cure")]
    for one in records:
        rows += [
            (
                one["host"],
                str(gpu["index"]),
                mib(gpu.get("used_mib_before")),
                mib(gpu.get("used_mib_after")),
                gpu["verdict"],
                gpu.get("cure") or "",
            )
            for gpu in one.get("gpus", [])
        ]
    return columns(rows, right=(1, 2, 3)) if len(rows) > 1 else []


def processes(title: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """Processes with why, one line for all that have the same name and reason: the first one's pid and how many."""
    if not found:
        return []
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        reason = f"{one.get('class', '')}: {one.get('why', '')}"
        signal = one.get("signal")
        ended = " (ends with its main)" if signal == "none" else f" ({signal})" if signal else ""
        alike.setdefault((str(one.get("name", "")), reason + ended), []).append(one)
    rows = []
    for (name, reason), group in alike.items():
        seconds = [one["seconds"] for one in group if one.get("seconds") is not None]
        slowest = f" {max(seconds):.1f} s" if seconds else ""
        many = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        rows.append((str(group[0].get("pid", "?")), name + many, reason + slowest))
    return [f"  {title}:"] + [f"    {text}" for text in columns(rows, right=(0,))]


def paths(title: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """A list of files with why, one line each."""
    return [f"  {title}:"] + [f"    {one['path']}  {one['why']}" for one in found] if found else []


def host_details(one: dict[str, Any]) -> list[str]:
    """What was ended, spared, deleted and kept on one host, and where its evidence is."""
    would = "would be " if one.get("predicted") else ""
    lines = [
        *processes(f"{would}killed", one.get("killed", [])),
        *processes("spared", one.get("spared", [])),
        *[f"  starts a server again: {sentence}" for sentence in one.get("respawners", [])],
        *paths(f"{would}cleaned", one.get("cleaned", [])),
        *paths("kept", one.get("kept", [])),
        *[f"  port {p['port']} is still held by pid {p.get('pid')} {p.get('name', '')}" for p in one.get("ports", [])],
        *[f"  kernel: {_event(event)}" for event in one.get("kernel_events", [])],
    ]
    if one.get("evidence"):
        lines.append(f"  evidence on the host: {one['evidence']}")
    if one.get("failed_afterwards"):
        lines.append(f"  failed after its reset: {one['failed_afterwards']}")
    if one.get("earlier"):
        lines.append(f"  runs whose record never reached this machine, recorded now: {len(one['earlier'])}")
    return [f"{one['host']}: {headline(one)}", *lines]


def details(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The details of each host; hosts of which there is nothing to tell but the same sentence share a line."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in records:
        head, *lines = host_details(one)
        if one["verdict"] == "clean" or lines:
            alike[(head, *lines)] = []
        else:
            alike.setdefault(("", headline(one)), []).append(one["host"])
    return [[f"{_names(hosts)}: {key[1]}"] if hosts else list(key) for key, hosts in alike.items()]


def _names(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 10} more" if len(hosts) > 10 else ""
    return ", ".join(hosts[:10]) + more


def _event(event: Any) -> str:
    return str(event.get("text") or event) if isinstance(event, dict) else str(event)


def headline(one: dict[str, Any]) -> str:
    """The verdict with its reason."""
    now = "now " if one.get("predicted") else ""
    simulated = ", SIMULATED" if one.get("simulated") else ""
    reason = f" - {one['reason']}" if one.get("reason") else ""
    return f"{now}{one['verdict']}{simulated}{reason}"


def last_line(records: Sequence[dict[str, Any]]) -> str:
    """One verdict for each host, on one line, the worst first.

    A hypervisor that was asked about a guest's memory has none: the guest's own verdict counts.
    """
    records = [one for one in records if not one.get("guest")]
    hosts: dict[str, list[str]] = {}
    for one in records:
        hosts.setdefault(one["verdict"], []).append(one["host"] + (" (SIMULATED)" if one.get("simulated") else ""))
    parts = [f"{verdict}: {', '.join(hosts[verdict])}" for verdict in sorted(hosts, key=_rank)]
    predicted = "Verdicts now, nothing was changed" if any(one.get("predicted") for one in records) else "Verdicts"
    return f"{predicted} - {'; '.join(parts)}"


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else -1


def report(records: Sequence[dict[str, Any]]) -> str:
    """Everything that is printed at the end of a play; ends with the line of verdicts."""
    sections = [gpu_table(records), *details(records), [last_line(records)]]
    return "\n\n".join("\n".join(section) for section in sections if section)
