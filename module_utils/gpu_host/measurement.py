"""One measurement, put together from the client's report, its notes, the GPU samples and the server's log.

Every figure that can't be known is None, and `not_measured` says why; none is ever 0 for want of a better.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import gpu_samples
from .bench_output import Notes, Output, Request
from .gpu_samples import Sample

SCHEMA = 1
LOG_INTERVAL = 40  # decode steps between two log lines of SGLang, at which its counters move
_ACCEPTED = re.compile(r"Decode batch.*?#running-req: (\d+).*?accept len: ([0-9.]+)")
# Of the server's resolved arguments, those that tell one variant from another, or must be the same for all.
SERVER_ARGUMENTS = (
    "model_path", "served_model_name", "tp_size", "dp_size", "max_running_requests", "mem_fraction_static",
    "attention_backend", "num_continuous_decode_steps", "disable_cuda_graph", "disable_radix_cache", "context_length",
    "quantization", "dtype", "kv_cache_dtype", "random_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What was asked for; `output_length` in tokens, `input_length` the most tokens of a prompt (0: any)."""

    requested: int
    concurrency: int
    output_length: int
    input_length: int = 0
    ignore_eos: bool = True


@dataclass(frozen=True)
class Span:
    """The measured requests' time: `began` and `ended` of the monotonic clock, `clock_jump_s` by how much more the
    host's wall clock went on meanwhile."""

    began: float
    ended: float
    clock_jump_s: float = 0.0


@dataclass(frozen=True)
class Acceptance:
    """Tokens a verification. `source`: requests, server_counters, log or None, and then `why`."""

    length: float | None
    source: str | None
    verifications: float | None = None
    why: str = ""


def acceptance(output: Output, requests: Sequence[Request], speculates: bool | None, log: str) -> Acceptance:
    """What each request told of itself; else the server's average since the cache was flushed; else its log.

    The average and the log move only every 40 decode steps; what a short run did not reach is unknown, not nothing.
    """
    if speculates is False:
        return Acceptance(None, None, why="The server does not speculate.")
    done = [one for one in requests if one.success]
    # The first token comes with the prompt: an answer of one token has no verification to tell of.
    counted = [one for one in done if one.output_tokens > 1]
    if counted and all(one.verifications for one in counted):
        total = sum(one.verifications or 0 for one in counted)
        return Acceptance(sum(one.output_tokens for one in counted) / total, "requests", total)
    made = sum(one.output_tokens for one in done)
    length, source = output.average, "server_counters"
    if length is None:
        steps = [(int(running), float(accepted)) for running, accepted in _ACCEPTED.findall(log) if float(accepted) > 0]
        verified = sum(running for running, _ in steps)
        length = sum(running * accepted for running, accepted in steps) / verified if verified else None
        source = "log"
    if length is None:
        return Acceptance(
            None,
            None,
            why=f"The answers tell no accept length, and the server's own counters had not moved after {made} tokens: "
            f"they do every {LOG_INTERVAL} steps. Ask for more or longer answers.",
        )
    return Acceptance(length, source, made / length)


def speculates(server_info: Mapping[str, Any]) -> bool | None:
    """None where the server does not tell."""
    if "speculative_algorithm" not in server_info:
        return None
    return bool(server_info["speculative_algorithm"])


def build(
    asked: Asked,
    output: Output,
    notes: Notes,
    span: Span,
    samples: Sequence[Sample],
    sampling_trouble: str,
    log: str,
) -> dict[str, Any]:
    """The figures of a measurement (see the module serving_benchmark for what each is)."""
    numbers = output.numbers
    requests = notes.requests if notes.requests is not None else output.requests
    done = [one for one in requests if one.success]
    not_measured: dict[str, str] = {}
    accepted = acceptance(output, requests, speculates(output.server_info), log)
    if accepted.length is None:
        not_measured["accept_length"] = not_measured["verify_steps"] = accepted.why
    spent = [one for one in done if one.output_tokens > 1 and one.latency > one.ttft]
    decoding = sum(one.latency - one.ttft for one in spent)
    # With speculation a step is a verification; the first token comes with the prompt.
    steps: float = sum(one.output_tokens - 1 for one in spent)
    if accepted.length is not None:
        steps = (
            sum(one.verifications or 0 for one in spent) if accepted.source == "requests" else steps / accepted.length
        )
    step_ms = 1000 * decoding / steps if steps else None
    if speculates(output.server_info) and accepted.length is None:
        step_ms = None
    if step_ms is None:
        not_measured["step_ms"] = accepted.why if spent else "No answer has more than one token."
    rates = [(one.output_tokens - 1) / (one.latency - one.ttft) for one in spent]
    if not rates:
        not_measured["output_tokens_per_s_per_request"] = "No answer has more than one token."
    energy = gpu_samples.energy(samples, span.began, span.ended, sampling_trouble)
    memory = gpu_samples.most_mib(samples)
    if energy.joules is None:
        not_measured.update(dict.fromkeys(("watts_mean", "joules", "tokens_per_joule"), energy.why))
    if not memory:
        not_measured["memory_mib"] = sampling_trouble or "The GPUs could not be read."
    tokens = int(numbers["total_output_tokens"])
    return {
        "schema": SCHEMA,
        "duration_s": numbers["duration"],
        "completed": int(numbers["completed"]),
        "failed_requests": len(requests) - len(done),
        "requested": asked.requested,
        "concurrency": asked.concurrency,
        "output_length": asked.output_length,
        "input_length": asked.input_length,
        "input_tokens": int(numbers["total_input_tokens"]),
        "output_tokens": tokens,
        "output_tokens_per_s": numbers["output_throughput"],
        "output_tokens_per_s_per_request": statistics.fmean(rates) if rates else None,
        "ttft_ms": _times(numbers, "ttft_ms", "p50", "p99", "mean"),
        "itl_ms": _times(numbers, "itl_ms", "p50", "p99", "mean"),
        "tpot_ms": _times(numbers, "tpot_ms", "p50", "mean"),
        "e2e_ms": _times(numbers, "e2e_latency_ms", "p50", "p99"),
        "accept_length": accepted.length,
        "accept_length_source": accepted.source,
        "verify_steps": None if accepted.verifications is None else round(accepted.verifications),
        "step_ms": step_ms,
        "gpu": {
            "memory_mib": memory or None,
            "watts_mean": energy.watts_mean,
            "joules": energy.joules,
            "tokens_per_joule": tokens / energy.joules if energy.joules else None,
        },
        "per_request": [
            {
                "ttft_ms": 1000 * one.ttft,
                "latency_ms": 1000 * one.latency,
                "output_tokens": one.output_tokens,
                "accept_length": one.accept_length,
            }
            for one in done
        ],
        "output_sha256": hashlib.sha256("\0".join(output.texts).encode("utf-8", "surrogatepass")).hexdigest(),
        "server_arguments": {
            name: value
            for name, value in output.server_info.items()
            if (name in SERVER_ARGUMENTS or name.startswith("speculative_")) and value is not None
        },
        "clock_jump_s": round(span.clock_jump_s, 3),
        "not_measured": not_measured,
        "problems": problems(asked, done, output, span),
    }


def _times(numbers: Mapping[str, float], what: str, *names: str) -> dict[str, float]:
    keys = {"p50": "median", "p99": "p99", "mean": "mean"}
    return {name: numbers[f"{keys[name]}_{what}"] for name in names}


def problems(asked: Asked, done: Sequence[Request], output: Output, span: Span) -> list[str]:
    """What a reader must know of the figures, one sentence each; none of it makes them useless."""
    found = []
    short = sum(one.output_tokens < asked.output_length for one in done)
    if short and asked.ignore_eos:
        found.append(f"{short} of {len(done)} answers are shorter than the {asked.output_length} tokens asked for.")
    if abs(span.clock_jump_s) > 0.5 + 0.001 * (span.ended - span.began):
        found.append(
            f"The host's clock was set by {span.clock_jump_s:+.1f} s meanwhile: the durations stand (they are taken "
            "from a clock that is never set), the times of day do not."
        )
    limit = output.server_info.get("max_running_requests")
    if isinstance(limit, int) and limit < asked.concurrency:
        found.append(
            f"The server runs at most {limit} requests at once, {asked.concurrency} were sent: the rest queued."
        )
    return found


def failure(asked: Asked, requests: Sequence[Request], completed: int) -> str:
    """Why these are no figures of the load that was asked for; '' when they are. One sentence."""
    failed = [one for one in requests if not one.success]
    if failed:
        last = [line.strip() for line in failed[0].error.splitlines() if line.strip()]
        words = last[-1][:200] if last else "it says nothing"
        return f"{len(failed)} of {asked.requested} requests failed ({words})."
    if completed < asked.requested:
        short = (
            f": only so many prompts have at most {asked.input_length} tokens, ask for fewer or allow longer ones"
            if asked.input_length
            else ""
        )
        return f"{completed} of {asked.requested} requests were completed{short}."
    return ""
