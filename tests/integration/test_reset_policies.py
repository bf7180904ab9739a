"""Resets under a policy, on servers of the simulated host that have requests: who ends, who is spared, who fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_host import arguments

from simulator.host import Server, SimulatedHost, session_processes, wait_for
from tests.router_double import RouterDouble

ROOT = Path(__file__).resolve().parent.parent.parent
# Calls gpu_host.<module>.run; `paused` waits for the file `go` right before the servers are told to end.
PROGRAM = """
import json, os, sys, time
from importlib import import_module
sys.path.insert(0, sys.argv[1])
entry, params, check, paused = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "1", sys.argv[5]
if paused:
    from gpu_host import policy
    clear = policy.Gate.clear
    def later(self, *given):
        skip = clear(self, *given)
        open(paused + ".waits", "w").close()
        while not os.path.exists(paused):
            time.sleep(0.02)
        return skip
    policy.Gate.clear = later
print(json.dumps(import_module("gpu_host." + entry).run(params, check_mode=check)))
"""
QUICK = {"term_poll_seconds": 0.2, "release_seconds": 0.2}


@pytest.fixture(scope="module")
def whole_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("simulated") / "host").create() as host:
        yield host


@pytest.fixture
def host(whole_host: SimulatedHost) -> Iterator[SimulatedHost]:
    """The host without a server, whatever the test before left."""
    yield whole_host
    for one in whole_host.started():
        for pid in session_processes(one.pid):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not whole_host.started(), "the servers to go", 20)


def serve(host: SimulatedHost, gpus: Sequence[int] = (0,), **options: Any) -> Server:
    """A server that is up, with a log of its own."""
    return host.start_server(f"server-{time.monotonic_ns()}", gpus=gpus, **options).wait_ready()


def parameters(host: SimulatedHost, **given: Any) -> dict[str, Any]:
    patient = {"grace": 20.0, "phases": ["kill", "clean", "verify"]}
    return host.parameters(arguments.GPU_RESET, **{**patient, **given})


def start(host: SimulatedHost, params: dict[str, Any], entry: str, check: bool, go: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM, str(ROOT / "module_utils"), entry, json.dumps(params), str(int(check)), go]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=os.environ | host.reset_environment())


def record_of(started: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors
    return dict(json.loads(out))


def reset(host: SimulatedHost, check: bool = False, **given: Any) -> dict[str, Any]:
    return record_of(start(host, parameters(host, **given), "reset", check, ""))


class Request(threading.Thread):
    """One generation; ``status`` and ``ended`` once it is over."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__(daemon=True)
        self._server, self._tokens = server, tokens
        self.status, self.ended = -1, 0.0
        self.start()

    def run(self) -> None:
        body = {"text": "count", "sampling_params": {"max_new_tokens": self._tokens}}
        self.status, _text = self._server.request("/generate", body, timeout=60)
        self.ended = time.monotonic()


def busy(server: Server, tokens: int = 200) -> Request:
    """A request of several seconds that the server counts as running."""
    request = Request(server, tokens)
    wait_for(
        lambda: json.loads(server.request("/v1/loads")[1])["loads"][0]["num_running_reqs"] > 0, "the request to run", 20
    )
    return request


def files(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file() and one.name != "lock"}


def test_idle_only_leaves_a_host_with_a_request_as_it_is(host: SimulatedHost) -> None:
    server = serve(host, [0, 1], step_seconds=0.02)
    request = busy(server)
    before, state = server.processes(), files(host.folder / "host-state")
    record = reset(host, policy="idle_only")
    assert record["verdict"] == "skipped"
    assert record["reason"] == f"policy idle_only: port-{server.port} is busy (1 running, 0 waiting)"
    assert (record["changed"], record["failed"], record["killed"]) == (False, False, [])
    assert record["servers"] == [f"port-{server.port}"]
    assert (server.processes(), files(host.folder / "host-state")) == (before, state)
    request.join(60)
    assert request.status == 200


def test_idle_only_counts_requests_that_only_wait(host: SimulatedHost) -> None:
    limit = ["--max-running-requests", "1"]
    server = serve(host, [0], eagle3=False, arguments=limit, step_seconds=0.02)
    requests = [busy(server), Request(server, 10)]
    wait_for(lambda: json.loads(server.request("/v1/loads")[1])["loads"][0]["num_waiting_reqs"] > 0, "the queue", 20)
    assert "(1 running, 1 waiting)" in reset(host, policy="idle_only")["reason"]
    assert server.main.alive()
    for request in requests:
        request.join(60)
    assert [request.status for request in requests] == [200, 200]


def test_idle_only_resets_an_idle_host(host: SimulatedHost) -> None:
    server = serve(host, [0, 1], **QUICK)
    record = reset(host, policy="idle_only")
    assert (record["verdict"], record["reason"]) == ("clean", "")
    assert not server.processes()


def test_a_server_that_starts_is_left_alone_by_idle_only_and_ended_by_drain(host: SimulatedHost) -> None:
    server = host.start_server("loading", gpus=[0], load_seconds=60)
    wait_for(lambda: "Load weight begin" in server.log_text(), "the load", 20)
    assert f"port-{server.port} is starting" in reset(host, policy="idle_only")["reason"]
    assert server.main.alive()
    assert reset(host, grace=1.0)["verdict"] == "clean"


def test_drain_lets_the_accepted_request_finish_and_then_ends_the_server_by_term(host: SimulatedHost) -> None:
    server = serve(host, [0, 1], step_seconds=0.02, verify_seconds=0.03, **QUICK)
    request = busy(server, 300)
    record = reset(host)
    request.join(60)
    assert (request.status, record["verdict"]) == (200, "clean")
    assert {row["signal"] for row in record["killed"] if row["pid"] == server.main_pid} == {"TERM"}
    # It waited before it sent TERM: a server whose health check failed would cut the request on TERM.
    assert "Remaining number of requests 0" in server.log_text()
    assert "Remaining number of requests 1" not in server.log_text()


def test_a_drain_that_is_over_ends_the_server_all_the_same(host: SimulatedHost) -> None:
    server = serve(host, [0], step_seconds=0.05, **QUICK)
    busy(server, 5000)
    record = reset(host, grace=1.0)
    assert record["verdict"] == "clean" and not server.processes()
    assert any("after 1 s of draining" in note for note in record["notes"])


def test_force_waits_for_no_request(host: SimulatedHost) -> None:
    server = serve(host, [0], step_seconds=0.02, **QUICK)
    busy(server, 5000)
    record = reset(host, policy="force", grace=1.0)
    assert record["verdict"] == "clean" and "drain" not in record["seconds"]


def test_zombies_only_leaves_the_living_alone_and_takes_the_dead(host: SimulatedHost) -> None:
    server = serve(host, [0, 1], outlive_main=1, orphan_seconds=300)
    assert reset(host, policy="zombies_only")["reason"].startswith(f"policy zombies_only: port-{server.port} is idle")
    assert server.main.alive()
    server.main.send(signal.SIGKILL)
    wait_for(lambda: not server.main.alive(), "the main to end", 10)
    assert len(server.processes()) > 1
    record = reset(host, policy="zombies_only")
    assert (record["verdict"], record["reason"]) == ("clean", "")
    assert not server.processes()


def test_zombies_only_takes_a_hung_server_and_drain_does_not_wait_for_its_requests(host: SimulatedHost) -> None:
    for policy in ("zombies_only", "drain"):
        server = serve(host, [0, 1], step_seconds=0.02, **QUICK)
        busy(server, 5000)
        for pid in server.scheduler_pids:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        record = reset(host, policy=policy, grace=1.0 if policy == "zombies_only" else 3.0)
        assert record["verdict"] == "clean", record
        assert record["seconds"].get("drain", 0.0) < 3.0, (record["seconds"], time.monotonic() - began)
        assert not server.processes()


def test_zombies_only_skips_a_host_without_a_server(host: SimulatedHost) -> None:
    assert reset(host, policy="zombies_only")["reason"] == "policy zombies_only: no server here holds memory"


def test_only_the_servers_on_the_named_gpus_count(host: SimulatedHost) -> None:
    idle = serve(host, [0], **QUICK)
    other = serve(host, [1], step_seconds=0.02)
    request = busy(other)
    record = reset(host, policy="idle_only", gpus=["0"])
    assert record["verdict"] == "clean", record["reason"]
    assert not idle.processes()
    request.join(60)
    assert request.status == 200


def test_a_server_that_starts_after_a_sparing_policy_has_decided_is_not_ended(
    host: SimulatedHost, tmp_path: Path
) -> None:
    old = serve(host, [0], **QUICK)
    go = str(tmp_path / "go")
    running = start(host, parameters(host, policy="idle_only"), "reset", False, go)
    wait_for(lambda: Path(f"{go}.waits").exists(), "the reset", 30)
    new = serve(host, [1], **QUICK)
    Path(go).touch()
    record = record_of(running)
    assert not old.processes() and new.main.alive()
    assert record["verdict"] == "dirty" and f"({new.main_pid})" in record["reason"]


def test_a_request_between_the_last_look_and_term_is_answered(host: SimulatedHost, tmp_path: Path) -> None:
    server = serve(host, [0], step_seconds=0.02, **QUICK)
    go = str(tmp_path / "go")
    running = start(host, parameters(host, policy="idle_only"), "reset", False, go)
    wait_for(lambda: Path(f"{go}.waits").exists(), "the reset", 30)
    request = busy(server, 150)
    Path(go).touch()
    record = record_of(running)
    request.join(60)
    assert (request.status, record["verdict"]) == (200, "clean")


def test_check_mode_says_what_the_policy_would_do(host: SimulatedHost) -> None:
    server = serve(host, [0], step_seconds=0.02)
    request = busy(server)
    skipped = reset(host, check=True, policy="idle_only")
    assert (skipped["verdict"], skipped["predicted"]) == ("skipped", True)
    assert skipped["msg"].startswith("would be skipped: policy idle_only")
    drained = reset(host, check=True)
    assert drained["predicted"] and server.main_pid in {row["pid"] for row in drained["killed"]}
    assert drained["notes"][-1] == f"policy drain would first wait up to 20 s for 1 requests of port-{server.port}"
    request.join(60)
    assert request.status == 200 and server.main.alive()


# ---- with a router ----


def test_a_server_is_out_of_its_router_while_it_drains_and_back_once_it_serves_again(host: SimulatedHost) -> None:
    key_file = host.folder / "home" / "router.key"
    key_file.write_text("r0uter-s3cret\n")
    options: dict[str, Any] = {"gpus": [0], "arguments": ["--api-key", "own-s3cret"], **QUICK}
    server = serve(host, **options)
    worker = f"http://127.0.0.1:{server.port}"
    with RouterDouble([worker, "http://other:1"], key="r0uter-s3cret") as router:
        record = reset(
            host, router_url=router.url, worker_url="http://127.0.0.1:{port}", router_api_key_file=str(key_file)
        )
        assert record["verdict"] == "clean", record
        assert record["router"] == {"url": router.url, "taken_out": [worker], "put_back": []}
        assert list(router.workers) == ["http://other:1"]
        assert any("is out of the router" in note for note in record["notes"])
        again = host.start_server("again", port=server.port, **options)
        params = host.parameters(arguments.ROUTER_WORKER)
        back = record_of(start(host, params, "router_worker", False, ""))
        assert (back["changed"], back["put_back"], back["out"]) == (True, [worker], []), back
        assert "fired up" in again.log_text() and router.keys == {worker: "own-s3cret"}
        assert record_of(start(host, params, "router_worker", False, ""))["changed"] is False
    kept = b"".join(files(host.folder / "host-state" / "evidence").values()) + json.dumps([record, back]).encode()
    assert b"s3cret" not in kept and b"s3cret" not in (host.folder / "host-state" / "journal.jsonl").read_bytes()


def test_a_server_that_is_skipped_after_all_is_back_in_its_router(host: SimulatedHost) -> None:
    server = serve(host, [0], step_seconds=0.02)
    worker = f"http://127.0.0.1:{server.port}"
    with RouterDouble([worker], queue_seconds=1.0) as router:
        params = parameters(host, policy="idle_only", router_url=router.url, worker_url=worker, phases=["kill"])
        running = start(host, params, "reset", False, "")
        wait_for(lambda: any(method == "DELETE" for method, _path in router.calls), "the removal", 30)
        request = busy(server, 400)
        record = record_of(running)
        assert record["verdict"] == "skipped", record
        assert (record["router"]["taken_out"], record["router"]["put_back"]) == ([worker], [worker])
        assert list(router.workers) == [worker]
    request.join(60)
    assert request.status == 200


def test_a_router_that_does_not_answer_stops_the_reset_before_anything_changes(host: SimulatedHost) -> None:
    server = serve(host, [0])
    record = reset(host, router_url="http://127.0.0.1:9", worker_url="http://127.0.0.1:{port}")
    assert (record["verdict"], record["failed"], record["killed"]) == ("unknown", True, [])
    assert record["reason"].startswith("Nothing was ended: The router http://127.0.0.1:9 refuses the connection")
    assert server.main.alive()


def test_a_worker_whose_server_does_not_come_up_stays_out_and_is_named(host: SimulatedHost) -> None:
    server = serve(host, [0], **QUICK)
    worker = f"http://127.0.0.1:{server.port}"
    with RouterDouble([worker]) as router:
        reset(host, router_url=router.url, worker_url=worker)
        params = host.parameters(arguments.ROUTER_WORKER, timeout=0.5)
        back = record_of(start(host, params, "router_worker", False, ""))
    assert back["failed"] and back["out"] == [worker]
    assert (
        f"its server on port {server.port} took no requests within 0.5 s (port-{server.port} is absent)" in back["msg"]
    )
