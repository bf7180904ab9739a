"""The common case, step by step: TP 8 started by hand with nohup over ssh as root, its ssh session open or closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    EAGLE3,
    Session,
    assert_clean,
    leave_orphans,
    living,
    numbers,
    pids,
    reset,
    server_command,
    signals,
    until,
)
from tests.lab.server import Server

LOG = "/root/sglang.log"


@contextmanager
def started_by_hand(host: Host, ssh: str, **settings: object) -> Iterator[Server]:
    """`nohup python -m sglang.launch_server ... &` typed by root; ``ssh`` is what became of the session."""
    session = Session(host)
    main = session.type(f"nohup {server_command(*EAGLE3, settings=settings)} > {LOG} 2>&1 &", "-m sglang.launch_server")
    if ssh == "closed":
        session.close()
        until(lambda: not host.alive(session.shell), "the session to end")
    try:
        yield Server(host, main, 30000, LOG)
        if ssh == "open":
            assert session.open and host.alive(session.shell)
    finally:
        session.close()


either = pytest.mark.parametrize("ssh", ["open", "closed"])


@either
def test_a_serving_main_ends_in_order(gpu_host: Host, ssh: str) -> None:
    with started_by_hand(gpu_host, ssh) as server:
        tree = numbers(server.wait_until_ready().tree())
        record = reset(gpu_host, grace=30.0)
        assert pids(record) == tree
        assert signals(record)[server.pid] == "TERM"
        assert record["seconds"]["total"] < 20
        assert_clean(gpu_host, record)


@either
def test_a_deaf_main_ends_after_the_grace(gpu_host: Host, ssh: str) -> None:
    with started_by_hand(gpu_host, ssh, IGNORE_TERM=1) as server:
        tree = numbers(server.wait_until_ready().tree())
        for process in server.tree():
            if "scheduler" in process.line:
                gpu_host.kill(process.pid, signal.SIGSTOP)
        record = reset(gpu_host, grace=1.0)
        assert pids(record) == tree
        assert signals(record)[server.pid] == "KILL"
        assert 1.0 <= record["seconds"]["total"] < 1.0 + 8
        assert_clean(gpu_host, record)


@either
def test_titled_workers_of_a_dead_main_end_at_once(gpu_host: Host, ssh: str) -> None:
    with started_by_hand(gpu_host, ssh, OUTLIVE_MAIN=1) as server:
        orphans = leave_orphans(server.wait_until_ready())
        record = reset(gpu_host, grace=30.0)
        assert living(gpu_host, orphans) == set() and len(record["killed"]) >= 9
        assert record["seconds"]["total"] < 8
        assert_clean(gpu_host, record)


@either
def test_the_children_of_a_main_that_died_during_import_end_at_once(gpu_host: Host, ssh: str) -> None:
    with started_by_hand(gpu_host, ssh, IMPORT_SECONDS=3600) as server:
        orphans = leave_orphans(server, early=True)
        assert len(orphans) == 10
        record = reset(gpu_host, grace=30.0)
        assert pids(record) == orphans
        assert record["seconds"]["total"] < 8
        assert_clean(gpu_host, record)
