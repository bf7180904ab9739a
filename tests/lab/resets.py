"""Resets on a lab host, run as the action plugin runs them, and the bystanders that survive every one of them."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_control import lean
from gpu_host import arguments

from tests.lab.command import LabError, wait_for
from tests.lab.host import SIMULATOR, Host
from tests.lab.image import REPOSITORY
from tests.lab.processes import Process
from tests.lab.server import STANDIN, Server

# Short enough for a test, long enough that nothing else decides; SPEED 5 makes the stand-in drain in about a second.
WAITS = {"grace": 3.0, "kill_timeout": 3.0, "verify_timeout": 3.0, "lock_timeout": 3.0}
FAST = {"SPEED": 5}
EAGLE3 = (
    "--speculative-algorithm=EAGLE3",
    "--speculative-draft-model-path=/models/kimi-k2.5-eagle3",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
)
PACKAGE = REPOSITORY / "module_utils" / "gpu_host"
TOOLS = "/opt/tools"
JOBS = f"{SIMULATOR}/bystanders"


@functools.cache
def sources(scene: str = "") -> bytes:
    """What travels to a host; ``scene`` is the text of a module ``gpu_host.scene`` that goes along."""
    if not scene:
        return lean.sources(PACKAGE, "reset")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(PACKAGE, Path(folder) / "gpu_host"))
        (copy / "scene.py").write_text(scene)
        return lean.sources(copy, "scene")


def params(**given: Any) -> dict[str, Any]:
    """All parameters of gpu_reset: its defaults, short waits, and what a test gives."""
    unknown = given.keys() - arguments.GPU_RESET.keys()
    if unknown:
        raise TypeError(f"gpu_reset has no {', '.join(sorted(unknown))}")
    return {name: spec["default"] for name, spec in arguments.GPU_RESET.items()} | WAITS | given


def program(given: dict[str, Any], check: bool = False) -> bytes:
    """What ``interpreter`` reads on its standard input."""
    return lean.program(sources(), "reset", params(**given), check_mode=check, diff=False)


def interpreter(sudo: bool = False) -> str:
    """The shell command that reads a program: as the action plugin has it."""
    return f"{'sudo ' if sudo else ''}/usr/bin/python3 -c {shlex.quote(lean.BOOTSTRAP)}"


def _start(command: list[str], text: bytes) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert started.stdin is not None
    started.stdin.write(text)
    started.stdin.close()
    started.stdin = None
    return started


def reset(
    host: Host,
    *,
    check: bool = False,
    user: str = "root",
    sudo: bool = True,
    timeout: float = 60,
    **given: Any,
) -> dict[str, Any]:
    """Reset the host over one ssh exec, as the action plugin does; returns the run record.

    A user who is not root goes through sudo, unless told not to.
    """
    return finish(start_reset(host, check=check, user=user, sudo=sudo, **given), timeout)


def start_reset(
    host: Host, *, check: bool = False, user: str = "root", sudo: bool = True, ssh: bool = True, **given: Any
) -> subprocess.Popen[bytes]:
    """The same, left to itself; ``finish`` waits for it. Without ``ssh``, which needs systemd, by another way in."""
    words = interpreter(sudo=sudo and user != "root")
    command = host.ssh_command(words, user=user) if ssh else host.enter(words)
    return _start(command, program(given, check))


def start_scene(host: Host, text: str, given: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
    """Start ``run(params, check_mode, diff)`` of the given module text on the host, with ``gpu_host`` beside it."""
    command = host.enter(["/usr/bin/python3", "-c", lean.BOOTSTRAP])
    return _start(command, lean.program(sources(text), "scene", given or {}, check_mode=False, diff=False))


def finish(started: subprocess.Popen[bytes], timeout: float = 60) -> dict[str, Any]:
    """The record that a reset or a scene ends with; LabError when it takes longer than ``timeout`` seconds."""
    try:
        out, errors = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        started.kill()
        raise LabError(f"After {timeout:g} s the reset had not ended.") from error
    return _record(out.decode(errors="replace"), errors.decode(errors="replace"))


def _record(out: str, errors: str) -> dict[str, Any]:
    try:
        record = dict(json.loads(out))
    except ValueError as error:
        raise LabError(f"The reset gave no record: {out[-1000:]}{errors[-3000:]}") from error
    if "exception" in record:
        raise LabError(f"The reset failed: {record['exception']}")
    return record


def pids(record: dict[str, Any], name: str = "killed") -> set[int]:
    return {row["pid"] for row in record[name]}


def signals(record: dict[str, Any]) -> dict[int, str]:
    return {row["pid"]: row["signal"] for row in record["killed"]}


def numbers(processes: Iterable[Process]) -> set[int]:
    return {process.pid for process in processes}


def living(host: Host, wanted: Iterable[int]) -> set[int]:
    """Those of the pids that are there and no zombies."""
    return {process.pid for process in host.processes() if process.state != "Z"} & set(wanted)


def until(happened: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    wait_for(lambda: bool(happened()), what, time.monotonic() + seconds, interval=0.05)


def leave_orphans(server: Server, early: bool = False) -> set[int]:
    """Kill the main of a server; the pids left behind.

    Once it serves, or with ``early`` as soon as the children of a TP 8 are there: eight schedulers and a detokenizer.
    """
    host = server.host
    if early:
        until(lambda: sum("spawn_main" in process.line for process in server.tree()) == 9, "the server's children")
    orphans = numbers(server.tree()) - {server.pid}
    host.kill(server.pid)
    until(lambda: not host.alive(server.pid), "the main to end")
    return living(host, orphans)


def assert_clean(host: Host, record: dict[str, Any], indices: Iterable[int] = range(8)) -> None:
    """The verdict is clean, and so is the host: no process of a server, no port, no memory."""
    assert (record["verdict"], record["reason"]) == ("clean", "")
    assert record["failed"] is False and record["simulated"] is True
    assert [gpu["index"] for gpu in record["gpus"]] == list(indices)
    left = [process.line for process in host.processes() if process.state != "Z" and of_a_server(process)]
    assert left == []
    assert listeners(host) == set()


def of_a_server(process: Process) -> bool:
    """Whether a process shows itself as one of the stand-in's. A test's own eye, not the reset's."""
    return process.line.startswith("sglang::") or "-m sglang.launch_server --model-path" in process.line


def listeners(host: Host) -> set[str]:
    """Ports that somebody listens on, but for sshd's."""
    lines = host.exec("ss -Hltn").stdout.splitlines()
    return {line.split()[3].rpartition(":")[2] for line in lines} - {"22"}


def server_command(
    *arguments: str, tp: int = 8, port: int = 30000, settings: Mapping[str, object] | None = None
) -> str:
    """The shell command that starts the stand-in, for a test that types it itself."""
    variables = {"PYTHONPATH": STANDIN, "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {f"SGLANG_STANDIN_{key}": str(value) for key, value in (FAST | dict(settings or {})).items()}
    words = ["env", *(f"{key}={value}" for key, value in variables.items())]
    words += ["python3", "-m", "sglang.launch_server"]
    words += ["--model-path", "/models/kimi-k2.5", "--tp-size", str(tp), "--port", str(port), *arguments]
    return shlex.join(words)


class Session:
    """An ssh session with a terminal that a person left open: an interactive shell at its prompt."""

    def __init__(self, host: Host, user: str = "root") -> None:
        self.host = host
        self.before = numbers(host.processes())
        self._ssh = subprocess.Popen(
            host.ssh_command("exec bash -i", user=user, tty=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        until(lambda: self._started("bash -i"), "the session's shell")
        self.shell = self._started("bash -i")[0]

    def _started(self, text: str) -> list[int]:
        return [process.pid for process in self.host.find(text) if process.pid not in self.before]

    def type(self, line: str, until_there: str) -> int:
        """Type a command; the pid of the process that it started, told by a part of its command line."""
        known = set(self._started(until_there))
        assert self._ssh.stdin is not None
        self._ssh.stdin.write(line + "\n")
        self._ssh.stdin.flush()
        until(lambda: set(self._started(until_there)) - known, line)
        return min(set(self._started(until_there)) - known)

    @property
    def open(self) -> bool:
        return self._ssh.poll() is None

    def close(self) -> None:
        self._ssh.kill()
        self._ssh.wait()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def members_file(host: Host, unit: str) -> str:
    """Where a pid is written to make its process a member of the unit."""
    group = host.exec(["systemctl", "show", unit, "-p", "ControlGroup", "--value"]).stdout.strip()
    root = "/sys/fs/cgroup/systemd" if host.exec("test -d /sys/fs/cgroup/systemd", check=False).returncode == 0 else ""
    return f"{root or '/sys/fs/cgroup'}{group}/cgroup.procs"


BYSTANDERS = f"""
set -e
cd /
mkdir -p {TOOLS} /data/eagle3/output_100k_sglang/4
export PYTHONPATH={STANDIN} PYTHONDONTWRITEBYTECODE=1
mkfifo -m 0666 /run/never
touch /var/log/sglang.launch_server.log
start() {{ name=$1; shift; setsid "$@" > /run/bystander.$name.log 2>&1 < /dev/null & echo "$name $!"; }}
start nvidia-persistenced python3 {JOBS}/monitor.py nvidia-persistenced --tools {TOOLS}
start nv-hostengine python3 {JOBS}/monitor.py nv-hostengine --tools {TOOLS} --gpu 0 --mib 300
start dcgm-exporter python3 {JOBS}/monitor.py dcgm-exporter --tools {TOOLS}
start nv-fabricmanager python3 {JOBS}/monitor.py nv-fabricmanager --tools {TOOLS}
start data-job python3 {JOBS}/data_job.py
start data-job-that-dies python3 {JOBS}/data_job.py --orphan-child
start router python3 -m sglang_router.launch_router --worker-urls http://127.0.0.1:30000
start bench-client python3 -m sglang.bench_serving --backend sglang --port 30000
start tail tail -f /var/log/sglang.launch_server.log
start grep grep -r sglang.launch_server /run/never
start shell bash -c 'cd /data/eagle3/output_100k_sglang/4; while true; do sleep 1000; done # sglang::scheduler_TP0'
start engineer-job setpriv --reuid=engineer --regid=engineer --init-groups python3 {JOBS}/data_job.py
"""
MONITORS = ("nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nv-fabricmanager")


class Bystanders:
    """Processes that share a host with a server and have nothing to do with it, by how each was started."""

    def __init__(self, host: Host) -> None:
        self.host = host
        done = host.exec(["bash", "-c", BYSTANDERS])
        started = {name: int(pid) for name, pid in (line.split() for line in done.stdout.splitlines())}
        del started["data-job-that-dies"]
        for name, job in (("orphan", "data-job-that-dies"), ("child", "data-job"), ("engineer-child", "engineer-job")):
            until(lambda job=job: host.read(f"/run/bystander.{job}.log").strip(), job)  # type: ignore[misc]
            started[name] = int(host.read(f"/run/bystander.{job}.log").split()[0])
        until(self._monitors_are_up, "the monitors")
        started["sshd"] = next(process.pid for process in host.processes() if process.comm == "sshd")
        started["systemd"] = 1
        self.pids = started
        self.were = {name: self._identity(pid) for name, pid in started.items()}
        assert None not in self.were.values(), self.were

    def _monitors_are_up(self) -> bool:
        names = {process.command[0].rpartition("/")[2] for process in self.host.processes() if process.command}
        return set(MONITORS) <= names

    def _identity(self, pid: int) -> tuple[int, str] | None:
        process = self.host.process(pid)
        return None if process is None or process.state == "Z" else (process.start_ticks, process.line)

    def assert_untouched(self) -> None:
        assert {name: self._identity(pid) for name, pid in self.pids.items()} == self.were


@contextlib.contextmanager
def bystanders(host: Host) -> Iterator[Bystanders]:
    """Every kind of bystander, all of them untouched at the end."""
    present = Bystanders(host)
    yield present
    present.assert_untouched()
