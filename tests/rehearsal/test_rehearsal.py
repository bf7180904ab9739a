"""Real SGLang on a CPU, deployed by the playbooks, health-checked, hung and reset: one story, in this file's order.

No stand-in takes part. Doubles are the kernels, the GPU's memory and the claim to have AMX (kit/sitecustomize.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_host import startup_phases

from simulator.host import wait_for
from tests.rehearsal import contract, environment
from tests.rehearsal.host import GPU_MIB, SHARED_MEMORY, Played, RehearsalHost, shared_memory, titles

RECORDED = environment.ROOT / contract.RECORDED_FOLDER
TREE = ["multiprocessing.resource_tracker", "sglang.launch_server", "sglang::detokenizer", "sglang::scheduler"]


@pytest.fixture(scope="module")
def models() -> Path:
    return environment.models()


@pytest.fixture(scope="module")
def host(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RehearsalHost]:
    before = shared_memory()
    with RehearsalHost(tmp_path_factory.mktemp("rehearsal") / "host", models) as made:
        yield made
    assert not made.left()
    assert not made.folder.exists()
    assert shared_memory() - before == set()
    assert made.semaphores and not any((SHARED_MEMORY / name).exists() for name in made.semaphores)


@pytest.fixture(scope="module")
def story(host: RehearsalHost) -> dict[str, Any]:
    """What an earlier test hands to a later one."""
    return {}


def told(played: Played, name: str) -> str:
    """The value of a field of the health check's result, as ansible-playbook -v shows it."""
    found = re.findall(rf"^ *{name}: (.*)$", played.text, re.MULTILINE)
    return found[-1] if found else ""


def greedy_answers(host: RehearsalHost) -> list[list[int]]:
    """Tokens of the answers that the last baseline gave, as server_health keeps them."""
    (kept,) = (host.folder / "host-state" / "lossless").glob("*.json")
    return [one["ids"] for one in json.loads(kept.read_text())]


def main_pid(host: RehearsalHost) -> int:
    return next(pid for pid, line in host.left().processes.items() if "sglang.launch_server" in line)


def scheduler(host: RehearsalHost) -> int:
    return next(pid for pid, line in host.left().processes.items() if line.startswith("sglang::scheduler"))


def as_recorded(name: str, answers: dict[str, dict[str, Any]]) -> list[str]:
    """How these answers differ from the recorded ones; with REHEARSAL_RECORD=1 they become the recorded ones."""
    path = RECORDED / f"{name}.json"
    if os.environ.get("REHEARSAL_RECORD"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(request)}: {json.dumps(one, sort_keys=True)}" for request, one in answers.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(path.read_text())
    return [
        f"{request}: {clause}"
        for request in recorded
        for clause in contract.differences(recorded[request], answers[request])
    ]


def keep_log(host: RehearsalHost, name: str) -> None:
    """With REHEARSAL_RECORD=1 what the server printed becomes a recorded log, its paths replaced."""
    if os.environ.get("REHEARSAL_RECORD"):
        text = host.log_text().replace(str(host.models), "/models").replace(str(environment.VENV), "/opt/sglang")
        text = text.replace(str(host.folder), "/srv/rehearsal").replace(str(environment.KIT), "/opt/kit")
        (environment.ROOT / "tests" / "recorded" / "cpu" / f"{name}.log").write_text(text)


def test_the_models_know_their_text_and_the_drafter_guesses_it(models: Path) -> None:
    facts = environment.made(models)
    assert facts["known_by_heart"] == facts["of"]
    assert min(facts["right_drafts"]) > 0.6


def test_a_baseline_is_deployed_and_proven_to_serve(host: RehearsalHost, story: dict[str, Any]) -> None:
    played = host.play("deploy-baseline.yml", "-v")
    assert played.status == 0, played.text
    assert told(played, "verdict") == "ready"
    assert "clean: rehearsal (SIMULATED)" in played.text
    left = host.left()
    assert titles(left) == TREE
    assert (left.mib, left.listens) == (1200, True)
    story["main"], story["answers"] = main_pid(host), greedy_answers(host)


def test_its_log_tells_the_phases_in_their_order(host: RehearsalHost) -> None:
    phases: list[str] = []
    lines = host.log_text().splitlines()
    for number in range(1, len(lines) + 1):
        phase = startup_phases.progress_of("\n".join(lines[:number]) + "\n").phase
        if phases[-1:] != [phase]:
            phases.append(phase)
    known = [phase for phase in startup_phases.PHASES if phase in phases]
    assert phases == known
    assert phases[-1] == "ready"


def test_a_baseline_answers_as_recorded(host: RehearsalHost) -> None:
    assert as_recorded("cpu-baseline", contract.ask(host.port)) == []


def test_deployed_again_it_is_left_alone_and_its_greedy_answers_are_the_same(
    host: RehearsalHost, story: dict[str, Any]
) -> None:
    played = host.play("deploy-baseline.yml", "-v")
    assert played.status == 0, played.text
    assert "changed=0" in played.text, played.text
    assert main_pid(host) == story["main"]
    assert greedy_answers(host) == story["answers"]


def test_a_benchmark_measures_with_and_without_the_drafter_writes_a_report_and_gives_the_server_back(
    host: RehearsalHost, story: dict[str, Any]
) -> None:
    """One round, as short as it can be: no verdict is due from it, every figure is."""
    variables = {
        "benchmark_steps": [1],
        "benchmark_concurrencies": [2],
        "benchmark_output_lengths": [64],
        "benchmark_prompts": ["data/prompts/chat.json"],
        "benchmark_num_prompts": 6,
        "benchmark_repeats_per_start": 1,
        "benchmark_rounds": 1,
        "benchmark_max_rounds": 1,
    }
    with host.watched():
        played = host.play("benchmark.yml", variables=variables)
    assert played.status == 0, played.text
    run = host.artifacts / "benchmarks" / "latest"
    assert {one.name for one in run.glob("re*.*")} == {"report.html", "report.md", "results.json", "results.csv"}
    assert list((run / "charts").glob("*.png"))
    (found,) = json.loads((run / "results.json").read_text())["hosts"]
    assert found["failures"] == [], found["failures"]
    assert found["verdict"]["sentence"].startswith("SIMULATED: Not certain yet")
    baseline, eagle3 = found["rows"]
    assert (baseline["variant"], eagle3["variant"]) == ("baseline", "eagle3-1-step")
    for row in (baseline, eagle3):
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "tokens_per_s", "tokens_per_s_per_request", "step_ms"):
            assert row[name] > 0, (row["variant"], name)
        assert row["gpu_memory_mib"] == GPU_MIB
    assert baseline["accept_length"] is None
    assert 1.3 < eagle3["accept_length"] <= 2 and eagle3["accept_length_source"] == "requests"
    assert eagle3["same_texts"] in (
        True,
        False,
    )  # the model has not learnt these answers: near ties may fall either way
    assert eagle3["predicted_speed_up"] > 0 and eagle3["speed_up"] > 0
    assert all("sglang.launch_server" in one["server_command"] and one["versions"] for one in found["variants"])
    # The baseline that ran before runs again.
    wait_for(lambda: contract.answer(host.port, "GET", "/health", None, timeout=5)["status"] == 200, "it serves", 180)
    left = host.left()
    assert titles(left) == TREE and (left.mib, left.listens) == (GPU_MIB, True)
    assert main_pid(host) != story["main"]


def test_eagle3_takes_its_place_accepts_drafts_and_gives_the_same_greedy_tokens(host: RehearsalHost) -> None:
    played = host.play("deploy-eagle3.yml", "-v")
    assert played.status == 0, played.text
    assert float(told(played, "accept_length")) > 1.5
    assert "4 of 4 greedy answers equal" in played.text
    assert titles(host.left()) == TREE


def test_eagle3_answers_as_recorded(host: RehearsalHost) -> None:
    assert as_recorded("cpu-eagle3", contract.ask(host.port)) == []


def test_a_stopped_scheduler_makes_it_deaf_where_it_matters_and_nowhere_else(host: RehearsalHost) -> None:
    os.kill(scheduler(host), signal.SIGSTOP)
    began = time.monotonic()
    statuses = {
        path: contract.answer(host.port, "GET", path, None, timeout=25)["status"]
        for path in ("/model_info", "/v1/models", "/metrics", "/ready", "/health")
    }
    assert statuses == {"/model_info": 200, "/v1/models": 200, "/metrics": 200, "/ready": 200, "/health": 503}
    assert time.monotonic() - began == pytest.approx(20, abs=4)
    assert contract.answer(host.port, "GET", "/server_info", None, timeout=3)["status"] == 0
    body = contract.REQUESTS["generate"][2]
    assert contract.answer(host.port, "POST", "/generate", body, timeout=3)["status"] == 0


def test_the_hung_server_is_reset_and_nothing_of_it_stays(host: RehearsalHost) -> None:
    pids = host.left().processes.keys()
    played = host.play("reset.yml")
    assert played.status == 0, played.text
    assert not host.left()
    record = host.records()[-1]
    assert (record["verdict"], record["simulated"]) == ("clean", True)
    killed = {one["pid"]: one["name"] for one in record["killed"]}
    assert pids <= killed.keys(), killed  # and the py-spy by which a dying main asks where its workers stand
    assert [gpu["used_mib_before"] for gpu in record["gpus"]] == [1200]
    keep_log(host, "eagle3-rehearsed-scheduler-stopped-then-reset")


def test_faked_acceptance_which_changes_the_text_is_caught(host: RehearsalHost) -> None:
    """SGLANG_SIMULATE_ACC_LEN takes drafts as they come; the answer to the first question may survive that."""
    server = {**host.server_environment(), "SGLANG_SIMULATE_ACC_LEN": "3.0"}
    variables = {"sglang_environment": server, "server_health_chat_expect": ""}
    played = host.play("deploy-eagle3.yml", "-v", variables=variables)
    assert played.status == 2, played.text
    assert told(played, "step") == "lossless"
    assert float(told(played, "accept_length")) == pytest.approx(3.0, abs=0.4)
    assert re.search(r"greedy answer \d differs from token \d+ on", played.text)


def test_a_killed_scheduler_takes_the_tree_down(host: RehearsalHost) -> None:
    os.kill(scheduler(host), signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: not host.left(), "the end of the tree", 30)
    assert time.monotonic() - began < 20
    lines = host.log_text()
    assert "crashed with exit code -9. Triggering SIGQUIT for cleanup..." in lines
    assert "SIGQUIT received. signum=None, frame=None. It usually means one child failed." in lines


def test_a_drafter_that_learnt_nothing_is_refused_for_its_accept_length(host: RehearsalHost) -> None:
    variables = {"sglang_drafter_path": str(host.models / "random-drafter")}
    played = host.play("deploy-eagle3.yml", "-v", variables=variables)
    assert played.status == 2, played.text
    assert told(played, "step") == "acceptance"
    assert "drafts are made" in played.text
    assert float(told(played, "accept_length")) < 1.05


def test_a_model_that_learnt_nothing_is_refused_for_its_answer(host: RehearsalHost) -> None:
    variables = {"sglang_model_path": str(host.models / "random-target")}
    played = host.play("deploy-baseline.yml", "-v", variables=variables)
    assert played.status == 2, played.text
    assert told(played, "step") == "chat"


def test_two_resets_leave_nothing_and_the_second_changes_nothing(host: RehearsalHost) -> None:
    assert host.left()
    first, second = host.play("reset.yml"), host.play("reset.yml")
    assert (first.status, second.status) == (0, 0), first.text + second.text
    assert "changed=0" in second.text
    assert not host.left()
    assert [record["verdict"] for record in host.records()[-2:]] == ["clean", "clean"]
