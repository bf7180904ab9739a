"""What a host's measurements say: enable with N steps up to concurrency C, do not enable, or not certain yet.

The measured throughput decides, by intervals that hold together (statistics.py). A variant is

- `faster` at a concurrency when its interval lies above 1, and reaches half of the smallest effect that matters,
- `slower` when it lies below 1,
- `equal` when it lies within the smallest effect around 1,
- `open` otherwise, and `missing` where it was not measured.

Several loads (prompt sets, lengths) count alike: their logarithms are averaged at each concurrency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from . import statistics
from .runs import Measurement
from .variants import Cell, Variant

FASTER, SLOWER, EQUAL, OPEN, MISSING = "faster", "slower", "equal", "open", "missing"
ENABLE, DO_NOT_ENABLE, NOT_CERTAIN, NO_RESULT = "enable", "do_not_enable", "not_certain", "no_result"
# Fewer tokens than this a request tell nothing of decoding: what is measured is the time to the first token.
FEWEST_TOKENS = 8
# As many further rounds stand for any larger number.
MOST_ROUNDS = 99


@dataclass(frozen=True)
class Rules:
    """How certain, what matters, and when the run looked."""

    certainty: float = 0.95
    smallest_effect: float = 0.05
    first_look: int = 3
    last_look: int = 8

    @property
    def effect(self) -> float:
        return math.log1p(self.smallest_effect)


def rules_of(settings: Mapping[str, Any]) -> Rules:
    return Rules(settings["certainty"], settings["smallest_effect"], settings["rounds"], settings["max_rounds"])


@dataclass(frozen=True)
class Comparison:
    """A variant against its reference at one concurrency (over all loads), or at one load where `cell` names it."""

    variant: str
    reference: str
    concurrency: int
    state: str
    found: statistics.Difference | None = None
    cell: str = ""
    more_rounds: int = 0

    @property
    def speed_up(self) -> float | None:
        return math.exp(self.found.mean) if self.found else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """None: one round says nothing of it."""
        if self.found is None or not math.isfinite(self.found.half_width):
            return None
        return math.exp(self.found.low), math.exp(self.found.high)

    def as_dict(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "variant": self.variant,
            "reference": self.reference,
            "concurrency": self.concurrency,
            "cell": self.cell,
            "state": self.state,
            "speed_up": self.speed_up,
            "low": interval[0] if interval else None,
            "high": interval[1] if interval else None,
            "rounds": self.found.rounds if self.found else 0,
            "more_rounds": self.more_rounds,
        }


@dataclass(frozen=True)
class Crossover:
    """The concurrency at which a variant breaks even, between measured ones; None: beyond the greatest measured."""

    at: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """`variant` is the one to enable, good from `from_concurrency` up to `up_to_concurrency`. `open_variants`: those
    that more rounds would settle. `sentence` is for people, `notes` further sentences."""

    kind: str
    sentence: str
    variant: str = ""
    steps: int | None = None
    nccl_profile: str = ""
    from_concurrency: int | None = None
    up_to_concurrency: int | None = None
    crossover: Crossover | None = None
    more_rounds: int = 0
    open_variants: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    by_load: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def judge(
    variants: Sequence[Variant],
    cells: Sequence[Cell],
    measurements: Iterable[Measurement],
    rules: Rules,
    up_to_round: int | None = None,
) -> Verdict:
    """The verdict from the measurements of the rounds up to `up_to_round` (None: all)."""
    counted = [one for one in measurements if up_to_round is None or one.round <= up_to_round]
    concurrencies = sorted({cell.concurrency for cell in cells})
    tables = {number: values(counted, [c for c in cells if c.concurrency == number]) for number in concurrencies}
    pairs = [(one, one.reference) for one in variants if one.reference]
    rounds = max((one.round for one in counted), default=0)
    share = statistics.error_rate(
        rules.certainty, len(pairs) * len(concurrencies), rounds, rules.first_look, rules.last_look
    )
    later = statistics.error_rate(
        rules.certainty, len(pairs) * len(concurrencies), rounds + 1, rules.first_look, max(rules.last_look, rounds + 1)
    )
    noises = {number: statistics.residuals(table) for number, table in tables.items()}
    compared: list[Comparison] = []
    for number in concurrencies:
        noise = statistics.borrowed(noises[number], [noises[other] for other in concurrencies if other != number])
        for one, reference in pairs:
            found = statistics.difference(tables[number], one.name, reference, noise, share)
            compared.append(_comparison(one.name, reference, number, found, rules, later))
    decision = _decide(variants, concurrencies, compared, tables, noises, rules, share)
    if short := _too_short(counted):
        decision = Verdict(NOT_CERTAIN, short)
    unmeasured = {one.variant for one in compared if one.state == MISSING}
    waiting = {*decision.open_variants, *unmeasured}
    return replace(
        decision,
        open_variants=() if short else tuple(one.name for one in variants if one.name in waiting),
        comparisons=tuple(compared),
        by_load=_by_load(cells, counted, pairs, rules, share),
        notes=(*decision.notes, *_profile_notes(variants, compared)),
    )


def values(measurements: Iterable[Measurement], cells: Sequence[Cell]) -> dict[str, dict[int, float]]:
    """By variant and round: the mean over the loads of each start's value. A start that lacks a load is left out."""
    speeds: dict[tuple[str, int], dict[str, list[float]]] = {}
    names = {cell.name for cell in cells}
    for one in measurements:
        speed = one.data.get("output_tokens_per_s")
        if one.cell in names and isinstance(speed, (int, float)) and speed > 0:
            speeds.setdefault((one.variant, one.round), {}).setdefault(one.cell, []).append(float(speed))
    table: dict[str, dict[int, float]] = {}
    for (variant, number), by_cell in speeds.items():
        if set(by_cell) == names:
            table.setdefault(variant, {})[number] = fmean(statistics.start_value(each) for each in by_cell.values())
    return table


def _comparison(
    variant: str, reference: str, concurrency: int, found: statistics.Difference | None, rules: Rules, later: float
) -> Comparison:
    state = _state(found, rules)
    more = 0
    if state in (OPEN, MISSING):
        size = abs(found.mean) if found else 0.0
        target = max(size, rules.effect - size)
        more = statistics.more_rounds(found, target, later) if found else rules.first_look
    return Comparison(variant, reference, concurrency, state, found, more_rounds=more)


def _state(found: statistics.Difference | None, rules: Rules) -> str:
    if found is None:
        return MISSING
    if not math.isfinite(found.half_width):
        return OPEN
    if found.low > 0 and found.high >= rules.effect / 2:
        return FASTER
    if found.high < 0:
        return SLOWER
    if -rules.effect < found.low and found.high < rules.effect:
        return EQUAL
    return OPEN


def _by_load(
    cells: Sequence[Cell],
    counted: Sequence[Measurement],
    pairs: Sequence[tuple[Variant, str]],
    rules: Rules,
    share: float,
) -> tuple[Comparison, ...]:
    """The comparisons at each load, for the table."""
    tables = {cell.name: values(counted, [cell]) for cell in cells}
    noises = {name: statistics.residuals(table) for name, table in tables.items()}
    result = []
    for cell in cells:
        noise = statistics.borrowed(noises[cell.name], [noises[name] for name in noises if name != cell.name])
        for one, reference in pairs:
            found = statistics.difference(tables[cell.name], one.name, reference, noise, share)
            result.append(
                Comparison(one.name, reference, cell.concurrency, _state(found, rules), found, cell=cell.name)
            )
    return tuple(result)


# The decision


@dataclass(frozen=True)
class _Candidate:
    """A variant with the concurrencies, one after the other, at which it is faster."""

    variant: Variant
    row: tuple[Comparison, ...]
    first: int
    last: int

    @property
    def stretch(self) -> tuple[Comparison, ...]:
        return self.row[self.first : self.last + 1]

    @property
    def gain(self) -> float:
        return sum(one.found.mean for one in self.stretch if one.found)


def _decide(
    variants: Sequence[Variant],
    concurrencies: Sequence[int],
    compared: Sequence[Comparison],
    tables: Mapping[int, statistics.Table],
    noises: Mapping[int, statistics.Noise | None],
    rules: Rules,
    share: float,
) -> Verdict:
    speculative = [one for one in variants if one.speculates]
    rows = {
        one.name: tuple(each for each in compared if each.variant == one.name) for one in speculative
    }  # by concurrency, as `compared` is
    measured = [one for one in speculative if any(each.found for each in rows[one.name])]
    if not measured:
        return Verdict(NO_RESULT, "There is no result: no variant was measured together with its baseline.")

    candidates = [made for one in measured if (made := _candidate(one, rows[one.name]))]
    profiles = sorted({one.nccl_profile for one in variants})
    if candidates:
        own = {(one.variant, one.concurrency): one.found.mean for one in compared if one.found}

        def worth(one: _Candidate) -> tuple[float, int]:
            """With what the NCCL profile itself gives or costs; among equals the one with fewer steps."""
            by_profile = sum(own.get((one.variant.reference, each.concurrency), 0.0) for each in one.stretch)
            return one.gain + by_profile, -(one.variant.steps or 99)

        best = max(candidates, key=worth)
        rivals = _rivals(best, measured, concurrencies, tables, noises, rules, share)
        return _enable(best, rivals, rows, concurrencies, profiles, rules)

    waiting = [each for one in measured for each in rows[one.name] if each.state == OPEN]
    if waiting:
        more = max(each.more_rounds for each in waiting)
        many = f"more than {MOST_ROUNDS - 1}" if more >= MOST_ROUNDS else str(more)
        names = tuple(dict.fromkeys(each.variant for each in waiting))
        closest = max(waiting, key=_mean)
        sentence = (
            f"Not certain yet, {many} more repeat{'' if more == 1 else 's'} of {_listed(names)} "
            f"{'is' if more == 1 else 'are'} needed. Nearest to a gain: {_at(closest)}."
        )
        return Verdict(NOT_CERTAIN, sentence, more_rounds=more, open_variants=names)

    top = max((each for one in measured for each in rows[one.name] if each.found), key=_mean)
    whole = [one for one in speculative if all(each.found for each in rows[one.name])]
    what = "speculation" if len(whole) > 1 and whole == speculative else _listed([one.name for one in measured])
    least = f"by {100 * rules.smallest_effect:g} % or more"
    where = "at no concurrency" if whole == measured else "at no concurrency that was measured"
    are = "are" if what != "speculation" and len(measured) > 1 else "is"
    sentence = f"Do not enable: {what} {are} faster {where} {least}. Best: {_at(top)}."
    if lost := [one.name for one in speculative if one not in measured]:
        sentence += f" Nothing is known of {_listed(lost)}, which {'was' if len(lost) == 1 else 'were'} not measured."
    return Verdict(DO_NOT_ENABLE, sentence)


def _mean(one: Comparison) -> float:
    return one.found.mean if one.found else -math.inf


def _candidate(variant: Variant, row: tuple[Comparison, ...]) -> _Candidate | None:
    """The stretch of concurrencies, none between them lost, over which the variant gains most."""
    best: _Candidate | None = None
    for first, start in enumerate(row):
        if start.state != FASTER or (first and row[first - 1].state == FASTER):
            continue
        last = first
        while last + 1 < len(row) and row[last + 1].state == FASTER:
            last += 1
        made = _Candidate(variant, row, first, last)
        if best is None or made.gain > best.gain:
            best = made
    return best


def _rivals(
    best: _Candidate,
    measured: Sequence[Variant],
    concurrencies: Sequence[int],
    tables: Mapping[int, statistics.Table],
    noises: Mapping[int, statistics.Noise | None],
    rules: Rules,
    share: float,
) -> dict[str, str]:
    """How the others of the same NCCL profile stand against the best over its concurrencies: slower, equal, open."""
    stretch = concurrencies[best.first : best.last + 1]
    result = {}
    for one in measured:
        if one.name == best.variant.name or one.nccl_profile != best.variant.nccl_profile:
            continue
        mean = _mean_table(tables, stretch)
        found = statistics.difference(
            mean, one.name, best.variant.name, statistics.residuals(mean) or noises[stretch[0]], share
        )
        result[one.name] = _state(found, rules)
    return result


def _mean_table(tables: Mapping[int, statistics.Table], stretch: Sequence[int]) -> dict[str, dict[int, float]]:
    result: dict[str, dict[int, float]] = {}
    for name in tables[stretch[0]]:
        rows = [tables[number].get(name, {}) for number in stretch]
        shared = set(rows[0]).intersection(*rows[1:])
        result[name] = {number: fmean(row[number] for row in rows) for number in sorted(shared)}
    return result


def _enable(
    best: _Candidate,
    rivals: Mapping[str, str],
    rows: Mapping[str, tuple[Comparison, ...]],
    concurrencies: Sequence[int],
    profiles: Sequence[str],
    rules: Rules,
) -> Verdict:
    low, high = concurrencies[best.first], concurrencies[best.last]
    beyond = best.row[best.last + 1] if best.last + 1 < len(best.row) else None
    crossing = crossover(best.row[best.last :]) if beyond else Crossover(None, None, None)
    steps = best.variant.steps
    what = f"with {steps} step{'' if steps == 1 else 's'}" if steps else f"as {best.variant.name}"
    if best.variant.speculation.get("adaptive"):
        what = "with adaptive steps"
    where = f"up to concurrency {high}" if not best.first else f"for concurrency {low} to {high}"
    if best.first and low == high:
        where = f"at concurrency {low} alone"
    profile = f" under the NCCL profile {best.variant.nccl_profile}" if len(profiles) > 1 else ""
    gains = ", ".join(_at(one, name=False) for one in best.stretch)
    sentence = f"Enable {what} {where}{profile}: {gains}."
    notes = []
    if beyond is None:
        sentence += f" {high} is the greatest concurrency that was measured."
    elif beyond.state == OPEN:
        sentence += f" At {beyond.concurrency} it is not certain yet ({_at(beyond, name=False)})."
    elif beyond.state == MISSING:
        sentence += f" At {beyond.concurrency} it was not measured."
    if crossing.at is not None:
        sentence += f" It breaks even at concurrency {crossing.at:.0f}{_between(crossing)}."
    alike = [name for name, state in rivals.items() if state in (EQUAL, OPEN)]
    if alike:
        notes.append(
            f"{_listed(alike)} can't be told from {best.variant.name} there; the faster one on average is named."
        )
    if best.first:
        notes.append(f"Below concurrency {low} it is not faster.")
    for number in (one.concurrency for one in best.row if one not in best.stretch):
        others = [one for row in rows.values() for one in row if one.concurrency == number and one.state == FASTER]
        if others:
            notes.append(
                f"Where {best.variant.name} is not certainly faster another one is: {_at(max(others, key=_mean))}."
            )
    waiting = {name for name, state in rivals.items() if state == OPEN}
    if any(one.state == OPEN for one in best.row):
        waiting.add(best.variant.name)
    for name, row in rows.items():
        if any(one.state == OPEN and _may_beat(one, best, rules) for one in row):
            waiting.add(name)
    if waiting:
        waiting.add(best.variant.name)
    more = max(
        (one.more_rounds for name in waiting for one in rows[name] if one.state == OPEN), default=len(waiting) and 1
    )
    return Verdict(
        ENABLE, sentence, best.variant.name, steps, best.variant.nccl_profile, low, high, crossing, more,
        tuple(name for name in rows if name in waiting), notes=tuple(notes),
    )  # fmt: skip


def _may_beat(one: Comparison, best: _Candidate, rules: Rules) -> bool:
    """Whether an open comparison may still turn out better than the best one's, by an amount that matters."""
    if one.found is None or one.variant == best.variant.name:
        return False
    rival = next((each.found.mean for each in best.stretch if each.concurrency == one.concurrency and each.found), 0.0)
    return one.found.high > rival + rules.effect


def _profile_notes(variants: Sequence[Variant], compared: Sequence[Comparison]) -> list[str]:
    """What another NCCL profile, or another change without speculation, does to the baseline."""
    notes = []
    for one in variants:
        if one.speculates or not one.reference:
            continue
        rows = [each for each in compared if each.variant == one.name and each.state in (FASTER, SLOWER)]
        told = "; ".join(f"{each.state}, {_at(each, name=False)}" for each in rows)
        notes.append(f"{one.name} against {one.reference}: {told or 'no difference that is certain'}.")
    return notes


def crossover(row: Sequence[Comparison]) -> Crossover:
    """Where the speed-up reaches 1 beyond the first of these, by straight lines over the logarithm of concurrency; its
    interval is where the two ends of the speed-up's interval reach 1."""
    known = [(math.log2(one.concurrency), one.found) for one in row if one.found]
    if len(known) < 2:
        return Crossover(None, None, None)
    middle = _reaches_zero([(x, found.mean) for x, found in known])
    finite = all(math.isfinite(found.half_width) for _, found in known)
    low = _reaches_zero([(x, found.low) for x, found in known]) if finite else None
    high = _reaches_zero([(x, found.high) for x, found in known]) if finite else None
    return Crossover(middle, low, high)


def _reaches_zero(points: Sequence[tuple[float, float]]) -> float | None:
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if y > 0 >= next_y:
            return float(2 ** (x + (next_x - x) * y / (y - next_y)))
    return None


def _between(crossing: Crossover) -> str:
    if crossing.low is None and crossing.high is None:
        return ""
    low = f"{crossing.low:.0f}" if crossing.low is not None else "less"
    high = f"{crossing.high:.0f}" if crossing.high is not None else "beyond what was measured"
    return f" ({low} to {high})"


def _at(one: Comparison | None, name: bool = True) -> str:
    """eagle3-2-step at concurrency 4, 1.08 times (1.03 to 1.13)."""
    assert one is not None and one.found is not None
    interval = one.interval
    shown = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else " (from one round, no interval)"
    head = f"{one.variant} at concurrency {one.concurrency}, " if name else ""
    tail = "" if name else f" at {one.concurrency}"
    return f"{head}{math.exp(one.found.mean):.2f} times{shown}{tail}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _too_short(counted: Sequence[Measurement]) -> str:
    """A sentence where the requests are too short to measure decoding, '' otherwise."""
    tokens = [
        one.data["output_tokens"] / one.data["completed"]
        for one in counted
        if one.data.get("output_tokens") and one.data.get("completed")
    ]
    if not tokens or fmean(tokens) >= FEWEST_TOKENS:
        return ""
    return (
        f"Not certain yet, and more repeats won't tell: requests of {fmean(tokens):.0f} tokens are too short to "
        "measure decoding; raise benchmark_output_lengths."
    )
