"""On which addresses and ports given processes listen, in the network namespace that is theirs."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from .procfs import Proc

_LISTEN = "0A"  # TCP_LISTEN in net/tcp_states.h


@dataclass(frozen=True)
class Listener:
    """One listening socket. `address` is where to reach it from this host: a wildcard is shown as loopback."""

    address: str
    port: int
    inode: int


def listeners(proc: Proc, pid: int | str = "self") -> tuple[Listener, ...]:
    """Every listening TCP socket of the network namespace that process `pid` lives in."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc.root}/{pid}/net/{name}", encoding="ascii", errors="replace") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                found.append(Listener(_reachable(address), int(port, 16), int(fields[9])))
    return tuple(found)


def _reachable(text: str) -> str:
    """The kernel writes an address as 32 bit words in the machine's order (little endian on all GPU hosts)."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def of_processes(proc: Proc, pids: Iterable[int], open_sockets: Iterable[Listener]) -> tuple[Listener, ...]:
    """Those of the listening sockets that one of these processes has open."""
    links = {f"socket:[{one.inode}]": one for one in open_sockets}
    if not links:
        return ()
    names: set[str] = set()
    for pid in pids:
        names |= links.keys() & set(proc.open_files(pid) or ())
    return tuple(links[name] for name in sorted(names))
