"""The simulated NVML library and nvidia-smi, asked by the real nvidia-ml-py, gpustat and nvitop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.build import build
from simulator.gpu_state import GpuState

ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = ROOT / "simulator" / "nvidia_smi"

# Prints what NVML says of every GPU, an NVML error as its code.
SNAPSHOT = """
import json, pynvml as N

def ask(function, *arguments):
    try:
        return function(*arguments)
    except N.NVMLError as error:
        return error.value

def gpu(index):
    handle = ask(N.nvmlDeviceGetHandleByIndex, index)
    if isinstance(handle, int):
        return {"handle": handle}
    v1, v2 = ask(N.nvmlDeviceGetMemoryInfo, handle), ask(N.nvmlDeviceGetMemoryInfo, handle, N.nvmlMemory_v2)
    utilization = ask(N.nvmlDeviceGetUtilizationRates, handle)
    answer = {
        "minor": ask(N.nvmlDeviceGetMinorNumber, handle),
        "uuid": ask(N.nvmlDeviceGetUUID, handle),
        "power": ask(N.nvmlDeviceGetPowerUsage, handle),
        "mig": ask(N.nvmlDeviceGetMigMode, handle),
        "utilization": utilization if isinstance(utilization, int) else {"gpu": utilization.gpu},
    }
    for name, memory in (("v1", v1), ("v2", v2)):
        answer[name] = memory if isinstance(memory, int) else {
            part: getattr(memory, part) // 2**20 for part, _ in memory._fields_ if part != "version"}
    for kind in ("Compute", "Graphics"):
        found = ask(getattr(N, f"nvmlDeviceGet{kind}RunningProcesses"), handle)
        answer[kind.lower()] = found if isinstance(found, int) else {p.pid: p.usedGpuMemory // 2**20 for p in found}
    return answer

def snapshot():
    return [gpu(index) for index in range(N.nvmlDeviceGetCount())]
"""

HOLD = """
import sys, time
from simulator.gpu_state import GpuState
state = GpuState(sys.argv[1])
held = [state.allocate(int(index), int(mib)) for index, mib in (word.split(":") for word in sys.argv[2:])]
print("holding", flush=True)
"""


class Host:
    """A simulated host in a folder of its own, with what is needed to ask it things and to hold its memory."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.state = GpuState(folder / "state").create(gpus=4)
        self.environment = {
            **os.environ,
            "GPU_SIMULATOR_STATE": str(self.state.folder),
            "LD_LIBRARY_PATH": str(library.parent),
            "PYTHONPATH": str(ROOT),
        }
        self._owners: list[subprocess.Popen[str]] = []

    def run(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=30, check=False, **more
        )

    def ask(self, code: str, **more: Any) -> Any:
        """Run code after SNAPSHOT in a process of its own; what it prints is JSON."""
        done = self.run(sys.executable, "-c", f"{SNAPSHOT}\nN.nvmlInit()\n{code}", **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def snapshot(self, **more: Any) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.ask("print(json.dumps(snapshot()))", **more)
        return answer

    def smi(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, str(NVIDIA_SMI), *words)

    def hold(self, *allocations: str, then: str = "time.sleep(600)") -> subprocess.Popen[str]:
        """A process that holds 'index:MiB' allocations."""
        owner = subprocess.Popen(
            [sys.executable, "-c", HOLD + then, str(self.state.folder), *allocations],
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._owners.append(owner)
        assert owner.stdout and owner.stdout.readline() == "holding\n"
        return owner

    def close(self) -> None:
        for owner in self._owners:
            owner.kill()
            owner.communicate()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("lib"))


@pytest.fixture
def host(tmp_path: Path, library: Path) -> Iterator[Host]:
    made = Host(tmp_path, library)
    yield made
    made.close()


def within(seconds: float, met: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if met():
            return True
        time.sleep(0.01)
    return met()


def kill(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()


# The GPUs


def test_the_library_has_nvidias_soname_and_needs_only_libc(library: Path) -> None:
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libnvidia-ml.so.1]" in dynamic
    assert [line.split("[")[1] for line in dynamic.splitlines() if "(NEEDED)" in line] == ["libc.so.6]"]


def test_minor_numbers_stand_in_another_order_than_indices(host: Host) -> None:
    assert [gpu["minor"] for gpu in host.snapshot()] == [3, 2, 1, 0]


def test_minor_numbers_are_as_chosen(host: Host) -> None:
    host.state.create(gpus=3, minors=[5, 0, 2])
    assert [gpu["minor"] for gpu in host.snapshot()] == [5, 0, 2]


def test_a_gpu_is_found_by_index_uuid_and_pci_address_alike(host: Host) -> None:
    found = host.ask("""
by_index = N.nvmlDeviceGetHandleByIndex(2)
uuid, bus = N.nvmlDeviceGetUUID(by_index), N.nvmlDeviceGetPciInfo(by_index).busId
handles = [by_index, N.nvmlDeviceGetHandleByUUID(uuid), N.nvmlDeviceGetHandleByPciBusId(bus),
           N.nvmlDeviceGetHandleByPciBusId(bus[4:].lower())]
print(json.dumps([uuid, bus, [N.nvmlDeviceGetIndex(handle) for handle in handles],
                  ask(N.nvmlDeviceGetHandleByUUID, "GPU-none"), ask(N.nvmlDeviceGetHandleByIndex, 4)]))""")
    gpu = host.state.gpus()[2]
    assert found == [gpu.uuid, gpu.pci_bus_id, [2, 2, 2, 2], 6, 2]


def test_versions_and_kind_of_gpu_are_those_of_the_state_and_say_simulated(host: Host) -> None:
    assert host.ask("""
handle = N.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([N.nvmlSystemGetDriverVersion(), N.nvmlSystemGetNVMLVersion(), N.nvmlDeviceGetName(handle),
                  N.nvmlDeviceGetCudaComputeCapability(handle), N.nvmlSystemGetCudaDriverVersion()]))""") == [
        "580.95.05-simulated",
        "13.580.95.05",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        [12, 0],
        13000,
    ]


def test_reserved_memory_counts_as_used_in_version_1_only(host: Host) -> None:
    gpu = host.snapshot()[0]
    assert gpu["v1"] == {"total": 97887, "used": 638, "free": 97249}
    assert gpu["v2"] == {"total": 97887, "reserved": 638, "used": 0, "free": 97249}


# Memory and its owners


def test_memory_belongs_to_the_process_that_holds_it_on_that_gpu_alone(host: Host) -> None:
    owner = host.hold("1:20480", "1:1000", "3:512")
    seen = host.snapshot()
    assert [gpu["v2"]["used"] for gpu in seen] == [0, 21480, 0, 512]
    assert [gpu["compute"] for gpu in seen] == [{}, {str(owner.pid): 21480}, {}, {str(owner.pid): 512}]


def test_graphics_memory_is_listed_under_graphics(host: Host) -> None:
    with host.state.allocate(0, 300, kind="graphics"):
        gpu = host.snapshot()[0]
    assert (gpu["compute"], gpu["graphics"]) == ({}, {str(os.getpid()): 300})


def test_an_allocation_grows_in_place(host: Host) -> None:
    with host.state.allocate(0, 100) as held:
        held.resize(90000)
        assert host.snapshot()[0]["compute"] == {str(os.getpid()): 90000}
        assert host.state.free_mib(0) == 97887 - 638 - 90000


def test_a_process_query_without_a_buffer_gives_insufficient_size_and_the_count(host: Host) -> None:
    host.hold("0:10")
    host.hold("0:20")
    assert host.ask("""
import ctypes
library, handle = N.nvmlLib, N.nvmlDeviceGetHandleByIndex(0)
def query(room, buffer):
    count = ctypes.c_uint(room)
    return library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), buffer), count.value
buffer = (N.c_nvmlProcessInfo_v3_t * 2)()
print(json.dumps([query(0, None), query(9, None), query(1, buffer), query(2, buffer)]))""") == [
        [7, 2],
        [7, 2],
        [7, 2],
        [0, 2],
    ]


def test_memory_of_a_killed_process_returns_after_the_release_delay_and_lists_no_process_meanwhile(host: Host) -> None:
    host.state.set_fault("release_ms", 400, index=0)
    owner = host.hold("0:20480")
    kill(owner)
    timeline = host.ask("""
import time
seen, start = [], time.monotonic()
while time.monotonic() - start < 1:
    now = gpu(0)
    seen.append([time.monotonic() - start, now["v2"]["used"], now["compute"]])
    time.sleep(0.01)
print(json.dumps(seen))""")
    assert all(not processes for _, _, processes in timeline)
    held = [moment for moment, used, _ in timeline if used == 20480]
    free = [moment for moment, used, _ in timeline if used == 0]
    assert len(held) + len(free) == len(timeline)
    assert 0.3 < max(held) < 0.5 < 0.9 < max(free)
    assert max(held) < min(free)
    assert list((host.state.folder / "memory" / "0").iterdir()) == []


def test_the_delay_is_150_ms_unless_told_otherwise(host: Host) -> None:
    kill(host.hold("0:1024"))
    assert host.state.used_mib(0) == 1024
    start = time.monotonic()
    assert within(2, lambda: host.state.used_mib(0) == 0)
    assert 0.1 < time.monotonic() - start < 0.35


def test_a_zombie_holds_nothing_once_the_delay_is_over(host: Host) -> None:
    owner = host.hold("2:4096")
    owner.kill()
    stat = Path(f"/proc/{owner.pid}/stat")
    assert within(2, lambda: ") Z " in stat.read_text())
    assert host.snapshot()[2]["compute"] == {}
    assert within(2, lambda: host.snapshot()[2]["v2"]["used"] == 0)
    assert ") Z " in stat.read_text()


def test_a_stopped_process_keeps_its_memory(host: Host) -> None:
    owner = host.hold("2:4096")
    owner.send_signal(signal.SIGSTOP)
    assert within(2, lambda: ") T " in Path(f"/proc/{owner.pid}/stat").read_text())
    assert host.snapshot()[2]["compute"] == {str(owner.pid): 4096}


def test_a_closed_allocation_returns_with_the_same_delay_while_its_owner_lives(host: Host) -> None:
    host.state.set_fault("release_ms", 30000, index=0)
    kept, closed = host.state.allocate(0, 1), host.state.allocate(0, 1000)
    closed.close()
    gpu = host.snapshot()[0]
    assert (gpu["v2"]["used"], gpu["compute"]) == (1001, {str(os.getpid()): 1})
    host.state.clear_fault("release_ms", index=0)
    assert within(2, lambda: host.snapshot()[0]["v2"]["used"] == 1)
    kept.close()


def test_a_forked_child_that_ends_leaves_its_parents_memory(host: Host) -> None:
    owner = host.hold("0:100", then="import os\nif os.fork() == 0:\n    held[0].close()\n    sys.exit(0)\nos.wait()\n"
                      "print('forked', flush=True)\ntime.sleep(600)")  # fmt: skip
    assert owner.stdout and owner.stdout.readline() == "forked\n"
    assert host.snapshot()[0]["compute"] == {str(owner.pid): 100}
    assert not list((host.state.folder / "memory" / "0").glob("*.gone"))


def test_an_owner_may_itself_ask_nvml_and_keeps_its_memory(host: Host) -> None:
    """The kernel drops a process's record locks on a file as soon as it closes any descriptor of that file."""
    asks = (
        f"{SNAPSHOT}\nN.nvmlInit()\nprint(json.dumps([snapshot()[1]['compute'], snapshot()[1]['compute'], "
        "state.owners(1), state.used_mib(1)]), flush=True)\ntime.sleep(600)"
    )
    owner = host.hold("1:2048", then=asks)
    mine = {str(owner.pid): 2048}
    assert owner.stdout and json.loads(owner.stdout.readline()) == [mine, mine, mine, 2048]
    assert host.snapshot()[1]["compute"] == mine


def test_memory_can_return_never(host: Host) -> None:
    host.state.set_fault("never_release", index=0)
    host.state.set_fault("release_ms", 1, index=0)
    kill(host.hold("0:700"))
    assert host.snapshot()[0]["v2"]["used"] == 700
    time.sleep(0.1)
    gpu = host.snapshot()[0]
    assert (gpu["v2"]["used"], gpu["compute"], host.state.used_mib(0)) == (700, {}, 700)
    host.state.clear_fault("never_release", index=0)
    assert within(2, lambda: host.snapshot()[0]["v2"]["used"] == 0)


def test_a_reader_without_write_access_sees_owned_memory_and_takes_ownerless_memory_as_returned(
    host: Host,
) -> None:
    living, dead = host.hold("0:100"), host.hold("0:1000")
    kill(dead)
    folder = host.state.folder / "memory" / "0"
    folder.chmod(0o555)
    # Root may write everywhere, so it becomes nobody, who can't pass the folders above: hence the relative path.
    become_nobody = "import os\nN._LoadNvmlLibrary()\nif os.geteuid() == 0: os.setuid(65534)\nN.nvmlInit()\n"
    host.environment["GPU_SIMULATOR_STATE"] = "."
    done = host.run(
        sys.executable,
        "-c",
        f"{SNAPSHOT}{become_nobody}print(json.dumps([gpu(0), os.access('memory/0', os.W_OK)]))",
        cwd=host.state.folder,
    )
    folder.chmod(0o1777)
    assert done.returncode == 0, done.stderr
    gpu, may_write = json.loads(done.stdout)
    assert may_write is False
    assert (gpu["v2"]["used"], gpu["compute"]) == (100, {str(living.pid): 100})


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_an_owner_in_a_pid_namespace_out_of_sight_has_memory_but_no_process(host: Host) -> None:
    host.hold("0:5000")
    inside = host.run(
        "unshare", "--pid", "--fork", sys.executable, "-c",
        f"{SNAPSHOT}\nN.nvmlInit()\nprint(json.dumps(gpu(0)))",
    )  # fmt: skip
    assert inside.returncode == 0, inside.stderr
    gpu = json.loads(inside.stdout)
    assert (gpu["v2"]["used"], gpu["compute"]) == (5000, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_an_owner_inside_a_pid_namespace_is_listed_outside_by_its_pid_there(host: Host) -> None:
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", HOLD + "time.sleep(600)",
         str(host.state.folder), "0:64"],
        env=host.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert outer.stdout and outer.stdout.readline() == "holding\n"
        child = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert host.snapshot()[0]["compute"] == {child[0]: 64}
    finally:
        outer.kill()
        outer.communicate()


def test_many_readers_at_once_agree_and_leave_nothing_behind(host: Host) -> None:
    owners = [host.hold("0:1000", "0:1000") for _ in range(3)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", f"{SNAPSHOT}\nimport time\nN.nvmlInit()\nseen, end = [], time.monotonic() + 1\n"
             "while time.monotonic() < end:\n    seen.append(gpu(0)['v2']['used'])\nprint(json.dumps(seen))"],
            env=host.environment, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    time.sleep(0.5)
    for owner in owners:
        kill(owner)
    for reader in readers:
        seen = json.loads(reader.communicate(timeout=30)[0])
        assert reader.returncode == 0
        assert seen == sorted(seen, reverse=True)
        assert set(seen) <= set(range(0, 6001, 1000))
        assert (seen[0], len(seen) > 50) == (6000, True)
    assert within(2, lambda: host.snapshot()[0]["v2"]["used"] == 0)
    assert list((host.state.folder / "memory" / "0").iterdir()) == []


# Faults


def test_a_lost_gpu_gives_no_handle_and_leaves_the_others(host: Host) -> None:
    host.state.set_fault("lost", index=1)
    seen = host.snapshot()
    assert seen[1] == {"handle": 15}
    assert [gpu["v2"]["used"] for gpu in (seen[0], seen[2], seen[3])] == [0, 0, 0]


def test_a_gpu_lost_late_gives_its_handle_and_nothing_else(host: Host) -> None:
    host.state.set_fault("lost", "late", index=1)
    assert set(host.snapshot()[1].values()) == {15}


def test_a_gpu_that_is_forbidden_gives_no_handle(host: Host) -> None:
    host.state.set_fault("no_permission", index=0)
    assert host.snapshot()[0] == {"handle": 4}


@pytest.mark.parametrize(("fault", "code"), [("no_permission", 4), ("not_supported", 3)])
def test_single_fields_can_be_forbidden_or_unsupported(host: Host, fault: str, code: int) -> None:
    host.state.set_fault(fault, ["power", "processes", "nvmlDeviceGetMinorNumber"], index=0)
    gpu = host.snapshot()[0]
    assert [gpu[field] for field in ("power", "compute", "graphics", "minor")] == [code] * 4
    assert (gpu["v2"]["used"], gpu["utilization"]) == (0, {"gpu": 0})


def test_a_field_can_give_any_nvml_code(host: Host) -> None:
    host.state.set_fault("error", ["memory 999"], index=0)
    gpu = host.snapshot()[0]
    assert (gpu["v1"], gpu["v2"], gpu["compute"]) == (999, 999, {})


def test_mig_mode_reads_on_and_utilization_is_unsupported(host: Host) -> None:
    host.state.set_fault("mig", index=3)
    seen = host.snapshot()
    assert (seen[3]["mig"], seen[3]["utilization"]) == ([1, 1], 3)
    assert (seen[2]["mig"], seen[2]["utilization"]) == ([0, 0], {"gpu": 0})


def test_a_ghost_latch_is_full_utilization_with_no_memory_and_no_process(host: Host) -> None:
    host.state.set_fault("ghost_latch", index=0)
    gpu = host.snapshot()[0]
    assert (gpu["utilization"], gpu["v2"]["used"], gpu["compute"]) == ({"gpu": 100}, 0, {})
    assert gpu["power"] > 100_000


def test_unowned_memory_has_no_process(host: Host) -> None:
    host.state.set_fault("unowned", 3000, index=0)
    gpu = host.snapshot()[0]
    assert (gpu["v2"]["used"], gpu["v1"]["used"], gpu["compute"], host.state.used_mib(0)) == (3000, 3638, {}, 3000)


@pytest.mark.parametrize("fault", ["foreign_pid", "dead_pid"])
def test_pids_that_are_not_here_are_listed_with_their_memory(host: Host, fault: str) -> None:
    host.state.set_fault(fault, ["4194301 700", "4194302 20"], index=0)
    gpu = host.snapshot()[0]
    assert (gpu["v2"]["used"], gpu["compute"]) == (720, {"4194301": 700, "4194302": 20})
    assert host.state.used_mib(0) == 720


@pytest.mark.parametrize(("fault", "code"), [("no_driver", 9), ("version_mismatch", 18)])
def test_driver_trouble_shows_when_nvml_is_initialised(host: Host, fault: str, code: int) -> None:
    host.state.set_fault(fault)
    done = host.run(sys.executable, "-c", f"{SNAPSHOT}\nprint(ask(N.nvmlInit))")
    assert done.stdout == f"{code}\n"
    host.state.clear_fault()
    assert len(host.snapshot()) == 4


def test_a_state_folder_that_is_not_there_is_a_host_without_a_driver(host: Host) -> None:
    shutil.rmtree(host.state.folder)
    assert host.run(sys.executable, "-c", f"{SNAPSHOT}\nprint(ask(N.nvmlInit))").stdout == "9\n"


def test_nothing_is_answered_before_initialisation_and_after_shutdown(host: Host) -> None:
    done = host.run(
        sys.executable, "-c",
        f"{SNAPSHOT}\nN._LoadNvmlLibrary()\nfirst = ask(N.nvmlDeviceGetCount)\nN.nvmlInit()\nN.nvmlInit()\n"
        "N.nvmlShutdown()\nstill = ask(N.nvmlDeviceGetCount)\nN.nvmlShutdown()\n"
        "print(first, still, ask(N.nvmlDeviceGetCount))",
    )  # fmt: skip
    assert done.stdout == "1 4 1\n"


@pytest.mark.parametrize(
    ("function", "index"),
    [("nvmlInit", None), ("nvmlDeviceGetComputeRunningProcesses", None), ("nvmlDeviceGetMemoryInfo", 2)],
)
def test_a_named_function_hangs_until_the_fault_is_cleared(host: Host, function: str, index: int | None) -> None:
    host.state.set_fault("hang", function, index=index)
    reader = subprocess.Popen(
        [sys.executable, "-c", f"{SNAPSHOT}\nN.nvmlInit()\nprint(len(snapshot()))"],
        env=host.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(0.8)
    host.state.clear_fault("hang", index=index)
    assert reader.communicate(timeout=10)[0] == "4\n"


def test_an_unknown_fault_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match="no such fault 'unkillable'"):
        host.state.set_fault("unkillable", index=0)


# Programs of others, unchanged


def test_gpustat_runs_unchanged(host: Host) -> None:
    owner = host.hold("1:2048")
    done = host.run("gpustat", "--json")
    assert done.returncode == 0, done.stderr
    gpus = json.loads(done.stdout)["gpus"]
    assert [gpu["memory.used"] for gpu in gpus] == [0, 2048, 0, 0]
    assert [(p["pid"], p["gpu_memory_usage"]) for p in gpus[1]["processes"]] == [(owner.pid, 2048)]


def test_nvitops_interface_runs_unchanged(host: Host) -> None:
    owner = host.hold("1:2048")
    assert host.ask("""
from nvitop import Device
device = Device.all()[1]
print(json.dumps([device.memory_used() // 2**20, device.uuid(), device.power_usage(), device.gpu_utilization(),
                  [(pid, process.gpu_memory() // 2**20) for pid, process in device.processes().items()]]))""") == [
        2048,
        host.state.gpus()[1].uuid,
        30000,
        0,
        [[owner.pid, 2048]],
    ]


def test_nvitop_runs_unchanged(host: Host) -> None:
    owner = host.hold("1:2048")
    done = host.run("nvitop", "-1", "--ascii")
    assert done.returncode == 0, done.stderr
    assert "580.95.05-simulated" in done.stdout
    assert "2048MiB / 95.59GiB" in done.stdout
    assert [line for line in done.stdout.splitlines() if f" {owner.pid} C " in line]
    assert "FunctionNotFound" not in done.stdout + done.stderr


# nvidia-smi


def test_nvidia_smi_answers_queries_as_csv(host: Host) -> None:
    owner = host.hold("1:2048")
    host.state.set_fault("not_supported", "power", index=0)
    fields = "--query-gpu=index,memory.used,memory.total,power.draw,utilization.gpu"
    assert host.smi(fields, "--format=csv", "-i", "0,1").stdout == (
        "index, memory.used [MiB], memory.total [MiB], power.draw [W], utilization.gpu [%]\n"
        "0, 0 MiB, 97887 MiB, [N/A], 0 %\n"
        "1, 2048 MiB, 97887 MiB, 30.00 W, 0 %\n"
    )
    assert host.smi(fields, "--format=csv,noheader,nounits", "-i", "1").stdout == "1, 2048, 97887, 30.00, 0\n"
    assert host.smi("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv,noheader").stdout == (
        f"{owner.pid}, 2048 MiB, {host.state.gpus()[1].uuid}\n"
    )


def test_nvidia_smi_gives_the_same_as_xml_under_the_real_names(host: Host) -> None:
    owner = host.hold("1:2048")
    host.state.set_fault("mig", index=3)
    host.state.set_fault("not_supported", "processes", index=2)
    log = ElementTree.fromstring(host.smi("-q", "-x").stdout)
    gpus = log.findall("gpu")
    assert log.findtext("driver_version") == "580.95.05-simulated"
    assert [gpu.get("id") for gpu in gpus] == [gpu.pci_bus_id for gpu in host.state.gpus()]
    assert [gpu.findtext("minor_number") for gpu in gpus] == ["3", "2", "1", "0"]
    assert {one.tag: one.text for one in gpus[1].find("fb_memory_usage") or ()} == {
        "total": "97887 MiB",
        "reserved": "638 MiB",
        "used": "2048 MiB",
        "free": "95201 MiB",
    }
    process = gpus[1].find("processes/process_info")
    assert process is not None
    assert [process.findtext(name) for name in ("pid", "type", "used_memory")] == [str(owner.pid), "C", "2048 MiB"]
    assert process.findtext("process_name") == sys.executable
    assert gpus[1].findtext("gpu_power_readings/instant_power_draw") == "30.00 W"
    assert (gpus[1].findtext("mig_mode/current_mig"), gpus[1].findtext("utilization/gpu_util")) == ("Disabled", "0 %")
    assert (gpus[3].findtext("mig_mode/current_mig"), gpus[3].findtext("utilization/gpu_util")) == ("Enabled", "N/A")
    assert (gpus[0].find("processes/process_info"), gpus[2].findtext("processes")) == (None, "N/A")


def test_nvidia_smi_lists_gpus_and_prints_its_table(host: Host) -> None:
    owner = host.hold("1:2048")
    gpus = host.state.gpus()
    assert host.smi("-L").stdout.splitlines() == [f"GPU {g.index}: {g.name} (UUID: {g.uuid})" for g in gpus]
    lines = host.smi().stdout.splitlines()[1:]
    assert {len(line) for line in lines if line} == {91}
    assert sum("MiB /  97887MiB" in line for line in lines) == 4
    assert [line.split()[1:6] for line in lines if f" {owner.pid} " in line] == [
        ["1", "N/A", "N/A", str(owner.pid), "C"]
    ]


def test_nvidia_smi_names_a_lost_gpu_shows_the_others_and_exits_15(host: Host) -> None:
    host.state.set_fault("lost", index=1)
    done = host.smi("--query-gpu=index", "--format=csv,noheader")
    assert done.returncode == 15
    assert done.stdout.splitlines() == [
        "0",
        "2",
        "3",
        f"Unable to determine the device handle for GPU1: {host.state.gpus()[1].pci_bus_id[4:]}: GPU is lost.  "
        "Reboot the system to recover this GPU",
    ]
    first, rest = host.smi("-q", "-x").stdout.split("\n", 1)
    assert first.startswith("Unable to determine the device handle for GPU1: ")
    assert len(ElementTree.fromstring(rest).findall("gpu")) == 3


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("no_driver", 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        ("version_mismatch", 18, "Failed to initialize NVML: Driver/library version mismatch"),
    ],
)
def test_nvidia_smi_fails_without_a_driver_as_the_real_one(host: Host, fault: str, code: int, said: str) -> None:
    host.state.set_fault(fault)
    done = host.smi()
    assert (done.returncode, done.stdout.startswith(said)) == (code, True)


def test_nvidia_smi_says_when_the_gpu_or_the_field_or_the_library_is_not_there(host: Host, tmp_path: Path) -> None:
    assert [host.smi("-i", "9").returncode, host.smi("-i", "9").stdout] == [6, "No devices were found\n"]
    done = host.smi("--query-gpu=colour", "--format=csv")
    assert (done.returncode, done.stdout) == (2, 'Field "colour" is not a valid field to query.\n')
    host.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    assert host.smi().returncode == 12
