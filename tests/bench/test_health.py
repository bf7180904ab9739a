"""From SGLang's ready line to the verdict: what the health check itself adds to its probe requests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_host import arguments, server_health, server_record
from gpu_host.procfs import Proc

from simulator.host import READY, SimulatedHost

pytestmark = pytest.mark.bench
MOST = 2.0  # seconds


def test_the_verdict_comes_within_2_s_of_the_ready_line_plus_the_probe_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedHost(tmp_path / "host") as host:
        for name, value in host.reset_environment().items():
            monkeypatch.setenv(name, value)
        server = host.start_server(gpus=(0, 1, 2, 3), eagle3=False, load_seconds=3)
        time.sleep(0.5)
        proc = Proc()
        main = proc.process(server.main_pid)
        assert main is not None
        record = server_record.from_process(proc, main)
        assert record is not None
        server_record.save(record, str(host.folder / "host-state"))
        params: dict[str, Any] = {
            **{name: facts.get("default") for name, facts in arguments.SERVER_HEALTH.items()},
            "name": record.name,
            "chat_expect": "",
            "speculation": {},
            "state_folder": str(host.folder / "host-state"),
        }
        found: dict[str, Any] = {}

        def follow() -> None:
            found.update(server_health.run(params), at=time.monotonic())

        thread = threading.Thread(target=follow)
        thread.start()
        while READY not in server.log_text():
            time.sleep(0.005)
        ready = time.monotonic()
        thread.join(60)
    assert found.get("verdict") == "ready", found
    probes = sum(step["seconds"] for step in found["proof"])
    added = found["at"] - ready - probes
    print(f"\nverdict {found['at'] - ready:.2f} s after the ready line, {probes:.2f} s of it probe requests")
    assert added < MOST
