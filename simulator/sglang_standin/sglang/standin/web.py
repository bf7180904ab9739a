"""The HTTP side: endpoints, requests in flight, SIGTERM's drain."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from .arguments import answers, recorded
from .log import raw

if TYPE_CHECKING:
    from .main import Server

WORDS = ("the", "answer", "is", "one", "two", "three", "model", "token", "draft", "fast", "and", "then", "it", "works")
OPEN_PATHS = ("/health", "/health_generate", "/metrics", "/ping", "/ready")
"""What real SGLang answers without the API key."""

WARM_UP_TRIES, WARM_UP_SECONDS = 10, 600.0
"""Of each request of the warm-up, and how long one may take; SGLang asks /model_info 120 times."""

POST_ONLY = ("/generate", "/v1/completions", "/v1/chat/completions")


class Disconnected(Exception):
    """The client of a waiting request is gone."""


class Frontend:
    """SGLang's tokenizer manager, as far as the outside sees it."""

    def __init__(self, server: Server, pipes: dict[str, Any]) -> None:
        self.server, self.settings, self.log = server, server.settings, server.log
        self.requests, self.outputs, self.control = pipes["requests"], pipes["outputs"], pipes["control"]
        self.in_flight: dict[str, SimpleQueue[Any]] = {}
        self.answers: dict[str, SimpleQueue[Any]] = {}
        self.lock = threading.Lock()
        self.turn = itertools.count()
        self.streams = itertools.count(1)
        self.last_receive = 0.0
        self.status = "Starting"
        self.exiting = False
        self.snapshot: dict[str, Any] = {}

    # Worker pipes

    def send(self, message: dict[str, Any], replica: int | None = None) -> None:
        """To one scheduler (turn by turn) or the given one. A full pipe of a stopped one blocks, as it should."""
        which = next(self.turn) % len(self.requests) if replica is None else replica
        with self.lock:
            self.requests[which].send(message)

    def receive(self) -> None:
        """Thread: hand out what comes from the detokenizer and the schedulers."""
        sources: list[Any] = [self.outputs, *self.control]
        while sources:
            ready: list[Any] = wait(sources)
            for source in ready:
                try:
                    message = source.recv()
                except (EOFError, OSError):
                    sources.remove(source)
                    continue
                if source is not self.outputs:
                    queue = self.answers.get(message[0])
                    if queue is not None:
                        queue.put(message[1])
                    continue
                self.last_receive = time.time()
                for rid, made, finished, snapshot in message:
                    if snapshot is not None:
                        self.snapshot = snapshot
                    queue = self.in_flight.get(rid)
                    if queue is not None:
                        queue.put((made, finished))

    def ask(self, kind: str) -> list[Any]:
        """Ask every scheduler; blocks as long as one does not answer."""
        answers = []
        for replica in range(len(self.requests)):
            rid = uuid.uuid4().hex
            self.answers[rid] = SimpleQueue()
            self.send({"kind": kind, "rid": rid}, replica)
            answers.append(self.answers[rid].get())
            del self.answers[rid]
        return answers

    def generate(self, prompt_tokens: int, max_new_tokens: int, client: socket.socket) -> Iterator[Any]:
        """Yields (tokens made, None or the final meta). Raises `Disconnected`."""
        rid = uuid.uuid4().hex
        queue: SimpleQueue[Any] = SimpleQueue()
        self.in_flight[rid] = queue
        finished = None
        try:
            self.send(
                {"kind": "generate", "rid": rid, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
            )
            while finished is None:
                try:
                    made, finished = queue.get(timeout=self.settings.disconnect_seconds)
                except Empty:
                    if _gone(client):
                        self.log.line(
                            "[http_server] Error: Request is disconnected from the client side (type 1). "
                            f"Abort request obj.rid='{rid}'"
                        )
                        raise Disconnected from None
                    continue
                if finished is not None:
                    finished = {"id": rid, **finished}
                yield made, finished
        finally:
            self.in_flight.pop(rid, None)
            if finished is None:
                self.send({"kind": "abort", "rid": rid})

    def health(self, path: str) -> int:
        """HTTP status of /health and /health_generate."""
        if self.exiting:
            self.log.line("Health check request received during shutdown. Returning 503.")
            return 503
        if self.status == "Starting":
            return 503
        generation = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1")
        if path == "/health" and generation.lower() in ("0", "false"):
            return 200
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        self.in_flight[rid] = SimpleQueue()
        began = time.time()
        try:
            self.send({"kind": "health", "rid": rid})
            while time.time() < began + self.settings.health_timeout_seconds:
                time.sleep(self.settings.health_seconds)
                if self.last_receive > began:
                    self.status = "Up"
                    return 200
        finally:
            self.in_flight.pop(rid, None)
        self.log.line(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{self.settings.health_timeout_seconds:g} seconds. tic start time: "
            f"{time.strftime('%H:%M:%S', time.localtime(began))}. last_heartbeat time: "
            f"{time.strftime('%H:%M:%S', time.localtime(self.last_receive))}"
        )
        self.status = "UnHealthy"
        return 503

    # SIGTERM

    def on_term(self, signum: int, frame: object) -> None:
        """SIGTERM's handler while serving."""
        if self.settings.ignore_term:
            return
        self.log.line("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self.exiting = True

    def drain(self, stop_watch: threading.Event) -> None:
        """Thread: polls for SIGTERM, waits for all requests without a bound, then ends the tree."""
        while not self.exiting:
            time.sleep(self.settings.term_poll_seconds)
        while True:
            rids = list(self.in_flight)
            if self.status == "UnHealthy":
                self.log.line("Signal SIGTERM received while health check failed. Force exiting.")
                self.server.crash_diagnostics()
                break
            self.log.line(
                f"Gracefully exiting... Remaining number of requests {len(rids)}. "
                f"Remaining requests remaining_rids={rids}."
            )
            if not rids:
                break
            time.sleep(self.settings.term_poll_seconds)
        stop_watch.set()
        for replica in range(len(self.requests)):
            with contextlib.suppress(OSError):
                self.send({"kind": "shutdown"}, replica)
        self.server.end_after_drain()


def serve(
    server: Server, pipes: dict[str, Any], infos: list[dict[str, Any]], startup: dict[str, Any], argv: list[str]
) -> int:
    """Serve for ever. Ends by signals."""
    from .main import kill_process_tree

    log, arguments = server.log, server.arguments
    frontend = Frontend(server, pipes)
    log.line(f"INFO:     Started server process [{os.getpid()}]")
    log.line("INFO:     Waiting for application startup.")
    log.line("Using fallback token IDs for yes/no (9693/2152)")
    log.line("INFO:     Application startup complete.")
    try:
        http = _Http((arguments["host"], arguments["port"]), _handler(server, frontend, infos, startup, argv))
    except OSError as error:
        log.line(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
            f"('{arguments['host']}', {arguments['port']}): {os.strerror(error.errno or 0).lower()}"
        )
        kill_process_tree(log, include_parent=False)
        os._exit(1)
    log.line(f"INFO:     Uvicorn running on http://{arguments['host']}:{arguments['port']} (Press CTRL+C to quit)")
    server.phase = "serve"
    signal.signal(signal.SIGTERM, frontend.on_term)
    stop_watch = server.watch_workers()
    for target in (frontend.receive, lambda: _warm_up(server, frontend), lambda: frontend.drain(stop_watch)):
        threading.Thread(target=target, daemon=True).start()
    http.serve_forever(poll_interval=60)
    return 0


def _warm_up(server: Server, frontend: Frontend) -> None:
    """The first request, which SGLang sends to itself over HTTP; then the server is Up."""
    import http.client

    from .main import kill_process_tree

    arguments = server.arguments
    headers = {"Authorization": f"Bearer {arguments['api_key']}"} if arguments["api_key"] else {}
    host = "127.0.0.1" if arguments["host"] in ("0.0.0.0", "") else arguments["host"]
    time.sleep(server.settings.warmup_seconds)
    if not arguments["skip_server_warmup"]:
        body = json.dumps({"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}})
        for method, path, data in (("GET", "/model_info", None), ("POST", "/generate", body)):
            # Where the machine is too busy for one answer there may be another; a dead scheduler ends us anyway.
            for left in reversed(range(WARM_UP_TRIES)):
                connection = http.client.HTTPConnection(host, arguments["port"], timeout=WARM_UP_SECONDS)
                try:
                    connection.request(method, path, body=data, headers=headers)
                    connection.getresponse().read()
                    break
                except (OSError, http.client.HTTPException) as error:
                    if not left:
                        server.log.line(f"Initialization failed. warmup error: {method} {path}: {error!r}")
                        kill_process_tree(server.log, include_parent=True)
                    time.sleep(1)
                finally:
                    connection.close()
    frontend.status = "Up"
    server.log.line("The server is fired up and ready to roll!")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error of ours; anything else is said, since it closes the connection."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            raw(f"ERROR:    Exception in ASGI application\n{traceback.format_exc()}")


def _handler(
    server: Server,
    frontend: Frontend,
    infos: list[dict[str, Any]],
    startup: dict[str, Any],
    argv: list[str],
) -> type[BaseHTTPRequestHandler]:
    arguments, settings, log = server.arguments, server.settings, server.log
    base, known = recorded(settings.version), answers(settings.version)

    def server_info() -> dict[str, Any]:
        states = [
            {
                **{name: value for name, value in arguments.items() if name != "custom_sigquit_handler"},
                **base["internal_state"],
                "memory_usage": infos[0]["memory_usage"],
                "startup_time": infos[0]["startup_time"],
                **state,
            }
            for state in frontend.ask("state")
        ]
        info = {
            **arguments,
            **{name: infos[0][name] for name in ("status", "max_total_num_tokens", "max_req_input_len")},
            "startup_time": startup,
            "internal_states": states,
            "version": settings.version,
            "kv_events": None,
            **known["server_info"],
        }
        if settings.version != "0.5.17":
            info["launch_command"] = " ".join(argv)
        return info

    def model_info() -> dict[str, Any]:
        named = {"served_model_name": arguments["served_model_name"]} if known["model_info"] else {}
        return {
            **known["model_info"],
            **named,
            "model_path": arguments["model_path"],
            "tokenizer_path": arguments["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": server.model.type,
            "architectures": [server.model.architecture],
        }

    def models() -> dict[str, Any]:
        card = {
            "id": arguments["served_model_name"],
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": arguments["served_model_name"],
            "parent": None,
            "max_model_len": server.model.context,
        }
        return {"object": "list", "data": [card]}

    def loads() -> dict[str, Any]:
        now = frontend.snapshot
        load = {
            **known["load"],
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": now.get("running", 0),
            "num_waiting_reqs": now.get("waiting", 0),
            "num_used_tokens": now.get("tokens", 0),
            "num_total_tokens": now.get("tokens", 0),
            "max_total_num_tokens": infos[0]["max_total_num_tokens"],
            "max_running_requests": arguments["max_running_requests"] or 2048,
            "token_usage": now.get("tokens", 0) / infos[0]["max_total_num_tokens"],
            "gen_throughput": now.get("gen_throughput", 0.0),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
        }
        if arguments["speculative_algorithm"]:
            load["speculative"] = {
                "accept_length": now.get("accept_length", 0.0),
                "accept_rate": now.get("accept_rate", 0.0),
            }
        return {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "version": settings.version,
            "accelerator": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "num_accelerators": arguments["tp_size"],
            "loads": [load],
        }

    def metrics() -> str:
        now = frontend.snapshot
        name = arguments["served_model_name"]
        labels = f'engine_type="unified",model_name="{name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        values = {
            "num_running_reqs": now.get("running", 0),
            "num_queue_reqs": now.get("waiting", 0),
            "num_used_tokens": now.get("tokens", 0),
            "token_usage": now.get("tokens", 0) / infos[0]["max_total_num_tokens"],
            "gen_throughput": now.get("gen_throughput", 0.0),
            "cache_hit_rate": 0.0,
        }
        if arguments["speculative_algorithm"]:
            values["spec_accept_length"] = now.get("accept_length", 0.0)
            values["spec_accept_rate"] = now.get("accept_rate", 0.0)
        own = "".join(
            f"# HELP sglang:{key} {key}\n# TYPE sglang:{key} gauge\nsglang:{key}{{{labels}}} {float(value)}\n"
            for key, value in values.items()
        )
        others = {
            **known["metrics"],
            **(known["metrics_with_speculation"] if arguments["speculative_algorithm"] else {}),
        }
        return own + "".join(
            _metric(key, facts, name) for key, facts in others.items() if key[len("sglang:") :] not in values
        )

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 600

        def log_message(self, *_args: object) -> None:
            """Access lines are written by `_finish`."""

        def _finish(self, status: int, body: bytes = b"", kind: str = "") -> None:
            self._access(status)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if kind:
                self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def _access(self, status: int) -> None:
            host, port = self.client_address[:2]
            request = f"{self.command} {self.path} HTTP/1.1"
            log.line(f'INFO:     {host}:{port} - "{request}" {status} {HTTPStatus(status).phrase}')

        def _json(self, value: object, status: int = 200) -> None:
            self._finish(status, json.dumps(value).encode(), "application/json")

        def _text(self, text: str, status: int = 200) -> None:
            self._finish(status, text.encode())

        def _allowed(self, path: str) -> bool:
            key = arguments["api_key"]
            return not key or path in OPEN_PATHS or self.headers.get("Authorization") == f"Bearer {key}"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if not self._allowed(path):
                self._json({"error": "Unauthorized"}, 401)
            elif path in ("/health", "/health_generate"):
                self._finish(frontend.health(path))
            elif path == "/ping" or (path == "/ready" and settings.version != "0.5.17"):
                self._finish(200)
            elif path in ("/model_info", "/get_model_info"):
                self._deprecated(path, "/get_model_info", "/model_info")
                self._json(model_info())
            elif path in ("/server_info", "/get_server_info"):
                self._deprecated(path, "/get_server_info", "/server_info")
                self._json(server_info())
            elif path == "/v1/models":
                self._json(models())
            elif path == "/v1/loads":
                self._json(loads())
            elif path == "/metrics" and arguments["enable_metrics"]:
                self._finish(200, metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
            elif path in ("/flush_cache", "/freeze_gc"):
                self._control(path)
            elif path in POST_ONLY and path != "/generate":
                self._json({"detail": "Method Not Allowed"}, 405)
            else:
                self._json({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self._allowed(path):
                self._json({"error": "Unauthorized"}, 401)
            elif path in ("/flush_cache", "/freeze_gc"):
                self._control(path)
            elif path in POST_ONLY:
                try:
                    body = json.loads(data)
                    request = _Wanted(path, body, server, known)
                except _NothingToDo as error:
                    self._json({"error": {"message": str(error)}}, 400)
                    return
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    self._json(_refusal(error), 400)
                    return
                try:
                    self._generate(request)
                except Disconnected:
                    self.close_connection = True
            else:
                self._json({"detail": "Not Found"}, 404)

        def _deprecated(self, path: str, old: str, new: str) -> None:
            if path == old:
                log.line(
                    f"Endpoint '{old}' is deprecated and will be removed in a future version. "
                    f"Please use '{new}' instead."
                )

        def _control(self, path: str) -> None:
            if path == "/freeze_gc":
                self._text("")
            elif all(frontend.ask("flush")):
                self._text(
                    "Cache flushed.\nPlease check backend logs for more details. "
                    "(When there are running or waiting requests, the operation will not be performed.)\n"
                )
            else:
                self._text("Flush cache failed.\n", 400)

        def _generate(self, wanted: _Wanted) -> None:
            began = time.time()
            if wanted.stream and settings.refuse_every and next(frontend.streams) % settings.refuse_every == 0:
                self._json({"error": {"message": "The server is too busy."}}, 503)
                return
            if wanted.stream:
                self._stream(wanted, began)
                return
            answers = []
            for prompt in wanted.prompts:
                for _made, finished in frontend.generate(prompt, wanted.max_new_tokens, self.connection):
                    if finished is not None:
                        answers.append(finished)
            self._json(wanted.answer(answers, time.time() - began))

        def _stream(self, wanted: _Wanted, began: float) -> None:
            self._access(200)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            done = 0
            for made, finished in frontend.generate(wanted.prompts[0], wanted.max_new_tokens, self.connection):
                for event in wanted.events(done, made, finished, time.time() - began):
                    self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
                done += made
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    return Handler


class _NothingToDo(Exception):
    """A /generate without anything to go on from."""


class _Wanted:
    """What a generation request asks for, and the shapes of its answers. `known`: arguments.answers of the version.

    Raises `KeyError` for a field that must be there, `_NothingToDo`.
    """

    def __init__(self, path: str, body: dict[str, Any], server: Server, known: dict[str, Any]) -> None:
        self.path, self.known = path, known
        self.model = body.get("model") or server.arguments["served_model_name"]
        self.stream = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        self.usage_wanted = bool(options.get("include_usage"))
        self.many, self.top = False, -1
        if path == "/generate":
            given: Any = body.get("text", body.get("input_ids"))
            if given is None:
                raise _NothingToDo("Either text, input_ids or input_embeds should be provided.")
            self.many = bool(isinstance(given, list) and given and not isinstance(given[0], int))
            self.prompts = [_tokens(item) for item in (given if self.many else [given])]
            self.top = int(body.get("top_logprobs_num") or 0) if body.get("return_logprob") else -1
            maximum = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        elif path == "/v1/completions":
            self.prompts = [_tokens(body["prompt"])]
            maximum = body.get("max_tokens") or 16
        else:
            text = " ".join(str(message.get("content")) for message in body["messages"])
            self.prompts = [_tokens(text) + 8]
            maximum = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        self.max_new_tokens = max(1, int(maximum))

    @property
    def chat(self) -> bool:
        return self.path.endswith("chat/completions")

    def answer(self, answers: list[dict[str, Any]], seconds: float) -> object:
        """The whole answer, without streaming."""
        if self.path == "/generate":
            found = [self._generated(meta, seconds) for meta in answers]
            return found if self.many else found[0]
        meta = answers[0]
        text = _text(0, meta["completion_tokens"])
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": None}
        if not self.known["meta_info"]:
            message["tool_calls"] = None  # 0.5.23 leaves it out where there is none
        choice = {**({"message": message} if self.chat else {"text": text}), "logprobs": None}
        versions = {"weight_versions": _weight_versions(meta["completion_tokens"])} if self.known["meta_info"] else {}
        return {
            **self._head(meta, "chat.completion" if self.chat else "text_completion"),
            "choices": [{"index": 0, **choice, "finish_reason": "length", "matched_stop": None}],
            "usage": self._usage(meta),
            "metadata": {"weight_version": "default", **versions},
        }

    def _head(self, meta: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"id": meta.get("id", "0"), "object": kind, "created": int(time.time()), "model": self.model}

    def events(self, done: int, made: int, finished: dict[str, Any] | None, seconds: float) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer for so many new tokens after `done`."""
        if self.path == "/generate":
            meta = finished or {"prompt_tokens": self.prompts[0], "completion_tokens": done + made, "cached_tokens": 0}
            yield self._generated(meta, seconds, finished is not None, first=done == 0)
            return
        meta, text = finished or {}, _text(done, made)
        if not self.chat:
            head = self._head(meta, "text_completion")
            yield {**head, "choices": [_part({"text": text}, finished is not None)], "usage": None}
            if finished and self.usage_wanted:
                yield {**head, "choices": [], "usage": self._usage(finished)}
            return
        head = self._head(meta, "chat.completion.chunk")
        if done == 0:
            first = {"reasoning_content": None, "role": "assistant", "content": ""}
            yield {**head, "choices": [_part({"delta": first}, False)]}
        yield {**head, "choices": [_part({"delta": {"reasoning_content": None, "content": text}}, False)]}
        if finished:
            yield {**head, "choices": [_part({"delta": {"reasoning_content": None}}, True)]}
            if self.usage_wanted:
                yield {**head, "choices": [], "usage": self._usage(finished)}

    def _generated(
        self, meta: dict[str, Any], seconds: float, finished: bool = True, first: bool = False
    ) -> dict[str, Any]:
        """One answer of /generate, or one event of it (`first` tells when it was sent)."""
        count = meta["completion_tokens"]
        tokens = [(7 * number + 11) % 32000 for number in range(count)]
        rest = {key: value for key, value in meta.items() if key not in ("id", "prompt_tokens")}
        always, last = self.known["meta_info"], self.known["finished_meta_info"]
        now = time.time()
        info: dict[str, Any] = {
            "id": meta.get("id"),
            "finish_reason": {"type": "length", "length": count} if finished else None,
            "prompt_tokens": meta["prompt_tokens"],
            "weight_version": "default",
            "num_retractions": 0,
            **{
                name: now if name.endswith("_time") and name != "queue_time" else value
                for name, value in always.items()
            },
            **rest,
            "dp_rank": None,
        }
        if self.top >= 0:
            places = [[[-0.01 - 5.0 * place, token + place, None] for place in range(self.top)] for token in tokens]
            info["input_token_logprobs"], info["input_top_logprobs"] = [], []
            info["output_token_logprobs"] = [[-0.01, token, None] for token in tokens]
            info["output_token_logprobs_length"] = count
            info["output_top_logprobs"] = places if self.top else []
        if finished:
            info.update({name: now if name.endswith("_ts") else value for name, value in last.items()})
            info["e2e_latency"] = seconds
            if last:
                info["weight_versions"] = _weight_versions(count)
                info["decode_throughput"] = count / seconds if seconds else 0.0
        elif first and last:
            info["response_sent_to_client_ts"] = now
        return {"text": _text(0, count), "output_ids": tokens, "meta_info": info}

    def _usage(self, meta: dict[str, Any]) -> dict[str, Any]:
        details = {"completion_tokens_details": None} if self.known["meta_info"] else {}
        return {**_usage(meta), **details}


def _part(part: dict[str, Any], last: bool) -> dict[str, Any]:
    """The one choice of a streamed event."""
    return {"index": 0, **part, "logprobs": None, "finish_reason": "length" if last else None, "matched_stop": None}


def _weight_versions(count: int) -> list[dict[str, Any]]:
    return [{"version": "default", "start": 0, "end": count}]


def _refusal(error: Exception) -> dict[str, Any]:
    """What a request gets that does not have the fields, or is no JSON."""
    what = f"Field required: {error}" if isinstance(error, KeyError) else str(error)
    return {
        "object": "error",
        "message": f"1 validation error: {what}",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


def _metric(name: str, facts: dict[str, Any], model: str) -> str:
    """A metric as a real server gave it, under this server's model name."""
    lines = [f"# HELP {name} {facts['help']}", f"# TYPE {name} {facts['type']}"]
    for sample, labels, value in facts["samples"]:
        shown = ",".join(
            f'{label}="{model if label == "model_name" else text}"' for label, text in sorted(labels.items())
        )
        lines.append(f"{sample}{{{shown}}} {value}" if shown else f"{sample} {value}")
    return "\n".join(lines) + "\n"


def _usage(meta: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = meta["prompt_tokens"], meta["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _text(start: int, count: int) -> str:
    return "".join(" " + WORDS[number % len(WORDS)] for number in range(start, start + count))


def _tokens(prompt: object) -> int:
    """Tokens of a prompt: ids are counted, text goes by words."""
    return max(1, len(prompt) if isinstance(prompt, list) else len(str(prompt).split()))


def _gone(client: socket.socket) -> bool:
    """Whether the peer has closed its end."""
    try:
        readable = select.select([client], [], [], 0)[0]
        return bool(readable) and client.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True
