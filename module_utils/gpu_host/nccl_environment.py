"""NCCL's environment of a host's servers: named profiles, what each variable may be, what must not stand together.

Names, values and versions are from NVIDIA's documentation of NCCL 2.32 (docs/userguide/source/env.rst in NVIDIA/nccl).
A typing error in such a variable is silent: NCCL ignores names that it does not know, and some values too.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import time
from collections.abc import Mapping
from typing import Any, Callable

from .storage import replace_file

PROFILES: dict[str, dict[str, str]] = {
    # The original 8-GPU host's, for few requests at a time: everything by the low-latency protocol over one ring.
    "latency": {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    },
    # For many requests at a time: through host memory, on many channels (voipmonitor/rtx6kpro, optimization/
    # nccl-tuning.md: 70 against 90 tok/s for one request, 10k against 5k for 100). Its CUDA_DEVICE_MAX_CONNECTIONS is
    # left out: SGLang sets that to 8 itself.
    "throughput": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "16",
        "NCCL_MAX_NCHANNELS": "32",
        "NCCL_BUFFSIZE": "33554432",
    },
    # NCCL decides.
    "plain": {},
}

# A check returns what the value should be, or None where it is right.
Check = Callable[[str], "str | None"]

LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
ALGORITHMS = ("ring", "tree", "collnet", "collnetchain", "collnetdirect", "nvls", "nvlstree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
FUNCTIONS = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")
DEBUG_LEVELS = ("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE", "ALL")
SUBSYSTEMS = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL",
)  # fmt: skip


def _integer(least: int, most: int | None = None) -> Check:
    wanted = f"an integer from {least}" + (f" to {most}" if most is not None else " on")

    def check(value: str) -> str | None:
        number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else None
        return None if number is not None and number >= least and (most is None or number <= most) else wanted

    return check


def _one_of(*values: str) -> Check:
    def check(value: str) -> str | None:
        return None if value in values else f"one of {', '.join(values)}"

    return check


def _power_of_two(value: str) -> str | None:
    number = int(value) if re.fullmatch(r"\d{1,18}", value) else 0
    return None if number > 0 and not number & (number - 1) else "a power of two, in bytes (4194304 is 4 MiB)"


def _level(*levels: str) -> Check:
    """A distance by name, or by the old number (0 is LOC, 1 PIX, 2 PXB, 3 PHB, 4 and above SYS)."""

    def check(value: str) -> str | None:
        return None if value in levels or re.fullmatch(r"\d", value) else f"one of {', '.join(levels)} (or 0 to 9)"

    return check


def _selection(names: tuple[str, ...], shown: str) -> Check:
    """`ring,tree`, `^tree`, `allreduce:tree;broadcast:ring`: lists by function, the function optional in the first."""

    def check(value: str) -> str | None:
        wanted = f"a list of {shown}, with ^ before it to exclude, or such lists by function ({', '.join(FUNCTIONS)})"
        for position, part in enumerate(value.split(";")):
            function, colon, listed = part.rpartition(":")
            if (colon and function.lower() not in FUNCTIONS) or (not colon and position):
                return wanted
            tokens = (listed[1:] if listed.startswith("^") else listed).lower().split(",")
            if any(token not in names for token in tokens):
                return wanted
        return None

    return check


def _list_of(names: tuple[str, ...]) -> Check:
    def check(value: str) -> str | None:
        tokens = (value[1:] if value.startswith("^") else value).split(",")
        return None if all(token in names for token in tokens) else f"a list of {', '.join(names)} (^ excludes)"

    return check


def _matches(pattern: str, wanted: str) -> Check:
    def check(value: str) -> str | None:
        return None if re.fullmatch(pattern, value) else wanted

    return check


def _text(value: str) -> str | None:
    return None if value else "not empty"


_FLAG = _one_of("0", "1")
_AUTO = _one_of("0", "1", "2")
_COUNT = _integer(1)
_BYTES = _integer(0)
_PATH = _matches(r"/[^~]*", "an absolute path (NCCL does not know ~)")
_FAMILY = _one_of("AF_INET", "AF_INET6")

VARIABLES: dict[str, Check] = {
    "NCCL_SOCKET_IFNAME": _text,
    "NCCL_SOCKET_FAMILY": _FAMILY,
    "NCCL_SOCKET_MAGIC": _matches(r"(?:0[xX][0-9a-fA-F]+|\d+)", "an integer, decimal or 0x.."),
    "NCCL_SOCKET_RETRY_CNT": _COUNT,
    "NCCL_SOCKET_RETRY_SLEEP_MSEC": _COUNT,
    "NCCL_SOCKET_POLL_TIMEOUT_MSEC": _integer(0),
    "NCCL_SOCKET_NTHREADS": _integer(1, 16),
    "NCCL_NSOCKS_PERTHREAD": _integer(1, 64),
    "NCCL_CROSS_NIC": _AUTO,
    "NCCL_IB_HCA": _text,
    "NCCL_IB_RAIL_POLICY": _one_of("NONE", "CX9", "CX9:FLIP", "CX9:ALT", "CX9:BLOCK"),
    "NCCL_IB_TIMEOUT": _integer(0, 31),
    "NCCL_IB_RETRY_CNT": _integer(0, 7),
    "NCCL_IB_GID_INDEX": _integer(-1),
    "NCCL_IB_ADDR_FAMILY": _FAMILY,
    "NCCL_IB_ADDR_RANGE": _matches(r"[0-9a-fA-F.:]+/\d+", "a range such as 192.168.0.0/24"),
    "NCCL_IB_ROCE_VERSION_NUM": _integer(1, 2),
    "NCCL_IB_PKEY": _integer(0),
    "NCCL_IB_PKEY_VALUE": _matches(r"-1|0[xX][0-9a-fA-F]+|\d+", "an integer such as 0x8111"),
    "NCCL_IB_SL": _integer(0, 15),
    "NCCL_IB_TC": _integer(0, 255),
    "NCCL_IB_FIFO_TC": _integer(0, 255),
    "NCCL_IB_RETURN_ASYNC_EVENTS": _FLAG,
    "NCCL_IB_EVENT_BASED_LB": _FLAG,
    "NCCL_OOB_NET_ENABLE": _FLAG,
    "NCCL_OOB_NET_IFNAME": _text,
    "NCCL_UID_STAGGER_THRESHOLD": _COUNT,
    "NCCL_UID_STAGGER_RATE": _COUNT,
    "NCCL_NET": _text,
    "NCCL_NET_PLUGIN": _text,
    "NCCL_GIN_PLUGIN": _text,
    "NCCL_RMA_PLUGIN": _text,
    "NCCL_TUNER_PLUGIN": _text,
    "NCCL_PROFILER_PLUGIN": _text,
    "NCCL_ENV_PLUGIN": _text,
    "NCCL_IGNORE_CPU_AFFINITY": _FLAG,
    "NCCL_CONF_FILE": _PATH,
    "NCCL_DEBUG": _one_of("VERSION", "WARN", "ATTN", "INFO", "TRACE"),
    "NCCL_DEBUG_LEVELS": _list_of(DEBUG_LEVELS),
    "NCCL_DEBUG_FILE": _PATH,
    "NCCL_DEBUG_SUBSYS": _list_of(SUBSYSTEMS),
    "NCCL_DEBUG_TIMESTAMP_FORMAT": _text,
    "NCCL_DEBUG_TIMESTAMP_LEVELS": _list_of(DEBUG_LEVELS),
    "NCCL_COLLNET_ENABLE": _FLAG,
    "NCCL_COLLNET_NODE_THRESHOLD": _integer(0),
    "NCCL_CTA_POLICY": _matches(r"[0-2]|(?:DEFAULT|EFFICIENCY|ZERO)(?:\|(?:DEFAULT|EFFICIENCY|ZERO))*",
                                "DEFAULT, EFFICIENCY or ZERO (several with |)"),
    "NCCL_NETDEVS_POLICY": _matches(r"ALL|MAX:\d+", "ALL or MAX:N"),
    "NCCL_MULTI_RANK_GPU_ENABLE": _FLAG,
    "NCCL_TOPO_FILE": _PATH,
    "NCCL_TOPO_DUMP_FILE": _PATH,
    "NCCL_SET_THREAD_NAME": _FLAG,
    "NCCL_P2P_DISABLE": _FLAG,
    "NCCL_P2P_LEVEL": _level(*LEVELS),
    "NCCL_P2P_DIRECT_DISABLE": _FLAG,
    "NCCL_SHM_DISABLE": _FLAG,
    "NCCL_BUFFSIZE": _power_of_two,
    "NCCL_NTHREADS": _one_of("64", "128", "256", "512"),
    "NCCL_MAX_NCHANNELS": _COUNT,
    "NCCL_MIN_NCHANNELS": _integer(1, 64),
    "NCCL_MAX_NRINGS": _COUNT,
    "NCCL_MIN_NRINGS": _integer(1, 64),
    "NCCL_CHECKS_DISABLE": _FLAG,
    "NCCL_CHECK_POINTERS": _FLAG,
    "NCCL_CHECK_MODE": _one_of("DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"),
    "NCCL_LAUNCH_MODE": _one_of("PARALLEL", "GROUP"),
    "NCCL_IB_DISABLE": _FLAG,
    "NCCL_IB_AR_THRESHOLD": _BYTES,
    "NCCL_IB_OOO_RQ": _FLAG,
    "NCCL_IB_QPS_PER_CONNECTION": _integer(1, 128),
    "NCCL_IB_SPLIT_DATA_ON_QPS": _FLAG,
    "NCCL_IB_PCI_RELAXED_ORDERING": _AUTO,
    "NCCL_IB_ADAPTIVE_ROUTING": _FLAG,
    "NCCL_IB_ECE_ENABLE": _FLAG,
    "NCCL_MEM_SYNC_DOMAIN": _FLAG,
    "NCCL_CUMEM_ENABLE": _FLAG,
    "NCCL_CUMEM_HOST_ENABLE": _FLAG,
    "NCCL_NET_GDR_LEVEL": _level("LOC", "PIX", "PXB", "PHB", "SYS"),
    "NCCL_NET_GDR_C2C": _FLAG,
    "NCCL_NET_GDR_READ": _FLAG,
    "NCCL_GDRCOPY_ENABLE": _FLAG,
    "NCCL_GDRCOPY_FIFO_ENABLE": _FLAG,
    "NCCL_GDRCOPY_SYNC_ENABLE": _FLAG,
    "NCCL_GDRCOPY_FLUSH_ENABLE": _FLAG,
    "NCCL_NET_SHARED_BUFFERS": _FLAG,
    "NCCL_NET_SHARED_COMMS": _FLAG,
    "NCCL_IGNORE_NET_MISMATCH": _FLAG,
    "NCCL_IGNORE_COLLNET_MISMATCH": _FLAG,
    "NCCL_ALGO": _selection(ALGORITHMS, "Ring, Tree, CollnetChain, CollnetDirect, NVLS, NVLSTree, PAT"),
    "NCCL_PROTO": _selection(PROTOCOLS, "LL, LL128, Simple"),
    "NCCL_NVB_DISABLE": _FLAG,
    "NCCL_PXN_DISABLE": _FLAG,
    "NCCL_P2P_PXN_LEVEL": _AUTO,
    "NCCL_PXN_C2C": _FLAG,
    "NCCL_RUNTIME_CONNECT": _FLAG,
    "NCCL_GRAPH_REGISTER": _FLAG,
    "NCCL_LOCAL_REGISTER": _FLAG,
    "NCCL_LEGACY_CUDA_REGISTER": _FLAG,
    "NCCL_WIN_ENABLE": _FLAG,
    "NCCL_SET_STACK_SIZE": _FLAG,
    "NCCL_GRAPH_MIXING_SUPPORT": _FLAG,
    "NCCL_GRAPH_STREAM_ORDERING": _FLAG,
    "NCCL_RMA_EAGER_INIT": _FLAG,
    "NCCL_DMABUF_ENABLE": _FLAG,
    "NCCL_P2P_NET_CHUNKSIZE": _power_of_two,
    "NCCL_P2P_LL_THRESHOLD": _BYTES,
    "NCCL_ALLOC_P2P_NET_LL_BUFFERS": _FLAG,
    "NCCL_COMM_BLOCKING": _FLAG,
    "NCCL_CGA_CLUSTER_SIZE": _integer(0, 8),
    "NCCL_MAX_CTAS": _integer(1, 64),
    "NCCL_MIN_CTAS": _integer(1, 64),
    "NCCL_NVLS_ENABLE": _AUTO,
    "NCCL_IB_MERGE_NICS": _FLAG,
    "NCCL_NET_MERGE_POLICY": _one_of("ALL", "RAIL"),
    "NCCL_MNNVL_ENABLE": _AUTO,
    "NCCL_MNNVL_UUID": _matches(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", "an integer"),
    "NCCL_MNNVL_CLIQUE_ID": _matches(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", "an integer"),
    "NCCL_RAS_ENABLE": _FLAG,
    "NCCL_RAS_ADDR": _matches(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", "host:port"),
    "NCCL_RAS_TIMEOUT_FACTOR": _matches(r"(?!0*\.?0*$)\d+(?:\.\d+)?", "a number above 0"),
    "NCCL_LAUNCH_ORDER_IMPLICIT": _FLAG,
    "NCCL_LAUNCH_RACE_FATAL": _FLAG,
    "NCCL_IPC_USE_ABSTRACT_SOCKET": _FLAG,
    "NCCL_SYM_GIN_KERNELS_ENABLE": _FLAG,
    # In NCCL's source and in use, though not in its documentation.
    "NCCL_GRAPH_FILE": _PATH,
    "NCCL_GRAPH_DUMP_FILE": _PATH,
    "NCCL_MIN_P2P_NCHANNELS": _integer(1, 64),
    "NCCL_MAX_P2P_NCHANNELS": _integer(1, 64),
    "NCCL_NCHANNELS_PER_PEER": _COUNT,
    "NCCL_P2P_PCI_CHUNKSIZE": _power_of_two,
    "NCCL_P2P_NVL_CHUNKSIZE": _power_of_two,
    "NCCL_P2P_USE_CUDA_MEMCPY": _FLAG,
    "NCCL_LL_BUFFSIZE": _BYTES,
    "NCCL_LL128_BUFFSIZE": _BYTES,
    "NCCL_NVLS_NCHANNELS": _COUNT,
    "NCCL_NET_MERGE_LEVEL": _level(*LEVELS),
    "NCCL_HOSTID": _text,
    "NCCL_COMM_ID": _matches(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", "host:port"),
}  # fmt: skip

# They do nothing in any NCCL that runs on these GPUs, and whoever sets them expects something.
REMOVED = {
    "NCCL_SINGLE_RING_THRESHOLD": "2.3",
    "NCCL_LL_THRESHOLD": "2.5; use NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "2.5; use NCCL_ALGO",
    "NCCL_IB_CUDA_SUPPORT": "2.4; use NCCL_NET_GDR_LEVEL",
}
# What a systemd EnvironmentFile and a shell both take without quotes.
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:;^=|/@%+\[\]-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def merged(params: Mapping[str, Any]) -> dict[str, str]:
    """The variables that result: the profile's, then those for all, for the group, for the host. None (null in YAML)
    takes a variable away."""
    result: dict[str, str] = dict(PROFILES[params["profile"]])
    for layer in ("variables", "group_variables", "host_variables"):
        for name, value in (params.get(layer) or {}).items():
            if value is None:
                result.pop(str(name), None)
            else:
                # YAML makes 1 of 1 and True of true; NCCL wants digits.
                result[str(name)] = str(int(value)) if isinstance(value, bool) else str(value)
    return result


def problems(params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters, one sentence each. Nothing needs to be known of the host."""
    variables = merged(params)
    unchecked = set(params.get("unchecked") or ())
    found = [
        sentence
        for name, value in sorted(variables.items())
        if (sentence := _problem(name, value, unchecked)) is not None
    ]
    path = params.get("path", "")
    if not path.startswith("/") or ".." in path.split("/") or path.endswith("/"):
        found.append(f"path: {path!r} is no absolute path of a file on the host.")
    return found or conflicts(
        {name: value for name, value in variables.items() if name not in unchecked},
        params.get("server_environment") or {},
        params.get("server_arguments") or {},
    )


def _problem(name: str, value: str, unchecked: set[str]) -> str | None:
    if not _NAME.fullmatch(name):
        return f"{name!r} is no name of an environment variable."
    if not _PLAIN_VALUE.fullmatch(value):
        return f"{name}: {value!r} can't stand in an environment file; use letters, digits and _.,:;^=|/@%+[]- only."
    if name in unchecked:
        return None
    if name == "NCCL_PSK":
        return "NCCL_PSK is a secret and this file is readable by all; give it in sglang_environment, from a vault."
    if name in REMOVED:
        return f"{name} does nothing since NCCL {REMOVED[name]}."
    if name not in VARIABLES:
        if not name.startswith("NCCL_"):
            near = difflib.get_close_matches(name, VARIABLES, 1, 0.8)
            meant = f" (or was {near[0]} meant?)" if near else ""
            return f"{name} is no NCCL variable; give it in sglang_environment{meant}."
        near = difflib.get_close_matches(name, VARIABLES, 3, 0.6)
        meant = f"; was {' or '.join(near)} meant?" if near else "."
        return (
            f"NCCL knows no {name} and would ignore it{meant} One that only your NCCL has goes into nccl_env_unchecked "
            "as well."
        )
    if (wanted := VARIABLES[name](value)) is not None:
        return f"{name}: {value!r} must be {wanted}."
    return None


def conflicts(variables: Mapping[str, str], environment: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Settings that are right alone and not together, one sentence each. `environment` and `arguments` are the server's
    own (sglang_environment, sglang_arguments)."""
    found = []
    get = variables.get

    def on(argument: str) -> bool:
        return arguments.get(argument) in (True, 1, "true", "True", "1")

    def number(name: str, default: int) -> int:
        return int(get(name, default))

    if get("NCCL_P2P_DISABLE") == "1" and get("NCCL_P2P_LEVEL") not in (None, "LOC", "0"):
        found.append(
            f"NCCL_P2P_DISABLE=1 switches off what NCCL_P2P_LEVEL={get('NCCL_P2P_LEVEL')} asks for; "
            "take one away (null)."
        )
    if get("NCCL_SHM_DISABLE") == "1" and (get("NCCL_P2P_DISABLE") == "1" or get("NCCL_P2P_LEVEL") in ("LOC", "0")):
        found.append(
            "Without P2P and with NCCL_SHM_DISABLE=1 the GPUs of one host would talk over the network; take one away."
        )
    for least, most in (("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")):
        if least in variables and most in variables and number(least, 0) > number(most, 0):
            found.append(f"{least}={get(least)} is above {most}={get(most)}.")
    if number("NCCL_SOCKET_NTHREADS", 1) * number("NCCL_NSOCKS_PERTHREAD", 1) > 64:
        found.append("NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD must not exceed 64.")
    found += _cumem_conflicts(variables, on)
    found += _selection_conflicts(variables, on)
    if get("NCCL_GRAPH_STREAM_ORDERING") == "0" and get("NCCL_GRAPH_MIXING_SUPPORT") == "1":
        found.append("NCCL_GRAPH_STREAM_ORDERING=0 is not supported together with NCCL_GRAPH_MIXING_SUPPORT=1.")
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in str(environment.get(name, "")).lower().replace(" ", "") and not on(
            "disable_custom_all_reduce"
        ):
            found.append(
                f"{name} has expandable_segments, whose memory the custom all-reduce can't share between processes; "
                "set disable_custom_all_reduce in sglang_arguments, or take expandable_segments away."
            )
    for name in sorted(set(variables) & set(environment)):
        if str(environment[name]) != variables[name]:
            found.append(
                f"{name} is {variables[name]} here and {environment[name]} in sglang_environment; say it once."
            )
    return found


def _cumem_conflicts(variables: Mapping[str, str], on: Callable[[str], bool]) -> list[str]:
    found = []
    get = variables.get
    if get("NCCL_CUMEM_ENABLE") == "0":
        for name in ("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"):
            if get(name) == "1":
                found.append(f"{name}=1 needs NCCL_CUMEM_ENABLE=1.")
        if on("enable_symm_mem"):
            found.append("enable_symm_mem needs NCCL_CUMEM_ENABLE=1, and SGLang would set it so against this file.")
    for argument in ("enable_nccl_nvls", "enable_symm_mem"):
        if on(argument) and get("NCCL_NVLS_ENABLE") == "0":
            found.append(f"{argument} makes SGLang set NCCL_NVLS_ENABLE=1 against the 0 of this file.")
    return found


def _selection_conflicts(variables: Mapping[str, str], on: Callable[[str], bool]) -> list[str]:
    found = []
    algorithms = _lists(variables.get("NCCL_ALGO", ""))
    protocols = _lists(variables.get("NCCL_PROTO", ""))
    chosen = {name for exclude, names in algorithms.values() if not exclude for name in names}
    if chosen & {"nvls", "nvlstree"} and variables.get("NCCL_NVLS_ENABLE", "0") == "0" and not on("enable_nccl_nvls"):
        found.append(
            "NCCL_ALGO asks for NVLS, which needs NVSwitch and that SGLang switches off unless NCCL_NVLS_ENABLE is set."
        )
    exclude, names = algorithms.get("", (True, frozenset()))
    lacking = [one for one in FUNCTIONS if one not in algorithms and one != "allreduce"]
    if not exclude and "ring" not in names and lacking:
        found.append(
            f"NCCL_ALGO={variables['NCCL_ALGO']} leaves no algorithm for {', '.join(lacking)}, and NCCL fails there "
            f"since 2.24; write it for one function, as allreduce:{','.join(sorted(names))}."
        )
    if any(not exclude and "ll128" in names for exclude, names in protocols.values()):
        found.append(
            "NCCL_PROTO with LL128 can corrupt data where NCCL would not choose it itself (over PCIe); leave it out, "
            "or name NCCL_PROTO in nccl_env_unchecked."
        )
    if on("enable_deterministic_inference") and "NCCL_ALGO" in variables:
        found.append("enable_deterministic_inference makes SGLang set NCCL_ALGO itself; take it away here (null).")
    return found


def _lists(value: str) -> dict[str, tuple[bool, frozenset[str]]]:
    """Whether it excludes, and the names, by function ('' for all others)."""
    result = {}
    for part in value.lower().split(";") if value else ():
        function, _, listed = part.rpartition(":")
        result[function] = (listed.startswith("^"), frozenset(listed.lstrip("^").split(",")))
    return result


def rendered(profile: str, variables: Mapping[str, str]) -> str:
    """The environment file: as systemd reads it, and a shell after `set -a`."""
    lines = [f"# NCCL profile {profile}. Written by Ansible (role nccl_env): changes made here are lost."]
    return "\n".join([*lines, *(f"{name}={value}" for name, value in sorted(variables.items()))]) + "\n"


def run(params: dict[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """Write the file where it differs, keep what was there. The module nccl_environment says what comes back."""
    path, variables = params["path"], merged(params)
    after = rendered(params["profile"], variables)
    result: dict[str, Any] = {
        "changed": False,
        "path": path,
        "profile": params["profile"],
        "variables": variables,
        "backup": "",
    }
    try:
        before, mode = _present(path)
        if diff and before != after:
            result["diff"] = {"before": before or "", "after": after, "before_header": path, "after_header": path}
        result["changed"] = before != after or mode != 0o644
        if check_mode or not result["changed"]:
            return result
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        if before is not None and before != after:
            result["backup"] = f"{path}.{time.strftime('%Y-%m-%d@%H:%M:%S')}~"
            replace_file(result["backup"], before, 0o644)
        replace_file(path, after, 0o644)  # a server that starts meanwhile reads the old one or the new one
    except OSError as error:
        return {
            **result,
            "changed": False,
            "failed": True,
            "msg": f"{path} can't be written: {error.strerror or error}.",
        }
    return result


def _present(path: str) -> tuple[str | None, int]:
    """Text and mode of the file; None where there is none. OSError where it is no plain file."""
    try:
        facts = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, 0o644
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(0, "it is no plain file; move it away")
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(), stat.S_IMODE(facts.st_mode)
