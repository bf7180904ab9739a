"""One server over two hosts: its parts start, get ready, fail and go together."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host
from tests.lab.resets import until
from tests.lab.test_deploy import ASK, Deployed, Target


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    return tmp_path


class Pair:
    """Two hosts that share a server of eight ranks, four on each."""

    def __init__(self, start: Callable[..., Host]) -> None:
        self.first, self.second = self.targets = Target(start()), Target(start())
        self.names = [target.host.name for target in self.targets]

    def play(self, playbook: str, *words: str, settings: dict[str, Any] | None = None, **more: Any) -> Deployed:
        shared = {
            "sglang_nodes": self.names,
            "sglang_arguments": {"tp_size": 8},
            "deploy_serial": 2,
            "reset_confirmed": True,
            "server_health_request_timeout": 8,
        }
        variables = self.first.variables(settings, **{**shared, **more})
        began = time.monotonic()
        limit = f"--limit={','.join(self.names)}"
        done = self.first.host.playbook(f"playbooks/{playbook}.yml", variables, limit, *words)
        return Deployed(done.returncode, done.stdout + done.stderr, time.monotonic() - began)

    def on_the_second(self, value: object, otherwise: object) -> str:
        """A variable that differs between the hosts."""
        return f"{{{{ {value!r} if inventory_hostname == {self.names[1]!r} else {otherwise!r} }}}}"

    def pids(self) -> list[int]:
        return [target.main_pid() for target in self.targets]

    def schedulers(self, target: Target) -> list[str]:
        return sorted(one.line for one in target.host.processes() if one.line.startswith("sglang::scheduler"))


@pytest.fixture
def pair(start_gpu_host: Callable[..., Host]) -> Pair:
    return Pair(start_gpu_host)


def changes(run: Deployed) -> list[str]:
    return re.findall(r"^\S+ +: ok=\d+ +changed=(\d+)", run.output, re.MULTILINE)


def verdicts(run: Deployed) -> list[str]:
    return re.findall(r"^ +verdict: (\w+)$", run.output, re.MULTILINE)


def test_both_hosts_get_ready_a_second_run_changes_nothing_both_go_back_together_and_a_reset_ends_both(
    pair: Pair,
) -> None:
    alone = pair.play("deploy-eagle3", deploy_serial=1)
    assert alone.status != 0 and alone.says("Say -e deploy_serial=2."), alone.output
    assert pair.pids() == [0, 0]
    # The second host loads, a shard a second, for longer than the stall: the first waits without a sign of work.
    pair.second.host.exec("cd /models/kimi-k2.5 && for n in 1 2 3 4 5 6 7 8; do touch model-$n.safetensors; done")
    slow = {"LOAD_SECONDS": pair.on_the_second(40, 1)}
    done = pair.play("deploy-eagle3", settings=slow)
    assert done.status == 0, done.output
    pids = pair.pids()
    assert 0 not in pids
    assert pair.schedulers(pair.first) == [f"sglang::scheduler_TP{rank}" for rank in range(4)]
    assert pair.schedulers(pair.second) == [f"sglang::scheduler_TP{rank}" for rank in range(4, 8)]
    assert [target.deployment()["verdict"] for target in pair.targets] == ["ready", "ready"]
    answer = pair.first.host.exec(["python3", "-c", ASK, "http://127.0.0.1:30000/server_info", ""]).stdout
    assert (json.loads(answer)["nnodes"], json.loads(answer)["speculative_algorithm"]) == (2, "EAGLE3")
    states = [target.host.ansible("server_info")["states"] for target in pair.targets]
    assert states == [{"sglang": "idle"}, {"sglang": "busy"}]
    again = pair.play("deploy-eagle3", settings=slow)
    assert (again.status, changes(again), pair.pids()) == (0, ["0", "0"], pids), again.output
    # What changes on the second host alone starts both again, and both go back.
    broken = {"FAIL": pair.on_the_second("kernel-package-missing", "")}
    failed = pair.play("deploy-eagle3", settings={**slow, **broken}, deploy_rollback=True)
    assert failed.status != 0
    assert failed.says(f"{pair.names[1]}, which shares this server, failed: its main process ended"), failed.output
    assert failed.output.count("The last good deployment runs again.") >= 2, failed.output
    assert all(new not in (0, old) for new, old in zip(pair.pids(), pids, strict=True))
    assert [target.deployment()["verdict"] for target in pair.targets] == ["ready", "ready"]
    ended = pair.play("reset")
    assert ended.status == 0, ended.output
    assert pair.schedulers(pair.first) == pair.schedulers(pair.second) == []


def test_a_part_that_dies_or_hangs_ends_both_by_name_and_none_is_left_waiting_for_a_dead_one(pair: Pair) -> None:
    second = pair.names[1]
    failed = pair.play("deploy-eagle3", settings={"FAIL": pair.on_the_second("eagle3-missing-module-in-draft", "")})
    assert failed.status != 0
    assert re.search(r"^ +id: deep-gemm-missing$", failed.output, re.MULTILINE), failed.output
    assert failed.says(f"{second} failed: its main process ended") or failed.says(
        f"{second}, which shares this server, failed"
    )
    assert [target.active() for target in pair.targets] == ["inactive", "inactive"]
    assert pair.schedulers(pair.first) == pair.schedulers(pair.second) == []
    stuck = pair.play("deploy-eagle3", settings={"HANG_AFTER": pair.on_the_second("weights", "")})
    assert stuck.status != 0
    assert stuck.says("in the phase weights") and verdicts(stuck)[:2] == ["stuck", "stuck"], stuck.output


def test_a_later_rank_that_hangs_gets_no_grace_once_its_first_host_has_ended_the_server(
    start_gpu_host: Callable[..., Host],
) -> None:
    first, second = start_gpu_host(), start_gpu_host()
    shared = ["--nnodes", "2", "--dist-init-addr", f"{first.address}:20000"]
    head, later = (
        host.start_server(*shared, "--node-rank", str(rank), settings={"SPEED": 10, "VERSION": "0.5.23"}, wait=False)
        for rank, host in enumerate((first, second))
    )
    head.wait_until_ready()
    until(lambda: "Dummy health check server started" in later.log_text(), "the later rank to be ready")
    ranks = [one.pid for one in later.tree() if one.line.startswith("sglang::scheduler")]
    assert len(ranks) == 4
    for pid in ranks:
        second.kill(pid, signal.SIGSTOP)  # so that they don't see the end of the others
    assert first.ansible("gpu_reset", {"grace": 10})["verdict"] == "clean"
    assert all(second.alive(pid) for pid in [later.pid, *ranks])
    reset: dict[str, Any] = second.ansible("gpu_reset", {"grace": 300}, timeout=250)
    assert reset["verdict"] == "clean", reset["reason"]
    signals = {row["pid"]: row["signal"] for row in reset["killed"]}
    assert {signals[pid] for pid in [later.pid, *ranks]} == {"KILL"}
