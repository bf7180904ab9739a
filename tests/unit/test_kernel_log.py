"""The kernel log: lines to events (cases/kernel_log.yml), and which way it was read, if any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from gpu_host import kernel_log
from gpu_host.child import Completed
from gpu_host.deadline import Deadline

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "kernel_log.yml").read_text())
BOOT = 1_700_000_000.0
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


@pytest.mark.parametrize("case", CASES, ids=[case["line"][:60] for case in CASES])
def test_a_line_is_the_event_that_it_tells(case):
    events = kernel_log.parse([(12.5, case["line"])], BOOT)
    if case["event"] is None:
        assert events == []
        return
    assert len(events) == 1
    assert (events[0].seconds, events[0].time, events[0].text) == (12.5, BOOT + 12.5, case["line"])
    for field, value in case["event"].items():
        assert getattr(events[0], field) == value, field


def test_events_before_since_are_left_out():
    lines = [(10.0, XID), (20.0, XID)]
    assert [event.seconds for event in kernel_log.parse(lines, BOOT, BOOT + 15)] == [20.0]


def test_the_records_of_kmsg_are_read_with_their_time_in_microseconds():
    records = [f"4,1234,5678901,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode(), b"broken", b"\xff;"]
    assert kernel_log.parse_records(records) == [(5.678901, XID)]


@pytest.mark.parametrize(
    "line", [f"<4>[   12.345678] {XID}", f"[   12.345678] {XID}", f"[   12.345678] gpu-host-7 kernel: {XID}"]
)
def test_dmesg_and_the_journal_print_the_same_line(line):
    assert kernel_log.parse_stamped(line) == [(12.345678, XID)]


def ways(answers):
    def run(argv, deadline):
        return answers.get(argv[0], Completed(None, "", "", f"{argv[0]} could not be started: No such file"))

    return run


def read(tmp_path, answers, kmsg=None, since=0.0):
    return kernel_log.read(Deadline(5), since, kmsg=str(kmsg or tmp_path / "kmsg"), run=ways(answers), boot_time=BOOT)


def test_a_log_that_no_way_can_read_is_unavailable_and_not_empty(tmp_path):
    log = read(tmp_path, {"dmesg": Completed(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n", "")})
    assert not log.available and log.events == []
    assert "Operation not permitted" in log.why and "journalctl" in log.why and "kmsg" in log.why


def test_the_journal_is_asked_when_dmesg_is_forbidden(tmp_path):
    answers = {
        "dmesg": Completed(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n", ""),
        "journalctl": Completed(0, f"[   12.345678] host kernel: {XID}\n", "", ""),
    }
    log = read(tmp_path, answers)
    assert log.available and "journalctl" in log.why and [event.xid for event in log.events] == [79]


def test_a_journal_without_one_kernel_line_is_unavailable(tmp_path):
    log = read(tmp_path, {"journalctl": Completed(0, "-- No entries --\n", "", "")})
    assert not log.available


def test_a_log_without_gpu_trouble_is_available_and_has_no_events(tmp_path):
    log = read(tmp_path, {"dmesg": Completed(0, "<6>[    0.000000] Linux version 6.8\n", "", "")})
    assert log.available and log.events == []


def test_a_containers_stand_in_for_kmsg_is_no_empty_log(tmp_path):
    """Some runtimes put a pipe or a null device there."""
    os.mkfifo(tmp_path / "pipe")
    for stand_in in (tmp_path / "pipe", Path("/dev/null")):
        log = read(tmp_path, {}, kmsg=stand_in)
        assert not log.available and "stand-in" in log.why
