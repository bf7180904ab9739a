"""Which servers a host had before a benchmark took its GPUs: noted with the run, so that one that was interrupted still
gives them back when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .runs import Run, file_name, read, write


def noted(run: Run, host: str) -> dict[str, Any]:
    found = read(_path(run, host))
    return found if isinstance(found, dict) else {}


def note(run: Run, host: str, servers: Sequence[str]) -> list[str]:
    """Note those that run now, with those that an interrupted play of the run did not give back; all of them."""
    earlier = noted(run, host)
    owed = [] if earlier.get("given_back", True) else [str(one) for one in earlier.get("servers", [])]
    names = sorted({*owed, *servers})
    write(_path(run, host), {"host": host, "servers": names, "given_back": False})
    return names


def given_back(run: Run, host: str) -> None:
    """From now on what runs on the host is its own affair."""
    write(_path(run, host), {**noted(run, host), "given_back": True})


def _path(run: Run, host: str) -> Any:
    return run.folder / "before" / f"{file_name(host)}.json"


def call(parameters: Mapping[str, Any], run: Run, host: str, check_mode: bool) -> dict[str, Any]:
    """What the module benchmark_before returns."""
    if parameters["state"] == "given_back":
        if not check_mode:
            given_back(run, host)
        return {"changed": True, "servers": [], "msg": ""}
    servers = sorted(parameters["servers"]) if check_mode else note(run, host, parameters["servers"])
    return {"changed": True, "servers": servers, "msg": f"Before: {', '.join(servers) or 'no server'}."}
