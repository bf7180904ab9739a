"""A measurement from its begin to its figures, on the stand-in server and with the stand-in of SGLang's client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_control import measuring
from gpu_host import arguments, server_record, serving_benchmark
from gpu_host.deadline import Deadline
from gpu_host.procfs import Proc
from gpu_host.serving_benchmark import Server, Worker

from simulator.host import STANDIN, SimulatedHost
from simulator.host import Server as StandIn

ROOT = Path(__file__).resolve().parents[2]
KEY = "s3cret-k3y"
CALL = "import json, sys; sys.path[:0] = [sys.argv[1]]; from gpu_host import serving_benchmark as s; " + (
    "s.FOLLOWED_SECONDS, s.LOCK_SECONDS, s.IDLE_SECONDS = 1.5, 5.0, 4.0; print(json.dumps(s.run(json.load(sys.stdin))))"
)
OLD_CLIENT = """
import sys
if __name__ == "__main__":
    sys.path[:0] = [{standin!r}]
    del sys.modules["sglang"]
    from sglang.benchmark.serving import cli_main as main
    main()
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.fixture(scope="module")
def server(host: SimulatedHost) -> StandIn:
    """Two GPUs, 20 ms a verification, accept length 2.1, behind a key."""
    settings: dict[str, object] = {"verify_seconds": 0.02, "accept_length": 2.1, "memory_mib": 30000}
    key = ("--api-key", KEY)
    return recorded(host.start_server("measured", gpus=[2, 3], arguments=key, **settings).wait_ready())


def recorded(server: StandIn, name: str = "") -> StandIn:
    """With the record that server_launch writes."""
    proc = Proc()
    process = proc.process(server.main_pid)
    assert process is not None
    record = server_record.from_process(proc, process, [gpu.uuid for gpu in server.host.gpus.gpus()[2:4]])
    assert record is not None
    server_record.save(replace(record, name=name or server.main.name), str(server.host.folder / "host-state"))
    return server


def dataset(count: int) -> str:
    talks = [
        {"conversations": [{"from": "human", "value": f"Why {'so ' * n}?"}, {"from": "gpt", "value": "So."}]}
        for n in range(count)
    ]
    return json.dumps(talks)


def params(host: SimulatedHost, name: str = "measured", **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {option: facts.get("default") for option, facts in arguments.SERVING_BENCHMARK.items()}
    given.update(
        name=name,
        python=sys.executable,
        dataset=dataset(12),
        concurrency=2,
        output_length=64,
        sample_seconds=0.05,
        timeout=60.0,
        environment={"PYTHONPATH": str(STANDIN), "SGLANG_STANDIN_CLIENT_PAUSE": "0"},
        state_folder=str(host.folder / "host-state"),
    )
    given["environment"] = {**given["environment"], **changes.pop("variables", {})}
    return {**given, **changes}


def call(host: SimulatedHost, wanted: dict[str, Any]) -> dict[str, Any]:
    """One call of the module, in a process of its own as on a host."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(ROOT / "module_utils")],
        input=json.dumps(wanted), env=host.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


def left(host: SimulatedHost) -> list[str]:
    """What measurements have left behind: nothing but the locks' files."""
    return [name for name in os.listdir(host.folder / "host-state" / "benchmark") if not name.endswith(".lock")]


def test_a_measurement_finds_step_time_acceptance_energy_and_memory_again(host: SimulatedHost, server: StandIn) -> None:
    result = call(host, params(host))
    assert result["failed"] is False, result["msg"]
    found = result["measurement"]
    assert found["accept_length"] == pytest.approx(2.1, rel=0.05)
    assert found["accept_length_source"] == "requests"
    assert found["step_ms"] == pytest.approx(20, rel=0.05)
    assert found["output_tokens_per_s_per_request"] == pytest.approx(2.1 / 0.02, rel=0.05)
    assert (found["requested"], found["completed"], found["failed_requests"]) == (12, 12, 0)
    assert found["output_tokens"] == 12 * 64 == sum(one["output_tokens"] for one in found["per_request"])
    # Two idle GPUs of 30 W each, as the double has it.
    assert found["gpu"]["watts_mean"] == pytest.approx(60)
    assert found["gpu"]["joules"] == pytest.approx(60 * found["duration_s"], rel=0.1)
    assert found["gpu"]["tokens_per_joule"] == pytest.approx(found["output_tokens"] / found["gpu"]["joules"])
    uuids = [gpu.uuid for gpu in host.gpus.gpus()[2:4]]
    assert found["gpu"]["memory_mib"] == dict.fromkeys(uuids, 30000)
    assert found["versions"]["driver"].endswith("-simulated") and found["client_module"] == "sglang.benchmark.serving"
    assert found["not_measured"] == {} and found["problems"] == []
    assert found["server_arguments"]["speculative_num_steps"] == 3
    assert left(host) == []
    # The client had the server's key; nothing that is shown has it.
    assert KEY not in json.dumps(result) and "--api-key '***'" in found["server_command"]


def test_the_same_prompts_in_the_same_order_give_the_same_texts(host: SimulatedHost, server: StandIn) -> None:
    few = params(host, num_prompts=6, output_length=8)
    first, again = call(host, few)["measurement"], call(host, few)["measurement"]
    assert (first["prompt_set"], first["output_sha256"]) == (again["prompt_set"], again["output_sha256"])
    lengths = [one["output_tokens"] for one in first["per_request"]]
    assert lengths == [8] * 6


def test_the_stand_in_of_the_client_writes_what_the_real_one_was_recorded_to_write(
    host: SimulatedHost, server: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "prompts.json").write_text(dataset(3))
    words = ["--backend", "sglang", "--base-url", f"http://127.0.0.1:{server.port}", "--dataset-name", "sharegpt"]
    words += ["--dataset-path", str(tmp_path / "prompts.json"), "--num-prompts", "3", "--sharegpt-output-len", "8"]
    words += ["--max-concurrency", "2", "--output-file", str(tmp_path / "out.jsonl"), "--flush-cache"]
    environment = {**host.environment(), "OPENAI_API_KEY": KEY, "SGLANG_STANDIN_CLIENT_PAUSE": "0"}
    for module in ("sglang.benchmark.serving", "sglang.bench_serving"):
        subprocess.run([sys.executable, "-m", module, *words], env=environment, check=True, capture_output=True)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    recorded_one = json.loads((ROOT / "tests/recorded/gpu/bench_serving-eagle3-simulated-accept-3.jsonl").read_text())
    for one in written:
        assert list(one) == list(recorded_one)
        differing = {name for name in one if type(one[name]) is not type(recorded_one[name])}
        assert differing <= {"sharegpt_output_len", "accept_length"}  # a number here, nothing there, or the other way
        assert one["completed"] == 3 and one["request_rate"] == float("inf")


def test_calls_of_one_task_follow_one_measurement_with_lines_of_progress(host: SimulatedHost, server: StandIn) -> None:
    lines = []
    wanted = params(host, task="followed", patience=0.7)
    while (result := call(host, wanted)).get("unfinished"):
        lines.append(result["progress"])
    assert result["failed"] is False, result["msg"]
    assert any("of 12 requests" in line and "s left" in line for line in lines), lines
    assert all(line.startswith("measured, 2 at a time: ") for line in lines)


def test_without_a_word_in_the_answers_the_servers_counters_tell_and_a_short_run_tells_nothing(
    host: SimulatedHost,
) -> None:
    server = recorded(
        host.start_server("silent", gpus=[2], verify_seconds=0.005, memory_mib=1000, no_spec_meta=1).wait_ready()
    )
    long = call(host, params(host, "silent", concurrency=4))["measurement"]
    short = call(host, params(host, "silent", num_prompts=1, concurrency=1, output_length=16))["measurement"]
    server.main.send(signal.SIGKILL)
    assert long["accept_length"] == pytest.approx(2.88, rel=0.05)
    assert long["accept_length_source"] == "server_counters"
    assert short["accept_length"] is None and short["verify_steps"] is None and short["step_ms"] is None
    assert "they do every 40 steps" in short["not_measured"]["accept_length"]


def test_a_client_under_its_old_name_alone_is_run_as_it_is(
    host: SimulatedHost, server: StandIn, tmp_path: Path
) -> None:
    package = tmp_path / "old" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bench_serving.py").write_text(OLD_CLIENT.format(standin=str(STANDIN)))
    result = call(host, params(host, environment={"PYTHONPATH": str(package.parent)}))
    assert result["failed"] is False, result["msg"]
    found = result["measurement"]
    assert found["client_module"] == "sglang.bench_serving"
    assert found["problems"][0].startswith("This version of the client keeps no accept length for each request")
    assert found["accept_length_source"] == "server_counters"
    assert found["accept_length"] == pytest.approx(2.1, rel=0.05)
    assert found["gpu"]["joules"] == pytest.approx(60 * found["duration_s"], rel=0.1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("import", "can't be imported by"),
        ("exit", "ended with status 1. Its last words: RuntimeError: the client was told to fail"),
        ("silent", "wrote no result"),
        ("nan", "has nan as mean_itl_ms"),
        ("cut", "is cut off"),
        ("twice", "holds 2 results"),
        ("missing", "has no median_ttft_ms"),
    ],
)
def test_a_client_that_fails_or_writes_nonsense_is_told_in_one_sentence(
    host: SimulatedHost, server: StandIn, fault: str, words: str
) -> None:
    small = params(host, num_prompts=2, output_length=4, variables={"SGLANG_STANDIN_CLIENT": fault})
    result = call(host, small)
    assert result["failed"] is True and result["measurement"] is None and result["server_alive"] is True
    assert words in result["msg"]
    assert left(host) == []


def test_a_client_that_never_ends_is_ended_at_the_deadline(host: SimulatedHost, server: StandIn) -> None:
    variables = {"SGLANG_STANDIN_CLIENT": "slow"}
    result = call(host, params(host, num_prompts=2, output_length=4, timeout=4.0, variables=variables))
    assert "After 4 s only 2 of 2 requests were answered" in result["msg"]
    assert clients(host) == []


def clients(host: SimulatedHost) -> list[int]:
    """Pids of the host's benchmark clients that run."""
    own = str(host.folder)
    return [
        pid
        for pid, one in Proc().snapshot().items()
        if any("bench_client.py" in word and own in word for word in one.argv)
    ]


def test_a_server_that_dies_half_way_is_named_with_how_far_it_came(host: SimulatedHost) -> None:
    settings: dict[str, object] = {"verify_seconds": 0.02, "memory_mib": 1000, "die_after_requests": 8}
    times: dict[str, object] = {"crash_seconds": 0.1, "coredump_seconds": 0.1, "watch_seconds": 0.1}
    recorded(host.start_server("dying", gpus=[2], **settings, **times).wait_ready())
    result = call(host, params(host, "dying"))
    assert result["failed"] is True and result["server_alive"] is False
    assert "The server dying died while it was measured, after " in result["msg"]
    told = measuring.completed(result)
    assert told["diagnosis"]["id"] == "illegal-memory-access" and "log_tail" not in told
    assert clients(host) == [] and left(host) == []


def test_a_request_that_fails_fails_the_measurement_in_the_servers_words_and_keeps_the_rest(
    host: SimulatedHost,
) -> None:
    settings: dict[str, object] = {"verify_seconds": 0.002, "memory_mib": 1000, "refuse_every": 5}
    server = recorded(host.start_server("refusing", gpus=[2], **settings).wait_ready())
    result = call(host, params(host, "refusing", warmup=2, concurrency=1))
    server.main.send(signal.SIGKILL)
    assert result["failed"] is True and result["server_alive"] is True
    assert re.search(r"^2 of 12 requests failed \(Service Unavailable: .*too busy", result["msg"]), result["msg"]
    found = result["measurement"]
    assert (found["requested"], found["completed"], found["failed_requests"]) == (12, 10, 2)
    assert len(found["per_request"]) == 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "nobody"}, "There is no record of a server nobody on this host"),
        ({"python": "/nowhere/python"}, "There is no Python /nowhere/python on this host"),
        ({"dataset": "[]"}, "has no usable prompt among 0 conversations"),
        ({"dataset": "", "prompts": ""}, "No prompts are given"),
        ({"num_prompts": 50}, "has 12 usable prompts, 50 are asked for"),
        ({"num_prompts": 12, "input_length": 4}, "only so many prompts have at most 4 tokens"),
        ({"num_prompts": 12, "input_length": 2}, "None of the prompts has at most serving_benchmark_input_length"),
    ],
)
def test_what_can_not_be_measured_is_refused_by_name(
    host: SimulatedHost, server: StandIn, changes: dict[str, Any], words: str
) -> None:
    result = call(host, params(host, **changes))
    assert result["failed"] is True
    assert words in result["msg"], result["msg"]


def test_a_dead_server_and_a_busy_one_are_not_measured(host: SimulatedHost) -> None:
    server = recorded(host.start_server("idle", gpus=[4], memory_mib=1000, speed=10, verify_seconds=1).wait_ready())
    body = json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 2000}})
    url = f"http://127.0.0.1:{server.port}/generate"
    with subprocess.Popen(
        [sys.executable, "-c", "import sys, urllib.request; urllib.request.urlopen(*map(str.encode, sys.argv[2:])"
         " and [urllib.request.Request(sys.argv[1], sys.argv[2].encode())])", url, body]
    ) as other:  # fmt: skip
        wait(lambda: '"num_running_reqs": 1' in server.request("/v1/loads")[1])
        busy = call(host, params(host, "idle"))
        other.kill()
    server.main.send(signal.SIGKILL)
    wait(lambda: not server.main.alive())
    assert "The server idle is busy with 1 requests of others" in busy["msg"]
    assert "The server idle does not run" in call(host, params(host, "idle"))["msg"]


def wait(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_measurements_of_one_server_at_once_are_refused_and_one_that_nobody_follows_gives_way(
    host: SimulatedHost, server: StandIn
) -> None:
    long = params(host, task="first", patience=0.5, output_length=2000)
    assert call(host, long)["unfinished"]
    folder = host.folder / "host-state" / "benchmark" / "first"
    followed = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.2)",
         str(folder / "followed")]
    )  # fmt: skip
    refused = call(host, params(host, task="second"))
    followed.kill()
    followed.wait()
    assert "The server measured is being measured already (task first)" in refused["msg"]
    given_way = call(host, params(host, task="third", num_prompts=2, output_length=4))
    assert given_way["failed"] is False, given_way["msg"]
    assert not folder.exists()


def test_a_measurement_whose_process_is_killed_says_so_and_leaves_nothing(host: SimulatedHost, server: StandIn) -> None:
    wanted = params(host, task="killed", patience=0.5, output_length=2000)
    wait(lambda: call(host, wanted).get("unfinished") and "pid" in _status(host, "killed"))
    os.kill(_status(host, "killed")["pid"], signal.SIGKILL)
    result = call(host, wanted)
    assert "The measurement ended without a word" in result["msg"]
    wait(lambda: not clients(host))
    assert left(host) == []


def _status(host: SimulatedHost, task: str) -> dict[str, Any]:
    try:
        return dict(json.loads((host.folder / "host-state" / "benchmark" / task / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def test_a_wall_clock_that_jumps_meanwhile_is_told_and_the_durations_stand(
    host: SimulatedHost, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in host.reset_environment().items():
        monkeypatch.setenv(name, value)
    wanted = params(host, num_prompts=4, state_folder=str(host.folder / "host-state"))
    made = serving_benchmark._Call(wanted)
    seen: Server = made._server(made._record(), Deadline(5.0))
    for name in (serving_benchmark.CLIENT, serving_benchmark.DATASET):
        (tmp_path / name).write_text(made._text(name, made._prompts()))
    began = time.monotonic()
    moments = iter((1000.0, 1000.0 + 7200.0))
    Worker(str(tmp_path), wanted, seen, made._prompts(), wall=lambda: next(moments)).run()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failed"] is False, result["msg"]
    assert result["measurement"]["clock_jump_s"] == pytest.approx(7200, abs=time.monotonic() - began)
    assert "The host's clock was set by +7" in result["problems"][0]
    assert result["measurement"]["step_ms"] == pytest.approx(20, rel=0.05)


# The control node's part


def test_the_prompts_are_read_on_the_control_node_from_the_repository_too(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"dataset": "", "prompts": "data/prompts/chat.json", "num_prompts": 3, "input_length": 0}
    assert measuring.take_prompts(wanted, ROOT) == []
    assert len(json.loads(wanted["dataset"])) == 3
    capped = {**wanted, "dataset": "", "input_length": 100}
    assert measuring.take_prompts(capped, ROOT) == [] and len(json.loads(capped["dataset"])) == 24
    (tmp_path / "empty.json").write_text("")
    for prompts, words in (
        ("", "no file is named"),
        ("data/prompts/none.json", "none.json can't be read: No such file"),
        (str(tmp_path / "empty.json"), "empty.json is empty"),
    ):
        [problem] = measuring.take_prompts({**wanted, "dataset": "", "prompts": prompts}, ROOT)
        assert words in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": 0}, "concurrency: 0 is too small; give 1 or more"),
        ({"output_length": 3}, "output_length: 3 is too small; give 4 or more tokens"),
        ({"num_prompts": -1}, "num_prompts: -1 is too small"),
        ({"num_prompts": 2, "concurrency": 3}, "2 prompts can't keep 3 requests at a time busy"),
        ({"input_length": 9}, "with input_length say how many"),
        ({"sample_seconds": 0.0}, "sample_seconds: 0.0 is no interval"),
        ({"sample_seconds": float("nan")}, "sample_seconds: nan is no interval"),
        ({"temperature": -1.0}, "temperature: -1.0 is none"),
        ({"task": "../x"}, "would be no file name"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {option: facts.get("default") for option, facts in arguments.SERVING_BENCHMARK.items()}
    assert arguments.benchmark_problems(given) == []
    [problem] = arguments.benchmark_problems({**given, **changes})
    assert words in problem
