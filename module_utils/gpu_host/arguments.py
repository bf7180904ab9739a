"""The arguments of the modules, in one place for the module and for the action plugin of the same name.

The action plugin refuses bad input on the control node before a host is touched; the module refuses the same input
where it is called without the plugin (an ad-hoc call with another action_plugins path, ansible-runner worker).
"""

from __future__ import annotations

import os
import re
from typing import Any

from . import processes

# The phases of one reset, in the order in which they run.
PHASES = ("evidence", "kill", "clean", "verify")

_GPU = re.compile(
    r"^(?:\d{1,3}|GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    r"|(?:[0-9a-fA-F]{4}(?:[0-9a-fA-F]{4})?:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\Z"
)
_CAPABILITY = re.compile(r"^[1-9]\d?\.\d\Z")
_RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def _strings(default: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "list", "elements": "str", "default": list(default)}


_PATTERNS: dict[str, dict[str, Any]] = {
    "server_modules": _strings(processes.SERVER_MODULES),
    "server_commands": _strings(processes.SERVER_COMMANDS),
    "server_titles": _strings(processes.SERVER_TITLES),
}
# How the servers of a host are found. Paths are of type str: type path would expand ~ and $HOME on the control node.
_SERVERS: dict[str, dict[str, Any]] = {
    **_PATTERNS,
    "scope_cgroup": {"type": "str", "default": ""},
    "scope_folder": {"type": "str", "default": ""},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
    "device_folder": {"type": "str", "default": "/dev"},
}

GPU_RESET: dict[str, dict[str, Any]] = {
    "phases": {"type": "list", "elements": "str", "choices": list(PHASES), "default": list(PHASES)},
    "gpus": _strings(),
    "grace": {"type": "float", "default": 30},
    "kill_timeout": {"type": "float", "default": 10},
    "verify_timeout": {"type": "float", "default": 30},
    "lock_timeout": {"type": "float", "default": 60},
    "free_mib": {"type": "int", "default": 64},
    "protected_mib": {"type": "int", "default": 1024},
    "protected": _strings(),
    "kill_strangers": {"type": "bool", "default": False},
    "own_processes_only": {"type": "bool", "default": False},
    "bytecode_paths": _strings(),
    "lock_folders": _strings(),
    "shm_folder": {"type": "str", "default": "/dev/shm"},
    "min_shm_free_mib": {"type": "int", "default": 0},
    "ports": {"type": "list", "elements": "int", "default": []},
    "probe": {"type": "bool", "default": False},
    "repair": {"type": "list", "elements": "str", "choices": ["probe", "gpu_reset", "reboot"], "default": []},
    "policy": {"type": "str", "choices": ["drain", "idle_only", "zombies_only", "force"], "default": "drain"},
    "router_url": {"type": "str", "default": ""},
    "router_api_key_file": {"type": "str", "default": ""},
    "worker_url": {"type": "str", "default": ""},
    "run_id": {"type": "str", "default": ""},
    "last_recorded_run": {"type": "str", "default": ""},
    "head_is_reset": {"type": "bool", "default": False},
    "role_variables": {"type": "bool", "default": False},
    **_SERVERS,
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
    **_SERVERS,
}

SERVER_START: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "wait": {"type": "bool", "default": True},
    "timeout": {"type": "float", "default": 1800},
    "grace": {"type": "float", "default": 30},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
}

ROUTER_WORKER: dict[str, dict[str, Any]] = {
    "timeout": {"type": "float", "default": 600},
    "lock_timeout": {"type": "float", "default": 60},
    **_SERVERS,
}

# Model folders and SGLang's sources, read and edited on the host.
CHECKPOINT_INFO: dict[str, dict[str, Any]] = {
    "path": {"type": "str", "required": True},
    "tokenizer": {"type": "bool", "default": True},
    "sha256": {"type": "dict", "default": {}},
    "sha256_manifest": {"type": "str", "default": ""},
    "verify_hub": {"type": "bool", "default": False},
    "threads": {"type": "int", "default": 0},
}

EAGLE3_DRAFTER: dict[str, dict[str, Any]] = {
    "drafter": {"type": "str", "required": True},
    "target": {"type": "str", "required": True},
    "context_length": {"type": "str", "choices": ["raise", "override", "keep", "revert"], "default": "keep"},
    "served_context_length": {"type": "int", "default": 0},
    "weights": {"type": "bool", "default": True},
}

MODEL_DELEGATION: dict[str, dict[str, Any]] = {
    "path": {"type": "str", "default": ""},
    "sglang_folder": {"type": "str", "default": ""},
    "class_name": {"type": "str", "default": ""},
    "attribute": {"type": "str", "default": ""},
    "methods": {
        "type": "list",
        "elements": "str",
        "choices": ["get_embed_and_head", "set_embed_and_head", "set_eagle3_layers_to_capture"],
        "default": ["get_embed_and_head", "set_embed_and_head", "set_eagle3_layers_to_capture"],
    },
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}

SERVER_LAUNCH: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "default": "sglang"},
    "state": {"type": "str", "choices": ["planned", "started", "rolled_back", "stopped"], "default": "started"},
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "model_path": {"type": "str", "default": ""},
    "drafter_path": {"type": "str", "default": ""},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 30000},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "api_key_file": {"type": "str", "default": "", "no_log": False},
    "gpus": _strings(),
    "arguments": {"type": "dict", "default": {}},
    "speculation": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "environment_file": {"type": "str", "default": ""},
    "watch_files": _strings(),
    "nodes": {"type": "int", "default": 1},
    "node_rank": {"type": "int", "default": 0},
    "dist_init_addr": {"type": "str", "default": ""},
    "user": {"type": "str", "default": ""},
    "working_folder": {"type": "str", "default": ""},
    "grace": {"type": "float", "default": 30},
    "restart": {"type": "bool", "default": True},
    "restart_seconds": {"type": "float", "default": 10},
    "restart_burst": {"type": "int", "default": 3},
    "load_seconds": {"type": "float", "default": 2700},
    "enabled": {"type": "bool", "default": True},
    "journal": {"type": "bool", "default": True},
    "replaces_others": {"type": "bool", "default": False},
    "unit_folder": {"type": "str", "default": "/etc/systemd/system"},
    "config_folder": {"type": "str", "default": "/etc/sglang"},
    "log_folder": {"type": "str", "default": "/var/log/sglang"},
    "logrotate_folder": {"type": "str", "default": "/etc/logrotate.d"},
    "who": {"type": "str", "default": ""},
    **_SERVERS,
}

# Before a deployment.
GPU_HOST_INFO: dict[str, dict[str, Any]] = {
    "part": {"type": "str", "choices": ["host", "plan"], "required": True},
    "gpus": _strings(),
    "compute_capability": {"type": "str", "default": ""},
    "model_path": {"type": "str", "default": ""},
    "model_mib": {"type": "int", "default": 0},
    "drafter_path": {"type": "str", "default": ""},
    "build": {"type": "bool", "default": False},
    "build_folder": {"type": "str", "default": ""},
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "user": {"type": "str", "default": ""},
    "server_name": {"type": "str", "default": ""},
    "host": {"type": "str", "default": ""},
    "port": {"type": "int", "default": 0},
    "ports": {"type": "list", "elements": "int", "default": []},
    "arguments": {"type": "dict", "default": {}},
    "speculation": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "environment_file": {"type": "str", "default": ""},
    "secret_files": _strings(),
    "key": {"type": "bool", "default": False},
    "shm_folder": {"type": "str", "default": "/dev/shm"},
    "min_shm_free_mib": {"type": "int", "default": 0},
    "min_ram_mib": {"type": "int", "default": 0},
    "all_reduce": {"type": "bool", "default": False},
    "all_reduce_timeout": {"type": "float", "default": 120},
    "skip": _strings(),
    "fail": {"type": "bool", "default": True},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
    "timeout": {"type": "float", "default": 90},
}

KERNEL_PACKAGE_INFO: dict[str, dict[str, Any]] = {
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "package": {"type": "str", "default": "sgl_kernel"},
    "compute_capability": {"type": "str", "default": ""},
    "cuobjdump": {"type": "str", "default": ""},
    "environment": {"type": "dict", "default": {}},
    "timeout": {"type": "float", "default": 120},
}

KERNEL_BUILD: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["built", "installed"], "default": "installed"},
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "package": {"type": "str", "default": "sgl_kernel"},
    "source": {"type": "str", "default": ""},
    "source_ref": {"type": "str", "default": ""},
    "source_folder": {"type": "str", "default": ""},
    "wheel": {"type": "str", "default": ""},
    "compute_capability": {"type": "str", "default": ""},
    "offline": {"type": "bool", "default": False},
    "dependencies": {"type": "str", "default": ""},
    "wheels": {"type": "str", "default": ""},
    "build_isolation": {"type": "bool", "default": False},
    "jobs": {"type": "int", "default": 0},
    "compile_threads": {"type": "int", "default": 0},
    "cmake_options": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "cuobjdump": {"type": "str", "default": ""},
    "build_folder": {"type": "str", "default": "/var/cache/sgl-kernel"},
    "timeout": {"type": "float", "default": 10800},
    "patience": {"type": "float", "default": 0},
}

JIT_CACHE: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["described", "packed", "unpacked"], "default": "described"},
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "user": {"type": "str", "default": ""},
    "compute_capability": {"type": "str", "default": ""},
    "environment": {"type": "dict", "default": {}},
    "archive": {"type": "str", "default": ""},
    "timeout": {"type": "float", "default": 600},
}

# Left out of every model: what training left, other formats of the same weights, and the repositories' own files.
USELESS_FILES = (
    "training_state.pt", "optimizer.pt", "scheduler.pt", "rng_state*.pth", "training_args.bin", "trainer_state.json",
    "consolidated*", "original", "onnx", "openvino", "runs", "*.gguf", "*.ggml", ".git*", ".cache", ".no_exist",
    "*.part", "*.incomplete", ".model-staging.json",
)  # fmt: skip

MODEL_STAGING: dict[str, dict[str, Any]] = {
    "models": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "path": {"type": "str", "required": True},
            "source": {"type": "str", "default": ""},
            "tokenizer": {"type": "bool", "default": True},
        },
    },
    "phase": {"type": "str", "choices": ["look", "stage", "seed", "stop"], "default": "stage"},
    "pythons": _strings(),
    "endpoint": {"type": "str", "default": ""},
    "token_file": {"type": "str", "default": ""},
    "xet": {"type": "bool", "default": True},
    "exclude": _strings(USELESS_FILES),
    "sha256": {"type": "bool", "default": False},
    "refresh": {"type": "bool", "default": False},
    "replace": {"type": "bool", "default": False},
    "keep_previous": {"type": "bool", "default": False},
    "parallel": {"type": "int", "default": 4},
    "stall": {"type": "float", "default": 60},
    "attempts": {"type": "int", "default": 3},
    "reserve_mib": {"type": "int", "default": 1024},
    "rsync_shell": {"type": "str", "default": "ssh -o BatchMode=yes -o ConnectTimeout=10"},
    "rclone_config": {"type": "str", "default": ""},
    "fan_out": {"type": "bool", "default": False},
    "swarm": {"type": "dict", "default": {}},
    "timeout": {"type": "float", "default": 86400},
    "patience": {"type": "float", "default": 0},
    "task": {"type": "str", "default": ""},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
}

SERVER_HEALTH: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "default": "sglang"},
    "main_pid": {"type": "int", "default": 0},
    "timeout": {"type": "float", "default": 2700},
    "stall": {"type": "float", "default": 60},
    "slice_seconds": {"type": "float", "default": 10},
    "chat_prompt": {"type": "str", "default": "What is the capital of France? Answer in one word."},
    "chat_expect": {"type": "str", "default": "(?i)paris"},
    "chat_tokens": {"type": "int", "default": 512},
    "speculation": {"type": "dict"},
    "accept_length": {"type": "float", "default": 1.05},
    "accept_tokens": {"type": "int", "default": 256},
    "environment_file": {"type": "str", "default": ""},
    "gpu_mib": {"type": "int", "default": 1024},
    "soak": {"type": "int", "default": 0},
    "lossless": {"type": "bool", "default": False},
    "lossless_tie": {"type": "float", "default": 0.25},
    "request_seconds": {"type": "float", "default": 120},
    "run_id": {"type": "str", "default": ""},
    "nodes": _strings(),
    "carry": {"type": "dict"},
    "one_slice": {"type": "bool", "default": False},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
}

NCCL_ENVIRONMENT: dict[str, dict[str, Any]] = {
    "profile": {"type": "str", "choices": ["latency", "throughput", "plain"], "default": "latency"},
    "variables": {"type": "dict", "default": {}},
    "group_variables": {"type": "dict", "default": {}},
    "host_variables": {"type": "dict", "default": {}},
    "unchecked": _strings(),
    "path": {"type": "str", "default": "/etc/sglang/nccl.env"},
    "server_environment": {"type": "dict", "default": {}},
    "server_arguments": {"type": "dict", "default": {}},
}

SERVER_WATCH: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "default": "sglang"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "every": {"type": "float", "default": 300},
    "hook": _strings(),
    "restart": {"type": "list", "elements": "str", "choices": ["zombie", "hung"], "default": []},
    "restarts_a_day": {"type": "int", "default": 3},
    "confirm_seconds": {"type": "float", "default": 10},
    "timeout": {"type": "float", "default": 15},
    "grace": {"type": "float", "default": 30},
    "unit_folder": {"type": "str", "default": "/etc/systemd/system"},
    "interpreter": {"type": "str", "default": "/usr/bin/python3"},
    "bootstrap": {"type": "str", "default": ""},
    "program": {"type": "str", "default": "", "no_log": True},  # no secret, but long
    **_SERVERS,
}

RESET_SCHEDULE: dict[str, dict[str, Any]] = {
    # Both are judged by the module itself, in sentences that name the schedule and the variable.
    "schedules": {"type": "raw", "required": True},  # a default of none would remove all of them
    "scheduler": {"type": "str", "default": "auto"},
    "repository": {"type": "str", "required": True},
    "python": {"type": "str", "default": ""},
    "user": {"type": "str", "default": ""},
    "artifacts": {"type": "str", "default": ""},
    "folder": {"type": "str", "default": "/var/lib/gpu-resets"},
    "config_folder": {"type": "str", "default": "/etc/gpu-resets"},
    "unit_folder": {"type": "str", "default": "/etc/systemd/system"},
    "cron_folder": {"type": "str", "default": "/etc/cron.d"},
}

SERVING_BENCHMARK: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "default": "sglang"},
    "python": {"type": "str", "default": "/opt/sglang/venv/bin/python"},
    "prompts": {"type": "str", "default": ""},
    "dataset": {"type": "str", "default": "", "no_log": True},  # no secret, but long
    "num_prompts": {"type": "int", "default": 0},
    "concurrency": {"type": "int", "default": 1},
    "input_length": {"type": "int", "default": 0},
    "output_length": {"type": "int", "default": 256},
    "chat_template": {"type": "bool", "default": True},
    "ignore_eos": {"type": "bool", "default": True},
    "temperature": {"type": "float", "default": 0},
    "seed": {"type": "int", "default": 1},
    "warmup": {"type": "int", "default": 0},
    "flush": {"type": "bool", "default": True},
    "environment": {"type": "dict", "default": {}},
    "sample_seconds": {"type": "float", "default": 0.5},
    "timeout": {"type": "float", "default": 1800},
    "patience": {"type": "float", "default": 0},
    "task": {"type": "str", "default": ""},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
}

DATA_JOBS: dict[str, dict[str, Any]] = {
    "jobs": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "command": _strings(),
            "resume_command": _strings(),
            "user": {"type": "str", "default": ""},
            "folder": {"type": "str", "default": ""},
            "environment": {"type": "dict", "default": {}},
            "environment_file": {"type": "str", "default": ""},
            "cpus": {"type": "float", "default": 0},
            "memory_mib": {"type": "int", "default": 0},
            "max_seconds": {"type": "float", "default": 0},
            "after": _strings(),
        },
    },
    "state": {"type": "str", "choices": ["started", "stopped", "status"], "default": "started"},
    "only": _strings(),
    "again": _strings(),
    "wait": {"type": "bool", "default": False},
    "slice": {"type": "str", "default": "datajobs.slice"},
    "log_folder": {"type": "str", "default": "/var/log/data-jobs"},
    "grace": {"type": "float", "default": 30},
    "patience": {"type": "float", "default": 0},
    "task": {"type": "str", "default": ""},
    "state_folder": {"type": "str", "default": "/var/lib/gpu-host"},
    **_PATTERNS,
}

_SECONDS = (
    "grace",
    "kill_timeout",
    "verify_timeout",
    "lock_timeout",
    "timeout",
    "hung_after",
    "load_seconds",
    "restart_seconds",
    "stall",
    "slice_seconds",
    "request_seconds",
    "every",
    "confirm_seconds",
    "all_reduce_timeout",
    "patience",
)
_MIB = ("free_mib", "protected_mib", "min_shm_free_mib", "gpu_mib", "model_mib", "min_ram_mib")
_FOLDERS = (
    "router_api_key_file",
    "shm_folder",
    "state_folder",
    "device_folder",
    "bytecode_paths",
    "lock_folders",
    "unit_folder",
    "config_folder",
    "log_folder",
    "logrotate_folder",
    "working_folder",
    "build_folder",
    "dependencies",
    "wheels",
    "archive",
)
_SCOPES = ("scope_cgroup", "scope_folder")


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
    number = params.get("compute_capability", "")
    if number and not _CAPABILITY.match(number):
        found.append(f"compute_capability: {number!r} is none; give for example '12.0' (SM120) or '9.0'.")
    for port in params.get("ports", []):
        if not 1 <= port <= 65535:
            found.append(f"ports: {port} is no port; give numbers from 1 to 65535.")
    for name in (*_FOLDERS, *_SCOPES):
        found += _folder_problems(name, params.get(name, ""))
    if params.get("router_url"):
        found += _router_problems(params["router_url"], params.get("worker_url", ""))
    if params.get("phases") == []:
        found.append(f"phases: nothing is chosen; leave it out or choose from {', '.join(PHASES)}.")
    for name in params.get("protected", []):
        if "/" in name or not name.strip():
            found.append(f"protected: {name!r} is no executable's file name; give for example 'my-exporter'.")
    for name in ("run_id", "last_recorded_run"):
        if params.get(name) and not _RUN_ID.match(params[name]):
            found.append(f"{name}: {params[name]!r} would be no file name; use letters, digits, '.', '_' and '-'.")
    if "server_modules" in params:
        found += processes.Patterns.of(params).problems()
        if not (params["server_modules"] or params["server_commands"]):
            found.append("server_modules: no server would be found; leave it out or name at least one.")
    return found


def _router_problems(router_url: str, worker_url: str) -> list[str]:
    """Both are addresses without secrets, since records show them."""
    from urllib.parse import urlsplit  # not needed without a router

    if not worker_url:
        return [
            "worker_url: is empty, while router_url is set; give the address by which the router knows this host's"
            " server, for example http://gpu01:{port}."
        ]
    found = []
    for name, url in (("router_url", router_url), ("worker_url", worker_url.replace("{port}", "1"))):
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or re.search(r"[\s{}]", url):
            found.append(f"{name}: {url!r} is no address; give for example http://gateway:30000.")
        elif parts.username or parts.password:
            found.append(f"{name}: holds a user or a password, which records would show; use router_api_key_file.")
        elif parts.query or parts.fragment:
            found.append(f"{name}: {url!r} is more than an address; leave out what follows the '?' or '#'.")
    return found


def benchmark_problems(params: dict[str, Any]) -> list[str]:
    """What is wrong with the parameters of the module serving_benchmark."""
    found = []
    for name, least, what in (
        ("num_prompts", 0, "prompts, or 0 for all of the file"),
        ("concurrency", 1, "requests at a time"),
        ("input_length", 0, "tokens, or 0 for prompts of any length"),
        ("output_length", 4, "tokens; SGLang's client takes no fewer"),
        ("warmup", 0, "requests, or 0 for as many as concurrency"),
        ("seed", 0, "a number"),
    ):
        if params[name] < least:
            found.append(f"{name}: {params[name]} is too small; give {least} or more {what}.")
    if 0 < params["num_prompts"] < params["concurrency"]:
        found.append(
            f"num_prompts: {params['num_prompts']} prompts can't keep {params['concurrency']} requests at a time busy; "
            "give more prompts or a lower concurrency."
        )
    if params["input_length"] and not params["num_prompts"]:
        found.append("num_prompts: with input_length say how many; prompts that are longer are left out.")
    if not 0.05 <= params["sample_seconds"] <= 60:
        found.append(f"sample_seconds: {params['sample_seconds']} is no interval; give 0.05 to 60 seconds.")
    if not 0 <= params["temperature"] <= 10:
        found.append(f"temperature: {params['temperature']} is none; give 0 (greedy) to 10.")
    if params["task"] and not _RUN_ID.match(params["task"]):
        found.append(f"task: {params['task']!r} would be no file name; use letters, digits, '.', '_' and '-'.")
    return found


def model_problems(params: dict[str, Any]) -> list[str]:
    """What is wrong with the parameters of the modules that look after models and SGLang's sources."""
    found = []
    for name in ("path", "target", "drafter", "sha256_manifest", "sglang_folder"):
        found += _folder_problems(name, params.get(name, ""))
    for name in ("target", "drafter"):
        if name in params and not params[name]:
            found.append(f"{name}: no folder is given; name the model's folder on the host.")
    if "verify_hub" in params and not params["path"]:
        found.append("path: no folder is given; name the model's folder on the host.")
    if "methods" in params:
        if not params["methods"]:
            found.append("methods: nothing is chosen; leave it out or name at least one.")
        if not params["path"] and not (params["sglang_folder"] and params["class_name"]):
            found.append("path: name the file of the wrapper class, or give sglang_folder and class_name.")
    if not 0 <= params.get("threads", 0) <= 256:
        found.append(f"threads: {params['threads']} is no number of threads; give 0 (by cores) to 256.")
    if params.get("served_context_length", 0) < 0:
        found.append("served_context_length: give tokens, or 0 for the target's own length.")
    return found


def _folder_problems(name: str, value: str | list[str]) -> list[str]:
    """Folders are absolute; what is searched for things to delete is no top folder. A scope is taken as it stands."""
    found = []
    for folder in [value] if isinstance(value, str) else value:
        if not folder and isinstance(value, str):
            continue
        if name in _SCOPES:
            if not folder.startswith("/") or os.path.normpath(folder) != folder.rstrip("/") or folder == "/":
                found.append(f"{name}: {folder!r} is not an absolute path below /; give the full path, without '..'.")
        elif not folder.startswith("/") or ".." in folder.split("/"):
            found.append(f"{name}: {folder!r} is no absolute path on the host.")
        elif name in ("bytecode_paths", "lock_folders") and folder.strip("/").count("/") < 1:
            found.append(f"{name}: {folder!r} is too wide to delete anything in; name the folder itself.")
    return found
