"""SGLang's router, as far as its workers and its clients see it: lists, adds and removes workers, passes requests on.

``interface``: ``uuid`` (today's model gateway), ``url`` (the same paths, before it had UUIDs) or ``old`` (/add_worker,
/remove_worker, /list_workers). With a key every call needs it. Removals and additions of the first two are queued and
done ``queue_seconds`` later. As a program it also serves on a lab host:
``python3 router_double.py PORT INTERFACE URL...``.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class RouterDouble:
    """`with RouterDouble(["http://gpu01:30000"]) as router: ... router.url`."""

    def __init__(self, workers=(), interface="uuid", key="", port=0, address="127.0.0.1", queue_seconds=0.05):
        self.interface, self.key, self.queue_seconds = interface, key, queue_seconds
        self.workers = {url: {"url": url, "id": str(uuid.uuid4()), "priority": 50} for url in workers}
        self.keys = {}  # of each worker that was added with one
        self.calls = []  # method and path without what a query holds
        self.stuck = False  # takes removals and additions, and does none
        self.silent = False
        self.turn = itertools.count()
        self._http = ThreadingHTTPServer((address, port), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def serve(self):
        self._http.serve_forever()

    def later(self, change):
        if not self.stuck:
            threading.Timer(self.queue_seconds, change).start()

    def add(self, facts):
        if "api_key" in facts:
            self.keys[facts["url"]] = facts.pop("api_key")
        self.workers[facts["url"]] = {"id": str(uuid.uuid4()), **facts}

    def rows(self):
        return [
            {**one, "id": one["url"] if self.interface == "url" else one["id"], "is_healthy": True}
            for one in list(self.workers.values())
        ]

    def _handler(router):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, value):
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle_any(self):
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = urlsplit(self.path)
                router.calls.append((self.command, parts.path))
                if router.silent:
                    time.sleep(30)
                if router.key and self.headers.get("Authorization") != f"Bearer {router.key}":
                    return self.answer(401, {"error": "Unauthorized"})
                old = router.interface == "old"
                if old and parts.path in ("/add_worker", "/remove_worker", "/list_workers"):
                    return self.old(parts)
                if not old and parts.path.startswith("/workers"):
                    return self.rest(parts.path.removeprefix("/workers").lstrip("/"), data)
                if parts.path in ("/generate", "/v1/completions", "/v1/chat/completions"):
                    return self.forward(data)
                return self.answer(404, b"")

            do_GET = do_POST = do_DELETE = handle_any

            def old(self, parts):
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                if parts.path == "/list_workers":
                    return self.answer(200, {"urls": list(router.workers)})
                if parts.path == "/add_worker":
                    if query["url"] in router.workers:
                        return self.answer(400, b"Worker already exists")
                    router.add(query)
                    return self.answer(200, b"Successfully added worker")
                if not router.stuck:
                    router.workers.pop(query["url"], None)
                return self.answer(200, b"Successfully removed worker")

            def rest(self, name, data):
                if self.command == "GET":
                    return self.answer(200, {"workers": router.rows(), "total": len(router.workers)})
                if self.command == "POST":
                    facts = json.loads(data)
                    router.later(lambda: router.add(facts))
                    return self.answer(202, {"status": "accepted"})
                wanted = unquote(name)
                found = [row["url"] for row in router.rows() if row["id"] == wanted]
                if not found:
                    return self.answer(400, {"error": f"Invalid worker_id '{wanted}' (expected UUID)"})
                router.later(lambda: router.workers.pop(found[0], None))
                return self.answer(202, {"status": "accepted"})

            def forward(self, data):
                """To the next worker, and to another one where it can't be reached: as the router's retries do."""
                for _ in range(5):
                    urls = list(router.workers)
                    if not urls:
                        return self.answer(503, {"error": "no worker"})
                    request = urllib.request.Request(urls[next(router.turn) % len(urls)] + self.path, data)
                    try:
                        with urllib.request.urlopen(request, timeout=60) as got:
                            return self.answer(got.status, got.read())
                    except urllib.error.HTTPError as error:
                        return self.answer(error.code, error.read())
                    except (urllib.error.URLError, ConnectionRefusedError):
                        continue
                    except (OSError, http.client.HTTPException):
                        return self.answer(502, {"error": "cut"})
                return self.answer(503, {"error": "no worker answers"})

        return Handler


if __name__ == "__main__":
    RouterDouble(sys.argv[3:], sys.argv[2], port=int(sys.argv[1]), address="0.0.0.0").serve()
