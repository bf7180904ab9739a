"""Child processes that can be left behind: nothing here waits longer than it is told to.

A call into the driver can hang for ever, in a state that SIGKILL does not end. So such calls are made in a child
that holds none of our files (an inherited lock or output pipe would hang others with it), and that is killed and
left to the kernel, not waited for, when its time is up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from .deadline import Deadline

_NAME_BYTES = 256


class Silent(Exception):
    """The child said nothing before the deadline."""


class Gone(Exception):
    """The child ended without an answer."""


class Child:
    """A forked child that answers lines of JSON to lines of JSON.

    `work(ask, answer)` runs in the child: ask() gives the next request or None when the parent has closed,
    answer(value) sends one value. Its result is ignored, the child ends when it returns.
    """

    def __init__(self, work: Callable[[Callable[[], Any], Callable[[Any], None]], None]) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():  # 3.12 and later warn where threads run; the child makes no use of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_child(work, request_read, reply_write, parent)
        os.close(request_read)
        os.close(reply_write)
        os.set_blocking(reply_read, False)
        self._request: int | None = request_write
        self._reply = reply_read
        self._buffer = b""

    def ask(self, value: Any) -> None:
        """Send one request; Gone when the child has ended."""
        try:
            if self._request is None:
                raise Gone()
            os.write(self._request, json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            raise Gone() from None

    def answer(self, deadline: Deadline) -> Any:
        """The next value that the child sends; Silent at the deadline, Gone when the child has ended."""
        while b"\n" not in self._buffer:
            if not _readable([self._reply], deadline):
                raise Silent()
            try:
                part = os.read(self._reply, 1 << 16)
            except BlockingIOError:
                continue
            if not part:
                raise Gone()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def fileno(self) -> int:
        """Readable when the child has said something or ended."""
        return self._reply

    def close(self, patience: float = 0.2) -> bool:
        """End the child and reap it; after `patience` seconds kill it. False when even that did not end it."""
        if self._request is None:
            return True
        os.close(self._request)
        self._request = None
        ended = _reaped(self.pid, Deadline(patience)) or self._kill()
        os.close(self._reply)
        return ended

    def abandon(self) -> bool:
        """Kill the child without waiting for more than a moment; False when it is still there (it hangs)."""
        if self._request is None:
            return True
        os.close(self._request)
        self._request = None
        os.close(self._reply)
        return self._kill()

    def _kill(self) -> bool:
        try:
            os.kill(self.pid, signal.SIGKILL)  # our own unreaped child: its pid can't be anybody else's
        except ProcessLookupError:
            return True
        return _reaped(self.pid, Deadline(0.05))


class Whereabouts:
    """Memory shared with a child, in which it says what it is about to do: what it hung in has a name then."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NAME_BYTES)

    def write(self, text: str) -> None:
        self._memory[:] = text.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")

    def read(self) -> str:
        return self._memory[:].rstrip(b"\0").decode("utf-8", "replace") or "its start"


@dataclass(frozen=True)
class Completed:
    """What a command did. `returncode` is None when it hung until the deadline, or could not be started."""

    returncode: int | None
    stdout: str
    stderr: str
    trouble: str  # '' | why there is no return code


def run_command(
    argv: Sequence[str], deadline: Deadline, env: Mapping[str, str] | None = None, most_bytes: int = 64 << 20
) -> Completed:
    """Run a command to its end or to the deadline, when it is killed and not waited for. Never raises for it."""
    environment = dict(os.environ if env is None else env)
    environment["LC_ALL"] = "C"
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return Completed(None, "", "", "%s could not be started: %s" % (argv[0], error.strerror or error))
    texts: dict[int, bytes] = {}
    streams = {stream.fileno(): stream for stream in (process.stdout, process.stderr) if stream is not None}
    order = list(streams)
    for number in order:
        os.set_blocking(number, False)
        texts[number] = b""
    open_ones = set(order)
    while open_ones and sum(map(len, texts.values())) < most_bytes:
        ready = _readable(list(open_ones), deadline)
        if not ready:
            break
        for number in ready:
            try:
                part = os.read(number, 1 << 16)
            except BlockingIOError:
                continue
            if part:
                texts[number] += part
            else:
                open_ones.discard(number)
    code = None if open_ones else _exit_code(process, deadline)
    if code is None:
        process.kill()
        process.poll()
    for stream in streams.values():
        stream.close()
    out, err = (texts[number].decode("utf-8", "replace") for number in order)
    return Completed(code, out, err, "" if code is not None else "%s did not end in time" % argv[0])


def _exit_code(process: subprocess.Popen[bytes], deadline: Deadline) -> int | None:
    pause = 0.001
    while process.poll() is None:
        if deadline.expired():
            return None
        time.sleep(min(pause, deadline.remaining()))
        pause = min(pause * 2, 0.05)
    return process.returncode


def _readable(numbers: list[int], deadline: Deadline) -> list[int]:
    """Those of the file descriptors that can be read, [] at the deadline. (poll: select stops at number 1024.)"""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    while True:
        ready = poll.poll(max(0, int(deadline.remaining() * 1000 + 0.999)))
        if ready:
            return [number for number, _ in ready]
        if deadline.expired():
            return []


def _reaped(pid: int, deadline: Deadline) -> bool:
    pause = 0.001
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            return True
        if deadline.expired():
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def _run_child(
    work: Callable[[Callable[[], Any], Callable[[Any], None]], None], request: int, reply: int, parent: int
) -> None:
    """In the child, and never back: os._exit leaves the parent's buffers and exit handlers alone."""
    status = 70
    try:
        _detach(request, reply, parent)
        incoming = os.fdopen(request, "rb")

        def ask() -> Any:
            line = incoming.readline()
            return json.loads(line) if line.endswith(b"\n") else None

        def answer(value: Any) -> None:
            data = json.dumps(value).encode() + b"\n"
            while data:
                data = data[os.write(reply, data) :]

        work(ask, answer)
        status = 0
    finally:
        os._exit(status)


def _detach(request: int, reply: int, parent: int) -> None:
    for trapped in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(trapped, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        if number not in (request, reply):
            os.dup2(nothing, number)
    low, high = sorted((request, reply))
    os.closerange(3, low)
    os.closerange(max(3, low + 1), high)
    os.closerange(max(3, high + 1), _most_files())
    with contextlib.suppress(OSError, AttributeError):  # die with the parent, also inside a call that hangs
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _most_files() -> int:
    """One above the highest open file descriptor: closing up to the limit may mean a million calls."""
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    except (OSError, ValueError):
        return min(os.sysconf("SC_OPEN_MAX"), 65536)
