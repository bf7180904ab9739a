"""``vllm serve MODEL [--tensor-parallel-size N] [--port P]``: main, VLLM::EngineCore and a VLLM::Worker_TP<n> a GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection

from sglang.standin import child, device
from sglang.standin.log import raw
from sglang.standin.settings import Settings


def main() -> int:
    """Start the tree and answer /health; SIGTERM ends it all, SIGKILL leaves engine and workers behind."""
    argv = sys.argv[1:]
    if argv[:1] != ["serve"]:
        print("usage: vllm serve MODEL [options]", file=sys.stderr)
        return 2
    options = dict(zip(argv[2::2], argv[3::2]))
    size = int(options.get("--tensor-parallel-size", 1))
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    engine = context.Process(target=run_engine_core, args=(size, writer))
    engine.start()

    def on_term(signum: int, frame: object) -> None:
        engine.terminate()
        engine.join()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    reader.recv()
    server = HTTPServer(("127.0.0.1", int(options.get("--port", 8000))), Handler)
    raw("INFO:     Application startup complete.\n")
    server.serve_forever(poll_interval=60)
    return 0


class Handler(BaseHTTPRequestHandler):
    """Says 200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def run_engine_core(size: int, ready: Connection) -> None:
    """The engine: starts the workers, ends them at SIGTERM."""
    settings = Settings()
    time.sleep(settings.import_seconds)
    child.set_title("VLLM::EngineCore", settings.blank_environ)
    context = multiprocessing.get_context("spawn")
    workers = []
    waits = []
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        workers.append(context.Process(target=run_worker, args=(rank, size, writer)))
        workers[-1].start()
        waits.append(reader)

    def on_term(signum: int, frame: object) -> None:
        for worker in workers:
            worker.kill()
            worker.join()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    for reader in waits:
        reader.recv()
    ready.send("ready")
    child.hang()


def run_worker(rank: int, size: int, ready: Connection) -> None:
    """One worker: holds its GPU."""
    settings = Settings()
    time.sleep(settings.import_seconds)
    child.set_title(f"VLLM::Worker_TP{rank}" if size > 1 else "VLLM::Worker", settings.blank_environ)
    state = device.gpu_state(settings.state_folder)
    gpu = device.chosen_gpu(state, rank)
    mapped = device.open_nodes(settings.device_folder, gpu.minor)
    with state.allocate(gpu.index, settings.memory_mib):
        ready.send(len(mapped))
        child.hang()
