"""The children of the torch server: real CUDA memory and real CUDA work under SGLang's titles."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import setproctitle


def scheduler(pipe: Connection, rank: int, gpu: int, hold_mib: int, own_session: bool, heartbeat: str) -> None:
    """Takes `hold_mib` on one GPU, then multiplies matrices there for ever, counting each finished one in a file."""
    if own_session:
        os.setsid()
    import torch  # type: ignore[import-not-found]

    setproctitle.setproctitle(f"sglang::scheduler_TP{rank}")
    torch.cuda.set_device(gpu)
    held = torch.empty(hold_mib * 2**20, dtype=torch.uint8, device="cuda")
    held.fill_(rank + 1)
    left = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    pipe.send("ready")
    parent = os.getppid()
    beats = 0
    while True:
        torch.matmul(left, left)
        torch.cuda.synchronize()
        beats += 1
        Path(heartbeat).write_text(str(beats))
        # An orphan goes on: that is the case under test.
        if os.getppid() == parent and pipe.poll():
            pipe.recv()
            pipe.send(beats)
        time.sleep(0.02)


def detokenizer() -> None:
    """A child without GPU memory."""
    setproctitle.setproctitle("sglang::detokenizer")
    while True:
        time.sleep(1)
