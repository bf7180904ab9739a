"""The contract of a server's HTTP side: the same requests to any SGLang, and the shape of what each answered.

`ask` sends `REQUESTS`; what real servers answered lies in tests/recorded/contract/ and is what the stand-in is held
against (tests/unit/test_contract.py). `make rehearsal` asks the real server again and compares with that record.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

RECORDED_FOLDER = "tests/recorded/contract"
TEXT = "The capital city of France is"
FEW = {"temperature": 0, "max_new_tokens": 4}
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

REQUESTS: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "health that generates": ("GET", "/health_generate", None),
    "ready": ("GET", "/ready", None),
    "ping": ("GET", "/ping", None),
    "model info": ("GET", "/model_info", None),
    "model info, old path": ("GET", "/get_model_info", None),
    "server info": ("GET", "/server_info", None),
    "server info, old path": ("GET", "/get_server_info", None),
    "models": ("GET", "/v1/models", None),
    "loads": ("GET", "/v1/loads", None),
    "a path that is not there": ("GET", "/nothing", None),
    "posting to a path that is not there": ("POST", "/nothing", {}),
    "readiness": ("GET", "/readiness", None),
    "getting what is to be posted": ("GET", "/v1/completions", None),
    "generate": ("POST", "/generate", {"text": TEXT, "sampling_params": FEW}),
    "generate from tokens": ("POST", "/generate", {"input_ids": [300, 301, 302], "sampling_params": FEW}),
    "generate two": ("POST", "/generate", {"text": [TEXT, TEXT], "sampling_params": FEW}),
    "generate with likelihoods": (
        "POST",
        "/generate",
        {"text": TEXT, "sampling_params": FEW, "return_logprob": True, "top_logprobs_num": 2},
    ),
    "generate as a stream": ("POST", "/generate", {"text": TEXT, "sampling_params": FEW, "stream": True}),
    "generate from nothing": ("POST", "/generate", {"sampling_params": FEW}),
    "generate from broken JSON": ("POST", "/generate", b"{"),
    "completion": ("POST", "/v1/completions", {"model": "default", "prompt": TEXT, "max_tokens": 4, "temperature": 0}),
    "completion as a stream": (
        "POST",
        "/v1/completions",
        {"model": "default", "prompt": TEXT, "max_tokens": 4, "temperature": 0, "stream": True},
    ),
    "chat": (
        "POST",
        "/v1/chat/completions",
        {"model": "default", "messages": CHAT, "max_tokens": 4, "temperature": 0},
    ),
    "chat cut short": (
        "POST",
        "/v1/chat/completions",
        {"model": "default", "messages": CHAT, "max_tokens": 1, "temperature": 0},
    ),
    "chat as a stream": (
        "POST",
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": CHAT,
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "chat with a wrong model": (
        "POST",
        "/v1/chat/completions",
        {"model": "gpt-4", "messages": CHAT, "max_tokens": 4, "temperature": 0},
    ),
    "chat without messages": ("POST", "/v1/chat/completions", {"model": "default"}),
    # Some of them are there only once something was generated, and found in the cache.
    "metrics": ("GET", "/metrics", None),
    "flush the cache": ("POST", "/flush_cache", None),
    "flush the cache by GET": ("GET", "/flush_cache", None),
}


def ask(port: int, timeout: float = 60) -> dict[str, dict[str, Any]]:
    """What the server on this port of loopback answers to each request."""
    return {name: answer(port, *request, timeout=timeout) for name, request in REQUESTS.items()}


def answer(port: int, method: str, path: str, body: Any, timeout: float = 60) -> dict[str, Any]:
    """Status, content type and shape of one answer; status 0 where none came."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data is not None else {}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", b"" if data is None and method == "POST" else data, headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return described(reply.status, reply.headers.get("Content-Type"), reply.read())
    except urllib.error.HTTPError as error:
        return described(error.code, error.headers.get("Content-Type"), error.read())
    except OSError:
        return {"status": 0, "type": None, "shape": None}


def described(status: int, kind: str | None, body: bytes) -> dict[str, Any]:
    """The part of an answer that has to stay the same."""
    kind = (kind or "").partition(";")[0].strip() or None
    text = body.decode(errors="replace")
    if kind == "text/event-stream":
        found: Any = _stream(text)
    elif kind == "application/json":
        found = shape(json.loads(text)) if text else None
    elif "# TYPE" in text:
        found = metrics(text)
    else:
        found = text
    return {"status": status, "type": kind, "shape": found}


def shape(value: Any) -> Any:
    """A JSON value with its types in place of its values: lists by their first element, numbers of one kind."""
    if isinstance(value, Mapping):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    return "null" if value is None else "text"


def metrics(text: str) -> dict[str, Any]:
    """Type and labels of each metric. Those of buckets, sums and counts count to their histogram."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found: dict[str, Any] = {}
    for name, labels in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", text, re.MULTILINE):
        base = re.sub(r"_(bucket|sum|count|total|created)$", "", name)
        kind = kinds.get(name) or kinds.get(base)
        if kind:
            names = sorted(re.findall(r'(\w+)="', labels))
            found[base if base in kinds else name] = {"type": kind, "labels": [one for one in names if one != "le"]}
    return found


def _stream(text: str) -> dict[str, Any]:
    """The shapes of the first and the last event, and how it ends."""
    events = [line[len("data: ") :] for line in text.split("\n\n") if line.startswith("data: ")]
    values = [shape(json.loads(event)) for event in events if event != "[DONE]"]
    return {"first": values[0] if values else None, "last": values[-1] if values else None, "end": events[-1:]}


def all_differences(real: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """How these answers differ from those of a real server, request by request."""
    return [f"{request}: {clause}" for request in real for clause in differences(real[request], other[request])]


def differences(real: Any, other: Any, place: str = "") -> Iterator[str]:
    """How `other` differs from what a real server answers, one clause each; null may stand for any value."""
    if isinstance(real, Mapping) and isinstance(other, Mapping):
        for name in real:
            if name not in other:
                yield f"{place}/{name} is missing"
            else:
                yield from differences(real[name], other[name], f"{place}/{name}")
        for name in other:
            if name not in real:
                yield f"{place}/{name} is not in the real answer"
    elif isinstance(real, list) and isinstance(other, list):
        if real and other:
            yield from differences(real[0], other[0], f"{place}[]")
    elif real != other and "null" not in (real, other):
        yield f"{place} is {_short(other)}, really {_short(real)}"


def _short(value: Any) -> str:
    return json.dumps(value)[:80]
