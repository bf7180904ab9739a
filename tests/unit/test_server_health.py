"""Slow, stuck and ready: what the health check decides from what it sees."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gpu_control import health, together
from gpu_control.together import Together
from gpu_host import serving_proof, stack_outliers, startup_watch
from gpu_host.deadline import Deadline
from gpu_host.readings import Gpu, GpuProcess, Readings
from gpu_host.server_http import Endpoint
from gpu_host.serving_proof import Expected, NotProven, Proof
from gpu_host.startup_watch import Look, Watch

STALL = 60.0
POLL = 4.0  # seconds between two simulated looks


class Start:
    """A simulated start: counters that the phases of a real one move, and a clock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.phase = "import"
        self.lines = self.ticks = self.read = 0
        self.mib = 0.0
        self.compilers: tuple[str, ...] = ()
        self.pids = {1}
        self.watch: Watch | None = None
        self.longest = 0.0

    def look(self) -> None:
        look = Look(
            at=self.now,
            phase=self.phase,
            log_lines=self.lines,
            cpu_ticks=self.ticks,
            read_bytes=self.read,
            compilers=self.compilers,
            gpu_mib=int(self.mib),
            pids=frozenset(self.pids),
        )
        self.watch = startup_watch.begin(look) if self.watch is None else startup_watch.advance(self.watch, look)
        if self.random.random() < 0.05:  # a slice hands its watch to the next as JSON
            self.watch = startup_watch.from_dict(json.loads(json.dumps(self.watch.to_dict())))
        self.longest = max(self.longest, self.watch.idle(self.now))

    def pass_time(self, seconds: float, ticks: float = 0, read: float = 0, mib: float = 0) -> None:
        """Let time pass at these rates a second; a waiting server uses a little CPU time anyway."""
        for _ in range(int(seconds / POLL)):
            self.now += POLL
            self.ticks += int(ticks * POLL) + (self.random.random() < 0.5)
            self.read += int(read * POLL)
            self.mib += mib * POLL
            self.look()

    def say(self, phase: str) -> None:
        self.phase = phase
        self.lines += 1

    def slow_but_healthy(self) -> None:
        """25 to 90 minutes of imports, collectives, loading, repacking, compiling and capturing, mostly in silence."""
        pick = self.random
        self.look()
        self.pass_time(pick.uniform(20, 200), ticks=90)  # imports of eight ranks from a slow disk
        self.pids |= set(range(2, 12))
        self.say("distributed")
        self.pass_time(pick.uniform(1, 100), ticks=800)  # NCCL's first collective spins
        self.say("weights")
        for _ in range(pick.randint(5, 60)):  # shards in bursts, with a file server that pauses
            self.pass_time(pick.uniform(5, 40), read=pick.uniform(1e6, 2e9), mib=pick.uniform(0, 300))
            self.pass_time(pick.uniform(0, 50))
            self.read += 1 << 20
            self.look()
        self.pass_time(pick.uniform(0, 1800), ticks=pick.choice((4, 60, 800)))  # repacking: CPU alone, up to 30 minutes
        self.say("memory_pool")
        self.mib += 20000
        self.pass_time(pick.uniform(1, 30))
        self.say("capture")
        self.compilers = pick.choice((("nvcc", "ninja"), ("cicc",), ("ptxas",)))
        self.pass_time(pick.uniform(0, 1800))  # a compiler is there, however little is seen of it
        self.compilers = ()
        for _ in range(pick.randint(1, 20)):  # graphs: a line each, with CPU time in between
            self.pass_time(pick.uniform(1, 120), ticks=pick.choice((5, 100)))
            self.lines += 1
        self.say("ready")


def test_of_200_slow_but_healthy_starts_none_is_called_stuck() -> None:
    starts = [Start(seed) for seed in range(200)]
    for start in starts:
        start.slow_but_healthy()
    assert [start.longest for start in starts if start.longest >= STALL] == []
    assert max(start.now for start in starts) > 3600


@pytest.mark.parametrize("phase", ["import", "weights", "capture", "warmup"])
def test_a_start_without_any_sign_of_work_is_named_within_70_s(phase: str) -> None:
    start = Start(1)
    start.look()
    start.pass_time(30, ticks=90)
    start.say(phase)
    start.look()
    began = start.now
    while start.watch is not None and start.watch.idle(start.now) < STALL:
        assert start.now - began < 70
        start.pass_time(POLL)
    assert start.now - began >= STALL


def test_ranks_that_spin_in_their_first_collective_are_stuck_after_three_minutes() -> None:
    start = Start(1)
    start.say("distributed")
    start.look()
    start.pass_time(startup_watch.CPU_ALONE["distributed"] + STALL + 2, ticks=800)
    assert start.watch is not None and start.watch.idle(start.now) >= STALL


def test_cpu_time_of_waiting_is_no_work_and_of_one_busy_thread_is() -> None:
    waiting, busy = Start(1), Start(1)
    for start, ticks in ((waiting, 1), (busy, 5)):
        start.say("weights")
        start.look()
        start.pass_time(120, ticks=ticks)
    assert waiting.longest >= STALL > busy.longest


# ---- stacks ----


def section(name: str, pid: int, *frames: str) -> str:
    main = "".join(f"    {frame}\n" for frame in frames)
    head = f"==== {name} (pid {pid}) ====\nProcess {pid}: {name}\nPython v3.12\n\n"
    return (
        f'{head}Thread {pid} (active): "MainThread"\n{main}Thread 9 (idle): "watchdog"\n    wait (threading.py:3)\n\n'
    )


def test_the_rank_that_does_not_take_part_in_the_collective_is_named() -> None:
    text = section("python3 -m sglang.launch_server", 1, "recv (multiprocessing/connection.py:250)")
    for rank in range(8):
        line = 100 + rank  # other lines of the same wait
        waits = [f"all_reduce (torch/distributed.py:{line})", "forward (model.py:5)"]
        text += section(
            f"sglang::scheduler_TP{rank}",
            10 + rank,
            *(["acquire (file_baton.py:49)", "load (ext.py:1)"] if rank == 3 else waits),
        )
    assert stack_outliers.outliers(text) == [("sglang::scheduler_TP3", 13, "acquire (file_baton.py)")]
    assert stack_outliers.innermost(text, 12) == "all_reduce (torch/distributed.py)"
    assert stack_outliers.innermost(text, 99) == ""


def test_a_hang_names_the_stopped_rank_else_the_odd_one_else_the_only_one_with_its_frame() -> None:
    ranks = [(f"sglang::scheduler_TP{rank}", rank) for rank in range(3)]
    text = "".join(section(name, pid, f"{'wait' if pid else 'load'} (a.py:{pid})") for name, pid in ranks)
    odd = (
        "sglang::scheduler_TP0 (pid 0)",
        "sglang::scheduler_TP0 (pid 0) stands elsewhere than the others in load (a.py)",
    )
    stopped = ("sglang::scheduler_TP2 (pid 2)", "sglang::scheduler_TP2 (pid 2) is stopped in wait (a.py)")
    assert stack_outliers.pointed_at(text, ranks, []) == odd
    assert stack_outliers.pointed_at(text, ranks, [2]) == stopped
    assert stack_outliers.pointed_at(text, ranks[1:2], [])[1] == "sglang::scheduler_TP1 (pid 1) stands in wait (a.py)"
    assert stack_outliers.pointed_at("", ranks, []) == ("", "")
    assert stack_outliers.pointed_at("", ranks, [1])[1] == "sglang::scheduler_TP1 (pid 1) is stopped"


def test_no_rank_is_named_where_none_stands_out() -> None:
    alike = "".join(section(f"sglang::scheduler_TP{rank}", rank, "wait (a.py:1)") for rank in range(8))
    halves = "".join(section(f"sglang::scheduler_TP{rank}", rank, f"wait ({'ab'[rank % 2]}.py:1)") for rank in range(8))
    unread = "==== sglang::scheduler_TP0 (pid 1) ====\npy-spy: no permission\nwchan: futex\n"
    assert stack_outliers.outliers(alike) == stack_outliers.outliers(halves) == stack_outliers.outliers(unread) == []


# ---- proof ----


class Fake(BaseHTTPRequestHandler):
    """Answers by path; a callable gets the request's body."""

    answers: ClassVar[dict[str, Any]] = {}

    def log_message(self, *_: object) -> None: ...

    def _answer(self, body: Any) -> None:
        answer = type(self).answers.get(self.path.partition("?")[0], 404)
        found = answer(body) if callable(answer) else answer
        status, data = (found, b"") if isinstance(found, int) else (200, json.dumps(found).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is what some tests are about."""


def generated(verifications: int | None, tokens: int = 128, ids: list[int] | None = None) -> Any:
    meta = {"completion_tokens": tokens, **({"spec_verify_ct": verifications} if verifications is not None else {})}
    return lambda body: [{"text": "x", "output_ids": ids or [1, 2, 3], "meta_info": meta} for _ in body["text"]]


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    chat = {"choices": [{"message": {"content": "Paris.", "reasoning_content": None}}]}
    Fake.answers = {
        "/health": 200,
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/chat/completions": chat,
        "/server_info": {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "version": "0.5.23"},
        "/generate": generated(50),
    }
    yield Fake.answers


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Server(("127.0.0.1", 0), Fake)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Endpoint("127.0.0.1", server.server_port)
    server.shutdown()
    server.server_close()


def prove(endpoint: Endpoint, file: str = "", **expected: Any) -> Proof:
    wanted = Expected(**{"speculation": {"algorithm": "EAGLE3", "num_steps": 3}, "request_seconds": 5.0, **expected})
    proof = Proof(endpoint, wanted, Deadline(20), lambda: True, file)
    proof.serve()
    return proof


def test_a_server_that_accepts_drafts_is_proven(answers: dict[str, Any], endpoint: Endpoint) -> None:
    proven = prove(endpoint).proven
    assert [step.name for step in proven.steps] == ["health", "chat", "speculation", "acceptance"]
    assert (proven.accept_length, proven.accept_tokens, proven.version) == (2.56, 512, "0.5.23")


def test_old_endpoint_names_work_too(answers: dict[str, Any], endpoint: Endpoint) -> None:
    answers["/get_server_info"] = answers.pop("/server_info")
    answers["/health_generate"] = answers.pop("/health")
    assert prove(endpoint).proven.accept_length == 2.56


@pytest.mark.parametrize(
    ("path", "answer", "expected", "sentence"),
    [
        ("/generate", generated(128), {}, "acceptance: the accept length is 1.00 .* below 1.05"),
        ("/generate", generated(None), {}, "acceptance: the accept length can't be measured: "),
        ("/server_info", {"speculative_algorithm": None}, {}, "speculation: algorithm is None, EAGLE3 was asked for"),
        ("/server_info", {"speculative_algorithm": "EAGLE3"}, {"speculation": {}}, "speculation: none was asked for"),
        (
            "/v1/chat/completions",
            {"choices": [{"message": {"content": "!!!!"}}]},
            {},
            "chat: the answer does not match",
        ),
        ("/v1/chat/completions", {"choices": [{"message": {"content": ""}}]}, {}, "chat: the answer is empty"),
        ("/v1/chat/completions", 401, {}, "chat: .*the key that it was deployed with is refused"),
        ("/generate", 500, {"accept_length": 0, "soak": 3}, "soak: after 0 short completions /generate answered 500"),
    ],
)
def test_what_is_not_as_asked_for_is_named_by_its_step(
    answers: dict[str, Any], endpoint: Endpoint, path: str, answer: Any, expected: dict[str, Any], sentence: str
) -> None:
    answers[path] = answer
    with pytest.raises(NotProven) as caught:
        prove(endpoint, **expected)
    assert re.match(sentence, f"{caught.value.step}: {caught.value}")


def test_not_measurable_is_none_and_never_zero(answers: dict[str, Any], endpoint: Endpoint) -> None:
    answers["/generate"] = generated(None)
    proof = Proof(endpoint, Expected(speculation={"algorithm": "EAGLE3"}), Deadline(20), lambda: True)
    with pytest.raises(NotProven):
        proof.serve()
    assert proof.proven.accept_length is None
    assert prove(endpoint, accept_length=0).proven.accept_length is None


def test_the_servers_own_average_counts_where_the_answers_tell_nothing(
    answers: dict[str, Any], endpoint: Endpoint
) -> None:
    answers["/generate"] = generated(None)
    answers["/server_info"]["internal_states"] = [{"avg_spec_accept_length": 2.1}]
    assert prove(endpoint).proven.accept_length == 2.1


def test_a_server_that_hangs_in_the_soak_is_stuck_and_not_failed(answers: dict[str, Any], endpoint: Endpoint) -> None:
    answered = iter(range(10))
    release = threading.Event()

    def hang_after_ten(body: Any) -> Any:
        if next(answered, None) is None:
            release.wait(10)
        return generated(50)(body)

    answers["/generate"] = hang_after_ten
    with pytest.raises(NotProven) as caught:
        prove(endpoint, soak=50, accept_length=0, request_seconds=0.3)
    release.set()
    assert caught.value.hangs and "after 10 short completions" in str(caught.value)


def row(ids: list[int], *leads: float | None, near: list[Any] | None = None) -> dict[str, Any]:
    return {"ids": ids, "leads": list(leads), **({"near": near} if near else {})}


# At the second place the baseline can hardly decide between 2 and 7; 8 is far behind.
TIE = [[[1, 0], [9, 9]], [[2, 0], [7, 0.1], [8, 2.0]], [[3, 0], [9, 9]]]


@pytest.mark.parametrize(
    ("baseline", "answer", "verdict"),
    [
        (row([1, 2, 3], 9, 9, 9), [1, 2, 3], "1 of 1 greedy answers equal"),
        (row([1, 2, 3], 9, 0.1, 9), [1, 7, 8], "0 of 1 greedy answers equal, 1 part at a near-tie"),
        (row([1, 2, 3], 9, 3.0, 9), [1, 7, 8], "differs from token 2 on, and the baseline led there by 3.00"),
        (row([1, 2, 3], 9, 0.1, 9, near=TIE), [1, 7, 8], "0 of 1 greedy answers equal, 1 part at a near-tie"),
        (row([1, 2, 3], 9, 0.1, 9, near=TIE), [1, 8, 3], "differs from token 2 on, and that token is none of those"),
        (row([1, 2, 3], 9, 0.1, 9, near=TIE), [1, 5, 3], "differs from token 2 on, and that token is none of those"),
        (row([1, 2, 3]), [1, 7, 8], "it is not known how near a tie"),
        (row([1, 2, 3], 9, 9, 9), [1, 2], "differs from token 3 on"),
    ],
)
def test_greedy_answers_are_equal_but_for_near_ties(baseline: dict[str, Any], answer: list[int], verdict: str) -> None:
    try:
        said = serving_proof.compare([baseline], [row(answer)], 0.25)
    except NotProven as reason:
        said = str(reason)
    assert verdict in said


def test_lossless_keeps_the_baselines_answers_and_compares(
    answers: dict[str, Any], endpoint: Endpoint, tmp_path: Any
) -> None:
    file = str(tmp_path / "lossless" / "m.json")
    with pytest.raises(NotProven, match=r"run deploy-baseline\.yml"):
        prove(endpoint, file, lossless=True)
    speculates = answers["/server_info"]
    answers["/server_info"] = {"speculative_algorithm": None}
    prove(endpoint, file, lossless=True, speculation={})
    answers["/server_info"] = speculates
    assert prove(endpoint, file, lossless=True).proven.steps[-1].found == "4 of 4 greedy answers equal"
    answers["/generate"] = generated(50, ids=[1, 2, 4])
    with pytest.raises(NotProven, match="differs from token 3 on"):
        prove(endpoint, file, lossless=True)


# ---- processes ----


class Worker:
    def __init__(self, pid: int) -> None:
        self.pid, self.name = pid, f"sglang::scheduler_TP{pid}"


class Environments:
    def __init__(self, found: dict[int, dict[str, str] | None]) -> None:
        self._found = found

    def environ(self, pid: int) -> dict[str, str] | None:
        return self._found[pid]


def gpu(index: int, *processes: tuple[int, int]) -> Gpu:
    listed = tuple(GpuProcess(pid, mib, "compute") for pid, mib in processes)
    return Gpu(index, f"GPU-{index}", index, "x", "", "12.0", 97887, 0, 0, 0, 0, None, False, listed)


def look_at(environments: dict[int, dict[str, str] | None], *gpus: Gpu, profile: dict[str, str] | None = None) -> Proof:
    expected = Expected(environment=profile or {"NCCL_PROTO": "LL"})
    proof = Proof(Endpoint("127.0.0.1", 1), expected, Deadline(1), lambda: True)
    workers: Any = [Worker(pid) for pid in environments]
    readings = Readings("nvml", "1", "1", gpus, None)
    proof.workers(Environments(environments), workers, readings, frozenset(environments))
    return proof


FULL = (gpu(0, (1, 80000)), gpu(1, (2, 80000)))


def test_a_worker_without_the_profile_is_named_and_one_that_cannot_be_read_is_no_such() -> None:
    proof = look_at({1: {"NCCL_PROTO": "LL"}, 2: None}, *FULL)
    assert proof.proven.unreadable_workers == [2]
    assert "1 of 2 workers carry the 1 variables of the profile; 1 can't be read" in proof.proven.steps[0].found
    with pytest.raises(NotProven, match=r"scheduler_TP2 \(pid 2\) lacks NCCL_PROTO"):
        look_at({1: {"NCCL_PROTO": "LL"}, 2: {}}, *FULL)
    with pytest.raises(NotProven, match="has NCCL_PROTO=Simple, the profile says NCCL_PROTO=LL"):
        look_at({1: {"NCCL_PROTO": "Simple"}, 2: {}}, *FULL)


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        ((gpu(0, (1, 500)), gpu(1, (2, 500))), "holds 500 MiB on one GPU"),
        ((gpu(0, (1, 80000)), gpu(1, (2, 20000))), "20000 MiB on one GPU and 80000 MiB on another"),
        ((gpu(0, (1, 80000), (2, 80000)), gpu(1)), "2 workers hold memory of 1 GPUs only"),
        ((gpu(0), gpu(1)), "none of its processes holds GPU memory"),
    ],
)
def test_gpu_memory_at_no_plausible_level_is_named(gpus: tuple[Gpu, ...], sentence: str) -> None:
    has: dict[str, str] | None = {"NCCL_PROTO": "LL"}
    with pytest.raises(NotProven, match=sentence):
        look_at({1: has, 2: has}, *gpus)


def test_memory_that_only_another_namespace_could_tell_is_no_failure() -> None:
    has: dict[str, str] | None = {"NCCL_PROTO": "LL"}
    proof = look_at({1: has}, gpu(0, (4711, 80000)))
    assert "can't be told" in proof.proven.steps[-1].found


# ---- the control node ----


def test_progress_is_shown_for_each_slice_and_while_a_call_takes_long() -> None:
    shown: list[str] = []
    lines = iter(("weights, 10 s", "weights, 20 s"))
    release = threading.Event()
    seen: list[Any] = []
    params: dict[str, Any] = {"run_id": "", "name": "sglang"}

    def call() -> dict[str, Any]:
        seen.append(params["carry"])
        line = next(lines, None)
        if line is not None:
            return {"carry": {"at": line}, "ended": False, "progress": line}
        assert release.wait(10)
        return {"ended": True, "verdict": "ready", "msg": "m"}

    def show(text: str) -> None:
        shown.append(text)
        if "so far" in text:
            release.set()

    seconds, health.LINE_SECONDS = health.LINE_SECONDS, 0.05
    try:
        result = health.follow(call, params, "gpu01", show)
    finally:
        health.LINE_SECONDS = seconds
    assert result["verdict"] == "ready"
    assert seen == [{}, {"at": "weights, 10 s"}, {"at": "weights, 20 s"}]
    assert shown[:2] == ["gpu01: weights, 10 s", "gpu01: weights, 20 s"]
    assert shown[-1].startswith("gpu01: weights, 20 s (")


def note(**facts: Any) -> dict[str, Any]:
    """The result of a slice."""
    return {"carry": {}, "ended": False, "progress": "weights, 1 s", "idle": 0.0, **facts}


def pair(folder: Path, task: str = "t") -> tuple[Together, Together]:
    return tuple(Together(folder, task, ["gpu01", "gpu02"], host) for host in ("gpu01", "gpu02"))  # type: ignore[return-value]


def test_a_host_hears_how_long_the_least_idle_of_the_others_is_idle(tmp_path: Path) -> None:
    alone = Together(tmp_path, "t", ["gpu01", "gpu02"], "gpu01")
    assert alone.for_host() == {}
    second = Together(tmp_path, "t", ["gpu01", "gpu02"], "gpu02")
    assert alone.for_host() == {"others_idle": 0.0}
    second.tell(note(idle=12.5))
    assert alone.for_host() == {"others_idle": 12.5}
    assert pair(tmp_path, "another task")[0].for_host() == {"others_idle": 0.0}


def test_a_host_gives_up_at_once_where_another_is_stuck_and_gets_time_for_its_own_end_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(tmp_path)
    second.tell({"ended": True, "verdict": "failed", "reason": "it died."})
    assert first.for_host() == {"others_idle": 0.0}
    monkeypatch.setattr(together, "OWN_END", 0.0)
    assert first.for_host()["give_up"] == ["failed", "gpu02, which shares this server, failed: it died."]
    first, second = pair(tmp_path, "other")
    monkeypatch.setattr(together, "OWN_END", 60.0)
    second.tell({"ended": True, "verdict": "stuck", "reason": "in capture."})
    assert first.for_host()["give_up"] == ["stuck", "gpu02, which shares this server, is stuck: in capture."]


def test_a_host_that_fails_says_which_other_failed_and_why_as_its_cause_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(tmp_path)
    cause = {"diagnosis": {"cause": "No kernel package."}}
    second.finish({"verdict": "failed", "msg": "sglang failed.", "reason": "it ended.", **cause})
    done = first.finish({"verdict": "failed", "msg": "sglang failed.", "reason": "a peer is gone."})
    assert done["msg"] == "sglang failed. Also, gpu02 failed: it ended. No kernel package."
    monkeypatch.setattr(together, "ALL_ENDED", 0.3)
    alone, _ = pair(tmp_path, "other")
    assert alone.finish({"verdict": "stuck", "msg": "m", "reason": "r"})["msg"] == "m"


def test_a_later_host_is_ready_when_the_first_has_proven_and_not_when_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0.0)
    first, second = pair(tmp_path)
    first.tell(note())
    asked: list[dict[str, Any]] = []
    params: dict[str, Any] = {"run_id": "r", "name": "sglang", "nodes": ["gpu01", "gpu02"]}

    def call() -> dict[str, Any]:
        asked.append(dict(params["carry"]))
        if len(asked) == 2:
            first.tell(note(ended=True, verdict="ready"))
        return note(ended=True, verdict="ready", msg="m")

    assert health.follow(call, params, "gpu02", lambda text: None, second)["verdict"] == "ready"
    assert len(asked) == 2

    first, second = pair(tmp_path, "other")
    first.tell(note(ended=True, verdict="stuck", reason="chat."))
    asked.clear()

    def look_after_the_end() -> dict[str, Any]:
        asked.append(dict(params["carry"]))
        verdict, why = params["carry"]["give_up"]
        return {"ended": True, "verdict": verdict, "reason": why, "msg": why}

    done = health.follow(look_after_the_end, params, "gpu02", lambda text: None, second)
    assert (done["verdict"], done["msg"]) == ("stuck", "gpu01, which shares this server, is stuck: chat.")


def test_a_later_host_does_not_wait_for_one_that_nobody_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Together(tmp_path, "t", ["gpu01", "gpu02"], "gpu02")
    assert second.waits() == "gpu01"
    monkeypatch.setattr(together, "NO_NOTE", 0.0)
    assert second.waits() == ""


def test_ranks_of_several_hosts_that_do_not_meet_point_at_the_network_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    result = {"verdict": "stuck", "phase": "distributed", "msg": "sglang is stuck.", "log_tail": "Init\n"}
    params = {"name": "sglang", "run_id": "r", "nodes": ["gpu01", "gpu02"]}
    assert "sglang_dist_init_addr" in health.completed(dict(result), params, "gpu01")["msg"]
    assert "sglang_dist_init_addr" not in health.completed(dict(result), {**params, "nodes": []}, "gpu01")["msg"]


def test_a_failure_gets_its_cause_and_its_log_a_private_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    log = "[2026-11-29 17:25:16] server_args=ServerArgs()\nTraceback (most recent call last):\nAssertionError\n"
    result = {"verdict": "failed", "msg": "sglang failed.", "log_tail": log, "exit_status": 1, "evidence_files": {}}
    done = health.completed(result, {"name": "sglang", "run_id": "r1"}, "gpu/01")
    folder = tmp_path / "health" / "gpu_01-sglang-r1"
    assert (folder / "log.txt").read_text() == log
    assert (folder.stat().st_mode & 0o77, (folder / "log.txt").stat().st_mode & 0o77) == (0, 0)
    assert done["diagnosis"]["id"] and str(folder) in done["msg"] and "log_tail" not in done
