"""The parts of a server over several hosts that stand behind its first one, and whether that one is still there.

A later rank answers no request and can't be asked; the first rank tells it to stop. But it holds a connection to the
place where the ranks met (--dist-init-addr), which the first rank keeps for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import server_http
from .procfs import Proc
from .storage import text_of

_CLOSE_WAIT = "08"  # TCP_CLOSE_WAIT in net/tcp_states.h: the other side has closed it


def is_later_rank(argv: Sequence[str]) -> bool:
    """Whether a server's main process has another host before it."""
    return server_http.option(argv, "--node-rank") not in ("", "0")


def head_is_gone(proc: Proc, argv: Sequence[str], pids: Iterable[int]) -> bool:
    """Whether the first rank of these processes' server has ended. Only what is seen counts.

    ``argv`` is their main's. They must have connections to the meeting place, and each of them must have been closed by
    the other side: a host that lost its power or its network closes none.
    """
    port = server_http.option(argv, "--dist-init-addr").rpartition(":")[2]
    if not is_later_rank(argv) or not port.isdigit():
        return False
    states = set()
    for pid in pids:
        own = {name[8:-1] for name in proc.open_files(pid) or () if name.startswith("socket:[")}
        states |= {state for inode, state in _connections_to(proc, pid, int(port)) if inode in own}
    return states == {_CLOSE_WAIT}


def _connections_to(proc: Proc, pid: int, port: int) -> list[tuple[str, str]]:
    """Inode and state of each TCP connection to that port, in the network namespace of a process."""
    found = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in text_of(f"{proc.root}/{pid}/net/{name}").splitlines()[1:]]
        found += [(row[9], row[3]) for row in rows if len(row) > 9 and int(row[2].rpartition(":")[2], 16) == port]
    return found
