"""One reset of a host, or of one scope on it, at a time: a lock that says who holds it.

A flock on a file in the state folder. The kernel gives it back when the holder dies, however that happens, so there is
nothing to clean up and the file is never deleted. A scope with a state folder of its own has a lock of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import weakref
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Callable

from .deadline import Deadline
from .storage import StorageError, private_folder, write_all


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as he wrote it down: `pid` is the one in his own PID namespace, 0 when unknown."""

    pid: int = 0
    run_id: str = ""
    who: str = ""
    since: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "another reset, which has not yet written down who it is"
        by = f" of {self.who}" if self.who else ""
        return f"run {self.run_id}{by} (pid {self.pid}, since {self.since})"


class LockHeld(Exception):
    """Somebody else holds the lock and kept it until the deadline."""

    def __init__(self, path: str, holder: Holder, waited: float) -> None:
        self.path = path
        self.holder = holder
        self.waited = waited
        super().__init__(
            f"{path} is held by {holder}; waited {waited:.0f} s: try again when that run has ended, or wait longer "
            "with lock_timeout."
        )


class HostLock:
    """`with HostLock(state_folder, run_id, who) as lock: ...`, or acquire() and release().

    No child keeps the lock: the file is closed on exec, and after a plain fork in the child.
    """

    def __init__(
        self,
        state_folder: str,
        run_id: str,
        who: str = "",
        timeout: float = 60.0,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self.path = os.path.join(state_folder, "lock")
        self._folder = state_folder
        self._timeout = timeout
        self._holder = Holder(os.getpid(), run_id, who, now().isoformat(timespec="seconds"))
        self._number: int | None = None
        itself = weakref.ref(self)

        def close_in_child() -> None:
            lock = itself()
            if lock is not None:
                lock.after_fork_in_child()

        os.register_at_fork(after_in_child=close_in_child)

    def acquire(self) -> HostLock:
        """Take the lock within the timeout (seconds); LockHeld names who has it, StorageError why it can't be."""
        private_folder(self._folder)
        deadline = Deadline(self._timeout)
        started = time.monotonic()
        pause = 0.005
        while not self._try():
            if deadline.expired():
                raise LockHeld(self.path, holder(self._folder), time.monotonic() - started)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(pause * 2, 0.1)
        self._write_holder()
        return self

    def _try(self) -> bool:
        try:
            number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"The lock {self.path} can't be opened: {error.strerror}.") from error
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(number), os.stat(self.path, follow_symlinks=False)):
                self._number = number
                return True
        except (BlockingIOError, FileNotFoundError):
            pass  # held, or somebody removed the file between the two calls: look again
        except OSError as error:
            os.close(number)
            raise StorageError(f"The lock {self.path} can't be taken: {error.strerror}.") from error
        os.close(number)
        return False

    def _write_holder(self) -> None:
        if self._number is None:
            return
        try:
            os.ftruncate(self._number, 0)
            write_all(self._number, json.dumps(vars(self._holder)).encode() + b"\n")
        except OSError:
            pass  # a full disk: the lock holds all the same, only without a name on it

    def release(self) -> None:
        """Give the lock back. Doing so twice, or without having it, is no error."""
        number, self._number = self._number, None
        if number is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(number, 0)
                fcntl.flock(number, fcntl.LOCK_UN)  # closing alone would leave it to a child that is just being forked
            os.close(number)

    @property
    def held(self) -> bool:
        return self._number is not None

    def after_fork_in_child(self) -> None:
        """Close the child's copy: the parent goes on holding the lock, and the child can't keep it beyond him."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)

    def __enter__(self) -> HostLock:
        return self if self.held else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder(state_folder: str) -> Holder:
    """Who wrote his name on the lock last and has not given it back; an empty Holder when nobody did."""
    try:
        number = os.open(os.path.join(state_folder, "lock"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return Holder()
    try:
        facts: Any = json.loads(os.read(number, 4096))
        return Holder(
            int(facts["pid"]), str(facts.get("run_id", "")), str(facts.get("who", "")), str(facts.get("since", ""))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Holder()
    finally:
        os.close(number)
