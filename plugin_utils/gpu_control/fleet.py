"""The memory of a fleet's GPUs at one moment: facts without a verdict, as a table and as JSON.

Pure functions over what gpu_memory returned on each host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import table

SCHEMA = 1
FILE_NAME = "gpus.json"
READ, UNREACHABLE, NOT_READ = "read", "unreachable", "not read"
_GPU_KEYS = (
    *("index", "uuid", "name", "pci_bus_id", "total_mib", "used_mib", "free_mib", "reserved_mib"),
    *("utilization_percent", "power_watts", "mig", "errors"),
)
_PROCESS_KEYS = ("pid", "name", "user", "used_mib", "kind", "start_time", "state", "protected")


def host(name: str, returned: Mapping[str, Any] | None) -> dict[str, Any]:
    """One host's part of the report. ``state``: read, unreachable or not read, with ``why`` where it was not read."""
    returned = returned or {}
    one: dict[str, Any] = {"host": name, "state": READ, "why": "", "simulated": bool(returned.get("simulated"))}
    one |= {"driver_version": returned.get("driver_version"), "source": returned.get("source"), "gpus": []}
    if returned.get("unreachable"):
        return one | {"state": UNREACHABLE, "why": _one_line(returned.get("msg"))}
    if not isinstance(returned.get("gpus"), list) or returned.get("error") or returned.get("refused"):
        why = _one_line(returned.get("error") or returned.get("msg") or "it was not asked")
        return one | {"state": NOT_READ, "why": why}
    return one | {"gpus": [_gpu(gpu) for gpu in returned["gpus"]]}


def _gpu(gpu: Mapping[str, Any]) -> dict[str, Any]:
    processes = gpu.get("processes")
    return {key: gpu.get(key) for key in _GPU_KEYS} | {
        "processes": None
        if processes is None
        else [{key: process.get(key) for key in _PROCESS_KEYS} for process in processes]
    }


def report(results: Mapping[str, Mapping[str, Any] | None], when: str) -> dict[str, Any]:
    """The whole, hosts in the order of their names."""
    return {"schema": SCHEMA, "when": when, "hosts": [host(name, results[name]) for name in sorted(results)]}


def text(found: Mapping[str, Any]) -> str:
    """The table, then who could not be read and why, then one line for all."""
    sections = [_table(found["hosts"]), _missing(found["hosts"]), [last_line(found)]]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _table(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("host", "GPU", "MiB used", "total", "busy %", "name", "processes")]
    for one in hosts:
        rows += [
            (
                one["host"],
                str(gpu["index"]),
                table.mib(gpu["used_mib"]),
                table.mib(gpu["total_mib"]),
                "?" if gpu["utilization_percent"] is None else str(gpu["utilization_percent"]),
                gpu["name"] or "?",
                _processes(gpu),
            )
            for gpu in one["gpus"]
        ]
    return table.columns(rows, right=(1, 2, 3, 4)) if len(rows) > 1 else []


def _processes(gpu: Mapping[str, Any]) -> str:
    """Who holds most first; `?` with the driver's words where they can't be read."""
    processes = gpu["processes"]
    errors = gpu["errors"] or {}
    if processes is None:
        return f"? ({errors.get('processes') or errors.get('gpu') or 'not told'})"
    ordered = sorted(processes, key=lambda process: -(process["used_mib"] or 0))
    shown = [
        f"{process['name'] or 'a process that is not visible'} (pid {process['pid']}"
        + (f", {process['user']}" if process["user"] else "")
        + (f", {table.mib(process['used_mib'])} MiB" if process["used_mib"] is not None else "")
        + ")"
        for process in ordered[:3]
    ]
    return "; ".join([*shown, *([f"{len(ordered) - 3} more"] if len(ordered) > 3 else [])])


def _missing(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(one["host"], one["state"], one["why"]) for one in hosts if one["state"] != READ]
    rows += [
        (one["host"], "no GPU", "its driver lists none") for one in hosts if one["state"] == READ and not one["gpus"]
    ]
    return table.columns(rows) if rows else []


def last_line(found: Mapping[str, Any]) -> str:
    """How many hosts and GPUs, and how much of their memory is used."""
    hosts = found["hosts"]
    gpus = [gpu for one in hosts for gpu in one["gpus"]]
    known = [gpu for gpu in gpus if gpu["used_mib"] is not None and gpu["total_mib"]]
    used, total = sum(gpu["used_mib"] for gpu in known), sum(gpu["total_mib"] for gpu in known)
    with_processes = sum(bool(gpu["processes"]) for gpu in gpus)
    counts = [(state, sum(one["state"] == state for one in hosts)) for state in (READ, UNREACHABLE, NOT_READ)]
    states = ", ".join(f"{count} {state}" for state, count in counts if count)
    mark = " SIMULATED" if any(one["simulated"] for one in hosts) else ""
    unread = f", {len(gpus) - len(known)} can't be read" if len(known) < len(gpus) else ""
    return (
        f"{len(hosts)} host{'' if len(hosts) == 1 else 's'}{mark} ({states}) - {len(gpus)} GPUs, "
        f"{with_processes} with processes{unread}; {table.mib(used)} of {table.mib(total)} MiB used"
    )


def _one_line(value: Any) -> str:
    return " ".join(str(value).split()).removeprefix("Task failed: ").removeprefix("Nothing was done. ")
