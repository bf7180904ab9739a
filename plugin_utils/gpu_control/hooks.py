"""Tells somebody about hosts that a reset left dirty: a command, or a webhook, gets the run record as JSON.

Called once a host at the end of a play. Told in time or not at all; whatever becomes of it changes no verdict.
A token is read from its file when it is sent, and stands in no record, message, environment or command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

VARIABLES = ("reset_hook", "reset_hook_on", "reset_hook_token_file", "reset_hook_timeout")
VERDICTS = ("dirty", "unreachable", "unknown")
SECONDS = 10.0
AT_ONCE = 16
MOST_SECONDS = 300.0


@dataclass(frozen=True)
class Hook:
    """Whom to tell: ``command`` or ``url``. ``on``: for which verdicts; ``timeout`` in seconds."""

    command: tuple[str, ...] = ()
    url: str = ""
    on: tuple[str, ...] = VERDICTS[:1]
    token_file: str = ""
    timeout: float = SECONDS

    @property
    def place(self) -> str:
        """What may be shown of it: the path of a webhook is often its secret."""
        if self.command:
            return self.command[0]
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


class HookProblem(ValueError):
    """The variables make no hook; the text is one sentence."""


def hook(values: Mapping[str, Any]) -> Hook | None:
    """The hook that the variables name (None: there is none). HookProblem where they make no sense."""
    wanted = values.get("reset_hook")
    if not wanted:
        return None
    command: tuple[str, ...] = ()
    url = ""
    if isinstance(wanted, str) and wanted.startswith(("http://", "https://")):
        url = wanted
        _check_url(url)
    elif isinstance(wanted, (list, tuple)) and all(isinstance(word, str) and "\0" not in word for word in wanted):
        command = tuple(wanted)
        if shutil.which(command[0]) is None:
            raise HookProblem(f"reset_hook: there is no program {command[0]!r} on the control node.")
    else:
        raise HookProblem(
            "reset_hook is neither a command as a list of words (['/usr/local/bin/page', '--urgent']) nor a URL "
            "(https://...)."
        )
    on = values.get("reset_hook_on") or VERDICTS[:1]
    on = (on,) if isinstance(on, str) else on
    if not isinstance(on, (list, tuple)) or not set(map(str, on)) <= set(VERDICTS):
        raise HookProblem(f"reset_hook_on is {on!r}; choose from {', '.join(VERDICTS)}.")
    try:
        timeout = float(values.get("reset_hook_timeout") or SECONDS)
    except (TypeError, ValueError):
        timeout = -1.0
    if not 0 < timeout <= MOST_SECONDS:
        raise HookProblem(
            f"reset_hook_timeout is {values['reset_hook_timeout']!r}; give seconds up to {MOST_SECONDS:g}."
        )
    token_file = str(values.get("reset_hook_token_file") or "")
    if token_file:
        if command:
            raise HookProblem("reset_hook_token_file is for a URL; a command reads its own files.")
        if urlsplit(url).scheme == "http" and not _is_loopback(urlsplit(url).hostname or ""):
            raise HookProblem("reset_hook_token_file would go over the network in the clear: give an https:// URL.")
        read_token(token_file)
    return Hook(command, url, tuple(on), token_file, timeout)


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the variables, before a host is touched."""
    try:
        hook(values)
    except HookProblem as problem:
        return [str(problem)]
    return []


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.hostname or port == 0 or not url.isprintable() or " " in url:
        raise HookProblem("reset_hook is no URL that can be called; give https://host/path.")
    if parts.username or parts.password:
        raise HookProblem("reset_hook has a user or password in its URL; put a token into reset_hook_token_file.")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def read_token(path: str) -> str:
    """The token in this file of the control node, which nobody else may read. HookProblem where it can't be used."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077:
                raise HookProblem(f"reset_hook_token_file: others may read {path}; type chmod 600 {path}.")
            token = file.read(4096).decode("utf-8", "replace").strip()
    except OSError as error:
        raise HookProblem(f"reset_hook_token_file: {path} can't be read: {error.strerror}.") from None
    if not token or not token.isascii() or not token.isprintable():
        raise HookProblem(f"reset_hook_token_file: {path} holds no token of one line.")
    return token


# ---- telling ----


def tell(told: Hook, record: Mapping[str, Any]) -> str:
    """Give it the record; why that failed, or nothing. Returns within its time-out and a moment."""
    body = json.dumps(record, default=str).encode() + b"\n"
    return _run(told, body) if told.command else _post_in_time(told, body)


def _run(told: Hook, body: bytes) -> str:
    """The command with the record as its standard input. A file, not a pipe: a command need not read it."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(body)
        given.seek(0)
        try:
            process = subprocess.Popen(told.command, stdin=given, stdout=said, stderr=said, start_new_session=True)
        except OSError as error:
            return f"{told.place} could not be started: {error.strerror}"
        try:
            status = process.wait(timeout=told.timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{told.place} had not ended after {told.timeout:g} s and was killed"
        if status == 0:
            return ""
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
        lines = said.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing").strip()
        shown = "".join(sign if sign.isprintable() else "?" for sign in last)[:200]
        return f"{told.place} ended with {status}: {shown}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token elsewhere, and turn the POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(told: Hook, body: bytes) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "gpu-reset"}
    try:
        if told.token_file:
            headers["Authorization"] = f"Bearer {read_token(told.token_file)}"
        request = urllib.request.Request(told.url, body, headers, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=told.timeout):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"{told.place} answered {error.code}"
    except HookProblem as problem:
        return str(problem).rstrip(".")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or type(reason).__name__
        return f"{told.place} could not be reached: {why}"
    except Exception as error:  # http.client has errors of its own; a text may hold the URL
        return f"{told.place} could not be reached: {type(error).__name__}"


def _post_in_time(told: Hook, body: bytes) -> str:
    """A time-out of the socket bounds each wait, not the call: a server may answer a byte at a time."""
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(_post(told, body)), daemon=True)
    thread.start()
    thread.join(told.timeout)
    return result[0] if result else f"{told.place} had not answered after {told.timeout:g} s"


def tell_all(
    records: Sequence[Mapping[str, Any]], hook_of: Callable[[str], Hook | None], say: Callable[[str], None]
) -> None:
    """Tell of each host that its hook is for, several at once. ``say`` gets a sentence for each that failed.

    A hook that failed for all of a round is not tried again: a pager that hangs must not hold up a fleet's run.
    """
    todo: list[tuple[str, Hook, Mapping[str, Any]]] = []
    for record in records:
        if record.get("predicted") or record.get("guest") or record.get("verdict") not in VERDICTS:
            continue
        host = str(record["host"])
        try:
            told = hook_of(host)
        except Exception as error:  # templates of the user; Ansible has many kinds of errors
            say(f"The hook of {host} was not called: {' '.join(str(error).split())}")
            continue
        if told is not None and record["verdict"] in told.on:
            todo.append((host, told, record))
    for start in range(0, len(todo), AT_ONCE):
        part = todo[start : start + AT_ONCE]
        failed: dict[int, str] = {}
        threads = [
            threading.Thread(target=_tell_one, args=(n, *one, failed), daemon=True) for n, one in enumerate(part)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, why in sorted(failed.items()):
            say(f"The hook of {part[number][0]} failed: {why}. Its verdict stands, and so does its record.")
        rest = len(todo) - start - len(part)
        if len(failed) == AT_ONCE and rest:
            say(f"The hook failed {AT_ONCE} times in a row and was not called for {rest} more hosts.")
            return


def _tell_one(number: int, _host: str, told: Hook, record: Mapping[str, Any], failed: dict[int, str]) -> None:
    try:
        why = tell(told, record)
    except Exception as error:
        why = f"{told.place}: {type(error).__name__}"
    if why:
        failed[number] = why


# ---- Ansible ----


def of_play(play: Any) -> Callable[[str], Hook | None]:
    """What finds a host's hook in the variables that this play has for it."""
    from ansible.template import Templar

    from . import variables

    manager = play.get_variable_manager()
    loader = play.get_loader()

    def find(name: str) -> Hook | None:
        host = manager._inventory.get_host(name)
        known = manager.get_vars(play=play, host=host, include_hostvars=False)
        templar = Templar(loader=loader, variables=known)
        return hook({key: variables.read(templar, known, key) for key in VARIABLES if key in known})

    return find
