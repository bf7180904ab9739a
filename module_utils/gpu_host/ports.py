"""Which process holds a TCP port of our network namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .procfs import Proc

TIME_WAIT = "06"  # tcp_states.h; holds no port against a server that binds with SO_REUSEADDR, as SGLang's does


def port_holders(proc: Proc, ports: Iterable[int]) -> list[dict[str, Any]]:
    """One entry for each port and process that holds it: port, pid, name; pid None when it can't be seen.

    A socket whose process can't be read (another user's, another namespace's) still holds its port.
    """
    wanted = set(ports)
    sockets: dict[str, int] = {}
    unowned: set[int] = set()
    for table in ("tcp", "tcp6"):
        for port, inode in _sockets(proc, table):
            if port in wanted and inode != "0":
                sockets[f"socket:[{inode}]"] = port
    found: set[tuple[int, int, str]] = set()
    if sockets:
        seen: set[str] = set()
        for pid, process in proc.snapshot().items():
            if process.kernel_thread or process.gone:
                continue
            for link in sockets.keys() & set(proc.open_files(pid) or ()):
                found.add((sockets[link], pid, process.name))
                seen.add(link)
        unowned = {sockets[link] for link in sockets.keys() - seen} - {port for port, _, _ in found}
    return [{"port": port, "pid": pid, "name": name} for port, pid, name in sorted(found)] + [
        {"port": port, "pid": None, "name": "a process that can't be seen from here"} for port in sorted(unowned)
    ]


def _sockets(proc: Proc, table: str) -> list[tuple[int, str]]:
    try:
        with open(f"{proc.root}/net/{table}") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] != TIME_WAIT:
            found.append((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found
