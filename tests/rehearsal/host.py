"""The rehearsal's host: a working folder of this machine with a simulated GPU, where real SGLang runs on the CPU.

Made from simulator.host, of which it takes the folder, the NVML double and the look at processes, not the stand-in.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from gpu_host import arguments

from simulator.host import MARKER, READY, SimulatedHost, Started, start_ticks
from tests.rehearsal import environment

INVENTORY = environment.HERE / "inventory" / "hosts.yml"
RESET_MODULE = "import json, sys; from gpu_host import reset; print(json.dumps(reset.run(json.load(sys.stdin))))"
SHARED_MEMORY = Path("/dev/shm")
GPU_MIB = 1200
"""What a scheduler takes of the simulated GPU."""


@dataclass(frozen=True)
class Left:
    """What is there of a server: command lines by pid, MiB of the simulated GPU, whether its port is listened on."""

    processes: dict[int, str] = field(default_factory=dict)
    mib: int = 0
    listens: bool = False

    def __bool__(self) -> bool:
        return bool(self.processes or self.mib or self.listens)


@dataclass(frozen=True)
class Played:
    """A playbook that ran: its exit status, what it printed, and how long it took (seconds)."""

    status: int
    text: str
    seconds: float


class RehearsalHost:
    """A host in `folder` with one server on `port`; as a context manager it is made at entry and ended at exit."""

    def __init__(self, folder: Path, models: Path, name: str = "rehearsal", compiled: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.models = models
        self.name = name
        # What torch compiles in a first start (a minute); empty in the host's own folder.
        self.compiled = compiled or environment.COMPILED
        self.port = free_port()
        self.semaphores: set[str] = set()
        self.simulated = SimulatedHost(self.folder)

    def __enter__(self) -> RehearsalHost:
        self.simulated.create(gpus=1)
        return self

    def __exit__(self, *_error: object) -> None:
        self.left()
        self.simulated.stop()
        # A killed server leaves Python's own semaphores of 32 bytes. Their names tell no owner, so a reset leaves them.
        for name in self.semaphores:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
        # SGLang names these at random; the folder's end is the end of all that had them open.
        shutil.rmtree(self.folder, ignore_errors=True)

    # What a server runs with

    def server_environment(self, amx: bool = True) -> dict[str, str]:
        """What makes real SGLang run here (kit/sitecustomize.py), and keeps what it leaves inside the folder."""
        return {
            "PYTHONPATH": str(environment.KIT),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # so small a model is slower on more
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.compiled),
            "GPU_SIMULATOR_STATE": str(self.folder / "state"),
            "REHEARSAL_FOLDER": str(self.folder),
            "REHEARSAL_GPU_MIB": str(GPU_MIB),
            "REHEARSAL_AMX": str(int(amx)),
            MARKER: str(self.folder),
        }

    def command(self, *arguments: str) -> list[str]:
        """The command line of a baseline server."""
        command = [str(environment.PYTHON), "-m", "sglang.launch_server", "--model-path", str(self.models / "target")]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--enable-metrics"]
        return [*command, "--max-total-tokens", "16384", "--max-running-requests", "8", *arguments]

    def drafter_arguments(self) -> list[str]:
        words = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.models / "drafter")]
        words += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        return [*words, "--speculative-num-draft-tokens", "4"]

    def start(self, *arguments: str, amx: bool = True) -> Started:
        """Start a server by hand, as an engineer does: nobody's child, in a session of its own."""
        variables = {"PATH": f"{environment.VENV}/bin:{os.defpath}", **self.server_environment(amx)}
        return self.simulated.start(self.name, self.command(*arguments), variables, folder=self.folder)

    # Ansible

    def play(self, playbook: str, *arguments: str, amx: bool = True, variables: dict[str, Any] | None = None) -> Played:
        """Run playbooks/<playbook> against this host, as a person would."""
        began = time.monotonic()
        extra = ["-e", json.dumps(variables)] if variables else []
        done = subprocess.run(
            ["ansible-playbook", "-i", str(INVENTORY), f"playbooks/{playbook}", *arguments, *extra],
            cwd=environment.ROOT,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                "REHEARSAL_FOLDER": str(self.folder),
                "REHEARSAL_MODELS": str(self.models),
                "REHEARSAL_NAME": self.name,
                "REHEARSAL_PYTHON": str(environment.PYTHON),
                "REHEARSAL_PORT": str(self.port),
                "REHEARSAL_ENVIRONMENT": json.dumps(self.server_environment(amx)),
                "GPU_ARTIFACTS": str(self.artifacts),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return Played(done.returncode, done.stdout, round(time.monotonic() - began, 1))

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    def records(self) -> list[dict[str, Any]]:
        """The run records of this host's resets by playbook, oldest first."""
        try:
            return [json.loads(line) for line in (self.artifacts / "resets.jsonl").read_text().splitlines()]
        except OSError:
            return []

    def reset(self) -> dict[str, Any]:
        """The reset without Ansible: its one call, in a Python of its own. Returns the run record."""
        parameters = json.dumps(self.reset_parameters())
        done = subprocess.run(
            [sys.executable, "-c", RESET_MODULE],
            input=parameters,
            env={
                **os.environ,
                **self.simulated.reset_environment(),
                "PYTHONPATH": str(environment.ROOT / "module_utils"),
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    def reset_parameters(self) -> dict[str, Any]:
        given = {
            "own_processes_only": True,
            "scope_folder": str(self.folder),
            "device_folder": str(self.folder / "dev"),
            "state_folder": str(self.folder / "host-state"),
            "ports": [self.port],
            "run_id": f"rehearsal-{time.monotonic_ns()}",
        }
        parameters: dict[str, Any] = ArgumentSpecValidator(arguments.GPU_RESET).validate(given).validated_parameters
        return parameters

    # What is there

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ready(self) -> bool:
        return READY in self.log_text()

    @contextlib.contextmanager
    def watched(self, seconds: float = 3) -> Iterator[None]:
        """Looks every so often at what is there, for a play that starts and ends servers: their semaphores are told
        only while they live."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(seconds):
                self.left()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def left(self) -> Left:
        owners = self.simulated.gpus.owners(0) if (self.folder / "state").exists() else {}
        processes = self.simulated.processes()
        self.semaphores |= semaphores(processes)
        return Left(processes, sum(owners.values()), listens(self.port))


def free_port() -> int:
    """A port of the loopback interface that nobody uses now, below those of outgoing connections."""
    for port in random.sample(range(21000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise environment.NotReady("There is no free port between 21000 and 32000.")


def listens(port: int) -> bool:
    """Whether a TCP socket of this machine listens on the port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False


def semaphores(pids: Iterable[int]) -> set[str]:
    """Names of Python's semaphores that these processes have mapped: told by inode, since they are mapped under a name
    that the C library removed right after."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            inodes.update(int(number) for number in re.findall(r" (\d+) +/dev/shm/sem\.", maps))
    found = set()
    for path in SHARED_MEMORY.glob("sem.mp-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in inodes:
                found.add(path.name)
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm that servers leave."""
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return {name for name in names if name.startswith(("sglang_loads_", "sgl_shm_", "sem.loky-", "torch_"))}


def alive(started: Started) -> bool:
    return start_ticks(started.pid) == started.start_ticks


def titles(left: Left) -> Sequence[str]:
    """What kinds of processes these are, for people and plots."""
    known = (
        "sglang::scheduler",
        "sglang::detokenizer",
        "multiprocessing.spawn",
        "multiprocessing.resource_tracker",
        "sglang.launch_server",
        "cc1plus",
        "g++",
    )
    lines = [line or "no command line" for line in left.processes.values()]
    return sorted(next((name for name in known if name in line), line[:40]) for line in lines)
