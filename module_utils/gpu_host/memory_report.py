"""The report of per-GPU memory: readings, processes, holders of the device nodes, and a verdict on each GPU.

Changes nothing. One deadline stands over all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from . import verdict
from .deadline import Deadline
from .nvml import Reader
from .processes import PROTECTED, Patterns
from .procfs import Proc, Process
from .readings import Gpu, Readings, UnknownGpu
from .scope import Scope
from .survey import Look, Survey
from .verdict import Policy, Sight, Verdict

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
_LEAST_LOOK = 0.1
_NO_SERVERS = Patterns(modules=(), commands=(), titles=())


def run(
    params: Mapping[str, Any],
    check_mode: bool = False,
    diff: bool = False,
    proc: Proc | None = None,
    reader: Reader | None = None,
) -> dict[str, Any]:
    """What the module gpu_memory returns, the same in check mode; `failed` and `msg` where the call is to fail."""
    deadline = Deadline(params["timeout"])
    used_reader = reader or Reader()
    try:
        return _report(params, deadline, proc or Proc(), used_reader)
    finally:
        used_reader.close()


def _report(params: Mapping[str, Any], deadline: Deadline, proc: Proc, reader: Reader) -> dict[str, Any]:
    started = time.monotonic()
    patterns = replace(_NO_SERVERS, protected=(*PROTECTED, *params["protected"]))
    survey = Survey(proc, patterns, Scope(), reader, params["gpus"], device_folder=params["device_folder"])
    policy = Policy(free_mib=params["free_mib"], protected_mib=params["protected_mib"])
    pause = _FIRST_PAUSE
    while True:
        asked = time.monotonic()
        try:
            readings = survey.read(deadline)
        except UnknownGpu as unknown:
            return _result(survey.readings, [], started, failed=True, msg=str(unknown))
        look = survey.look()
        verdicts, settled = survey.judge(look, policy)
        free = bool(verdicts) and settled and all(one.clean for _, one in verdicts)
        # Another look needs time to be answered: cut short at the deadline it would read as a hanging driver.
        needed = max(_LEAST_LOOK, 3 * (time.monotonic() - asked))
        if not params["wait"] or free or not _may_come(readings, verdicts):
            break
        if deadline.remaining() < needed + _FIRST_PAUSE:
            break
        time.sleep(min(pause, deadline.remaining() - needed))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    sight = survey.sight(look)
    own = frozenset({os.getpid(), *([reader.child_pid] if reader.child_pid else [])})
    holders = _holders(proc, look, survey.selected, params["device_folder"], own)
    users = _users()
    gpus = [_gpu(gpu, one, look, sight, holders, users, proc) for gpu, one in verdicts]
    result = _result(readings, gpus, started, free=free)
    if params["wait"] and not free:
        result.update(failed=True, msg=_why_not(readings, verdicts, time.monotonic() - started))
    return result


def _may_come(readings: Readings, verdicts: list[tuple[Gpu, Verdict]]) -> bool:
    """Whether waiting can help: not where there is no driver, and not for a GPU that fell off the bus."""
    return readings.error is None and not any(one.verdict == verdict.LOST for _, one in verdicts)


def _why_not(readings: Readings, verdicts: list[tuple[Gpu, Verdict]], seconds: float) -> str:
    if readings.error:
        return readings.error
    busy = [(gpu, one) for gpu, one in verdicts if not one.clean]
    if not busy:
        return f"After {seconds:.1f} s the GPUs are empty but still at full load; wait longer to tell a ghost latch."
    gpu, one = busy[0]
    more = f" (and {len(busy) - 1} more)" if len(busy) > 1 else ""
    return f"After {seconds:.1f} s GPU {gpu.index}{more} is not free: {one.verdict}, {one.detail}. {one.cure}"


def _result(readings: Readings, gpus: list[dict[str, Any]], started: float, **more: Any) -> dict[str, Any]:
    return {
        "changed": False,
        "source": readings.source,
        "driver_version": readings.driver_version,
        "nvml_version": readings.nvml_version,
        "error": readings.error or "",
        "simulated": (readings.driver_version or "").endswith("-simulated"),
        "gpus": gpus,
        "free": False,
        "seconds": round(time.monotonic() - started, 3),
        **more,
    }


def _gpu(
    gpu: Gpu,
    one: Verdict,
    look: Look,
    sight: Sight,
    holders: Mapping[int, list[Process]],
    users: Mapping[int, str],
    proc: Proc,
) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "minor": gpu.minor,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "compute_capability": gpu.compute_capability,
        "total_mib": gpu.total_mib,
        "used_mib": gpu.used_mib,
        "free_mib": gpu.free_mib,
        "reserved_mib": gpu.reserved_mib,
        "utilization_percent": gpu.utilization_percent,
        "power_watts": gpu.power_watts,
        "mig": gpu.mig,
        "processes": None
        if gpu.processes is None
        else [
            {
                "pid": process.pid,
                "used_mib": process.used_mib,
                "kind": process.kind,
                "state": sight.states.get(process.pid, "unseen"),
                "protected": process.pid in sight.protected,
                **_who(look.processes.get(process.pid), users, proc),
            }
            for process in gpu.processes
        ],
        "holders": [{"pid": holder.pid, **_who(holder, users, proc)} for holder in holders.get(gpu.index, [])],
        "verdict": one.verdict,
        "cure": one.cure,
        "detail": one.detail,
        "pids": one.pids,
        "errors": gpu.errors,
    }


def _who(process: Process | None, users: Mapping[int, str], proc: Proc) -> dict[str, Any]:
    """Name, user and start time. The name is program and two words at most: command lines can hold secrets."""
    if process is None:
        return {"name": None, "user": None, "start_time": None}
    started = datetime.fromtimestamp(proc.start_time_epoch(process), timezone.utc)
    return {
        "name": process.name,
        "user": users.get(process.uid, str(process.uid)),
        "start_time": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _holders(
    proc: Proc, look: Look, gpus: list[Gpu], device_folder: str, own: frozenset[int]
) -> dict[int, list[Process]]:
    """Who has each GPU's device node open, by the link's text. It says who uses the driver, not which GPU he uses."""
    nodes = {f"{device_folder.rstrip('/')}/nvidia{gpu.minor}": gpu.index for gpu in gpus if gpu.minor is not None}
    found: dict[int, list[Process]] = {gpu.index: [] for gpu in gpus}
    for pid, process in sorted(look.processes.items()):
        if pid in own or process.kernel_thread:
            continue
        for link in proc.open_files(pid) or ():
            if link in nodes:
                found[nodes[link]].append(process)
    return found


def _users(path: str = "/etc/passwd") -> dict[int, str]:
    """Names by uid, from the file alone: asking the name service could hang on a directory server."""
    users: dict[int, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.split(":")
                if len(fields) > 2 and fields[2].isdigit():
                    users.setdefault(int(fields[2]), fields[0])
    except OSError:
        pass
    return users
