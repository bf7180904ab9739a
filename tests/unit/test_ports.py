from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host.ports import port_holders
from gpu_host.procfs import Proc


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def test_the_process_that_listens_on_a_port_is_named(server: socket.socket) -> None:
    port = server.getsockname()[1]
    (entry,) = port_holders(Proc(), [port, 1])
    assert (entry["port"], entry["pid"]) == (port, os.getpid())
    assert entry["name"]


def test_a_port_of_an_ipv6_listener_is_seen() -> None:
    with socket.socket(socket.AF_INET6) as listening:
        try:
            listening.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listening.listen()
        assert port_holders(Proc(), [listening.getsockname()[1]])[0]["pid"] == os.getpid()


def test_a_closed_connection_that_waits_out_its_time_holds_no_port(server: socket.socket) -> None:
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    connection, _ = server.accept()
    connection.close()  # the side that closes first waits: ours, on the server's port
    client.close()
    server.close()
    assert f":{port:04X}" in Path("/proc/net/tcp").read_text(), "it is still in the table"
    assert port_holders(Proc(), [port]) == []


def test_a_process_that_still_serves_a_connection_holds_the_port(server: socket.socket) -> None:
    port = server.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        connection, _ = server.accept()
        server.close()
        with connection:
            assert [entry["pid"] for entry in port_holders(Proc(), [port])] == [os.getpid()]


def test_a_port_whose_process_cannot_be_seen_is_reported_without_pid(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "  0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100"
    (tmp_path / "net/tcp").write_text(f"header\n{row}\n")
    (entry,) = port_holders(Proc(str(tmp_path)), [30000])
    assert (entry["port"], entry["pid"]) == (30000, None)
    assert port_holders(Proc(str(tmp_path)), [30001]) == []
