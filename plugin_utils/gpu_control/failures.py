"""Why a server's start failed: its log held against the catalogue of failures in ``data/failures.yml``.

A wrong cause is worse than none, so a line counts only where it can be a cause:

- a log may hold several starts; only the last one is read;
- what SGLang itself ignores (``Ignore import error when loading ..`` with whatever traceback it quotes, warnings,
  errors of single requests) is no evidence;
- most entries ask that the server has ended or is known to be stuck, and that their line belongs to what ended it;
- among the entries that match, one about an inner cause goes before one about a symptom, and a symptom before the mere
  way in which the server ended; then the earliest line, then the order of the catalogue.

What remains is ``unknown``, with the line that a person should read first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from gpu_host import startup_phases

CATALOGUE = Path(__file__).resolve().parent.parent.parent / "data/failures.yml"

HEALTHY = "healthy"
UNKNOWN = "unknown"
# What a match is worth, best first. `cause`: an inner line that decides. `symptom`: true, but something deeper may have
# led to it. `outcome`: how the server ended, whatever the reason.
LEVELS = ("cause", "symptom", "outcome")
# Where an entry's line may stand. `failure`: in what ended the server. `any`: anywhere but in what is ignored.
ZONES = ("failure", "any")
# What must be known of the server. `ended`, `stuck`, or `any` (also while it runs).
STATES = ("ended", "stuck", "any")

_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|SystemExit|OutOfResources)\b(?::|$)")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")
_BAR = re.compile(r"^.{0,120}\d+%(?:\||\s*Completed \|)")
_FATAL_HEADLINE = re.compile(
    r"\b(?:Scheduler|DetokenizerManager|TokenizerManager|DataParallelController|ModelRunner|TpModelWorker\w*)\b.*"
    r"hit an exception|TpModelWorkerClient hit an exception|Initialization failed\. warmup error|watchdog timeout"
    r"|Watchdog caught collective operation timeout|Fatal Python error|^terminate called|what\(\): "
    r"|\*\*\* SIG\w+ received"
    r"|Received sigquit from a child|SIGQUIT received|Subprocess \S+ \(pid=\d+\) crashed|^Process \S+:$"
    r"|^ninja: build stopped: |launch_server\.py: error: |sglang\S* serve: error: |died during initialization"
)
_STARTED = re.compile(r"\bserver_args=|launch_server\.py:\d+: UserWarning: ")
_SERVES = re.compile(r"The server is fired up and ready to roll!|(?:Prefill|Decode) batch[.,]|\" 200 OK$")
_ADVANCES = re.compile(
    r"Load weight (?:begin|end)|KV Cache is allocated|Memory pool end|\bCapture .*graph (?:begin|end)"
    r"|max_total_num_tokens=|Application startup complete"
)
_RETURN_CODE = re.compile(r"^rc=(-?\d+)$")
_MASKED_KEY = re.compile(r"(api_key'?[=:] ?)(?:'[^']*'|\"[^\"]*\")")


class CatalogueError(ValueError):
    """The catalogue can't be used; the text names the entry and what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """One failure of the catalogue (data/failures.yml tells what the fields mean)."""

    id: str
    cause: str
    cure: str
    level: str
    phase: str
    pattern: re.Pattern[str] | None
    zone: str
    state: str
    also: tuple[re.Pattern[str], ...]
    never: tuple[re.Pattern[str], ...]
    not_after: tuple[re.Pattern[str], ...]
    times: int
    last: bool
    exit_statuses: tuple[int, ...]
    source: Mapping[str, Any]
    examples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Catalogue:
    entries: tuple[Entry, ...]
    ignored: tuple[re.Pattern[str], ...]


@dataclass(frozen=True)
class Diagnosis:
    """`id` is an entry's, or `healthy` (nothing in the log speaks of a failure), or `unknown` (it failed; no entry
    fits). `evidence_line` is the line that decided (for `unknown` the one to read first), `line_number` counts from 1
    in the whole log. `phase` is how far the start had come there (`startup_phases.PHASES`). `confidence`: `certain` for
    an inner cause, `likely` for a symptom or an outcome, empty otherwise. `also` names further entries that match."""

    id: str
    cause: str = ""
    cure: str = ""
    evidence_line: str = ""
    line_number: int = 0
    phase: str = "import"
    rank: str = ""
    confidence: str = ""
    source: str = ""
    also: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return self.id not in (HEALTHY, UNKNOWN)

    @property
    def sentence(self) -> str:
        """For a person: what happened and what to do."""
        if self.id == HEALTHY:
            return "Nothing in the log speaks of a failure."
        if self.id == UNKNOWN:
            line = self.evidence_line
            return "The cause is not known" + (
                f"; read first, in the log: {line}" if line else "; the log tells nothing."
            )
        return f"{self.cause} {self.cure}"


@dataclass(frozen=True)
class _Line:
    number: int
    text: str
    ignored: bool
    failure: bool
    rank: str


def diagnose(
    log_text: str, exit_status: int | None = None, *, stuck: bool = False, catalogue: Catalogue | None = None
) -> Diagnosis:
    """What ended, hinders or will mislead the server whose log (or the log's tail) this is.

    `exit_status` is that of its main process where it is known (negative or 128 + n for signal n); `stuck` says that it
    lives and was seen not to work. Neither is needed: that a server ended is mostly in its log.
    """
    book = catalogue or load()
    every = startup_phases.lines_of(log_text)
    first = _last_start(every)
    if exit_status is None:
        codes = [int(found.group(1)) for line in every[-3:] if (found := _RETURN_CODE.match(line))]
        exit_status = codes[-1] if codes else None
    died = exit_status not in (None, 0)
    lines = list(_classified(every, first, book.ignored, died))
    ended = died or any(line.failure for line in lines)

    matches: list[tuple[tuple[int, int, int], Entry, _Line | None, dict[str, str]]] = []
    for order, entry in enumerate(book.entries):
        if (entry.state == "ended" and not ended) or (entry.state == "stuck" and not stuck):
            continue
        if entry.exit_statuses and _signal(exit_status) not in {_signal(one) for one in entry.exit_statuses}:
            continue
        hit, groups = _match(entry, lines)
        if entry.pattern is not None and hit is None:
            continue
        rank = (LEVELS.index(entry.level), hit.number if hit else 1 << 60, order)
        matches.append((rank, entry, hit, groups))
    if not matches:
        return _without_entry(lines, ended or stuck, first, every)
    matches.sort(key=lambda one: one[0])
    _, entry, hit, groups = matches[0]
    if entry.level == "outcome" and entry.pattern is None and (line := _first_to_read(lines)) is not None:
        return _without_entry(lines, True, first, every, line)  # it failed by itself; how it ended explains nothing
    until = hit.number if hit else len(every)
    return Diagnosis(
        id=entry.id,
        cause=_filled(entry.cause, groups),
        cure=_filled(entry.cure, groups),
        evidence_line=_shown(hit.text) if hit else "",
        line_number=hit.number if hit else 0,
        phase=startup_phases.phase_of("\n".join(every[first:until])),
        rank=hit.rank if hit else "",
        confidence="certain" if entry.level == "cause" else "likely",
        source=_source(entry.source),
        also=tuple(dict.fromkeys(one[1].id for one in matches[1:])),
    )


def phase_of(log_text: str) -> str:
    """How far the last start in this log has come, one of `startup_phases.PHASES`."""
    return startup_phases.phase_of(last_start(log_text))


def last_start(log_text: str) -> str:
    """The part of the log that its last start wrote."""
    lines = startup_phases.lines_of(log_text)
    return "\n".join(lines[_last_start(lines) :])


def _last_start(lines: Sequence[str]) -> int:
    """Where the last start begins: at its own warning about the entry point, else at its line of arguments."""
    marks = [number for number, line in enumerate(lines) if _STARTED.search(line)]
    if not marks:
        return 0
    arguments = [number for number in marks if "server_args=" in lines[number]]
    warnings = [number for number in marks if "server_args=" not in lines[number]]
    if not arguments:
        return warnings[-1] if len(warnings) > 1 else 0
    if warnings and warnings[-1] > arguments[-1]:
        return warnings[-1]
    if len(arguments) == 1:
        return 0 if len(warnings) < 2 else warnings[-1]
    own = [number for number in warnings if number > arguments[-2]]
    return own[-1] if own else arguments[-1]


def _classified(every: Sequence[str], first: int, ignored: Iterable[re.Pattern[str]], died: bool) -> Iterator[_Line]:
    """The lines from `first` on, each with whether it is to be ignored and whether it belongs to what ended the server.
    `died` says that the server is known to have failed.

    A record is a line with a stamp (or a warning, or a traceback of its own) with the lines below it.
    """
    serves = [number for number in range(first, len(every)) if _SERVES.search(every[number])]
    moves = [number for number in range(first, len(every)) if _ADVANCES.search(every[number])]
    last_served, last_moved = (serves[-1] if serves else -1), (moves[-1] if moves else -1)
    deaths = [number for number in range(first, len(every)) if _FATAL_HEADLINE.search(every[number])]
    last_death = deaths[-1] if deaths else -1

    def goes_on(number: int, quoted: bool) -> bool:
        """Whether the traceback of this line has not ended the start. One below an ignored line (`quoted`) has only if
        nothing came after it and a death is known otherwise."""
        if quoted:
            return max(last_served, last_moved) > number or not (died or last_death > number)
        return last_served > number or last_moved > number > last_death

    skip, failure, rank = False, False, ""
    raw = False  # inside a traceback that stands for itself
    for number in range(first, len(every)):
        text = every[number]
        stamped = startup_phases.STAMPED.match(text)
        if stamped or _WARNING.match(text) or _BAR.match(text):
            rank = (stamped.group(2) or "") if stamped else rank
            skip = bool(_BAR.match(text) or _WARNING.match(text)) or any(pattern.search(text) for pattern in ignored)
            failure = not skip and bool(_FATAL_HEADLINE.search(text))
            raw = False
            if not skip and not failure and text.endswith("Traceback (most recent call last):"):
                failure, raw = not goes_on(number, False), True
        elif _FATAL_HEADLINE.search(text):
            skip, failure, raw = False, True, False
        elif _TRACEBACK.match(text) or (not raw and not failure and _EXCEPTION.match(text)):
            # A traceback, or its end where its head was cut off. One in a failure's own record is that failure's.
            if raw or not failure:
                failure, raw = not goes_on(number, skip), True
                skip = not failure
        elif any(pattern.search(text) for pattern in ignored):
            yield _Line(number + 1, text, True, False, rank)
            continue
        yield _Line(number + 1, text, skip, failure and not skip, rank)


def _match(entry: Entry, lines: Sequence[_Line]) -> tuple[_Line | None, dict[str, str]]:
    """The line that speaks for the entry and the pattern's named groups; the last such line for a repeated one."""
    texts = [line.text for line in lines if not line.ignored]
    if not all(any(pattern.search(text) for text in texts) for pattern in entry.also):
        return None, {}
    if any(pattern.search(text) for pattern in entry.never for text in texts):
        return None, {}
    if entry.pattern is None:
        return None, {}
    hits: list[tuple[_Line, re.Match[str]]] = []
    for line in lines:
        if line.ignored or (entry.zone == "failure" and not line.failure):
            continue
        if match := entry.pattern.search(line.text):
            hits.append((line, match))
    if len(hits) < entry.times:
        return None, {}
    line, match = hits[-1] if entry.times > 1 or entry.not_after or entry.last else hits[0]
    rest = [other for other in lines if other.number > line.number and not other.ignored]
    if any(pattern.search(other.text) for pattern in entry.not_after for other in rest):
        return None, {}
    if entry.last and any(other.text.strip() for other in rest):
        return None, {}
    return line, {key: value or "" for key, value in match.groupdict().items()}


def _without_entry(
    lines: Sequence[_Line], failed: bool, first: int, every: Sequence[str], line: _Line | None = None
) -> Diagnosis:
    if not failed:
        return Diagnosis(id=HEALTHY, phase=startup_phases.phase_of("\n".join(every[first:])))
    line = line or _first_to_read(lines) or _last_said(lines)
    until = line.number if line else len(every)
    return Diagnosis(
        id=UNKNOWN,
        evidence_line=_shown(line.text) if line else "",
        line_number=line.number if line else 0,
        phase=startup_phases.phase_of("\n".join(every[first:until])),
        rank=line.rank if line else "",
    )


def _first_to_read(lines: Sequence[_Line]) -> _Line | None:
    """The first exception of what ended the server: later ones were mostly raised because of it."""
    failures = [line for line in lines if line.failure]
    exceptions = [line for line in failures if _EXCEPTION.match(line.text)]
    # `ImportError:` whose text begins on the next line.
    for line in exceptions:
        if not line.text.endswith(":"):
            return line
        following = [other for other in failures if other.number > line.number and other.text.strip()]
        return following[0] if following else line
    return failures[0] if failures else None


def _last_said(lines: Sequence[_Line]) -> _Line | None:
    return next((line for line in reversed(lines) if line.text.strip() and not line.ignored), None)


def _signal(status: int | None) -> int | None:
    """Signal n as -n, whether the shell (128 + n) or the parent (-n) told it."""
    return 128 - status if status is not None and 128 < status < 160 else status


def _filled(text: str, groups: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: _shown(groups.get(found.group(1), found.group(0))), text)


def _shown(text: str) -> str:
    """A line fit to be shown: no key, and no longer than a person reads."""
    short = _MASKED_KEY.sub(r"\1'***'", text.strip())
    return short if len(short) <= 400 else f"{short[:400]} [..]"


def _source(source: Mapping[str, Any]) -> str:
    return ", ".join(str(source[kind]) for kind in ("recorded", "sglang", "thread") if kind in source)


@functools.cache
def load(path: Path = CATALOGUE) -> Catalogue:
    """The catalogue, checked. Raises CatalogueError, or OSError where the file is missing."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = tuple(_entry(item) for item in data["failures"])
    names = [entry.id for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1} | ({HEALTHY, UNKNOWN} & set(names))):
        raise CatalogueError(f"These ids are taken twice or reserved: {', '.join(twice)}.")
    return Catalogue(entries=entries, ignored=tuple(_pattern(text, "ignored") for text in data["ignored"]))


_FIELDS = {
    "id", "cause", "cure", "level", "phase", "pattern", "zone", "state", "with", "never", "not_after", "times", "last",
    "exit_status", "source", "example", "examples",
}  # fmt: skip


def _entry(item: dict[str, Any]) -> Entry:
    name = str(item.get("id", "?"))

    def fail(why: str) -> CatalogueError:
        return CatalogueError(f"Entry {name} of the failure catalogue: {why}.")

    if strange := sorted(set(item) - _FIELDS):
        raise fail(f"unknown field {', '.join(strange)}")
    for required in ("id", "cause", "cure", "source", "phase"):
        if not item.get(required):
            raise fail(f"{required} is missing")
    for key, values, default in (("level", LEVELS, "cause"), ("zone", ZONES, "failure"), ("state", STATES, "ended")):
        if item.setdefault(key, default) not in values:
            raise fail(f"{key} is {item[key]!r}, must be one of {', '.join(values)}")
    if item["phase"] not in (*startup_phases.PHASES, "any"):
        raise fail(f"phase {item['phase']!r} is none of a start")
    statuses = item.get("exit_status", [])
    if not item.get("pattern") and not statuses:
        raise fail("it has neither a pattern nor an exit_status")
    examples = item.get("examples") or ([item["example"]] if "example" in item else [])
    return Entry(
        id=name,
        cause=str(item["cause"]).strip(),
        cure=str(item["cure"]).strip(),
        level=item["level"],
        phase=item["phase"],
        pattern=_pattern(item["pattern"], name) if item.get("pattern") else None,
        zone=item["zone"],
        state=item["state"],
        also=_patterns(item.get("with"), name),
        never=_patterns(item.get("never"), name),
        not_after=_patterns(item.get("not_after"), name),
        times=int(item.get("times", 1)),
        last=bool(item.get("last", False)),
        exit_statuses=tuple(int(one) for one in (statuses if isinstance(statuses, list) else [statuses])),
        source=item["source"],
        examples=tuple(one if isinstance(one, dict) else {"log": one} for one in examples),
    )


def _patterns(value: object, name: str) -> tuple[re.Pattern[str], ...]:
    texts = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_pattern(str(text), name) for text in texts)


def _pattern(text: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CatalogueError(f"Entry {name} of the failure catalogue: {text!r} is no pattern: {error}.") from error
