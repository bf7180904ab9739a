"""What a GPU host is like, as plain data for host_checks.py to judge. Changes nothing.

Everything that may hang (the driver, file systems of other machines) is asked in child processes under the deadline.
What can't be read is None, never zero.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Callable

from . import cuda_toolkit, filesystems, jit_caches, pci
from .child import Child, Gone, Silent
from .deadline import Deadline
from .readings import Gpu, Readings
from .storage import text_of

_NVML = "libnvidia-ml.so.1"
# nvmlGpuP2PStatus_t (nvml.h); 0 is OK.
_P2P = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled",
    5: "not supported",
}


def gpu_facts(readings: Readings, gpus: Sequence[Gpu], sys_root: str = "/sys") -> list[dict[str, Any]]:
    """One entry for each chosen GPU, with its place on the PCI bus (None where sysfs doesn't show it)."""
    found = []
    for gpu in gpus:
        where = pci.place(gpu.pci_bus_id, sys_root) if gpu.pci_bus_id else None
        found.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "pci_bus_id": gpu.pci_bus_id,
                "compute_capability": gpu.compute_capability,
                "total_mib": gpu.total_mib,
                "mig": gpu.mig,
                "errors": dict(gpu.errors),
                "place": None if where is None else asdict(where),
            }
        )
    return found


def driver_facts(deadline: Deadline, indices: Sequence[int]) -> dict[str, Any]:
    """What NVML says beside the readings: CUDA version of the driver, persistence mode by index, peer access.

    `p2p` lists [index, index, why not]; None where it can't be asked.
    """
    empty: dict[str, Any] = {"cuda_version": None, "persistence": None, "p2p": None}
    answer = in_child(lambda: _ask_nvml(list(indices)), deadline)
    return answer if isinstance(answer, dict) else empty


def _ask_nvml(indices: list[int]) -> dict[str, Any]:
    answer: dict[str, Any] = {"cuda_version": None, "persistence": None, "p2p": None}
    library = ctypes.CDLL(_NVML)
    if library.nvmlInit_v2():
        return answer
    number = ctypes.c_int()
    with contextlib.suppress(AttributeError):
        if library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0:
            answer["cuda_version"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    handles = {}
    for index in indices:
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            handles[index] = handle
    with contextlib.suppress(AttributeError):
        modes = {}
        for index, handle in handles.items():
            mode = ctypes.c_uint()
            if library.nvmlDeviceGetPersistenceMode(handle, ctypes.byref(mode)) == 0:
                modes[str(index)] = bool(mode.value)
        answer["persistence"] = modes
    with contextlib.suppress(AttributeError):
        pairs = []
        for first, one in handles.items():
            for second, other in handles.items():
                status = ctypes.c_int()
                asked = first < second and library.nvmlDeviceGetP2PStatus(one, other, 0, ctypes.byref(status)) == 0
                if asked and status.value:
                    pairs.append([first, second, _P2P.get(status.value, "unknown")])
        answer["p2p"] = pairs
    return answer


def in_child(work: Callable[[], Any], deadline: Deadline) -> Any:
    """What `work` returns, computed in a child that is left behind when it hangs; None when it fails or hangs."""

    def serve(ask: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        ask()
        answer(work())

    child = Child(serve)
    try:
        child.ask(True)
        return child.answer(deadline)
    except (Silent, Gone):
        return None
    finally:
        child.abandon()


def memory_facts(proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> dict[str, int | None]:
    """Memory of the host in MiB; `limit_mib` is the control group's where we are in a limited one (a guest)."""
    known: dict[str, int] = {}
    for line in text_of(f"{proc_root}/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            known[name] = int(rest.split()[0]) >> 10
    limits = (text_of(f"{cgroup_root}/{name}") for name in ("memory.max", "memory/memory.limit_in_bytes"))
    limit = next(filter(None, map(str.strip, limits)), "")
    limit_mib = int(limit) >> 20 if limit.isdigit() else None
    if limit_mib is not None and limit_mib >= (known.get("MemTotal") or 1 << 40):
        limit_mib = None
    return {"total_mib": known.get("MemTotal"), "available_mib": known.get("MemAvailable"), "limit_mib": limit_mib}


def mount_facts(path: str, table: Sequence[filesystems.Mount]) -> dict[str, Any]:
    """On which mount a path lies or would lie, from the mount table alone: nothing of the path is touched.

    Links on the way are followed only where that cannot hang; `type` is '' when the table says nothing.
    """
    found = _covering(path, table)
    if found is not None and not found.may_hang:
        found = _covering(os.path.realpath(path), table)
    if found is None:
        return {"path": path, "point": "", "type": "", "local": None}
    return {"path": path, "point": found.point, "type": found.type, "local": found.local}


def _covering(path: str, table: Sequence[filesystems.Mount]) -> filesystems.Mount | None:
    best: filesystems.Mount | None = None
    for mount in table:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def space_facts(
    paths: Mapping[str, str], table: Sequence[filesystems.Mount], deadline: Deadline
) -> list[dict[str, Any]]:
    """Free space for each purpose -> path (the nearest folder that exists counts); None when it can't be told.

    `present_mib` is the size of the model files that lie there already.
    """
    found = []
    for purpose, path in paths.items():
        answer = in_child(lambda path=path: _space(path), deadline.capped(10)) or {}  # type: ignore[misc]
        found.append({"purpose": purpose, **mount_facts(path, table), "free_mib": None, "total_mib": None, **answer})
    return found


def _space(path: str) -> dict[str, Any]:
    here = path
    while not os.path.isdir(here) and here != "/":
        here = os.path.dirname(here)
    facts = os.statvfs(here)
    present = 0
    for root, folders, files in os.walk(path):
        folders[:] = [] if root.count("/") - path.rstrip("/").count("/") >= 2 else folders
        for name in files:
            if name.endswith((".safetensors", ".bin", ".gguf", ".pt")):
                with contextlib.suppress(OSError):
                    present += os.stat(os.path.join(root, name)).st_size
    return {
        "exists": here == path,
        "free_mib": facts.f_bavail * facts.f_frsize >> 20,
        "total_mib": facts.f_blocks * facts.f_frsize >> 20,
        "device": os.stat(here).st_dev,
        "present_mib": present >> 20,
    }


def cache_facts(caches: Iterable[jit_caches.Cache], table: Sequence[filesystems.Mount]) -> list[dict[str, Any]]:
    """On what each JIT cache lies."""
    return [{"name": cache.name, "batons": cache.batons, **mount_facts(cache.path, table)} for cache in caches]


def network_facts(proc_root: str = "/proc") -> dict[str, Any]:
    """The ports that outgoing connections take, and those that are kept out of that range."""
    folder = f"{proc_root}/sys/net/ipv4"
    ends = text_of(f"{folder}/ip_local_port_range").split()
    return {
        "ephemeral": [int(ends[0]), int(ends[1])] if len(ends) == 2 else None,
        "reserved": ranges(text_of(f"{folder}/ip_local_reserved_ports")),
    }


def ranges(text: str) -> list[list[int]]:
    """'8080,9000-9010' as [[8080, 8080], [9000, 9010]]."""
    found = []
    for part in text.replace("\n", ",").split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match:
            found.append([int(match.group(1)), int(match.group(2) or match.group(1))])
    return found


def secret_facts(paths: Iterable[str], user: str) -> list[dict[str, Any]]:
    """Mode and owner of files that hold secrets; their content is never read."""
    allowed = {0, os.geteuid(), *uids(user)}
    found = []
    for path in paths:
        entry: dict[str, Any] = {"path": path, "kind": "missing", "mode": None, "owner": None, "foreign": False}
        with contextlib.suppress(OSError):
            facts = os.lstat(path)
            if stat.S_ISLNK(facts.st_mode):
                facts = os.stat(path)
            entry.update(
                kind="file" if stat.S_ISREG(facts.st_mode) else "other",
                mode=f"{stat.S_IMODE(facts.st_mode):04o}",
                owner=facts.st_uid,
                foreign=facts.st_uid not in allowed,
                empty=facts.st_size == 0,
            )
        found.append(entry)
    return found


def uids(user: str) -> list[int]:
    """The uid of a user by name, [] when there is no such user."""
    try:
        return [pwd.getpwnam(user).pw_uid] if user else []
    except KeyError:
        return []


def home_of(user: str) -> tuple[str, str]:
    """(name, home folder) of the user, ours when none is named; the home is '' for an unknown user."""
    try:
        entry = pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        return user or str(os.geteuid()), ""
    return entry.pw_name, entry.pw_dir


def machine_facts(proc_root: str = "/proc", sys_root: str = "/sys") -> dict[str, Any]:
    """Whether we are in a virtual machine or a container, the kernel's command line, how many IOMMU groups it has."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"{proc_root}/self/ns/pid")
    flags = re.search(r"^flags\s*:(.*)$", text_of(f"{proc_root}/cpuinfo"), re.M)
    return {
        "virtual_machine": bool(flags and "hypervisor" in flags.group(1).split()),
        "container": bool(namespace) and namespace != "pid:[4026531836]",
        # Only what bears on the check: others may name machines and people.
        "kernel_arguments": [
            word
            for word in text_of(f"{proc_root}/cmdline").split()
            if re.match(r"(?:\w+_)?iommu|pcie?[_.=]|nvidia", word)
        ],
        "iommu_groups": pci.iommu_groups(sys_root),
        "cores": len(os.sched_getaffinity(0)),
    }


def compiler_facts(deadline: Deadline, environment: Mapping[str, str], packages: str = "") -> dict[str, str] | None:
    """The CUDA compiler that a JIT compiler of the server would take; None when there is none."""
    path = environment.get("PATH") or os.environ.get("PATH", "") or "/usr/local/bin:/usr/bin:/bin"
    found = cuda_toolkit.find(deadline, environment, path, packages)
    return None if found is None else asdict(found)
