"""What stands between the GPUs of a host on the PCI bus: the bridges above each, their ACS bits, IOMMU groups.

Read from sysfs. The access-control bits lie in the extended configuration space, which only root may read; where it
can't be read, they are unknown, not off.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .readings import normal_pci

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_EXTENDED = 0x100
_ACS_CAPABILITY = 0x000D
# Bits of the ACS control register (PCIe base specification 7.7.8.3). The first two send traffic between devices below
# the same bridge up to the root, where it is slow or lost.
ACS_BITS = {
    "RequestRedirect": 0x04,
    "CompletionRedirect": 0x08,
    "SourceValidation": 0x01,
    "TranslationBlocking": 0x02,
    "UpstreamForwarding": 0x10,
    "EgressControl": 0x20,
    "DirectTranslated": 0x40,
}
REDIRECTING = ("RequestRedirect", "CompletionRedirect")


@dataclass(frozen=True)
class Bridge:
    """`acs` are the bits that are set; None where they can't be read. A bridge without ACS has none set."""

    address: str
    acs: tuple[str, ...] | None


@dataclass(frozen=True)
class Place:
    """Where a device stands. `iommu_type` is the kernel's word: 'identity' passes through, 'DMA' and 'DMA-FQ'
    translate; '' without an IOMMU or on kernels that don't tell."""

    address: str
    bridges: tuple[Bridge, ...]
    numa_node: int | None
    iommu_group: str
    iommu_type: str


def place(pci_bus_id: str, sys_root: str = "/sys") -> Place | None:
    """The device's place; None when sysfs doesn't show it (a container, a simulated host)."""
    address = normal_pci(pci_bus_id)
    link = f"{sys_root}/bus/pci/devices/{address}"
    real = os.path.realpath(link)
    if not os.path.isdir(real):
        return None
    above = [part for part in real.split("/")[:-1] if _ADDRESS.match(part)]
    group = os.path.realpath(f"{real}/iommu_group") if os.path.exists(f"{real}/iommu_group") else ""
    return Place(
        address=address,
        bridges=tuple(Bridge(part, acs_bits(_config(f"{sys_root}/bus/pci/devices/{part}/config"))) for part in above),
        numa_node=_number(_line(f"{real}/numa_node")),
        iommu_group=os.path.basename(group),
        iommu_type=_line(f"{group}/type") if group else "",
    )


def acs_bits(config: bytes) -> tuple[str, ...] | None:
    """The ACS bits that are set in a configuration space; None when its extended part was not read.

    >>> acs_bits(bytes(64)) is None
    True
    """
    if len(config) <= _EXTENDED:
        return None
    offset, seen = _EXTENDED, 0
    while _EXTENDED <= offset <= len(config) - 8 and seen < 64:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None if header else ()
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[offset + 6 : offset + 8], "little")
            return tuple(name for name, bit in ACS_BITS.items() if control & bit)
        offset, seen = header >> 20, seen + 1
    return ()


def iommu_groups(sys_root: str = "/sys") -> int:
    """How many IOMMU groups the kernel has; 0 when it runs without an IOMMU."""
    try:
        return len(os.listdir(f"{sys_root}/kernel/iommu_groups"))
    except OSError:
        return 0


def _config(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
