"""The probe of usable GPUs, over a stand-in for libcuda (fake_libcuda.c) that keeps device memory on the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from gpu_host import cuda_probe
from gpu_host.deadline import Deadline
from gpu_host.readings import Gpu

SOURCE = Path(__file__).parent / "fake_libcuda.c"
BUSES = ("00000000:01:00.0", "00000000:21:00.0")
SECOND = "0000:21:00.0"


def gpu(index):
    return Gpu(index, f"GPU-{index}", index, "test", BUSES[index], "12.0", 256, 0, 256, 0, 0, 1.0, False, (), {})


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, "-o", str(target), str(SOURCE)], check=True)
    return str(target)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_GPUS", "0000:01:00.0,0000:21:00.0")
    monkeypatch.setenv("FAKE_CUDA_FREE_MIB", "64")
    monkeypatch.delenv("FAKE_CUDA_FAULT", raising=False)


def probe(library, seconds=20.0, fraction=0.9):
    return cuda_probe.probe([gpu(0), gpu(1)], Deadline(seconds), fraction, library)


def test_most_of_the_memory_of_every_gpu_is_written_and_read_back(library):
    first, second = probe(library)
    for one in (first, second):
        assert one.ok and one.error == "" and one.method == "kernel" and one.pid is None
        assert one.mib_checked == 57  # 0.9 of 64 MiB
        assert one.gb_per_s > 0
    assert (first.index, second.index) == (0, 1)


def test_memory_in_small_pieces_is_used_all_the_same(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_PIECE_MIB", "40")
    assert probe(library)[0].mib_checked > 40


def test_no_memory_at_all_is_an_error_that_says_so(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_PIECE_MIB", "1")
    one = probe(library)[0]
    assert not one.ok and "no memory could be allocated" in one.error


def test_one_wrong_bit_on_one_gpu_is_found_and_the_other_gpu_passes(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/fill=flip")
    first, second = probe(library)
    assert first.ok
    assert not second.ok and "1 of " in second.error and "did not read back as written" in second.error


def test_without_a_ptx_compiler_memory_is_written_and_sampled(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuModuleLoadData=221")
    first, second = probe(library)
    assert first.method == "kernel"
    assert second.ok and second.method == "sampled" and second.mib_checked == 57


def test_the_sampled_way_finds_a_wrong_last_word(library, monkeypatch):
    # The fault variable holds one fault: an unloadable kernel and a flipped bit need the driver to lack the kernel.
    monkeypatch.setattr(cuda_probe, "_JIT_MISSING", (218,))
    monkeypatch.setattr(cuda_probe, "PTX", "no ptx of ours")
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/fill=flip")
    first, second = probe(library)
    assert first.ok and first.method == "sampled"
    assert not second.ok and "did not read back as written" in second.error


def test_a_failing_call_is_named_with_cudas_own_word(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuDevicePrimaryCtxRetain=46")
    second = probe(library)[1]
    assert second.error == "cuDevicePrimaryCtxRetain gave CUDA_ERROR_DEVICE_UNAVAILABLE (46)."
    assert second.mib_checked == 0


def test_a_gpu_that_hangs_is_named_and_costs_no_more_than_the_deadline(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuCtxSynchronize=hang")
    started = time.monotonic()
    first, second = probe(library, seconds=1.0)
    assert time.monotonic() - started < 2.0
    assert first.ok
    assert not second.ok and "GPU 1 hung in cuCtxSynchronize" in second.error


def test_a_child_that_dies_in_the_driver_is_told_from_one_that_hangs(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuLaunchKernel=die")
    assert "died in cuLaunchKernel" in probe(library)[1].error


def test_the_callers_choice_of_visible_gpus_hides_none(library, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert all(one.ok for one in probe(library))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_touching_opens_and_closes_a_context_without_taking_memory(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuMemAlloc_v2=2")
    touched = cuda_probe.touch([gpu(0), gpu(1)], Deadline(20.0), library)
    assert [one.ok for one in touched] == [True, True]
    assert [one.mib_checked for one in touched] == [0, 0]


def test_a_host_without_the_cuda_library_gets_a_sentence(tmp_path):
    one = cuda_probe.probe([gpu(0)], Deadline(5.0), 0.9, str(tmp_path / "libcuda.so.1"))[0]
    assert not one.ok and "install the NVIDIA driver's CUDA library" in one.error


def test_no_child_is_left_behind(library):
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text().split()
    probe(library)
    assert set(children.read_text().split()) <= set(before)


def test_the_first_error_is_told_not_those_that_follow_it(library, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", f"{SECOND}/cuLaunchKernel=719")
    assert probe(library)[1].error == "cuLaunchKernel gave CUDA_ERROR_LAUNCH_FAILED (719)."
