"""Whether a later rank's first one is gone, seen on real connections and on those that no test can break for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host import later_rank
from gpu_host.procfs import Proc

from tests.unit.fake_proc import FakeProc
from tests.unit.real_processes import wait_for


@pytest.fixture
def meeting_place() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def argv(port: int, rank: int = 1) -> list[str]:
    return ["python3", "-m", "sglang.launch_server", "--node-rank", str(rank), f"--dist-init-addr=head:{port}"]


def test_the_first_rank_is_gone_once_it_has_closed_every_connection(meeting_place: socket.socket) -> None:
    port, here = meeting_place.getsockname()[1], [os.getpid()]
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        sides = [meeting_place.accept()[0] for _ in range(2)]
        assert not later_rank.head_is_gone(Proc(), argv(port), here)
        sides[0].close()
        assert not later_rank.head_is_gone(Proc(), argv(port), here)
        sides[1].close()
        wait_for(lambda: later_rank.head_is_gone(Proc(), argv(port), here))
        assert not later_rank.head_is_gone(Proc(), argv(port, rank=0), here)
        assert not later_rank.head_is_gone(Proc(), argv(port + 1), here)
        assert not later_rank.head_is_gone(Proc(), argv(port)[:-1], here)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
            assert not later_rank.head_is_gone(Proc(), argv(port), [stranger.pid])
            stranger.communicate(b"\n")


ROW = "   0: 0100007F:A1B2 0200000A:4E20 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0"


@pytest.mark.parametrize(
    ("table", "rows", "gone"),
    [
        ("tcp", [("08", 7)], True),
        ("tcp6", [("08", 7)], True),
        ("tcp", [("01", 7)], False),  # also what a first host leaves that lost its power
        ("tcp", [("08", 7), ("01", 8)], False),
        ("tcp", [("08", 7), ("01", 99)], True),  # another process' connection
        ("tcp", [], False),
    ],
)
def test_what_is_not_seen_does_not_count(tmp_path: Path, table: str, rows: list[tuple[str, int]], gone: bool) -> None:
    FakeProc(tmp_path).add(50, argv=argv(20000), files=["socket:[7]", "/dev/null", "socket:[8]"])
    (tmp_path / "50/net").mkdir()
    lines = ["  sl  local_address rem_address   st", *(ROW.format(state=state, inode=inode) for state, inode in rows)]
    (tmp_path / "50/net" / table).write_text("\n".join(lines) + "\n")
    assert later_rank.head_is_gone(Proc(str(tmp_path)), argv(20000), [50]) is gone
