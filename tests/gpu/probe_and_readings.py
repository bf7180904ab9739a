#!/usr/bin/env python3
"""Readings, verdicts and probe on a real GPU, beside the raw ones, as one JSON on standard output.

    python3 tests/gpu/probe_and_readings.py [--fraction 0.9] [--seconds 60] > probe_and_readings.json

Needs a GPU and its driver, and nothing but Python >= 3.9 (nvidia-ml-py where it is there). Exit status 0 when our
readings agree with the raw ones and every GPU passes the probe, else 1; what disagrees is in `differences`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))

from gpu_host import cuda_probe, kernel_log
from gpu_host.deadline import Deadline
from gpu_host.nvml import Reader
from gpu_host.procfs import Proc
from gpu_host.readings import Readings, to_json
from gpu_host.verdict import Policy, Sight, judge

_TOLERANCE_MIB = 2  # rounding, and what the driver moves between two looks

_RAW = """
import json, pynvml as N
N.nvmlInit()
def words(value): return value.decode() if isinstance(value, bytes) else value
def ask(call, *args):
    try: return getattr(N, call)(*args)
    except N.NVMLError as error: return str(error)
def fields(value, *names): return value if isinstance(value, str) else {name: getattr(value, name) for name in names}
gpus = []
for index in range(N.nvmlDeviceGetCount()):
    h = N.nvmlDeviceGetHandleByIndex(index)
    procs = {kind: ask('nvmlDeviceGet%sRunningProcesses' % kind, h) for kind in ('Compute', 'Graphics', 'MPSCompute')}
    gpus.append({
        'index': index, 'uuid': words(ask('nvmlDeviceGetUUID', h)), 'minor': ask('nvmlDeviceGetMinorNumber', h),
        'name': words(ask('nvmlDeviceGetName', h)), 'pci': words(ask('nvmlDeviceGetPciInfo', h).busId),
        'compute_capability': ask('nvmlDeviceGetCudaComputeCapability', h),
        'memory_v1': fields(ask('nvmlDeviceGetMemoryInfo', h), 'total', 'used', 'free'),
        'memory_v2': fields(ask('nvmlDeviceGetMemoryInfo', h, N.nvmlMemory_v2), 'total', 'used', 'free', 'reserved'),
        'utilization': fields(ask('nvmlDeviceGetUtilizationRates', h), 'gpu', 'memory'),
        'power_mw': ask('nvmlDeviceGetPowerUsage', h), 'mig': ask('nvmlDeviceGetMigMode', h),
        'processes': {k: p if isinstance(p, str) else [[x.pid, x.usedGpuMemory] for x in p] for k, p in procs.items()},
    })
print(json.dumps({'driver': words(N.nvmlSystemGetDriverVersion()), 'nvml': words(N.nvmlSystemGetNVMLVersion()),
                  'gpus': gpus}))
"""


def command(*argv: str, text: str | None = None) -> dict[str, Any]:
    started = time.monotonic()
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"argv": argv[:4], "trouble": str(error)}
    seconds = round(time.monotonic() - started, 3)
    return {"returncode": done.returncode, "seconds": seconds, "stdout": done.stdout, "stderr": done.stderr[-2000:]}


def raw() -> dict[str, Any]:
    """What nvidia-ml-py and nvidia-smi say by themselves; the XML without its long list of clocks."""
    xml = command("nvidia-smi", "-q", "-x")
    if "stdout" in xml:
        xml["stdout"] = re.sub(r"\s*<supported_clocks>.*?</supported_clocks>", "", xml["stdout"], flags=re.DOTALL)
    binding = command(sys.executable, "-c", _RAW)
    if binding.get("returncode") == 0:
        binding["stdout"] = json.loads(binding["stdout"])
    fields = "index,uuid,compute_cap,memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,power.draw"
    return {
        "nvml": binding,
        "nvidia_smi_xml": xml,
        "nvidia_smi_csv": command("nvidia-smi", f"--query-gpu={fields}", "--format=csv"),
        "nvidia_smi_apps": command("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv"),
        "device_nodes": sorted(str(path) for path in Path("/dev").glob("nvidia*")),
    }


def ours(source: str) -> tuple[dict[str, Any], Readings]:
    """Our readings through one source, with what the first and each later look cost in seconds."""
    times = []
    with Reader(source) as reader:
        for _ in range(6):
            started = time.monotonic()
            found = reader.read(Deadline(30))
            times.append(round(time.monotonic() - started, 4))
    return {"readings": to_json(found), "first_seconds": times[0], "later_seconds": sorted(times[1:])}, found


def differences(raw_nvml: Any, found: Readings, source: str) -> list[str]:
    """Where our readings and the raw ones disagree."""
    if not isinstance(raw_nvml, dict):
        return []
    wrong = []
    if len(raw_nvml["gpus"]) != len(found.gpus):
        return [f"{source}: {len(found.gpus)} GPUs, NVML has {len(raw_nvml['gpus'])}"]
    for position, gpu in enumerate(found.gpus):
        theirs = raw_nvml["gpus"][position]
        memory = theirs["memory_v2"]
        capability = theirs["compute_capability"]
        pairs: list[tuple[str, Any, Any]] = [
            ("index", theirs["index"], gpu.index),
            ("uuid", theirs["uuid"], gpu.uuid),
            ("minor", theirs["minor"], gpu.minor),
            ("name", theirs["name"], gpu.name),
            ("compute_capability", ".".join(map(str, capability)), gpu.compute_capability),
        ]
        wrong += [f"{source} GPU {gpu.index} {name}: {b!r}, raw {a!r}" for name, a, b in pairs if a != b]
        if isinstance(memory, dict):
            for name in ("total", "used", "free", "reserved"):
                value = getattr(gpu, f"{name}_mib")
                if value is None or abs(value - memory[name] / 2**20) > _TOLERANCE_MIB:
                    wrong.append(f"{source} GPU {gpu.index} {name}_mib: {value}, raw {memory[name] / 2**20:.1f}")
    return wrong


def verdicts(found: Readings) -> list[dict[str, Any]]:
    processes = Proc().snapshot()
    guest = Proc().in_guest()
    result = []
    for gpu in found.gpus:
        pids = [process.pid for process in gpu.processes or ()]
        states = {pid: "live" if pid in processes else "unseen" if guest else "dead" for pid in pids}
        names = {pid: processes[pid].name for pid in pids if pid in processes}
        result.append({"index": gpu.index, **asdict(judge(gpu, Sight(states, names, guest=guest), Policy()))})
    return result


def probed(found: Readings, fraction: float, seconds: float) -> dict[str, Any]:
    """The probe of all GPUs at once, with what the driver shows while it runs and until its memory is back."""
    samples: list[dict[str, Any]] = []
    results: list[cuda_probe.Probe] = []
    with Reader() as reader:
        reader.read(Deadline(30))
        started = time.monotonic()
        thread = threading.Thread(
            target=lambda: results.extend(cuda_probe.probe(found.gpus, Deadline(seconds), fraction))
        )
        thread.start()
        ended: float | None = None
        back: float | None = None
        while back is None and time.monotonic() - started < seconds + 10:
            now = reader.read(Deadline(30))
            if ended is None and not thread.is_alive():
                ended = time.monotonic()
            state = {
                "used_mib": [gpu.used_mib for gpu in now.gpus],
                "pids": [[process.pid for process in gpu.processes or ()] for gpu in now.gpus],
            }
            if not samples or {key: samples[-1][key] for key in state} != state:
                samples.append({"at": round(time.monotonic() - started, 3), **state})
            if ended is not None and all((gpu.used_mib or 0) <= 64 and not gpu.processes for gpu in now.gpus):
                back = time.monotonic()
            time.sleep(0.02)
        thread.join(5)
    touched_at = time.monotonic()
    touched = cuda_probe.touch(found.gpus, Deadline(seconds))
    return {
        "fraction": fraction,
        "probes": [asdict(one) for one in results],
        "seconds": None if ended is None else round(ended - started, 3),
        "memory_back_seconds": None if back is None or ended is None else round(back - ended, 3),
        "samples": samples,
        "touch": [asdict(one) for one in touched],
        "touch_seconds": round(time.monotonic() - touched_at, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Readings and probe on a real GPU, as JSON.")
    parser.add_argument("--fraction", type=float, default=0.9, help="share of the free memory to write and read back")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time for the probe")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "guest": Proc().in_guest(),
        "raw_before": raw(),
    }
    truth = report["raw_before"]["nvml"].get("stdout")
    wrong: list[str] = []
    found = Readings("none", None, None, (), "not read")
    for source in ("nvidia-smi", "nvml"):
        report[source], read = ours(source)
        if read.error:
            wrong += [f"{source}: {read.error}"] if not (source == "nvml" and "imported" in read.error) else []
            continue
        found = read
        wrong += differences(truth, read, source)
    report["verdicts_before"] = verdicts(found)
    report["probe"] = probed(found, options.fraction, options.seconds)
    report["raw_after"] = raw()
    with Reader() as reader:
        report["verdicts_after"] = verdicts(reader.read(Deadline(30)))
    log = kernel_log.read(Deadline(5))
    report["kernel_log"] = {
        "available": log.available,
        "why": log.why,
        "events": [asdict(one) for one in log.events[-20:]],
    }
    probes = report["probe"]["probes"]
    wrong += [f"GPU {one['index']}: {one['error']}" for one in probes + report["probe"]["touch"] if not one["ok"]]
    if not found.gpus or len(probes) != len(found.gpus):
        wrong.append("not every GPU was probed")
    report["differences"] = wrong
    print(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
