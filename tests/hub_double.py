"""A Hugging Face hub on loopback: what huggingface_hub asks for to list and fetch a model, with faults on demand.

Serves one model from a folder: the revisions, the tree, files with Range, a token that it may ask for. Files from
`lfs_bytes` on are large ones with a published SHA-256. With `xet` it offers the fast transfer, whose storage never
answers (as seen near the end of large models), so that only plain HTTP gets through.
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
from typing import Any
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
    xet: bool = False
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
            self._json(
                {"casUrl": f"{hub.url}/silence", "accessToken": "x", "exp": int(time.time()) + 3600},
                {
                    "X-Xet-Cas-Url": f"{hub.url}/silence",
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
                entry["xetHash"] = hashlib.sha256(b"xet" + data).hexdigest()
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
            self.send_header("X-Xet-Hash", hashlib.sha256(b"xet" + data).hexdigest())
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


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
