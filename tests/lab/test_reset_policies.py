"""Live traffic: what clients see of a reset under a policy, on hosts with a real systemd."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.lab.command import wait_for
from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.lab.resets import finish, reset, start_reset
from tests.lab.traffic import Traffic

RESTART = Path(__file__).parents[2] / "playbooks" / "restart.yml"
QUICK = {"TERM_POLL_SECONDS": 1, "RELEASE_SECONDS": 0.3}


def test_with_idle_only_nobody_who_sends_requests_to_a_busy_host_sees_a_failure(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=QUICK)
    with Traffic(gpu_host, f"http://127.0.0.1:{server.port}") as traffic:
        for _ in range(4):
            record = reset(gpu_host, policy="idle_only")
            assert record["verdict"] == "skipped", record
            assert record["reason"].startswith("policy idle_only: port-30000 is busy ("), record["reason"]
    assert traffic.failed() == [] and len(traffic.requests) >= 4
    # And when the requests have ended, the host is idle, and reset.
    assert reset(gpu_host, policy="idle_only", grace=20.0)["verdict"] == "clean"


def test_with_drain_every_request_that_was_accepted_before_finishes(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, how="unit", settings=QUICK)
    with Traffic(gpu_host, f"http://127.0.0.1:{server.port}", threads=4, tokens=300) as traffic:
        began = float(gpu_host.exec(["date", "+%s.%N"]).stdout)
        running = start_reset(gpu_host, grace=6.0)
        wait_for(lambda: not gpu_host.alive(server.pid), "the server's end", time.monotonic() + 60)
    record = finish(running, timeout=90)
    assert record["verdict"] == "clean", record
    before = [one for one in traffic.requests if one.sent < began]
    under_way = [one for one in before if one.ended > began]
    assert len(under_way) == 4 and not [one for one in traffic.failed() if one in before]
    # Without a router SGLang goes on accepting: the drain took its whole time, and only then was anybody cut.
    assert all(one.sent > began for one in traffic.failed())
    assert any("after 6 s of draining" in note for note in record["notes"]), record["notes"]


def test_with_a_router_no_client_sees_that_a_server_restarts(start_gpu_host: Callable[..., Host]) -> None:
    host = start_gpu_host()
    ports = (30000, 30001)
    for number, port in enumerate(ports):
        settings = {**QUICK, "LOAD_SECONDS": 1}
        host.start_server("--base-gpu-id", str(number), tp=1, port=port, name=f"server-{port}", settings=settings)
    host.write("/root/router.py", (REPOSITORY / "tests" / "router_double.py").read_text())
    workers = [f"http://127.0.0.1:{port}" for port in ports]
    host.start(f"python3 /root/router.py 8000 uuid {' '.join(workers)}")
    old = host.ansible("server_info", {})["servers"]
    with Traffic(host, "http://127.0.0.1:8000", threads=4) as traffic:
        variables = {
            "gpu_reset_gpus": ["0"],
            "gpu_reset_grace": 20,
            "gpu_reset_router_url": "http://127.0.0.1:8000",
            "gpu_reset_worker_url": "http://127.0.0.1:{port}",
        }
        done = host.playbook(str(RESTART), variables)
        assert done.returncode == 0, done.stdout + done.stderr
        listed = host.exec(["python3", "-c", LISTED]).stdout.split()
        at_the_end = len(traffic.so_far())
        wait_for(lambda: len(traffic.so_far()) > at_the_end + 8, "more answers", time.monotonic() + 30)
    assert sorted(listed) == workers
    assert traffic.failed() == [] and len(traffic.requests) > 20
    new = host.ansible("server_info", {})["servers"]
    assert [one["port"] for one in new] == [one["port"] for one in old] == list(ports)  # type: ignore[attr-defined]
    assert new[0]["main_pid"] != old[0]["main_pid"] and new[1]["main_pid"] == old[1]["main_pid"]  # type: ignore[index]


LISTED = """
import json, urllib.request
print(*[one["url"] for one in json.load(urllib.request.urlopen("http://127.0.0.1:8000/workers"))["workers"]])
"""
