"""A reset ends by its deadlines whatever hangs: a process in state D, the driver, systemd."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.host import Host
from tests.lab.image import LabUnavailableError
from tests.lab.resets import (
    FAST,
    assert_clean,
    finish,
    living,
    members_file,
    numbers,
    pids,
    reset,
    signals,
    start_reset,
    until,
)
from tests.lab.server import Server


@contextmanager
def frozen(server: Server, text: str) -> Iterator[int]:
    """A worker in state D, which even SIGKILL does not end."""
    (worker,) = [process.pid for process in server.tree() if text in process.line]
    try:
        server.host.freeze(worker)
    except LabUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield worker
    finally:
        server.host.thaw_all()


def test_a_scheduler_in_state_d_is_unkillable_with_cure_reboot_and_the_reset_ends_by_its_deadline(
    gpu_host: Host,
) -> None:
    server = gpu_host.start_server(tp=4, settings=FAST)
    tree = numbers(server.tree())
    with frozen(server, "scheduler_TP2") as worker:
        began = time.monotonic()
        record = reset(gpu_host, grace=1.0, kill_timeout=1.5, verify_timeout=2.0)
        took = time.monotonic() - began
        assert pids(record) == tree - {worker}
        assert living(gpu_host, tree) == {worker}
        state = gpu_host.process(worker)
        assert state is not None and state.state == "D"
        assert took < 1.0 + 1.5 + 2.0 + 4.0
        assert record["verdict"] == "dirty"
        assert f"sglang::scheduler_TP2 ({worker}) did not end" in record["reason"] and "reboot" in record["reason"]
        assert [gpu["verdict"] for gpu in record["gpus"]] == ["free"] * 2 + ["unkillable"] + ["free"] * 5
        assert record["gpus"][2]["pids"] == [worker] and "Reboot" in record["gpus"][2]["cure"]
    until(lambda: not living(gpu_host, {worker}), "the SIGKILL that waited to arrive")
    assert_clean(gpu_host, reset(gpu_host))


def test_state_d_alone_is_not_unkillable_a_process_that_leaves_it_in_time_ends(gpu_host: Host) -> None:
    """Allocating looks like it."""
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    with frozen(server, "scheduler_TP1"):
        pid = os.fork()
        if pid == 0:
            time.sleep(2.0)
            server.host.thaw_all()
            os._exit(0)
        record = reset(gpu_host, grace=0.3, kill_timeout=8.0)
        os.waitpid(pid, 0)
    assert_clean(gpu_host, record)


def test_a_driver_that_hangs_does_not_hold_up_the_reset(gpu_host: Host) -> None:
    """Nothing can be judged then, and nothing is called clean."""
    function = "nvmlDeviceGetMemoryInfo"
    server = gpu_host.start_server(tp=2, settings=FAST)
    gpu_host.state.set_fault("hang", [function])
    began = time.monotonic()
    record = reset(gpu_host, grace=2.0, verify_timeout=1.0, timeout=50)
    took = time.monotonic() - began
    assert record["verdict"] != "clean" and record["failed"] is True
    assert took < 45
    assert function in record["reason"] + record["msg"] + str(record["gpus"])
    # A read that hung leaves nobody behind.
    until(
        lambda: not [p for p in gpu_host.processes() if "import sys,zlib" in p.line], "the reset's children to end", 3
    )
    gpu_host.state.clear_fault("hang")
    assert_clean(gpu_host, reset(gpu_host, grace=20.0))
    assert living(gpu_host, {server.pid}) == set()


def test_a_driver_that_begins_to_hang_after_the_kill_leaves_a_killed_server_and_no_clean_verdict(
    gpu_host: Host,
) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    tree = numbers(server.tree())
    running = start_reset(gpu_host, grace=3.0, verify_timeout=1.0)
    until(lambda: "SIGNAL" in journal(gpu_host), "TERM")
    gpu_host.state.set_fault("hang", ["nvmlDeviceGetComputeRunningProcesses"])
    record = finish(running, timeout=50)
    assert pids(record) == tree
    assert record["verdict"] in ("unknown", "dirty") and record["failed"]
    assert living(gpu_host, tree) == set()


def journal(host: Host) -> str:
    return host.exec("cat /var/lib/gpu-host/journal.jsonl", check=False).stdout.upper()


def test_a_systemd_that_does_not_answer_does_not_hold_up_the_reset(gpu_host: Host) -> None:
    """Pid 1 itself is stopped: systemctl waits for it, and nobody reaps."""
    server = gpu_host.start_server(tp=2, how="unit", settings=FAST)
    tree = numbers(server.tree())
    os.kill(gpu_host.init, signal.SIGSTOP)
    try:
        began = time.monotonic()
        record = finish(start_reset(gpu_host, ssh=False, grace=2.0, kill_timeout=2.0, verify_timeout=2.0))
        took = time.monotonic() - began
    finally:
        os.kill(gpu_host.init, signal.SIGCONT)
    assert took < 30
    assert pids(record) == tree
    # It is set to restart its server, and will when it wakes up.
    assert record["verdict"] == "dirty"
    assert "unit sglang.service" in record["reason"] and "systemctl does not answer" in record["reason"]
    assert living(gpu_host, tree) == set()
    gpu_host.exec(["systemctl", "stop", "sglang.service"])


def test_a_systemctl_that_hangs_does_not_hold_up_the_reset(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST)
    tree = numbers(server.tree())
    members = members_file(gpu_host, "ssh.service")
    gpu_host.exec(f"for pid in {' '.join(map(str, tree))}; do echo $pid > {members}; done")
    gpu_host.write("/usr/local/sbin/systemctl", "#!/bin/sh\necho $* >> /run/asked\nexec sleep 3600\n", "0755")
    began = time.monotonic()
    record = reset(gpu_host, grace=2.0, kill_timeout=2.0)
    assert time.monotonic() - began < 25
    assert "show ssh.service" in gpu_host.read("/run/asked")
    assert pids(record) == tree
    assert_clean(gpu_host, record)
    assert gpu_host.find("sleep 3600") == []


@pytest.mark.parametrize(("name", "seconds"), [("grace", 2.0), ("kill_timeout", 2.0)])
def test_the_times_given_are_the_times_taken(gpu_host: Host, name: str, seconds: float) -> None:
    server = gpu_host.start_server(tp=1, settings=FAST | {"IGNORE_TERM": 1})
    with frozen(server, "sglang::scheduler"):
        given = {"grace": 0.2, "kill_timeout": 0.2} | {name: seconds}
        record = reset(gpu_host, verify_timeout=0.2, **given)
        assert seconds <= record["seconds"]["kill"] < seconds + 2.5
        assert signals(record).get(server.pid) == "KILL"
