"""Proves that the GPUs of a host can talk to each other: a real all-reduce under a deadline, one process a GPU.

On PCIe hosts NCCL's first collective can hang while every topology tool says that peer-to-peer works (ACS or an IOMMU
in between). So it is done: by the server's own Python and NCCL, with the environment that the server will have. Where
it hangs, it is tried once more without peer-to-peer, which tells whether that was the cause.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .deadline import Deadline

OK, HANGS, WRONG, IMPOSSIBLE = "ok", "hangs", "wrong", "impossible"
PHASES = ("start", "import", "rendezvous", "first", "sizes", "done")
_STOP_SECONDS = 3.0

# Runs on the server's Python, one process a rank. Each line tells the phase that begins.
PROGRAM = r"""
import os, sys, time
def tell(*words):
    print(*words, flush=True)
rank, world, backend, sizes = int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), sys.argv[1], sys.argv[2]
tell('import')
import torch, torch.distributed as dist
device = torch.device('cpu')
if backend == 'nccl':
    device = torch.device('cuda', rank)
    torch.cuda.set_device(device)
tell('rendezvous')
dist.init_process_group(backend)
def reduce(mib):
    values = torch.full((max(1, int(mib * 262144)),), float(rank + 1), dtype=torch.float32, device=device)
    if backend == 'nccl':
        torch.cuda.synchronize()
    started = time.perf_counter()
    dist.all_reduce(values)
    if backend == 'nccl':
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    wrong = int((values != world * (world + 1) / 2).sum().item())
    if wrong:
        tell('wrong', mib, wrong)
        sys.exit(3)
    return taken
tell('first')
reduce(0.001)
tell('sizes')
for mib in map(float, sizes.split(',')):
    reduce(mib)
    tell('took', mib, min(reduce(mib) for _ in range(3)))
tell('done')
if backend == 'nccl':
    sys.stdout.flush()
    os._exit(0)  # an orderly end of NCCL may wait for peers
dist.destroy_process_group()
"""


@dataclass(eq=False)
class _Rank:
    process: subprocess.Popen[bytes]
    phase: str = "start"
    seconds: dict[float, float] = field(default_factory=dict)
    wrong: str = ""
    text: bytes = b""
    errors: bytes = b""

    def read(self, data: bytes) -> None:
        self.text += data
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            words = line.decode("utf-8", "replace").split()
            if words[:1] == ["took"] and len(words) == 3:
                self.seconds[float(words[1])] = float(words[2])
            elif words[:1] == ["wrong"]:
                self.wrong = f"{words[2]} of the values of a {words[1]} MiB message"
            elif words and words[0] in PHASES:
                self.phase = words[0]

    @property
    def last_error(self) -> str:
        lines = [line for line in self.errors.decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else ""


def run(
    python: str,
    devices: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    backend: str = "nccl",
    sizes: Sequence[float] = (1, 16, 64),
) -> dict[str, Any]:
    """The verdict on one all-reduce among `devices` (GPU UUIDs), within `seconds`; sizes in MiB.

    `verdict` is ok, hangs, wrong or impossible (a rank ended with an error); `detail` one sentence; `phases` where each
    rank was when it ended; `milliseconds` by message size, of the slowest rank.
    """
    started = time.monotonic()
    deadline = Deadline(seconds)
    ranks: list[_Rank] = []
    common = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(len(devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if backend == "nccl":
        common.update(CUDA_VISIBLE_DEVICES=",".join(devices), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    command = [python, "-c", PROGRAM, backend, ",".join(f"{size:g}" for size in sizes)]
    try:
        for number in range(len(devices)):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**common, "RANK": str(number), "LOCAL_RANK": str(number)},
                start_new_session=True,
            )
            ranks.append(_Rank(process))
        failed = _follow(ranks, deadline)
    except OSError as error:
        return _answer(IMPOSSIBLE, f"{python} can't be started: {error.strerror}.", ranks, started)
    finally:
        _end([rank.process for rank in ranks])
    if failed is not None:
        number, rank = failed
        if rank.wrong:
            return _answer(WRONG, f"Rank {number} got a wrong sum: {rank.wrong}.", ranks, started)
        code = rank.process.returncode
        detail = (
            f"Rank {number} ended with status {code} in its phase {rank.phase}: {rank.last_error or 'no error text'}."
        )
        return _answer(IMPOSSIBLE, detail, ranks, started)
    waiting = [number for number, rank in enumerate(ranks) if rank.phase != "done"]
    if waiting:
        phases = sorted({ranks[number].phase for number in waiting}, key=PHASES.index)
        listed = ", ".join(map(str, waiting))
        detail = f"After {seconds:.0f} s rank {listed} of {len(ranks)} had not finished (phase {', '.join(phases)})."
        # Before the first collective it is no hang of the GPUs' links.
        hang = phases[0] in ("first", "sizes")
        return _answer(HANGS if hang else IMPOSSIBLE, detail, ranks, started)
    return _answer(OK, f"{len(ranks)} GPUs sum correctly.", ranks, started)


def diagnose(
    python: str,
    devices: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    backend: str = "nccl",
) -> dict[str, Any]:
    """`run`, and where that hangs a second one without peer-to-peer: `without_p2p` is its verdict, '' if not tried."""
    answer = run(python, devices, environment, seconds, backend)
    answer["without_p2p"] = ""
    if answer["verdict"] in (HANGS, WRONG) and environment.get("NCCL_P2P_DISABLE") != "1":
        second = run(python, devices, {**environment, "NCCL_P2P_DISABLE": "1"}, seconds, backend)
        answer["without_p2p"] = second["verdict"]
        answer["seconds"] = round(answer["seconds"] + second["seconds"], 1)
    return answer


def _follow(ranks: list[_Rank], deadline: Deadline) -> tuple[int, _Rank] | None:
    """Read what the ranks say until all are done or the deadline; the first rank that failed, if one did."""
    poll = select.poll()
    streams: dict[int, tuple[_Rank, bool]] = {}
    for rank in ranks:
        for stream, is_error in ((rank.process.stdout, False), (rank.process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            streams[stream.fileno()] = (rank, is_error)
            poll.register(stream.fileno(), select.POLLIN)
    while streams and not all(rank.phase == "done" for rank in ranks):
        ready = poll.poll(max(0, int(min(deadline.remaining(), 0.5) * 1000)))
        for number, _ in ready:
            rank, is_error = streams[number]
            try:
                data = os.read(number, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                poll.unregister(number)
                del streams[number]
            elif is_error:
                rank.errors = (rank.errors + data)[-(1 << 16) :]
            else:
                rank.read(data)
        silent = [rank for rank in ranks if not any(one is rank for one, _ in streams.values())]
        for number, rank in enumerate(ranks):
            if rank in silent and rank.phase != "done":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(min(2.0, deadline.remaining()))
                    return number, rank
        if deadline.expired():
            return None
    return None


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """TERM, a moment, KILL: our own children, each leading a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = Deadline(_STOP_SECONDS if number == signal.SIGTERM else 1.0)
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        while any(process.poll() is None for process in processes) and not deadline.expired():
            time.sleep(0.02)
    for process in processes:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _answer(verdict: str, detail: str, ranks: Sequence[_Rank], started: float) -> dict[str, Any]:
    sizes = sorted({size for rank in ranks for size in rank.seconds})
    slowest = {size: max(rank.seconds.get(size, 0.0) for rank in ranks) for size in sizes}
    return {
        "verdict": verdict,
        "detail": detail,
        "phases": [rank.phase for rank in ranks],
        "milliseconds": {f"{size:g}": round(taken * 1000, 3) for size, taken in slowest.items()},
        "seconds": round(time.monotonic() - started, 1),
    }
