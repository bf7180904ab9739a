"""Prompts to measure with, in ShareGPT's format: a JSON list of conversations, of which the first question is asked.

``{"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}, ..]}``; also with the names
conversation, role, content, user, assistant. Read on the control node, written anew for the benchmark client, so that
every measurement asks the same in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ASKS = ("human", "user")
_ANSWERS = ("gpt", "chatgpt", "assistant", "bing", "bard")
MOST_BYTES = 2 << 30
# So many times the prompts that are asked for go to the host where long ones are left out there.
SPARE = 8


class PromptError(Exception):
    """The file can't be used; the text is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Conversation:
    """The first question of a conversation and its answer in the file (which sets no length here)."""

    question: str
    answer: str


@dataclass(frozen=True)
class PromptSet:
    """`digest` (SHA-256) is of the questions in their order; `skipped` counts conversations without a usable one."""

    name: str
    conversations: tuple[Conversation, ...]
    skipped: int = 0

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for one in self.conversations:
            total.update(one.question.encode("utf-8", "surrogatepass") + b"\0")
        return total.hexdigest()

    def first(self, count: int, spare: bool = False) -> PromptSet:
        """The first `count` prompts (0: all), with `spare` some more. PromptError where there are fewer."""
        if count > len(self.conversations):
            raise PromptError(
                f"{self.name} has {len(self.conversations)} usable prompts, {count} are asked for: ask for fewer, or "
                "give a larger file."
            )
        taken = count * SPARE if spare else count
        return PromptSet(self.name, self.conversations[:taken] if count else self.conversations, self.skipped)

    def dataset(self) -> str:
        """The file that the benchmark client reads."""
        return json.dumps(
            [
                {"conversations": [{"from": "human", "value": one.question}, {"from": "gpt", "value": one.answer}]}
                for one in self.conversations
            ]
        )


def load(path: str, name: str = "") -> PromptSet:
    """The prompts of a file. PromptError: one sentence."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PromptError(f"The prompt file {path} can't be read: {error.strerror}.") from None
    if len(raw) > MOST_BYTES:
        raise PromptError(f"The prompt file {path} is larger than {MOST_BYTES >> 30} GiB: take a part of it.")
    return parse(raw, name or path)


def parse(raw: bytes, name: str) -> PromptSet:
    """The usable prompts in the file's order, each question once. PromptError names the first entry that is wrong."""
    if not raw.strip():
        raise PromptError(f"The prompt file {name} is empty: give one in ShareGPT's format.")
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise PromptError(f"The prompt file {name} is no JSON ({error}): give one in ShareGPT's format.") from None
    if not isinstance(entries, list):
        raise PromptError(
            f"The prompt file {name} holds {_kind(entries)}, not a list of conversations as in ShareGPT's format."
        )
    found: dict[str, Conversation] = {}
    for number, entry in enumerate(entries, start=1):
        one = _conversation(entry, f"{name}: conversation {number}")
        if one is not None:
            found.setdefault(one.question, one)
    if not found:
        raise PromptError(
            f"The prompt file {name} has no usable prompt among {len(entries)} conversations: each needs a question "
            "by 'human' and an answer by 'gpt'."
        )
    return PromptSet(name, tuple(found.values()), len(entries) - len(found))


def _conversation(entry: Any, where: str) -> Conversation | None:
    """None: it has no first question with an answer, as happens in ShareGPT. PromptError: it is none at all."""
    if not isinstance(entry, Mapping):
        raise PromptError(f"{where} is {_kind(entry)}, not an object with 'conversations'.")
    turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        had = "no 'conversations'" if turns is None else f"{_kind(turns)} as 'conversations', not a list"
        raise PromptError(f"{where} has {had}.")
    texts = []
    for place, turn in enumerate(turns[:2], start=1):
        if not isinstance(turn, Mapping):
            raise PromptError(f"{where}, turn {place} is {_kind(turn)}, not an object with 'from' and 'value'.")
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            raise PromptError(f"{where}, turn {place} has {_kind(text)} as 'value', not a text.")
        if isinstance(who, str) and who.lower() not in (_ASKS, _ANSWERS)[place - 1]:
            return None
        texts.append(text)
    if len(texts) < 2 or not texts[0].strip() or not texts[1].strip():
        return None
    return Conversation(*texts)


def _kind(value: Any) -> str:
    """What a JSON value is, for people."""
    if value is None:
        return "nothing"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
