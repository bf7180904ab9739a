"""A whole run of a benchmark made from planted step times and accept lengths, for tests of the report."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_benchmark import plan, runs, settings, variants

# Milliseconds a step by concurrency, and accept lengths: 2 steps pay up to 4 requests, 3 steps nowhere, as measured on
# hosts like these.
STEPS = {
    "baseline": {1: 12.0, 4: 13.1, 16: 17.5},
    "eagle3-1-step": {1: 16.4, 4: 18.8, 16: 33.0},
    "eagle3-2-step": {1: 18.9, 4: 23.5, 16: 51.0},
    "eagle3-3-step": {1: 30.0, 4: 36.0, 16: 66.0},
}
ACCEPT = {"eagle3-1-step": 1.80, "eagle3-2-step": 2.36, "eagle3-3-step": 2.10}
SPECULATION = {"algorithm": "EAGLE3", "draft_attention_backend": "flashinfer"}


def make(
    artifacts: Path,
    name: str = "planted",
    *,
    host: str = "gpu01.example.com",
    steps: Mapping[str, Mapping[int, float]] = STEPS,
    accept: Mapping[str, float] = ACCEPT,
    rounds: int = 3,
    seed: int = 4,
    slower: float = 1.0,
    failing: str = "",
    given: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> runs.Run:
    """`slower` divides all throughputs, `failing` names a variant of which no start succeeds, `data` goes over every
    measurement."""
    with mock.patch("os.fsync"):  # hundreds of small files that need not outlast a power cut
        return _make(artifacts, name, host, steps, accept, rounds, seed, slower, failing, given, data)


def _make(
    artifacts: Path,
    name: str,
    host: str,
    steps: Mapping[str, Mapping[int, float]],
    accept: Mapping[str, float],
    rounds: int,
    seed: int,
    slower: float,
    failing: str,
    given: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
) -> runs.Run:
    chosen, problems = settings.read({"concurrencies": sorted(steps["baseline"]), **(given or {})})
    assert not problems, problems
    server = variants.Server(
        SPECULATION, "/models/Kimi-K25-eagle3", {"tp_size": 8, "mem_fraction_static": 0.88}, {"EAGLE3_PROFILE": "1"}
    )
    made, problems = variants.expand(chosen, server)
    assert not problems, problems
    made = [one for one in made if one.name in steps]
    cells = [
        variants.Cell(f"c{number}-o{length}-{prompt_set}", number, 0, length, "/p.json", prompt_set, 16)
        for prompt_set in ("mixed",)
        for length in chosen["output_lengths"]
        for number in sorted(steps["baseline"])
    ]
    run, _ = runs.begin(name, 1.8e9, artifacts)
    content = {"settings": chosen, "variants": [one.as_dict() for one in made],
               "cells": [one.as_dict() for one in cells]}  # fmt: skip
    run.write_plan(host, content)
    generator = random.Random(seed)
    for number in range(1, rounds + 1):
        for one in plan.order([each.name for each in made], number, 1):
            if one == failing:
                failure = runs.Failure(
                    one, number, "The server ran out of GPU memory while it captured CUDA graphs.",
                    "Lower mem_fraction_static.", "health", "torch.OutOfMemoryError: CUDA out of memory.", "play",
                    f"2027-01-15T0{number}:00:00Z", "/var/log/sglang/benchmark.log",
                )  # fmt: skip
                run.write_failure(host, failure)
                continue
            of_start = generator.gauss(0, 0.004)
            for repeat in (1, 2, 3):
                for cell in cells:
                    noise = math.exp(of_start + generator.gauss(0, 0.004)) / slower
                    run.write_measurement(
                        host,
                        runs.Measurement(
                            one, number, cell.name, repeat,
                            {**measurement(one, cell, steps[one][cell.concurrency], accept.get(one), noise),
                             **(data or {})}, session="play",
                        ),
                    )  # fmt: skip
    run.write_progress(host, {"steps": [{"round": 1, "variant": "baseline", "seconds": 310.0}] * (rounds * len(made))})
    return run


def measurement(name: str, cell: variants.Cell, step: float, accept: float | None, noise: float) -> dict[str, Any]:
    speed = cell.concurrency * (accept or 1.0) * 1000 / step * noise
    watts = 1900.0 + 60 * cell.concurrency
    first = 90.0 * (1 + cell.concurrency / 8) / noise
    argv = "/opt/sglang/venv/bin/python -m sglang.launch_server --model-path /models/Kimi-K2.5 --tp-size 8"
    tail = "" if name == "baseline" else f" --speculative-algorithm EAGLE3 --speculative-num-steps {name.split('-')[1]}"
    return {
        "schema": 1, "started": "2027-01-15T08:00:00Z", "duration_s": 48.0, "completed": 16, "failed_requests": 0,
        "requested": 16, "concurrency": cell.concurrency, "input_tokens": 4096,
        "output_tokens": 16 * cell.output_length,
        "output_tokens_per_s": speed, "output_tokens_per_s_per_request": speed / cell.concurrency,
        "ttft_ms": {"p50": first, "p99": first * 2.6, "mean": first * 1.1},
        "itl_ms": {"p50": step / noise, "p99": step * 1.4 / noise, "mean": step / noise},
        "tpot_ms": {"p50": step / (accept or 1) / noise, "mean": step / (accept or 1) / noise},
        "e2e_ms": {"p50": 3000.0, "p99": 3500.0}, "accept_length": accept,
        "accept_length_source": "requests" if accept else None, "step_ms": step / noise,
        "gpu": {"memory_mib": {f"GPU-{n}": 90000 for n in range(8)}, "watts_mean": watts, "joules": watts * 48,
                "tokens_per_joule": speed / watts},
        "per_request": [], "command": "python bench_serving --base-url http://127.0.0.1:30000 --seed 1",
        "server_command": argv + tail, "environment": {"NCCL_PROTO": "LL", "HF_TOKEN": "<hidden>"},
        "versions": {"sglang": "0.5.23", "torch": "2.9.1", "driver": "580.95.05"},
        "client_module": "sglang.bench_serving",
        "prompt_set": {"name": "mixed", "sha256": "ab12", "prompts": 96}, "output_sha256": "cd34", "problems": [],
        "clock_jump_s": 0.0, "not_measured": {},
    }  # fmt: skip
