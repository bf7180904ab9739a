"""Derives the verdicts of the recorded real-GPU sessions again, from the raw readings alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gpu_host import nvidia_smi
from gpu_host.child import Completed
from gpu_host.procfs import INITIAL_PID_NAMESPACE
from gpu_host.readings import Gpu, GpuProcess
from gpu_host.verdict import Policy, Sight, judge

RECORDED = Path(os.environ.get("GPU_RECORDINGS") or Path(__file__).resolve().parents[1] / "gpu" / "recorded")
# Those that looked at the GPU; a session that only compares figures has no reading.
SESSIONS = sorted(one for one in RECORDED.glob("*.jsonl") if '"kind": "reading"' in one.read_text())
# The session that measures resets nothing; its own claims are in test_gpu_benchmark.py.
RESETTING = [session for session in SESSIONS if "benchmark" not in session.stem]
MIB = 1 << 20


@cache
def events(session: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in session.read_text().splitlines())


def of_kind(session: Path, kind: str) -> Iterator[dict[str, Any]]:
    return (event for event in events(session) if event["kind"] == kind)


def from_nvml(raw: dict[str, Any]) -> Gpu:
    memory = raw["memory_v2"]
    listed = [("compute", one) for one in raw["compute_processes"]]
    # NVML may refuse the list of graphics processes on a machine without a display.
    if isinstance(raw["graphics_processes"], list):
        listed += [("graphics", one) for one in raw["graphics_processes"]]
    capability, mig = raw["compute_capability"], raw["mig"]
    return Gpu(
        index=raw["index"],
        uuid=raw["uuid"],
        minor=raw["minor"],
        name=raw["name"],
        pci_bus_id=raw["pci_bus_id"],
        compute_capability=f"{capability[0]}.{capability[1]}",
        total_mib=memory["total"] // MIB,
        used_mib=-(-memory["used"] // MIB),
        free_mib=memory["free"] // MIB,
        reserved_mib=memory["reserved"] // MIB,
        utilization_percent=raw["utilization"].get("gpu"),
        power_watts=None,
        mig=bool(mig[0]) if isinstance(mig, list) else False,
        processes=tuple(
            GpuProcess(one["pid"], None if one["usedGpuMemory"] is None else one["usedGpuMemory"] // MIB, kind)
            for kind, one in listed
        ),
    )


def sight(event: dict[str, Any]) -> Sight:
    reading = event["reading"]
    seen = [*reading["node_holders"], *(one for tree in event["trees"].values() for one in tree)]
    live = {one["pid"] for one in seen if one["state"] not in ("Z", "X")} | set(event["protected"])
    listed = {one["pid"] for gpu in reading["nvml"]["gpus"] for one in gpu["compute_processes"]}
    return Sight(
        states={pid: "live" if pid in live else "dead" for pid in listed},
        protected=frozenset(event["protected"]),
        guest=reading["pid_namespace"] != INITIAL_PID_NAMESPACE,
    )


def judged(event: dict[str, Any]) -> dict[int, tuple[str, list[int]]]:
    verdicts = {}
    for raw in event["reading"]["nvml"]["gpus"]:
        verdict = judge(from_nvml(raw), sight(event), Policy())
        verdicts[int(raw["index"])] = (verdict.verdict, sorted(verdict.pids))
    return verdicts


def name_of(session: Path) -> str:
    return session.stem


every_session = pytest.mark.parametrize("session", SESSIONS, ids=name_of)
every_resetting_session = pytest.mark.parametrize("session", RESETTING, ids=name_of)


def test_a_session_on_a_real_gpu_is_recorded() -> None:
    assert SESSIONS, f"{RECORDED} holds no session: run tests/gpu on a GPU and commit its session.jsonl there"


@every_session
def test_the_session_names_commit_date_driver_and_gpus(session: Path) -> None:
    start = next(of_kind(session, "session"))
    assert start["commit"] and start["date"]
    nvml = next(of_kind(session, "reading"))["reading"]["nvml"]
    assert nvml["driver_version"] and all(gpu["uuid"].startswith("GPU-") for gpu in nvml["gpus"])
    assert "simulated" not in nvml["driver_version"]


@every_session
def test_what_the_session_put_on_a_gpu_is_what_the_verdict_finds_there(session: Path) -> None:
    told = 0
    for event in of_kind(session, "reading"):
        verdicts = judged(event)
        for gpu, pids in event["truth"].items():
            verdict, found = verdicts[int(gpu)]
            tenants = set(pids) - set(event["protected"])
            where = (event["scenario"], event["moment"], gpu, verdict, found)
            if tenants:
                assert verdict == "in_use" and tenants <= set(found), where
            else:
                assert (verdict, found) == ("protected_only" if pids else "free", sorted(pids)), where
            told += 1
    assert told


@every_session
def test_nvml_and_nvidia_smi_lead_to_one_verdict(session: Path) -> None:
    compared = total = 0
    for event in of_kind(session, "reading"):
        total += 1
        raw = event["reading"]
        done = Completed(raw["nvidia_smi_xml"]["rc"], raw["nvidia_smi_xml"]["out"], "", "")
        printed = nvidia_smi.parse(done, nvidia_smi.parse_fixed(raw["nvidia_smi_csv"]["out"])).gpus
        asked = [from_nvml(gpu) for gpu in raw["nvml"]["gpus"]]
        # The two looks are some 30 ms apart: of a process that dies between them only one still knows.
        if [set(gpu.processes or ()) for gpu in printed] != [set(gpu.processes or ()) for gpu in asked]:
            continue
        compared += 1
        assert [judge(gpu, sight(event), Policy()).verdict for gpu in printed] == [
            judge(gpu, sight(event), Policy()).verdict for gpu in asked
        ], (event["scenario"], event["moment"])
    assert compared > total / 2


@every_resetting_session
def test_each_run_record_says_what_the_reading_after_it_shows(session: Path) -> None:
    compared = 0
    last: dict[str, Any] | None = None
    for event in events(session):
        if event["kind"] == "reset":
            last = event
        elif event["kind"] == "reading" and event["moment"].startswith("after") and last:
            verdicts = judged(event)
            for gpu in last["record"]["gpus"]:
                assert gpu["verdict"] == verdicts[gpu["index"]][0], (event["scenario"], last["label"])
                compared += 1
            last = None
    assert compared


@every_resetting_session
def test_no_reset_ended_a_process_that_the_session_had_not_started_as_a_server(session: Path) -> None:
    for event in of_kind(session, "reset"):
        started = {pid for members in event["members"].values() for pid, _ in members}
        for one in event["record"]["killed"]:
            assert one["pid"] in started, (event["scenario"], one)


@every_resetting_session
def test_every_check_of_the_session_held(session: Path) -> None:
    checks = list(of_kind(session, "check"))
    assert checks
    assert [f"{one['scenario']}: {one['sentence']}" for one in checks if not one["ok"]] == []
