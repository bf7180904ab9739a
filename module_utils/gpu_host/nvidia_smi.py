"""`nvidia-smi -q -x` read into the same shape as NVML gives, for hosts without nvidia-ml-py.

Its memory figures follow version 2 of NVML's reading since driver 510 (they have a `reserved` line then). It lists
the GPUs in NVML's order but leaves out one that is lost, so the index is asked for by UUID.
"""

from __future__ import annotations

import os
import re
import shutil
import xml.etree.ElementTree as xml

from .child import Completed, run_command
from .deadline import Deadline
from .readings import Gpu, GpuProcess, Readings, driver_trouble, normal_pci, whole_gpu

_PLACES = ("/usr/bin", "/usr/local/bin", "/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/opt/bin")
_QUERY = ("--query-gpu=index,uuid,compute_cap", "--format=csv,noheader")
# "GPU 0000:4C:00.0: GPU is lost.  Reboot ..", "GPU0: 0000:4C:00.0: Unknown Error", "GPU1: Unknown Error"
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU\s*(?:(?P<index>\d{1,3}):\s*)?"
    r"(?:(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]):\s*)?(?P<why>[^\r\n]+)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)")
_NOT_SUPPORTED = ("n/a", "not supported", "requested functionality has been deprecated", "none", "")


class Reader:
    """Reads all GPUs by running nvidia-smi; what never changes (index, compute capability) is asked for once."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._fixed: dict[str, tuple[int, str | None]] | None = None

    def read(self, deadline: Deadline) -> Readings:
        """One look at every GPU. Never raises for what the tool does, never outlives the deadline."""
        path = self._path or _find()
        if path is None:
            return _nothing(
                "Neither nvidia-ml-py nor nvidia-smi is on this host: install the NVIDIA driver, or put nvidia-smi on"
                " the PATH."
            )
        done = run_command([path, "-q", "-x"], deadline)
        if self._fixed is None or not set(re.findall(r"<uuid>\s*(\S+?)\s*</uuid>", done.stdout)) <= set(self._fixed):
            self._fixed = parse_fixed(run_command([path, *_QUERY], deadline).stdout)
        return parse(done, self._fixed)


def parse_fixed(text: str) -> dict[str, tuple[int, str | None]]:
    """Index and compute capability by UUID, from the csv; older drivers do not know compute_cap and give {}."""
    found = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit():
            capability = parts[2] if re.match(r"^\d+\.\d+$", parts[2]) else None
            found[parts[1]] = (int(parts[0]), capability)
    return found


def parse(done: Completed, fixed: dict[str, tuple[int, str | None]]) -> Readings:
    """The readings in what `nvidia-smi -q -x` printed, partial where a GPU or a field fails."""
    if done.trouble:
        return _nothing(
            f"nvidia-smi gave no answer: {done.trouble}; look in `dmesg` for Xid lines and reboot if it"
            " hangs by hand too."
        )
    lost = [found.groupdict() for found in _NO_HANDLE.finditer(done.stdout + "\n" + done.stderr)]
    start, end = done.stdout.find("<nvidia_smi_log"), done.stdout.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        if lost:
            return Readings("nvidia-smi", None, None, tuple(_in_order([], lost, fixed)), None)
        words = done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}"
        return _nothing(driver_trouble(words[:400]))
    try:
        log = xml.fromstring(done.stdout[start : end + len("</nvidia_smi_log>")])
    except xml.ParseError as error:
        return _nothing(f"nvidia-smi -q -x printed what is no XML ({error}): run it by hand to see.")
    gpus = _in_order(log.findall("gpu"), lost, fixed)
    if not gpus:
        return _nothing(driver_trouble("No devices were found"))
    return Readings("nvidia-smi", _text(log, "driver_version")[0], None, tuple(gpus), None)


def _find() -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=os.pathsep.join(_PLACES))


def _nothing(why: str) -> Readings:
    return Readings("none", None, None, (), why)


def _in_order(
    nodes: list[xml.Element], lost: list[dict[str, str | None]], fixed: dict[str, tuple[int, str | None]]
) -> list[Gpu]:
    """All GPUs under NVML's index: as the csv says, else by PCI id, which is the order that NVML numbers by."""
    drafts: list[tuple[int | None, str, xml.Element | str]] = []
    for node in nodes:
        uuid = _text(node, "uuid")[0] or ""
        index = fixed[uuid][0] if uuid in fixed else None
        drafts.append((index, node.get("id") or _text(node, "pci/pci_bus_id")[0] or "", node))
    for one in lost:
        index = int(one["index"]) if one["index"] else None
        drafts.append((index, one["pci"] or "", (one["why"] or "").strip()))
    taken = {index for index, _, _ in drafts if index is not None}
    spare = (number for number in range(len(drafts) + len(taken)) if number not in taken)
    gpus = []
    for index, pci, draft in sorted(drafts, key=lambda draft: normal_pci(draft[1])):
        number = next(spare) if index is None else index
        gpus.append(_absent(number, pci, draft) if isinstance(draft, str) else _gpu(number, pci, draft, fixed))
    return sorted(gpus, key=lambda gpu: gpu.index)


def _absent(index: int, pci: str, why: str) -> Gpu:
    return Gpu(index, "", None, "", pci, None, None, None, None, None, None, None, None, None, {"gpu": why})


def _gpu(index: int, pci: str, node: xml.Element, fixed: dict[str, tuple[int, str | None]]) -> Gpu:
    errors: dict[str, str] = {}
    uuid = _wanted(node, errors, "uuid", "uuid") or ""
    memory = {name: _mib(node, errors, name) for name in ("total", "used", "free")}
    reserved = _text(node, "fb_memory_usage/reserved")
    if reserved == (None, "") and memory["used"] is not None:
        errors["reserved_mib"] = "this nvidia-smi prints no reserved memory: used_mib counts the driver's reserve"
    return Gpu(
        index=index,
        uuid=uuid,
        minor=_whole(_wanted(node, errors, "minor", "minor_number")),
        name=_wanted(node, errors, "name", "product_name") or "",
        pci_bus_id=pci,
        compute_capability=fixed.get(uuid, (0, None))[1],
        total_mib=memory["total"],
        used_mib=memory["used"],
        free_mib=memory["free"],
        reserved_mib=_whole(reserved[0]),
        utilization_percent=_whole(_wanted(node, errors, "utilization_percent", "utilization/gpu_util")),
        power_watts=_power(node, errors),
        mig=_mig(node, errors),
        processes=_processes(node, errors),
        errors=whole_gpu(errors),
    )


def _text(node: xml.Element, path: str) -> tuple[str | None, str]:
    """The value of an element, or None and why it has none; (None, '') where the element is not printed."""
    text = node.findtext(path)
    if text is None:
        return None, ""
    text = text.strip()
    bare = text.strip("[]").strip()
    if bare.lower() in _NOT_SUPPORTED:
        return None, "Not Supported"
    if bare.lower().startswith(("insufficient perm", "gpu is lost", "unknown error", "err!", "gpu requires reset")):
        return None, bare
    return text, ""


def _wanted(node: xml.Element, errors: dict[str, str], field: str, path: str) -> str | None:
    value, why = _text(node, path)
    if value is None:
        errors[field] = why or f"nvidia-smi prints no {path}"
    return value


def _whole(text: str | None) -> int | None:
    found = _NUMBER.match(text or "")
    return int(float(found.group(1))) if found else None


def _mib(node: xml.Element, errors: dict[str, str], name: str) -> int | None:
    return _whole(_wanted(node, errors, "memory", f"fb_memory_usage/{name}"))


def _power(node: xml.Element, errors: dict[str, str]) -> float | None:
    why = ""
    for path in (
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
    ):
        value, reason = _text(node, path)
        found = _NUMBER.match(value or "")
        if found:
            return float(found.group(1))
        why = why or reason
    errors["power_watts"] = why or "nvidia-smi prints no power draw"
    return None


def _mig(node: xml.Element, errors: dict[str, str]) -> bool | None:
    value, why = _text(node, "mig_mode/current_mig")
    if value is not None:
        return value == "Enabled"
    if why in ("", "Not Supported"):
        return False  # a card, or a driver, without MIG
    errors["mig"] = why
    return None


def _processes(node: xml.Element, errors: dict[str, str]) -> tuple[GpuProcess, ...] | None:
    """The processes, () where the list is printed empty, None where it could not be read."""
    block = node.find("processes")
    if block is None:
        errors["processes"] = "nvidia-smi prints no list of processes"
        return None
    text = (block.text or "").strip().strip("[]")
    if len(block) == 0 and text and text != "None":
        errors["processes"] = "Not Supported" if text == "N/A" else text
        return None
    found: dict[int, GpuProcess] = {}
    for info in block.findall("process_info"):
        pid = _whole(info.findtext("pid"))
        if pid is None:
            continue
        kind = "compute" if "C" in (info.findtext("type") or "C") else "graphics"
        found[pid] = GpuProcess(pid, _whole(_text(info, "used_memory")[0]), kind)
    return tuple(found[pid] for pid in sorted(found))
