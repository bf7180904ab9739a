from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gpu_host.host_lock import Holder, HostLock, LockHeld, holder
from gpu_host.storage import StorageError

MODULES = str(Path(__file__).resolve().parents[2] / "module_utils")
HOLD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from gpu_host.host_lock import HostLock
lock = HostLock(sys.argv[1], "other-run", "alice from 10.0.0.7").acquire()
print("held", flush=True)
time.sleep(60)
"""


def hold_elsewhere(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), MODULES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_reset_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    other = hold_elsewhere(tmp_path)
    try:
        with pytest.raises(LockHeld) as caught:
            HostLock(str(tmp_path), "mine", timeout=0.1).acquire()
        assert caught.value.holder.pid == other.pid
        assert "run other-run of alice from 10.0.0.7" in str(caught.value)
        assert "lock_timeout" in str(caught.value)
    finally:
        other.kill()
        other.wait()
    with HostLock(str(tmp_path), "mine", timeout=1) as lock:
        assert lock.held, "the kernel gave the lock back when its holder was killed"


def test_a_second_reset_waits_until_the_first_gives_the_lock_back(tmp_path: Path) -> None:
    first = HostLock(str(tmp_path), "first").acquire()
    threading.Timer(0.2, first.release).start()
    started = time.monotonic()
    with HostLock(str(tmp_path), "second", timeout=10):
        assert 0.15 < time.monotonic() - started < 5
        assert holder(str(tmp_path)).run_id == "second"
    assert holder(str(tmp_path)) == Holder()


def test_a_lock_given_back_is_free_even_while_a_child_is_being_forked(tmp_path: Path) -> None:
    lock = HostLock(str(tmp_path), "first").acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        lock.release()
        HostLock(str(tmp_path), "second", timeout=0).acquire().release()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


HOLD_AND_FORK = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from gpu_host.host_lock import HostLock
lock = HostLock(sys.argv[1], "killed", "bob").acquire()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_that_outlives_a_killed_reset_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path), MODULES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with HostLock(str(tmp_path), "second", timeout=5):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


LIST_OPEN_FILES = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.exists("/proc/self/fd/" + name):
        print(os.readlink("/proc/self/fd/" + name))
"""


def test_a_program_started_under_the_lock_does_not_inherit_it(tmp_path: Path) -> None:
    with HostLock(str(tmp_path), "first") as lock:
        command = [sys.executable, "-c", LIST_OPEN_FILES]
        links = subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout
        assert "pipe:" in links
        assert lock.path not in links


def test_a_lock_file_replaced_while_waiting_is_not_mistaken_for_the_lock(tmp_path: Path) -> None:
    first = HostLock(str(tmp_path), "first").acquire()
    os.unlink(first.path)
    second = HostLock(str(tmp_path), "second", timeout=1).acquire()
    with pytest.raises(LockHeld):
        HostLock(str(tmp_path), "third", timeout=0).acquire()
    second.release()
    first.release()


def test_each_scope_has_a_lock_of_its_own(tmp_path: Path) -> None:
    with HostLock(str(tmp_path / "a"), "run"), HostLock(str(tmp_path / "b"), "run", timeout=0) as other:
        assert other.held


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "state/lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="can't be opened"):
        HostLock(str(tmp_path / "state"), "run").acquire()
    assert (tmp_path / "precious").read_text() == "keep"


def test_rubbish_in_the_lock_file_is_no_error(tmp_path: Path) -> None:
    for rubbish in (b"", b"{", b"[]", b"\xff", json.dumps({"pid": "x"}).encode()):
        (tmp_path / "lock").write_bytes(rubbish)
        assert holder(str(tmp_path)) == Holder()
    assert "not yet written" in str(LockHeld("/x/lock", Holder(), 0))
