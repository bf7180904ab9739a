"""Signals that can only reach the process that was meant.

A pid may name another process by the time a signal is sent. So a pidfd is opened first, and the identity (pid, start
time, argv) is checked after: from then on the descriptor can reach no other process.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from .deadline import Deadline
from .processes import Finding
from .procfs import Proc

POLL_SECONDS = 0.05  # between two looks where the kernel or the Python has no pidfd


@dataclass(frozen=True)
class Target:
    """A process whose identity was confirmed behind an open pidfd (None where there is no pidfd)."""

    finding: Finding
    pidfd: int | None

    @property
    def pid(self) -> int:
        return self.finding.process.pid

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)


def take(proc: Proc, finding: Finding) -> Target | None:
    """A target for this very process, or None when it is gone, replaced or no longer what was judged."""
    process = finding.process
    pidfd = _open(process.pid)
    now = proc.process(process.pid)
    if now is None or (now.start_ticks, now.argv) != (process.start_ticks, process.argv):
        if pidfd is not None:
            os.close(pidfd)
        return None
    return Target(finding, pidfd)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def send(proc: Proc, target: Target, signum: signal.Signals) -> bool:
    """Send a signal; False when the process is gone. Raises PermissionError when it belongs to somebody else."""
    try:
        if target.pidfd is not None:
            signal.pidfd_send_signal(target.pidfd, signum)
        elif proc.start_ticks(target.pid) == target.finding.process.start_ticks:
            os.kill(target.pid, signum)
        else:
            return False
    except ProcessLookupError:
        return False
    return True


def gone(proc: Proc, target: Target) -> bool:
    """Whether every thread of the process has ended (a zombie that nobody reaped yet is gone)."""
    if target.pidfd is not None:
        poller = select.poll()
        poller.register(target.pidfd, select.POLLIN)
        return bool(poller.poll(0))
    now = proc.process(target.pid)
    return now is None or now.gone or now.start_ticks != target.finding.process.start_ticks


def wait_any(proc: Proc, targets: Iterable[Target], deadline: Deadline) -> list[Target]:
    """Wait until at least one target is gone or the deadline passes; those that are gone."""
    waiting = list(targets)
    poller = select.poll()
    by_fd = {target.pidfd: target for target in waiting if target.pidfd is not None}
    for pidfd in by_fd:
        poller.register(pidfd, select.POLLIN)
    blind = len(by_fd) < len(waiting)
    while True:
        remaining = max(deadline.remaining(), 0.0)
        ready = poller.poll((min(remaining, POLL_SECONDS) if blind else remaining) * 1000)
        ended = [by_fd[pidfd] for pidfd, _ in ready]
        ended += [target for target in waiting if target.pidfd is None and gone(proc, target)]
        if ended or deadline.expired():
            return ended
