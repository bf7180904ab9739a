"""The stand-in against what real SGLang 0.5.23 answered to the same requests (recorded by `make rehearsal`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.host import Server, SimulatedHost
from tests.rehearsal import contract

RECORDED = Path(__file__).resolve().parent.parent / "recorded"
CPU = {name: json.loads((RECORDED / "contract" / f"cpu-{name}.json").read_text()) for name in ("baseline", "eagle3")}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("host")) as made:
        yield made


def answers(host: SimulatedHost, version: str, eagle3: bool) -> dict[str, dict[str, Any]]:
    server = started(host, version, eagle3)
    try:
        if eagle3:  # the recorded one had been health-checked: the accept length is told after forty steps
            server.request("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 300}}, timeout=30)
        return contract.ask(server.port)
    finally:
        server.main.send(9)


def started(host: SimulatedHost, version: str, eagle3: bool) -> Server:
    name = f"{version}-{eagle3}-{len(list((host.folder / 'logs').iterdir()))}"
    return host.start_server(name, gpus=[0], memory_mib=1000, eagle3=eagle3, version=version, speed=20).wait_ready()


@pytest.mark.parametrize("variant", ["baseline", "eagle3"])
def test_the_stand_in_answers_every_request_as_the_real_server_did(host: SimulatedHost, variant: str) -> None:
    assert contract.all_differences(CPU[variant], answers(host, "0.5.23", variant == "eagle3")) == []


@pytest.mark.parametrize("variant", ["baseline", "eagle3"])
def test_the_stand_in_of_the_gpus_version_has_that_servers_fields(host: SimulatedHost, variant: str) -> None:
    """0.5.17 on an H200: /server_info alone was kept of it."""
    real = contract.shape(json.loads((RECORDED / "gpu" / f"server_info-{variant}.json").read_text()))
    server = started(host, "0.5.17", variant == "eagle3")
    made = contract.shape(json.loads(server.request("/server_info")[1]))
    server.main.send(9)
    assert list(contract.differences(real, made)) == []


def test_the_stand_in_answers_with_the_statuses_that_the_gpus_logs_show(host: SimulatedHost) -> None:
    seen = {
        (method, path): int(status)
        for log in ("baseline-benchmarked", "eagle3-ready-then-sigterm")
        for method, path, status in re.findall(
            r'"(GET|POST) (/[\w./]*) HTTP/1.1" (\d+)', (RECORDED / "gpu" / f"{log}.log").read_text()
        )
    }  # the last one of each path: health says 503 before it says 200
    server = started(host, "0.5.17", False)
    bodies = {
        path: body for _method, path, body in map(contract.REQUESTS.__getitem__, ("generate", "completion", "chat"))
    }
    made = {
        (method, path): contract.answer(server.port, method, path, bodies.get(path))["status"] for method, path in seen
    }
    server.main.send(9)
    assert made == seen
    assert len(seen) >= 5


def test_differences_are_named_by_their_place() -> None:
    real = {"status": 200, "shape": {"id": "text", "usage": {"total": "number"}, "more": "null"}}
    made = {"status": 404, "shape": {"id": "number", "usage": {}, "odd": "text", "more": "text"}}
    assert sorted(contract.differences(real, made)) == [
        '/shape/id is "number", really "text"',
        "/shape/odd is not in the real answer",
        "/shape/usage/total is missing",
        "/status is 404, really 200",
    ]
