"""A Hugging Face hub on loopback: what huggingface_hub asks for to list and fetch a model, with faults on demand.

Serves one model from a folder: the revisions, the tree, files with Range, a token that it may ask for. Files from
`lfs_bytes` on are large ones with a published SHA-256. With `xet` it offers the fast transfer: `works`, or `silent`
(its storage never answers, as seen near the end of large models, so that only plain HTTP gets through).

The fast transfer is the part of Xet's protocol that hf_xet 1.8 needs to fetch: a reconstruction of a file (v1, since a
404 for v2 makes it ask for that) names pieces of xorbs, and a xorb is a row of chunks, each with 8 bytes before it:
version 0, compressed size (3 bytes, little endian), scheme 0 for plain, uncompressed size. Here a file is one xorb.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CHUNK = 1 << 16


@dataclass
class Hub:
    """`with Hub(folder) as hub: ... hub.url`. The fields below may be changed while it serves."""

    folder: Path
    repository: str = "acme/tiny"
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main", "v1")
    token: str = ""
    gated: bool = False
    xet: Literal["", "works", "silent"] = ""
    lfs_bytes: int = 1024
    # Name -> how often: send one wrong byte, end the connection half way, fall silent half way.
    corrupt: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    stall: dict[str, int] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    answer_status: int = 0

    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    sent: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Hub:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def source(self) -> str:
        return f"hf:{self.repository}@main"

    def gets(self, name: str) -> list[str]:
        """The Range of each GET of a file, '' for none."""
        return [ranged for method, path, ranged in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def take(self, fault: dict[str, int], name: str) -> bool:
        """Whether this request gets the fault; counts down."""
        with self._lock:
            if fault.get(name, 0) < 1:
                return False
            fault[name] -= 1
            return True

    def wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if hub.answer_status:
            return self._error(hub.answer_status, "", "busy")
        if path.startswith("/silence"):
            return hub.wait(600)
        if path.startswith("/xet/"):
            return self._xet(path.removeprefix("/xet"))
        if not path.startswith((f"{api}/", files)) and path != api:
            return self._error(404 if hub.token in ("", self._token()) else 401, "RepoNotFound", "Repository not found")
        if hub.token and self._token() != hub.token:
            return self._error(401, "RepoNotFound", "Repository not found")
        if hub.gated:
            return self._error(403, "GatedRepo", "Access to this model is restricted")
        if match := re.fullmatch(rf"{re.escape(api)}(?:/revision/(.+))?", path):
            if self._known(match[1] or "main"):
                self._json({"id": hub.repository, "modelId": hub.repository, "sha": hub.commit, "siblings": []})
        elif match := re.fullmatch(rf"{re.escape(api)}/tree/([^/]+)/?", path):
            if self._known(match[1]):
                self._json([self._entry(one) for one in hub.files()])
        elif "/xet-read-token/" in path:
            storage = f"{hub.url}/{'xet' if hub.xet == 'works' else 'silence'}"
            self._json(
                {"casUrl": storage, "accessToken": "x", "exp": int(time.time()) + 3600},
                {
                    "X-Xet-Cas-Url": storage,
                    "X-Xet-Access-Token": "x",
                    "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
                },
            )
        elif path.startswith(files):
            revision, _, name = path[len(files) :].partition("/")
            if self._known(revision):
                self._file(name, body)
        else:
            self._error(404, "EntryNotFound", "Entry not found")

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _known(self, revision: str) -> bool:
        if revision in (*self.hub.branches, self.hub.commit):
            return True
        self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    def _entry(self, path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        name = str(path.relative_to(self.hub.folder))
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}
        if len(data) >= self.hub.lfs_bytes:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            if self.hub.xet:
                entry["xetHash"] = _xet_hash(data)
        return entry

    def _file(self, name: str, body: bool) -> None:
        hub, path = self.hub, self.hub.folder / name
        if not path.is_file():
            return self._error(404, "EntryNotFound", "Entry not found")
        data = path.read_bytes()
        large = len(data) >= hub.lfs_bytes
        etag = hashlib.sha256(data).hexdigest() if large else _git_hash(data)
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
        if start >= len(data) > 0:
            return self._error(416, "", "Range not satisfiable")
        if body and hub.take(hub.corrupt, name):
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if large and hub.xet:
            self.send_header("X-Xet-Hash", _xet_hash(data))
            self.send_header(
                "X-Xet-Refresh-Route", f"{hub.url}/api/models/{hub.repository}/xet-read-token/{hub.commit}"
            )
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        stall, cut = hub.take(hub.stall, name), hub.take(hub.cut, name)
        end = start + (len(data) - start) // 2 if stall or cut else len(data)
        try:
            for at in range(start, end, _CHUNK):
                part = data[at : min(at + _CHUNK, end)]
                self.wfile.write(part)
                with hub._lock:
                    hub.sent[name] = hub.sent.get(name, 0) + len(part)
                if hub.bytes_per_second:
                    hub.wait(len(part) / hub.bytes_per_second)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return
        if stall:
            hub.wait(600)
        self.close_connection = stall or cut or self.close_connection

    def _xet(self, path: str) -> None:
        """Xet's storage."""
        kind, _, wanted = path.rpartition("/")
        data = next((data for data in map(Path.read_bytes, self.hub.files()) if _xet_hash(data) == wanted), None)
        if kind not in ("/v1/reconstructions", "/xorbs") or data is None:
            return self._error(404, "", "not here")
        size = len(data)
        whole = _xorb(data)
        first, last = 0, (size if kind == "/v1/reconstructions" else len(whole)) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2]), last)
        if first > last:
            return self._error(416, "", "Range not satisfiable")
        if kind == "/xorbs":
            part = whole[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(whole)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)
            return
        begin, end = first // _CHUNK, last // _CHUNK + 1  # chunks
        chunks, bytes_ = {"start": begin, "end": end}, [begin * (_CHUNK + 8), min(end * (_CHUNK + 8), len(whole)) - 1]
        self._json(
            {
                "offset_into_first_range": first - begin * _CHUNK,
                "terms": [
                    {"hash": wanted, "unpacked_length": min(end * _CHUNK, size) - begin * _CHUNK, "range": chunks}
                ],
                "fetch_info": {
                    wanted: [
                        {
                            "range": chunks,
                            "url": f"{self.hub.url}/xet/xorbs/{wanted}",
                            "url_range": {"start": bytes_[0], "end": bytes_[1]},
                        }
                    ]
                },
            }
        )

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str, message: str) -> None:
        data = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _xet_hash(data: bytes) -> str:
    """Any 64 digits do: hf_xet takes the hub's word for it."""
    return hashlib.sha256(b"xet" + data).hexdigest()


def _xorb(data: bytes) -> bytes:
    def chunk(part: bytes) -> bytes:
        size = len(part).to_bytes(3, "little")
        return b"\0" + size + b"\0" + size + part

    return b"".join(chunk(data[at : at + _CHUNK]) for at in range(0, len(data), _CHUNK))


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
