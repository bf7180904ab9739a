"""What SGLang's benchmark client wrote, read strictly: a line of JSON with all that a measurement needs, or a sentence
on what is wrong with it. The client writes a bare Infinity (no JSON) for an unlimited request rate; anywhere else a
number that is none spoils the measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What the client means by unlimited, and writes as Infinity.
_MAY_BE_INFINITE = ("request_rate",)
NUMBERS = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_itl_ms",
    "median_tpot_ms",
    "mean_tpot_ms",
    "median_e2e_latency_ms",
    "p99_e2e_latency_ms",
)
# With --output-details, an entry for each request in its order. (Another key, errors, not in every version.)
LISTS = ("output_lens", "ttfts", "itls", "generated_texts")


class OutputError(Exception):
    """The output can't be used; the text is one sentence."""


@dataclass(frozen=True)
class Request:
    """One request; seconds. `accept_length` is None where the server did not tell it."""

    success: bool
    ttft: float
    latency: float
    output_tokens: int
    accept_length: float | None = None
    error: str = ""

    @property
    def verifications(self) -> float | None:
        """How many steps made its tokens: the server divides the tokens by them for the accept length."""
        return self.output_tokens / self.accept_length if self.accept_length else None


@dataclass(frozen=True)
class Output:
    """The client's report. `average` is the server's own average accept length after the run, None for none."""

    numbers: Mapping[str, float]
    requests: tuple[Request, ...]
    texts: tuple[str, ...]
    server_info: Mapping[str, Any] = field(repr=False, default_factory=dict)
    average: float | None = None


def parse(text: str) -> Output:
    """The one line of the output file. OutputError says what is wrong."""
    if not text.strip():
        raise OutputError("The benchmark client wrote no result.")
    if not text.endswith("\n"):
        raise OutputError("The benchmark client's result is cut off: its line has no end.")
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1:
        raise OutputError(f"The benchmark client's file holds {len(lines)} results where one was expected.")
    try:
        facts = json.loads(lines[0])
    except ValueError as error:
        raise OutputError(f"The benchmark client's result is no JSON ({error}).") from None
    if not isinstance(facts, dict):
        raise OutputError("The benchmark client's result is no object.")
    numbers = {name: _number(facts, name) for name in NUMBERS}
    _finite(facts)
    if numbers["duration"] <= 0:
        raise OutputError(f"The benchmark client's result has a duration of {numbers['duration']:g} s.")
    info = facts.get("server_info")
    average: Any = facts.get("accept_length")
    return Output(
        numbers=numbers,
        requests=_requests(facts),
        texts=tuple(str(one) for one in facts["generated_texts"]),
        server_info=info if isinstance(info, dict) else {},
        # 0 stands for counters that have not moved.
        average=float(average) if _is_number(average) and average > 0 else None,
    )


def _number(facts: Mapping[str, Any], name: str) -> float:
    if name not in facts:
        raise OutputError(f"The benchmark client's result has no {name}: is this a version that is not known here?")
    value = facts[name]
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise OutputError(f"The benchmark client's result has {value!r} as {name}.")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(facts: Mapping[str, Any]) -> None:
    """Refuse NaN and Infinity wherever they stand, but for what may be unlimited and for what the server says."""
    for name, value in facts.items():
        if name in _MAY_BE_INFINITE or name == "server_info":
            continue
        for one in _leaves(value):
            if isinstance(one, float) and not math.isfinite(one):
                raise OutputError(f"The benchmark client's result has {one!r} in {name}.")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]


def _requests(facts: Mapping[str, Any]) -> tuple[Request, ...]:
    lists: dict[str, Sequence[Any]] = {}
    for name in LISTS:
        value = facts.get(name)
        if not isinstance(value, list):
            raise OutputError(f"The benchmark client's result has no list {name} (--output-details).")
        lists[name] = value
    count = len(lists["output_lens"])
    for name, value in lists.items():
        if len(value) != count:
            raise OutputError(f"The benchmark client's result has {len(value)} {name} for {count} requests.")
    errors = facts.get("errors")
    errors = errors if isinstance(errors, list) and len(errors) == count else [""] * count
    found = []
    for tokens, ttft, gaps, error in zip(lists["output_lens"], lists["ttfts"], lists["itls"], errors):
        if not _is_number(tokens) or not _is_number(ttft) or not isinstance(gaps, list):
            raise OutputError("The benchmark client's result has a request without lengths or times.")
        if not all(_is_number(gap) for gap in gaps):
            raise OutputError("The benchmark client's result has a request with a gap that is no number.")
        failed = bool(error) or tokens <= 0
        found.append(Request(not failed, float(ttft), float(ttft) + sum(gaps), int(tokens), error=str(error or "")))
    return tuple(found)


@dataclass(frozen=True)
class Notes:
    """What bench_client noted. `began` and `ended` (seconds of the monotonic clock) bound the measured requests; they
    and `requests` are None where the client did not tell."""

    module: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[Request, ...] | None = None
    began: float | None = None
    ended: float | None = None
    import_failed: str = ""


def parse_notes(text: str) -> Notes:
    """The notes, however far they came. A line that was cut off is passed over."""
    module, versions, import_failed = "", {}, ""
    requests: tuple[Request, ...] | None = None
    began = ended = None
    for line in text.splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        if facts.get("event") == "begin":
            module, versions = facts["module"], facts["versions"]
        elif facts.get("event") == "import_failed":
            import_failed = facts["why"]
        elif facts.get("event") == "requests":
            requests, began, ended = tuple(Request(**row) for row in facts["rows"]), facts["began"], facts["ended"]
    return Notes(module, versions, requests, began, ended, import_failed)
