"""What is to be thought of one GPU, and the one sentence that says what to do about it. Pure.

Every GPU gets one of VERDICTS. Memory is in MiB, by NVML v2: the driver's reserved memory is not used memory.
A value that could not be read never makes a GPU free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .readings import Gpu, GpuProcess, is_lost, normal_pci

if TYPE_CHECKING:
    from .kernel_log import KernelEvent

FREE = "free"
IN_USE = "in_use"
PROTECTED_ONLY = "protected_only"
UNOWNED_MEMORY = "unowned_memory"
OTHER_NAMESPACE = "other_namespace"
DEAD_PID = "dead_pid"
GHOST_LATCH = "ghost_latch"
UNKILLABLE = "unkillable"
LOST = "lost"
UNKNOWN = "unknown"
VERDICTS = (
    FREE,
    IN_USE,
    PROTECTED_ONLY,
    UNOWNED_MEMORY,
    OTHER_NAMESPACE,
    DEAD_PID,
    GHOST_LATCH,
    UNKILLABLE,
    LOST,
    UNKNOWN,
)
CLEAN = (FREE, PROTECTED_ONLY)


@dataclass(frozen=True)
class Sight:
    """What /proc says about the processes that the driver lists, and where we stand.

    `states` maps a pid to 'live', 'dead' (we would see it if it lived) or 'unseen' (it may live where we
    can't look); a pid that is missing counts as unseen. `unkillable`: pids that outlived SIGKILL's deadline.
    `guest`: we stand in a PID namespace that is not the machine's first, so owners may live outside of it.
    """

    states: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    protected: frozenset[int] = frozenset()
    unkillable: frozenset[int] = frozenset()
    guest: bool = False


@dataclass(frozen=True)
class Policy:
    """Bounds in MiB, seconds and percent.

    `utilization` holds earlier samples of this GPU as (monotonic seconds, percent), the present one last:
    a ghost latch needs at least three, all at `latch_percent` or more, over `latch_seconds` or more (the
    driver averages over up to a second, so the load of a process that just died still shows).
    """

    free_mib: int = 64
    protected_mib: int = 1024
    utilization: tuple[tuple[float, int | None], ...] = ()
    latch_percent: int = 90
    latch_seconds: float = 2.0


@dataclass(frozen=True)
class Verdict:
    verdict: str
    cure: str  # one sentence that says what to type or do; empty when nothing is to be done
    pids: list[int]  # the processes that the verdict is about
    detail: str  # one sentence on what was seen

    @property
    def clean(self) -> bool:
        return self.verdict in CLEAN


def judge(gpu: Gpu, sight: Sight, policy: Policy, events: Iterable[KernelEvent] = ()) -> Verdict:
    """The verdict on one GPU. `events` (kernel messages) only name a cause: they never make a GPU bad or good."""
    unreadable = _unreadable(gpu, tuple(events))
    if unreadable is not None:
        return unreadable
    used, processes = gpu.used_mib or 0, gpu.processes or ()  # both known, or _unreadable had spoken
    groups = _by_state(processes, sight)
    stuck = groups["stuck"] or _stuck_unlisted(used, processes, sight, policy)
    if stuck:
        cure = f"Reboot the host: {_pids(stuck)} can't be ended while a call into the driver holds it, so don't retry."
        return Verdict(UNKILLABLE, cure, stuck, f"{_named(stuck, processes, sight)} outlived SIGKILL")
    if groups["live"]:
        live = groups["live"]
        cure = (
            f"Stop {_pids(live)} (`kill {' '.join(map(str, live))}` if it is yours), or let the reset end it if it is"
            " a leftover server."
        )
        return Verdict(IN_USE, cure, live, f"{used} MiB used by {_named(live, processes, sight)}")
    if groups["unseen"]:
        return _unseen(groups["unseen"], sight)
    if groups["dead"]:
        dead = groups["dead"]
        cure = f"Look again in a few seconds, and if {_pids(dead)} is still listed, {_gpu_reset(gpu)}."
        return Verdict(DEAD_PID, cure, dead, f"NVML still lists {_pids(dead)}, which is dead; {used} MiB used")
    if groups["protected"]:
        return _protected(gpu, used, processes, groups["protected"], sight, policy)
    if used > policy.free_mib:
        return _unowned(gpu, used, sight)
    if latch_suspected(gpu, policy) and _latched(policy):
        return _latch(gpu, used, policy)
    return Verdict(FREE, "", [], f"{used} MiB used, no process")


def latch_suspected(gpu: Gpu, policy: Policy) -> bool:
    """Whether an empty GPU is so busy that it must be watched for `latch_seconds` before it is called free."""
    return (
        not gpu.processes
        and gpu.used_mib is not None
        and gpu.used_mib <= policy.free_mib
        and gpu.utilization_percent is not None
        and gpu.utilization_percent >= policy.latch_percent
    )


def settled(gpu: Gpu, policy: Policy) -> bool:
    """Whether another sample of utilization could no longer change the verdict on this GPU.

    A caller that polls goes on while this is false: an empty GPU at full load is either the afterglow of a process
    that just died or a ghost latch, and only time tells.
    """
    return not latch_suspected(gpu, policy) or _latched(policy)


def _latched(policy: Policy) -> bool:
    """Whether the last samples, as far back as they are all busy, span the time that a latch needs."""
    busy: list[float] = []
    for seconds, percent in reversed(policy.utilization):
        if percent is None or percent < policy.latch_percent:
            break
        busy.append(seconds)
    return len(busy) >= 3 and busy[0] - busy[-1] >= policy.latch_seconds


def _by_state(processes: tuple[GpuProcess, ...], sight: Sight) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"stuck": [], "live": [], "protected": [], "dead": [], "unseen": []}
    for pid in sorted({process.pid for process in processes}):
        state = sight.states.get(pid, "unseen")
        if state == "live" and pid in sight.unkillable:
            state = "stuck"
        elif state == "live" and pid in sight.protected:
            state = "protected"
        groups[state if state in groups else "unseen"].append(pid)
    return groups


def _stuck_unlisted(used: int, processes: tuple[GpuProcess, ...], sight: Sight, policy: Policy) -> list[int]:
    """A process that dies inside the driver leaves NVML's list before its memory goes."""
    if processes or used <= policy.free_mib:
        return []
    return sorted(pid for pid in sight.unkillable if sight.states.get(pid) == "live")


def _unseen(pids: list[int], sight: Sight) -> Verdict:
    if sight.guest:
        cure = (
            "Set gpu_hypervisor to the machine that runs this guest and reset again: the owner lives in another"
            " container or guest, where only that machine can end it."
        )
        return Verdict(OTHER_NAMESPACE, cure, pids, f"NVML lists {_pids(pids)}, which is not in this guest")
    cure = "Run again as root (become: true): /proc hides other users' processes from this one."
    return Verdict(UNKNOWN, cure, pids, f"NVML lists {_pids(pids)}, which this user can't see")


def _protected(
    gpu: Gpu, used: int, processes: tuple[GpuProcess, ...], pids: list[int], sight: Sight, policy: Policy
) -> Verdict:
    names = _named(pids, processes, sight)
    if used <= policy.protected_mib:
        return Verdict(PROTECTED_ONLY, "", pids, f"{used} MiB used, only protected {names}")
    shares = [process.used_mib for process in processes]
    owned = sum(share for share in shares if share is not None)
    if None not in shares and used - owned > policy.protected_mib:
        return _unowned(gpu, used - owned, sight)
    cure = (
        f"Stop protected {_pids(pids)} by its own service, or raise protected_mib (now {policy.protected_mib}) if it"
        " may hold that much."
    )
    return Verdict(IN_USE, cure, pids, f"{used} MiB used by protected {names}")


def _unowned(gpu: Gpu, mib: int, sight: Sight) -> Verdict:
    if gpu.reserved_mib is None and "reserved_mib" in gpu.errors:
        cure = (
            "Upgrade nvidia-ml-py or the driver (to 510 or later), or set free_mib above what the idle GPU shows: this"
            " reading counts the driver's own reserve as used."
        )
        return Verdict(UNKNOWN, cure, [], f"{mib} MiB used, the driver's reserve included, and no process listed")
    if sight.guest:
        cure = (
            "Set gpu_hypervisor to the machine that runs this guest and reset again: either the owner is in another PID"
            " namespace or the memory is orphaned, and only that machine can tell which."
        )
        return Verdict(UNOWNED_MEMORY, cure, [], f"{mib} MiB used that no listed process owns")
    cure = f"Reset again with repair: [probe], and if the memory stays, {_gpu_reset(gpu)}."
    return Verdict(UNOWNED_MEMORY, cure, [], f"{mib} MiB used that no process of this machine owns")


def _latch(gpu: Gpu, used: int, policy: Policy) -> Verdict:
    cure = (
        "Reset again with repair: [probe], which opens and closes a CUDA context on it, and if it stays busy,"
        f" {_gpu_reset(gpu)}."
    )
    seen = f"{gpu.utilization_percent} % busy for {policy.latch_seconds:g} s or more with {used} MiB and no process"
    return Verdict(GHOST_LATCH, cure, [], seen)


def _gpu_reset(gpu: Gpu) -> str:
    which = _which(gpu)
    return (
        f"stop what uses the driver, type `nvidia-smi -pm 0 -i {which} && nvidia-smi --gpu-reset -i {which}`"
        " (refused while persistence mode is on), and reboot where that is refused"
    )


def _which(gpu: Gpu) -> str:
    return gpu.uuid or gpu.pci_bus_id or str(gpu.index)


def _unreadable(gpu: Gpu, events: tuple[KernelEvent, ...]) -> Verdict | None:
    """The verdict on a GPU that does not tell what it holds; None when it does."""
    whole = gpu.errors.get("gpu", "")
    said = next((words for words in gpu.errors.values() if is_lost(words)), "")
    unread = gpu.used_mib is None or gpu.processes is None
    fallen = any(event.xid == 79 and _same_gpu(event.pci_bus_id, gpu.pci_bus_id) for event in events)
    if said or (fallen and (whole or unread)):
        cure = (
            "Cold boot the host (power off, wait, power on), since a warm reboot often does not bring back a GPU that"
            " fell off the bus, and reseat or replace it if it falls off again."
        )
        seen = f"NVML says: {said or whole or 'nothing'}{', and the kernel log has Xid 79' if fallen else ''}"
        return Verdict(LOST, cure, [], seen)
    if whole:
        return Verdict(UNKNOWN, _cure(gpu, whole), [], f"the GPU can't be read: {whole}")
    if gpu.mig:
        cure = (
            f"Switch MIG off (`nvidia-smi -i {_which(gpu)} -mig 0`) or leave this GPU out of gpus: its instances can't"
            " be judged as one GPU."
        )
        return Verdict(UNKNOWN, cure, [], "MIG is on")
    for what, value in (("memory", gpu.used_mib), ("processes", gpu.processes), ("mig", gpu.mig)):
        if value is None:
            words = gpu.errors.get(what, "no reason given")
            return Verdict(UNKNOWN, _cure(gpu, words, what), [], f"{what} can't be read: {words}")
    return None


def _cure(gpu: Gpu, words: str, field: str = "") -> str:
    low = words.lower()
    if "permission" in low:
        return "Run again as root (become: true), or give the guest this GPU's device nodes."
    if "requires reset" in low or "reset required" in low:
        return f"Reset the GPU, as the driver asks: {_gpu_reset(gpu)}."
    if "mismatch" in low:
        return "Reboot, or unload and load the nvidia modules: the loaded driver and its libraries differ in version."
    if "not answer" in low or "died in" in low:
        return "Look in `dmesg` for Xid lines, and reboot if `nvidia-smi` hangs by hand too."
    if "not supported" in low and field == "memory":
        return (
            "Judge this host by its processes and `free -m`: the GPU shares the system's memory (unified memory) and"
            " has none of its own to read."
        )
    if "not supported" in low:
        return f"Type `nvidia-smi -q -i {_which(gpu)}` to see what this driver offers: it does not give that reading."
    return f"Look in `dmesg` for NVRM lines, and reboot if `nvidia-smi -i {_which(gpu)}` fails by hand too."


def _same_gpu(one: str, other: str) -> bool:
    """Xid lines name a GPU without its function: 0000:3b:00."""
    if not one or not other:
        return False
    full = one if "." in one else one + ".0"
    return normal_pci(full).rpartition(".")[0] == normal_pci(other).rpartition(".")[0]


def _pids(pids: Iterable[int]) -> str:
    listed = list(pids)
    return ("process " if len(listed) == 1 else "processes ") + ", ".join(map(str, listed))


def _named(pids: Iterable[int], processes: tuple[GpuProcess, ...], sight: Sight) -> str:
    used = {process.pid: process.used_mib for process in processes}
    words = []
    for pid in pids:
        size = used.get(pid)
        name = sight.names.get(pid) or "process"
        words.append(f"{name} (pid {pid})" if size is None else f"{name} (pid {pid}, {size} MiB)")
    return ", ".join(words)
