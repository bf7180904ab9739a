"""The report of per-GPU memory, on real processes over the simulated NVML."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from gpu_host import arguments, memory_report, procfs
from gpu_host.nvml import Reader

from simulator.gpu_state import GpuState
from tests.unit.real_pythons import pythons

ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys, time
sys.path.insert(0, {root!r})
from simulator.gpu_state import GpuState
node = open({node!r})
held = GpuState({state!r}).allocate({index}, {mib})
print("ready", flush=True)
time.sleep(60)
"""


class Machine(procfs.Proc):
    """The real /proc, as if we stood on the machine itself or in a guest."""

    def __init__(self, guest=False):
        super().__init__()
        self._guest = guest

    def in_guest(self):
        return self._guest


@pytest.fixture
def devices(tmp_path):
    folder = tmp_path / "dev"
    folder.mkdir()
    for minor in range(4):
        (folder / f"nvidia{minor}").touch()
    return folder


@pytest.fixture
def holder(host, devices):
    """A process with 1158 MiB of GPU 2 that has /dev/nvidia3 (GPU 0) open."""
    program = HOLD.format(root=str(ROOT), node=str(devices / "nvidia3"), state=str(host.folder), index=2, mib=1158)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def params(**changes):
    defaults = {name: option["default"] for name, option in arguments.GPU_MEMORY.items()}
    return {**defaults, "timeout": 20.0, **changes}


def report(guest=False, **changes):
    return memory_report.run(params(**changes), proc=Machine(guest), reader=Reader("nvml"))


def test_a_live_process_is_reported_with_name_user_and_start_time(host, devices, holder):
    result = report(device_folder=str(devices))
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "free", "in_use", "free"]
    assert not result["free"] and not result["changed"] and "failed" not in result
    (process,) = result["gpus"][2]["processes"]
    assert (process["pid"], process["used_mib"], process["state"]) == (holder.pid, 1158, "live")
    assert process["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert "python" in process["name"] and not process["protected"]
    age = time.time() - time.mktime(time.strptime(process["start_time"], "%Y-%m-%dT%H:%M:%SZ")) + time.timezone
    assert -2 < age < 30
    assert result["gpus"][2]["pids"] == [holder.pid] and str(holder.pid) in result["gpus"][2]["cure"]


def test_holders_of_a_device_node_are_found_by_minor_number_and_do_not_decide_the_verdict(host, devices, holder):
    gpus = report(device_folder=str(devices))["gpus"]
    assert [[one["pid"] for one in gpu["holders"]] for gpu in gpus] == [[holder.pid], [], [], []]
    assert gpus[0]["minor"] == 3 and gpus[0]["verdict"] == "free"


def test_only_the_chosen_gpus_are_reported(host, holder):
    result = report(gpus=["1", host.gpus()[3].uuid, host.gpus()[0].pci_bus_id])
    assert [gpu["index"] for gpu in result["gpus"]] == [0, 1, 3] and result["free"]


def test_an_unknown_gpu_fails_with_what_is_there(host):
    result = report(gpus=["4"])
    assert result["failed"] and "GPU 4 is not on this host" in result["msg"] and host.gpus()[3].uuid in result["msg"]


def test_a_protected_executable_alone_is_within_its_bound(host, holder):
    name = os.path.basename(os.path.realpath(sys.executable))
    verdicts = [
        report(gpus=["2"], protected=[name], protected_mib=bound)["gpus"][0]["verdict"] for bound in (1158, 1157)
    ]
    assert verdicts == ["protected_only", "in_use"]


def test_waiting_ends_soon_after_the_memory_is_back(host, holder):
    killed = []

    def end():
        killed.append(time.monotonic())
        holder.kill()

    threading.Timer(0.4, end).start()
    result = report(wait=True, gpus=["2"])
    # 0.15 s is the driver's own release; then at most one pause of a quarter second.
    assert result["free"] and 0.14 < time.monotonic() - killed[0] < 0.8
    assert result["seconds"] > 0.4


def test_waiting_for_what_never_ends_fails_at_the_deadline_with_pid_and_cure(host, holder):
    started = time.monotonic()
    result = report(wait=True, timeout=0.6)
    assert 0.4 < time.monotonic() - started < 1.5
    assert result["failed"] and "GPU 2 is not free: in_use" in result["msg"] and f"kill {holder.pid}" in result["msg"]


def test_waiting_counts_every_gpu_not_two(host):
    host.set_fault("unowned", 500, index=3)
    result = report(wait=True, timeout=0.3)
    assert result["failed"] and "GPU 3 is not free" in result["msg"]


def test_the_bound_of_a_free_gpu_is_a_parameter(host):
    host.set_fault("unowned", 500, index=3)
    assert report(wait=True, free_mib=500)["free"]
    assert not report(free_mib=499)["free"]


def test_waiting_for_a_lost_gpu_is_given_up_at_once(host):
    host.set_fault("lost", index=1)
    started = time.monotonic()
    result = report(wait=True, timeout=20)
    assert time.monotonic() - started < 2 and result["failed"] and "Cold boot" in result["msg"]
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "lost", "free", "free"]


def test_a_gpu_at_full_load_without_a_process_is_watched_before_it_is_called_a_ghost_latch(host):
    host.set_fault("ghost_latch", index=0)
    result = report(wait=True, timeout=2.7, gpus=["0"])
    assert result["failed"] and result["gpus"][0]["verdict"] == "ghost_latch"
    assert "repair: [probe]" in result["msg"]


@pytest.mark.parametrize(
    ("guest", "fault", "value", "verdict"),
    [
        (False, "unowned", 20480, "unowned_memory"),
        (True, "unowned", 20480, "unowned_memory"),
        (True, "foreign_pid", "999999 20480", "other_namespace"),
        (False, "dead_pid", "999999 20480", "dead_pid"),
        (False, "mig", "", "unknown"),
        (False, "no_permission", "", "unknown"),
        (False, "not_supported", "memory", "unknown"),
    ],
)
def test_a_fault_of_one_gpu_gets_its_verdict_and_the_others_stay_free(host, guest, fault, value, verdict):
    host.set_fault(fault, value, index=2)
    gpus = report(guest)["gpus"]
    assert [gpu["verdict"] for gpu in gpus] == ["free", "free", verdict, "free"]
    assert gpus[2]["cure"]


def test_a_host_without_a_driver_is_reported_and_fails_only_a_wait(host):
    host.set_fault("no_driver")
    result = report()
    assert result["source"] == "none" and result["gpus"] == [] and "modprobe" in result["error"]
    assert "failed" not in result and not result["free"]
    started = time.monotonic()
    waited = report(wait=True)
    assert waited["failed"] and "modprobe" in waited["msg"] and time.monotonic() - started < 5


def test_a_hanging_driver_costs_no_more_than_the_timeout(host):
    host.set_fault("hang", ["nvmlDeviceGetComputeRunningProcesses"], index=1)
    started = time.monotonic()
    result = report(timeout=0.8)
    assert time.monotonic() - started < 1.8
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "unknown", "unknown", "unknown"]


def test_a_simulated_host_says_so(host):
    assert report()["simulated"] is True


def test_every_returned_key_is_documented_and_the_other_way_round(host):
    source = (ROOT / "library" / "gpu_memory.py").read_text()
    documented = yaml.safe_load(re.search(r'RETURN = r"""(.*?)"""', source, re.DOTALL).group(1))
    result = report()
    assert set(result) - {"changed"} == set(documented)
    assert set(result["gpus"][0]) == set(documented["gpus"]["contains"])


@pytest.mark.parametrize("python", pythons())
def test_the_module_runs_under_every_python(nvml_double, tmp_path, python):
    """The report as one program, as the module carries it to a host."""
    state = GpuState(tmp_path / "state").create(gpus=2)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").symlink_to(ROOT / "simulator" / "nvidia_smi")
    program = (
        f"import json, sys; sys.path.insert(0, {str(ROOT / 'module_utils')!r})\n"
        "from gpu_host import memory_report\n"
        f"print(json.dumps(memory_report.run({params()!r})))\n"
    )
    found = subprocess.run(
        [python, "-I", "-S", "-W", "error", "-"], input=program,
        env={"LD_LIBRARY_PATH": str(nvml_double.parent), "GPU_SIMULATOR_STATE": str(state.folder),
             "PATH": f"{tmp_path / 'bin'}:{Path(python).parent}:/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stderr == ""
    result = json.loads(found.stdout)
    assert result["free"] and result["source"] == "nvidia-smi" and len(result["gpus"]) == 2
