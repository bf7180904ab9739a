"""What the driver says about each GPU, whichever way it was asked.

Memory is in MiB (NVML v2: the driver's reserved memory is not counted as used), power in watts. A value
that could not be read is None, and `errors` says why in the driver's words; None is never zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deadline import Deadline


@dataclass(frozen=True)
class GpuProcess:
    """A process that the driver lists on a GPU; `used_mib` is None where the driver does not tell."""

    pid: int
    used_mib: int | None
    kind: str  # 'compute' | 'graphics'


@dataclass(frozen=True)
class Gpu:
    """One GPU as read. `index` is NVML's, `minor` the number in /dev/nvidia<minor>: they may differ."""

    index: int
    uuid: str
    minor: int | None
    name: str
    pci_bus_id: str
    compute_capability: str | None  # '12.0'
    total_mib: int | None
    used_mib: int | None
    free_mib: int | None
    reserved_mib: int | None
    utilization_percent: int | None
    power_watts: float | None
    mig: bool | None
    processes: tuple[GpuProcess, ...] | None  # None: could not be read
    errors: dict[str, str] = field(default_factory=dict)  # field or 'gpu' -> the driver's words


@dataclass(frozen=True)
class Readings:
    """All GPUs of the host at one moment; `error` says why nothing could be read."""

    source: str  # 'nvml' | 'nvidia-smi' | 'none'
    driver_version: str | None
    nvml_version: str | None
    gpus: tuple[Gpu, ...]
    error: str | None


_PCI = re.compile(r"^(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2}\.[0-7])$")


class UnknownGpu(ValueError):
    """A GPU was asked for that the host does not have; the text says what is there."""


def to_json(readings: Readings) -> dict[str, Any]:
    """Plain lists and dictionaries, as from_json takes them."""
    return asdict(readings)


def from_json(data: Mapping[str, Any]) -> Readings:
    """The inverse of to_json, also after a trip through JSON text."""
    gpus = []
    for item in data["gpus"]:
        values = dict(item)
        processes = values.pop("processes")
        gpus.append(
            Gpu(
                processes=None if processes is None else tuple(GpuProcess(**one) for one in processes),
                **values,
            )
        )
    return Readings(
        source=data["source"],
        driver_version=data["driver_version"],
        nvml_version=data["nvml_version"],
        gpus=tuple(gpus),
        error=data["error"],
    )


def normal_pci(text: str) -> str:
    """A PCI id in one spelling: '00000000:3B:00.0' (NVML's) and '0000:3b:00.0' (Linux's) become equal."""
    low = text.strip().lower()
    found = _PCI.match(low)
    if not found:
        return low
    return f"{int(found.group(1) or '0', 16):04x}:{int(found.group(2), 16):02x}:{found.group(3)}"


def select(readings: Readings, wanted: Iterable[object]) -> list[Gpu]:
    """The GPUs named by index, UUID or PCI id, in NVML's order; all of them when nothing is named.

    Raises UnknownGpu with one sentence that lists what is there.
    """
    names = [str(one).strip() for one in wanted]
    if not names:
        return list(readings.gpus)
    chosen: set[int] = set()
    for name in names:
        found = [gpu.index for gpu in readings.gpus if _is(gpu, name)]
        if not found:
            raise UnknownGpu(
                "GPU %s is not on this host; it has %s: name them by index, UUID or PCI id."
                % (name, _listing(readings))
            )
        chosen.update(found)
    return [gpu for gpu in readings.gpus if gpu.index in chosen]


def _is(gpu: Gpu, name: str) -> bool:
    if name.isdigit():
        return gpu.index == int(name)
    if name.lower().startswith("gpu-"):
        return gpu.uuid.lower() == name.lower()
    return bool(gpu.pci_bus_id) and normal_pci(gpu.pci_bus_id) == normal_pci(name)


def _listing(readings: Readings) -> str:
    if not readings.gpus:
        return "no GPU that can be read (%s)" % readings.error if readings.error else "no GPU"
    return ", ".join(
        "%d (%s, %s)" % (gpu.index, gpu.uuid or "UUID unreadable", gpu.pci_bus_id or "PCI id unreadable")
        for gpu in readings.gpus
    )


def is_lost(words: str) -> bool:
    """Whether NVML's words mean that the GPU is no longer on the bus."""
    low = words.lower()
    return "is lost" in low or "fallen off the bus" in low


def whole_gpu(errors: Mapping[str, str]) -> dict[str, str]:
    """The errors, with what concerns the whole GPU under 'gpu' as well: a lost GPU says so in any field."""
    lost = next((words for words in errors.values() if is_lost(words)), "")
    return {**({"gpu": lost} if lost else {}), **errors}


# NVML's words in lower case, and what they mean and ask for.
_TROUBLE = (
    (
        "driver not loaded",
        "The NVIDIA driver is not loaded on this host: type `modprobe nvidia`, or install the driver",
    ),
    (
        "couldn't communicate with the nvidia driver",
        "The NVIDIA driver does not run on this host: type `modprobe nvidia`, or install the driver for this kernel",
    ),
    (
        "version mismatch",
        "The loaded NVIDIA driver and its libraries differ in version: reboot, or unload and load the nvidia modules",
    ),
    (
        "shared library not found",
        "There is no NVIDIA driver on this host (libnvidia-ml.so.1 is missing): install it, or,"
        " in a container, pass it in",
    ),
    (
        "couldn't find libnvidia-ml",
        "There is no NVIDIA driver on this host (libnvidia-ml.so is missing): install it, or,"
        " in a container, pass it in",
    ),
    ("permission", "This user may not open the GPUs: run as root (become: true), or give the guest the device nodes"),
    ("no devices were found", "The NVIDIA driver runs but finds no GPU: look in `dmesg` for NVRM lines and in `lspci`"),
    (
        "unknown error",
        "The NVIDIA driver fails without a reason: look in `dmesg` for NVRM lines; in a container the"
        " device nodes may have been taken away (restart it)",
    ),
)


def driver_trouble(words: str) -> str:
    """One sentence on why no GPU can be read and what to do, with the driver's own words in brackets."""
    said = " ".join(words.split()).rstrip(".")
    for known, sentence in _TROUBLE:
        if known in said.lower():
            return f"{sentence} ({said})."
    return f"The GPUs can't be read: look in `dmesg` for NVRM lines ({said or 'no reason given'})."


def read(deadline: Deadline) -> Readings:
    """One look at all GPUs: through nvidia-ml-py where it can be imported, else through nvidia-smi.

    Never raises for what driver or tools do, never outlives the deadline. A caller that looks more than
    once should keep an nvml.Reader, which pays NVML's start (about 100 ms) once.
    """
    from .nvml import Reader  # here, since nvml.py builds on this file

    reader = Reader()
    try:
        return reader.read(deadline)
    finally:
        reader.close()
