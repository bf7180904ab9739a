"""One scheduler: takes its GPU phase by phase, then turns requests into tokens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import child, device, hosts
from .log import Log, raw
from .settings import Settings

GIB = 1024
DECODE_LOG_INTERVAL = 40
PREFILL_SIZES = [4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256]
GRAPHS = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
ACCEPT_LENGTHS = {1: 1.83, 2: 2.43, 3: 2.88, 4: 3.24, 5: 3.46}
"""Published for Kimi-K2.5 with EAGLE-3, by drafted tokens."""


def run_scheduler_process(plan: dict[str, Any]) -> None:
    """The target of a scheduler's process.

    `plan`: arguments, model (dict), main_pid, tp_rank, dp_rank, ordinal (CUDA's), title, prefix, and the pipes
    ready, requests, outputs, control (rank 0 of a replica), peers (rank 0: to the others; others: one, to rank 0).
    """
    settings = Settings()
    child.begin(settings, plan["title"])
    if plan["rename"]:
        child.set_title(plan["rename"], settings.blank_environ)
    log = Log(plan["prefix"])
    startup = Startup(plan, settings, log)
    try:
        info = startup.run()
        if os.getppid() != plan["main_pid"]:
            time.sleep(max(0.0, startup.taken_at + settings.orphan_seconds - time.monotonic()))
        plan["ready"].send(info)
    except Failed as failed:
        log.line(failed.text.rstrip("\n") + "\n")
        _tell_main(plan["main_pid"])
        sys.exit(1)
    except BrokenPipeError:
        log.line((Path(__file__).parent / "failures" / "broken-pipe.log").read_text().rstrip("\n") + "\n")
        _tell_main(plan["main_pid"])
        _nccl_warning(plan["tp_rank"])
        sys.exit(1)
    plan["ready"].close()
    try:
        if startup.ranks is not None and plan["tp_rank"]:
            follow_rank_0(startup.ranks)
        elif plan["requests"] is None:
            follow(plan["peers"][0])
        else:
            Engine(plan, settings, log, startup.ranks).run()
    except hosts.Lost as lost:
        log.line(f"Scheduler hit an exception: Traceback (most recent call last):\n{lost}\n")
        _tell_main(plan["main_pid"])
        sys.exit(1)
    if plan["tp_rank"] == 0:
        _nccl_warning(0)
    startup.release()
    os._exit(0)


class Failed(Exception):
    """A start-up failure; `text` is what the log shows."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def _tell_main(main_pid: int) -> None:
    """SIGQUIT for main. The real one signals its parent whoever that is; an orphan here leaves pid 1 alone."""
    if os.getppid() == main_pid:
        os.kill(main_pid, signal.SIGQUIT)


def _nccl_warning(rank: int) -> None:
    now = time.strftime("%m%d %H:%M:%S")
    raw(
        f"[rank{rank}]:[W{now}.000000000 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not "
        "called before program exit, which can leak resources. For more info, please see "
        "https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())\n"
    )


class Startup:
    """The phases from a titled process to a ready scheduler, with the recorded log lines."""

    def __init__(self, plan: dict[str, Any], settings: Settings, log: Log) -> None:
        self.plan = plan
        self.arguments = plan["arguments"]
        self.model = plan["model"]
        self.settings = settings
        self.log = log
        self.taken_at = time.monotonic()
        self.memory: Any = None
        self.mapped: list[Any] = []
        self.held_mib = 0
        self.total_mib = 97887
        self.workers: list[subprocess.Popen[bytes]] = []
        self.seconds = {"load_weight": 0.0, "kv_cache_allocation": 0.0}
        self.ranks: hosts.Ranks | None = None  # of a server over several hosts
        self.graphs: dict[str, float] = {}
        self.graph_gb: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """All phases; returns what main learns from a ready scheduler. Raises `Failed`."""
        began = time.monotonic()
        settings, speculative = self.settings, bool(self.arguments["speculative_algorithm"])
        self._take_gpu()
        self._distributed(settings.init_seconds, "0.09")
        self.log.line("Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'")
        self._weights(settings.load_seconds, self.model["architecture"], 0.62, self.model["shards"], "weights")
        if speculative:
            self._draft()
        self._pools(speculative)
        for number, name in enumerate(self._captures(speculative)):
            self._capture(name, number, len(self._captures(speculative)))
        self._hang_after("capture")
        tokens = self.arguments["max_total_tokens"] or 700000
        running = self.arguments["max_running_requests"] or 2048
        if self.plan["tp_rank"] == 0:
            self.log.line(
                f"max_total_num_tokens={tokens}, chunked_prefill_size={self.arguments['chunked_prefill_size']}, "
                f"max_prefill_tokens={self.arguments['max_prefill_tokens']}, max_running_requests={running}, "
                f"context_len={self.model['context']}, available_gpu_mem={self._free()} GB"
            )
            self.log.line(
                "Tree cache initialized: source=default impl=RadixCache hybrid_swa=False hybrid_ssm=False "
                "hierarchical=False streaming_wrapped=False"
            )
        return {
            "status": "ready",
            "max_total_num_tokens": tokens,
            "max_req_input_len": min(self.model["context"], tokens) - 6,
            "startup_time": {
                **self.seconds,
                "scheduler_e2e": time.monotonic() - began,
                "cuda_graph": {name: self.graphs.get(name, 0.0) for name in GRAPHS},
            },
            "memory_usage": {
                "weight": round(self.settings.memory_mib * 0.62 / GIB, 3),
                "kvcache": round(self.settings.memory_mib * 0.3 / GIB, 3),
                "startup_available": float(self._free()),
                "token_capacity": tokens,
                "token_capacity_swa": None,
                "graph": {name: self.graph_gb.get(name, 0.0) for name in GRAPHS},
            },
        }

    def release(self) -> None:
        """What a scheduler does at a ShutdownReq: give the GPU back, which takes its time."""
        time.sleep(self.settings.release_seconds)
        if self.memory is not None:
            self.memory.close()

    # Phases

    def _take_gpu(self) -> None:
        self.taken_at = time.monotonic()
        if self.settings.no_gpu:
            return
        state = device.gpu_state(self.settings.state_folder)
        try:
            gpu = device.chosen_gpu(state, self.plan["ordinal"])
        except (IndexError, StopIteration):
            raise Failed(
                "Scheduler hit an exception: Traceback (most recent call last):\n"
                "torch.AcceleratorError: CUDA error: invalid device ordinal"
            ) from None
        self.state, self.gpu, self.total_mib = state, gpu, gpu.total_mib - gpu.reserved_mib
        self.mapped = device.open_nodes(self.settings.device_folder, gpu.minor)
        self._hold(min(device.CONTEXT_MIB, self.settings.memory_mib))

    def _hold(self, mib: int) -> None:
        """Take up to so many MiB in all. Raises `Failed` as a full GPU would make it."""
        self.held_mib = max(self.held_mib, mib)
        if self.settings.no_gpu:
            return
        others = sum(size for pid, size in self.state.owners(self.gpu.index).items() if pid != os.getpid())
        if others + mib > self.total_mib:
            raise Failed(
                "Scheduler hit an exception: Traceback (most recent call last):\n"
                f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {mib / GIB:.2f} GiB. GPU "
                f"{self.plan['ordinal']} has a total capacity of {self.total_mib / GIB:.2f} GiB of which "
                f"{(self.total_mib - others) / GIB:.2f} GiB is free."
            )
        if self.memory is None:
            self.memory = self.state.allocate(self.gpu.index, self.held_mib)
        else:
            self.memory.resize(self.held_mib)

    def _free(self) -> str:
        return f"{(self.total_mib - self.held_mib) / GIB:.2f}"

    def _hang_after(self, phase: str) -> None:
        if self.settings.hang_after == phase:
            child.hang()

    def _distributed(self, seconds: float, usage: str) -> None:
        begin, end = "Init torch distributed begin.", "Init torch distributed ends."
        if self.settings.version != "0.5.17":
            begin, end = "Init parallel begin.", "Init parallel ends."
        self.log.line(begin)
        began = time.monotonic()
        time.sleep(seconds)
        if self.arguments["nnodes"] > 1 and self.ranks is None:
            self._meet()
            seconds = time.monotonic() - began
        suffix = f", mem usage={usage} GB" if self.settings.version == "0.5.17" else ""
        self.log.line(f"{end} elapsed={seconds:.2f} s{suffix}")
        if seconds:
            self._hang_after("init")

    def _meet(self) -> None:
        """Wait for the ranks of all hosts."""
        given = self.arguments["dist_timeout"]
        try:
            self.ranks = hosts.Ranks(self.arguments, self.plan["tp_rank"], given or self.settings.meet_seconds)
        except hosts.Lost as lost:
            raise Failed(f"Scheduler hit an exception: Traceback (most recent call last):\n{lost}") from None

    def _weights(self, seconds: float, architecture: str, share: float, shards: int, phase: str) -> None:
        before = self.held_mib
        began = time.monotonic()
        self.log.line(f"Load weight begin. avail mem={self._free()} GB")
        goal = before + int((self.settings.memory_mib - before) * share)
        shows = self.plan["tp_rank"] == 0
        steps = max(1, min(shards, int(seconds / 0.1)))
        if shows:
            raw(f"\nMulti-thread loading shards:   0% Completed | 0/{shards} [00:00<?, ?it/s]\n")
        for step in range(1, steps + 1):
            time.sleep(seconds / steps)
            self._hold(before + (goal - before) * step // steps)
            if shows:
                done = shards * step // steps
                raw(
                    f"Multi-thread loading shards: {100 * done // shards:3d}% Completed | {done}/{shards} "
                    f"[00:{int(time.monotonic() - began):02d}<00:00, {shards / max(seconds, 0.001):.2f}it/s]\n"
                )
        elapsed = time.monotonic() - began
        self.seconds["load_weight"] += elapsed
        self.log.line(
            f"Load weight end. elapsed={elapsed:.2f} s, type={architecture}, avail mem={self._free()} GB, "
            f"mem usage={(self.held_mib - before) / GIB:.2f} GB."
        )
        self._hang_after(phase)
        if self.ranks is not None:
            try:
                self.ranks.all_loaded(hosts.UNBALANCED_SECONDS)
            except hosts.Lost as lost:
                raise Failed(f"Scheduler hit an exception: Traceback (most recent call last):\n{lost}") from None

    def _draft(self) -> None:
        self.log.line("SPECULATIVE_MOE_RUNNER_BACKEND is not initialized, using auto backend")
        self.log.line("SPECULATIVE_MOE_A2A_BACKEND is not initialized, using none backend")
        if self.settings.fail == "draft-context-length-mismatch" or self.model["draft_too_short"]:
            text = recorded_failure("draft-context-length-mismatch")
            if self.model["draft_too_short"]:
                text = text.replace("(2048)", f"({self.model['context']})")
                text = text.replace("(512)", f"({self.model['draft_context']})")
            raise Failed(text)
        self._distributed(0.0, "0.00")
        self._weights(self.settings.draft_seconds, self.model["draft_architecture"], 0.04, 1, "draft")
        if self.settings.fail == "eagle3-unsupported-attention-backend":
            raise Failed(recorded_failure("eagle3-unsupported-attention-backend"))

    def _pools(self, speculative: bool) -> None:
        began = time.monotonic()
        tokens = self.arguments["max_total_tokens"] or 700000
        for number in range(2 if speculative else 1):
            time.sleep(self.settings.pool_seconds / (2 if speculative else 1))
            self._hold(int(self.settings.memory_mib * (0.95 if number == 0 else 0.96)))
            size = f"{self.settings.memory_mib * (0.15 if number == 0 else 0.005) / GIB:.2f}"
            self.log.line(
                f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: {size} GB, V size: {size} GB"
            )
            self.log.line(f"Memory pool end. avail mem={self._free()} GB")
        self.seconds["kv_cache_allocation"] = time.monotonic() - began
        self._hang_after("pool")

    def _captures(self, speculative: bool) -> list[str]:
        if self.arguments["disable_cuda_graph"]:
            return []
        if speculative:
            return ["target prefill", "target verify", "draft prefill", "draft decode", "draft extend"]
        return ["target prefill", "target decode"]

    def _capture(self, name: str, number: int, of: int) -> None:
        began = time.monotonic()
        self.log.line(f"Capture {name} CUDA graph begin. {self._sizes(name)}, avail mem={self._free()} GB")
        if number == 0:
            self._compilers()
        count = len(PREFILL_SIZES) if "prefill" in name else 4
        if self.plan["tp_rank"] == 0:
            raw(f"\n  0%|          | 0/{count} [00:00<?, ?it/s]\n")
        time.sleep(self.settings.capture_seconds / of)
        before = self.held_mib
        self._hold(int(self.settings.memory_mib * (0.96 + 0.04 * (number + 1) / of)))
        elapsed = time.monotonic() - began
        if self.plan["tp_rank"] == 0:
            what = "num tokens (num_tokens=4" if "prefill" in name else "batches (bs=1"
            rate = f"{count / max(elapsed, 0.001):.2f}it/s"
            bar = f"100%|██████████| {count}/{count} [00:00<00:00, {rate}]"
            raw(f"Capturing {what} avail_mem={self._free()} GB): {bar}\n")
        key = name.replace(" ", "_") if name.startswith("draft") or name == "target verify" else name.split()[1]
        self.graphs[key] = elapsed
        self.graph_gb[key] = round((self.held_mib - before) / GIB, 3)
        self.log.line(
            f"Capture {name} CUDA graph end. elapsed={elapsed:.2f} s, "
            f"mem usage={(self.held_mib - before) / GIB:.2f} GB, avail mem={self._free()} GB."
        )
        if self.settings.fail == "eagle3-missing-module-in-draft" and name in ("draft decode", "target decode"):
            raise Failed(recorded_failure("eagle3-missing-module-in-draft"))

    def _sizes(self, name: str) -> str:
        if "prefill" in name:
            return f"backend=breakable, num_tokens={PREFILL_SIZES}"
        tokens = self.arguments["speculative_num_draft_tokens"] if name in ("target verify", "draft extend") else 1
        return f"backend=full, num_tokens_per_req={tokens}, bs=[1, 2, 3, 4]"

    # Children

    def _compilers(self) -> None:
        """Inductor workers with speculation; ninja and nvcc where a kernel must be built first."""
        if self.arguments["speculative_algorithm"] and self.settings.inductor_workers > 0:
            entry = Path(__file__).resolve().parents[2] / "torch" / "_inductor" / "compile_worker" / "__main__.py"
            reader, writer = os.pipe()
            command = [
                sys.executable,
                str(entry),
                "--pickler=torch._inductor.compile_worker.subproc_pool.SubprocPickler",
                "--kind=fork",
                f"--workers={self.settings.inductor_workers - 1}",
                f"--parent={os.getpid()}",
                f"--read-fd={reader}",
                f"--write-fd={writer}",
                "--torch-key=c3RhbmQtaW4=",
            ]
            self.workers.append(subprocess.Popen(command, pass_fds=(reader, writer)))
        if self.settings.jit_seconds > 0 and self.plan["tp_rank"] == 0:
            ninja = start_jit(self.settings.jit_seconds)
            ninja.wait()


def start_jit(seconds: float) -> subprocess.Popen[bytes]:
    """ninja with an nvcc below it, the latter leading a process group of its own, as ninja really starts it.

    Both are copies of `sleep` under those names, which end by themselves after so many seconds.
    """
    folder = os.environ.get("SGLANG_STANDIN_TOOLS") or str(Path.home() / ".cache" / "sglang-standin-tools")
    tools = {name: copied_executable("sleep", Path(folder) / name) for name in ("ninja", "nvcc")}
    code = (
        "import os, sys\n"
        "ninja, nvcc, seconds = sys.argv[1:]\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    os.execv(nvcc, [nvcc, seconds])\n"
        "os.execv(ninja, [ninja, seconds])\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, tools["ninja"], tools["nvcc"], str(seconds)])


def copied_executable(program: str, path: Path) -> str:
    """A copy of a program of this machine under another name; what /proc/<pid>/exe then shows."""
    import shutil

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.copy(os.path.realpath(shutil.which(program) or f"/usr/bin/{program}"), hidden)
        os.replace(hidden, path)
    return str(path)


def recorded_failure(name: str) -> str:
    """What a real server printed when it died of that."""
    return (Path(__file__).parent / "failures" / f"{name}.log").read_text()


def follow(to_first: Connection) -> None:
    """Ranks above 0: take part in rank 0's collectives until it shuts down or is gone."""
    while True:
        try:
            if to_first.recv_bytes() == b"shutdown":
                return
            to_first.send_bytes(b"done")
        except (EOFError, OSError):
            child.hang()


def follow_rank_0(ranks: hosts.Ranks) -> None:
    """The same over several hosts, where the end of a connection is the end of the server."""
    (first,) = ranks.peers
    while ranks.hear(first) != b"shutdown":
        ranks.tell(first, b"done")


class Request:
    """One running request."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.rid: str = message["rid"]
        self.prompt: int = message["prompt_tokens"]
        self.goal: int = message["max_new_tokens"]
        self.done = 0
        self.verified = 0
        self.credit = 0.0


def _no_steps() -> dict[str, float]:
    """Counters of the decode steps since the last log line."""
    return {"steps": 0, "tokens": 0, "verified": 0, "at": time.monotonic()}


class Engine:
    """Rank 0 of a replica: queue, batches, counters."""

    def __init__(self, plan: dict[str, Any], settings: Settings, log: Log, ranks: hosts.Ranks | None = None) -> None:
        self.plan, self.settings, self.log, self.ranks = plan, settings, log, ranks
        arguments = plan["arguments"]
        self.requests, self.outputs, self.control = plan["requests"], plan["outputs"], plan["control"]
        self.peers = plan["peers"]
        self.limit = arguments["max_running_requests"] or 2048
        self.capacity = arguments["max_total_tokens"] or 700000
        self.speculative = bool(arguments["speculative_algorithm"])
        self.drafted = (arguments["speculative_num_draft_tokens"] or 1) - 1
        self.accept = self._accept_length(arguments)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.since_log = _no_steps()
        self.total_tokens = self.total_verified = 0.0
        self.stats: dict[str, float] = {"gen_throughput": 0.0, "accept_length": 0.0, "accept_rate": 0.0, "tokens": 0}
        self.last_prefill = self.due = time.monotonic()
        self.answered = 0
        self.stopped = False

    def _accept_length(self, arguments: dict[str, Any]) -> float:
        if not self.speculative:
            return 1.0
        eagle3 = "EAGLE3" in str(self.plan["model"]["draft_architecture"]).upper()
        if arguments["speculative_algorithm"] == "EAGLE" and eagle3:
            return 1.0  # the trap: it starts, serves and accepts nothing
        steps = arguments["speculative_num_steps"] or 1
        wanted = self.settings.accept_length or ACCEPT_LENGTHS.get(min(steps, 5), 1.0)
        return max(1.0, min(wanted, self.drafted + 1.0))

    def run(self) -> None:
        """Serve until told to shut down; for ever, holding the GPU, once main is gone."""
        try:
            while not self.stopped:
                busy = bool(self.running or self.waiting)
                if self.ranks is not None and not busy:
                    self.ranks.wait(self.requests)
                while self.requests.poll(0 if busy else None):
                    self._take(self.requests.recv())
                    busy = True
                    if self.stopped:
                        return
                self._step()
        except (EOFError, OSError):
            child.hang()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "generate":
            self.waiting.append(Request(message))
        elif kind == "health":
            if not (self.running or self.waiting):
                self._collective()
                self._log_prefill(1, 1)
                self.outputs.send([(message["rid"], 1, {}, None)])
        elif kind == "abort":
            self.running = [request for request in self.running if request.rid != message["rid"]]
            self.waiting = [request for request in self.waiting if request.rid != message["rid"]]
            self.outputs.send([(message["rid"], 0, None, self._snapshot())])
        elif kind == "state":
            self.control.send((message["rid"], self._state()))
        elif kind == "flush":
            self.control.send((message["rid"], self._flush()))
        elif kind == "shutdown":
            for peer in self.peers:
                peer.send_bytes(b"shutdown")
            if self.ranks is not None:
                for peer in self.ranks.peers:
                    self.ranks.tell(peer, b"shutdown")
            self.stopped = True

    def _collective(self) -> None:
        """All ranks take part, or all wait."""
        for peer in self.peers:
            peer.send_bytes(b"step")
        for peer in self.peers:
            peer.recv_bytes()
        if self.ranks is not None:
            for peer in self.ranks.peers:
                self.ranks.tell(peer, b"step")
            for peer in self.ranks.peers:
                self.ranks.hear(peer)

    def _step(self) -> None:
        room = self.limit - len(self.running)
        if self.waiting and room > 0:
            new, self.waiting = self.waiting[:room], self.waiting[room:]
            self._collective()
            tokens = sum(request.prompt for request in new)
            time.sleep(self.settings.prefill_seconds * tokens / 1000)
            self._log_prefill(len(new), tokens)
            self._first_tokens(new)
        if not self.running:
            return
        self._wait_for_step()
        outputs: list[tuple[str, int, dict[str, Any] | None, dict[str, Any] | None]] = []
        for request in self.running:
            made = self._tokens(request)
            outputs.append((request.rid, made, self._finished(request), None))
        self.running = [request for request in self.running if request.done < request.goal]
        self.since_log["steps"] += 1
        if self.since_log["steps"] >= DECODE_LOG_INTERVAL:
            self._collective()
            self._log_decode(len(outputs))
        outputs[-1] = (*outputs[-1][:3], self._snapshot())
        self.outputs.send(outputs)

    def _first_tokens(self, new: list[Request]) -> None:
        """A prompt's own pass gives the first token; the rest comes by steps."""
        if not self.running:
            self.due = time.monotonic()
        for request in new:
            request.done = 1
        outputs = [(request.rid, 1, self._finished(request), None) for request in new]
        self.running.extend(request for request in new if request.done < request.goal)
        self.outputs.send([*outputs[:-1], (*outputs[-1][:3], self._snapshot())])

    def _wait_for_step(self) -> None:
        """Until the step is due. Steps follow each other at their time, however long the work between them takes."""
        seconds = self.settings.step(self.speculative, len(self.running))
        now = time.monotonic()
        self.due = self.due + seconds if now - self.due < 2 * seconds + 0.5 else now + seconds
        time.sleep(max(0.0, self.due - now))

    def _die_at_last(self) -> None:
        """What DIE_AFTER_REQUESTS asks for."""
        self.answered += 1
        if 0 < self.settings.die_after_requests <= self.answered:
            self.log.line(
                "Scheduler hit an exception: Traceback (most recent call last):\n"
                '  File "/opt/sglang/lib/sglang/srt/managers/scheduler.py", line 3305, in run_scheduler_process\n'
                "    scheduler.event_loop_overlap()\n"
                "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
            )
            _tell_main(self.plan["main_pid"])
            sys.exit(1)

    def _tokens(self, request: Request) -> int:
        request.credit += self.accept
        made = int(request.credit)
        request.credit -= made
        made = min(made, request.goal - request.done)
        request.done += made
        request.verified += 1
        self.since_log["tokens"] += made
        self.since_log["verified"] += 1
        return made

    def _finished(self, request: Request) -> dict[str, Any] | None:
        if request.done < request.goal:
            return None
        self._die_at_last()
        meta: dict[str, Any] = {"prompt_tokens": request.prompt, "completion_tokens": request.done, "cached_tokens": 0}
        if self.speculative and request.verified and not self.settings.no_spec_meta:
            proposed = request.verified * self.drafted
            correct = max(0, request.done - 1 - request.verified)
            meta["spec_accept_rate"] = correct / proposed if proposed else 0.0
            meta["spec_accept_length"] = request.done / request.verified
            meta["spec_num_correct_drafts"] = correct
            meta["spec_num_proposed_drafts"] = proposed
            meta["spec_verify_ct"] = request.verified
            # How often 0, 1, 2, .. drafts were right; here all verifications are about as good.
            usual, more = divmod(correct, request.verified)
            histogram = [0] * (self.drafted + 1)
            histogram[min(usual, self.drafted)] += request.verified - more
            histogram[min(usual + 1, self.drafted)] += more
            meta["spec_correct_drafts_histogram"] = histogram
        return meta

    def _used_tokens(self) -> int:
        return sum(request.prompt + request.done for request in self.running)

    def _log_prefill(self, sequences: int, tokens: int) -> None:
        now = time.monotonic()
        rate = tokens / max(now - self.last_prefill, 0.001)
        self.last_prefill = now
        usage = f"{self._used_tokens() / self.capacity:.2f}"
        self.log.line(
            f"Prefill batch, #new-seq: {sequences}, #new-token: {tokens}, #cached-token: 0, token usage: {usage}, "
            f"#running-req: {len(self.running)}, #queue-req: {len(self.waiting)}, #pending-token: 0, "
            f"cuda graph: {tokens > 1}, input throughput (token/s): {rate:.2f}"
        )

    def _log_decode(self, batch: int) -> None:
        now = time.monotonic()
        tokens, verified = self.since_log["tokens"], self.since_log["verified"]
        rate = tokens / max(now - self.since_log["at"], 0.001)
        accepted = ""
        self.stats["gen_throughput"] = rate
        if self.speculative and verified:
            self.total_tokens += tokens
            self.total_verified += verified
            length = tokens / verified
            accept_rate = (length - 1) / self.drafted if self.drafted else 0.0
            self.stats.update(accept_length=length, accept_rate=accept_rate)
            accepted = f"accept len: {length:.2f}, accept rate: {accept_rate:.2f}, "
        used = self._used_tokens()
        self.log.line(
            f"Decode batch, #running-req: {batch}, #token: {used}, token usage: {used / self.capacity:.2f}, {accepted}"
            f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: {len(self.waiting)}"
        )
        self.since_log = _no_steps()

    def _snapshot(self) -> dict[str, Any]:
        return {
            **self.stats,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "tokens": self._used_tokens(),
            "capacity": self.capacity,
        }

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "last_gen_throughput": self.stats["gen_throughput"],
            "effective_max_running_requests_per_dp": self.limit,
        }
        if self.total_verified:
            state["avg_spec_accept_length"] = self.total_tokens / self.total_verified
        return state

    def _flush(self) -> bool:
        if self.running or self.waiting:
            self.log.line(
                f"Cache not flushed because there are pending requests. #queue-req: {len(self.waiting)}, "
                f"#running-req: {len(self.running)}"
            )
            return False
        self.total_tokens = self.total_verified = 0
        self.since_log = _no_steps()
        self.log.line("Cache flushed successfully!")
        return True
