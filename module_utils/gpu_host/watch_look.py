"""One look of the watch, run by its timer on the host: is the server a zombie, or hung? If so, the hook is told and,
where that is allowed, the server is reset and started again.

A look asks what changes nothing (server_state); a bad one is confirmed by a second before anything is done. The hook is
told once for each episode, not every few minutes.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from . import arguments, reset, server_record, server_start, server_state
from .deadline import Deadline
from .storage import StorageError, private_folder, read_private, write_private

BAD = ("zombie", "hung")
HOOK_SECONDS = 60.0
DAY = 86400.0


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """Look, and act on what is seen; ``params`` are those that server_watch wrote down."""
    del diff
    first = _look(params)
    if first.state in BAD:
        time.sleep(params["confirm_seconds"])
        second = _look(params)
        bad = second.state in BAD and second.main_pid == first.main_pid
    else:
        second, bad = first, False
    path = os.path.join(private_folder(params["state_folder"]), "watch", f"{params['name']}.json")
    private_folder(os.path.dirname(path))
    memory = _memory(path)
    event: dict[str, Any] = {
        "schema": 1,
        "server": params["name"],
        "state": second.state,
        "why": second.why,
        "main_pid": second.main_pid,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "action": "",
    }
    if not bad or check_mode:
        memory["episode"] = ""
        _remember(path, memory)
        return event
    episode = f"{second.state} {second.main_pid or ','.join(map(str, second.pids))}"
    if memory.get("episode") == episode:
        return {**event, "action": "told already"}
    event["action"] = _restart(params, second, memory) if second.state in params["restart"] else "none allowed"
    memory["episode"] = episode
    _remember(path, memory)
    event["hook"] = _tell(params["hook"], event)
    return event


def _look(params: Mapping[str, Any]) -> server_state.ServerState:
    return server_state.observe_for(params, Deadline(params["timeout"]), names=[params["name"]]).servers[0]


def _restart(params: Mapping[str, Any], state: server_state.ServerState, memory: dict[str, Any]) -> str:
    """Reset the server's GPUs and start it as its record says; what became of it in one sentence."""
    now = time.time()
    recent = [moment for moment in memory.get("restarts", []) if now - moment < DAY]
    if len(recent) >= params["restarts_a_day"]:
        return f"not restarted: that was done {len(recent)} times within a day"
    memory["restarts"] = [*recent, now]
    try:
        record = server_record.load(params["state_folder"], params["name"])
    except StorageError as error:
        return f"not restarted: {error}"
    if record is None:
        return "not restarted: there is no record of how it was started"
    given = {name: facts.get("default") for name, facts in arguments.GPU_RESET.items()}
    shared = {name: params[name] for name in arguments.GPU_RESET if name in params}
    gpus = list(state.gpus or record.gpu_uuids)
    moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    found = reset.run(
        {**given, **shared, "gpus": gpus, "lock_timeout": 0, "run_id": f"{moment}-{secrets.token_hex(6)}"}
    )
    if found["verdict"] != "clean":
        return f"not restarted: the host is {found['verdict']}: {found['reason']}"
    started = server_start.run(
        {
            "name": params["name"],
            "wait": False,
            "timeout": 60.0,
            "grace": params["grace"],
            "state_folder": params["state_folder"],
        }
    )
    return str(started["msg"])


def _tell(hook: Sequence[str], event: Mapping[str, Any]) -> str:
    """Run the hook with the event on its standard input; '' where there is none."""
    if not hook:
        return ""
    try:
        done = subprocess.run(
            list(hook), input=json.dumps(event).encode(), capture_output=True, timeout=HOOK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return "done" if done.returncode == 0 else f"failed with status {done.returncode}"


def _memory(path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_private(path))
    except (OSError, ValueError, StorageError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: str, memory: Mapping[str, Any]) -> None:
    if _memory(path) != memory:
        write_private(path, json.dumps(memory))
