"""Choosing GPUs, PCI ids, and deadlines."""

from __future__ import annotations

import json

import pytest
from gpu_host.deadline import Deadline
from gpu_host.readings import (
    Gpu,
    GpuProcess,
    Readings,
    UnknownGpu,
    driver_trouble,
    from_json,
    normal_pci,
    select,
    to_json,
    whole_gpu,
)


def gpu(index, pci, uuid=None):
    processes = (GpuProcess(7, None, "compute"),)
    return Gpu(
        index, uuid or f"GPU-{index}", 9 - index, "x", pci, "12.0", 1, 0, 1, 0, 0, 1.5, False, processes, {"a": "b"}
    )


HOST = Readings("nvml", "580", "13", (gpu(0, "00000000:01:00.0"), gpu(1, "00000000:C1:00.0"), gpu(2, "")), None)


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ([], [0, 1, 2]),
        (["1"], [1]),
        ([1], [1]),
        (["GPU-0"], [0]),
        (["gpu-0"], [0]),
        (["0000:c1:00.0"], [1]),
        (["c1:00.0"], [1]),
        (["00000000:C1:00.0"], [1]),
        (["2", "0", "GPU-0"], [0, 2]),
    ],
)
def test_gpus_are_chosen_by_index_uuid_or_pci_id_in_nvmls_order(wanted, indices):
    assert [one.index for one in select(HOST, wanted)] == indices


@pytest.mark.parametrize("wanted", ["3", "GPU-", "GPU-9", "0000:02:00.0", "", "9"])
def test_an_unknown_gpu_is_refused_with_what_is_there(wanted):
    with pytest.raises(UnknownGpu) as refused:
        select(HOST, ["0", wanted])
    assert wanted in str(refused.value) and "GPU-1" in str(refused.value) and "00000000:C1:00.0" in str(refused.value)


def test_a_minor_number_chooses_nothing():
    with pytest.raises(UnknownGpu):
        select(HOST, ["9"])  # GPU 0 is /dev/nvidia9 here


def test_an_unreadable_host_says_why_instead_of_listing_nothing():
    with pytest.raises(UnknownGpu, match="no driver here"):
        select(Readings("none", None, None, (), "no driver here"), ["0"])


def test_readings_survive_json():
    assert from_json(json.loads(json.dumps(to_json(HOST)))) == HOST


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("nonsense", "nonsense"),
        ("zz:00.0", "zz:00.0"),
        ("", ""),
    ],
)
def test_pci_ids_have_one_spelling(text, normal):
    assert normal_pci(text) == normal


def test_a_lost_gpu_is_lost_as_a_whole_in_whatever_field_it_says_so():
    assert whole_gpu({"power_watts": "GPU is lost"})["gpu"] == "GPU is lost"
    assert whole_gpu({"power_watts": "Not Supported"}) == {"power_watts": "Not Supported"}


def test_words_of_the_driver_that_are_not_known_are_passed_on():
    assert "Frobnication Error" in driver_trouble("Frobnication\nError.")


def test_a_deadline_counts_down_by_the_clock_that_it_was_given():
    now = [100.0]
    deadline = Deadline(5, lambda: now[0])
    assert deadline.remaining() == 5 and not deadline.expired()
    assert deadline.capped(2).remaining() == 2
    assert deadline.capped(9).remaining() == 5
    capped = deadline.capped(2)
    now[0] = 102.0
    assert capped.expired() and deadline.remaining() == 3
    now[0] = 200.0
    assert deadline.remaining() == 0 and deadline.expired()


def test_a_negative_time_is_no_time():
    assert Deadline(-3).expired()
