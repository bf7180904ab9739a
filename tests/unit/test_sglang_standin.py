"""Holds the stand-in server against what real SGLang was recorded to do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from simulator.host import (
    STANDIN,
    HostError,
    Server,
    SimulatedHost,
    free_port,
    session_processes,
    start_ticks,
    wait_for,
    wait_gone,
)

RECORDED = yaml.safe_load((Path(__file__).parent / "cases" / "sglang_log_lines.yml").read_text())
RECORDED_LOGS = Path(__file__).resolve().parent.parent / "recorded"
GENERATE = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}}


def normalized(text: str) -> list[str]:
    """The log's own lines as in the recorded cases: no ranks, requests or bars; numbers as N."""
    found = []
    for line in text.splitlines():
        if re.match(r"\[\d{4}-", line) and not re.search(r"(GET|POST) /", line):
            line = re.sub(r"^\[[\d\- :]+( TP\d)?\] ", "", line)
            line = re.sub(r"server_args=.*", "server_args", line)
            line = re.sub(r"\[[\d, ]+\]", "LIST", line)
            line = re.sub(r"type=\w+", "type=T", line)
            found.append(re.sub(r"\d+(\.\d+)?", "N", line))
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.fixture(scope="module")
def ready(host: SimulatedHost) -> Server:
    """A TP-2 server with EAGLE-3 that no test ends."""
    return host.start_server("shared", gpus=[0, 1], memory_mib=30000, speed=10).wait_ready()


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def open_nodes(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if re.search(r"/dev/nvidia(\d|ctl)", target):
                found.add(Path(target).name)
    return found


def request_in_background(server: Server, tokens: int, timeout: float = 60) -> list[tuple[int, str]]:
    """Send a request that is still running when this returns; its answer comes into the list."""
    answers: list[tuple[int, str]] = []
    body = {"text": "hello", "sampling_params": {"max_new_tokens": tokens}}
    threading.Thread(target=lambda: answers.append(server.request("/generate", body, timeout)), daemon=True).start()
    return answers


# Start-up


@pytest.mark.parametrize(("case", "eagle3"), [("start with EAGLE-3", True), ("start without speculation", False)])
def test_the_startup_log_has_the_recorded_lines_in_the_recorded_order(
    host: SimulatedHost, case: str, eagle3: bool
) -> None:
    server = host.start_server(f"log-{eagle3}", gpus=[2], memory_mib=1000, eagle3=eagle3, speed=10).wait_ready()
    server.main.send(signal.SIGKILL)
    printed = normalized(server.log_text())
    assert printed[: printed.index("The server is fired up and ready to roll!") + 1] == RECORDED[case]


def test_the_tree_is_sglangs_main_under_its_own_command_line_and_titled_workers_in_one_session(ready: Server) -> None:
    lines = ready.processes()
    assert lines[ready.main_pid].startswith(f"{sys.executable} -m sglang.launch_server --model-path")
    titles = sorted(line for line in lines.values() if line.startswith("sglang::"))
    assert titles == ["sglang::detokenizer", "sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    rest = [line for line in lines.values() if not line.startswith("sglang::") and "sglang.launch_server" not in line]
    assert len([line for line in rest if "multiprocessing.resource_tracker import main" in line]) == 1
    assert len([line for line in rest if "/torch/_inductor/compile_worker/__main__.py --pickler=" in line]) == 4
    assert len(rest) == 5


def test_one_gpu_gives_a_scheduler_without_rank(host: SimulatedHost) -> None:
    server = host.start_server("single", gpus=[2], memory_mib=1000, speed=20).wait_ready()
    server.main.send(signal.SIGKILL)
    assert "sglang::scheduler" not in server.log_text()
    assert [line for line in server.log_text().splitlines() if " TP0]" in line] == []


def test_the_console_script_has_its_own_true_command_line(host: SimulatedHost) -> None:
    server = host.start_server("console", gpus=[2], memory_mib=1000, console_script=True, speed=20).wait_ready()
    line = server.processes()[server.main_pid]
    server.main.send(signal.SIGKILL)
    assert line.startswith(f"{sys.executable} {STANDIN}/bin/sglang serve --model-path")


def test_the_run_id_is_in_the_environment_of_children_and_not_of_main(ready: Server) -> None:
    assert b"SGLANG_RUN_ID" not in environment_of(ready.main_pid)
    found = set()
    for pid in ready.processes():
        if pid != ready.main_pid:
            found |= {entry for entry in environment_of(pid).split(b"\0") if entry.startswith(b"SGLANG_RUN_ID=")}
    assert len(found) == 1
    assert re.fullmatch(rb"SGLANG_RUN_ID=sglang-run-\d+\.\d+-\d+", found.pop())


def test_a_blanked_environment_is_all_zero_bytes(host: SimulatedHost) -> None:
    server = host.start_server("blank", gpus=[2], memory_mib=1000, blank_environ=True, speed=20).wait_ready()
    read = environment_of(server.scheduler_pids[0])
    server.main.send(signal.SIGKILL)
    assert read
    assert set(read) == {0}


def test_every_process_but_the_tracker_holds_every_node_and_only_schedulers_hold_memory(
    host: SimulatedHost, ready: Server
) -> None:
    nodes = {f"nvidia{number}" for number in range(8)} | {"nvidiactl"}
    without = [line for pid, line in ready.processes().items() if open_nodes(pid) != nodes]
    assert len(without) == 1
    assert "resource_tracker" in without[0]
    assert [host.gpus.owners(index) for index in (0, 1)] == [{pid: 30000} for pid in ready.scheduler_pids]


def test_a_scheduler_maps_its_own_gpus_node_three_times_and_others_twice(host: SimulatedHost, ready: Server) -> None:
    minor = host.gpus.gpus()[1].minor
    maps = Path(f"/proc/{ready.scheduler_pids[1]}/maps").read_text()
    counts = {number: len(re.findall(rf"/dev/nvidia{number}$", maps, re.M)) for number in range(8)}
    assert counts == {number: 3 if number == minor else 2 for number in range(8)}


def test_cuda_visible_devices_and_base_gpu_id_choose_the_gpu(host: SimulatedHost) -> None:
    chosen = host.start_server("visible", gpus=[6, 4], memory_mib=1000, eagle3=False, speed=20)
    based = host.start_server("based", gpus=[5], memory_mib=1000, eagle3=False, speed=20)
    for server in (chosen, based):
        server.wait_ready()
    first, second = chosen.scheduler_pids
    assert first in host.gpus.owners(6)
    assert second in host.gpus.owners(4)
    assert based.scheduler_pids[0] in host.gpus.owners(5)
    for server in (chosen, based):
        server.main.send(signal.SIGKILL)


def test_a_worker_can_have_another_title(host: SimulatedHost) -> None:
    server = host.start_server("renamed", gpus=[2, 3], memory_mib=1000, rename_worker="python3", speed=20).wait_ready()
    lines = list(server.processes().values())
    server.main.send(signal.SIGKILL)
    assert "python3" in lines
    assert "sglang::scheduler_TP1" not in lines


# Answers


def test_the_endpoints_answer_with_the_recorded_fields(ready: Server) -> None:
    assert ready.request("/health")[0] == 200
    assert ready.request("/ready")[0] == 404
    assert json.loads(ready.request("/v1/models")[1])["data"][0]["owned_by"] == "sglang"
    assert json.loads(ready.request("/get_model_info")[1]) == json.loads(ready.request("/model_info")[1])
    assert "sglang:spec_accept_length{" in ready.request("/metrics")[1]
    assert json.loads(ready.request("/v1/loads")[1])["loads"][0]["num_running_reqs"] == 0
    info = json.loads(ready.request("/server_info")[1])
    assert info["version"] == "0.5.17"
    assert info["status"] == "ready"
    assert info["tp_size"] == 2
    assert info["speculative_num_draft_tokens"] == 4
    assert set(info["startup_time"]) == {
        "load_weight",
        "kv_cache_allocation",
        "scheduler_e2e",
        "cuda_graph",
        "tokenizer_e2e",
    }
    assert {"last_gen_throughput", "memory_usage", "startup_time", "model_path"} <= set(info["internal_states"][0])
    assert len(info) > 400


def test_a_generation_tells_how_much_was_accepted(ready: Server) -> None:
    status, text = ready.request("/generate", GENERATE)
    meta = json.loads(text)["meta_info"]
    assert status == 200
    assert meta["completion_tokens"] == 16
    assert meta["spec_accept_length"] == pytest.approx(16 / meta["spec_verify_ct"])
    assert meta["finish_reason"] == {"type": "length", "length": 16}


def test_chat_and_completions_answer_in_openais_shape(ready: Server) -> None:
    chat = {"model": "any", "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 5}
    answer = json.loads(ready.request("/v1/chat/completions", chat)[1])
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 5
    status, stream = ready.request("/v1/completions", {"prompt": "x", "max_tokens": 5, "stream": True})
    assert status == 200
    assert stream.startswith("data: {")
    assert stream.endswith("data: [DONE]\n\n")


def test_accept_length_is_absent_until_forty_steps_and_after_an_idle_flush(ready: Server) -> None:
    def accepted() -> float | None:
        return json.loads(ready.request("/server_info")[1])["internal_states"][0].get("avg_spec_accept_length")

    assert ready.request("/flush_cache", {})[0] == 200
    ready.request("/generate", GENERATE)
    assert accepted() is None
    ready.request("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 200}})
    assert accepted() == pytest.approx(2.88, abs=0.1)
    assert "accept len: 2.8" in ready.log_text()
    ready.request("/flush_cache", {})
    assert accepted() is None


def test_the_wrong_algorithm_name_serves_and_accepts_nothing(host: SimulatedHost) -> None:
    arguments = ["--speculative-algorithm", "EAGLE"]
    server = host.start_server("eagle", gpus=[2], memory_mib=1000, arguments=arguments, speed=20).wait_ready()
    server.request("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 60}})
    server.main.send(signal.SIGKILL)
    assert "accept len: 1.00, accept rate: 0.00" in server.log_text()


def test_an_api_key_is_asked_for_and_shown_in_log_and_server_info(host: SimulatedHost) -> None:
    arguments = ["--api-key", "geheim"]
    server = host.start_server("key", gpus=[2], memory_mib=1000, arguments=arguments, speed=20).wait_ready()
    answers = [server.request(path)[0] for path in ("/model_info", "/health")]
    server.main.send(signal.SIGKILL)
    assert answers == [401, 200]
    assert "api_key='geheim'" in server.log_text()


# Ends


def run_as_child(host: SimulatedHost, **settings: str) -> subprocess.Popen[bytes]:
    """A server that is this process's child, so that its exit status can be read; dies when told by its settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/x", "--port", str(free_port())],
        env={**host.environment(), "SGLANG_STANDIN_NO_GPU": "1", "SGLANG_STANDIN_SPEED": "20", **settings},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(("version", "status"), [("0.5.17", -signal.SIGKILL), ("0.5.23", 0)])
def test_sigterm_while_idle_ends_the_tree_with_the_versions_exit_status(
    host: SimulatedHost, version: str, status: int
) -> None:
    child = run_as_child(host, SGLANG_STANDIN_VERSION=version)
    assert child.stderr is not None
    printed = ""
    while "ready to roll" not in printed:
        printed += child.stderr.readline().decode()
    child.terminate()
    printed += child.stderr.read().decode()
    assert child.wait(10) == status
    wait_for(lambda: not session_processes(child.pid), "the end of the tree", 3)
    if version == "0.5.17":
        ending = normalized(printed)
        assert ending[ending.index(RECORDED["SIGTERM while idle"][0]) :] == RECORDED["SIGTERM while idle"]


def test_sigterm_waits_for_the_running_request_while_health_says_503(host: SimulatedHost) -> None:
    server = host.start_server("drain", gpus=[2], memory_mib=1000, speed=20, verify_seconds=0.4).wait_ready()
    answers = request_in_background(server, 200)
    wait_for(lambda: "#new-token: 1," in server.log_text(), "the request", 10)
    server.main.send(signal.SIGTERM)
    wait_for(lambda: "SIGTERM received" in server.log_text(), "the handler", 10)
    assert server.request("/health")[0] == 503
    wait_gone([server.main_pid], 20)
    wait_for(lambda: answers, "the answer", 5)
    assert answers[0][0] == 200
    assert json.loads(answers[0][1])["meta_info"]["completion_tokens"] == 200
    assert "Remaining number of requests 1." in server.log_text()


def test_a_dead_scheduler_takes_the_rest_down_after_a_while(host: SimulatedHost) -> None:
    server = host.start_server("crash", gpus=[2], memory_mib=1000, speed=10).wait_ready()
    os.kill(server.titled("sglang::scheduler")[0], signal.SIGKILL)
    wait_for(lambda: "Sleeping" in server.log_text(), "the crash", 10)
    assert server.main.alive()
    assert host.gpus.owners(2) == {}
    wait_gone([server.main_pid], 10)
    printed = normalized(server.log_text())
    assert printed[printed.index(RECORDED["scheduler killed"][0]) :] == RECORDED["scheduler killed"]
    wait_for(lambda: not server.processes(), "the rest of the tree", 3)


def test_sigkill_for_a_ready_main_takes_the_workers_along(host: SimulatedHost) -> None:
    server = host.start_server("killed", gpus=[2, 3], memory_mib=1000, speed=10).wait_ready()
    titled = server.titled("sglang::")
    server.main.send(signal.SIGKILL)
    wait_gone(titled, 1)
    assert host.gpus.owners(2) == {}
    wait_for(lambda: not server.processes(), "the inductor workers, which look once a second", 3)


def test_workers_that_outlive_their_main_keep_title_and_memory(host: SimulatedHost) -> None:
    server = host.start_server("outlived", gpus=[2], memory_mib=1000, speed=10, outlive_main=True).wait_ready()
    scheduler = server.titled("sglang::scheduler")[0]
    server.main.send(signal.SIGKILL)
    wait_gone([server.main_pid], 5)
    time.sleep(0.3)
    assert host.gpus.owners(2) == {scheduler: 1000}
    assert server.request("/model_info")[0] == 0
    stop(host, server)


def test_a_main_killed_during_import_leaves_orphans_that_take_the_gpu_later(host: SimulatedHost) -> None:
    server = host.start_server("orphans", gpus=[2], memory_mib=1000, import_seconds=1, orphan_seconds=1)
    spawned = "from multiprocessing.spawn import spawn_main"
    wait_for(lambda: sum(spawned in line for line in server.processes().values()) == 2, "two children", 10)
    time.sleep(0.2)
    server.main.send(signal.SIGKILL)
    wait_gone([server.main_pid], 5)
    left = server.processes()
    assert [spawned in line or "resource_tracker" in line for line in left.values()] == [True] * 3
    assert host.gpus.owners(2) == {}
    wait_for(lambda: host.gpus.owners(2), "the orphan's memory", 10)
    (owner,) = host.gpus.owners(2)
    assert owner in left
    assert server.processes()[owner] == "sglang::scheduler"
    wait_gone([owner], 10)
    printed = normalized(server.log_text())
    assert printed[-3:] == RECORDED["main killed during import"]
    assert "BrokenPipeError: [Errno 32] Broken pipe" in server.log_text()
    wait_for(lambda: len(server.processes()) == 2, "detokenizer and tracker alone", 3)
    assert sorted(server.processes().values())[1] == "sglang::detokenizer"
    stop(host, server)


def test_a_stopped_scheduler_hangs_what_needs_it_and_nothing_else(host: SimulatedHost) -> None:
    server = host.start_server("hung", gpus=[2, 3], memory_mib=1000, speed=20, health_timeout_seconds=10).wait_ready()
    os.kill(server.scheduler_pids[1], signal.SIGSTOP)
    answers = request_in_background(server, 5, timeout=3)
    time.sleep(0.1)
    assert server.request("/health")[0] == 503
    assert server.request("/server_info", timeout=0.3)[0] == 0
    assert [server.request(path)[0] for path in ("/model_info", "/v1/models", "/metrics")] == [200] * 3
    assert len(host.gpus.owners(2)) == 1
    assert answers == []
    server.main.send(signal.SIGKILL)
    wait_for(lambda: not server.titled("sglang::"), "the end of the tree, stopped or not", 1)


def test_sigterm_never_ends_a_hung_server_with_a_request_waiting(host: SimulatedHost) -> None:
    server = host.start_server("deaf", gpus=[2], memory_mib=1000, speed=50).wait_ready()
    os.kill(server.titled("sglang::scheduler")[0], signal.SIGSTOP)
    request_in_background(server, 5)
    time.sleep(0.1)
    server.main.send(signal.SIGTERM)
    wait_for(lambda: server.log_text().count("Remaining number of requests 1.") >= 5, "five looks", 10)
    assert server.main.alive()
    server.main.send(signal.SIGKILL)


def test_sigterm_after_a_failed_health_check_ends_in_diagnostics_that_outlast_a_grace(host: SimulatedHost) -> None:
    """As recorded from sglang 0.5.23: "force exiting" takes more than a minute."""
    server = host.start_server("unhealthy", gpus=[2], memory_mib=1000, speed=50).wait_ready()
    os.kill(server.titled("sglang::scheduler")[0], signal.SIGSTOP)
    assert server.request("/health")[0] == 503
    server.main.send(signal.SIGTERM)
    wait_for(lambda: "for CUDA coredumps before exiting." in server.log_text(), "the diagnostics", 20)
    assert server.main.alive()
    assert host.gpus.owners(2) != {}
    recorded = (RECORDED_LOGS / "cpu" / "eagle3-scheduler-stopped-then-reset.log").read_text()
    said, mine = ([line[:38] for line in normalized(text)] for text in (recorded, server.log_text()))
    begin = "Signal SIGTERM received while health check failed. Force exiting."[:38]
    assert mine[mine.index(begin) :] == said[said.index(begin) :]
    wait_gone([server.main_pid], 30)


def test_a_waiting_request_whose_client_left_is_aborted(host: SimulatedHost) -> None:
    server = host.start_server("left", gpus=[2], memory_mib=1000, speed=20).wait_ready()
    os.kill(server.titled("sglang::scheduler")[0], signal.SIGSTOP)
    assert server.request("/generate", GENERATE, timeout=0.2)[0] == 0
    wait_for(lambda: "Request is disconnected from the client side (type 1)" in server.log_text(), "the abort", 5)
    server.main.send(signal.SIGKILL)


def test_sigterm_while_loading_ends_main_at_once_unless_it_ignores_it(host: SimulatedHost) -> None:
    plain = host.start_server("term-plain", gpus=[2], memory_mib=1000, load_seconds=60)
    deaf = host.start_server("term-deaf", gpus=[3], memory_mib=1000, load_seconds=60, ignore_term=True)
    wait_for(lambda: all("Load weight begin" in server.log_text() for server in (plain, deaf)), "loading", 10)
    for server in (plain, deaf):
        server.main.send(signal.SIGTERM)
    wait_gone([plain.main_pid], 5)
    wait_for(lambda: not plain.titled("sglang::"), "its workers", 3)
    assert deaf.main.alive()
    deaf.main.send(signal.SIGKILL)


def test_a_server_can_hang_after_a_phase(host: SimulatedHost) -> None:
    server = host.start_server("stuck", gpus=[2], memory_mib=1000, speed=20, hang_after="weights")
    wait_for(lambda: "Load weight end" in server.log_text(), "the weights", 10)
    time.sleep(0.3)
    assert normalized(server.log_text())[-1].startswith("Load weight end")
    assert server.main.alive()
    server.main.send(signal.SIGKILL)


def test_nvcc_leads_a_group_of_its_own_and_outlives_a_killed_main_for_a_while(host: SimulatedHost) -> None:
    server = host.start_server("jit", gpus=[2], memory_mib=1000, speed=10, jit_seconds=15)
    tools = str(host.folder / "home" / ".cache" / "sglang-standin-tools")
    wait_for(lambda: len([line for line in server.processes().values() if line.startswith(tools)]) == 2, "nvcc", 10)
    pids = {Path(line.split()[0]).name: pid for pid, line in server.processes().items() if line.startswith(tools)}
    assert os.getpgid(pids["nvcc"]) == pids["nvcc"]
    assert os.getpgid(pids["ninja"]) == os.getpgid(server.main_pid)
    assert b"SGLANG_RUN_ID=" in environment_of(pids["nvcc"])
    server.main.send(signal.SIGKILL)
    wait_for(lambda: not server.titled("sglang::"), "the workers", 3)
    assert {start_ticks(pid) is None for pid in pids.values()} == {False}
    wait_gone(pids.values(), 5)


# Failures


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ("kernel-package-missing", 1, "ModuleNotFoundError: No module named 'sgl_kernel'"),
        ("common-ops-cannot-load-libcuda", 1, "- ImportError: libcuda.so.1: cannot open shared object file"),
        ("draft-context-length-mismatch", -9, "is greater than the derived context_length (512)"),
        ("eagle3-unsupported-attention-backend", -9, "RuntimeError: 0 active drivers ([]). There should only be one."),
        ("eagle3-missing-module-in-draft", -9, "ModuleNotFoundError: No module named 'deep_gemm'"),
    ],
)
def test_a_failing_start_prints_and_exits_as_recorded(
    host: SimulatedHost, failure: str, status: int, words: str
) -> None:
    done = subprocess.run(
        [
            *eagle3_command(),
            "--speculative-num-steps=3",
            "--speculative-eagle-topk=1",
            "--speculative-num-draft-tokens=4",
        ],
        env=failing_environment(host, failure),
        capture_output=True,
        text=True,
        timeout=20,
        start_new_session=True,
    )
    assert words in done.stderr
    assert done.returncode == status
    if status == -9:
        assert "Received sigquit from a child process. It usually means the child failed." in done.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [("--speculative-num-steps=3", "TypeError: '>'"), ("--speculative-eagle-topk=1", "AssertionError")],
)
def test_incomplete_speculation_arguments_end_as_recorded(host: SimulatedHost, option: str, words: str) -> None:
    done = subprocess.run(
        [*eagle3_command(), option], env=failing_environment(host, ""), capture_output=True, text=True, timeout=20
    )
    assert words in done.stderr
    assert done.returncode == 1


def test_a_full_gpu_ends_the_start(host: SimulatedHost) -> None:
    with host.gpus.allocate(7, 90000):
        server = host.start_server("full", gpus=[7], memory_mib=20000, speed=20)
        wait_gone([server.main_pid], 10)
    assert "torch.OutOfMemoryError: CUDA out of memory." in server.log_text()


def test_a_setting_that_does_not_exist_is_refused(host: SimulatedHost) -> None:
    server = host.start_server("typo", gpus=[2], import_second=3)
    with pytest.raises(HostError, match="no setting SGLANG_STANDIN_IMPORT_SECOND"):
        server.wait_ready()


def eagle3_command() -> list[str]:
    options = "--model-path /models/x --speculative-algorithm EAGLE3 --speculative-draft-model-path /models/draft"
    return [sys.executable, "-m", "sglang.launch_server", *options.split(), "--port", str(free_port())]


def failing_environment(host: SimulatedHost, failure: str) -> dict[str, str]:
    settings = {"SGLANG_STANDIN_NO_GPU": "1", "SGLANG_STANDIN_SPEED": "20", "SGLANG_STANDIN_FAIL": failure}
    return {**host.environment(), **settings}


def stop(host: SimulatedHost, server: Server) -> None:
    """End what is left of a server."""
    for pid in server.processes():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not server.processes(), "the end of the tree", 5)


# One server over two hosts, here two halves on one


def half(host: SimulatedHost, number: int, address: str, **settings: object) -> Server:
    """Half of a TP-2 server, by its node rank."""
    arguments = ["--nnodes", "2", "--node-rank", str(number), "--dist-init-addr", address]
    settings = {"memory_mib": 1000, "speed": 10, "no_gpu": 1, **settings}
    return host.start_server(f"half-{number}-{address[-5:]}", gpus=[number], tp=2, arguments=arguments, **settings)


def test_the_first_host_of_a_server_is_ready_once_the_second_has_joined_and_dies_with_it(host: SimulatedHost) -> None:
    address = f"127.0.0.1:{free_port()}"
    first = half(host, 0, address)
    wait_for(lambda: "Init torch distributed begin." in first.log_text(), "the first rank", 20)
    assert first.request("/health", timeout=1)[0] == 0
    second = half(host, 1, address)
    first.wait_ready()
    alive = "Dummy health check server started in background thread at 127.0.0.1:"
    wait_for(lambda: alive in second.log_text(), "the second host", 20)
    assert "max_total_num_tokens=" in first.log_text() and "max_total_num_tokens=" not in second.log_text()
    titles = [line for one in (first, second) for line in one.processes().values() if line.startswith("sglang::")]
    assert sorted(titles) == ["sglang::detokenizer", "sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    assert first.request("/generate", GENERATE)[0] == 200
    assert [second.request(path)[0] for path in ("/health", "/ping", "/server_info")] == [200, 200, 404]
    lost = next(pid for pid, line in second.processes().items() if line.startswith("sglang::scheduler"))
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: not first.main.alive() and not second.main.alive(), "both ends", 30)
    assert "Connection closed by peer [127.0.0.1]:" in first.log_text()
    assert f"Scheduler or DataParallelController {lost} terminated with -9" in second.log_text()


def test_a_second_host_that_never_comes_ends_the_first_by_torchs_own_words(host: SimulatedHost) -> None:
    first = half(host, 0, f"127.0.0.1:{free_port()}", meet_seconds=10)
    wait_for(lambda: not first.main.alive(), "the first host's end", 30)
    assert "waiting for clients. 1/2 clients joined." in first.log_text()


def test_a_stop_of_the_first_host_stops_the_second(host: SimulatedHost) -> None:
    address = f"127.0.0.1:{free_port()}"
    first, second = half(host, 0, address), half(host, 1, address)
    first.wait_ready()
    first.main.send(signal.SIGTERM)
    wait_for(lambda: not first.main.alive() and not second.main.alive(), "both ends", 30)
    assert "terminated with 0" in second.log_text()


# The first of each request finds a listener that closes the connection, as a machine too busy for a thread would.
BUSY = """
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from sglang.standin import web
seen = []
class Busy(BaseHTTPRequestHandler):
    def answer(self):
        seen.append(self.path)
        self.close_connection = True
        if seen.count(self.path) > 1:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
    do_GET = do_POST = answer
    def log_message(self, *words): pass
http = HTTPServer(("127.0.0.1", 0), Busy)
Thread(target=http.serve_forever, daemon=True).start()
arguments = {"api_key": "", "host": "127.0.0.1", "port": http.server_port, "skip_server_warmup": False}
One = types.SimpleNamespace
frontend = One(status="Starting")
web._warm_up(One(arguments=arguments, log=One(line=print), settings=One(warmup_seconds=0)), frontend)
print(frontend.status, *seen)
"""


def test_a_warm_up_request_that_a_busy_machine_drops_is_sent_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY], env={**os.environ, "PYTHONPATH": str(STANDIN)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "Up /model_info /model_info /generate /generate", done.stdout + done.stderr
