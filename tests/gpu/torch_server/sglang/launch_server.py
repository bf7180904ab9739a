"""Serving-like parent with children on a real GPU, started as `python -m sglang.launch_server`.

Like SGLang's main it puts SGLANG_RUN_ID into the environment before it spawns, answers /health and /generate,
and on SIGTERM waits for the running requests before it ends its children and itself. A stopped worker therefore
never lets it go, as seen with SGLang 0.5.17.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from . import worker


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="none")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, default=1, help="workers")
    parser.add_argument("--base-gpu-id", type=int, default=0)
    parser.add_argument("--one-gpu", action="store_true", help="all workers on the first GPU")
    parser.add_argument("--hold-mib", type=int, default=1024, help="GPU memory each worker takes, in MiB")
    parser.add_argument("--own-session", action="store_true", help="each worker leads a session of its own")
    parser.add_argument("--heartbeat", required=True, help="file that each worker counts in, .<rank> appended")
    return parser.parse_args()


class Server:
    """The main's state: its workers' pipes and how many requests wait for them."""

    def __init__(self) -> None:
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.ready = False
        self.draining = threading.Event()
        self.running = 0
        self.lock = threading.Lock()

    def generate(self) -> dict[str, object]:
        """One request, answered by the first worker. Blocks for as long as that worker does."""
        self.running += 1
        try:
            with self.lock:
                self.pipes[0].send("generate")
                return {"text": "done", "meta_info": {"beat": self.pipes[0].recv()}}
        finally:
            self.running -= 1


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict[str, object]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            good = server.ready and not server.draining.is_set()
            self.answer(200 if good else 503, {"ready": good})

        def do_POST(self) -> None:
            self.answer(200, server.generate())

        def log_message(self, format: str, *args: object) -> None:
            print(format % args, flush=True)

    return Handler


def main() -> None:
    args = arguments()
    os.environ["SGLANG_RUN_ID"] = f"sglang-run-{time.time()}-{random.randint(0, 100000000)}"
    server = Server()
    signal.signal(signal.SIGTERM, lambda *_: server.draining.set())
    context = multiprocessing.get_context("spawn")
    children = []
    for rank in range(args.tp_size):
        ours, theirs = context.Pipe()
        gpu = args.base_gpu_id + (0 if args.one_gpu else rank)
        child = context.Process(
            target=worker.scheduler,
            args=(theirs, rank, gpu, args.hold_mib, args.own_session, f"{args.heartbeat}.{rank}"),
        )
        child.start()
        children.append(child)
        server.pipes.append(ours)
    detokenizer = context.Process(target=worker.detokenizer)
    detokenizer.start()
    children.append(detokenizer)

    web = ThreadingHTTPServer(("127.0.0.1", args.port), handler(server))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    for pipe in server.pipes:
        pipe.recv()
    server.ready = True
    print("The server is fired up and ready to roll!", flush=True)

    while not server.draining.wait(0.2):
        if not all(child.is_alive() for child in children):
            break
    while server.running and all(child.is_alive() for child in children):
        print(f"Gracefully exiting... Remaining number of requests {server.running}.", flush=True)
        time.sleep(0.5)
    for child in children:
        child.kill()
    for child in children:
        child.join()
    os._exit(0)


if __name__ == "__main__":
    main()
