"""Reading NVML through nvidia-ml-py in a child, over the simulated library and its faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_host import nvml
from gpu_host.deadline import Deadline
from gpu_host.nvml import Reader
from gpu_host.readings import GpuProcess

from simulator.gpu_state import GpuState
from tests.unit.real_pythons import pythons

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reader(host):
    with Reader("nvml") as one:
        yield one


def test_every_gpu_is_read_with_its_minor_number_and_memory_without_the_reserve(host, reader):
    with host.allocate(2, 1158):
        readings = reader.read(Deadline(10))
    assert (readings.source, readings.error) == ("nvml", None)
    assert readings.driver_version == "580.95.05-simulated" and readings.nvml_version
    assert [gpu.index for gpu in readings.gpus] == [0, 1, 2, 3]
    assert [gpu.minor for gpu in readings.gpus] == [3, 2, 0, 1]
    assert [gpu.used_mib for gpu in readings.gpus] == [0, 0, 1158, 0]
    gpu = readings.gpus[2]
    assert (gpu.total_mib, gpu.reserved_mib, gpu.compute_capability, gpu.mig) == (97887, 638, "12.0", False)
    assert gpu.free_mib == 97887 - 638 - 1158
    assert gpu.uuid.startswith("GPU-") and gpu.pci_bus_id and gpu.power_watts > 0
    assert gpu.processes == (GpuProcess(os.getpid(), 1158, "compute"),)
    assert gpu.errors == {}


def test_a_display_process_is_listed_as_graphics(host, reader):
    with host.allocate(0, 20, "graphics"):
        assert reader.read(Deadline(10)).gpus[0].processes == (GpuProcess(os.getpid(), 20, "graphics"),)


def test_one_child_answers_all_reads_and_sees_what_changes(host, reader):
    assert reader.read(Deadline(10)).gpus[1].used_mib == 0
    pid = reader.child_pid
    with host.allocate(1, 512):
        assert reader.read(Deadline(10)).gpus[1].used_mib == 512
    assert reader.child_pid == pid is not None


@pytest.mark.parametrize("late", ["", "late"])
def test_a_lost_gpu_leaves_the_others_whole(host, reader, late):
    host.set_fault("lost", late, index=1)
    gpus = reader.read(Deadline(10)).gpus
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert "lost" in gpus[1].errors["gpu"].lower()
    assert gpus[1].used_mib is None and gpus[1].processes is None
    assert [gpu.errors for gpu in gpus if gpu.index != 1] == [{}, {}, {}]


def test_a_gpu_that_gets_lost_between_two_reads_keeps_its_name(host, reader):
    uuid = reader.read(Deadline(10)).gpus[1].uuid
    host.set_fault("lost", index=1)
    gpu = reader.read(Deadline(10)).gpus[1]
    assert gpu.uuid == uuid and gpu.minor == 2 and "gpu" in gpu.errors


def test_unsupported_fields_are_none_and_say_so(host, reader):
    host.set_fault("not_supported", ["power", "utilization", "memory"], index=0)
    gpu = reader.read(Deadline(10)).gpus[0]
    assert gpu.power_watts is gpu.utilization_percent is gpu.used_mib is gpu.total_mib is None
    assert set(gpu.errors) == {"power_watts", "utilization_percent", "memory"}
    assert gpu.processes == ()


def test_a_forbidden_process_list_is_not_an_empty_one(host, reader):
    host.set_fault("no_permission", ["processes"], index=0)
    gpu = reader.read(Deadline(10)).gpus[0]
    assert gpu.processes is None and "Permission" in gpu.errors["processes"]
    assert gpu.used_mib == 0


def test_a_forbidden_gpu_is_named_and_not_left_out(host, reader):
    host.set_fault("no_permission", index=3)
    gpus = reader.read(Deadline(10)).gpus
    assert len(gpus) == 4 and "Permission" in gpus[3].errors["gpu"]


def test_mig_is_seen(host, reader):
    host.set_fault("mig", index=2)
    assert [gpu.mig for gpu in reader.read(Deadline(10)).gpus] == [False, False, True, False]


def test_a_binding_without_version_2_of_the_memory_reading_counts_the_reserve_and_says_so(host, reader, monkeypatch):
    import pynvml

    monkeypatch.delattr(pynvml, "nvmlMemory_v2")
    gpu = reader.read(Deadline(10)).gpus[0]
    assert gpu.used_mib == 638 and gpu.reserved_mib is None
    assert "version 2" in gpu.errors["reserved_mib"]


@pytest.mark.parametrize(
    ("fault", "words"), [("no_driver", "modprobe nvidia"), ("version_mismatch", "differ in version")]
)
def test_a_driver_in_trouble_is_told_in_plain_words_and_noticed_when_it_is_back(host, reader, fault, words):
    host.set_fault(fault)
    readings = reader.read(Deadline(10))
    assert readings.source == "none" and readings.gpus == () and words in readings.error
    host.clear_fault(fault)
    assert len(reader.read(Deadline(10)).gpus) == 4


def test_a_hang_at_the_start_is_named_within_the_deadline(host, reader):
    host.set_fault("hang", ["nvmlInit"])
    started = time.monotonic()
    readings = reader.read(Deadline(0.8))
    assert time.monotonic() - started < 1.6
    assert readings.gpus == () and "hangs in nvmlInit" in readings.error


def test_a_hang_on_one_gpu_keeps_what_was_read_before_and_names_the_call(host, reader):
    host.set_fault("hang", ["nvmlDeviceGetMemoryInfo"], index=2)
    readings = reader.read(Deadline(1.0))
    assert readings.error is None and [gpu.used_mib for gpu in readings.gpus] == [0, 0, None, None]
    assert [bool(gpu.errors) for gpu in readings.gpus] == [False, False, True, True]
    assert "nvmlDeviceGetMemoryInfo_v2 of GPU 2" in readings.gpus[2].errors["gpu"]
    assert readings.gpus[3].uuid
    host.clear_fault("hang", index=2)
    assert [gpu.errors for gpu in reader.read(Deadline(10)).gpus] == [{}, {}, {}, {}]


def test_a_child_that_dies_is_told_and_replaced(host, reader):
    reader.read(Deadline(10))
    os.kill(reader.child_pid, signal.SIGKILL)
    assert "died" in reader.read(Deadline(10)).error
    assert len(reader.read(Deadline(10)).gpus) == 4


def test_an_abandoned_child_holds_none_of_our_files(host, reader):
    """A lock or an output pipe that a hung child inherits would hang others with it."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    reader.read(Deadline(10))
    held = [os.readlink(f"/proc/{reader.child_pid}/fd/{name}") for name in os.listdir(f"/proc/{reader.child_pid}/fd")]
    os.close(write_end)
    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b""  # end of file: nobody else has the other end
    os.close(read_end)
    assert sum(link.startswith("pipe:") for link in held) == 2
    assert not [link for link in held if not link.startswith("pipe:") and link != "/dev/null"]


def test_no_child_is_left_after_close(host):
    reader = Reader("nvml")
    reader.read(Deadline(10))
    pid = reader.child_pid
    reader.close()
    reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_start_ahead_of_time_is_used_by_the_first_read(host, reader):
    reader.start()
    pid = reader.child_pid
    assert pid and len(reader.read(Deadline(10)).gpus) == 4 and reader.child_pid == pid


SCRIPT = """
import json, sys
sys.path.insert(0, {utils!r})
from gpu_host.deadline import Deadline
from gpu_host import readings
from gpu_host.nvml import Reader
found = readings.read(Deadline(20))
print(json.dumps([found.source, found.error, [gpu.used_mib for gpu in found.gpus]]))
assert readings.from_json(json.loads(json.dumps(readings.to_json(found)))) == found
"""


@pytest.mark.parametrize("python", pythons())
def test_a_script_on_standard_input_of_any_python_reads_the_gpus(nvml_double, tmp_path, python):
    import pynvml

    binding = tmp_path / "binding"
    binding.mkdir()
    (binding / "pynvml.py").write_bytes(Path(pynvml.__file__).read_bytes())
    state = GpuState(tmp_path / "state").create(gpus=2)
    state.set_fault("unowned", 77, index=1)
    found = subprocess.run(
        [python, "-"],
        input=SCRIPT.format(utils=str(ROOT / "module_utils")),
        env={"LD_LIBRARY_PATH": str(nvml_double.parent), "GPU_SIMULATOR_STATE": str(state.folder),
             "PYTHONPATH": str(binding), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stderr == ""
    assert json.loads(found.stdout) == ["nvml", None, [0, 77]]


def test_without_nvidia_ml_py_nvidia_smi_answers_the_same(nvml_double, tmp_path):
    """An isolated interpreter has no nvidia-ml-py; the double of nvidia-smi stands on the PATH."""
    state = GpuState(tmp_path / "state").create(gpus=2)
    state.set_fault("unowned", 77, index=1)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").symlink_to(ROOT / "simulator" / "nvidia_smi")
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input=SCRIPT.format(utils=str(ROOT / "module_utils")),
        env={"LD_LIBRARY_PATH": str(nvml_double.parent), "GPU_SIMULATOR_STATE": str(state.folder),
             "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stderr == ""
    assert json.loads(found.stdout) == ["nvidia-smi", None, [0, 77]]


def test_both_sources_give_the_same_readings(host, nvml_double, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").symlink_to(ROOT / "simulator" / "nvidia_smi")
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_double.parent))
    host.set_fault("unowned", 300, index=0)
    host.set_fault("mig", index=1)
    host.set_fault("not_supported", ["power"], index=3)
    found = []
    with host.allocate(2, 1158):
        for source in ("nvml", "nvidia-smi"):
            with Reader(source) as one:
                found.append(one.read(Deadline(20)).gpus)
    for through_nvml, through_smi in zip(*found, strict=True):
        assert through_nvml == through_smi


def test_a_host_without_driver_and_tool_says_what_to_install(tmp_path):
    program = SCRIPT.format(utils=str(ROOT / "module_utils"))
    binding = Path(nvml.__file__).parent  # no pynvml there
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=program, env={"PATH": str(tmp_path), "PYTHONPATH": str(binding)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    source, error, gpus = json.loads(found.stdout)
    assert (source, gpus) == ("none", []) and "install the NVIDIA driver" in error


def test_a_hung_child_ends_with_its_parent(nvml_double, tmp_path):
    """Also when the parent is killed and can clean up nothing."""
    state = GpuState(tmp_path / "state").create(gpus=1)
    state.set_fault("hang", ["nvmlDeviceGetCount"])
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'module_utils')!r})\n"
        "from gpu_host.nvml import Reader\nreader = Reader('nvml'); reader.start(); reader._child.ask('read')\n"
        "print(reader.child_pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(nvml_double.parent), "GPU_SIMULATOR_STATE": str(state.folder)},
    )  # fmt: skip
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    assert Path(f"/proc/{child}/stat").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 5
    while time.monotonic() < until and _alive(child):
        time.sleep(0.01)
    assert not _alive(child)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
