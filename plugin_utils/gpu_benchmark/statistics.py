"""How certain a difference of two variants is, from a few starts of each.

The unit is one start of a server: what is measured within one start is alike (memory layout, clock speeds, the order of
JIT), so its repeats make one value, their median. Variants are compared within each round, where they ran one after the
other; a drift of the host over the hours falls out.

Two things make a few starts enough. The noise is estimated over all variants of a round (a two-way layout, variant plus
round) and, with a third of the weight, over all concurrencies, but never taken as less than the pair's own. And every
interval holds for all comparisons of the report together (Bonferroni), also though the run looks after each round
whether it may stop: the allowed error is spent in equal parts over the looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

# Logarithms of throughput by variant and round.
Table = Mapping[str, Mapping[int, float]]

# Two starts are never taken to be more alike than this: 0.1 % of the throughput.
LEAST_NOISE = 0.001
# Weight of the other concurrencies' noise in one concurrency's: starts are shared, so they tell less than they count.
BORROWED = 1 / 3


@dataclass(frozen=True)
class Noise:
    """Variance of one start's logarithm, and how many degrees of freedom it rests on."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Difference:
    """`mean` is the logarithm of the speed-up over `rounds` shared rounds, `error` its standard error, `half_width`
    that of the interval (infinite where one round tells nothing of the noise)."""

    mean: float
    error: float
    half_width: float
    rounds: int
    freedom: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def start_value(speeds: Sequence[float]) -> float:
    """One start's value from its repeats: the median of the logarithms, which one stalled repeat doesn't move."""
    return median(math.log(speed) for speed in speeds)


def residuals(table: Table) -> Noise | None:
    """Noise of a two-way layout, variant plus round; None where nothing is repeated. Rounds may be incomplete."""
    entries = [(name, number, value) for name, row in table.items() for number, value in row.items()]
    numbers = sorted({number for _, number, _ in entries})
    shared = [number for number in numbers if sum(1 for _, other, _ in entries if other == number) > 1]
    entries = [one for one in entries if one[1] in shared]
    names = sorted({name for name, _, _ in entries})
    freedom = len(entries) - len(names) - len(shared) + 1
    if freedom < 1:
        return None
    by_name, by_round = dict.fromkeys(names, 0.0), dict.fromkeys(shared, 0.0)
    for _ in range(200):  # alternating means: exact at once when complete, quick otherwise
        change = 0.0
        for name in names:
            new = fmean(value - by_round[number] for other, number, value in entries if other == name)
            change = max(change, abs(new - by_name[name]))
            by_name[name] = new
        for number in shared:
            by_round[number] = fmean(value - by_name[name] for name, other, value in entries if other == number)
        if change < 1e-12:
            break
    total = sum((value - by_name[name] - by_round[number]) ** 2 for name, number, value in entries)
    return Noise(total / freedom, freedom)


def borrowed(own: Noise | None, others: Iterable[Noise | None]) -> Noise | None:
    """The noise at one concurrency, steadied by what is known of the others."""
    known = [one for one in others if one is not None]
    if own is None or not known:
        return own
    weight = BORROWED * sum(one.freedom for one in known)
    everywhere = [own, *known]
    average = sum(one.variance * one.freedom for one in everywhere) / sum(one.freedom for one in everywhere)
    freedom = own.freedom + weight
    return Noise(max(own.variance, (own.variance * own.freedom + average * weight) / freedom), freedom)


def difference(table: Table, variant: str, reference: str, noise: Noise | None, error_rate: float) -> Difference | None:
    """The variant against its reference over the rounds in which both ran; None where there is none.

    `error_rate` is what this one interval may miss, two-sided.
    """
    mine, other = table.get(variant, {}), table.get(reference, {})
    shared = sorted(set(mine) & set(other))
    if not shared:
        return None
    gaps = [mine[number] - other[number] for number in shared]
    count, mean = len(gaps), fmean(gaps)
    if count < 2 or noise is None:
        return Difference(mean, math.inf, math.inf, count, 0.0)
    own = sum((gap - mean) ** 2 for gap in gaps) / (count - 1)
    variance = max(2 * noise.variance, own, 2 * LEAST_NOISE**2)
    error = math.sqrt(variance / count)
    return Difference(mean, error, t_quantile(error_rate, noise.freedom) * error, count, noise.freedom)


def error_rate(certainty: float, comparisons: int, rounds: int, first_look: int, last_look: int) -> float:
    """What one interval may miss after `rounds` rounds, so that all intervals of all looks hold with `certainty`.

    The run looks after `first_look` rounds and after each further one up to `last_look`; each round that is made earns
    its part of the error.
    """
    first_look, last_look = max(first_look, 1), max(last_look, first_look, 1)
    parts = first_look if rounds <= first_look else 1
    return (1 - certainty) * parts / last_look / max(comparisons, 1)


def more_rounds(found: Difference, target: float, error_rate_later: float, most: int = 99) -> int:
    """Rounds to add until a difference of `target` (in logarithms) would be found in nine of ten runs, at least 1."""
    if not math.isfinite(found.error) or found.freedom <= 0:
        return max(1, 3 - found.rounds)
    one_start = found.error * math.sqrt(found.rounds)
    for extra in range(1, most + 1):
        rounds = found.rounds + extra
        freedom = found.freedom * (rounds - 1) / max(found.rounds - 1, 1)
        error = one_start / math.sqrt(rounds)
        if (
            t_quantile(round(error_rate_later, 12), round(freedom, 3)) + t_quantile(0.2, round(freedom, 3))
        ) * error <= target:
            return extra
    return most


# Student's t from the incomplete beta function (Numerical Recipes 6.4: continued fraction by Lentz's method).


@lru_cache(maxsize=4096)
def t_quantile(two_sided: float, freedom: float) -> float:
    """The value that |t| exceeds with probability `two_sided`."""
    low, high = 0.0, 1.0
    while _beta(freedom / 2, freedom / (freedom + high * high)) > two_sided:
        low, high = high, high * 2
        if high > 1e12:
            return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        if _beta(freedom / 2, freedom / (freedom + middle * middle)) > two_sided:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta(a: float, x: float, b: float = 0.5) -> float:
    """Regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(logarithm)
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 500):
        for part in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + part * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + part / c
            c = c if abs(c) > tiny else tiny
            result *= d * c
        if abs(d * c - 1) < 1e-13:
            break
    return result
