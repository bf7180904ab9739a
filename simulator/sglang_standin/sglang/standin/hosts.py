"""One server over several hosts: ranks that meet at --dist-init-addr, and the main process of a host without rank 0.

Rank 0 holds a connection to every other rank, on its own host too, and each of them one to it: all take part in every
collective. Who loses a connection fails as real ranks do, by gloo's words.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from .log import Log

if TYPE_CHECKING:
    from .main import Server

POLL_SECONDS = 0.05
UNBALANCED_SECONDS = 480.0
"""How long ranks that have loaded wait for the others (UNBALANCED_MODEL_LOADING_TIMEOUT_S)."""


class Lost(Exception):
    """A rank can't be reached, or is gone; the text is what a real one prints."""


def local_ranks(arguments: dict[str, Any]) -> range:
    """The tensor-parallel ranks of this host."""
    each = arguments["tp_size"] // arguments["nnodes"]
    return range(arguments["node_rank"] * each, (arguments["node_rank"] + 1) * each)


class Ranks:
    """The connections of one rank to the others: of rank 0 to each, of the others to rank 0."""

    def __init__(self, arguments: dict[str, Any], rank: int, seconds: float) -> None:
        """Wait until all have met, for so many seconds at most. Raises `Lost`."""
        self.rank = rank
        address, _, port = str(arguments["dist_init_addr"]).rpartition(":")
        self.names: dict[Connection, str] = {}
        if rank == 0:
            self._gather(arguments["tp_size"], int(port), seconds)
        else:
            self._join(address, int(port), seconds)

    @property
    def peers(self) -> list[Connection]:
        return list(self.names)

    def _gather(self, world: int, port: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            store = socket.create_server(("", port), backlog=world)
        except OSError as error:
            raise Lost(
                "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
                f"address. port: {port}, useIpv6: false, code: -{error.errno}, name: EADDRINUSE, message: address "
                "already in use"
            ) from None
        with store:
            while len(self.names) < world - 1:
                store.settimeout(max(0.001, until - time.monotonic()))
                try:
                    joined, (address, number) = store.accept()
                except TimeoutError:
                    raise Lost(
                        f"torch.distributed.DistStoreError: Timed out after {seconds + 1:.0f} seconds waiting for "
                        f"clients. {len(self.names) + 1}/{world} clients joined."
                    ) from None
                joined.settimeout(None)
                self.names[Connection(joined.detach())] = f"[{address}]:{number}"
        for peer in self.names:
            self.tell(peer, b"go")

    def _join(self, address: str, port: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                joined = socket.create_connection((address, port), timeout=max(0.001, until - time.monotonic()))
                break
            except OSError:
                if time.monotonic() >= until:
                    raise Lost(
                        f"torch.distributed.DistNetworkError: The client socket has timed out after "
                        f"{seconds * 1000:.0f}ms while trying to connect to ({address}, {port})."
                    ) from None
                time.sleep(POLL_SECONDS)
        joined.settimeout(None)
        first = Connection(joined.detach())
        self.names[first] = f"[{address}]:{port}"
        self.hear(first)

    def tell(self, peer: Connection, word: bytes) -> None:
        try:
            peer.send_bytes(word)
        except OSError:
            raise self.lost(peer) from None

    def hear(self, peer: Connection) -> bytes:
        try:
            return peer.recv_bytes()
        except (EOFError, OSError):
            raise self.lost(peer) from None

    def all_loaded(self, seconds: float) -> None:
        """The barrier after loading: the fastest waits for the slowest. Raises `Lost`."""
        until = time.monotonic() + seconds
        if self.rank:
            (first,) = self.peers
            self.tell(first, b"loaded")
            self._within(first, until)
            return
        for peer in self.peers:
            self._within(peer, until)
        for peer in self.peers:
            self.tell(peer, b"go")

    def _within(self, peer: Connection, until: float) -> None:
        if not peer.poll(max(0.0, until - time.monotonic())):
            raise Lost(
                f"ValueError: TP rank {self.rank} could finish the model loading, but there are other ranks that "
                "didn't finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node."
            )
        self.hear(peer)

    def wait(self, requests: Connection | None) -> None:
        """Rank 0: until a request comes. Nobody speaks unasked, so whoever can be heard is gone: raises `Lost`."""
        assert requests is not None
        ready: list[Any] = wait([requests, *self.peers])
        for one in ready:
            if one in self.names:
                raise self.lost(one)

    def lost(self, peer: Connection) -> Lost:
        return Lost(
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            f"{self.names[peer]}"
        )


def follow(server: Server) -> int:
    """What the main process of a later host does once its schedulers are ready: answer "alive", and wait for them."""
    log, arguments = server.log, server.arguments
    if server.settings.version != "0.5.17":
        signal.signal(signal.SIGTERM, lambda signum, frame: _on_term(log, arguments["node_rank"]))
    threading.Thread(target=_alive, args=(log, arguments["host"], arguments["port"]), daemon=True).start()
    where = f"{arguments['host']}:{arguments['port']}"
    log.line(f"Dummy health check server started in background thread at {where}")
    for process in server.schedulers:
        process.join()
        log.line(f"Scheduler or DataParallelController {process.pid} terminated with {process.exitcode}")
    from .main import kill_process_tree

    kill_process_tree(log, include_parent=False)
    os._exit(0)


def _on_term(log: Log, node_rank: int) -> None:
    log.line(
        f"SIGTERM received on node_rank {node_rank}; waiting for the rank-0 ShutdownReq broadcast to stop the "
        "schedulers."
    )


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path.partition("?")[0] in ("/ping", "/health", "/health_generate")
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """uvicorn is at log level warning."""


def _alive(log: Log, host: str, port: int) -> None:
    """The dummy health check server: it says 200 as long as this process lives."""
    try:
        http = ThreadingHTTPServer((host, port), _Answer)
    except OSError as error:
        log.line(f"Dummy health check server failed to start: {error}")
        return
    http.daemon_threads = True
    http.serve_forever()
