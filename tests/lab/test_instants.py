"""A server's main killed at any instant of its start-up, then a reset: what it left never comes back.

Orphans of an import hold no GPU yet and take it 10 s later, whoever has called the host clean meanwhile. The stand-in
does what was recorded; 30 servers do it at a tenth of the time, one more at its true speed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.lab import resets
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.processes import Process

# Seconds of a real start-up with EAGLE-3 (recorded: orphans hold nothing for 10 s, ready after 28 to 44 s).
START_UP = {
    "IMPORT_SECONDS": 10, "INIT_SECONDS": 2, "LOAD_SECONDS": 6, "DRAFT_SECONDS": 2, "POOL_SECONDS": 1,
    "CAPTURE_SECONDS": 10, "JIT_SECONDS": 80, "WARMUP_SECONDS": 2, "INDUCTOR_WORKERS": 1,
}  # fmt: skip
WATCH = 45.0
SPEED = 10
INTERPRETERS = 1.5  # seconds in which interpreters start, whatever SPEED is
HOSTS, SERVERS = 6, 30
# Each has its share of the instants: (what has begun, for at most how many seconds of a real start-up).
STAGES = (("launch", 5), ("import", 10), ("load", 12), ("capture", 10))
MARKS = ("sglang", "multiprocessing", "compile_worker", "/ninja ", "/nvcc ", "nohup ")


@dataclass(frozen=True)
class Outcome:
    """What a reset found after a main was killed so many seconds into a stage, and what came back later."""

    stage: str
    instant: float
    record: dict[str, Any]
    back: frozenset[str]
    watched: float

    def ended(self, name: str) -> int:
        return sum(name in row["name"] for row in self.record["killed"])

    def __str__(self) -> str:
        return f"{self.stage}+{self.instant:.2f}: {self.record['verdict']} {self.record['reason']} {sorted(self.back)}"


def start(host: Host, number: int, speed: float) -> int:
    """Start a server of two ranks, and return the pid of its main at once."""
    command = resets.server_command(
        *resets.EAGLE3, "--base-gpu-id", str(number % 4 * 2), tp=2, port=31000 + number,
        settings=START_UP | {"SPEED": speed},
    )  # fmt: skip
    return int(host.exec(f"nohup setsid {command} > /run/server-{number}.log 2>&1 < /dev/null & echo $!").stdout)


def of_the_server(process: Process) -> bool:
    return process.state != "Z" and any(mark in process.line for mark in MARKS)


def left(host: Host) -> set[str]:
    """Processes, MiB and ports of a server, in words."""
    found = {f"process {process.line[:80]}" for process in host.processes() if of_the_server(process)}
    found |= {f"{mib} MiB on GPU {index}" for index in range(8) if (mib := host.state.used_mib(index))}
    return found | {f"port {port}" for port in listening(host.init) if port != 22}


def listening(init: int) -> set[int]:
    """Ports that somebody listens on in the network namespace of a process, without a process of its own."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{init}/net/{name}").read_text().splitlines()[1:]]
    return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"}


def has_begun(host: Host, stage: str) -> bool:
    lines = [process.line for process in host.processes()]
    if stage == "import":
        return sum("spawn_main" in line for line in lines) == 3
    sign = {"launch": "", "load": "sglang::scheduler", "capture": "/nvcc "}[stage]
    return any(sign in line for line in lines)


def at_an_instant(host: Host, number: int, stage: str, instant: float, speed: float) -> Outcome:
    """Start a server, kill its main `instant` seconds into the stage, reset at once, watch for what is 45 s."""
    pid = start(host, number, speed)
    resets.until(lambda: has_begun(host, stage), stage, seconds=60)
    time.sleep(instant)
    host.kill(pid)
    record = resets.reset(host)
    verdict = time.monotonic()
    back: set[str] = set()
    while time.monotonic() < verdict + WATCH / speed + INTERPRETERS:
        back |= left(host)
        time.sleep(0.5)
    return Outcome(stage, instant, record, frozenset(back), time.monotonic() - verdict)


@dataclass(frozen=True)
class Outcomes:
    seed: int
    scaled: list[Outcome]
    true: Outcome


@pytest.fixture(scope="module")
def outcomes(lab: Lab) -> Iterator[Outcomes]:
    """All servers, several hosts at a time. INSTANTS_SEED repeats the instants of an earlier run."""
    seed = int(os.environ.get("INSTANTS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"INSTANTS_SEED={seed}")
    choose = random.Random(seed)
    stages = [STAGES[number % len(STAGES)] for number in range(SERVERS)]
    instants = [(stage, choose.uniform(0, most / SPEED)) for stage, most in stages]
    first, *others = lab.start_hosts(HOSTS + 1, prefix="instants-")
    idle: Queue[Host] = Queue()
    for host in others:
        idle.put(host)

    def one(numbered: tuple[int, tuple[str, float]]) -> Outcome:
        host = idle.get()
        try:
            return at_an_instant(host, numbered[0], *numbered[1], SPEED)
        finally:
            idle.put(host)

    with ThreadPoolExecutor(HOSTS + 1) as pool:
        # Killed 1 s after it spawned its children, as recorded on a real GPU.
        true = pool.submit(at_an_instant, first, 0, "import", 1.0, 1)
        scaled = list(pool.map(one, enumerate(instants)))
        yield Outcomes(seed, scaled, true.result())
    lab.stop_hosts([host.name for host in (first, *others)])


def test_killed_at_30_instants_of_its_start_up_and_reset_nothing_of_a_server_is_back_later(outcomes: Outcomes) -> None:
    assert len(outcomes.scaled) == SERVERS
    assert [str(one) for one in outcomes.scaled if one.back or one.record["reason"]] == [], outcomes.seed
    assert {one.record["verdict"] for one in outcomes.scaled} == {"clean"}
    assert min(one.watched for one in outcomes.scaled) >= WATCH / SPEED


def test_the_30_instants_met_orphans_of_an_import_and_of_a_compilation(outcomes: Outcomes) -> None:
    """Else the test above would prove little. The kernel ends a worker that had its title before its main died."""
    orphans = [one.ended("multiprocessing.spawn") + one.ended("sglang::scheduler") for one in outcomes.scaled]
    assert sum(number >= 2 for number in orphans) >= 3, outcomes.seed
    assert sum(one.ended("nvcc") > 0 for one in outcomes.scaled) >= 1, outcomes.seed


def test_at_true_speed_45_s_after_the_verdict_nothing_of_a_server_is_back(outcomes: Outcomes) -> None:
    one = outcomes.true
    assert (one.record["verdict"], one.record["reason"]) == ("clean", "")
    assert one.ended("multiprocessing.spawn") == 3
    assert one.record["seconds"]["total"] < 8
    assert one.back == frozenset() and one.watched >= WATCH


def test_an_orphan_that_shows_only_after_the_kill_is_ended_as_well(gpu_host: Host) -> None:
    """One between two images, say, while all others are looked at: here a shell turns into it 1.5 s later."""
    server = gpu_host.start_server(tp=2, settings=resets.FAST | {"OUTLIVE_MAIN": 1})
    orphans = resets.leave_orphans(server)
    gpu_host.state.set_fault("release_ms", 3000, index=0)  # so long does the reset look
    become = "import time, setproctitle; setproctitle.setproctitle('sglang::scheduler_TP1'); time.sleep(1000)"
    late = gpu_host.start(f'setsid sh -c "sleep 1.5; exec python3 -c \\"{become}\\""')
    record = resets.reset(gpu_host, verify_timeout=10.0)
    titled = {process.pid for process in gpu_host.processes() if process.line.startswith("sglang::")}
    assert titled == set()
    assert {late.pid} <= resets.pids(record) <= orphans | {late.pid}
    assert resets.signals(record)[late.pid] == "KILL"
    resets.assert_clean(gpu_host, record)
