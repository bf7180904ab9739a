"""The module serving_benchmark and NVIDIA's AIPerf on one server, in turn: do they agree?

What both are asked, and what is compared, is in tests/aiperf.py. Here the server takes its time for what is measured,
and both clients have processors of their own: a model whose step and prefill the GPU decides (benchmark.SIZE), and
prompts of 3900 tokens, so that the first token waits for their computation and not for the web server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from . import benchmark
from .scenarios import scenario
from .session import Session

NAME = "aiperf"
LEAST_ROUNDS = 4
SITE = "/tmp/gpu-aiperf"  # what bundle/aiperf.sh packed, unpacked
SHAPE: Mapping[str, Any] = {
    "variants": {benchmark.BASELINE: None},
    "loads": {"1": 4, "4": 8},
    "output_length": 256,
    "prompt_characters": 9000,
    "probe": (),
    "arguments": {
        # The module flushes the cache of prefixes after its warm-up, AIPerf does not.
        "disable_radix_cache": True,
        # Which prompts are computed together must not depend on which millisecond they come in: one at a time, whole.
        "chunked_prefill_size": 8192,
        "prefill_max_requests": 1,
        "max_total_tokens": 32768,
    },
}


def environment(s: Session, site: str) -> dict[str, str]:
    """AIPerf's, on the server's Python."""
    return {
        "PYTHONPATH": site,
        "PYTHONPYCACHEPREFIX": str(s.bundle.root / "pyc"),
        # It counts tokens by itself as well; a GPU is none of its business.
        "CUDA_VISIBLE_DEVICES": "",
    }


@scenario(NAME, 150, bystanders=False)
def against_aiperf(s: Session) -> None:
    """Round after round until the time is up: each load by both, in another order in every second round."""
    from tests import aiperf

    given = {**SHAPE, **s.variables.get(NAME, {})}
    site = given.pop("site", SITE)
    shape = benchmark.Shape(**given)
    benchmark.tell(s, shape)
    model = str(benchmark.models(s, shape) / "target")
    loads = {
        name: aiperf.Load(int(name), count, shape.output_length, int(name)) for name, count in shape.loads.items()
    }
    client = benchmark.Client(s, shape)

    def theirs(one: benchmark.Running, load: str) -> aiperf.Figures:
        texts = benchmark.prompts(shape, load)
        program = [s.bundle.python, "-m", "aiperf"]
        folder, port = s.work / "aiperf", one.server.port
        return aiperf.measure(program, model, port, loads[load], texts, folder, 90, environment(s, site))

    def ours(one: benchmark.Running, load: str) -> aiperf.Figures:
        result = benchmark.measure(s, shape, one, load, client, 60)
        if result.get("failed"):
            raise aiperf.Failed(str(result["msg"]))
        return aiperf.of_module(result["measurement"])

    try:
        running = benchmark.become_ready(s, shape, client)
        if not running:
            return
        longest = 40.0
        for number in range(1, shape.rounds + 1):
            for load in shape.loads:
                began = time.monotonic()
                if s.end - began < longest + 10:
                    s.say("the time is up")
                    return
                try:
                    if number % 2:
                        other, mine = theirs(running[0], load), ours(running[0], load)
                    else:
                        mine, other = ours(running[0], load), theirs(running[0], load)
                except aiperf.Failed as error:
                    s.check(f"round {number}, {load} at a time: both measure", False, str(error))
                    if number == 1:
                        return
                    continue
                took = time.monotonic() - began
                longest = max(longest, took)
                s.write("pair", round=number, load=f"c{load}", module=asdict(mine), aiperf=asdict(other),
                        seconds=round(took, 1))  # fmt: skip
                s.say(f"round {number}, {load} at a time: {mine} {other}; {took:.0f} s")
    finally:
        client.close()
        judge(s)


def pairs(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[Any, Any]]]:
    """By load the module's and AIPerf's figures of each round, in which both were asked the same."""
    from tests.aiperf import Figures

    found: dict[str, list[tuple[Any, Any]]] = {}
    for line in lines:
        if line["kind"] == "pair":
            mine, other = Figures(**line["module"]), Figures(**line["aiperf"])
            if mine.asked() == other.asked():
                found.setdefault(line["load"], []).append((mine, other))
    return found


def judge(s: Session) -> None:
    """The claims, from what the session has written."""
    from tests import aiperf

    lines = [json.loads(line) for line in (s.out / "session.jsonl").read_text().splitlines()]
    all_pairs = [line for line in lines if line["kind"] == "pair"]
    found = pairs(lines)
    counted = sum(map(len, found.values()))
    s.check("both were asked the same in every round", 0 < counted == len(all_pairs), (counted, len(all_pairs)))
    for load, each in found.items():
        s.check(f"{load}: {LEAST_ROUNDS} rounds count", len(each) >= LEAST_ROUNDS, len(each))
    rows = aiperf.compare(found)
    s.write("comparison", aiperf=aiperf.VERSION, rows=rows)
    for what, row in rows.items():
        close = abs(row["ratio"] - 1) <= aiperf.WITHIN
        s.check(f"{what}: the module and AIPerf agree within 3 %", close, row)
        s.say(f"{what}: {row}")
