"""The state folder of a simulated GPU host: its GPUs, who holds their memory, which faults they show.

The NVML double (``simulator/nvml/nvml.c``) answers from this folder; tests and the stand-in server edit it
through `GpuState`. Everything in it is text:

    gpus.tsv                index, minor, uuid, pci_bus_id, name, total_mib, reserved_mib, compute_capability
    driver                  driver version, then NVML version, one a line
    memory/<index>/<name>   one allocation: MiB, then optionally the word ``graphics``
    memory/<index>/<name>.gone   since when (its mtime) the allocation has had no owner
    faults/<fault>          a fault of the host, see `HOST_FAULTS`
    faults/<index>/<fault>  a fault of one GPU, see `GPU_FAULTS`

An allocation belongs to the process that holds a POSIX record lock on its file. The kernel drops that lock
when the process is gone (a zombie holds none) and tells any reader the owner's pid in the reader's own PID
namespace. The memory returns `RELEASE_MS` after the first look that finds no owner, or after
`Allocation.close`.

A process loses its record locks on a file when it closes *any* descriptor of that file. So the owner itself
never opens its allocations a second time: their names begin with the owner's pid, and both readers (here and
in C) then use the descriptor that is open already.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RELEASE_MS = 150
"""Milliseconds from an owner's death to the return of its memory; measured: 140 (1 GiB) to 220 (100 GiB)."""

HOST_FAULTS = {
    "no_driver": "nvmlInit fails with DRIVER_NOT_LOADED",
    "version_mismatch": "nvmlInit fails with LIB_RM_VERSION_MISMATCH",
    "hang": "one NVML function name a line (no _v suffix): that call blocks while the fault stands",
}
GPU_FAULTS = {
    "lost": "every call on the GPU gives GPU_IS_LOST; with the text 'late', its handle can still be had",
    "no_permission": "empty: no handle (NO_PERMISSION); else one field a line that may not be read",
    "not_supported": "one field a line that gives NOT_SUPPORTED",
    "error": "one 'field code' a line: that NVML code for that field",
    "hang": "as the host's, for this GPU alone",
    "unowned": "MiB that are used and belong to nobody",
    "foreign_pid": "one 'pid MiB' a line: listed and counted, a process of another PID namespace",
    "dead_pid": "one 'pid MiB' a line: listed and counted, a process that is gone",
    "ghost_latch": "utilization reads 100 whatever runs",
    "utilization": "percent that utilization reads",
    "release_ms": f"milliseconds until a dead owner's memory returns, instead of {RELEASE_MS}",
    "never_release": "a dead owner's memory never returns",
    "mig": "MIG mode is on",
}
"""A *field* is an NVML function without ``nvmlDeviceGet`` and ``_v<N>``, or its beginning, in any case:
``power``, ``utilization``, ``memory``; ``processes`` stands for all process lists."""

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


@dataclass(frozen=True)
class SimulatedGpu:
    """One line of gpus.tsv. Sizes in MiB."""

    index: int
    minor: int
    uuid: str
    pci_bus_id: str
    name: str
    total_mib: int
    reserved_mib: int
    compute_capability: str


class Allocation:
    """Memory of one GPU held by this process until `close` or until the process is gone.

    A forked child does not own it; closing it there does nothing.
    """

    def __init__(self, path: Path, index: int, mib: int, kind: str = "compute") -> None:
        self.path = path
        self.index = index
        self.mib = mib
        self._kind = kind
        self._owner = os.getpid()
        # Locked before it gets its name: a reader never meets an allocation that has no owner yet.
        hidden = path.with_name("." + path.name)
        self._descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.fchmod(self._descriptor, 0o644)
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write()
        os.rename(hidden, path)

    def _write(self) -> None:
        os.pwrite(self._descriptor, f"{self.mib:>12} {self._kind:<8}\n".encode(), 0)

    def resize(self, mib: int) -> None:
        """Grow or shrink to so many MiB."""
        if self._descriptor < 0:
            raise ValueError(f"the allocation {self.path} is closed already")
        self.mib = mib
        self._write()

    def close(self) -> None:
        """Give the memory back: it returns after the release delay, as after a process's death."""
        if self._descriptor < 0 or os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self.path.with_name(self.path.name + ".gone").touch()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuState:
    """The state folder: made by `create`, edited and read by the rest."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def create(
        self,
        gpus: int = 8,
        minors: Sequence[int] | None = None,
        *,
        name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        total_mib: int = 97887,
        reserved_mib: int = 638,
        compute_capability: str = "12.0",
        driver_version: str = "580.95.05-simulated",
        nvml_version: str = "13.580.95.05",
    ) -> GpuState:
        """Write a host of so many idle GPUs; folders that others must write to are open to every user.

        Minor numbers stand in another order than indices unless given: real hosts do that, and code that
        takes an index for a minor number should fail here first.
        """
        chosen = list(minors) if minors is not None else _shuffled_minors(gpus)
        if len(chosen) != gpus or len(set(chosen)) != gpus:
            raise ValueError(f"{gpus} GPUs need {gpus} different minor numbers, got {chosen}")
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for index, minor in enumerate(chosen):
            identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.folder.resolve()}#{index}")
            bus = f"00000000:{0x01 + 0x20 * (index % 8) + index // 8:02X}:00.0"
            lines.append(
                f"{index}\t{minor}\tGPU-{identity}\t{bus}\t{name}\t{total_mib}\t{reserved_mib}\t{compute_capability}\n"
            )
            memory = self.folder / "memory" / str(index)
            memory.mkdir(parents=True, exist_ok=True)
            memory.chmod(0o1777)
        (self.folder / "faults").mkdir(exist_ok=True)
        _replace(self.folder / "driver", f"{driver_version}\n{nvml_version}\n")
        _replace(self.folder / "gpus.tsv", "".join(lines))
        return self

    def gpus(self) -> list[SimulatedGpu]:
        """The GPUs of this host, in the order of their indices."""
        found = []
        for line in (self.folder / "gpus.tsv").read_text().splitlines():
            index, minor, identity, bus, name, total, reserved, capability = line.split("\t")
            found.append(
                SimulatedGpu(int(index), int(minor), identity, bus, name, int(total), int(reserved), capability)
            )
        return found

    # Memory

    def allocate(self, index: int, mib: int, kind: str = "compute") -> Allocation:
        """Take so many MiB of a GPU for this process. `kind` is 'compute' or 'graphics'.

        Nothing is refused: ask `free_mib` first where a full GPU matters.
        """
        folder = self.folder / "memory" / str(index)
        return Allocation(folder / f"{os.getpid()}-{secrets.token_hex(6)}", index, mib, kind)

    def owners(self, index: int) -> dict[int, int]:
        """MiB by owning pid, living owners only; pid 0: owners of a PID namespace not visible here."""
        found: dict[int, int] = {}
        for path in self._allocations(index):
            pid, mib = _owner_and_size(path)
            if pid is not None:
                found[pid] = found.get(pid, 0) + mib
        return found

    def used_mib(self, index: int) -> int:
        """What NVML's v2 memory query calls used, in MiB: owned, not yet returned, and unowned by a fault.

        A look like any other: it starts the release of memory whose owner is found dead.
        """
        forever = self._fault("never_release", index) is not None
        release = float(self._fault("release_ms", index) or RELEASE_MS) / 1000
        total = 0
        for path in self._allocations(index):
            pid, mib = _owner_and_size(path)
            if pid is None and not forever and _seconds_without_owner(path) >= release:
                continue
            total += mib
        for fault in ("unowned", "foreign_pid", "dead_pid"):
            lines = (self._fault(fault, index) or "").splitlines()
            total += sum(int(line.split()[-1]) for line in lines if line)
        return total

    def free_mib(self, index: int) -> int:
        """What is left of a GPU for an allocation, in MiB."""
        gpu = self.gpus()[index]
        return max(gpu.total_mib - gpu.reserved_mib - self.used_mib(index), 0)

    def _allocations(self, index: int) -> list[Path]:
        folder = self.folder / "memory" / str(index)
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.suffix != ".gone")

    # Faults

    def set_fault(self, fault: str, value: str | int | Iterable[str] = "", *, index: int | None = None) -> None:
        """Let the host (no index) or one GPU show a fault; several lines are given as a list."""
        path = self._fault_path(fault, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = str(value) if isinstance(value, (str, int)) else "\n".join(value)
        _replace(path, text + "\n" if text else "")

    def clear_fault(self, fault: str | None = None, *, index: int | None = None) -> None:
        """End a fault; without a name, all faults of the host or of that GPU."""
        if fault is not None:
            self._fault_path(fault, index).unlink(missing_ok=True)
            return
        for known in HOST_FAULTS if index is None else GPU_FAULTS:
            self._fault_path(known, index).unlink(missing_ok=True)

    def _fault(self, fault: str, index: int | None = None) -> str | None:
        try:
            return self._fault_path(fault, index).read_text()
        except FileNotFoundError:
            return None

    def _fault_path(self, fault: str, index: int | None) -> Path:
        known = HOST_FAULTS if index is None else GPU_FAULTS
        if fault not in known:
            raise ValueError(f"no such fault {fault!r}; there are: {', '.join(known)}")
        base = self.folder / "faults"
        return base / fault if index is None else base / str(index) / fault


def _shuffled_minors(gpus: int) -> list[int]:
    """0..gpus-1, turned round within each group of four: [3, 2, 1, 0, 7, 6, 5, 4]."""
    groups = [range(start, min(start + 4, gpus)) for start in range(0, gpus, 4)]
    return [minor for group in groups for minor in reversed(group)]


def _replace(path: Path, text: str) -> None:
    """Write a file so that no reader sees half of it."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    hidden.write_text(text)
    hidden.replace(path)


def _owner_and_size(path: Path) -> tuple[int | None, int]:
    """Pid of the living owner (None: no owner, 0: not visible here) and MiB; (None, 0): no such file."""
    if path.name.startswith(f"{os.getpid()}-"):
        own = _own_descriptor(path)
        if own is not None:
            return os.getpid(), _size(own)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, 0
    try:
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
        return (None if kind == fcntl.F_UNLCK else pid), _size(descriptor)
    finally:
        os.close(descriptor)


def _seconds_without_owner(path: Path) -> float:
    """Since the first look that found no owner, which may be this one; infinite where it can't be noted."""
    mark = path.with_name(path.name + ".gone")
    try:
        return abs(time.time() - mark.stat().st_mtime)
    except FileNotFoundError:
        try:
            mark.touch(exist_ok=True)
        except OSError:
            return float("inf")
        if not path.exists():
            mark.unlink(missing_ok=True)  # another reader has just removed both
        return 0.0


def _own_descriptor(path: Path) -> int | None:
    """This process's open descriptor of that file."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return None
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(entry)), wanted):
                return int(entry)
    return None


def _size(descriptor: int) -> int:
    return int((os.pread(descriptor, 64, 0).split() or [b"0"])[0])
