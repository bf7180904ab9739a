"""Judges a host before anything is staged or built on it: from facts (host_facts.py) to findings. Pure.

A fact that could not be read gives no finding of its own kind, unless not knowing is itself worth a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import cuda_toolkit, versions
from .finding import ERROR, INFO, WARNING, Finding

# MiB. A rank is one process of some 4 GiB of host memory (Python, CUDA context, pinned buffers) besides the page cache.
RAM_PER_GPU = 4096
# NCCL's and SGLang's segments; a container's default of 64 MiB for all does not start two ranks.
SHM_PER_GPU_LEAST, SHM_PER_GPU = 64, 1024
# Room that staging and a JIT build need beside the model.
DISK_RESERVE = 4096
# Share of the GPUs' memory that weights may take at most, so that a KV cache still fits.
WEIGHTS_SHARE = 0.95

_PROVE = "Run the check with all_reduce: it alone tells whether peer-to-peer works."

CODES = (
    "acs_redirects", "acs_unreadable", "cache_on_network", "compute_capability", "disk_small", "driver_cuda_old",
    "driver_old", "gpu_memory_small", "gpu_mig", "gpu_missing", "gpu_unreadable", "gpus_differ", "iommu_translates",
    "nvcc_broken", "nvcc_missing", "nvcc_old", "nvcc_old_for_flashinfer", "p2p_refused", "p2p_unjudged",
    "persistence_off", "port_ephemeral", "ram_below_model", "ram_small", "secret_foreign", "secret_missing",
    "secret_mode", "secret_no_file", "shm_small", "space_unknown", "user_missing", "all_reduce_hangs",
    "all_reduce_wrong", "all_reduce_impossible",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What the host is to do. Sizes in MiB, 0 for not known; '' likewise."""

    compute_capability: str = ""
    model_mib: int = 0
    build: bool = False
    ports: tuple[int, ...] = ()
    min_ram_mib: int = 0
    min_shm_free_mib: int = 0
    user: str = ""


def check(facts: Mapping[str, Any], wanted: Wanted) -> list[Finding]:
    """Everything that is wrong or odd about the host."""
    gpus: Sequence[Mapping[str, Any]] = facts["gpus"]
    found = _gpus(facts, gpus, wanted)
    found += _driver(facts, gpus, wanted)
    found += _compiler(facts, gpus, wanted)
    found += _memory(facts, gpus, wanted)
    found += _disk(facts, wanted)
    found += _caches(facts["caches"])
    if len(gpus) > 1:
        found += _peer_to_peer(facts, gpus)
    found += _ports(facts["network"], wanted.ports)
    found += _secrets(facts["secrets"], wanted.user)
    if wanted.user and not facts.get("home"):
        text = f"There is no user {wanted.user} on this host."
        found.append(Finding(ERROR, "user_missing", text, wanted.user, f"Make it: useradd --create-home {wanted.user}"))
    return found


def capability(gpus: Sequence[Mapping[str, Any]], wanted: str = "") -> str:
    """The compute capability that the host's kernels are for: the GPUs' own, else the one asked for."""
    return next((gpu["compute_capability"] for gpu in gpus if gpu.get("compute_capability")), "") or wanted


# GPUs, driver, compiler


def _gpus(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Finding]:
    if facts.get("gpu_error"):
        return [Finding(ERROR, "gpu_unreadable", str(facts["gpu_error"]), "GPUs that can be read")]
    if not gpus:
        text = "The driver runs, but this host has no GPU."
        return [Finding(ERROR, "gpu_missing", text, "at least one GPU", "Look in `lspci | grep -i nvidia`.")]
    found = []
    for gpu in gpus:
        if gpu["errors"].get("gpu"):
            text = f"GPU {gpu['index']} can't be read: {gpu['errors']['gpu']}."
            cure = "Run playbooks/reset.yml: it says what to do about this GPU."
            found.append(Finding(ERROR, "gpu_unreadable", text, "a GPU that answers", cure))
        if gpu.get("mig"):
            text = f"MIG is on for GPU {gpu['index']}, so it is no whole GPU."
            cure = f"Turn it off: nvidia-smi -i {gpu['index']} -mig 0"
            found.append(Finding(ERROR, "gpu_mig", text, "MIG off", cure))
    kinds = sorted({(gpu["name"], gpu["compute_capability"]) for gpu in gpus if gpu["name"]}, key=str)
    if len(kinds) > 1:
        text = "The GPUs differ: " + ", ".join(f"{name} ({number})" for name, number in kinds) + "."
        cure = "Choose GPUs of one kind (sglang_gpus): one kernel build serves one architecture."
        found.append(Finding(WARNING, "gpus_differ", text, "GPUs of one kind", cure))
    have = capability(gpus)
    if wanted.compute_capability and have and have != wanted.compute_capability:
        text = f"The GPUs have compute capability {have}, the host is said to have {wanted.compute_capability}."
        cure = "Move the host to the inventory group of its GPUs, or correct gpu_host_compute_capability."
        found.append(Finding(ERROR, "compute_capability", text, wanted.compute_capability, cure))
    off = sorted(int(index) for index, mode in (facts["driver"].get("persistence") or {}).items() if not mode)
    if off:
        text = f"Persistence mode is off for GPU {_listed(off)}: each first use starts the driver anew (seconds)."
        cure = "Turn it on: systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)"
        found.append(Finding(WARNING, "persistence_off", text, "persistence mode on", cure))
    return found


def _driver(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Finding]:
    number = capability(gpus, wanted.compute_capability)
    driver, cuda = facts.get("driver_version") or "", facts["driver"].get("cuda_version") or ""
    need_driver, need_cuda = cuda_toolkit.first_driver(number), cuda_toolkit.first_cuda(number)
    if need_driver and versions.older(driver, need_driver):
        text = f"The NVIDIA driver is {driver}; compute capability {number} needs {need_driver} or newer."
        return [Finding(ERROR, "driver_old", text, need_driver, "Install a newer driver and reboot.")]
    if need_cuda and versions.older(cuda, need_cuda):
        text = f"The driver runs CUDA up to {cuda}; kernels for compute capability {number} need {need_cuda}."
        return [Finding(ERROR, "driver_cuda_old", text, need_cuda, "Install a newer driver and reboot.")]
    return []


def _compiler(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Finding]:
    number = capability(gpus, wanted.compute_capability)
    nvcc: Mapping[str, Any] | None = facts.get("nvcc")
    severity = ERROR if wanted.build else WARNING
    if nvcc is None:
        text = (
            "There is no CUDA compiler (nvcc): nothing can be built, and SGLang's JIT kernels fail at their first use."
        )
        cure = "Install the CUDA toolkit and set CUDA_HOME in sglang_environment."
        return [Finding(severity, "nvcc_missing", text, "nvcc", cure)]
    if not nvcc["version"]:
        text = f"The compiler {nvcc['path']} does not run: {nvcc['why']}."
        return [Finding(severity, "nvcc_broken", text, "nvcc", "Install the CUDA toolkit anew, or set CUDA_HOME.")]
    if number.startswith("12."):
        have = f"The compiler {nvcc['path']} is of CUDA {nvcc['version']}"
        cure = "Install a newer CUDA toolkit and set CUDA_HOME in sglang_environment."
        need = cuda_toolkit.first_cuda(number)
        if versions.older(nvcc["version"], need):
            text = f"{have}; it can't compile for compute capability {number}, which needs {need}."
            return [Finding(ERROR, "nvcc_old", text, need, cure)]
        need = cuda_toolkit.FLASHINFER_NVCC
        if versions.older(nvcc["version"], need):
            text = f"{have}; FlashInfer's JIT needs {need} here and would say that it requires sm75 or higher."
            return [Finding(ERROR, "nvcc_old_for_flashinfer", text, need, cure)]
    return []


# Memory, disk, caches


def _memory(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[Finding]:
    found = []
    count = max(1, len(gpus))
    sizes = [value for value in (facts["memory"]["total_mib"], facts["memory"]["limit_mib"]) if value]
    ram = min(sizes) if sizes else None
    least = wanted.min_ram_mib or RAM_PER_GPU * count
    if ram is not None and ram < least:
        text = f"The host has {_gib(ram)} of memory, {_gib(least)} are needed for {count} ranks."
        found.append(Finding(ERROR, "ram_small", text, _gib(least), "Use fewer GPUs, or a host with more memory."))
    elif ram is not None and ram < wanted.model_mib:
        text = f"The host's memory ({_gib(ram)}) is smaller than the model ({_gib(wanted.model_mib)})."
        cure = "Expect a slow load: each rank reads the disk anew, since the page cache can't hold the model."
        found.append(Finding(WARNING, "ram_below_model", text, _gib(wanted.model_mib), cure))
    shm = facts["shm"]
    least = wanted.min_shm_free_mib or SHM_PER_GPU_LEAST * count
    advised = wanted.min_shm_free_mib or SHM_PER_GPU * count
    if shm["free_mib"] is not None and shm["free_mib"] < advised:
        severity = ERROR if shm["free_mib"] < least else WARNING
        need = least if severity == ERROR else advised
        text = f"{shm['path']} has {_gib(shm['free_mib'])} free, {_gib(need)} are needed: else SIGBUS or NCCL's ENOSPC."
        cure = (
            f"Enlarge it (mount -o remount,size={_whole_gib(advised)}G {shm['path']}; a container: --shm-size), or run "
            "playbooks/reset.yml, which removes what dead servers left there."
        )
        found.append(Finding(severity, "shm_small", text, _gib(need), cure))
    totals = [gpu["total_mib"] for gpu in gpus if gpu["total_mib"]]
    if wanted.model_mib and totals and len(totals) == len(gpus) and wanted.model_mib > WEIGHTS_SHARE * sum(totals):
        text = f"The model has {_gib(wanted.model_mib)}, the {len(gpus)} GPUs have {_gib(sum(totals))} together."
        cure = "Use more GPUs or hosts, or a smaller quantization of the model."
        expected = f"at most {_gib(int(WEIGHTS_SHARE * sum(totals)))}"
        found.append(Finding(ERROR, "gpu_memory_small", text, expected, cure))
    return found


def _disk(facts: Mapping[str, Any], wanted: Wanted) -> list[Finding]:
    found = []
    for space in facts["spaces"]:
        where = f"{space['path']} ({space['purpose']})"
        if space["free_mib"] is None:
            text = f"The free space of {where} can't be told: the file system does not answer."
            found.append(Finding(WARNING, "space_unknown", text, "", f"Look at it by hand: df -h {space['path']}"))
            continue
        need = int(space.get("need_mib") or 0)
        if need and need > space["free_mib"]:
            text = f"{where} has {_gib(space['free_mib'])} free, {_gib(need)} are still needed."
            cure = "Free space there, or choose another disk."
            found.append(Finding(ERROR, "disk_small", text, _gib(need), cure))
    return found


def with_needs(spaces: Sequence[Mapping[str, Any]], model_mib: int, build_mib: int = 0) -> list[dict[str, Any]]:
    """The spaces with what is still to be written to each (MiB): the rest of the model, a build."""
    result = []
    for space in spaces:
        need = 0
        if space["purpose"] == "model" and model_mib:
            rest = max(0, model_mib - int(space.get("present_mib") or 0))
            need = rest + DISK_RESERVE if rest else 0
        elif space["purpose"] == "kernel build":
            need = build_mib
        result.append({**space, "need_mib": need})
    return result


def _caches(caches: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
    for cache in caches:
        if cache["local"] is not False or cache["type"] in ("tmpfs", ""):
            continue
        text = f"The JIT cache {cache['path']} lies on {cache['point']}, a {cache['type']} file system."
        if cache["batons"]:
            text += " A lock left there by a killed build is never given up, and every later start hangs."
        else:
            text += " Kernels are rebuilt at each start or damaged by other hosts."
        cure = "Point it to a local disk: set SGLANG_CACHE_DIR, FLASHINFER_WORKSPACE_BASE and TVM_FFI_CACHE_DIR."
        severity = ERROR if cache["batons"] else WARNING
        found.append(Finding(severity, "cache_on_network", text, "a local file system", cure))
    return found


# Peer-to-peer


def _peer_to_peer(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
    machine = facts["machine"]
    places = [(gpu["index"], gpu["place"]) for gpu in gpus if gpu["place"]]
    translated = sorted(index for index, place in places if place["iommu_type"].startswith("DMA"))
    untold = sorted(index for index, place in places if place["iommu_group"] and not place["iommu_type"])
    passed = {"iommu=pt", "iommu.passthrough=1"} & set(machine["kernel_arguments"])
    if translated or (untold and not passed):
        text = f"The IOMMU translates the addresses of GPU {_listed(translated or untold)}: peer-to-peer may hang."
        cure = f"Boot with iommu=pt, or turn the IOMMU off in the firmware. {_PROVE}"
        found.append(Finding(WARNING, "iommu_translates", text, "iommu=pt", cure))
    redirecting: dict[str, list[int]] = {}
    unreadable = False
    for index, place in places:
        for bridge in place["bridges"]:
            if bridge["acs"] is None:
                unreadable = True
            elif {"RequestRedirect", "CompletionRedirect"} & set(bridge["acs"]):
                redirecting.setdefault(bridge["address"], []).append(index)
    if redirecting:
        bridges = sorted(redirecting)
        text = (
            f"ACS is on at {len(bridges)} PCI bridges above the GPUs ({', '.join(bridges[:4])}"
            f"{', ...' if len(bridges) > 4 else ''}): peer-to-peer takes the way over the root, is slow, and may hang."
        )
        cure = f"Turn ACS off in the firmware, or by setpci on each bridge at boot (ECAP_ACS+0x6.w=0000). {_PROVE}"
        found.append(Finding(WARNING, "acs_redirects", text, "ACS off", cure))
    elif unreadable:
        text = "Whether ACS is on can't be read: that needs root, and in a guest the hypervisor alone knows."
        found.append(Finding(INFO, "acs_unreadable", text, "", _PROVE))
    refused = facts["driver"].get("p2p") or []
    if refused:
        reasons = sorted({reason for _, _, reason in refused})
        text = f"The driver offers no peer-to-peer between {len(refused)} pairs of GPUs ({', '.join(reasons)})."
        cure = "Use the throughput profile of nccl_env or NCCL_P2P_DISABLE=1; collectives go through host memory."
        found.append(Finding(INFO, "p2p_refused", text, "", cure))
    if machine["virtual_machine"]:
        text = "This is a virtual machine: its hypervisor's IOMMU and ACS settings can't be seen from here."
        found.append(Finding(INFO, "p2p_unjudged", text, "", _PROVE))
    return found


# Ports and secrets


def _ports(network: Mapping[str, Any], ports: Sequence[int]) -> list[Finding]:
    span = network["ephemeral"]
    if not span:
        return []
    kept_out = network["reserved"]
    inside = [
        port
        for port in ports
        if span[0] <= port <= span[1] and not any(first <= port <= last for first, last in kept_out)
    ]
    if not inside:
        return []
    text = (
        f"Port {_listed(inside)} lies in the range that outgoing connections take ({span[0]} to {span[1]}): any "
        "connection of this host may hold it when the server starts."
    )
    reserved = ",".join(map(str, inside))
    cure = f"Choose a port below {span[0]}, or keep it out: sysctl -w net.ipv4.ip_local_reserved_ports={reserved}"
    return [Finding(WARNING, "port_ephemeral", text, f"below {span[0]}", cure)]


def _secrets(secrets: Sequence[Mapping[str, Any]], user: str) -> list[Finding]:
    found = []
    for secret in secrets:
        path = secret["path"]
        if secret["kind"] == "missing":
            text = f"The secret's file {path} is missing."
            found.append(Finding(ERROR, "secret_missing", text, "a file of mode 0600", "Write it, mode 0600."))
        elif secret["kind"] != "file":
            text = f"{path} is no file, so it holds no secret."
            found.append(Finding(ERROR, "secret_no_file", text, "a file of mode 0600", "Name the file itself."))
        else:
            if int(secret["mode"], 8) & 0o077:
                text = f"The secret's file {path} has mode {secret['mode']}: others on this host can use it."
                found.append(Finding(ERROR, "secret_mode", text, "0600", f"Close it: chmod 0600 {path}"))
            if secret["foreign"]:
                text = f"The secret's file {path} belongs to uid {secret['owner']}, neither root nor the server's user."
                owner = user or "root"
                found.append(Finding(ERROR, "secret_foreign", text, owner, f"Give it to {owner}: chown {owner} {path}"))
    return found


def _gib(mib: int) -> str:
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def _whole_gib(mib: int) -> int:
    return max(1, -(-mib // 1024))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
