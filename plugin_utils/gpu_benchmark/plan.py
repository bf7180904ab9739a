"""In what order variants are measured, what comes next, and how long it takes.

A round starts each variant once. Rounds are interleaved (all variants of round 1, then all of round 2), and each round
has another order, so that a host that grows slower or warmer favours no variant. After `rounds` rounds another one is
made only for the variants whose outcome is open, with what they are compared with, up to `max_rounds`.

Pure functions: what was measured comes in, the next step goes out. So an interrupted run goes on where it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import Failure
from .variants import Cell, Variant

# A variant that fails so often in one play, without a success between, is not started again in it.
GIVE_UP_AFTER = 2

Key = tuple[int, str, str, int]
# From the rounds so far: the names of the variants whose outcome is open.
Undecided = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class Plan:
    variants: tuple[Variant, ...]
    cells: tuple[Cell, ...]
    repeats: int
    rounds: int
    max_rounds: int
    seed: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.variants)

    def variant(self, name: str) -> Variant:
        return next(one for one in self.variants if one.name == name)

    def keys(self, round_number: int, variant: str) -> list[Key]:
        """The measurements of one start: the loads one after the other, then all again."""
        return [
            (round_number, variant, cell.name, repeat) for repeat in range(1, self.repeats + 1) for cell in self.cells
        ]


@dataclass(frozen=True)
class Step:
    """One start of a server. `missing`: what is to be measured of it. `of`: steps that are certain to come."""

    number: int
    of: int
    round: int
    variant: str
    missing: tuple[Key, ...]


@dataclass(frozen=True)
class Done:
    """Nothing more to do; `reason` is one sentence."""

    reason: str


def order(names: Sequence[str], round_number: int, seed: int) -> list[str]:
    """The variants of a round. Over as many rounds as there are variants each one has each place once; each second
    turn runs backwards, so that none always follows the same other one."""
    shuffled = list(names)
    random.Random(seed).shuffle(shuffled)
    count = len(shuffled)
    turn, shift = divmod(round_number - 1, count)
    rotated = shuffled[shift:] + shuffled[:shift]
    return rotated[::-1] if (turn + round_number) % 2 == 0 else rotated


def given_up(failures: Sequence[Failure], measured: set[Key], session: str) -> set[str]:
    """Variants that failed GIVE_UP_AFTER times in this play, with nothing whole since."""
    result = set()
    for name in {one.variant for one in failures}:
        rounds = sorted({one.round for one in failures if one.variant == name and one.session == session})
        in_vain = [number for number in rounds if not any(key[0] == number and key[1] == name for key in measured)]
        if len(in_vain) >= GIVE_UP_AFTER:
            result.add(name)
    return result


def following(
    plan: Plan,
    measured: set[Key],
    failures: Sequence[Failure],
    session: str,
    undecided: Undecided,
) -> Step | Done:
    """The next start, or why there is none."""
    lost = given_up(failures, measured, session)
    causes = {one.variant: one.cause for one in failures}
    failed = {(one.round, one.variant) for one in failures}
    if all(one.name in lost for one in plan.variants if not one.reference):
        name = next(one.name for one in plan.variants if not one.reference)
        return Done(f"{name}, which the others are compared with, failed {GIVE_UP_AFTER} times: {causes[name]}")

    def todo(number: int, names: Sequence[str]) -> tuple[int, list[tuple[int, str, tuple[Key, ...]]]]:
        """How many starts of the round are over, and those to come."""
        over, coming = 0, []
        for name in order(plan.names, number, plan.seed):
            missing = tuple(key for key in plan.keys(number, name) if key not in measured)
            if name in names and (not missing or (number, name) in failed):
                over += 1
            elif name in names and name not in lost:
                coming.append((number, name, missing))
        return over, coming

    regular = [todo(number, plan.names) for number in range(1, plan.rounds + 1)]
    over = sum(passed for passed, _ in regular)
    coming = [step for _, steps in regular for step in steps]
    number = plan.rounds
    while not coming:
        names = _participants(plan, undecided(number), lost)
        if not names:
            return Done(f"Nothing is open after {_rounds(number)}.")
        number += 1
        names = tuple(name for name in names if _rounds_of(measured, name, number) < plan.max_rounds)
        if not any(plan.variant(name).reference for name in names) or number > plan.max_rounds + len(failed):
            return Done(f"Something is open after {_rounds(number - 1)}, the most that were asked for.")
        more_over, coming = todo(number, names)
        over += more_over
    first = coming[0]
    return Step(over + 1, over + len(coming), *first)


def _participants(plan: Plan, open_names: Sequence[str], lost: set[str]) -> tuple[str, ...]:
    """The variants whose outcome is open and, by the references, what they are compared with."""
    wanted = {name for name in open_names if name in plan.names and name not in lost}
    for name in tuple(wanted):
        while (name := plan.variant(name).reference) and name not in lost:
            wanted.add(name)
    return tuple(name for name in plan.names if name in wanted)


def _rounds_of(measured: set[Key], name: str, before: int) -> int:
    return len({key[0] for key in measured if key[1] == name and key[0] < before})


def _rounds(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds"


# Time


@dataclass(frozen=True)
class Clock:
    """`monotonic` seconds count from `boot` on: a wall clock may jump, these don't."""

    boot: str
    monotonic: float


def closed(progress: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """The progress with the step that was going on ended, its seconds added; dropped where the machine was booted
    since, or another play began."""
    steps = list(progress.get("steps", []))
    current = progress.get("current")
    if isinstance(current, Mapping) and current.get("boot") == clock.boot:
        seconds = clock.monotonic - float(current.get("monotonic", clock.monotonic))
        if seconds >= 0:
            steps.append(
                {"round": current.get("round"), "variant": current.get("variant"), "seconds": round(seconds, 1)}
            )
    return {"steps": steps}


def opened(progress: Mapping[str, Any], step: Step, clock: Clock) -> dict[str, Any]:
    current = {"round": step.round, "variant": step.variant, "boot": clock.boot, "monotonic": clock.monotonic}
    return {**progress, "current": current}


def seconds_left(progress: Mapping[str, Any], step: Step) -> float | None:
    """From what earlier steps took, the newest eight; None where there is none."""
    taken = [float(one["seconds"]) for one in progress.get("steps", []) if "seconds" in one][-8:]
    return sum(taken) / len(taken) * (step.of - step.number + 1) if taken else None


def progress_line(step: Step, left: float | None) -> str:
    time = f"about {duration(left)} left" if left is not None else "the time left is known after the first step"
    return f"step {step.number} of {step.of}: {step.variant}, round {step.round}; {time}"


def duration(seconds: float) -> str:
    """14 min, 40 s, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
