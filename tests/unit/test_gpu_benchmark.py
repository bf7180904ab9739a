"""The benchmark session on a real GPU: what it derives, and how it starts clients (tests/gpu)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.gpu import benchmark_run, shorten
from tests.gpu.driver import benchmark, procs

WARM_CLIENT = Path(benchmark.servers.HERE) / "warm_client.py"
REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "docs" / "example-benchmark"
RECORDED = REPOSITORY / "tests" / "gpu" / "recorded"


def measurement(
    variant: str, round_: int, rate: float, accept: float | None, log: float, client: float, probe: float = 0.0
) -> dict[str, Any]:
    measured = {"output_tokens_per_s": rate, "accept_length": accept, "step_ms": client}
    return {
        "kind": "measurement",
        "variant": variant,
        "round": round_,
        "cell": "c1",
        "repeat": 1,
        "probe_step_ms": probe,
        "log_step_ms": log,
        "result": {"failed": False, "measurement": measured},
    }


def test_a_probes_step_leaves_out_the_prompt_and_counts_verifications() -> None:
    plain = {
        "short": [{"latency_s": 0.110, "tokens": 11, "verified": None}],
        "long": [{"latency_s": 0.510, "tokens": 211, "verified": None}],
    }
    assert benchmark.step_ms(plain) == pytest.approx(2.0)
    speculative = {
        "short": [{"latency_s": 0.110, "tokens": 30, "verified": 10}] * 2,
        "long": [{"latency_s": 0.610, "tokens": 330, "verified": 110}] * 2,
    }
    assert benchmark.step_ms(speculative) == pytest.approx(5.0)


def test_a_probe_with_a_failed_stream_has_no_step() -> None:
    good = {"latency_s": 0.5, "tokens": 100, "verified": None}
    assert benchmark.step_ms({"short": [good], "long": [{"error": "0 timed out"}]}) is None
    assert benchmark.step_ms({}) is None


def test_the_logs_step_is_of_lines_with_all_requests_running() -> None:
    def line(running: int, rate: float, accepted: str = "") -> str:
        rest = f"{accepted}gen throughput (token/s): {rate}, #queue-req: 0"
        return f"Decode batch, #running-req: {running}, #token: 9, {rest}"

    idle_before, whole, tail = line(4, 9.0), line(4, 2000.0), line(2, 900.0)
    assert benchmark.log_step_ms([idle_before, whole, whole, tail], 4) == pytest.approx(2.0)
    speculative = line(1, 500.0, "accept len: 2.50, accept rate: 0.50, ")
    assert benchmark.log_step_ms([speculative, speculative], 1) == pytest.approx(5.0)
    assert benchmark.log_step_ms([idle_before], 4) is None


def test_the_speed_up_is_predicted_within_each_round_from_accept_length_and_steps_alone() -> None:
    lines = [
        measurement("baseline", 1, 500.0, None, 2.0, 2.1),
        measurement("accept-3", 1, 612.0, 3.0, 5.0, 5.0),
        # All is twice as slow in this round.
        measurement("baseline", 2, 250.0, None, 4.0, 4.2),
        measurement("accept-3", 2, 300.0, 3.0, 10.0, 10.0),
        measurement("accept-3", 3, 999.0, 3.0, 5.0, 5.0),  # its round has no baseline: the time was up
    ]
    (one,) = benchmark.predictions(lines)
    assert one["measured"] == pytest.approx((1.224 + 1.2) / 2)
    assert one["log_predicted"] == pytest.approx(3.0 * 2.0 / 5.0)
    assert one["log_ratio"] == pytest.approx((1.2 / 1.224 + 1.2 / 1.2) / 2)
    assert one["client_predicted"] == pytest.approx(3.0 * 2.1 / 5.0)
    assert "probe_predicted" not in one
    assert one["rounds"] == 2


# The model that is measured

LLAMA = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 1024}


def test_a_resized_drafter_keeps_its_layer_and_drafts_from_all_tokens() -> None:
    made = benchmark.resized(LLAMA, benchmark.SIZE)
    assert made == {**LLAMA, **benchmark.SIZE}
    drafter = benchmark.resized({**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 512}, benchmark.SIZE)
    assert drafter == {**made, "num_hidden_layers": 1, "draft_vocab_size": 1024}


def test_a_resized_model_has_no_weights_and_a_tokenizer_that_shows_every_token(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "made" / "target"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    tokenizer = {"model": {"vocab": {"Ġa": 5}}, "decoder": {"type": "ByteLevel"}}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_bytes(b"weights")
    benchmark.resize(source, target, {"hidden_size": 4096})
    assert sorted(one.name for one in target.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text())["hidden_size"] == 4096
    made = json.loads((target / "tokenizer.json").read_text())
    assert made == {**tokenizer, "decoder": {"type": "Fuse"}}
    before = {one: one.stat().st_mtime_ns for one in target.iterdir()}
    benchmark.resize(source, target, {"hidden_size": 4096})
    assert {one: one.stat().st_mtime_ns for one in target.iterdir()} == before


def test_weights_are_drawn_only_for_a_resized_model() -> None:
    sized, own = benchmark.arguments(benchmark.Shape()), benchmark.arguments(benchmark.Shape(size={}))
    assert sized["load_format"] == "dummy" and "load_format" not in own
    without = benchmark.arguments(benchmark.Shape(arguments={"load_format": None}))
    assert without.keys() == sized.keys() - {"load_format"}


def test_long_prompts_are_of_one_length_and_differ() -> None:
    found = benchmark.prompts(benchmark.Shape(loads={"4": 8}, prompt_characters=9000), "4")
    assert {len(one) for one in found} == {9000} and len(set(found)) == 8


# What was recorded. TINY: the model whose step the processor decides. FIRST: the large one, with a probe that was too
# short. SECOND: by the whole rule.

TINY, FIRST, SECOND = "benchmark-2026-11-29", "benchmark-2026-11-30-first", "benchmark-2026-11-30"


@cache
def recorded(name: str) -> list[dict[str, Any]]:
    return benchmark_run.lines_of(RECORDED / f"h200-{name}.jsonl")


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in recorded(name) if line["kind"] == kind]


@cache
def derived(name: str) -> list[dict[str, Any]]:
    """The predictions, with each step time derived again from raw lines: the server's log, its answers to probes."""
    lines = []
    for line in of_kind(name, "measurement"):
        concurrency = line["result"]["measurement"]["concurrency"]
        steps = {
            "log_step_ms": benchmark.log_step_ms(line["log"], concurrency),
            "probe_step_ms": benchmark.step_ms(line["probe"]),
        }
        assert steps == {name: pytest.approx(line[name]) for name in steps}
        lines.append({**line, **steps})
    return benchmark.predictions(lines)


def misses(name: str, way: str) -> dict[tuple[str, str], float]:
    ratios = {(one["variant"], one["cell"]): one[f"{way}_ratio"] for one in derived(name)}
    assert len(ratios) == 6
    return {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > benchmark.WITHIN}


@pytest.mark.parametrize("name", [TINY, FIRST, SECOND])
def test_a_real_gpu_was_measured_at_three_simulated_accept_lengths_and_two_loads(name: str) -> None:
    found = {(one["variant"], one["cell"]): one for one in derived(name)}
    least = 4 if name == TINY else benchmark.LEAST_ROUNDS
    assert len(found) == 6 and all(one["rounds"] >= least for one in found.values())
    for (variant, _), one in found.items():
        assert one["accept_length"] == pytest.approx(float(variant.removeprefix("accept-")), rel=0.03)
    (reading,) = of_kind(name, "reading")
    assert "H200" in reading["reading"]["nvidia_smi"]["out"]


@pytest.mark.parametrize("way", benchmark.WAYS)
def test_by_the_rule_that_was_written_before_the_arithmetic_predicts_the_speed_up_within_5_percent(way: str) -> None:
    assert misses(SECOND, way) == {}
    assert not [line for line in of_kind(SECOND, "check") if not line["ok"]]


def test_in_no_single_round_of_that_session_does_it_miss_by_5_percent() -> None:
    lines = of_kind(SECOND, "measurement")
    for number in {line["round"] for line in lines}:
        for one in benchmark.predictions(line for line in lines if line["round"] == number):
            for way in benchmark.WAYS:
                assert one[f"{way}_ratio"] == pytest.approx(1, abs=benchmark.WITHIN)


@pytest.mark.parametrize("name", [TINY, FIRST])
@pytest.mark.parametrize("way", ["log", "client"])
def test_with_the_steps_of_the_same_requests_the_sessions_before_hold_too(way: str, name: str) -> None:
    assert misses(name, way) == {}


def test_a_probe_of_shorter_contexts_misses_since_a_speculative_step_takes_longer_with_more_tokens() -> None:
    assert len(misses(FIRST, "probe")) == 6 and min(misses(FIRST, "probe").values()) > 1
    failed = [line["sentence"] for line in of_kind(FIRST, "check") if not line["ok"]]
    assert len(failed) == 6 and all("streams sent before" in sentence for sentence in failed)
    grown = []
    for line in of_kind(FIRST, "measurement"):
        if line["variant"] == "accept-3" and line["cell"].startswith("c1"):
            rates = [float(match["rate"]) for text in line["log"] if (match := benchmark._LINE.search(text))]
            grown.append(rates[2] / rates[-1])  # after the lines that count the idle time before
    assert median(grown) > 1.05


@pytest.mark.parametrize("name", [TINY, FIRST, SECOND])
def test_the_client_divides_its_decoding_time_by_the_servers_count_of_steps(name: str) -> None:
    for line in of_kind(name, "measurement"):
        measured = line["result"]["measurement"]
        decoding = sum(one["latency_ms"] - one["ttft_ms"] for one in measured["per_request"])
        tokens = sum(one["output_tokens"] - 1 for one in measured["per_request"])
        assert measured["step_ms"] == pytest.approx(decoding / (measured["verify_steps"] or tokens), rel=1e-3)


def test_the_rule_that_the_tiny_models_session_was_run_with_failed_six_times_and_the_documents_say_so() -> None:
    """Its steps were those of streams sent before each measurement, their medians over all rounds."""
    failed = [one for one in of_kind(TINY, "check") if not one["ok"]]
    assert len(failed) == 6 and all("the arithmetic predicts" in one["sentence"] for one in failed)
    told = of_kind(TINY, "prediction")
    assert all(abs(one["probe_predicted"] / one["measured"] - 1) > benchmark.WITHIN for one in told)
    # Those steps taken within each round miss as well, but for one.
    assert sum(abs(one["probe_ratio"] - 1) > benchmark.WITHIN for one in derived(TINY)) == 5
    text = " ".join((REPOSITORY / "tests" / "gpu" / "README.md").read_text().split())
    assert "the check failed in all six cases" in text and "after the data were seen" in text
    for name, ways in ((TINY, ("log", "client")), (SECOND, benchmark.WAYS)):
        for one in derived(name):
            for way in ways:
                assert f"{one[f'{way}_ratio']:.3f}" in text


def test_the_example_report_is_that_of_the_recorded_session(tmp_path: Path) -> None:
    from gpu_benchmark import results, runs

    run = runs.Run(benchmark_run.build(recorded(SECOND), tmp_path / "h200-2026-11-30"))
    made = json.loads(json.dumps(results.build(run, now=recorded(SECOND)[-1]["time"])))
    assert made == json.loads((EXAMPLE / "results.json").read_text())
    for one in made["hosts"][0]["explanations"]:
        assert one["predicted"] == pytest.approx(one["measured"], rel=benchmark.WITHIN)


def test_the_example_report_says_that_its_rounds_are_not_starts() -> None:
    for name in ("report.html", "report.md"):
        text = (EXAMPLE / name).read_text()
        assert "Each server was started once, all 4 side by side on one NVIDIA H200" in text
        assert "53 measurements in 4 starts" in text and "SGLANG_SIMULATE_ACC_LEN" in text


@pytest.mark.parametrize("file", sorted((REPOSITORY / "tests" / "recorded" / "gpu").glob("benchmark-repeats*.json")))
def test_the_repeats_that_the_verdicts_tests_draw_from_are_those_of_the_sessions(file: Path) -> None:
    kept = json.loads(file.read_text())
    lines = [benchmark_run.lines_of(REPOSITORY / session) for session in kept["sessions"]]
    assert kept["starts"] == [start for session in lines for start in benchmark_run.repeats(session)]
    assert sum(len(start["c1"]) for start in kept["starts"]) >= 9


def test_what_is_left_out_of_a_recorded_session_is_put_back_where_it_was_said_again() -> None:
    def line(variant: str, speed: float) -> dict[str, Any]:
        data = {"environment": {"CUDA_HOME": "/c", "AWS_KEY": "x"}, "server_command": variant, "speed": speed}
        return {"kind": "measurement", "variant": variant, "result": {"failed": False, "measurement": data}}

    given = [line("baseline", 1), line("accept-3", 2), line("baseline", 3)]
    short = list(shorten.shortened([*given, {"kind": "swept"}]))
    assert [sorted(one["result"]["measurement"]) for one in short] == [
        ["environment", "server_command", "speed"], ["environment", "server_command", "speed"], ["speed"],
    ]  # fmt: skip
    again = [one["result"]["measurement"] for one in shorten.whole(short)]
    assert again == [{**one["result"]["measurement"], "environment": {"CUDA_HOME": "/c"}} for one in given]


def test_every_variant_comes_first_once_in_as_many_rounds() -> None:
    names = ["a", "b", "c", "d"]
    orders = [benchmark.order(names, number) for number in range(1, 5)]
    assert all(sorted(one) == names for one in orders)
    assert len({tuple(one) for one in orders}) == 4


def test_a_session_that_was_cut_off_becomes_a_run_of_what_it_had(tmp_path: Path) -> None:
    plan = {
        "kind": "benchmark",
        "time": 1796000000.0,
        "shape": {"output_length": 512},
        "variants": [{"name": "baseline"}, {"name": "accept-3"}],
        "cells": [{"name": "c1", "concurrency": 1}],
    }
    failed = measurement("accept-3", 2, 1.0, None, 1.0, 1.0)
    failed["result"] = {"failed": True, "msg": "The server died.", "measurement": None}
    whole = [{"kind": "session", "date": "x"}, plan, measurement("baseline", 1, 500.0, None, 2.0, 2.1), failed]
    session = tmp_path / "session.jsonl"
    session.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"kind": "measurement", "rou')
    benchmark_run.build(benchmark_run.lines_of(session), tmp_path / "run")
    from gpu_benchmark import runs

    run = runs.Run(tmp_path / "run")
    assert [one.key for one in run.measurements(benchmark_run.HOST)] == [(1, "baseline", "c1", 1)]
    assert [one.cause for one in run.failures(benchmark_run.HOST)] == ["The server died."]


# The client that has its imports done


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """A warm client whose packages are empty ones."""
    for package in ("sglang", "sglang/benchmark", "transformers"):
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").touch()
    (tmp_path / "site" / "sglang" / "benchmark" / "serving.py").write_text("imported = []\n")
    door, target = tmp_path / "door", tmp_path / "python"
    subprocess.run([sys.executable, str(WARM_CLIENT), "program", str(door), str(target)], check=True)
    server = subprocess.Popen(
        [sys.executable, str(WARM_CLIENT), "serve", str(door), ""], env={"PYTHONPATH": str(tmp_path / "site")}
    )
    assert procs.wait_until(door.exists, 60)
    yield target
    server.kill()
    server.wait()


SCRIPT = """
import os, sys, sglang.benchmark.serving as client
client.imported.append(1)
print(len(client.imported), sys.argv[1:], os.environ.get("WORD"), os.getcwd())
sys.exit(int(sys.argv[1]))
"""


def test_a_warm_client_is_a_python_with_the_callers_words_variables_output_and_status(
    program: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for status in (0, 3):
        done = subprocess.run(
            [str(program), str(script), str(status), "b c"],
            env={"WORD": "here"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.split(" ", 1) == ["1", f"['{status}', 'b c'] here {tmp_path}\n"]


def test_a_warm_client_ends_with_its_caller(program: Path, tmp_path: Path) -> None:
    script, pid_file = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    caller = subprocess.Popen([str(program), str(script)])
    assert procs.wait_until(lambda: pid_file.exists() and pid_file.read_text(), 60)
    client = procs.read_facts(int(pid_file.read_text()))
    assert client is not None
    caller.kill()
    caller.wait()
    assert procs.wait_until(lambda: not procs.is_alive(client.key), 60)
