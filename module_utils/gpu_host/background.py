"""Work that goes on after the call which began it: a process of our own in a session of its own, and the programs that
it runs. A program ends with us, however we end; so nothing that we have begun is left behind without an owner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def begin(work: Callable[[], None], keep: int) -> None:
    """Do the work in a process of its own, detached from whoever calls; it keeps the file `keep`. Returns at once."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0o022)
        for trapped in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(trapped, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.closerange(3, keep)
        os.closerange(keep + 1, 4096)
        work()
    finally:
        os._exit(0)


class Program:
    """One program, in a process group of its own; it dies with us. What it prints goes to the file `output`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: str) -> None:
        self.command = command
        parent = os.getpid()

        def with_us() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment),
                start_new_session=True, preexec_fn=with_us,
            )  # fmt: skip

    def end(self) -> bool:
        """TERM, then KILL, to its whole group; False when even that does not end it (it hangs in the kernel)."""
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            if self.process.poll() is not None and number == signal.SIGTERM:
                break
            try:
                os.killpg(self.process.pid, number)  # our own child, not yet reaped: the number can't be another's
            except ProcessLookupError:
                break
            end = time.monotonic() + patience
            while self.process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
        return self.process.poll() is not None


def text_of(module: ModuleType) -> str:
    """The source of one of our modules, from wherever this package was loaded (files, an archive, memory); '' when that
    does not tell."""
    spec = module.__spec__
    loader: Any = spec.loader if spec else None
    return str((loader.get_source(spec.name) if spec and loader else None) or "")
