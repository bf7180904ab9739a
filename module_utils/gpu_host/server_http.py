"""What a server says about itself over HTTP, under its old and its new endpoint names.

A state is told by endpoints that change nothing. `/health` is not one of them: it sends a token through the model and
takes a second at least. `/v1/loads` (sglang 0.5.17 and 0.5.23: served from shared memory, so a hung scheduler can't
block it) holds when each scheduler last reported; `/metrics` of SGLang and vLLM and the older `/get_load` are second
best.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .deadline import Deadline

MOST_BYTES = 8 << 20
# Counters of /metrics that only move when a scheduler works.
_COUNTERS = ("generation_tokens_total", "prompt_tokens_total", "realtime_tokens_total", "num_requests_total")
_RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
_WAITING = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers, and the key that it asks for (which is never shown).

    ``verified``: its certificate must be good, since it is reached over a network.
    """

    address: str
    port: int
    tls: bool = False
    key: str = field(default="", repr=False)
    verified: bool = False


@dataclass(frozen=True)
class Answer:
    """`status` is None when there was no answer, and `trouble` says why: 'refused' or 'silent'."""

    status: int | None
    body: bytes = b""
    trouble: str = ""

    def json(self) -> Any:
        """The body as JSON, or None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True)
class Load:
    """Requests by the server's own account; a number that it does not tell is None.

    `stamps` are the times (seconds since 1970) at which its schedulers last reported, `counters` whatever only grows
    when they work: both are compared between two looks.
    """

    running: int | None = None
    waiting: int | None = None
    stamps: tuple[float, ...] = ()
    counters: tuple[float, ...] = ()
    version: str = ""

    @property
    def requests(self) -> int | None:
        if self.running is None and self.waiting is None:
            return None
        return (self.running or 0) + (self.waiting or 0)


@dataclass(frozen=True)
class LoadAnswer:
    """`answered`: the main process answered anything at all. `load` is None when it does not tell its load."""

    answered: bool
    load: Load | None
    trouble: str = ""


def get(endpoint: Endpoint, path: str, deadline: Deadline) -> Answer:
    """One GET whose every step ends by the deadline. Never raises for what the server does."""
    return _ask(endpoint, "GET", path, None, deadline)


def post(endpoint: Endpoint, path: str, body: Any, deadline: Deadline) -> Answer:
    """One POST of a JSON body, as `get`."""
    return _ask(endpoint, "POST", path, json.dumps(body).encode(), deadline)


def ask(endpoint: Endpoint, method: str, path: str, body: Any, deadline: Deadline) -> Answer:
    """One call of any method, with a JSON body where there is one, as `get`."""
    return _ask(endpoint, method, path, None if body is None else json.dumps(body).encode(), deadline)


def _ask(endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline: Deadline) -> Answer:
    if deadline.expired():
        return Answer(None, trouble="silent")
    connection = _connection(endpoint, max(0.05, deadline.remaining()))
    headers = {"Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        parts, size = [], 0
        while size < MOST_BYTES:
            if deadline.expired():
                return Answer(None, trouble="silent")
            if connection.sock is not None:  # None once the response alone owns the socket
                connection.sock.settimeout(max(0.05, deadline.remaining()))
            part = response.read1(1 << 16)
            if not part:
                break
            parts.append(part)
            size += len(part)
        return Answer(response.status, b"".join(parts))
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return Answer(None, trouble="refused")
    except socket.timeout:
        return Answer(None, trouble="silent")
    except (OSError, http.client.HTTPException, ValueError):
        return Answer(None, trouble="refused")
    finally:
        connection.close()


def _connection(endpoint: Endpoint, seconds: float) -> http.client.HTTPConnection:
    if not endpoint.tls:
        return http.client.HTTPConnection(endpoint.address, endpoint.port, timeout=seconds)
    import ssl  # seldom needed, and slow to import

    context = ssl.create_default_context()
    if not endpoint.verified:
        # The socket belongs to the server's own process, which its certificate would not make more certain.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(endpoint.address, endpoint.port, timeout=seconds, context=context)


def load(endpoint: Endpoint, deadline: Deadline) -> LoadAnswer:
    """How many requests run and wait, by the first endpoint that tells."""
    trouble = ""
    for path, read in (
        ("/v1/loads?include=core", parse_loads),
        ("/metrics", parse_metrics),
        ("/get_load", parse_old_load),
    ):
        answer = get(endpoint, path, deadline)
        if answer.status is None:
            return LoadAnswer(bool(trouble), None, answer.trouble)
        if answer.status == 200:
            found = read(answer.body)
            if found is not None:
                return LoadAnswer(True, found)
        trouble = "its API key is not known" if answer.status in (401, 403) else "it does not tell its load"
    return LoadAnswer(True, None, trouble)


def is_ready(endpoint: Endpoint, deadline: Deadline) -> bool | None:
    """/ready (sglang 0.5.23): whether the start-up has finished; None where the server does not know that path."""
    answer = get(endpoint, "/ready", deadline)
    return {200: True, 503: False}.get(answer.status or 0)


def scheduler_answers(endpoint: Endpoint, deadline: Deadline) -> tuple[bool | None, str]:
    """Whether the schedulers answer a question (/server_info asks each of them), and the version it tells.

    None: the server has no such endpoint, or wants a key that we do not have.
    """
    for path in ("/server_info", "/get_server_info"):
        answer = get(endpoint, path, deadline)
        if answer.status is None:
            return (False if answer.trouble == "silent" else None), ""
        if answer.status == 200:
            facts = answer.json()
            return True, str(facts.get("version") or "") if isinstance(facts, dict) else ""
    return None, ""


def parse_loads(body: bytes) -> Load | None:
    """The answer of /v1/loads."""
    facts = _json(body)
    loads = facts.get("loads") if isinstance(facts, dict) else None
    if not isinstance(loads, list):
        return None
    ranks = [rank for rank in loads if isinstance(rank, dict)]
    if not ranks:  # answers before the first scheduler has reported
        return Load(version=str(facts.get("version") or ""))
    return Load(
        running=sum(_whole(rank.get("num_running_reqs")) for rank in ranks),
        waiting=sum(_whole(rank.get("num_waiting_reqs")) for rank in ranks),
        stamps=tuple(_number(rank.get("timestamp")) for rank in ranks if _number(rank.get("timestamp")) > 0),
        counters=tuple(
            _number(rank.get(name))
            for rank in ranks
            for name in ("total_prefill_uncached_tokens", "num_total_tokens", "num_used_tokens")
        ),
        version=str(facts.get("version") or ""),
    )


def parse_old_load(body: bytes) -> Load | None:
    """The answer of /get_load: one object per scheduler, in the oldest versions a bare number of requests."""
    facts = _json(body)
    if isinstance(facts, dict) and "load" in facts:
        return Load(running=_whole(facts["load"]), waiting=0)
    if not isinstance(facts, list) or not all(isinstance(rank, dict) for rank in facts):
        return None
    waiting = sum(_whole(rank.get("num_waiting_reqs")) for rank in facts)
    return Load(running=max(0, sum(_whole(rank.get("num_reqs")) for rank in facts) - waiting), waiting=waiting)


def parse_metrics(body: bytes) -> Load | None:
    """The gauges and counters of /metrics that matter here; None where it has no such gauge."""
    running: list[float] = []
    waiting: list[float] = []
    counters = []
    for line in body.decode("utf-8", "replace").splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, text = sample.groups()
        try:
            value = float(text)
        except ValueError:
            continue
        if name in _RUNNING or name in _WAITING:
            # With priorities each count is given again per priority.
            if re.search(r'(?:^|,)priority="[^"]', labels or ""):
                continue
            (running if name in _RUNNING else waiting).append(value)
        elif name.endswith(_COUNTERS):
            counters.append(value)
    if not running and not waiting:
        return None
    return Load(int(sum(running)), int(sum(waiting)), counters=tuple(counters))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _whole(value: object) -> int:
    return int(_number(value))


def api_key(argv: Sequence[str], environment: Mapping[str, str] | None, cwd: str) -> str:
    """The key that a server of this command line wants, or an empty string.

    From the command line, from its `--config` file, or (vLLM) from VLLM_API_KEY in its environment.
    """
    key = option(argv, "--api-key")
    if not key:
        key = config_value(argv, cwd, "api-key")
    return key or (environment or {}).get("VLLM_API_KEY", "")


def option(argv: Sequence[str], name: str) -> str:
    """The value of an option on a command line; the last one counts, as with argparse."""
    found = ""
    for position, word in enumerate(argv):
        if word == name and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(name + "="):
            found = word[len(name) + 1 :]
    return found


def config_value(argv: Sequence[str], cwd: str, name: str) -> str:
    """A plain value of the YAML file that `--config` names: one `name: value` line, which is all that is written."""
    path = option(argv, "--config")
    if not path:
        return ""
    try:
        with open(path if path.startswith("/") else f"{cwd}/{path}", encoding="utf-8") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return ""
    found = ""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip().strip("'\"").replace("_", "-") == name:
            value = value.strip()
            quoted = re.match(r"""(["'])(.*?)\1""", value)
            found = quoted.group(2) if quoted else value.partition(" #")[0].strip()
    return found
