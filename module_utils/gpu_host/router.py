"""The router before the servers: takes a worker out of it, puts it back, and keeps a note of what is out.

Two interfaces, told apart by asking (read from the router's source, sgl-project/sglang):

* today's (sgl-model-gateway, later sgl-routers): GET /workers, POST /workers with JSON, DELETE /workers/<id>. Additions
  and removals are queued (202), so that only the list tells when they are done. The id was the URL at first and is a
  UUID now; the list has it. It does not show a worker's key: whoever adds a worker brings the key along.
* older sgl-routers': GET /list_workers, POST /remove_worker?url=, and POST /add_worker?url=, which answers once the
  worker is healthy.

The note lies in the host's state folder and is written before a worker is taken out: whoever dies in between, the next
reset or router_worker finds what must go back. It holds no key, only the path of the router's key file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from . import server_http
from .deadline import Deadline
from .storage import StorageError, private_folder, read_private, write_private

REQUEST_SECONDS = 5.0
REMOVE_SECONDS = 10.0  # a queued removal is done within this time
ADD_SECONDS = 60.0  # the router asks the worker for its model first, and again where that fails
POLL_SECONDS = 0.2
PORT = "{port}"  # in a worker's URL: the server's own port
# What a worker was registered with, as the list shows it, and what POST /workers takes.
KEPT = ("model_id", "priority", "cost", "worker_type", "bootstrap_port", "labels")
NOTE = "router.json"


class RouterTrouble(Exception):
    """The router did not do what it was asked; the text is a sentence that names it and says what to do."""


@dataclass(frozen=True)
class Worker:
    """A worker as the router lists it. ``id`` is what a removal names, ``facts`` what it is registered with."""

    url: str
    id: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Out:
    """A worker that a reset took out: of which router, the port of its server, and what puts it back as it was."""

    router: str
    worker: str
    port: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    key_file: str = ""
    since: str = ""
    run_id: str = ""


def worker_address(worker_url: str, port: int) -> str:
    return worker_url.replace(PORT, str(port)).rstrip("/")


def read_key(path: str) -> str:
    """The router's key: the first line of its file, '' where no file is named. RouterTrouble where it can't be read."""
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            key = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise RouterTrouble(f"The router's key file {path} can't be read on this host: {why}.") from None
    if not key:
        raise RouterTrouble(f"The router's key file {path} is empty: its first line is the key.")
    return key


class Router:
    """One router. Every call ends by a deadline; RouterTrouble where it does not do what was asked."""

    def __init__(self, url: str, key: str = "", sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        self._endpoint = server_http.Endpoint(
            parts.hostname or "", parts.port or (443 if tls else 80), tls, key, verified=True
        )
        self._prefix = parts.path
        self._sleep = sleep
        self._old = False  # whether it has the old interface alone

    def workers(self) -> list[Worker]:
        """All workers, by the interface that it has."""
        if not self._old:
            answer = self._ask("GET", "/workers")
            if answer.status == 200:
                rows = _member(answer, "workers")
                if rows is not None:
                    return [_worker(row) for row in rows if isinstance(row, dict) and isinstance(row.get("url"), str)]
            elif answer.status not in (404, 405):
                raise self._refused("GET /workers", answer)
        answer = self._ask("GET", "/list_workers")
        urls = _member(answer, "urls") if answer.status == 200 else None
        if urls is None:
            raise RouterTrouble(
                f"{self.url} answers neither GET /workers nor GET /list_workers as an SGLang router does (HTTP"
                f" {answer.status}): is router_url the router's own address?"
            )
        self._old = True
        return [Worker(url, url) for url in urls if isinstance(url, str)]

    def find(self, url: str) -> list[Worker]:
        """The worker of this URL; with data parallelism its ranks, which the router lists as <url>@<rank>."""
        return [one for one in self.workers() if _same(one.url, url)]

    def remove(self, url: str) -> None:
        """Take a worker out and wait until it is no longer listed: from then on it gets no new request."""
        deadline = Deadline(REMOVE_SECONDS)
        for one in self.find(url):
            if self._old:
                answer = self._ask("POST", f"/remove_worker?url={quote(one.url, safe='')}")
            else:
                answer = self._ask("DELETE", f"/workers/{quote(one.id or one.url, safe='')}")
            if answer.status not in (200, 202, 204, 404):
                raise self._refused(f"the removal of {one.url}", answer)
        self._await(url, False, deadline, f"{self.url} was asked to take out {url} and lists it still: look in its log")

    def add(self, url: str, facts: Mapping[str, Any] | None = None, key: str = "") -> None:
        """Put a worker in and wait until it is listed. ``key`` is the worker's own, where it wants one."""
        deadline = Deadline(ADD_SECONDS)
        if self.find(url):
            return
        if self._old:
            own = f"&api_key={quote(key, safe='')}" if key else ""
            answer = self._ask("POST", f"/add_worker?url={quote(url, safe='')}{own}", seconds=ADD_SECONDS)
        else:
            body = {**{name: value for name, value in (facts or {}).items() if name in KEPT}, "url": url}
            if key:
                body["api_key"] = key
            answer = self._ask("POST", "/workers", body, ADD_SECONDS)
        if answer.status not in (200, 201, 202, 409):
            raise self._refused(f"the addition of {url}", answer)
        otherwise = f"{self.url} was asked to add {url} and does not list it: look in its log, add it there"
        self._await(url, True, deadline, otherwise)

    def _await(self, url: str, listed: bool, deadline: Deadline, otherwise: str) -> None:
        while bool(self.find(url)) is not listed:
            if deadline.expired():
                raise RouterTrouble(f"{otherwise}.")
            self._sleep(POLL_SECONDS)

    def _ask(self, method: str, path: str, body: Any = None, seconds: float = REQUEST_SECONDS) -> server_http.Answer:
        answer = server_http.ask(self._endpoint, method, self._prefix + path, body, Deadline(seconds))
        if answer.status is None:
            how = "refuses the connection or can't be reached" if answer.trouble == "refused" else "does not answer"
            raise RouterTrouble(f"The router {self.url} {how} from this host.")
        if answer.status in (401, 403):
            raise RouterTrouble(
                f"The router {self.url} refuses the call (HTTP {answer.status}): name the file of its key in"
                " router_api_key_file."
            )
        return answer

    def _refused(self, what: str, answer: server_http.Answer) -> RouterTrouble:
        text = answer.body[:200].decode("utf-8", "replace").replace(self._endpoint.key or "\0", "***")
        return RouterTrouble(f"The router {self.url} refused {what} (HTTP {answer.status}): {' '.join(text.split())}")


def _member(answer: server_http.Answer, name: str) -> list[Any] | None:
    facts = answer.json()
    found = facts.get(name) if isinstance(facts, dict) else None
    return found if isinstance(found, list) else None


def _worker(row: Mapping[str, Any]) -> Worker:
    facts = {name: row[name] for name in KEPT if row.get(name) not in (None, "", "unknown", {})}
    if "labels" not in facts and isinstance(row.get("metadata"), dict) and row["metadata"]:
        facts["labels"] = row["metadata"]
    return Worker(row["url"].rstrip("/"), str(row.get("id") or ""), facts)


def _same(listed: str, wanted: str) -> bool:
    listed, wanted = listed.rstrip("/"), wanted.rstrip("/")
    return listed == wanted or listed.startswith(f"{wanted}@")


# ---- the note ----


def note_path(state_folder: str) -> str:
    return os.path.join(state_folder, NOTE)


def noted(state_folder: str) -> list[Out]:
    """What is out by the note. StorageError where there is one that can't be used."""
    path = note_path(state_folder)
    try:
        rows = json.loads(read_private(path))
        return [Out(**row) for row in rows]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"The note {path} of what is out of the router can't be read: {error.strerror}.") from error
    except (ValueError, TypeError):
        raise StorageError(
            f"The note {path} of what is out of the router is broken: look which workers the router lacks, add them"
            " there, and remove the file."
        ) from None


def write_note(state_folder: str, out: Sequence[Out]) -> None:
    """Replace the note as a whole; remove it where nothing is out."""
    path = note_path(state_folder)
    try:
        if out:
            private_folder(state_folder)
            write_private(path, json.dumps([asdict(one) for one in out], indent=1) + "\n")
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        raise StorageError(f"The note {path} could not be written: {error.strerror}.") from error


def merged(old: Sequence[Out], new: Sequence[Out]) -> list[Out]:
    """Both, a new entry in the place of an old one of the same worker."""
    known = {(one.router, one.worker): one for one in [*old, *new]}
    return list(known.values())
