"""Installs the watch of a server: a timer, its service, and the program that it runs.

The program is what the control node would send for one look (code, then the call in JSON), kept as a file that is the
service's standard input: it needs nothing but the interpreter.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Mapping
from typing import Any

from . import masking, server_unit
from .child import run_command
from .deadline import Deadline
from .server_start import SYSTEMD
from .storage import private_folder, replace_file, safe_name

COMMAND_SECONDS = 15.0


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module server_watch: ``params`` are those of library/server_watch.py."""
    name = f"{safe_name(params['name'], 'server name')}-watch"
    if not os.path.isdir(SYSTEMD) or os.geteuid() != 0:
        text = "The watch needs systemd as pid 1 and root: use become: true, or leave it out on this host."
        return {"changed": False, "failed": True, "refused": True, "msg": f"Nothing was done. {text}"}
    program = os.path.join(params["state_folder"], "watch", f"{params['name']}.program")
    wanted = params["state"] == "present"
    timer = os.path.join(params["unit_folder"], f"{name}.timer")
    service = os.path.join(params["unit_folder"], f"{name}.service")
    texts: dict[str, bytes] = {
        program: base64.b64decode(params["program"]),
        service: server_unit.watch_service(
            params["name"], params["interpreter"], params["bootstrap"], program
        ).encode(),
        timer: server_unit.watch_timer(params["name"], params["every"]).encode(),
    }
    now = {path: _content(path) for path in texts}
    changed = [path for path, text in texts.items() if (text if wanted else None) != now[path]]
    running = _systemctl("is-active", f"{name}.timer") == "active"
    result: dict[str, Any] = {"changed": bool(changed) or running != wanted, "files": changed}
    result["msg"] = f"The watch of {params['name']} is {'on' if wanted else 'off'}."
    if diff:
        result["diff"] = [_difference(path, now[path], texts[path] if wanted else None) for path in changed]
    if check_mode or not result["changed"]:
        return result
    if wanted:
        private_folder(params["state_folder"])
        private_folder(os.path.dirname(program))
        for path in changed:
            replace_file(path, texts[path], 0o600 if path == program else 0o644)
        _reload(changed, params["unit_folder"])
        # Restarted, so that a new interval counts from now.
        _systemctl("--no-reload", "enable", f"{name}.timer")
        _systemctl("restart", f"{name}.timer")
    else:
        _systemctl("disable", "--now", f"{name}.timer")
        for path in changed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        _reload(changed, params["unit_folder"])
    return result


def _reload(changed: list[str], unit_folder: str) -> None:
    if any(path.startswith(unit_folder + "/") for path in changed):
        _systemctl("daemon-reload")


def _systemctl(*words: str) -> str:
    return run_command(["systemctl", *words], Deadline(COMMAND_SECONDS)).stdout.strip()


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _difference(path: str, before: bytes | None, after: bytes | None) -> dict[str, str]:
    texts = [
        "(a program)\n" if path.endswith(".program") and text else masking.mask_text((text or b"").decode())
        for text in (before, after)
    ]
    return {"before_header": path, "after_header": path, "before": texts[0], "after": texts[1]}
