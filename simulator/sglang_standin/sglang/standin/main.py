"""The server's main process: starts the workers, waits for them, serves, drains, and ends the tree."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from . import arguments as args
from . import device, hosts
from .detokenizer import run_controller_process, run_detokenizer_process
from .log import Log, raw
from .scheduler import recorded_failure, run_scheduler_process
from .settings import Settings

ARGUMENT_FAILURES = (
    "topk-missing",
    "steps-missing-topk-given",
    "kernel-package-missing",
    "common-ops-cannot-load-libcuda",
)


def run(argv: list[str], program: str) -> int:
    """Start the server and serve until it ends; returns the exit status where it does not kill itself."""
    settings = Settings()
    log = Log()
    if settings.ignore_term:
        # A handler, not SIG_IGN, which children would inherit.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
    if program == "launch_server.py":
        raw(
            "/opt/sglang/lib/sglang/launch_server.py:56: UserWarning: 'python -m sglang.launch_server' is still "
            "supported, but 'sglang serve' is the recommended entrypoint.\n"
            "  Example: sglang serve --model-path <model> [options]\n  warnings.warn(\n"
        )
    try:
        arguments = args.parse(argv, settings.version)
    except args.Refused as refused:
        raw(f"usage: {program} [-h] --model-path MODEL_PATH ...\n{program}: error: {refused}\n")
        return 2
    failure = args.refusal(arguments) or (settings.fail if settings.fail in ARGUMENT_FAILURES else "")
    if failure:
        log.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=False, pid={os.getpid()}")
        raw(recorded_failure(failure))
        return 1
    args.fill_speculation(arguments)
    if arguments["nnodes"] == 1:
        _cuda_ipc(log)
    log.line("Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit")
    log.line(args.described(arguments, settings.version))
    log.line("Using default HuggingFace chat template with detected content format: string")
    if not settings.no_gpu:
        device.open_nodes(settings.device_folder)
    return Server(arguments, settings, log).run(argv)


def _cuda_ipc(log: Log) -> None:
    """What a server of one host says of its features' way to the schedulers."""
    log.line(
        "Multimodal feature transport auto-resolved to cuda_ipc (single-node CUDA). "
        "Pass --mm-feature-transport=cpu to opt out."
    )
    log.line(
        "Using CUDA IPC for multimodal features: reserving up to 1024 MiB on base GPU 0 across 1 tokenizer worker(s). "
        "This reduces KV cache headroom; a full pool falls back to CPU transport."
    )
    log.line(
        "CUDA IPC pool-handle caching is enabled. It reuses mappings to the existing bounded pool without reserving "
        "another pool; set SGLANG_USE_IPC_POOL_HANDLE_CACHE=0 to disable it."
    )


class Server:
    """The tree and its state."""

    def __init__(self, arguments: dict[str, Any], settings: Settings, log: Log) -> None:
        self.arguments, self.settings, self.log = arguments, settings, log
        self.model = args.Model(arguments, settings.max_context)
        self.schedulers: list[BaseProcess] = []
        self.started_at = time.monotonic()
        self.phase = "launch"

    def run(self, argv: list[str]) -> int:
        """Start everything and serve."""
        os.environ["SGLANG_RUN_ID"] = f"sglang-run-{time.time()}-{random.randint(0, 100000000)}"
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        signal.signal(signal.SIGQUIT, self._on_sigquit)
        ready, frontend = self._spawn()
        infos = self._wait_for_schedulers(ready)
        if infos is None:
            kill_process_tree(self.log, include_parent=False)
            raw("Traceback (most recent call last):\nEOFError\n")
            # A multiprocessing parent would wait for its children here; they are killed already.
            os._exit(1)
        self._leave_shared_memory()
        if self.arguments["node_rank"] >= 1:
            return hosts.follow(self)
        from .web import serve

        startup = {**infos[0]["startup_time"], "tokenizer_e2e": time.monotonic() - self.started_at}
        graphs = ", ".join(f"{name}={seconds:.2f}" for name, seconds in startup["cuda_graph"].items())
        self.log.line(
            f"Engine startup timings (s): load_weight={startup['load_weight']:.2f}, "
            f"kv_cache_allocation={startup['kv_cache_allocation']:.2f}, scheduler_e2e={startup['scheduler_e2e']:.2f}, "
            f"cuda_graph={{{graphs}}}, tokenizer_e2e={startup['tokenizer_e2e']:.2f}"
        )
        return serve(self, frontend, infos, startup, argv)

    # Start

    def _spawn(self) -> tuple[list[Connection], dict[str, Any]]:
        """One scheduler a rank, then the detokenizer. Returns the ready pipes and what the front end talks through."""
        context = multiprocessing.get_context("spawn")
        tensor, data, first = self.arguments["tp_size"], self.arguments["dp_size"], self.arguments["node_rank"] == 0
        together = self.arguments["nnodes"] > 1
        own = hosts.local_ranks(self.arguments)
        ranks = [(replica, rank) for replica in range(data) for rank in own]
        ready: list[Connection] = []
        frontend: dict[str, Any] = {"requests": [], "control": []}
        detokenizer_inputs: list[Connection] = []
        theirs: list[Connection] = []
        if data > 1:
            context.Process(target=run_controller_process).start()
        for replica in range(data):
            links = [] if together else [context.Pipe() for _ in range(tensor - 1)]
            for rank in own:
                ours, writer = context.Pipe(duplex=False)
                plan = self._plan(replica, rank, writer, last=(replica, rank) == ranks[-1])
                theirs.append(writer)
                if rank == 0:
                    plan["requests"], to_scheduler = context.Pipe(duplex=False)
                    from_scheduler, plan["outputs"] = context.Pipe(duplex=False)
                    control, plan["control"] = context.Pipe(duplex=False)
                    plan["peers"] = [link[0] for link in links]
                    frontend["requests"].append(to_scheduler)
                    frontend["control"].append(control)
                    detokenizer_inputs.append(from_scheduler)
                    theirs += [plan["requests"], plan["outputs"], plan["control"], from_scheduler, *plan["peers"]]
                elif not together:
                    plan["peers"] = [links[rank - 1][1]]
                    theirs += plan["peers"]
                process = context.Process(target=run_scheduler_process, args=(plan,))
                process.start()
                self.schedulers.append(process)
                ready.append(ours)
        if first:
            frontend["outputs"], output = context.Pipe(duplex=False)
            context.Process(target=run_detokenizer_process, args=(detokenizer_inputs, output)).start()
            theirs.append(output)
        # Only the children's copies may stay open, or nobody would see them end.
        for pipe in theirs:
            pipe.close()
        return ready, frontend

    def _plan(self, replica: int, rank: int, writer: Connection, last: bool) -> dict[str, Any]:
        tensor, data = self.arguments["tp_size"], self.arguments["dp_size"]
        prefix = (f" DP{replica}" if data > 1 else "") + (f" TP{rank}" if tensor > 1 else "")
        number = replica * tensor + rank - hosts.local_ranks(self.arguments).start
        return {
            "arguments": self.arguments,
            "model": {
                "architecture": self.model.architecture,
                "draft_architecture": self.model.draft_architecture,
                "context": self.model.context,
                "draft_context": self.model.draft_context,
                "draft_too_short": self.model.draft_too_short(),
                "shards": self.model.shards,
            },
            "main_pid": os.getpid(),
            "tp_rank": rank,
            "dp_rank": replica,
            "ordinal": self.arguments["base_gpu_id"] + number * self.arguments["gpu_id_step"],
            "title": f"sglang::scheduler{prefix.replace(' ', '_')}",
            "rename": self.settings.rename_worker if last else "",
            "prefix": prefix,
            "ready": writer,
            "requests": None,
            "outputs": None,
            "control": None,
            "peers": [],
        }

    def _wait_for_schedulers(self, ready: list[Connection]) -> list[dict[str, Any]] | None:
        infos: list[dict[str, Any]] = []
        for rank, pipe in enumerate(ready):
            try:
                infos.append(pipe.recv())
            except EOFError:
                number = hosts.local_ranks(self.arguments).start + rank
                self.log.line(f"Rank {number} scheduler is dead. Please check if there are relevant logs.")
                self.schedulers[rank].join()
                self.log.line(f"Exit code: {self.schedulers[rank].exitcode}")
                return None
        return infos

    def _leave_shared_memory(self) -> None:
        if self.settings.shm_folder:
            name = f"sglang_loads_{random.getrandbits(32):08x}_{random.getrandbits(32):08x}.shm"
            (Path(self.settings.shm_folder) / name).write_bytes(bytes(4096))

    # End

    def _on_sigquit(self, signum: int, frame: object) -> None:
        """A worker failed. While serving, the main thread is in here: nothing is answered any more."""
        if self.phase == "launch":
            self.log.line("Received sigquit from a child process. It usually means the child failed.")
        else:
            self.log.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            self.crash_diagnostics()
        kill_process_tree(self.log, include_parent=True)

    def crash_diagnostics(self) -> None:
        """What a dying main does before it goes (dump_requests_before_crash): as long as a scheduler lives, more than a
        minute, in which the schedulers keep their GPUs."""
        log, seconds = self.log, self.settings.crash_seconds
        log.line(f"Sleeping {seconds:g} seconds before crash diagnostics to let GPU activity settle.")
        time.sleep(seconds)
        alive = [process.pid for process in self.schedulers if process.is_alive()]
        if not alive:
            log.line("No live scheduler processes found; skipping py-spy and CUDA coredump.")
            return
        for pid in alive:
            for command in (f"py-spy dump --native --pid {pid}", f"py-spy dump  --pid {pid}"):
                done = subprocess.run(command, shell=True, capture_output=True, text=True)
                if done.returncode == 0:
                    log.line(f"Pyspy dump for PID {pid} ({command}):\n{done.stdout}")
                    break
                log.line(f"Pyspy failed ({command}). Error: {done.stderr}")
            else:
                log.line(f"All pyspy dump attempts failed for PID {pid}.")
        hint = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1"
        log.line(f"CUDA user-triggered coredump is not enabled. Set {hint} before CUDA initialization.")
        for pid in alive:
            pipe = os.path.join(os.getcwd(), f"corepipe.cuda.{platform.node()}.{pid}")
            log.line(
                f"CUDA coredump pipe not found for PID {pid}: {pipe}. Ensure {hint} was set before this process "
                "initialized CUDA."
            )
        log.line(f"Waiting {self.settings.coredump_seconds:.1f} seconds for CUDA coredumps before exiting.")
        time.sleep(self.settings.coredump_seconds)

    def watch_workers(self) -> threading.Event:
        """Look for dead workers from now on; the event stops it."""
        stop = threading.Event()
        names = [f"scheduler_{number}" for number in range(len(self.schedulers))]

        def watch() -> None:
            while not stop.wait(self.settings.watch_seconds):
                for name, process in zip(names, self.schedulers):
                    if not process.is_alive() and process.exitcode != 0:
                        self.log.line(
                            f"Subprocess {name} (pid={process.pid}) crashed with exit code {process.exitcode}. "
                            "Triggering SIGQUIT for cleanup..."
                        )
                        os.kill(os.getpid(), signal.SIGQUIT)
                        return

        threading.Thread(target=watch, daemon=True, name="subprocess-watchdog").start()
        return stop

    def end_after_drain(self) -> None:
        """Wait for the schedulers' own exit, then end the tree.

        0.5.17 kills everything, itself last; 0.5.23 exits with status 0.
        """
        deadline = time.monotonic() + self.settings.exit_wait_seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in self.schedulers):
            time.sleep(0.02)
        if self.settings.version == "0.5.17":
            kill_process_tree(self.log, include_parent=True)
        for text in (
            "Shutting down",
            "Waiting for application shutdown.",
            "Application shutdown complete.",
            f"Finished server process [{os.getpid()}]",
        ):
            self.log.line(f"INFO:     {text}")
        kill_process_tree(self.log, include_parent=False)
        os._exit(0)


def kill_process_tree(log: Log, include_parent: bool) -> None:
    """SIGKILL for all descendants, then, if asked, for this process itself."""
    log.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent={include_parent}, pid={os.getpid()}")
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if include_parent:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)  # reached by a container's first process only, which can't kill itself


def descendants(root: int) -> list[int]:
    """Pids below a process, parents first."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = list(parents.get(root, []))
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(parents.get(pid, []))
    return found
