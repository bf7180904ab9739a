"""NVIDIA's AIPerf (PyPI) as a second opinion on what the module serving_benchmark measures.

AIPerf asks the OpenAI endpoint, the module's client (SGLang's own) /generate. Both are given the same prompts, as many
at a time, with answers of the same length; AIPerf counts tokens as the server tells them. Its inter-token latency is
what SGLang's client calls TPOT: the time after the first token over the tokens after the first.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench import ratios

VERSION = "0.13.0"
WITHIN = 0.03
FIGURES = ("tokens_per_s", "ttft_ms", "itl_ms")


class Failed(Exception):
    """AIPerf measured nothing; the text is its last words."""


@dataclass(frozen=True)
class Figures:
    """Of one measurement: output tokens a second of all requests together, and means over the requests. `answer_tokens`
    is the mean of an answer, `input_tokens` the sum over all requests."""

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    requests: int
    input_tokens: int
    answer_tokens: float

    def asked(self) -> tuple[int, int, float]:
        """What must be the same of two that are compared."""
        return self.requests, self.input_tokens, self.answer_tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """What one measurement asks for: requests at a time, requests in all, tokens of each answer, requests before."""

    concurrency: int
    prompts: int
    output_length: int = 128
    warmup: int = 0


def of_module(measurement: Mapping[str, Any]) -> Figures:
    return Figures(
        measurement["output_tokens_per_s"],
        measurement["ttft_ms"]["mean"],
        measurement["tpot_ms"]["mean"],
        measurement["completed"],
        measurement["input_tokens"],
        measurement["output_tokens"] / measurement["completed"],
    )


def of_report(report: Mapping[str, Any]) -> Figures:
    """Of AIPerf's profile_export_aiperf.json."""
    count = round(report["request_count"]["avg"])
    return Figures(
        report["output_token_throughput"]["avg"],
        report["time_to_first_token"]["avg"],
        report["inter_token_latency"]["avg"],
        count,
        round(report["input_sequence_length"]["avg"] * count),
        report["output_sequence_length"]["avg"],
    )


def words(model: str, port: int, load: Load, prompts: Path, into: Path) -> list[str]:
    """What AIPerf is told."""
    return [
        "profile", "--model", model, "--tokenizer", model,
        "--url", f"http://127.0.0.1:{port}", "--endpoint-type", "chat", "--streaming",
        "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--use-server-token-count", "--use-legacy-max-tokens",
        "--concurrency", str(load.concurrency), "--request-count", str(load.prompts),
        "--warmup-request-count", str(load.warmup), "--extra-inputs", f"max_tokens:{load.output_length}",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--artifact-dir", str(into), "--ui-type", "none", "--workers-max", "1", "--no-server-metrics",
        "--no-gpu-telemetry",
    ]  # fmt: skip


def measure(
    program: Sequence[str], model: str, port: int, load: Load, prompts: Sequence[str], folder: Path, seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Figures:  # fmt: skip
    """One run of AIPerf, in `folder`, which is made anew. Failed where it measured nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True)
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts), encoding="utf-8")
    try:
        done = subprocess.run(
            [*program, *words(model, port, load, lines, folder)],
            cwd=folder,
            env={
                # Its own offline mode refuses a tokenizer in a folder; nothing may be asked of a hub all the same.
                "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "HF_ENDPOINT": "http://127.0.0.1:9",
                "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "120", "OMP_NUM_THREADS": "1", **(environment or {}),
            },
            capture_output=True,
            text=True,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stderr or error.stdout or b""
        raise Failed(f"not done after {seconds:.0f} s: {said[-2000:]!r}") from None
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        raise Failed(f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return of_report(json.loads(found[-1].read_text()))


def compare(pairs: Mapping[str, Sequence[tuple[Figures, Figures]]]) -> dict[str, dict[str, Any]]:
    """By load and figure: the medians of the module and of AIPerf, and the median of their ratios in each round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, found in pairs.items():
        for what in FIGURES:
            both = [(getattr(mine, what), getattr(other, what)) for mine, other in found]
            each = [mine / other for mine, other in both]
            mean, low, high = ratios.interval(each)
            rows[f"{name} {what}"] = {
                "module": round(statistics.median(mine for mine, _ in both), 3),
                "aiperf": round(statistics.median(other for _, other in both), 3),
                "ratio": round(statistics.median(each), 4),
                "mean_ratio": round(mean, 4),
                "interval": [round(low, 4), round(high, 4)],
            }
    return rows


def apart(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The figures whose ratio is further from 1 than `WITHIN`."""
    return {what: row["ratio"] for what, row in rows.items() if abs(row["ratio"] - 1) > WITHIN}
