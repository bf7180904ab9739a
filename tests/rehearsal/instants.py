"""Kills the main process of a starting real server at chosen instants, resets, and watches what comes back.

``python -m tests.rehearsal.instants --instants 30 --into docs/kill-at-any-instant.json`` (about ten minutes on two
cores). Each server has a host of its own; two start at a time, and a host is watched while the next ones start. Some
are not reset: they show what the others would have left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_host import startup_phases

from simulator.host import wait_gone
from tests.rehearsal import environment
from tests.rehearsal.host import Left, RehearsalHost, titles

AT_ONCE = 2
READY, COMPILING = "ready", "compiling"
WATCH = 45.0
"""Seconds for which nothing may come back: orphans were seen to take a GPU 10 s after the kill, and to die at 30 s."""
LOOK = 3.0
START_LIMIT = 300.0


@dataclass
class Instant:
    """One kill: when (seconds after the start), in which phase, what it left, what the reset said, what came back."""

    at: float
    phase: str
    reset: bool
    left: list[str] = field(default_factory=list)
    left_mib: int = 0
    verdict: str = ""
    reason: str = ""
    killed: list[str] = field(default_factory=list)
    cleaned: int = 0
    reset_seconds: float = 0.0
    watched: float = 0.0
    back: list[str] = field(default_factory=list)
    back_mib: int = 0
    back_at: float | None = None


@dataclass(frozen=True)
class Job:
    """One kill to play: `at` seconds after the start, or when it is `READY` or `COMPILING` (with nothing compiled)."""

    number: int
    at: float | str
    reset: bool = True


def play(models: Path, folder: Path, job: Job, starting: threading.Semaphore) -> Instant:
    """Start a server, kill its main at that instant, reset or not, and watch."""
    at, reset = job.at, job.reset
    compiled = folder / "compiled" if at == COMPILING else None
    with RehearsalHost(folder, models, "server", compiled) as host:
        with starting:
            began = time.monotonic()
            main = host.start(*host.drafter_arguments())
            while not _reached(host, at, time.monotonic() - began):
                if not main.alive():
                    raise RuntimeError(f"The server ended by itself:\n{host.log_text()[-3000:]}")
                time.sleep(0.05)
            one = Instant(round(time.monotonic() - began, 2), startup_phases.phase_of(host.log_text()), reset)
            main.send(signal.SIGKILL)
            wait_gone([main.pid], 10)
            _note_left(one, host.left())
            if reset:
                record = host.reset()
                one.verdict, one.reason = record["verdict"], record["reason"]
                one.killed = sorted(row["name"] for row in record["killed"])
                one.cleaned, one.reset_seconds = len(record["cleaned"]), record["seconds"]["total"]
        _watch(one, host)
    return one


def _reached(host: RehearsalHost, at: float | str, spent: float) -> bool:
    if not isinstance(at, str):
        return spent >= at
    if spent > START_LIMIT:
        raise RuntimeError(f"The server is not {at} after {spent:.0f} s:\n{host.log_text()[-3000:]}")
    if at == READY:
        return host.ready()
    # Looked at less often: it reads every process of the machine.
    time.sleep(0.3)
    return any("cc1plus" in line for line in host.left().processes.values())


def _note_left(one: Instant, left: Left) -> None:
    one.left, one.left_mib = list(titles(left)), left.mib


def _watch(one: Instant, host: RehearsalHost) -> None:
    """Of a host that was reset: the first that comes back. Of another one: what is there in the end, and the most MiB
    on the way: orphans of an import take the GPU ten seconds later and give it back when they fail."""
    began = time.monotonic()
    while True:
        left, spent = host.left(), time.monotonic() - began
        if left and not (one.reset and one.back):
            one.back, one.back_at = list(titles(left)), round(spent, 1)
        elif not one.reset and not left:
            one.back, one.back_at = [], None
        one.back_mib = max(one.back_mib, left.mib)
        if spent >= WATCH:
            break
        time.sleep(LOOK)
    one.watched = round(time.monotonic() - began, 1)


def spread(count: int, until: float, seed: int) -> list[float]:
    """One instant in each of `count` equal parts of the start-up, in any order."""
    choose = random.Random(seed)
    found = [(part + choose.random()) * until / count for part in range(count)]
    choose.shuffle(found)
    return found


def run(count: int, controls: int, seed: int, models: Path, say: Any = print) -> dict[str, Any]:
    """`count` instants with a reset, `controls` without one. Nearly all of them find what torch compiled."""
    began = time.monotonic()
    starting = threading.Semaphore(AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="rehearsal-instants-") as folder, ThreadPoolExecutor(64) as pool:

        def played(job: Job) -> Instant:
            one = play(models, Path(folder) / str(job.number), job, starting)
            what = f"{one.verdict} in {one.reset_seconds:.1f} s" if job.reset else "not reset"
            what += f"; left {len(one.left)} processes, {one.left_mib} MiB, back {one.back or 'nothing'}"
            say(f"{one.at:5.1f} s, {one.phase}: {what}")
            return one

        # The first that gets ready compiles for the others, the second one tells how long they will take.
        found = list(pool.map(played, [Job(number, COMPILING) for number in range(count // 10)] + [Job(10, READY)]))
        found += [played(Job(11, READY))]
        until = found[-1].at
        times = spread(count - len(found), until, seed)
        say(f"A start-up takes {until:.0f} s; {len(times)} instants over it, {controls} more without a reset.")
        jobs = [Job(100 + number, at) for number, at in enumerate(times)]
        jobs += [Job(1000 + number, at, False) for number, at in enumerate(spread(controls, until * 0.9, seed + 1))]
        random.Random(seed).shuffle(jobs)
        found += pool.map(played, jobs)
    found.sort(key=lambda one: one.at)
    return {
        "sglang": environment.SGLANG,
        "speculation": "EAGLE3",
        "seed": seed,
        "watch_seconds": WATCH,
        "start_up_seconds": until,
        "seconds": round(time.monotonic() - began, 1),
        "instants": [asdict(one) for one in found],
    }


def problems(result: dict[str, Any]) -> list[str]:
    """What speaks against the resets, one sentence each."""
    found = []
    for one in result["instants"]:
        if one["reset"] and (one["verdict"] != "clean" or one["back"]):
            found.append(
                f"killed after {one['at']} s ({one['phase']}): {one['verdict']} {one['reason']}, back: {one['back']}"
            )
    return found


def main(words: Sequence[str]) -> int:
    """Exit status 1 where a reset was not clean or something came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instants", type=int, default=30)
    parser.add_argument("--controls", type=int, default=5, help="instants that no reset follows")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--into", type=Path, help="file for the result, JSON")
    options = parser.parse_args(words)

    def say(text: str) -> None:
        print(text, flush=True)

    result = run(options.instants, options.controls, options.seed, environment.models(), say)
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n")
    for problem in problems(result):
        say(problem)
    clean = sum(one["reset"] and one["verdict"] == "clean" for one in result["instants"])
    say(f"{clean} of {options.instants} clean, in {result['seconds']:.0f} s, seed {options.seed}.")
    return 1 if problems(result) else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
