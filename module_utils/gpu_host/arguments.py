"""The arguments of the modules, in one place for the module and for the action plugin of the same name.

The action plugin refuses bad input on the control node before a host is touched; the module refuses the same input
where it is called without the plugin (an ad-hoc call with another action_plugins path, ansible-runner worker).
"""

from __future__ import annotations

import re
from typing import Any

from . import processes
from .scope import Scope

# The phases of one reset, in the order in which they run.
PHASES = ("evidence", "kill", "clean", "verify")

_GPU = re.compile(
    r"^(?:\d{1,3}|GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    r"|(?:[0-9a-fA-F]{4}(?:[0-9a-fA-F]{4})?:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\Z"
)
_RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def _strings(default: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "list", "elements": "str", "default": list(default)}


# Paths are of type str: type path would expand ~ and $HOME on the control node.
GPU_RESET: dict[str, dict[str, Any]] = {
    "phases": {"type": "list", "elements": "str", "choices": list(PHASES), "default": list(PHASES)},
    "gpus": _strings(),
    "grace": {"type": "float", "default": 30},
    "kill_timeout": {"type": "float", "default": 10},
    "verify_timeout": {"type": "float", "default": 30},
    "lock_timeout": {"type": "float", "default": 60},
    "free_mib": {"type": "int", "default": 64},
    "protected_mib": {"type": "int", "default": 1024},
    "server_modules": _strings(processes.SERVER_MODULES),
    "server_commands": _strings(processes.SERVER_COMMANDS),
    "server_titles": _strings(processes.SERVER_TITLES),
    "protected": _strings(),
    "kill_strangers": {"type": "bool", "default": False},
    "own_processes_only": {"type": "bool", "default": False},
    "scope_cgroup": {"type": "str", "default": ""},
    "scope_folder": {"type": "str", "default": ""},
    "bytecode_paths": _strings(),
    "lock_folders": _strings(),
    "shm_folder": {"type": "str", "default": "/dev/shm"},
    "min_shm_free_mib": {"type": "int", "default": 0},
    "ports": {"type": "list", "elements": "int", "default": []},
    "probe": {"type": "bool", "default": False},
    "repair": {"type": "list", "elements": "str", "choices": ["probe", "gpu_reset", "reboot"], "default": []},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
    "device_folder": {"type": "str", "default": "/dev"},
    "policy": {"type": "str", "choices": ["force"], "default": "force"},
    "run_id": {"type": "str", "default": ""},
    "last_recorded_run": {"type": "str", "default": ""},
}

GPU_MEMORY: dict[str, dict[str, Any]] = {
    "gpus": _strings(),
    "wait": {"type": "bool", "default": False},
    "timeout": {"type": "float", "default": 30},
    "free_mib": {"type": "int", "default": 64},
    "protected_mib": {"type": "int", "default": 1024},
    "protected": _strings(),
    "device_folder": {"type": "str", "default": "/dev"},
}

SERVER_INFO: dict[str, dict[str, Any]] = {
    "servers": _strings(),
    "timeout": {"type": "float", "default": 10},
    "hung_after": {"type": "float", "default": 300},
    "server_modules": _strings(processes.SERVER_MODULES),
    "server_commands": _strings(processes.SERVER_COMMANDS),
    "server_titles": _strings(processes.SERVER_TITLES),
    "scope_cgroup": {"type": "str", "default": ""},
    "scope_folder": {"type": "str", "default": ""},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
    "device_folder": {"type": "str", "default": "/dev"},
}

SERVER_START: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "wait": {"type": "bool", "default": True},
    "timeout": {"type": "float", "default": 1800},
    "grace": {"type": "float", "default": 30},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
}

_SECONDS = ("grace", "kill_timeout", "verify_timeout", "lock_timeout", "timeout", "hung_after")
_MIB = ("free_mib", "protected_mib", "min_shm_free_mib")
_FOLDERS = ("shm_folder", "state_folder", "device_folder", "bytecode_paths", "lock_folders")


def problems(params: dict[str, Any]) -> list[str]:
    """What is wrong with parameters whose types and choices are right already, one sentence each.

    Knows the parameters of all modules here; those that a module does not have are not looked at.
    """
    found = []
    for name in _SECONDS:
        if not 0 <= params.get(name, 0) <= 86400:  # also refuses nan
            found.append(f"{name}: {params[name]} is no time to wait; give seconds from 0 to 86400.")
    for name in _MIB:
        if params.get(name, 0) < 0:
            found.append(f"{name}: {params[name]} is no amount of memory; give MiB from 0 on.")
    for gpu in params.get("gpus", []):
        if not _GPU.match(gpu):
            found.append(
                f"gpus: {gpu!r} names no GPU; give NVML indices (0), UUIDs (GPU-1234abcd-...) or PCI ids (c1:00.0)."
            )
    for port in params.get("ports", []):
        if not 1 <= port <= 65535:
            found.append(f"ports: {port} is no port; give numbers from 1 to 65535.")
    for name in _FOLDERS:
        found += _folder_problems(name, params.get(name, ""))
    found += Scope(cgroup=params.get("scope_cgroup", ""), folder=params.get("scope_folder", "")).problems()
    if params.get("phases") == []:
        found.append(f"phases: nothing is chosen; leave it out or choose from {', '.join(PHASES)}.")
    for name in params.get("protected", []):
        if "/" in name or not name.strip():
            found.append(f"protected: {name!r} is no executable's file name; give for example 'my-exporter'.")
    for name in ("run_id", "last_recorded_run"):
        if params.get(name) and not _RUN_ID.match(params[name]):
            found.append(f"{name}: {params[name]!r} would be no file name; use letters, digits, '.', '_' and '-'.")
    if "server_modules" in params:
        found += processes.Patterns(
            modules=tuple(params["server_modules"]),
            commands=tuple(params["server_commands"]),
            titles=tuple(params["server_titles"]),
        ).problems()
        if not (params["server_modules"] or params["server_commands"]):
            found.append("server_modules: no server would be found; leave it out or name at least one.")
    return found


def _folder_problems(name: str, value: str | list[str]) -> list[str]:
    """Folders are absolute, and what is searched for things to delete is never the root or a top folder."""
    found = []
    for folder in [value] if isinstance(value, str) else value:
        if not folder and isinstance(value, str):
            continue
        if not folder.startswith("/") or ".." in folder.split("/"):
            found.append(f"{name}: {folder!r} is no absolute path on the host.")
        elif name in ("bytecode_paths", "lock_folders") and folder.strip("/").count("/") < 1:
            found.append(f"{name}: {folder!r} is too wide to delete anything in; name the folder itself.")
    return found
