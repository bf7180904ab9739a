"""Which hosts a policy lets a reset touch: by a table. What comes before the servers' end: with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gpu_host import arguments, later_rank, policy, router, server_state
from gpu_host.policy import Gate, RouterTrouble, decide
from gpu_host.processes import Patterns
from gpu_host.readings import Readings
from gpu_host.scope import Scope
from gpu_host.server_state import ServerState

from tests.router_double import RouterDouble

TABLE = yaml.safe_load((Path(__file__).parent / "cases" / "policies.yml").read_text())
CASES = pytest.mark.parametrize("case", TABLE["cases"], ids=[case["name"] for case in TABLE["cases"]])
NO_GPUS = Readings("none", None, None, (), None)


def states(case: dict[str, Any]) -> list[ServerState]:
    return [
        ServerState(name=f"s{number}", why="", **{"main_pid": 100 + number, **server})
        for number, server in enumerate(case["servers"])
    ]


@CASES
def test_drain_waits_for_those_whose_requests_can_finish(case: dict[str, Any]) -> None:
    servers = states(case)
    decision = decide("drain", servers, case.get("unknown", ()))
    names = {one.main_pid: one.name for one in servers}
    assert decision.skip == ""
    assert [names[pid] for pid in decision.wait_for] == case["drain"]
    assert case.get("notes", "") in " ".join(decision.notes)
    assert bool(decision.notes) is bool(case.get("notes"))


@CASES
@pytest.mark.parametrize("name", policy.SPARING)
def test_a_sparing_policy_names_what_it_spares(case: dict[str, Any], name: str) -> None:
    decision = decide(name, states(case), case.get("unknown", ()))
    if not case[name]:
        assert decision == policy.Decision()
    else:
        assert decision.skip.startswith(f"policy {name}: ")
        assert case[name] in decision.skip


@CASES
def test_force_waits_for_nobody(case: dict[str, Any]) -> None:
    assert decide("force", states(case), case.get("unknown", ())) == policy.Decision()


# ---- before the first signal ----


class Clock:
    """Time that passes by sleeping alone."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


class Host:
    """Servers whose state is a function of the time, a process table of their mains, and the gates to them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state_folder = str(folder / "state")
        self.clock = Clock()
        self.seen: Callable[[float], Sequence[ServerState]] = lambda _now: ()
        self.looks = 0
        self.alive = True
        self.argv: dict[int, tuple[str, ...]] = {}
        monkeypatch.setattr(server_state, "observe", self.observe)

    def observe(self, *_: object, **__: object) -> server_state.Observation:
        self.looks += 1
        return server_state.Observation(tuple(self.seen(self.clock.now)), NO_GPUS)

    def process(self, pid: int) -> Any:
        argv = self.argv.get(pid, ("sglang", "--api-key", "own"))
        return SimpleNamespace(pid=pid, gone=not self.alive, start_ticks=1, name="python3", argv=argv)

    def environ(self, _pid: int) -> dict[str, str]:
        return {}

    def cwd(self, _pid: int) -> str:
        return "/"

    def gate(self, **given: Any) -> Gate:
        params = {name: spec["default"] for name, spec in arguments.GPU_RESET.items()}
        params |= {"state_folder": self.state_folder, **given}
        proc: Any = self
        return Gate(params, Patterns(), Scope(), proc, "run-1", self.clock, self.clock.sleep)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def server(
    name: str = "s", state: str = "busy", count: int | None = 1, pid: int = 100, port: int = 30000
) -> ServerState:
    return ServerState(
        name, state, "", main_pid=pid, pids=(pid,), port=port, running=count, waiting=None if count is None else 0
    )


def chosen(*pids: int) -> Any:
    return {pid: SimpleNamespace(ours=True, main=True, process=SimpleNamespace(start_ticks=1)) for pid in pids}


def passed(gate: Gate, *pids: int) -> str:
    """Decided, and cleared: why not, or ''."""
    return gate.decide(chosen(*pids or (100,)), NO_GPUS) or gate.clear(chosen(*pids or (100,)), NO_GPUS)


def test_a_drain_ends_soon_after_the_last_request(host: Host) -> None:
    host.seen = lambda now: [server(count=2) if now < 10 else server(state="idle", count=0)]
    assert passed(host.gate(grace=30.0)) == ""
    assert 10 + policy.SETTLED_SECONDS <= host.clock.now < 12


def test_a_drain_that_sees_a_request_come_again_waits_for_it_too(host: Host) -> None:
    host.seen = lambda now: [server(state="idle", count=0) if 3 <= now < 3.6 or now > 9 else server()]
    passed(host.gate(grace=30.0))
    assert host.clock.now >= 9 + policy.SETTLED_SECONDS


def test_a_drain_ends_at_its_deadline_and_says_what_was_left(host: Host) -> None:
    host.seen = lambda _now: [server(count=3)]
    gate = host.gate(grace=5.0)
    assert passed(gate) == ""
    assert 5 <= host.clock.now < 6
    assert gate.notes == ["after 5 s of draining: s is busy (3 running, 0 waiting); told to end all the same"]


def test_a_later_rank_is_waited_for_until_its_first_one_is_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.argv = {100: ("sglang", "--node-rank", "1")}
    host.seen = lambda _now: [server(count=None), server("t", "idle", 0, 200, 30001)]
    monkeypatch.setattr(later_rank, "head_is_gone", lambda _proc, _argv, pids: pids == (100,) and host.clock.now > 4)
    passed(host.gate(grace=300.0), 100, 200)
    assert 4 + policy.SETTLED_SECONDS <= host.clock.now < 7
    monkeypatch.setattr(later_rank, "head_is_gone", lambda _proc, _argv, pids: pids == (100,))
    assert "s is busy" in passed(host.gate(policy="idle_only"), 100, 200)


@pytest.mark.parametrize("name", ["drain", "idle_only", "zombies_only"])
def test_a_later_rank_whose_first_one_was_reset_ends_and_the_hosts_own_server_is_asked_as_ever(
    host: Host, name: str
) -> None:
    host.argv = {100: ("sglang", "--node-rank", "1")}
    host.seen = lambda _now: [server(count=None)]
    assert (passed(host.gate(policy=name, head_is_reset=True)), host.clock.now < 3) == ("", True)
    host.seen = lambda now: [server(count=None), server("own", "busy" if now < 9 else "idle", int(now < 9), 200, 30001)]
    why = passed(host.gate(policy=name, head_is_reset=True), 100, 200)
    if name == "drain":
        assert why == "" and 9 + policy.SETTLED_SECONDS <= host.clock.now < 11
    else:
        assert why == f"policy {name}: own is busy (1 running, 0 waiting)"


def test_a_server_that_hangs_while_it_drains_is_waited_for_no_longer(host: Host) -> None:
    host.seen = lambda now: [server(state="busy" if now < 4 else "hung", count=3)]
    passed(host.gate(grace=300.0))
    assert host.clock.now < 4 + policy.SETTLED_SECONDS + 1


def test_an_idle_server_is_not_waited_for(host: Host) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    passed(host.gate())
    assert host.clock.now == 0


def test_idle_only_sees_requests_that_come_in_gaps(host: Host) -> None:
    host.seen = lambda now: [server() if 1.4 < now < 1.8 else server(state="idle", count=0)]
    gate = host.gate(policy="idle_only")
    assert gate.decide(chosen(100), NO_GPUS) == ""
    assert gate.clear(chosen(100), NO_GPUS) == "policy idle_only: s is busy (1 running, 0 waiting)"


def test_idle_only_takes_servers_that_stay_idle(host: Host) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    assert passed(host.gate(policy="idle_only")) == ""
    assert host.clock.now >= policy.QUIET_SECONDS


def test_zombies_only_looks_once_more_before_the_end(host: Host) -> None:
    zombie = ServerState("s", "zombie", "", main_pid=100, pids=(100,), memory_mib=9)
    host.seen = lambda _now: [zombie] if host.looks < 2 else [server(state="idle", count=0)]
    assert passed(host.gate(policy="zombies_only")) == "policy zombies_only: s is idle (0 running, 0 waiting)"


def test_only_the_servers_that_would_end_count(host: Host) -> None:
    host.seen = lambda _now: [server(), server("t", "idle", 0, 200, 30001)]
    assert passed(host.gate(policy="idle_only"), 200) == ""
    assert "s is busy" in passed(host.gate(policy="idle_only"), 100, 200)


def test_a_process_of_no_known_server_makes_a_sparing_policy_skip(host: Host) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    assert passed(host.gate(policy="idle_only"), 100, 300).endswith("the state of python3 (300) can't be known")


# ---- the router ----


@pytest.fixture(params=["uuid", "url", "old"])
def double(request: pytest.FixtureRequest) -> Iterator[RouterDouble]:
    with RouterDouble(["http://gpu01:30000", "http://gpu02:30000"], request.param) as double:
        yield double


def routed(host: Host, double: RouterDouble, **given: Any) -> Gate:
    return host.gate(router_url=double.url, worker_url="http://gpu01:{port}", **given)


def test_a_server_is_out_of_the_router_before_its_requests_are_waited_for(host: Host, double: RouterDouble) -> None:
    listed: list[bool] = []

    def seen(now: float) -> list[ServerState]:
        listed.append("http://gpu01:30000" in double.workers)
        return [server() if now < 3 else server(state="idle", count=0)]

    host.seen = seen
    gate = routed(host, double)
    passed(gate)
    assert listed[0] is True and not any(listed[1:]) and len(listed) > 4
    assert gate.report == {"url": double.url, "taken_out": ["http://gpu01:30000"], "put_back": []}
    assert [one.worker for one in router.noted(host.state_folder)] == ["http://gpu01:30000"]


def test_what_is_skipped_after_all_goes_back_with_the_servers_key(host: Host, double: RouterDouble) -> None:
    host.seen = lambda _now: [server(state="idle", count=0) if host.looks < 2 else server()]
    gate = routed(host, double, policy="idle_only")
    assert "s is busy" in passed(gate)
    assert "http://gpu01:30000" not in double.workers
    assert gate.put_back_living() == ""
    assert "http://gpu01:30000" in double.workers
    assert double.keys == {"http://gpu01:30000": "own"}
    assert gate.report["put_back"] == ["http://gpu01:30000"]
    assert router.noted(host.state_folder) == []


def test_what_does_not_serve_stays_out_and_noted(host: Host, double: RouterDouble) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    gate = routed(host, double)
    passed(gate)
    host.seen = lambda _now: [server(state="starting", count=None)]
    assert gate.put_back_living() == ""
    assert "http://gpu01:30000" not in double.workers
    assert len(router.noted(host.state_folder)) == 1


def test_a_router_that_is_gone_when_a_server_should_go_back_is_told_and_noted(host: Host) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    with RouterDouble(["http://gpu01:30000"]) as double:
        gate = routed(host, double)
        passed(gate)
    assert gate.put_back_living().startswith("http://gpu01:30000 is still out of its router: The router http://127")
    assert len(router.noted(host.state_folder)) == 1


@pytest.mark.parametrize("state", ["idle", "busy", "starting"])
def test_a_router_that_does_not_answer_stops_the_reset_of_a_living_server(host: Host, state: str) -> None:
    host.seen = lambda _now: [server(state=state, count=0)]
    gate = host.gate(router_url="http://127.0.0.1:9", worker_url="http://gpu01:{port}")
    with pytest.raises(RouterTrouble):
        passed(gate)
    assert gate.taken == [] and router.noted(host.state_folder) == []


def test_a_router_that_does_not_answer_keeps_no_hung_server_alive(host: Host) -> None:
    host.seen = lambda _now: [server(state="hung", count=3)]
    gate = host.gate(router_url="http://127.0.0.1:9", worker_url="http://gpu01:{port}")
    assert passed(gate) == ""
    assert "http://127.0.0.1:9" in gate.report["problem"]


def test_a_server_that_the_router_does_not_list_is_said_and_not_put_in(host: Host, double: RouterDouble) -> None:
    host.seen = lambda _now: [server(state="idle", count=0, port=31000)]
    gate = routed(host, double)
    assert passed(gate) == ""
    assert gate.notes == [
        f"the router {double.url} does not list http://gpu01:31000 (it lists http://gpu01:30000, http://gpu02:30000)"
    ]
    assert gate.put_back_living() == "" and len(double.workers) == 2


def test_what_an_earlier_run_took_out_and_left_is_put_back_by_this_one(host: Host, double: RouterDouble) -> None:
    host.seen = lambda _now: [server(state="idle", count=0)]
    passed(routed(host, double))  # and dies here
    again = routed(host, double)
    passed(again)
    assert again.report["taken_out"] == ["http://gpu01:30000"]
    assert again.put_back_living() == ""
    assert "http://gpu01:30000" in double.workers


@pytest.mark.parametrize(
    ("address", "pid", "out"),
    [
        ("http://gpu01:{port}", 200, ["http://gpu01:30001"]),
        ("http://gpu01:30000", 200, []),  # the address of the server that lives on
        ("http://gpu01:30000", 100, ["http://gpu01:30000"]),
    ],
)
def test_of_two_servers_the_one_that_lives_on_stays_in_the_router(
    host: Host, address: str, pid: int, out: list[str]
) -> None:
    host.seen = lambda _now: [server(state="idle", count=0), server("t", "idle", 0, 200, 30001)]
    with RouterDouble(["http://gpu01:30000", "http://gpu01:30001"]) as double:
        gate = host.gate(router_url=double.url, worker_url=address)
        passed(gate, pid)
    assert gate.report.get("taken_out", []) == out


def test_check_mode_says_what_would_come_first(host: Host) -> None:
    host.seen = lambda _now: [server(count=3)]
    gate = host.gate(grace=20.0, router_url="http://gw:1", worker_url="http://gpu01:{port}")
    assert gate.decide(chosen(100), NO_GPUS) == ""
    assert gate.intention() == (
        "take http://gpu01:30000 out of the router http://gw:1 and wait up to 20 s for 3 requests of s"
    )
    assert not Path(host.state_folder).exists()
