"""Starting servers: SGLang itself and the torch server, by hand as people do."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import procs

HERE = Path(__file__).resolve().parent.parent

# As measured to work with sglang 0.5.17 on a GPU without a network: Triton attention, PyTorch sampling.
SGLANG_ARGUMENTS = shlex.split(
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.2 "
    "--max-total-tokens 16384 --max-running-requests 4 --chunked-prefill-size 512 --cuda-graph-max-bs-decode 4 "
    "--disable-custom-all-reduce --enable-metrics --host 127.0.0.1"
)
EAGLE3_ARGUMENTS = shlex.split(
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
# NVLink multicast can put shared GPUs out of service; these stay off whatever the caller's environment says.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass
class Bundle:
    """Where SGLang, the tiny models and the caches lie (what setup.sh unpacks)."""

    root: Path
    python: str = sys.executable

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def ready(self) -> bool:
        return (self.root / "site.ready").exists()


@dataclass
class Server:
    """A server that the session started. `main` names its main process by pid and start time."""

    name: str
    port: int
    log: Path
    main: tuple[int, int]
    bystanders: dict[str, tuple[int, int]] = field(default_factory=dict)
    heartbeat: Path | None = None
    terminal: subprocess.Popen[str] | None = None  # the shell it was typed into


def base_environment(mark: str) -> dict[str, str]:
    return {**os.environ, **MULTICAST_OFF, procs.MARK: mark, "PYTHONUNBUFFERED": "1"}


def sglang_command(bundle: Bundle, port: int, *, eagle3: bool, tp: int, gpu: int) -> list[str]:
    command = [
        bundle.python,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(bundle.models / "tiny_w"),
        "--port",
        str(port),
        "--tp-size",
        str(tp),
        "--base-gpu-id",
        str(gpu),
        *SGLANG_ARGUMENTS,
    ]
    if eagle3:
        command += [*EAGLE3_ARGUMENTS, "--speculative-draft-model-path", str(bundle.models / "draft")]
    return command


def sglang_environment(bundle: Bundle, mark: str, home: Path) -> dict[str, str]:
    values = {
        **base_environment(mark),
        "PYTHONPATH": str(bundle.site),
        "HOME": str(home),
        "PYTHONPYCACHEPREFIX": str(bundle.root / "pyc"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda-13.0"),
    }
    # A first import writes the bytecode that the next start saves seconds with.
    values.pop("PYTHONDONTWRITEBYTECODE", None)
    return values


def torch_command(python: str, port: int, heartbeat: Path, *more: str) -> list[str]:
    return [python, "-m", "sglang.launch_server", "--port", str(port), "--heartbeat", str(heartbeat), *more]


def torch_environment(bundle: Bundle, mark: str) -> dict[str, str]:
    tools = bundle.root / "tools"  # setproctitle, where setup.sh put it
    path = [str(HERE / "torch_server"), *([str(tools)] if tools.exists() else []), os.environ.get("PYTHONPATH", "")]
    # Blank environments are another test's case: setproctitle leaves this one readable.
    return {
        **base_environment(mark),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SPT_NOENV": "1",
    }


def _found(name: str, pid: int, log: Path) -> procs.Facts:
    facts = procs.read_facts(pid)
    if facts is None:
        raise RuntimeError(f"{name}: the process {pid} was gone at once, see {log}")
    return facts


def start(
    tracker: procs.Tracker,
    name: str,
    command: list[str],
    environment: dict[str, str],
    port: int,
    log: Path,
    heartbeat: Path | None = None,
) -> Server:
    """Detached, as `setsid nohup SERVER &` of a login that has ended: no parent but the machine's init."""
    script = 'log=$1; shift; setsid nohup "$@" >>"$log" 2>&1 </dev/null & echo $!'
    done = subprocess.run(
        ["bash", "-c", script, "start", str(log), *command],
        env=environment,
        cwd=log.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    main = _found(name, int(done.stdout), log)
    tracker.add(name, main.key)
    return Server(name, port, log, main.key, heartbeat=heartbeat)


def start_from_shell(
    tracker: procs.Tracker,
    name: str,
    command: list[str],
    environment: dict[str, str],
    port: int,
    log: Path,
    job: list[str],
) -> Server:
    """As a person does over ssh: `nohup SERVER &`, typed into a shell that goes on with a data job of its own.

    Shell, job and server share one session and one process group. Shell and job are bystanders.
    """
    pid_file = log.with_suffix(".pids")
    # The mark is the server's alone: the job and the shell must not look like a part of it.
    plain = {key: value for key, value in environment.items() if key != procs.MARK}
    shell = subprocess.Popen(
        ["bash"],
        env=plain,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=log.parent,
        start_new_session=True,
        text=True,
    )
    threading.Thread(target=shell.wait, daemon=True).start()
    typed = [
        f"{procs.MARK}={name} nohup {shlex.join(command)} >>{log} 2>&1 </dev/null & echo $! >{pid_file}",
        f"{shlex.join(job)} </dev/null & echo $! >>{pid_file}",
    ]
    assert shell.stdin is not None
    shell.stdin.write("".join(line + "\n" for line in typed))
    shell.stdin.flush()

    def started() -> bool:
        return pid_file.exists() and len(pid_file.read_text().split()) == 2

    if not procs.wait_until(started, 5):
        raise RuntimeError(f"{name}: the shell {shell.pid} did not start the server, see {log}")
    main, worker, parent = (_found(name, pid, log) for pid in (*map(int, pid_file.read_text().split()), shell.pid))
    tracker.add(name, main.key)
    bystanders = {"shell that started it": parent.key, "job of that shell": worker.key}
    return Server(name, port, log, main.key, bystanders, terminal=shell)


def ask(port: int, path: str, body: dict[str, Any] | None = None, seconds: float = 5) -> tuple[int, str]:
    """Status and body of one request on loopback; status 0 and the reason when there was no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request(
            "POST" if body is not None else "GET",
            path,
            None if body is None else json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def generate(port: int, seconds: float = 30, tokens: int = 32) -> tuple[int, str]:
    """One short completion."""
    return ask(
        port,
        "/generate",
        {
            "text": "Hello world, how are",
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        },
        seconds,
    )


def generate_in_background(port: int, seconds: float = 120) -> threading.Thread:
    """A request that may never be answered."""
    waiting = threading.Thread(target=generate, args=(port, seconds, 512), daemon=True)
    waiting.start()
    return waiting


def wait_ready(server: Server, seconds: float) -> bool:
    """Health 200 within `seconds`; False at once when the main died."""
    result = {"status": 0}

    def done() -> bool:
        result["status"] = ask(server.port, "/health")[0]
        return result["status"] == 200 or not procs.is_alive(server.main)

    procs.wait_until(done, seconds, 0.3)
    return result["status"] == 200


def beat(path: Path) -> int:
    """A heartbeat file's count; -1 when it is not there or is being written."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def beats_on(path: Path, seconds: float = 5) -> bool:
    """Whether the count grows within `seconds`."""
    before = beat(path)
    return procs.wait_until(lambda: beat(path) > before >= 0 or (before < 0 < beat(path)), seconds)
