"""The benchmark client's report, read strictly; what real clients wrote is in tests/recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_host import bench_client, bench_output
from gpu_host.bench_output import Notes, OutputError, Request

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
FILES = sorted(RECORDED.glob("*/bench_serving-*.jsonl"))


def details(count: int) -> dict[str, Any]:
    """What --output-details adds for so many requests of three tokens."""
    return {
        "input_lens": [8] * count,
        "output_lens": [3] * count,
        "ttfts": [0.25] * count,
        "itls": [[0.5, 0.25]] * count,
        "generated_texts": ["a b c"] * count,
        "errors": [""] * count,
    }


def report(**changes: Any) -> dict[str, Any]:
    found = json.loads(FILES[0].read_text())
    return {**found, **details(found["completed"]), **changes}


def text(facts: dict[str, Any]) -> str:
    return json.dumps(facts) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_real_clients_wrote_is_read_with_its_bare_infinity(path: Path) -> None:
    recorded = json.loads(path.read_text())
    assert '"request_rate": Infinity' in path.read_text()
    found = bench_output.parse(text({**recorded, **details(recorded["completed"])}))
    assert {name: recorded[name] for name in bench_output.NUMBERS} == found.numbers
    assert found.average == recorded["accept_length"]
    assert found.server_info["model_path"]


def test_a_real_report_without_details_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(OutputError, match="no list output_lens"):
        bench_output.parse(FILES[0].read_text())


def test_a_request_of_the_report_takes_its_first_token_and_all_gaps() -> None:
    found = bench_output.parse(text(report()))
    assert found.requests[0] == Request(True, 0.25, 1.0, 3)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("", "wrote no result"),
        ("\n \n", "wrote no result"),
        (text(report())[:-1], "is cut off"),
        (text(report())[:400] + "\n", "is no JSON"),
        (text(report()) * 2, "holds 2 results where one was expected"),
        ("[1]\n", "is no object"),
        (text(report(completed=float("nan"))), "has nan as completed"),
        (text(report(mean_ttft_ms=float("inf"))), "has inf as mean_ttft_ms"),
        (text(report(duration="4")), "has '4' as duration"),
        (text(report(completed=True)), "has True as completed"),
        (text(report(duration=0)), "duration of 0 s"),
        (text(report(median_itl_ms=-1)), "has -1 as median_itl_ms"),
        (text(report(max_output_tokens_per_s=float("nan"))), "has nan in max_output_tokens_per_s"),
        (text(report(ttfts=[float("inf")] * 6)), "has inf in ttfts"),
        (text(report(itls=[[0.1]])), "1 itls for 6 requests"),
        (text(report(itls=[["x"]] * 6)), "a gap that is no number"),
        (text(report(ttfts=[None] * 6)), "without lengths or times"),
    ],
)
def test_what_can_not_be_trusted_is_refused_in_one_sentence(written: str, words: str) -> None:
    with pytest.raises(OutputError, match=re.escape(words)) as refused:
        bench_output.parse(written)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("name", [*bench_output.NUMBERS, *bench_output.LISTS])
def test_each_missing_field_is_named(name: str) -> None:
    facts = report()
    del facts[name]
    with pytest.raises(OutputError, match=rf"no (list )?{name}"):
        bench_output.parse(text(facts))


def test_infinity_and_nan_in_what_the_server_says_of_itself_do_no_harm() -> None:
    assert bench_output.parse(text(report(server_info={"x": float("inf")}))).numbers["completed"] == 6


def test_an_average_of_zero_is_counters_that_have_not_moved() -> None:
    assert bench_output.parse(text(report(accept_length=0.0))).average is None
    assert bench_output.parse(text(report(accept_length=None))).average is None


def test_a_request_with_an_error_or_without_tokens_has_failed() -> None:
    errors, lengths = ["", "Bad Gateway: ", "", "", "", ""], [3, 3, 0, 3, 3, 3]
    found = bench_output.parse(text(report(errors=errors, output_lens=lengths)))
    assert [one.success for one in found.requests] == [True, False, False, True, True, True]


class Told:
    """A request's outcome as the client keeps it."""

    def __init__(self, **changes: Any) -> None:
        values = {"success": True, "ttft": 0.5, "latency": 2.0, "output_len": 9, "error": "", "start_time": 100.0}
        self.__dict__.update({**values, **changes})


def test_the_notes_hold_what_the_report_leaves_out_and_the_client_gets_its_own_answer(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    bench_client.note(str(notes), event="begin", module="sglang.bench_serving", versions={"torch": "2"}, pid=1)
    outputs = [
        Told(spec_accept_length=2.5),
        Told(start_time=101.0, spec_accept_length=0.0),
        Told(success=False, start_time=0.0, latency=0.0, error="x"),
    ]
    calculate = bench_client.noting(str(notes), lambda rows, given, **more: (rows, given, more))
    assert calculate("rows", outputs, dur_s=3) == ("rows", outputs, {"dur_s": 3})
    found = bench_output.parse_notes(notes.read_text())
    assert (found.module, found.versions, found.began, found.ended) == (
        "sglang.bench_serving",
        {"torch": "2"},
        100.0,
        103.0,
    )
    assert found.requests is not None
    assert [one.accept_length for one in found.requests] == [2.5, None, None]
    assert [one.success for one in found.requests] == [True, True, False]


def test_outcomes_of_an_unknown_kind_are_noted_as_such_and_harm_nothing(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    calculate = bench_client.noting(str(notes), lambda **given: "the answer")
    assert calculate(outputs=["text"]) == "the answer"
    assert bench_output.parse_notes(notes.read_text()).requests is None


def test_notes_that_were_cut_off_are_read_as_far_as_they_go() -> None:
    begin = json.dumps({"event": "begin", "module": "m", "versions": {}, "pid": 1})
    assert bench_output.parse_notes(f'{begin}\n{{"event": "requ').module == "m"
    assert bench_output.parse_notes("") == Notes()
