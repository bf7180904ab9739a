"""Work that outlives the call which started it: commands in a row, in a process of their own, followed by later calls.

A build takes up to an hour. It must neither end with the connection nor keep one busy, so it runs in a session of its
own, writes a log and a status, and whoever comes next finds it by its folder: running, done, or gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .procfs import Proc
from .storage import dict_of, text_of, write_private

# Standard library only; runs on the interpreter that runs us. A step's process group is ended when time is up.
_RUNNER = r"""
import json, os, signal, subprocess, sys, time
folder = sys.argv[1]
os.umask(0o022)
with open(os.path.join(folder, 'plan.json')) as file:
    plan = json.load(file)
os.unlink(os.path.join(folder, 'plan.json'))
log = os.open(os.path.join(folder, 'log'), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
started, end, done = time.time(), time.monotonic() + plan['seconds'], []
def say(**facts):
    path = os.path.join(folder, 'status.json')
    with open(path + '.new', 'w') as file:
        json.dump(dict(facts, started=started, now=time.time(), done=done), file)
    os.replace(path + '.new', path)
name, began = '', time.time()
for step in plan['steps']:
    if step['name'] != name:
        name, began = step['name'], time.time()
    say(step=name, ended=False, began=began)
    os.write(log, ('== %s\n' % step['name']).encode())
    try:
        child = subprocess.Popen(step['argv'], env=step['environment'], cwd=step['folder'] or None,
                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        with open(os.path.join(folder, 'group'), 'w') as file:
            file.write('%d\n' % child.pid)
        code = child.wait(timeout=max(0.0, end - time.monotonic()))
    except OSError as error:
        os.write(log, ('%s: %s\n' % (step['argv'][0], error.strerror)).encode())
        code = 127
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
                child.wait(timeout=5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        os.write(log, b'== out of time\n')
        code = 124
    if code:
        say(step=step['name'], ended=True, code=code)
        sys.exit(1)
    done.append(step['name'])
say(step='', ended=True, code=0)
"""


@dataclass(frozen=True)
class Step:
    """One command; `folder` is where it runs."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    folder: str = ""


@dataclass(frozen=True)
class Status:
    """`state`: absent, running, done, failed, or gone (ended without a word: killed, or the machine was)."""

    state: str
    step: str = ""
    seconds: float = 0.0
    code: int | None = None
    step_seconds: float = 0.0


def status(folder: str, proc: Proc | None = None) -> Status:
    """How far the job in this folder is."""
    proc = proc or Proc()
    facts = dict_of(f"{folder}/status.json")
    if facts and facts.get("ended"):
        seconds = float(facts.get("now", 0)) - float(facts.get("started", 0))
        return Status("failed" if facts.get("code") else "done", str(facts.get("step", "")), seconds, facts.get("code"))
    owner = dict_of(f"{folder}/owner.json")
    if not owner:
        return Status("absent")
    process = proc.process(int(owner["pid"]))
    if process is None or process.gone or process.start_ticks != owner["start_ticks"]:
        return Status("gone", str((facts or {}).get("step", "")))
    now = time.time()
    started = float((facts or {}).get("started") or now)
    began = float((facts or {}).get("began") or now)
    return Status("running", str((facts or {}).get("step", "")), now - started, step_seconds=now - began)


def start(folder: str, steps: Sequence[Step], seconds: float, proc: Proc | None = None) -> None:
    """Begin anew in this folder, detached. OSError where it can't be written."""
    proc = proc or Proc()
    os.makedirs(folder, mode=0o755, exist_ok=True)
    for name in ("status.json", "owner.json", "group", "log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{name}")
    plan = {
        "seconds": seconds,
        "steps": [
            {"name": s.name, "argv": list(s.argv), "environment": dict(s.environment), "folder": s.folder}
            for s in steps
        ],
    }
    write_private(f"{folder}/plan.json", json.dumps(plan))
    process = subprocess.Popen(
        [sys.executable, "-c", _RUNNER, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        close_fds=True,
    )
    known = proc.process(process.pid)
    owner = {"pid": process.pid, "start_ticks": known.start_ticks if known else 0}
    write_private(f"{folder}/owner.json", json.dumps(owner))
    process.returncode = 0  # it is to outlive us: no warning about a child that still runs


def wait(folder: str, seconds: float, proc: Proc | None = None) -> Status:
    """The status once the job has ended, or after so many seconds."""
    proc = proc or Proc()
    end = time.monotonic() + seconds
    pause = 0.02
    while True:
        now = status(folder, proc)
        if now.state != "running" or time.monotonic() >= end:
            return now
        _reap()
        time.sleep(max(0.0, min(pause, end - time.monotonic())))
        pause = min(pause * 1.5, 0.5)


def stop(folder: str, proc: Proc | None = None) -> None:
    """End a running job: its runner first, so that nothing new begins, then the step's process group."""
    proc = proc or Proc()
    if status(folder, proc).state != "running":
        return
    owner = dict_of(f"{folder}/owner.json") or {}
    group = text_of(f"{folder}/group").strip()
    with contextlib.suppress(ProcessLookupError, KeyError):
        os.kill(int(owner["pid"]), signal.SIGKILL)
    if group.isdigit():
        leader = proc.process(int(group))
        if leader is not None and leader.group == int(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGTERM)


def log_tail(folder: str, most_bytes: int = 1 << 16) -> str:
    """The end of the job's log."""
    try:
        with open(f"{folder}/log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _reap() -> None:
    """A runner that ended while its starter still waits for it must not look alive as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
