"""Benchmarks from one command to a verdict: the stand-in's known figures come out again, and a run survives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.benchmarks import Bench, Outcome, active, server_variables, sglang_pid, standin
from tests.lab.command import wait_for
from tests.lab.host import Host
from tests.lab.image import REPOSITORY

CASES = yaml.safe_load((REPOSITORY / "tests/unit/cases/benchmark-verdicts.yml").read_text())
# Step times of the planted cases are that much longer here: hosts share two cores.
LONGER = 3.0


def case_variables(case: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The variables of a host whose servers are those of a planted case."""
    variants = []
    for name, planted in case["variants"].items():
        speculates = "accept" in planted
        table = ",".join(f"{at}:{ms * LONGER / 1000:.6f}" for at, ms in planted["step_ms"].items())
        settings: dict[str, Any] = {"VERIFY_TABLE" if speculates else "STEP_TABLE": table}
        if speculates:
            settings |= {"ACCEPT_LENGTH": planted["accept"]} if planted["accept"] else {"NO_SPEC_META": 1}
        variant: dict[str, Any] = {"name": name, "environment": standin(settings)}
        if speculates:
            variant["steps"] = int(name.split("-")[1]) if name.split("-")[1].isdigit() else 3
        if "nccl_profile" in planted:
            variant["nccl_profile"] = planted["nccl_profile"]
        variants.append(variant)
    loads = sorted({at for planted in case["variants"].values() for at in planted["step_ms"]})
    return {**server_variables(), "benchmark_variants": variants, "benchmark_concurrencies": loads, **more}


def hold_against(case: Mapping[str, Any], host: Host, outcome: Any) -> None:
    """Every figure of the table within 5 % of what was planted, and the verdict that has to come out."""
    for one in outcome.measured(host):
        figures, wanted = one["data"], case["variants"][one["variant"]]
        step = wanted["step_ms"][figures["concurrency"]] * LONGER
        if wanted.get("accept"):
            assert figures["accept_length"] == pytest.approx(wanted["accept"], rel=0.05), one["variant"]
        elif "accept" in wanted:
            assert figures["accept_length"] is None
            continue
        assert figures["step_ms"] == pytest.approx(step, rel=0.05), (one["variant"], figures["concurrency"])
        rate = (wanted.get("accept") or 1) * 1000 / step
        assert figures["output_tokens_per_s_per_request"] == pytest.approx(rate, rel=0.05)
    verdict = outcome.of(host)["verdict"]
    for key, value in case["verdict"].items():
        assert verdict["more_repeats" if key == "more_rounds" else key] == value, (case["name"], verdict)


def test_known_step_times_and_accept_lengths_come_out_again_with_the_right_verdicts(
    start_gpu_host: Callable[..., Host], tmp_path: Path
) -> None:
    """One host loses by its drafter, the other wins; one gets back the server it had, the other is left clean."""
    loses, wins = (
        {
            "name": name,
            "variants": {
                "baseline": {"step_ms": {2: 12}},
                "eagle3-3-step": {"accept": accept, "step_ms": {2: verify}},
            },
            "verdict": verdict,
        }
        for name, accept, verify, verdict in (
            ("2.1 and 30 ms against 12 ms", 2.1, 30, {"kind": "do_not_enable"}),
            ("2.88 and 17 ms", 2.88, 17, {"kind": "enable", "steps": 3, "up_to_concurrency": 2}),
        )
    )
    first, second = start_gpu_host(), start_gpu_host()
    bench = Bench(
        tmp_path,
        [(first, case_variables(loses)), (second, case_variables(wins, benchmark_afterwards="clean"))],
    )
    bench.deploy()
    before = sglang_pid(first), sglang_pid(second)
    outcome = bench.run(benchmark_rounds=2, benchmark_max_rounds=3, reset_confirmed=True)
    assert outcome.status == 0, outcome.output
    hold_against(loses, first, outcome)
    hold_against(wins, second, outcome)
    for one in outcome.measured(first):
        assert one["data"]["gpu"]["watts_mean"] == pytest.approx(8 * 30, rel=0.05)
        assert max(one["data"]["gpu"]["memory_mib"].values()) == 9000
    assert outcome.says("step 1 of 4: ") and outcome.says("round 2; about ")
    assert (outcome.folder / "report.html").stat().st_size > 10000
    assert active(first, "sglang") == "active" and sglang_pid(first) != before[0]
    assert active(second, "sglang") != "active" and second.find("sglang.launch_server") == []
    assert active(first, "benchmark") == active(second, "benchmark") == "inactive"


def test_a_variant_that_dies_is_reported_with_its_cause_and_a_killed_run_goes_on_where_it_was(
    gpu_host: Host, tmp_path: Path
) -> None:
    dying = {"name": "dies", "steps": 1, "environment": standin({"DIE_AFTER_REQUESTS": 6})}
    variants = [{"name": "baseline"}, {"name": "two", "steps": 2}, dying]
    settings = {"STEP_SECONDS": 0.02, "VERIFY_SECONDS": 0.03}
    bench = Bench(tmp_path, [(gpu_host, {**server_variables(settings), "benchmark_variants": variants})])
    bench.deploy()
    play = bench.start()
    kept = bench.artifacts / "benchmarks"
    wait_for(lambda: bool(list(kept.glob("*/measurements/*/*.json"))), "a measurement", time.monotonic() + 180, 0.1)
    os.killpg(play.pid, signal.SIGKILL)
    play.wait()
    first = {path: path.read_bytes() for path in kept.glob("2*/measurements/*/*.json")}
    assert active(gpu_host, "sglang") != "active"  # the play could give nothing back
    outcome = bench.run(benchmark_run="latest")
    assert outcome.status == 0, outcome.output
    measured = outcome.measured(gpu_host)
    assert sorted(one["variant"] for one in measured) == ["baseline", "two"]
    assert {path: path.read_bytes() for path in first} == first  # measured once, and kept
    failure = outcome.failures(gpu_host)[-1]
    assert failure["variant"] == "dies"
    assert "The server benchmark died while it was measured, after " in failure["cause"]
    assert "an illegal memory access was encountered" in failure["evidence_line"]
    assert "dies" in (outcome.folder / "report.md").read_text()
    assert active(gpu_host, "sglang") == "active"


def over_two_hosts(
    pair: tuple[Host, Host], folder: Path, *variants: Mapping[str, Any], second: Mapping[str, Any] | None = None
) -> Outcome:
    """The run of a server of two ranks, one on each host; `second`: the stand-in's settings there in all of these
    variants. Both hosts end with the server over both that they had."""
    names = [host.name for host in pair]
    settings = {"STEP_SECONDS": 0.02, "VERIFY_SECONDS": 0.03, "ACCEPT_LENGTH": 2.5}
    shared = {**server_variables(settings), "sglang_nodes": names, "sglang_arguments": {"tp_size": 2}}
    there = [{**one, "environment": {**one.get("environment", {}), **standin(second or {})}} for one in variants]
    chosen = [[{"name": "baseline"}, *own] for own in (variants, there)]
    bench = Bench(
        folder, [(host, {**shared, "benchmark_variants": own}) for host, own in zip(pair, chosen, strict=True)]
    )
    bench.deploy(deploy_serial=2)
    before = [sglang_pid(host) for host in pair]
    outcome = bench.run()
    assert outcome.status == 0, outcome.output
    assert outcome.of(pair[0])["nodes"] == names and len(outcome.results["hosts"]) == 1
    assert outcome.measured(pair[1]) == outcome.failures(pair[1]) == []
    for host, pid in zip(pair, before, strict=True):
        assert active(host, "sglang") == "active" and sglang_pid(host) not in (0, pid)
        assert active(host, "benchmark") == "inactive"
    return outcome


def test_a_server_over_two_hosts_is_measured_as_one_and_a_host_that_fails_is_named_with_its_rank(
    start_gpu_host: Callable[..., Host], tmp_path: Path
) -> None:
    pair = start_gpu_host(), start_gpu_host()
    broken = {"name": "broken", "steps": 3, "environment": standin({"MEET_SECONDS": 3})}
    outcome = over_two_hosts(pair, tmp_path, broken, second={"FAIL": "kernel-package-missing"})
    (measured,) = outcome.measured(pair[0])
    assert measured["variant"] == "baseline" and "--nnodes 2" in measured["data"]["server_command"]
    cause = outcome.failures(pair[0])[0]["cause"]
    assert cause.startswith(f"{pair[1].name} (node rank 1): ") and "sgl_kernel" in cause, cause


@pytest.mark.slow
def test_where_a_server_over_two_hosts_dies_while_it_is_measured_both_go_on_with_the_next_variant(
    start_gpu_host: Callable[..., Host], tmp_path: Path
) -> None:
    pair = start_gpu_host(), start_gpu_host()
    dies = {"name": "dies", "steps": 1, "environment": standin({"DIE_AFTER_REQUESTS": 6})}
    outcome = over_two_hosts(pair, tmp_path, dies, {"name": "two", "steps": 2})
    assert sorted(one["variant"] for one in outcome.measured(pair[0])) == ["baseline", "two"]
    cause = outcome.failures(pair[0])[0]["cause"]
    assert cause.startswith(f"{pair[0].name} (node rank 0): The server benchmark died while it was measured"), cause


def test_what_can_not_be_measured_is_refused_before_a_server_is_ended(gpu_host: Host, tmp_path: Path) -> None:
    bench = Bench(tmp_path, [(gpu_host, server_variables())])
    bench.deploy()
    pid = sglang_pid(gpu_host)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "malformed.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": 7}]}]))
    same = [{"name": "baseline"}, {"name": "one", "steps": 2}, {"name": "other", "steps": 2}]
    for given, words in (
        ({"benchmark_drafters": ["/models/nothing"]}, "/models/nothing"),
        ({"benchmark_prompts": [str(tmp_path / "empty.json")]}, "empty.json is empty"),
        ({"benchmark_prompts": [str(tmp_path / "malformed.json")]}, "turn 1 has a number as 'value', not a text"),
        ({"benchmark_variants": same}, "other"),
    ):
        refused = bench.run(**given)
        assert refused.status != 0 and refused.says("Nothing was done."), refused.output
        assert refused.says(words), refused.output
        assert "Reset the host" not in refused.output
    assert not (bench.artifacts / "benchmarks").exists()
    shown = bench.run("--check")
    assert shown.status == 0, shown.output
    assert sglang_pid(gpu_host) == pid and not (bench.artifacts / "benchmarks").exists()


# Cases without invented noise: what the verdict says of noise is tested on figures alone.
WHOLE = [case for case in CASES if not {"noise", "drift", "stalled"} & set(case)]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [WHOLE[:4], WHOLE[4:8], WHOLE[8:]], ids=["first", "second", "third"])
def test_each_planted_case_comes_out_right_from_one_command_to_the_verdict(
    start_gpu_host: Callable[..., Host], tmp_path: Path, batch: list[dict[str, Any]]
) -> None:
    hosts = []
    for case in batch:
        rounds = case.get("rounds", 2)
        more = {
            "benchmark_num_prompts": 16,
            "benchmark_output_lengths": [case.get("output_tokens", 64)],
            "benchmark_rounds": rounds,
            "benchmark_max_rounds": 4 if rounds > 1 else 1,
        }
        hosts.append((start_gpu_host(), case_variables(case, **more)))
    outcome = Bench(tmp_path, hosts).run(timeout=7200, reset_confirmed=True)
    assert outcome.status == 0, outcome.output
    for case, (host, _) in zip(batch, hosts, strict=True):
        hold_against(case, host, outcome)


def test_ten_cases_or_more_are_planted() -> None:
    assert len(WHOLE) >= 10
