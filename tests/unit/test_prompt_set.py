"""Prompt files: what ships with the repository can be used, and what can't be used is told in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_host import prompt_set
from gpu_host.prompt_set import PromptError

PROMPTS = Path(__file__).resolve().parents[2] / "data" / "prompts"
TOPICS = ("chat", "code", "reasoning", "summary")


def turn(who: str, text: Any) -> dict[str, Any]:
    return {"from": who, "value": text}


def talk(question: Any = "Why?", answer: Any = "Because.") -> dict[str, Any]:
    return {"conversations": [turn("human", question), turn("gpt", answer)]}


def parse(value: Any) -> prompt_set.PromptSet:
    return prompt_set.parse(value if isinstance(value, bytes) else json.dumps(value).encode(), "prompts.json")


@pytest.mark.parametrize("topic", [*TOPICS, "mixed"])
def test_every_prompt_of_ours_is_usable_and_there_once(topic: str) -> None:
    entries = json.loads((PROMPTS / f"{topic}.json").read_text(encoding="utf-8"))
    found = prompt_set.load(str(PROMPTS / f"{topic}.json"))
    assert len(found.conversations) == len(entries) and found.skipped == 0


def test_mixed_holds_all_topics_and_any_first_part_of_it_has_of_each() -> None:
    mixed = json.loads((PROMPTS / "mixed.json").read_text(encoding="utf-8"))
    parts = [entry for topic in TOPICS for entry in json.loads((PROMPTS / f"{topic}.json").read_text(encoding="utf-8"))]
    assert sorted(entry["id"] for entry in mixed) == sorted(entry["id"] for entry in parts)
    assert len(mixed) >= 100
    assert {entry["id"].partition("-")[0] for entry in mixed[:8]} == set(TOPICS)


def test_prompts_of_ours_differ_in_length_by_more_than_a_hundred_times() -> None:
    lengths = [len(one.question) for one in prompt_set.load(str(PROMPTS / "mixed.json")).conversations]
    assert max(lengths) > 100 * min(lengths)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "prompts.json is empty"),
        (b" \n", "prompts.json is empty"),
        (b'[{"conversations": [', "prompts.json is no JSON"),
        (b"\xff\xfe\x00", "prompts.json is no JSON"),
        ({"conversations": []}, "prompts.json holds an object, not a list"),
        ("text", "prompts.json holds a text, not a list"),
        ([], "no usable prompt among 0 conversations"),
        ([talk(), 7], "conversation 2 is a number, not an object"),
        ([{"text": "x"}], "conversation 1 has no 'conversations'"),
        ([{"conversations": "x"}], "conversation 1 has a text as 'conversations', not a list"),
        ([{"conversations": ["x", "y"]}], "conversation 1, turn 1 is a text"),
        ([talk(question=None)], "conversation 1, turn 1 has nothing as 'value', not a text"),
        ([talk(answer=3)], "conversation 1, turn 2 has a number as 'value', not a text"),
        ([{"conversations": [turn("human", "Why?")]}], "no usable prompt among 1 conversations"),
        ([{"conversations": [turn("gpt", "Hello."), turn("human", "Why?")]}], "no usable prompt"),
        ([talk(question="  ")], "no usable prompt"),
    ],
)
def test_a_file_that_is_no_set_of_prompts_is_refused_by_what_is_wrong_with_it(content: Any, words: str) -> None:
    with pytest.raises(PromptError, match=re.escape(words)) as refused:
        parse(content)
    assert str(refused.value).endswith(".")


def test_what_sharegpt_has_many_of_is_passed_over_and_counted() -> None:
    found = parse(
        [
            talk("One?"),
            {"conversations": []},
            {"conversations": [turn("gpt", "Hello."), turn("human", "Two?")]},
            talk("One?", "Again."),
            {"conversation": [{"role": "user", "content": "Three?"}, {"role": "assistant", "content": "Yes."}]},
        ]
    )
    assert [one.question for one in found.conversations] == ["One?", "Three?"]
    assert (found.conversations[0].answer, found.skipped) == ("Because.", 3)


def test_more_prompts_than_the_file_has_are_refused_and_fewer_are_the_first_ones() -> None:
    found = parse([talk(f"{number}?") for number in range(5)])
    assert [one.question for one in found.first(2).conversations] == ["0?", "1?"]
    assert len(found.first(0).conversations) == 5
    with pytest.raises(PromptError, match="has 5 usable prompts, 6 are asked for"):
        found.first(6)


def test_the_dataset_for_the_client_is_read_back_as_the_same_prompts() -> None:
    found = parse([talk("Why \ud83d\ude00?"), talk('Quote " and \\ and \n?')])
    again = prompt_set.parse(found.dataset().encode(), "dataset")
    assert (again.conversations, again.digest) == (found.conversations, found.digest)
    assert found.digest != parse([talk('Quote " and \\ and \n?'), talk("Why \ud83d\ude00?")]).digest


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nothing\.json can't be read: No such file"):
        prompt_set.load(str(tmp_path / "nothing.json"))
