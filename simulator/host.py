"""A simulated GPU host in a folder of this machine: GPUs, servers, bystanders and what they leave behind.

Everything runs as the user who starts it, detached, with its working folder inside the host's folder:

    state/       of the simulated GPUs (gpu_state.py)      lib/  the NVML double      bin/  nvidia-smi, monitors
    dev/         what stands for /dev: one file a GPU node  home/  HOME of all processes     shm/  for /dev/shm
    host-state/  the reset's own state folder               logs/  one file a process
    host.json    what it is, and the environment that a reset needs
    started.tsv  pid, start time in clock ticks and name of each process started here
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from simulator.build import build
from simulator.gpu_state import GpuState

SIMULATOR = Path(__file__).resolve().parent
STANDIN = SIMULATOR / "sglang_standin"
MARKER = "SIMULATED_GPU_HOST"
"""Environment variable of every process of a host: the host's folder."""

READY = "The server is fired up and ready to roll!"

# Prints the pid of a process that is not our child and leads a session of its own.
LAUNCH = 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'
# The same in the shell's session, as after `nohup ... &`.
LAUNCH_SHARED = 'log=$1; shift; nohup "$@" </dev/null >>"$log" 2>&1 & echo $!'


class HostError(Exception):
    """The simulated host can't do what was asked; the message says why."""


@dataclass(frozen=True)
class Started:
    """A process started on the host; `start_ticks` tells it from a later one of the same pid."""

    pid: int
    start_ticks: int
    name: str
    log: Path

    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return start_ticks(self.pid) == self.start_ticks

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        send_signal(self.pid, self.start_ticks, number)


@dataclass(frozen=True)
class Server:
    """A stand-in server on the host."""

    host: SimulatedHost
    main: Started
    port: int

    @property
    def main_pid(self) -> int:
        return self.main.pid

    @property
    def log(self) -> Path:
        return self.main.log

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_ready(self, seconds: float = 60) -> Server:
        """Wait for the line that ends the start-up. Raises `HostError` with the end of the log."""
        with contextlib.suppress(HostError):
            wait_for(lambda: READY in self.log_text() or not self.main.alive(), f"server {self.main.name}", seconds)
        if READY not in self.log_text():
            raise HostError(f"The server {self.main.name} ({self.main_pid}) did not start:\n{self.log_text()[-2000:]}")
        return self

    def processes(self) -> dict[int, str]:
        """Command line by pid of every living process of its session, orphans included."""
        return session_processes(self.main_pid)

    def titled(self, title: str) -> list[int]:
        """Pids whose command line begins so, e.g. 'sglang::scheduler'."""
        return sorted(pid for pid, line in self.processes().items() if line.startswith(title))

    @property
    def scheduler_pids(self) -> list[int]:
        """By rank."""
        found = self.processes()
        pids = [pid for pid, line in found.items() if line.startswith("sglang::scheduler")]
        return sorted(pids, key=lambda pid: (len(found[pid]), found[pid]))

    def request(self, path: str, body: object = None, timeout: float = 10) -> tuple[int, str]:
        """GET, or POST of a JSON body: status and text; status 0 where nobody answers in time."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)


class SimulatedHost:
    """The host in `folder`. As a context manager it is created at entry and ended at exit."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self.gpus = GpuState(self.folder / "state")

    def __enter__(self) -> SimulatedHost:
        return self.create()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # The host itself

    def create(self, gpus: int = 8, minors: Sequence[int] | None = None, scenario: str = "") -> SimulatedHost:
        """Make the folder anew; what ran in it is ended. Raises `HostError` when the folder is somebody else's."""
        # `make` builds the library before there is a host.
        if self.folder.exists() and any(entry.name != "lib" for entry in self.folder.iterdir()):
            if not (self.folder / "host.json").is_file():
                raise HostError(f"{self.folder} is not empty and no simulated host; choose another folder.")
            self.stop()
            for entry in self.folder.iterdir():
                if entry.name != "lib":
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for name in ("bin", "dev", "home", "shm", "logs", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "host-state").mkdir(mode=0o700)
        description = {"scenario": scenario, "environment": self.reset_environment()}
        (self.folder / "host.json").write_text(json.dumps(description, indent=1) + "\n")
        self.gpus.create(gpus, minors)
        build(self.folder / "lib")
        (self.folder / "bin" / "nvidia-smi").symlink_to(SIMULATOR / "nvidia_smi")
        for node in [f"nvidia{gpu.minor}" for gpu in self.gpus.gpus()] + ["nvidiactl", "nvidia-uvm"]:
            # One page, so that it can be mapped as the real node is.
            (self.folder / "dev" / node).write_bytes(bytes(4096))
        (self.folder / "dev" / "nvidia-caps").mkdir()
        return self

    @property
    def scenario(self) -> str:
        """The scenario it was started with; '' if none. Raises `HostError` where there is no host."""
        try:
            return str(json.loads((self.folder / "host.json").read_text())["scenario"])
        except OSError:
            hint = "start one: python -m simulator start"
            raise HostError(f"There is no simulated host in {self.folder}; {hint}") from None

    def parameters(self, spec: Mapping[str, Mapping[str, Any]], **given: Any) -> dict[str, Any]:
        """The parameters of a module with this argument spec, for a call that keeps to this host."""
        own = {
            "own_processes_only": True,
            "scope_folder": str(self.folder),
            "device_folder": str(self.folder / "dev"),
            "shm_folder": str(self.folder / "shm"),
            "state_folder": str(self.folder / "host-state"),
            "lock_folders": [str(self.folder / "home" / ".cache" / "torch_extensions")],
        }
        return {name: own.get(name, option.get("default")) for name, option in spec.items()} | given

    def reset_environment(self) -> dict[str, str]:
        """What a program needs in its environment to see the simulated GPUs."""
        return {
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "GPU_SIMULATOR_STATE": str(self.folder / "state"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    def environment(self) -> dict[str, str]:
        """The environment of a process on the host."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "ANSIBLE_"))}
        return {
            **own,
            **self.reset_environment(),
            MARKER: str(self.folder),
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(STANDIN),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SGLANG_STANDIN_DEVICE_FOLDER": str(self.folder / "dev"),
            "SGLANG_STANDIN_SHM_FOLDER": str(self.folder / "shm"),
        }

    # Processes

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        own_session: bool = True,
        folder: Path | None = None,
    ) -> Started:
        """Start a process that is nobody's child, so that pid 1 reaps it; `folder` is inside the host's."""
        log = self.folder / "logs" / f"{name}.log"
        done = subprocess.run(
            ["sh", "-c", LAUNCH if own_session else LAUNCH_SHARED, "sh", str(log), *command],
            cwd=folder or self.folder / "home",
            env={**self.environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            check=True,
            start_new_session=True,
        )
        pid = int(done.stdout)
        ticks = start_ticks(pid)
        started = Started(pid, ticks if ticks is not None else -1, name, log)
        with (self.folder / "started.tsv").open("a") as file:
            file.write(f"{pid}\t{started.start_ticks}\t{name}\n")
        return started

    def start_server(
        self,
        name: str = "sglang",
        gpus: Sequence[int] = tuple(range(8)),
        tp: int | None = None,
        *,
        eagle3: bool = True,
        port: int | None = None,
        arguments: Sequence[str] = (),
        console_script: bool = False,
        own_session: bool = True,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> Server:
        """Start a stand-in server and return at once. `settings` are the stand-in's, in lower case: speed=10, fail=...

        `gpus` are NVML indices in a row (--base-gpu-id) or any others (CUDA_VISIBLE_DEVICES); `tp` is their number.
        """
        port = port or free_port()
        variables = {f"SGLANG_STANDIN_{key.upper()}": _setting(value) for key, value in settings.items()}
        size = tp or len(gpus)
        command = [python, "-m", "sglang.launch_server"]
        if console_script:
            command = [python, str(STANDIN / "bin" / "sglang"), "serve"]
        command += ["--model-path", "/models/Kimi-K2.5", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--tp-size", str(size), "--trust-remote-code", "--enable-metrics"]
        if list(gpus) == list(range(gpus[0], gpus[0] + len(gpus))):
            command += ["--base-gpu-id", str(gpus[0])] if gpus[0] else []
        else:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        if eagle3:
            command += ["--speculative-algorithm", "EAGLE3"]
            command += ["--speculative-draft-model-path", "/models/kimi-k2.5-eagle3", "--speculative-num-steps", "3"]
            command += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
        variables.update(environment or {})
        started = self.start(name, [*command, *arguments], variables, own_session=own_session)
        return Server(self, started, port)

    def start_vllm(self, gpus: Sequence[int] = (0,), **settings: object) -> Server:
        """Start a vLLM stand-in on these GPUs and wait until it answers; its workers outlive a killed main."""
        port = free_port()
        variables = {f"SGLANG_STANDIN_{key.upper()}": _setting(value) for key, value in settings.items()}
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        command = [sys.executable, str(STANDIN / "bin" / "vllm"), "serve", "/models/Kimi-K2.5"]
        command += ["--tensor-parallel-size", str(len(gpus)), "--port", str(port)]
        server = Server(self, self.start("vllm", command, variables), port)
        wait_for(lambda: server.request("/health", timeout=1)[0] == 200, "the vLLM server", 30)
        return server

    def start_data_job(self, *, orphan_child: bool = False) -> Started:
        """A CPU-only Python job; with `orphan_child` only its orphaned spawn child goes on, and is what is returned."""
        name = "data-job-orphan" if orphan_child else "data-job"
        script = self._script("data_job.py")
        started = self.start(name, [sys.executable, script, *(["--orphan-child"] if orphan_child else [])])
        wait_for(lambda: started.log.read_text().strip(), f"the child of {name}", 20)
        if not orphan_child:
            return started
        child = int(started.log.read_text().split()[0])
        ticks = start_ticks(child)
        if ticks is None:
            raise HostError(f"The child {child} of the data job did not survive its parent.")
        return Started(child, ticks, name, started.log)

    def start_training_job(self, gpu: int = 5, mib: int = 20000, *, engine: bool = False) -> Started:
        """A training job that holds a GPU; with `engine` it has a child titled sglang::scheduler."""
        command = [sys.executable, self._script("train_draft.py"), "--gpu", str(gpu), "--mib", str(mib)]
        started = self.start("training", command + (["--engine"] if engine else []))
        wait_for(lambda: "ready" in started.log.read_text() or not started.alive(), "the training job", 20)
        return started

    def start_monitor(self, name: str = "nvidia-persistenced", gpu: int = 0, mib: int = 0) -> Started:
        """A process with a protected executable name that holds every device node, and memory if asked."""
        command = [sys.executable, self._script("monitor.py"), name, "--tools", str(self.folder / "bin")]
        started = self.start(name, [*command, "--gpu", str(gpu), "--mib", str(mib)])
        program = str(self.folder / "bin" / name)
        wait_for(lambda: _read_link(started.pid, "exe") == program or not started.alive(), name, 20)
        return started

    def start_bench_client(self, server: Server) -> Started:
        """A client with one request at the server; returns when that was sent."""
        base = f"http://127.0.0.1:{server.port}"
        started = self.start("bench", [sys.executable, "-m", "sglang.bench_serving", "--base-url", base])
        wait_for(lambda: "request sent" in started.log.read_text(), "the benchmark client", 20)
        return started

    def start_router(self) -> Started:
        """SGLang's router."""
        return self.start("router", [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", "http://x"])

    def start_onlookers(self) -> list[Started]:
        """A tail of a server's log and a shell, which merely mention sglang."""
        log = self.folder / "logs" / "sglang.log"
        log.touch()
        loop = "while :; do sleep 1000; done # restart python -m sglang.launch_server by hand"
        return [self.start("tail", ["tail", "-f", str(log)]), self.start("shell", ["sh", "-c", loop])]

    def _script(self, name: str) -> str:
        return str(SIMULATOR / "bystanders" / name)

    def started(self) -> list[Started]:
        """What was started here and still runs."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "started.tsv").read_text().splitlines():
                pid, ticks, name = line.split("\t")
                found.append(Started(int(pid), int(ticks), name, self.folder / "logs" / f"{name}.log"))
        return [started for started in found if started.alive()]

    def processes(self) -> dict[int, str]:
        """Command line by pid of every process of this host: started here, below such a one, or marked as ours."""
        sessions = set()
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "started.tsv").read_text().splitlines()
            sessions = {int(line.split("\t")[0]) for line in lines}
        known = {started.pid for started in self.started()}
        found = {}
        for pid, fields, line in _everyone():
            inside = _inside(_read_link(pid, "cwd"), self.folder)
            marked = f"{MARKER}={self.folder}".encode() in _environ(pid)
            if pid in known or marked or (inside and int(fields[3]) in sessions):
                found[pid] = line
        found.pop(os.getpid(), None)
        return found

    def switch_off(self) -> list[int]:
        """Stop it, and take its GPUs away, so that a reset finds no host any more."""
        ended = self.stop()
        (self.folder / "state" / "gpus.tsv").unlink(missing_ok=True)
        return ended

    def stop(self, seconds: float = 10) -> list[int]:
        """End every process of this host; returns their pids. Raises `HostError` when one does not end."""
        ended: list[int] = []
        deadline = time.monotonic() + seconds
        while found := self.processes():
            if time.monotonic() > deadline:
                raise HostError(f"These processes of {self.folder} do not end: {found}")
            for pid in found:
                ticks = start_ticks(pid)
                if ticks is not None:
                    send_signal(pid, ticks, signal.SIGKILL)
                    ended.append(pid)
            time.sleep(0.02)
        return sorted(set(ended))


# Small helpers


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Look every 20 ms until it holds. Raises `HostError` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise HostError(f"Waited {seconds:g} s in vain for {what}.")
        time.sleep(0.02)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot; None when it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def send_signal(pid: int, ticks: int, number: int) -> bool:
    """Send a signal through a pidfd opened before the start time is checked; False when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def wait_gone(pids: Iterable[int], seconds: float) -> None:
    """Wait until all these processes are gone. Raises `HostError`."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([handle], [], [], left)[0]:
                raise HostError(f"Process {pid} is still there after {seconds:g} s.")
        finally:
            os.close(handle)


def session_processes(session: int) -> dict[int, str]:
    """Command line by pid of the living processes of a session."""
    return {pid: line for pid, fields, line in _everyone() if int(fields[3]) == session}


def _everyone() -> list[tuple[int, list[str], str]]:
    """Pid, /proc stat fields from the state on, and command line of every process that is no zombie."""
    found = []
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else None
        if fields and fields[0] not in ("Z", "X"):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append((int(name), fields, line))
    return found


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read_link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _inside(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}{os.sep}")


def _setting(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
