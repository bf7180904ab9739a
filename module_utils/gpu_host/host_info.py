"""The checks before a deployment, in one call a part: gather, judge, report. Changes nothing.

Part `host` is asked before anything is staged or built, part `plan` before anything is launched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import (
    all_reduce,
    checkpoint,
    eagle3,
    filesystems,
    host_checks,
    host_facts,
    jit_caches,
    plan_checks,
    ports,
    processes,
    python_packages,
    readings,
    server_record,
    speculation,
)
from .deadline import Deadline
from .finding import ERROR, INFO, WARNING, Finding, errors, rows, summary
from .nvml import Reader
from .procfs import Proc
from .readings import Gpu, Readings, UnknownGpu
from .server_start import parse_environment
from .storage import StorageError

SCHEMA = 1
# MiB that a build of the kernel package takes: sources, objects, the wheel.
BUILD_MIB = 30 * 1024
CHECKS = tuple(sorted({*host_checks.CODES, *plan_checks.CODES}))


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module gpu_host_info returns, the same in check mode."""
    started = time.monotonic()
    deadline = Deadline(params["timeout"])
    reader = Reader()
    try:
        seen = reader.read(deadline.capped(20))
    finally:
        reader.close()
    try:
        gpus = readings.select(seen, params["gpus"]) if not seen.error else []
    except UnknownGpu as unknown:
        return _refused(str(unknown), started)
    gather = _host if params["part"] == "host" else _plan
    facts, found = gather(params, deadline, seen, gpus)
    result: dict[str, Any] = {"facts": facts}
    if params["all_reduce"]:
        done = _all_reduce(params, gpus)
        found += done.pop("findings")
        result["all_reduce"] = done
    return {**result, **_judged(params, found), "seconds": round(time.monotonic() - started, 3)}


def _judged(params: Mapping[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
    """Findings in the report's shape; those that are switched off are listed, but count no more."""
    skip = set(params["skip"])
    counted = [finding for finding in found if finding.code not in skip]
    wrong = errors(counted)
    more = sum(finding.severity == WARNING for finding in counted)
    message = summary(counted) if wrong else f"No errors, {more} warning{'' if more == 1 else 's'}."
    off = [{**row, "switch": _switch(row["code"])} for row in rows([one for one in found if one.code in skip])]
    return {
        "schema": SCHEMA,
        "changed": False,
        "part": params["part"],
        "passed": not wrong,
        "findings": [{**row, "switch": _switch(row["code"])} for row in rows(counted)],
        # Not "skipped": by that key Ansible counts and shows a task that never ran.
        "switched_off": off,
        "failed": bool(wrong) and params["fail"],
        "msg": message,
    }


def _switch(code: str) -> str:
    return f"preflight_skip: [{code}]"


def _refused(message: str, started: float) -> dict[str, Any]:
    return {
        "changed": False,
        "failed": True,
        "passed": False,
        "findings": [],
        "switched_off": [],
        "msg": message,
        "seconds": round(time.monotonic() - started, 3),
    }


# Part host


def _host(
    params: Mapping[str, Any], deadline: Deadline, seen: Readings, gpus: Sequence[Gpu]
) -> tuple[dict[str, Any], list[Finding]]:
    user, home = host_facts.home_of(params["user"])
    environment = _environment(params)
    table = filesystems.mounts()
    caches = jit_caches.outermost(jit_caches.locations(home, user, environment)) if home else []
    paths = {
        purpose: path
        for purpose, path in (("model", params["model_path"]), ("drafter", params["drafter_path"]))
        if path.startswith("/")
    }
    if params["build_folder"]:
        paths["kernel build"] = params["build_folder"]
    packages = _site_packages(params["python"], deadline) if params["python"] else ""
    spaces = host_facts.space_facts(paths, table, deadline)
    model_mib = params["model_mib"] or next((s.get("present_mib") or 0 for s in spaces if s["purpose"] == "model"), 0)
    facts = {
        "gpus": host_facts.gpu_facts(seen, gpus),
        "gpu_error": seen.error or "",
        "driver_version": seen.driver_version,
        "simulated": (seen.driver_version or "").endswith("-simulated"),
        "driver": host_facts.driver_facts(deadline.capped(10), [gpu.index for gpu in gpus]),
        "nvcc": host_facts.compiler_facts(deadline, environment, packages),
        "memory": host_facts.memory_facts(),
        "shm": {"path": params["shm_folder"], "free_mib": filesystems.free_mib(params["shm_folder"])},
        "spaces": host_checks.with_needs(spaces, params["model_mib"], BUILD_MIB if params["build"] else 0),
        "model_mib": model_mib,
        "caches": host_facts.cache_facts(caches, table),
        "network": host_facts.network_facts(),
        "secrets": host_facts.secret_facts(params["secret_files"], params["user"]),
        "machine": host_facts.machine_facts(),
        "user": user,
        "home": home,
    }
    wanted = host_checks.Wanted(
        compute_capability=params["compute_capability"],
        model_mib=model_mib,
        build=params["build"],
        ports=tuple(port for port in (params["port"], *params["ports"]) if port),
        min_ram_mib=params["min_ram_mib"],
        min_shm_free_mib=params["min_shm_free_mib"],
        user=params["user"],
    )
    return facts, host_checks.check(facts, wanted)


def _site_packages(python: str, deadline: Deadline) -> str:
    return str(python_packages.ask(python, deadline.capped(10)).get("packages") or "")


def _environment(params: Mapping[str, Any]) -> dict[str, str]:
    """The server's environment: the file that is rendered for it, then what is given for it alone."""
    environment: dict[str, str] = {}
    if params["environment_file"]:
        try:
            with open(params["environment_file"], encoding="utf-8", errors="surrogateescape") as file:
                environment.update(parse_environment(file.read()))
        except OSError:
            pass  # rendered later
    environment.update((name, str(value)) for name, value in params["environment"].items())
    return environment


# Part plan


def _plan(
    params: Mapping[str, Any], deadline: Deadline, seen: Readings, gpus: Sequence[Gpu]
) -> tuple[dict[str, Any], list[Finding]]:
    environment = _environment(params)
    number = (
        next((gpu.compute_capability for gpu in gpus if gpu.compute_capability), "") or params["compute_capability"]
    )
    set_ones = [name for name in plan_checks.PATCH_VARIABLES if environment.get(name, "") not in ("", "0")]
    packages = python_packages.facts(
        params["python"], number, deadline.capped(30), set_ones, environment.get("PYTHONPATH", "")
    )
    plan = plan_checks.Plan(
        compute_capability=number,
        driver_version=seen.driver_version or "",
        environment=environment,
        arguments=params["arguments"],
        host=params["host"],
        key=params["key"],
    )
    found = plan_checks.check(packages, plan)
    target, drafter = _config(params["model_path"]), _config(params["drafter_path"])
    version = str(packages.get("versions", {}).get("sglang") or "")
    found += speculation.judge(
        params["speculation"],
        params["arguments"],
        params["drafter_path"] if params["speculation"] else "",
        speculation.models(target, drafter),
        speculation.Host(number, version, len(gpus)),
    )
    if params["speculation"] and drafter is not None and target is not None:
        found += _pairing(params, environment)
    found += _ports(params)
    facts = {"packages": packages, "compute_capability": number, "environment": sorted(environment)}
    return facts, found


def _config(folder: str) -> dict[str, Any] | None:
    if not folder.startswith("/"):
        return None
    try:
        return checkpoint.read_config(folder)
    except checkpoint.CheckpointError:
        return None  # what is wrong with a model's folder is model_staging's to say


def _pairing(params: Mapping[str, Any], environment: Mapping[str, str]) -> list[Finding]:
    overridden = environment.get(eagle3.OVERRIDE_VARIABLE, "").lower() in ("1", "true", "yes")
    length = str(speculation.normalized(params["arguments"]).get("context_length", ""))
    answer = eagle3.run(
        {
            "target": params["model_path"],
            "drafter": params["drafter_path"],
            "context_length": eagle3.OVERRIDE if overridden else eagle3.KEEP,
            "served_context_length": int(length) if length.isdigit() else 0,
            "weights": True,
        },
        check_mode=True,
    )
    keys = ("severity", "code", "found", "expected", "cure")
    return [Finding(**{key: row[key] for key in keys}) for row in answer.get("findings", [])]


def _ports(params: Mapping[str, Any]) -> list[Finding]:
    wanted = [port for port in (params["port"], *params["ports"]) if port]
    if not wanted:
        return []
    proc = Proc()
    return plan_checks.check_ports(ports.port_holders(proc, wanted), _replaced(params, proc))


def _replaced(params: Mapping[str, Any], proc: Proc) -> list[int]:
    """The processes that the deployment's own reset ends: the server of this name; all servers without `gpus`."""
    snapshot = proc.snapshot()
    roots = set()
    try:
        record = server_record.load(params["state_folder"], params["server_name"]) if params["server_name"] else None
    except StorageError:
        record = None
    if record is not None and record.main_alive(proc):
        roots.add(record.main_pid)
    if not params["gpus"]:
        patterns = processes.Patterns()
        roots |= {pid for pid, process in snapshot.items() if processes.server_command(process.argv, patterns)}
    ended = set(roots)
    grown = True
    while grown:
        grown = False
        for pid, process in snapshot.items():
            if process.ppid in ended and pid not in ended:
                ended.add(pid)
                grown = True
    return sorted(ended)


# All-reduce


def _all_reduce(params: Mapping[str, Any], gpus: Sequence[Gpu]) -> dict[str, Any]:
    busy = sorted({process.pid for gpu in gpus for process in gpu.processes or ()})
    if len(gpus) < 2:
        return {"verdict": "", "detail": "One GPU has nobody to talk to.", "findings": []}
    if busy or any(gpu.processes is None for gpu in gpus):
        who = f" by pid {', '.join(map(str, busy[:5]))}" if busy else ""
        text = f"The all-reduce was not run: the GPUs are in use{who}."
        cure = "Run it when they are free (after playbooks/reset.yml)."
        return {"verdict": "", "detail": text, "findings": [Finding(INFO, "all_reduce_impossible", text, "", cure)]}
    answer = all_reduce.diagnose(
        params["python"], [gpu.uuid for gpu in gpus], _environment(params), params["all_reduce_timeout"]
    )
    return {**answer, "findings": all_reduce_findings(answer)}


def all_reduce_findings(answer: Mapping[str, Any]) -> list[Finding]:
    """What the all-reduce says about the host."""
    if answer["verdict"] == all_reduce.OK:
        return []
    if answer["verdict"] == all_reduce.IMPOSSIBLE:
        text = f"The all-reduce could not be run. {answer['detail']}"
        return [Finding(WARNING, "all_reduce_impossible", text, "", "Correct that, or leave out all_reduce.")]
    code = "all_reduce_hangs" if answer["verdict"] == all_reduce.HANGS else "all_reduce_wrong"
    text = f"An all-reduce among the GPUs {'hangs' if code == 'all_reduce_hangs' else 'gives wrong sums'}. "
    text += str(answer["detail"])
    if answer["without_p2p"] == all_reduce.OK:
        text += " Without peer-to-peer it works."
        cure = "Set NCCL_P2P_DISABLE: '1' in nccl_env_variables, or turn ACS and the IOMMU off and boot."
    elif answer["without_p2p"]:
        cure = "It fails without peer-to-peer too: look in `dmesg` for Xid lines, and test each GPU by itself."
    else:
        cure = "Look in `dmesg` for Xid lines, and test each GPU by itself."
    return [Finding(ERROR, code, text, "a sum within the deadline", cure)]
