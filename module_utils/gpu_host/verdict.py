"""What is to be thought of one GPU, and the one sentence that says what to do about it. Pure.

Every GPU gets one of VERDICTS. Memory is in MiB, by NVML v2: the driver's reserved memory is not used memory.
A value that could not be read never makes a GPU free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Iterable, Mapping

from .readings import Gpu, GpuProcess, normal_pci

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
    can't look); a pid that is missing counts as unseen. `unkillable` are pids that outlived SIGKILL's deadline.
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
    a ghost latch needs at least three, all at `latch_percent` or more, over `latch_seconds` or more (the driver
    averages over up to a second, so the load of a process that just died still shows).
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
    """The verdict on one GPU. `events` (kernel messages) only name a cause, they never make a GPU bad or good."""
    unreadable = _unreadable(gpu, tuple(events))
    if unreadable is not None:
        return unreadable
    processes = gpu.processes
    if processes is None or gpu.used_mib is None:  # _unreadable speaks for both; this tells the type checker
        raise AssertionError("processes and memory are known here")
    groups = _by_state(processes, sight)
    stuck = sorted(set(groups["stuck"]) | (_stuck_elsewhere(gpu.used_mib, processes, sight, policy)))
    if stuck:
        return Verdict(
            UNKILLABLE,
            "Reboot the host: killing %s again does nothing while a call into the driver holds "
            "it." % _pids(stuck),
            stuck,
            "%s outlived SIGKILL and holds GPU %d" % (_named(stuck, processes, sight), gpu.index),
        )
    if groups["live"]:
        return _in_use(gpu, groups["live"], sight)
    if groups["unseen"]:
        return _unseen(gpu, groups["unseen"], sight)
    if groups["dead"]:
        return _dead(gpu, groups["dead"])
    if groups["protected"]:
        return _protected(gpu, processes, groups["protected"], sight, policy)
    if gpu.used_mib > policy.free_mib:
        return _unowned(gpu, gpu.used_mib, sight)
    if latch_suspected(gpu, policy) and _latched(policy):
        return _latch(gpu, policy)
    return Verdict(FREE, "", [], "%d MiB used, no process" % gpu.used_mib)


def latch_suspected(gpu: Gpu, policy: Policy) -> bool:
    """Whether an empty GPU is busy enough to look at it for `latch_seconds` before it is called free."""
    return (
        not gpu.processes
        and gpu.used_mib is not None
        and gpu.used_mib <= policy.free_mib
        and gpu.utilization_percent is not None
        and gpu.utilization_percent >= policy.latch_percent
    )


def settled(gpu: Gpu, policy: Policy) -> bool:
    """Whether another sample of utilization could no longer change the verdict on this GPU.

    A caller that polls goes on while this is false: an empty GPU at full load is either the afterglow of a
    process that just died or a ghost latch, and only time tells.
    """
    return not latch_suspected(gpu, policy) or not _all_busy(policy) or _latched(policy)


def _all_busy(policy: Policy) -> bool:
    return all(percent is not None and percent >= policy.latch_percent for _, percent in policy.utilization)


def _latched(policy: Policy) -> bool:
    samples = policy.utilization
    return len(samples) >= 3 and _all_busy(policy) and samples[-1][0] - samples[0][0] >= policy.latch_seconds


def _by_state(processes: tuple[GpuProcess, ...], sight: Sight) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"stuck": [], "live": [], "protected": [], "dead": [], "unseen": []}
    for pid in sorted({process.pid for process in processes}):
        state = sight.states.get(pid, "unseen")
        if pid in sight.unkillable and state == "live":
            state = "stuck"
        elif pid in sight.protected and state == "live":
            state = "protected"
        groups[state if state in groups else "unseen"].append(pid)
    return groups


def _stuck_elsewhere(used: int, processes: tuple[GpuProcess, ...], sight: Sight, policy: Policy) -> set[int]:
    """A process that dies inside the driver leaves NVML's list before its memory does."""
    if processes or used <= policy.free_mib:
        return set()
    return {pid for pid in sight.unkillable if sight.states.get(pid) == "live"}


def _in_use(gpu: Gpu, pids: list[int], sight: Sight) -> Verdict:
    return Verdict(
        IN_USE,
        "Stop %s (`kill %s` when it is yours), or let the reset end it if it is a leftover server."
        % (_pids(pids), " ".join(map(str, pids))),
        pids,
        "%s MiB used by %s" % (gpu.used_mib, _named(pids, gpu.processes or (), sight)),
    )


def _unseen(gpu: Gpu, pids: list[int], sight: Sight) -> Verdict:
    seen = "NVML lists pid %s, which %s" % (
        ", ".join(map(str, pids)),
        "is not in this guest" if sight.guest else "this user can't see in /proc",
    )
    if sight.guest:
        return Verdict(
            OTHER_NAMESPACE,
            "Run the reset with gpu_hypervisor set to the machine that runs this guest: "
            "the owner lives in another container or guest, which only the hypervisor sees.",
            pids,
            seen,
        )
    return Verdict(
        UNKNOWN,
        "Run again as root (become: true): /proc hides the processes of other users from this one.",
        pids,
        seen,
    )


def _dead(gpu: Gpu, pids: list[int]) -> Verdict:
    return Verdict(
        DEAD_PID,
        "Look again in a few seconds; if pid %s is still listed, %s."
        % (", ".join(map(str, pids)), _gpu_reset(gpu)),
        pids,
        "NVML still lists %s with %s MiB, and no such process is alive" % (_pids(pids), gpu.used_mib),
    )


def _protected(
    gpu: Gpu, processes: tuple[GpuProcess, ...], pids: list[int], sight: Sight, policy: Policy
) -> Verdict:
    used = gpu.used_mib or 0
    names = _named(pids, processes, sight)
    if used <= policy.protected_mib:
        return Verdict(PROTECTED_ONLY, "", pids, "%d MiB used, only by protected %s" % (used, names))
    shares = [process.used_mib for process in processes]
    owned = sum(share for share in shares if share is not None)
    if None not in shares and used - owned > policy.protected_mib:
        return _unowned(gpu, used - owned, sight)
    return Verdict(
        IN_USE,
        "Stop protected %s by its own service, or raise protected_mib (now %d) if it may hold that "
        "much." % (_pids(pids), policy.protected_mib),
        pids,
        "%d MiB used by protected %s" % (used, names),
    )


def _unowned(gpu: Gpu, mib: int, sight: Sight) -> Verdict:
    if "reserved_mib" in gpu.errors and gpu.reserved_mib is None:
        return Verdict(
            UNKNOWN,
            "Upgrade nvidia-ml-py or the driver (510 or later), or set free_mib above what the idle "
            "GPU shows: this reading counts the driver's own reserve as used.",
            [],
            "%d MiB used without a listed process, the driver's reserve included" % mib,
        )
    if sight.guest:
        return Verdict(
            UNOWNED_MEMORY,
            "Run the reset with gpu_hypervisor set to the machine that runs this guest: either "
            "the owner is in another PID namespace or the memory is orphaned, and only the hypervisor can "
            "tell which.",
            [],
            "%d MiB used and no process listed" % mib,
        )
    return Verdict(
        UNOWNED_MEMORY,
        "Reset again with repair: [probe]; if the memory stays, %s." % _gpu_reset(gpu),
        [],
        "%d MiB used and no process listed, though this host sees every process" % mib,
    )


def _latch(gpu: Gpu, policy: Policy) -> Verdict:
    seconds = policy.utilization[-1][0] - policy.utilization[0][0]
    return Verdict(
        GHOST_LATCH,
        "Reset again with repair: [probe], which opens and closes a CUDA context on it; if it "
        "stays busy, %s." % _gpu_reset(gpu),
        [],
        "%d %% busy for %.1f s with %d MiB used and no process"
        % (gpu.utilization_percent or 0, seconds, gpu.used_mib or 0),
    )


def _gpu_reset(gpu: Gpu) -> str:
    which = gpu.uuid or str(gpu.index)
    return (
        "stop what uses the driver and type `nvidia-smi -pm 0 -i %s && nvidia-smi --gpu-reset -i %s` (refused while "
        "persistence mode is on), and reboot where that is refused" % (which, which)
    )


def _unreadable(gpu: Gpu, events: tuple[KernelEvent, ...]) -> Verdict | None:
    """The verdict on a GPU that does not tell what it holds, None when it does."""
    whole = gpu.errors.get("gpu", "")
    said = next((text for text in gpu.errors.values() if _is_lost(text)), "")
    fallen = next(
        (event for event in events if event.xid == 79 and _same_gpu(event.pci_bus_id, gpu.pci_bus_id)), None
    )
    if said or (fallen and (whole or gpu.used_mib is None)):
        return Verdict(
            LOST,
            "Cold boot the host (power off, wait, power on): a warm reboot often does not bring back a "
            "GPU that has fallen off the bus; if it is lost again, reseat or replace it.",
            [],
            "NVML says %s%s"
            % (said or whole or "nothing", ", after Xid 79 in the kernel log" if fallen else ""),
        )
    if whole:
        return Verdict(UNKNOWN, _cure(gpu, whole), [], "the GPU can't be read: %s" % whole)
    if gpu.mig:
        return Verdict(
            UNKNOWN,
            "Switch MIG off (`nvidia-smi -i %s -mig 0`) or leave this GPU out of gpus: its instances "
            "can't be judged as one GPU." % (gpu.uuid or gpu.index),
            [],
            "MIG is on",
        )
    if gpu.used_mib is None:
        words = gpu.errors.get("memory", "no reason given")
        if "not supported" in words.lower():
            return Verdict(
                UNKNOWN,
                "Judge this host by its processes and `free -m`: the GPU shares the system's memory "
                "and has none of its own to read.",
                [],
                "memory: %s (unified memory)" % words,
            )
        return Verdict(UNKNOWN, _cure(gpu, words), [], "memory can't be read: %s" % words)
    if gpu.processes is None:
        words = gpu.errors.get("processes", "no reason given")
        return Verdict(
            UNKNOWN,
            _cure(gpu, words),
            [],
            "%d MiB used, and the list of processes can't be read: %s" % (gpu.used_mib, words),
        )
    return None


def _cure(gpu: Gpu, words: str) -> str:
    low = words.lower()
    if "permission" in low:
        return "Run again as root (become: true), or give the guest this GPU's device nodes."
    if "requires reset" in low or "reset required" in low:
        return "The driver asks for a reset of this GPU: %s." % _gpu_reset(gpu)
    if "mismatch" in low:
        return "Reboot, or unload and load the nvidia modules: the loaded driver and its libraries differ in version."
    if "not answer" in low or "not read" in low:
        return (
            "Look in `dmesg` for Xid lines and reboot if `nvidia-smi` hangs too: the driver does not answer."
        )
    if "not supported" in low:
        return "Ask `nvidia-smi -q -i %s` by hand: this driver does not offer that reading." % (
            gpu.uuid or gpu.index
        )
    return "Look in `dmesg` for NVRM lines, then reboot if `nvidia-smi -i %s` fails too." % (
        gpu.uuid or gpu.index
    )


def _is_lost(words: str) -> bool:
    low = words.lower()
    return "is lost" in low or "fallen off the bus" in low


def _same_gpu(one: str, other: str) -> bool:
    """Xid lines name a GPU without its function: 0000:3b:00."""
    return (
        bool(one)
        and bool(other)
        and (
            normal_pci(one if "." in one else one + ".0").rpartition(".")[0]
            == normal_pci(other).rpartition(".")[0]
        )
    )


def _pids(pids: Iterable[int]) -> str:
    listed = list(pids)
    return ("process " if len(listed) == 1 else "processes ") + ", ".join(map(str, listed))


def _named(pids: Iterable[int], processes: tuple[GpuProcess, ...], sight: Sight) -> str:
    used = {process.pid: process.used_mib for process in processes}
    return ", ".join(
        "%s (pid %d%s)"
        % (
            sight.names.get(pid) or "process",
            pid,
            "" if used.get(pid) is None else ", %d MiB" % (used[pid] or 0),
        )
        for pid in pids
    )
