from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import finding, speculation
from gpu_host.finding import ERROR, INFO, WARNING, Finding
from gpu_host.speculation import COUNTS, Host
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model_folders import MODELS

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "speculation.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    drafter = {**MODELS[case["drafter"]], **case.get("set", {})} if "drafter" in case else None
    target = MODELS[case["target"]] if "target" in case else None
    found = speculation.judge(
        case["speculation"],
        case.get("arguments", {}),
        "/models/drafter" if drafter else "",
        speculation.models(target, drafter),
        Host(**case.get("host", {})),
    )
    assert sorted(item.code for item in found if item.severity == ERROR) == case.get("errors", [])
    assert [item.code for item in found if item.severity == WARNING] == case.get("warnings", [])
    assert {item.code for item in found if item.severity == INFO} >= set(case.get("infos", []))
    assert case.get("cure", "") in " ".join(item.cure for item in found)
    for item in found:
        assert item.found.endswith(".") and "{" not in item.sentence
        assert item.severity == INFO or item.cure.endswith((".", "?")), "what is wrong comes with what to do"


whole = st.one_of(st.none(), st.integers(-1, 9))


@given(steps=whole, topk=whole, tokens=whole)
def test_only_whole_and_matching_counts_pass(steps: int | None, topk: int | None, tokens: int | None) -> None:
    counts = dict(zip(COUNTS, (steps, topk, tokens), strict=True))
    found = speculation.counts(speculation.arguments_of(counts))
    fine = steps is None and topk is None and tokens is None
    if steps is not None and topk is not None and tokens is not None and min(steps, topk, tokens) > 0:
        fine = tokens == steps + 1 if topk == 1 else 2 <= tokens <= 1 + topk + (steps - 1) * topk**2
    assert bool(finding.errors(found)) is not fine


values = st.one_of(st.none(), st.text(), st.integers(), st.booleans())


@given(
    given_=st.dictionaries(st.sampled_from([*speculation.NAMES, "other"]), values),
    arguments=st.dictionaries(st.sampled_from(["tp_size", "nnodes", "quantization", "page_size"]), values),
)
def test_no_value_is_too_strange_to_be_judged(given_: dict[str, Any], arguments: dict[str, Any]) -> None:
    found = speculation.judge(given_, arguments, "/d", speculation.models(MODELS["tiny_target"]), Host("12.0", gpus=8))
    assert all(isinstance(item, Finding) for item in found)


def test_the_arguments_of_a_speculation_are_sglangs() -> None:
    given_ = {
        "algorithm": "EAGLE3",
        "num_steps": 3,
        "eagle_topk": 1,
        "num_draft_tokens": 4,
        "draft_attention_backend": "",
    }
    assert speculation.arguments_of(given_, "/models/d") == {
        "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "speculative_draft_model_path": "/models/d",
    }  # fmt: skip
    assert speculation.arguments_of({}, "/models/d") == {}, "a drafter alone is no speculation"


def test_the_worst_comes_first_and_errors_make_the_message() -> None:
    found = [
        Finding(INFO, "a", "A."),
        Finding(ERROR, "b", "B.", cure="Do b."),
        Finding(WARNING, "c", "C."),
        Finding(ERROR, "d", "D."),
    ]
    assert [row["code"] for row in finding.rows(found)] == ["b", "d", "c", "a"]
    assert finding.summary(found) == "B. Do b. D."
    assert finding.summary(found, most=1) == "B. Do b. 1 more errors are in findings."
    assert finding.summary([]) == ""
