"""The record of a deployment on its host: what was rendered, installed and started, by whom, and whether it got ready.

`<state folder>/deployments/<name>.json` is the present one, `<name>.good.json` the last that got ready, which a
rollback goes back to. 0600 in a folder of mode 0700: environments hold secrets. The API key is not in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .storage import StorageError, private_folder, read_private, safe_name, write_private

SCHEMA = 1


@dataclass(frozen=True)
class Deployment:
    """`files` are the rendered texts by path, without the config file of the key. `inputs` are what a restart depends
    on beyond them: digests of files, folders behind links, versions. `verdict` is '' until the health check has one."""

    name: str
    argv: tuple[str, ...] = ()
    unit: str = ""
    port: int = 0
    gpu_uuids: tuple[str, ...] = ()
    log: str = ""
    log_from: int = 0  # size of the log (bytes) when this one was started
    user: str = ""
    folder: str = ""  # that it runs in
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    environment_file: str = ""
    speculation: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    local_changes: tuple[str, ...] = ()
    sitecustomize: str = ""
    who: str = ""
    when: str = ""  # ISO 8601, UTC
    verdict: str = ""
    schema: int = SCHEMA


def folder(state_folder: str) -> str:
    return os.path.join(state_folder, "deployments")


def _path(state_folder: str, name: str, good: bool) -> str:
    return os.path.join(folder(state_folder), safe_name(name, "server name") + (".good.json" if good else ".json"))


def save(deployment: Deployment, state_folder: str) -> str:
    """Write the present deployment; StorageError says why that can't be done."""
    private_folder(state_folder)
    private_folder(folder(state_folder))
    return _write(deployment, _path(state_folder, deployment.name, good=False))


def _write(deployment: Deployment, path: str) -> str:
    try:
        write_private(path, json.dumps(asdict(deployment), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise StorageError(f"The record of the deployment {path} can't be written: {error.strerror}.") from error
    return path


def judge(state_folder: str, name: str, verdict: str) -> None:
    """Note the verdict of the health check on the present deployment; a ready one is the one to go back to."""
    present = load(state_folder, name)
    if present is None or (present.verdict == verdict and verdict != "ready"):
        return
    judged = replace(present, verdict=verdict)
    if judged != present:
        save(judged, state_folder)
    if verdict == "ready" and load(state_folder, name, good=True) != judged:
        _write(judged, _path(state_folder, name, good=True))


def load(state_folder: str, name: str, good: bool = False) -> Deployment | None:
    """The present deployment of this server, or the last good one; None when there is none or it can't be read."""
    try:
        facts: Any = json.loads(read_private(_path(state_folder, name, good)))
    except (OSError, ValueError, StorageError):
        return None
    if not isinstance(facts, Mapping) or facts.get("schema") != SCHEMA or facts.get("name") != name:
        return None
    known = {item.name for item in fields(Deployment)}
    values = {key: value for key, value in facts.items() if key in known}
    for key in ("argv", "gpu_uuids", "local_changes"):
        values[key] = tuple(values.get(key, ()))
    return Deployment(**values)


def names(state_folder: str) -> list[str]:
    """The servers that were deployed on this host."""
    try:
        found = os.listdir(folder(state_folder))
    except OSError:
        return []
    return sorted(name[: -len(".json")] for name in found if name.endswith(".json") and not name.endswith(".good.json"))
