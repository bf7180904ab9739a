"""A signal reaches the process that was judged, or nobody."""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host import signals
from gpu_host.deadline import Deadline
from gpu_host.processes import Finding
from gpu_host.procfs import Proc

from tests.unit.fake_proc import FakeProc
from tests.unit.real_processes import wait_for

ARGV = ["/usr/bin/sleep", "300"]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(ARGV)
    wait_for(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(b"/usr/bin/sleep"))
    yield child
    child.kill()
    child.wait()


def judged(proc: Proc, pid: int) -> Finding:
    process = proc.process(pid)
    assert process is not None
    return Finding(process, "server", "said so", main=True)


def without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("not on this kernel")

    monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_target_is_signalled_and_seen_to_go(
    pidfd: bool, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        without_pidfd(monkeypatch)
    proc = Proc()
    target = signals.take(proc, judged(proc, victim.pid))
    assert target is not None
    assert (target.pidfd is not None) is pidfd
    assert not signals.gone(proc, target)
    assert signals.wait_any(proc, [target], Deadline(0.05)) == []
    assert signals.send(proc, target, signal.SIGTERM)
    assert signals.wait_any(proc, [target], Deadline(5)) == [target]
    assert signals.gone(proc, target)  # a zombie that nobody has reaped yet
    victim.wait()
    assert not signals.send(proc, target, signal.SIGKILL)
    target.close()


@pytest.mark.parametrize("change", ["start", "argv", "gone"])
def test_a_pid_that_was_taken_by_another_process_between_look_and_signal_is_let_go(
    change: str, victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    fake, proc = FakeProc(tmp_path), Proc(str(tmp_path))
    fake.add(victim.pid, argv=ARGV, start=500)
    finding = judged(proc, victim.pid)
    if change == "gone":
        (tmp_path / str(victim.pid) / "stat").unlink()
    else:
        argv = ["/usr/bin/vim"] if change == "argv" else ARGV
        fake.add(victim.pid, argv=argv, start=501 if change == "start" else 500)
    before = len(os.listdir("/proc/self/fd"))
    assert signals.take(proc, finding) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert victim.poll() is None


def test_without_pidfds_the_start_time_is_checked_again_before_the_signal(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pidfd(monkeypatch)
    fake, proc = FakeProc(tmp_path), Proc(str(tmp_path))
    fake.add(victim.pid, argv=ARGV, start=500)
    target = signals.take(proc, judged(proc, victim.pid))
    assert target is not None
    fake.add(victim.pid, argv=ARGV, start=501)
    assert not signals.send(proc, target, signal.SIGKILL)
    assert signals.gone(proc, target)
    time.sleep(0.05)
    assert victim.poll() is None
