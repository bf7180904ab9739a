"""Proves that a server that says it is ready serves what was asked for.

Each step is one question with one answer: health, a chat completion, speculation as asked for, drafts accepted, the
workers' environment, GPU memory, a soak after a forced kill, the same greedy answers as without speculation. What can't
be measured is said to be so; it is never taken for zero, nor for good.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Callable

from . import server_http
from .deadline import Deadline
from .procfs import Proc, Process
from .readings import Readings
from .server_http import Answer, Endpoint
from .storage import StorageError, private_folder, read_private, write_private

PAUSE = 0.2  # seconds between two questions to a server that is not ready yet
HEALTH_SECONDS = 25.0  # SGLang's own time-out of /health is 20 s
TOP_TOKENS = 5  # of each place that are kept, to tell a near-tie from another answer
ROUNDS = 6  # of prompts at most, until enough tokens were seen
# Plain text that a drafter trained on chats has something to say to.
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system, one a line, with one fact about each.",
    "Summarize how a steam engine works for a ten-year-old child.",
)


class NotProven(Exception):
    """A step failed: `step` is its name, the text one sentence; `hangs` when no answer came at all."""

    def __init__(self, step: str, sentence: str, hangs: bool = False) -> None:
        super().__init__(sentence)
        self.step = step
        self.hangs = hangs


@dataclass(frozen=True)
class Expected:
    """What to prove; seconds and MiB. `speculation` {}: the server must not speculate. None: not looked at."""

    chat_prompt: str = "What is the capital of France? Answer in one word."
    chat_expect: str = "(?i)paris"
    chat_tokens: int = 512
    speculation: Mapping[str, Any] | None = None
    accept_length: float = 1.05
    accept_tokens: int = 256
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_mib: int = 1024
    soak: int = 0
    lossless: bool = False
    lossless_tie: float = 0.25
    request_seconds: float = 120.0


@dataclass
class Step:
    """One step that passed: what it found, and how long it took (seconds)."""

    name: str
    found: str
    seconds: float = 0.0


@dataclass
class Proven:
    """What is known so far. `accept_length` is None where it was not or could not be measured."""

    steps: list[Step] = field(default_factory=list)
    accept_length: float | None = None
    accept_tokens: int = 0
    version: str = ""
    unreadable_workers: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Proof:
    """All steps, in their order. `alive` says whether the server's main process still runs."""

    def __init__(
        self,
        endpoint: Endpoint,
        expected: Expected,
        deadline: Deadline,
        alive: Callable[[], bool],
        lossless_file: str = "",
    ) -> None:
        self._endpoint = endpoint
        self._expected = expected
        self._deadline = deadline
        self._alive = alive
        self._lossless_file = lossless_file
        self._facts: dict[str, Any] = {}
        self.proven = Proven()

    def serve(self) -> None:
        """The steps that send requests. Raises NotProven."""
        self._step("health", self._health)
        self._step("chat", self._chat)
        self._step("speculation", self._speculation)
        if self._expected.speculation and self._expected.accept_length > 0:
            self._step("acceptance", self._acceptance)
        if self._expected.soak:
            self._step("soak", self._soak)
        if self._expected.lossless:
            self._step("lossless", self._lossless)

    def workers(self, proc: Proc, workers: Sequence[Process], readings: Readings, tree: frozenset[int]) -> None:
        """The steps that look at the processes. Raises NotProven."""
        if self._expected.environment:
            self._step("environment", lambda: self._environment(proc, workers))
        self._step("memory", lambda: self._memory(readings, tree, len(workers)))

    def _step(self, name: str, work: Callable[[], str]) -> None:
        began = time.monotonic()
        step = Step(name, work())
        step.seconds = round(time.monotonic() - began, 2)
        self.proven.steps.append(step)

    # ---- requests ----

    def _post(self, step: str, path: str, body: Any) -> Any:
        answer = server_http.post(self._endpoint, path, body, self._deadline.capped(self._expected.request_seconds))
        return self._read(step, path, answer)

    def _read(self, step: str, path: str, answer: Answer) -> Any:
        if answer.status == 200:
            return answer.json()
        if answer.status is None:
            how = "did not answer in time" if answer.trouble == "silent" else "closed the connection"
            raise NotProven(step, f"{path} {how}.", hangs=answer.trouble == "silent" and self._alive())
        said = " ".join(answer.body.decode("utf-8", "replace").split())[:300]
        if answer.status in (401, 403):
            said = "the key that it was deployed with is refused"
        raise NotProven(step, f"{path} answered {answer.status}: {said or 'nothing'}.")

    def _health(self) -> str:
        """Until it says 200; while it warms up it says 503, or refuses the connection."""
        last = "nothing"
        while True:
            for path in ("/health", "/health_generate", "/ready"):
                answer = server_http.get(self._endpoint, path, self._deadline.capped(HEALTH_SECONDS))
                if answer.status == 200:
                    return f"{path} says 200"
                last = f"{path}: {answer.status or answer.trouble}"
                if answer.status != 404:
                    break
            if not self._alive():
                raise NotProven("health", "its main process ended.")
            if self._deadline.expired():
                raise NotProven("health", f"it did not get healthy ({last}).", hangs=True)
            time.sleep(PAUSE)

    def _chat(self) -> str:
        body = {
            "model": self._model(),
            "messages": [{"role": "user", "content": self._expected.chat_prompt}],
            "max_tokens": self._expected.chat_tokens,
            "temperature": 0,
        }
        facts = self._post("chat", "/v1/chat/completions", body)
        try:
            message = facts["choices"][0]["message"]
            # A model that thinks aloud may spend all its tokens there.
            text = " ".join(str(message.get(key) or "") for key in ("reasoning_content", "content")).strip()
        except (KeyError, IndexError, TypeError, AttributeError):
            raise NotProven("chat", "the answer has no message; is this an OpenAI endpoint of SGLang?") from None
        shown = " ".join(text.split())[:120]
        if not text:
            raise NotProven("chat", "the answer is empty.")
        if self._expected.chat_expect and not re.search(self._expected.chat_expect, text):
            raise NotProven("chat", f"the answer does not match {self._expected.chat_expect!r}: {shown!r}.")
        return shown

    def _model(self) -> str:
        answer = server_http.get(self._endpoint, "/v1/models", self._deadline.capped(HEALTH_SECONDS))
        facts: Any = answer.json() if answer.status == 200 else None
        try:
            return str(facts["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            return "default"

    def _server_info(self) -> dict[str, Any]:
        for path in ("/server_info", "/get_server_info"):
            answer = server_http.get(self._endpoint, path, self._deadline.capped(HEALTH_SECONDS))
            if answer.status != 404:
                facts = self._read("speculation", path, answer)
                return facts if isinstance(facts, dict) else {}
        raise NotProven("speculation", "neither /server_info nor /get_server_info is there.")

    def _speculation(self) -> str:
        facts = self._facts = self._server_info()
        self.proven.version = str(facts.get("version") or "")
        asked = self._expected.speculation
        runs = facts.get("speculative_algorithm")
        if asked is None:
            return f"{runs or 'none'}, not asked about"
        if not asked:
            if runs:
                raise NotProven("speculation", f"none was asked for, but it speculates with {runs}.")
            return "none, as asked for"
        for name, wanted in asked.items():
            has = facts.get(f"speculative_{name}")
            if str(has) != str(wanted):
                raise NotProven("speculation", f"{name} is {has}, {wanted} was asked for.")
        return ", ".join(f"{name} {facts.get(f'speculative_{name}')}" for name in asked)

    def _acceptance(self) -> str:
        """Tokens a verification, over all requests: what each tells of itself, else the server's own average."""
        tokens, verifications, made = 0, 0, 0
        for _ in range(ROUNDS):
            for meta in self._generate("acceptance", PROMPTS, 128):
                made += _whole(meta.get("completion_tokens"))
                count = _whole(meta.get("spec_verify_ct"))
                if count:
                    verifications += count
                    tokens += _whole(meta.get("completion_tokens"))
            if made >= self._expected.accept_tokens:
                break
        length, how = None, f"over {tokens} tokens"
        if verifications and tokens >= self._expected.accept_tokens:
            length = tokens / verifications
        elif not verifications:
            length, how = self._own_average(), "by the server's own average"
        self.proven.accept_length = None if length is None else round(length, 3)
        self.proven.accept_tokens = tokens
        if length is None:
            raise NotProven(
                "acceptance",
                f"the accept length can't be measured: {made} tokens were made, and neither the answers nor"
                " /server_info tell of verifications over enough of them.",
            )
        if length < self._expected.accept_length:
            raise NotProven(
                "acceptance",
                f"the accept length is {length:.2f} ({how}), below {self._expected.accept_length:g}: drafts are made"
                " and thrown away; does the drafter belong to this model, and is the algorithm EAGLE3?",
            )
        return f"accept length {length:.2f} {how}"

    def _own_average(self) -> float | None:
        states = self._server_info().get("internal_states")
        found = [
            float(state["avg_spec_accept_length"])
            for state in (states if isinstance(states, list) else [])
            if isinstance(state, dict) and isinstance(state.get("avg_spec_accept_length"), (int, float))
        ]
        return min(found) if found and min(found) > 0 else None

    def _generate(self, step: str, prompts: Sequence[str], tokens: int, **more: Any) -> list[dict[str, Any]]:
        """The meta_info of each prompt, all sent at once."""
        body = {
            "text": list(prompts),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
            **more,
        }
        facts = self._post(step, "/generate", body)
        answers = facts if isinstance(facts, list) else [facts]
        return [
            {**(one.get("meta_info") or {}), "output_ids": one.get("output_ids"), "text": one.get("text")}
            for one in answers
            if isinstance(one, dict)
        ]

    def _soak(self) -> str:
        """Short completions, several at once: after a forced kill a server was seen to hang after about a hundred."""
        left = self._expected.soak
        failed: list[NotProven] = []
        lock = threading.Lock()
        done = 0

        def work() -> None:
            nonlocal left, done
            while True:
                with lock:
                    if left <= 0 or failed:
                        return
                    left -= 1
                    number = left
                try:
                    self._generate("soak", [f"{PROMPTS[number % len(PROMPTS)]} ({number})"], 8)
                except NotProven as reason:
                    with lock:
                        failed.append(reason)
                    return
                with lock:
                    done += 1

        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._deadline.remaining() + 1)
        if failed:
            raise NotProven("soak", f"after {done} short completions {failed[0]}", hangs=failed[0].hangs)
        if done < self._expected.soak:
            raise NotProven(
                "soak", f"{done} of {self._expected.soak} short completions were answered in time.", hangs=True
            )
        return f"{done} short completions"

    # ---- the same answers ----

    def _lossless(self) -> str:
        """Greedy answers: kept where the server does not speculate, compared with those where it does."""
        speculates = bool(self._facts.get("speculative_algorithm"))
        more = {} if speculates else {"return_logprob": True, "top_logprobs_num": TOP_TOKENS}
        answers = [_greedy(meta) for meta in self._generate("lossless", PROMPTS, 64, **more)]
        if not speculates:
            try:
                private_folder(os.path.dirname(self._lossless_file))
                write_private(self._lossless_file, json.dumps(answers))
            except (OSError, StorageError) as error:
                raise NotProven("lossless", f"the answers could not be kept: {error}.") from None
            return f"{len(answers)} greedy answers kept for comparison"
        try:
            baseline = json.loads(read_private(self._lossless_file))
        except (OSError, ValueError, StorageError):
            raise NotProven(
                "lossless",
                "there are no answers of this model without speculation to compare with: run deploy-baseline.yml with"
                " server_health_lossless first.",
            ) from None
        return compare(baseline, answers, self._expected.lossless_tie)

    # ---- processes ----

    def _environment(self, proc: Proc, workers: Sequence[Process]) -> str:
        wanted = self._expected.environment
        unreadable = []
        for worker in workers:
            has = proc.environ(worker.pid)
            if has is None:
                unreadable.append(worker.pid)
                continue
            for name, value in wanted.items():
                if has.get(name) != value:
                    found = f"has {name}={has[name]}" if name in has else f"lacks {name}"
                    raise NotProven(
                        "environment", f"{worker.name} (pid {worker.pid}) {found}, the profile says {name}={value}."
                    )
        self.proven.unreadable_workers = unreadable
        read = len(workers) - len(unreadable)
        end = f"; {len(unreadable)} can't be read" if unreadable else ""
        return f"{read} of {len(workers)} workers carry the {len(wanted)} variables of the profile{end}"

    def _memory(self, readings: Readings, tree: frozenset[int], workers: int) -> str:
        if not readings.gpus:
            return f"can't be read: {readings.error}"
        held = [
            sum(process.used_mib or 0 for process in gpu.processes or () if process.pid in tree)
            for gpu in readings.gpus
        ]
        used = [mib for mib in held if mib]
        if not used:
            if any(process.pid not in tree for gpu in readings.gpus for process in gpu.processes or ()):
                return "can't be told: the driver lists processes of another namespace"
            raise NotProven("memory", "none of its processes holds GPU memory.")
        if min(used) < self._expected.gpu_mib:
            raise NotProven(
                "memory", f"it holds {min(used)} MiB on one GPU, less than {self._expected.gpu_mib} MiB: is it loaded?"
            )
        if min(used) * 2 < max(used):
            raise NotProven("memory", f"it holds {min(used)} MiB on one GPU and {max(used)} MiB on another.")
        if workers and len(used) < workers:
            raise NotProven("memory", f"{workers} workers hold memory of {len(used)} GPUs only.")
        return f"{min(used)} to {max(used)} MiB on each of {len(used)} GPUs"


def _greedy(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of an answer; by how much the best one led at each place (natural logarithm; None: not told), and over
    which tokens: `near` has for each place [token, lead over it] of the best ones."""
    ids = meta.get("output_ids")
    leads, near = [], []
    for place in meta.get("output_top_logprobs") or []:
        best = [entry for entry in place or [] if isinstance(entry, (list, tuple)) and len(entry) > 1]
        leads.append(best[0][0] - best[1][0] if len(best) > 1 else None)
        near.append([[entry[1], best[0][0] - entry[0]] for entry in best])
    ids = ids if isinstance(ids, list) else str(meta.get("text") or "").split()
    return {"ids": ids, "leads": leads, "near": near}


def compare(baseline: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]], tie: float) -> str:
    """Equal token for token, or different first where the baseline itself could hardly decide. Raises NotProven."""
    ties = 0
    if len(baseline) != len(answers):
        raise NotProven("lossless", "the baseline answered other prompts: run deploy-baseline.yml again.")
    for number, (was, now) in enumerate(zip(baseline, answers), start=1):
        place = next((at for at, (one, other) in enumerate(zip(was["ids"], now["ids"])) if one != other), None)
        if place is None:
            if len(was["ids"]) != len(now["ids"]):
                place = min(len(was["ids"]), len(now["ids"]))
            else:
                continue
        lead = was["leads"][place] if place < len(was["leads"]) else None
        near = was["near"][place] if place < len(was.get("near") or []) else []
        # Where the baseline itself could hardly decide, it could between few: any other token is another answer.
        other = place < len(now["ids"]) and near and now["ids"][place] not in [token for token, by in near if by <= tie]
        if lead is None or lead > tie or other:
            known = (
                "it is not known how near a tie that was"
                if lead is None
                else f"the baseline led there by {lead:.2f}"
                if lead > tie
                else "that token is none of those between which the baseline could hardly decide"
            )
            raise NotProven("lossless", f"greedy answer {number} differs from token {place + 1} on, and {known}.")
        ties += 1
    equal = len(answers) - ties
    return f"{equal} of {len(answers)} greedy answers equal" + (f", {ties} part at a near-tie" if ties else "")


def lossless_path(state_folder: str, model_path: str) -> str:
    """Where the answers of a model are kept, by its folder and config."""
    digest = hashlib.sha256(os.path.realpath(model_path).encode())
    try:
        with open(os.path.join(model_path, "config.json"), "rb") as file:
            digest.update(file.read(1 << 20))
    except OSError:
        pass
    return os.path.join(state_folder, "lossless", f"{digest.hexdigest()[:32]}.json")


def _whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
