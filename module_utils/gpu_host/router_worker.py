"""The module router_worker: puts this host's servers back into the router that a reset took them out of.

What is out stands in the note beside the host's lock (see ``router``). Each server is waited for until it takes
requests; a router that gets a worker too early counts it as failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from . import policy, router, server_state
from .deadline import Deadline
from .host_lock import HostLock, LockHeld
from .procfs import Proc
from .storage import StorageError

LOOK_SECONDS = 6.0
PAUSE_SECONDS = 1.0


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """Put back what the note says is out; ``params`` are those of library/router_worker.py."""
    del diff
    state_folder = params["state_folder"]
    try:
        out = router.noted(state_folder)
        if not out:
            return _result([], [], "Nothing of this host is out of a router.")
        if check_mode:
            return {**_result(out, [], f"{_names(out)} would be put back into the router."), "changed": True}
        return _put_back(params, out)
    except (StorageError, LockHeld) as error:
        return {**_result([], [], str(error)), "failed": True}


def _put_back(params: Mapping[str, Any], out: list[router.Out]) -> dict[str, Any]:
    proc = Proc()
    deadline = Deadline(params["timeout"])
    states = _states(params, proc)
    keys = policy.serving(proc, states)
    while any(one.port not in keys for one in out) and not deadline.expired():
        time.sleep(min(PAUSE_SECONDS, deadline.remaining()))
        states = _states(params, proc)
        keys = policy.serving(proc, states)
    with HostLock(params["state_folder"], f"router-{os.getpid()}", "router_worker", params["lock_timeout"]):
        done, problems = policy.put_back(router.noted(params["state_folder"]), keys, params["state_folder"])
    for one in out:
        if one.port not in keys:
            seen = next((f"{state.name} is {state.state}" for state in states if state.port == one.port), "none runs")
            problems.append(
                f"{one.worker} is still out of the router {one.router}: its server on port {one.port} took no requests"
                f" within {params['timeout']:g} s ({seen}). Start it and run router_worker again."
            )
    still = [one for one in out if one not in done]
    told = " ".join(problems) or f"{_names(done)} is in its router again."
    return {**_result(still, done, told), "changed": bool(done), "failed": bool(problems)}


def _states(params: Mapping[str, Any], proc: Proc) -> tuple[server_state.ServerState, ...]:
    return server_state.observe_for(params, Deadline(LOOK_SECONDS), proc=proc).servers


def _names(workers: list[router.Out]) -> str:
    return ", ".join(one.worker for one in workers)


def _result(out: list[router.Out], done: list[router.Out], msg: str) -> dict[str, Any]:
    return {
        "changed": False,
        "out": [one.worker for one in out],
        "put_back": [one.worker for one in done],
        "msg": msg,
    }
