"""The state of a server: by a table of facts, by what it answers, and on real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from gpu_host import server_http, server_log, server_record, server_state
from gpu_host.deadline import Deadline
from gpu_host.procfs import Proc
from gpu_host.readings import Readings
from gpu_host.scope import Scope
from gpu_host.server_state import Facts, ServerState, judge

from simulator.host import SimulatedHost

TABLE = yaml.safe_load((Path(__file__).parent / "cases" / "server_states.yml").read_text())
NO_GPUS = Readings("none", None, None, (), None)


@pytest.mark.parametrize("case", TABLE["cases"], ids=[case["name"] for case in TABLE["cases"]])
def test_state_of(case: dict) -> None:
    facts = TABLE["serving"] | case.get("facts", {})
    facts["stopped"] = tuple(facts.get("stopped", ()))
    facts["progress"] = facts["progress"] or ""
    state, why = judge(Facts(**facts))
    assert state == case["state"], why
    assert case.get("says", "").lower() in why.lower()
    assert not why[0].islower() and why.endswith(".") and not why.endswith("..")


# ---- what a server answers ----


def test_loads_of_several_ranks_are_added_and_the_oldest_report_counts() -> None:
    ranks = [
        {"num_running_reqs": 2, "num_waiting_reqs": 1, "timestamp": 50.5},
        {"num_running_reqs": 1, "timestamp": 60.0},
    ]
    load = server_http.parse_loads(json.dumps({"version": "0.5.23", "loads": ranks}).encode())
    assert load is not None
    assert (load.running, load.waiting, load.version, min(load.stamps)) == (3, 1, "0.5.23", 50.5)


def test_loads_before_the_first_report_tell_no_number() -> None:
    load = server_http.parse_loads(b'{"loads": [], "version": "0.5.17"}')
    assert load is not None and load.requests is None


def test_a_report_that_was_never_made_has_no_age() -> None:
    load = server_http.parse_loads(b'{"loads": [{"num_running_reqs": 0, "timestamp": 0.0}]}')
    assert load is not None and load.stamps == ()


def test_the_oldest_load_answers_are_understood() -> None:
    assert server_http.parse_old_load(b'{"load": 3}') == server_http.Load(3, 0)
    assert server_http.parse_old_load(b'[{"num_reqs": 5, "num_waiting_reqs": 2}]') == server_http.Load(3, 2)


def test_metrics_of_sglang_count_a_request_once_although_it_is_given_by_priority_too() -> None:
    text = (
        'sglang:num_running_reqs{model_name="m",priority=""} 2.0\nsglang:num_running_reqs{priority="1"} 2.0\n'
        'sglang:num_queue_reqs{model_name="m"} 1.0\nsglang:generation_tokens_total{model_name="m"} 7.0\n'
    )
    assert server_http.parse_metrics(text.encode()) == server_http.Load(2, 1, counters=(7.0,))


def test_metrics_of_vllm_are_understood() -> None:
    text = 'vllm:num_requests_running{engine="0"} 4.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    assert server_http.parse_metrics(text.encode()) == server_http.Load(4, 0)


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"loads": 3}', b"\xff\xfe"])
def test_a_broken_answer_is_no_answer(body: bytes) -> None:
    assert server_http.parse_loads(body) is None
    assert server_http.parse_metrics(body) is None


def test_the_key_is_found_on_the_command_line_in_the_config_file_and_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("model-path: /m\napi_key: 'k3y # here'  # secret\nport: 31000\n")
    argv = ("python", "-m", "sglang.launch_server", "--config", "server.yaml")
    assert server_http.api_key((*argv, "--api-key", "first", "--api-key=last"), None, str(tmp_path)) == "last"
    assert server_http.api_key(argv, None, str(tmp_path)) == "k3y # here"
    assert server_http.config_value(argv, str(tmp_path), "port") == "31000"
    assert server_http.api_key(("vllm", "serve"), {"VLLM_API_KEY": "v"}, "/") == "v"


def test_a_key_is_never_shown() -> None:
    assert "s3cret" not in repr(server_http.Endpoint("127.0.0.1", 1, False, "s3cret"))


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            client, _ = listening.accept()
            with contextlib.suppress(OSError), client:
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    client.sendall(b"x")
                    time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        answer = server_http.get(
            server_http.Endpoint("127.0.0.1", listening.getsockname()[1]), "/v1/loads", Deadline(0.3)
        )
        assert (answer.status, answer.trouble) == (None, "silent")
        assert time.monotonic() - began < 1.5


# ---- what a log tells ----

LOADING = "[2026-11-29 17:32:02] server_args=ServerArgs(model_path='/m')\n[2026-11-29 17:32:09] Load weight begin.\n"
FIRED = "[2026-11-29 17:35:00] The server is fired up and ready to roll!\n"


def look_at(path: Path, text: str, started: str = "2026-11-29 17:32:00", written: str = "2026-11-29 17:35:01"):
    def epoch(stamp: str) -> float:
        return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))

    path.write_text(text)
    os.utime(path, (epoch(written), epoch(written)))
    return server_log.look(str(path), server_log.READY, epoch(started), epoch(written) + 10)


def test_a_log_with_the_ready_line_of_this_start_says_ready(tmp_path: Path) -> None:
    assert look_at(tmp_path / "log", LOADING + FIRED).ready is True


def test_a_log_without_a_ready_line_says_not_ready(tmp_path: Path) -> None:
    assert look_at(tmp_path / "log", LOADING).ready is False


def test_the_ready_line_before_a_later_start_in_the_same_log_does_not_count(tmp_path: Path) -> None:
    assert look_at(tmp_path / "log", LOADING + FIRED + LOADING).ready is False


def test_the_ready_line_of_an_earlier_start_does_not_count_while_the_new_one_imports(tmp_path: Path) -> None:
    sight = look_at(tmp_path / "log", LOADING + FIRED, started="2026-11-29 18:00:00")
    assert sight.ready is False


def test_the_ready_line_counts_although_the_server_writes_the_time_of_another_zone(tmp_path: Path) -> None:
    """Its clock is six hours ahead of ours."""
    sight = look_at(tmp_path / "log", LOADING + FIRED, started="2026-11-29 11:32:00", written="2026-11-29 11:35:00")
    assert sight.ready is True


@pytest.mark.parametrize("text", ["", "WARNING: nothing of a start in here\n"])
def test_a_log_that_tells_nothing_of_a_start_is_unknown(tmp_path: Path, text: str) -> None:
    assert look_at(tmp_path / "log", text).ready is None


def test_a_log_that_is_missing_a_pipe_or_a_folder_is_unknown_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        assert server_log.look(str(tmp_path / name), server_log.READY, 0) == server_log.LogSight()


def test_a_ready_line_far_back_in_a_large_log_is_found(tmp_path: Path) -> None:
    access = '[2026-11-29 17:34:59] INFO:     127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n'
    for filler in (0, 1, 37):  # the line lies across a block's end in some of these
        text = LOADING + FIRED + "x" * filler + access * 45000
        assert look_at(tmp_path / "log", text).ready is True


def test_only_batch_lines_are_progress_and_the_last_one_has_an_age(tmp_path: Path) -> None:
    batch = "[2026-11-29 17:34:31 TP0] Decode batch, #running-req: 1, gen throughput (token/s): 82.30\n"
    access = '[2026-11-29 17:35:01] INFO:     127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n'
    first = look_at(tmp_path / "log", LOADING + FIRED + batch)
    second = look_at(tmp_path / "log", LOADING + FIRED + batch + access)
    third = look_at(tmp_path / "log", LOADING + FIRED + batch + access + batch)
    assert first.batch_at == second.batch_at != third.batch_at
    assert second.batch_age == 40


# ---- real processes: a server that answers what a test wants ----

FAKE = textwrap.dedent(
    """
    import json, os, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    plan = json.loads(os.environ["PLAN"])
    os.environ["SGLANG_RUN_ID"] = "run-of-the-fake"
    worker = (
        "import setproctitle, time, sys\\n"
        "setproctitle.setproctitle('sglang::scheduler_TP0')\\n"
        "spin = sys.argv[1] == 'spin'\\n"
        "while True:\\n"
        "    if not spin: time.sleep(1000)\\n"
    )
    child = subprocess.Popen([sys.executable, "-c", worker, plan["scheduler"]])
    began = time.time()
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass
        def do_GET(self):
            path = self.path.partition("?")[0]
            open(plan["asked"], "a").write(path + "\\n")
            answer = plan["answers"].get(path)
            status = 200 if answer is not None else 404
            if plan["key"] and path != "/metrics" and self.headers.get("Authorization") != "Bearer " + plan["key"]:
                status, answer = 401, {}
            if answer == "never":
                time.sleep(1000)
            if isinstance(answer, dict) and "loads" in answer:
                for rank in answer["loads"]:
                    if "age" in rank:
                        rank["timestamp"] = (time.time() if plan["reports"] else began) - rank["age"]
            body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class Fake:
    """One fake server; `answers` maps a path to what it answers, "never" keeps the client waiting."""

    def __init__(self, folder: Path, answers: dict, *, scheduler: str, reports: bool, key: str, argv: tuple[str, ...]):
        package = folder / "sglang"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(FAKE)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.asked_file = folder, folder / "asked"
        plan = {
            "answers": answers,
            "scheduler": scheduler,
            "reports": reports,
            "key": key,
            "asked": str(self.asked_file),
        }
        self.main = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port), *argv],
            cwd=folder,
            env=os.environ | {"PLAN": json.dumps(plan), "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + 20
        while time.monotonic() < end and not (self._listens() and self.scheduler):
            time.sleep(0.02)
        assert self.scheduler, "the fake server did not start"

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def scheduler(self) -> int:
        found = [
            p.pid for p in Proc().snapshot().values() if p.session == self.main.pid and p.title.startswith("sglang::")
        ]
        return found[0] if found else 0

    @property
    def asked(self) -> list[str]:
        return self.asked_file.read_text().split() if self.asked_file.exists() else []

    def observe(self, timeout: float = 6, **more) -> list[ServerState]:
        return list(
            server_state.observe(
                Deadline(timeout),
                scope=Scope(folder=str(self.folder)),
                state_folder=str(self.folder / "state"),
                readings=NO_GPUS,
                **more,
            ).servers
        )

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.main.pid, signal.SIGKILL)
        self.main.wait()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator:
    made: list[Fake] = []

    def make(answers, *, scheduler="sleep", reports=False, key="", argv=()) -> Fake:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Fake(folder, answers, scheduler=scheduler, reports=reports, key=key, argv=tuple(argv)))
        return made[-1]

    yield make
    for one in made:
        one.end()


def loads(age: float, running: int = 0, waiting: int = 0) -> dict:
    rank = {"age": age, "num_running_reqs": running, "num_waiting_reqs": waiting}
    return {"/v1/loads": {"version": "0.5.23", "loads": [rank]}}


def test_a_server_that_reports_is_asked_once_and_nothing_that_reaches_the_model(fake) -> None:
    server = fake(loads(0.1, running=2), reports=True)
    (state,) = server.observe()
    assert (state.state, state.running, state.versions) == ("busy", 2, {"sglang": "0.5.23"})
    assert set(server.asked) <= {"/v1/loads", "/ready"}


def test_schedulers_that_sleep_and_answer_nothing_are_hung(fake) -> None:
    server = fake(loads(40, running=1) | {"/server_info": "never"})
    (state,) = server.observe()
    assert state.state == "hung", state.why
    assert "use no CPU time" in state.why and state.silent_seconds > 39


def test_schedulers_that_compute_and_answer_nothing_for_a_while_are_busy(fake) -> None:
    server = fake(loads(40, running=1) | {"/server_info": "never"}, scheduler="spin")
    (state,) = server.observe()
    assert state.state == "busy", state.why


def test_schedulers_that_compute_and_answer_nothing_for_too_long_are_hung(fake) -> None:
    server = fake(loads(40, running=1) | {"/server_info": "never"}, scheduler="spin")
    (state,) = server.observe(hung_after=30)
    assert state.state == "hung", state.why


def test_silent_schedulers_that_answer_a_question_are_idle(fake) -> None:
    server = fake(loads(40) | {"/server_info": {"version": "0.5.23"}})
    (state,) = server.observe()
    assert state.state == "idle", state.why


def test_a_version_with_the_old_names_alone_is_understood(fake) -> None:
    server = fake({"/get_load": [{"num_reqs": 3, "num_waiting_reqs": 1}], "/get_server_info": {"version": "0.4.6"}})
    (state,) = server.observe()
    assert (state.state, state.running, state.waiting) == ("busy", 2, 1), state.why
    assert state.versions == {"sglang": "0.4.6"}


def test_the_key_of_the_command_line_is_sent_and_not_returned(fake) -> None:
    server = fake(loads(0.1), reports=True, key="s3cr3t-k3y", argv=["--api-key", "s3cr3t-k3y"])
    (state,) = server.observe()
    assert state.state == "idle", state.why
    assert "s3cr3t" not in json.dumps(state.to_dict())


def test_without_the_key_the_open_metrics_are_read(fake) -> None:
    metrics = "sglang:num_running_reqs 1.0\nsglang:num_queue_reqs 0.0\n"
    server = fake(loads(0.1) | {"/metrics": metrics}, key="unknown")
    (state,) = server.observe()
    assert (state.state, state.running) == ("hung", 1), state.why  # its scheduler sleeps over a running request


def test_four_deaf_servers_take_no_longer_than_one(fake) -> None:
    servers = [fake({"/v1/loads": "never"}) for _ in range(4)]
    began = time.monotonic()
    found = server_state.observe(
        Deadline(3), scope=Scope(folder=str(servers[0].folder.parent)), state_folder="/nonexistent", readings=NO_GPUS
    ).servers
    assert [state.state for state in found] == ["zombie"] * 4, found
    assert time.monotonic() - began < 3.5


def test_a_worker_stopped_for_a_moment_is_not_hung(fake) -> None:
    """As py-spy and debuggers do."""
    server = fake(loads(0.1), reports=True)
    os.kill(server.scheduler, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (server.scheduler, signal.SIGCONT)).start()
    (state,) = server.observe()
    assert state.state == "idle", state.why


def test_a_record_gives_the_name_and_an_unmatched_one_is_absent(fake) -> None:
    server = fake(loads(0.1), reports=True)
    folder = str(server.folder / "state")
    proc = Proc()
    main = proc.process(server.main.pid)
    assert main is not None
    record = server_record.from_process(proc, main)
    assert record is not None
    for name, port in (("kimi", server.port), ("other", 1)):
        made = {**record.__dict__, "name": name, "port": port}
        server_record.save(server_record.ServerRecord(**(made if port > 1 else {**made, "main_pid": 0})), folder)
    states = {state.name: state.state for state in server.observe(names=["kimi", "other", "never-was"])}
    assert states == {"kimi": "idle", "other": "absent", "never-was": "absent"}


def test_a_dead_server_is_known_by_its_record(fake) -> None:
    server = fake(loads(0.1), reports=True)
    proc = Proc()
    main = proc.process(server.main.pid)
    assert main is not None
    record = server_record.from_process(proc, main, run_id="run-of-the-fake")
    assert record is not None
    server_record.save(record, str(server.folder / "state"))
    server.main.kill()
    server.main.wait()
    (state,) = server.observe()
    assert (state.name, state.state, state.main_pid, state.port) == (record.name, "zombie", None, server.port)


# ---- the simulated host ----


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path_factory.mktemp("host")) as made:
        old = {name: os.environ.get(name) for name in made.reset_environment()}
        os.environ.update(made.reset_environment())
        yield made
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def states_of(host: SimulatedHost) -> dict[int | None, ServerState]:
    seen = server_state.observe(
        Deadline(10),
        scope=Scope(folder=str(host.folder)),
        state_folder=str(host.folder / "host-state"),
        device_folder=str(host.folder / "dev"),
    )
    assert seen.simulated
    return {state.port: state for state in seen.servers}


def test_a_server_is_starting_then_idle_then_busy_then_hung_then_a_zombie(host: SimulatedHost) -> None:
    server = host.start_server("life", gpus=[0, 1], memory_mib=30000, load_seconds=1.5, outlive_main=True)
    end = time.monotonic() + 10
    while not server.scheduler_pids and time.monotonic() < end:
        time.sleep(0.02)
    assert states_of(host)[server.port].state == "starting"
    server.wait_ready()
    idle = states_of(host)[server.port]
    assert (idle.state, idle.main_pid, len(idle.gpus), idle.memory_mib) == ("idle", server.main_pid, 2, 60000), idle.why

    body = {"text": "hello", "sampling_params": {"max_new_tokens": 100000}}
    threading.Thread(target=server.request, args=("/generate", body, 60), daemon=True).start()
    end = time.monotonic() + 5
    while states_of(host)[server.port].running != 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert states_of(host)[server.port].state == "busy"

    second = server.scheduler_pids[1]
    os.kill(second, signal.SIGSTOP)  # any rank stops all
    hung = states_of(host)[server.port]
    assert (hung.state, str(second) in hung.why) == ("hung", True), hung.why
    os.kill(second, signal.SIGCONT)

    server.main.send(signal.SIGSTOP)
    assert states_of(host)[server.port].state == "zombie"
    server.main.send(signal.SIGCONT)

    server.main.send(signal.SIGKILL)
    time.sleep(0.3)
    (left,) = states_of(host).values()
    assert (left.state, left.main_pid, left.memory_mib) == ("zombie", None, 60000), left.why
    for pid in left.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_host_without_servers_has_no_states(host: SimulatedHost) -> None:
    end = time.monotonic() + 10
    while states_of(host) and time.monotonic() < end:
        time.sleep(0.1)
    assert states_of(host) == {}
