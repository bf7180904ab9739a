"""AIPerf beside serving_benchmark: what is taken of each, and when they agree (tests/aiperf.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import aiperf
from tests.aiperf import Figures, Load
from tests.gpu.driver import against_aiperf

REPORT = {
    "request_count": {"avg": 8.0},
    "output_token_throughput": {"avg": 404.9},
    "time_to_first_token": {"avg": 102.3},
    "inter_token_latency": {"avg": 8.24},
    "input_sequence_length": {"avg": 77.0},
    "output_sequence_length": {"avg": 64.0},
}
MEASUREMENT = {
    "output_tokens_per_s": 410.0,
    "ttft_ms": {"p50": 99.0, "mean": 101.0},
    "tpot_ms": {"mean": 8.2},
    "completed": 8,
    "input_tokens": 616,
    "output_tokens": 512,
}


def figures(speed: float, ttft: float = 100.0, itl: float = 8.0, tokens: int = 616) -> Figures:
    return Figures(speed, ttft, itl, 8, tokens, 64.0)


def test_both_reports_give_the_same_figures_and_the_same_requests() -> None:
    mine, other = aiperf.of_module(MEASUREMENT), aiperf.of_report(REPORT)
    assert mine == Figures(410.0, 101.0, 8.2, 8, 616, 64.0)
    assert other == Figures(404.9, 102.3, 8.24, 8, 616, 64.0)
    assert mine.asked() == other.asked()


def test_the_ratio_is_the_median_of_the_rounds_and_apart_is_what_misses_it() -> None:
    pairs = {"c1": [(figures(100), figures(100)), (figures(104), figures(100)), (figures(150), figures(100))]}
    rows = aiperf.compare(pairs)
    assert rows["c1 tokens_per_s"]["ratio"] == 1.04
    low, high = rows["c1 tokens_per_s"]["interval"]
    assert low < rows["c1 tokens_per_s"]["mean_ratio"] < high
    assert aiperf.apart(rows) == {"c1 tokens_per_s": 1.04}


def test_rounds_in_which_the_two_were_not_asked_the_same_do_not_count() -> None:
    def line(other: Figures) -> dict[str, Any]:
        return {"kind": "pair", "load": "c1", "module": figures(100).as_dict(), "aiperf": other.as_dict()}

    lines = [{"kind": "session"}, line(figures(99)), line(figures(99, tokens=700))]
    assert against_aiperf.pairs(lines) == {"c1": [(figures(100), figures(99))]}


def test_on_a_gpu_the_module_and_aiperf_agree_within_3_percent_by_the_rule_that_was_written_before() -> None:
    session = Path(__file__).parents[1] / "gpu" / "recorded" / "h200-benchmark-aiperf-2026-11-30.jsonl"
    lines = [json.loads(line) for line in session.read_text().splitlines()]
    found = against_aiperf.pairs(lines)
    assert {load: len(each) for load, each in found.items()} == {"c1": 5, "c4": 5}
    assert sum(line["kind"] == "pair" for line in lines) == 10
    rows = aiperf.compare(found)
    assert len(rows) == 6 and aiperf.apart(rows) == {}
    assert [line["rows"] for line in lines if line["kind"] == "comparison"] == [rows]
    assert all(line["ok"] for line in lines if line["kind"] == "check")
    text = (Path(__file__).parents[1] / "gpu" / "README.md").read_text()
    assert all(f"{row['ratio']:.4f}" in text for row in rows.values())


PRETENDED = """
import json, pathlib, sys
words = sys.argv
into = pathlib.Path(words[words.index("--artifact-dir") + 1], "run")
asked = [json.loads(line)["text"] for line in open(words[words.index("--input-file") + 1])]
assert asked == ["one", "two"] and words[words.index("--request-count") + 1] == "2", words
if words[words.index("--concurrency") + 1] == "1":
    into.mkdir()
    (into / "profile_export_aiperf.json").write_text({report!r})
else:
    sys.exit("no such endpoint")
"""


def test_a_run_is_read_and_one_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "aiperf.py"
    script.write_text(PRETENDED.replace("{report!r}", repr(json.dumps(REPORT))))
    program = [sys.executable, str(script)]
    done = aiperf.measure(program, "/m", 1, Load(1, 2, 64, 1), ["one", "two"], tmp_path / "run", 60)
    assert done == aiperf.of_report(REPORT)
    with pytest.raises(aiperf.Failed, match="no such endpoint"):
        aiperf.measure(program, "/m", 1, Load(4, 2, 64, 4), ["one", "two"], tmp_path / "run", 60)
