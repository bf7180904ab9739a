"""Planted benchmarks and what has to follow from them: intervals, the verdict, the arithmetic."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

import pytest
import yaml
from gpu_benchmark import arithmetic, plan, runs, statistics, verdict
from gpu_benchmark.variants import Cell, Variant
from hypothesis import given
from hypothesis import strategies as st

CASES = Path(__file__).parent / "cases"
PLANTED = yaml.safe_load((CASES / "benchmark-verdicts.yml").read_text())
RECORDED = sorted(
    [*CASES.glob("benchmark-repeats*.json"), *Path(__file__).parent.parent.glob("recorded/*/benchmark-repeats*.json")]
)


def variants_of(case: dict) -> list[Variant]:
    made: list[Variant] = []
    first: dict[str, str] = {}
    for name, facts in case["variants"].items():
        profile = facts.get("nccl_profile", "latency")
        steps = int(name.split("-")[1]) if name.startswith("eagle3") else None
        speculation = {"algorithm": "EAGLE3", "num_steps": steps} if steps else {}
        reference = first.get(profile, next(iter(first.values()), "")) if steps else next(iter(first.values()), "")
        if not steps:
            first.setdefault(profile, name)
        made.append(Variant(name, speculation, "/d" if steps else "", profile, {}, {}, reference))
    return made


def cells_of(concurrencies) -> list[Cell]:
    return [Cell(f"c{number}", number, 0, 256, "/p", "p", 16) for number in concurrencies]


def measured(case: dict, seed: int = 7, repeats: int = 3) -> list[runs.Measurement]:
    """Measurements as the case plants them, in the order of the plan."""
    noise, drift, stalled = case.get("noise", 0.008), case.get("drift", 0.0), case.get("stalled", 0)
    generator, names, found, start = random.Random(seed), list(case["variants"]), [], 0
    for number in range(1, case.get("rounds", 3) + 1):
        for name in plan.order(names, number, 1):
            start += 1
            facts = case["variants"][name]
            of_start = generator.gauss(0, noise) - drift * start
            for repeat in range(1, repeats + 1):
                for concurrency, step in facts["step_ms"].items():
                    speed = concurrency * (facts.get("accept") or 1.0) * 1000 / step
                    speed *= math.exp(of_start + generator.gauss(0, noise))
                    if stalled and repeat == 2 and start % stalled == 0:
                        speed *= 0.4
                    tokens = case.get("output_tokens", 256)
                    data = {"output_tokens_per_s": speed, "completed": 16, "output_tokens": 16 * tokens}
                    found.append(runs.Measurement(name, number, f"c{concurrency}", repeat, data))
    return found


def judged(case: dict, rules: verdict.Rules | None = None, **options) -> verdict.Verdict:
    concurrencies = next(iter(case["variants"].values()))["step_ms"]
    return verdict.judge(
        variants_of(case), cells_of(concurrencies), measured(case, **options), rules or verdict.Rules()
    )


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case["name"])
def test_case(case):
    for seed in (7, 8, 9):
        found = judged(case, seed=seed)
        for key, value in case["verdict"].items():
            assert getattr(found, key) == value, found.sentence
        text = " ".join([found.sentence, *found.notes])
        for words in case.get("words", []):
            assert words in text, text


def test_at_least_ten_cases_are_planted():
    assert len(PLANTED) >= 10


@pytest.mark.parametrize("case", [one for one in PLANTED if "arithmetic" in one], ids=lambda case: case["name"])
def test_the_arithmetic_gives_the_break_even_points(case):
    for name, expected in case["arithmetic"].items():
        row = {"accept_length": case["variants"][name]["accept"], "step_ms": case["variants"][name]["step_ms"][1]}
        made = arithmetic.explain(row, {"step_ms": case["variants"]["baseline"]["step_ms"][1]})
        for key, value in expected.items():
            assert getattr(made, key) == pytest.approx(value, rel=0.001)
        usual = "It would break even at an accept length of 2.50 (19 % more), or at 25.2 ms a step (16 % less)."
        assert case.get("explanation", {}).get(name, usual) in " ".join(made.sentences())


def test_the_arithmetic_says_nothing_where_the_accept_length_is_not_measurable():
    assert arithmetic.explain({"accept_length": None, "step_ms": 20}, {"step_ms": 12}) is None
    assert arithmetic.explain({"accept_length": 2.0, "step_ms": None}, {"step_ms": 12}) is None
    assert arithmetic.explain({"accept_length": 2.0, "step_ms": 20}, {"step_ms": None}) is None


def test_a_drafter_that_pays_is_told_when_it_would_stop_paying():
    made = arithmetic.explain({"accept_length": 3.0, "step_ms": 20.0}, {"step_ms": 12.0})
    assert "stop paying at an accept length below 1.67, or above 36.0 ms a step" in " ".join(made.sentences())


def test_the_predicted_throughput_counts_the_wait_for_the_first_token():
    row, before = {"accept_length": 2.0, "step_ms": 12.0, "ttft_mean_ms": 1000}, {"step_ms": 12.0, "ttft_mean_ms": 1000}
    made = arithmetic.explain(row, {**before, "output_length": 101})
    assert made.predicted_decode == pytest.approx(2.0)
    assert made.predicted == pytest.approx((1000 + 1200) / (1000 + 600))


def test_the_arithmetic_is_never_the_source_of_the_verdict():
    case = {"variants": {"baseline": {"step_ms": {1: 12}}, "eagle3-2-step": {"accept": 2.0, "step_ms": {1: 20}}}}
    found = judged(case)
    contradicting = [
        runs.Measurement(
            one.variant, one.round, one.cell, one.repeat, {**one.data, "accept_length": 1.0, "step_ms": 90.0}
        )
        for one in measured(case)
    ]
    again = verdict.judge(variants_of(case), cells_of([1]), contradicting, verdict.Rules())
    assert (again.kind, again.sentence) == (found.kind, found.sentence) and found.kind == verdict.ENABLE


def without(case: dict, lost: dict[str, tuple[int, ...]]) -> verdict.Verdict:
    """The verdict where some variants were not measured at some concurrencies."""
    gone = {(name, f"c{number}") for name, numbers in lost.items() for number in numbers}
    kept = [one for one in measured(case) if (one.variant, one.cell) not in gone]
    return verdict.judge(variants_of(case), cells_of([1, 4]), kept, verdict.Rules())


def test_do_not_enable_claims_nothing_of_what_was_not_measured():
    steps = {1: 30, 4: 32}
    case = {"variants": {"baseline": {"step_ms": {1: 12, 4: 13}},
                         **{f"eagle3-{n}-step": {"accept": 2.0, "step_ms": steps} for n in (1, 2, 3)}}}  # fmt: skip
    assert "Do not enable: speculation is faster at no concurrency by" in without(case, {}).sentence
    found = without(case, {"eagle3-2-step": (1, 4), "eagle3-3-step": (4,)})
    assert found.kind == verdict.DO_NOT_ENABLE
    assert "eagle3-1-step and eagle3-3-step are faster at no concurrency that was measured by 5 %" in found.sentence
    assert found.sentence.endswith("Nothing is known of eagle3-2-step, which was not measured.")


def test_enable_says_where_it_was_not_measured_and_where_another_variant_would_pay():
    case = {"variants": {"baseline": {"step_ms": {1: 12, 4: 13}},
                         "eagle3-1-step": {"accept": 1.8, "step_ms": {1: 20, 4: 20}},
                         "eagle3-3-step": {"accept": 3.0, "step_ms": {1: 18, 4: 60}}}}  # fmt: skip
    found = without(case, {"eagle3-1-step": (1, 4), "eagle3-3-step": (4,)})
    assert (found.variant, found.up_to_concurrency) == ("eagle3-3-step", 1)
    assert "At 4 it was not measured." in found.sentence
    notes = " ".join(without(case, {}).notes)
    assert "Where eagle3-3-step is not certainly faster another one is: eagle3-1-step at concurrency 4, 1.1" in notes


# A variant with itself, and a planted difference


def resampled(recorded: dict, generator: random.Random, factor: float, rounds: int) -> list[runs.Measurement]:
    """Two variants, each of whose starts is one of the recorded ones, drawn with replacement."""
    found = []
    for number in range(1, rounds + 1):
        for name, scale in (("baseline", 1.0), ("eagle3-1-step", factor)):
            start = generator.choice(recorded["starts"])
            for cell, speeds in start.items():
                for repeat, speed in enumerate(speeds, 1):
                    data = {"output_tokens_per_s": speed * scale}
                    found.append(runs.Measurement(name, number, cell, repeat, data))
    return found


def outcome(recorded: dict, generator: random.Random, factor: float, rules: verdict.Rules) -> verdict.Verdict:
    """As a run does it: a look after each round from the first on, more rounds only while something is open."""
    case: dict = {"variants": {"baseline": {}, "eagle3-1-step": {}}}
    cells = cells_of(int(name[1:]) for name in recorded["starts"][0])
    measurements = resampled(recorded, generator, factor, rules.last_look)
    for number in range(rules.first_look, rules.last_look + 1):
        found = verdict.judge(variants_of(case), cells, measurements, rules, up_to_round=number)
        if not found.open_variants:
            break
    return found


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_of_200_comparisons_of_a_variant_with_itself_at_most_5_percent_name_a_winner(file):
    recorded, generator = json.loads(file.read_text()), random.Random(11)
    winners = 0
    for _ in range(200):
        found = outcome(recorded, generator, 1.0, verdict.Rules())
        winners += any(one.state in (verdict.FASTER, verdict.SLOWER) for one in found.comparisons)
    assert winners <= 10


def rules_for(recorded: dict) -> verdict.Rules:
    """As many rounds as the noise of the recording needs; those of the defaults where it does not say."""
    rounds = recorded.get("rounds_that_find_5_percent")
    return verdict.Rules(first_look=rounds, last_look=rounds) if rounds else verdict.Rules()


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_planted_difference_of_5_percent_is_found_in_at_least_95_percent(file):
    recorded, generator = json.loads(file.read_text()), random.Random(12)
    for factor, kind in ((1.05, verdict.FASTER), (1 / 1.05, verdict.SLOWER)):
        found = [outcome(recorded, generator, factor, rules_for(recorded)) for _ in range(100)]
        right = sum(all(one.state == kind for one in each.comparisons) for each in found)
        assert right >= 95
        expected = verdict.ENABLE if factor > 1 else verdict.DO_NOT_ENABLE
        assert sum(each.kind == expected for each in found) >= 95


NOISY = [file for file in RECORDED if "rounds_that_find_5_percent" in json.loads(file.read_text())]


@pytest.mark.parametrize("file", NOISY, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_where_the_noise_is_too_great_for_the_rounds_a_difference_stays_open_and_is_not_turned_round(file):
    recorded, generator = json.loads(file.read_text()), random.Random(13)
    found = [outcome(recorded, generator, 1.05, verdict.Rules()) for _ in range(100)]
    assert sum(any(one.state == verdict.SLOWER for one in each.comparisons) for each in found) <= 5
    asked = [each for each in found if each.open_variants]
    assert len(asked) > 50 and all(each.more_rounds > 0 for each in asked)


def test_with_four_variants_of_unlike_noise_that_are_all_the_same_few_runs_name_a_winner():
    """The noisiest variant must not hide behind the quiet ones, nor the many comparisons make a winner."""
    generator, wrong = random.Random(3), 0
    names = ["baseline", "eagle3-1-step", "eagle3-2-step", "eagle3-3-step"]
    case: dict = {"variants": {name: {} for name in names}}
    for _ in range(100):
        measurements = []
        for number in range(1, 9):
            for name in names:
                spread = 0.02 if name == "eagle3-3-step" else 0.004
                of_start = generator.gauss(0, spread)
                for cell, scale in (("c1", 0.5), ("c4", 1), ("c16", 2)):
                    for repeat in (1, 2, 3):
                        stalled = -0.15 if generator.random() < 0.03 else 0.0
                        value = math.exp(scale * (of_start + generator.gauss(0, spread)) + stalled)
                        measurements.append(
                            runs.Measurement(name, number, cell, repeat, {"output_tokens_per_s": value})
                        )
        for number in range(3, 9):
            found = verdict.judge(
                variants_of(case), cells_of([1, 4, 16]), measurements, verdict.Rules(), up_to_round=number
            )
            if not found.open_variants:
                break
        wrong += any(one.state in (verdict.FASTER, verdict.SLOWER) for one in found.comparisons)
    assert wrong <= 8


def test_an_interval_holds_the_true_speed_up():
    case = {
        "variants": {"baseline": {"step_ms": {1: 10}}, "eagle3-1-step": {"accept": 1.8, "step_ms": {1: 12}}},
        "noise": 0.02,
    }
    held = 0
    for seed in range(100):
        low, high = judged(case, seed=seed).comparisons[0].interval or (0.0, 0.0)
        held += low <= 1.5 <= high
    assert held >= 95


# Pieces


def test_t_quantiles_are_those_of_the_tables():
    for freedom, value in ((1, 12.706), (2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423)):
        assert statistics.t_quantile(0.05, freedom) == pytest.approx(value, rel=2e-3)
    assert statistics.t_quantile(0.001, 4) == pytest.approx(8.610, rel=1e-3)
    assert statistics.t_quantile(0.05, 1e6) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-4)


@given(st.integers(2, 5), st.integers(2, 6), st.floats(-0.5, 0.5), st.integers(0, 999))
def test_what_slows_a_whole_round_changes_no_difference(count, rounds, slower, seed):
    generator = random.Random(seed)
    table = {f"v{n}": {r: generator.gauss(5, 0.1) for r in range(rounds)} for n in range(count)}
    noise = statistics.residuals(table)
    other = {name: {r: value + slower * r for r, value in row.items()} for name, row in table.items()}
    assert statistics.residuals(other).variance == pytest.approx(noise.variance, rel=1e-6, abs=1e-12)
    one = statistics.difference(table, "v1", "v0", noise, 0.05)
    two = statistics.difference(other, "v1", "v0", noise, 0.05)
    assert (one.mean, one.half_width) == pytest.approx((two.mean, two.half_width), rel=1e-6)


def test_noise_is_found_in_rounds_that_lack_a_variant():
    generator = random.Random(1)
    table = {f"v{n}": {r: generator.gauss(0, 1) for r in range(40)} for n in range(3)}
    table["v2"] = {r: value for r, value in table["v2"].items() if r < 25}
    found = statistics.residuals(table)
    assert found.freedom == 40 + 40 + 25 - 3 - 40 + 1
    assert found.variance == pytest.approx(1.0, rel=0.3)


def test_the_error_of_all_looks_adds_up_to_what_was_asked_for():
    spent = sum(statistics.error_rate(0.95, 1, rounds, 3, 8) for rounds in range(3, 9))
    assert spent == pytest.approx(0.05)
    assert statistics.error_rate(0.95, 6, 3, 3, 3) == pytest.approx(0.05 / 6)


def test_the_repeats_that_are_asked_for_find_the_difference_in_nine_of_ten_runs():
    spread, rounds, effect = 0.03, 3, 0.05
    before = statistics.Difference(effect, spread * math.sqrt(2 / rounds), math.inf, rounds, freedom=200)
    more = statistics.more_rounds(before, effect, 0.01)
    generator, found = random.Random(2), 0
    for _ in range(1000):
        mean = generator.gauss(effect, spread * math.sqrt(2 / (rounds + more)))
        found += mean > statistics.t_quantile(0.01, 200) * spread * math.sqrt(2 / (rounds + more))
    assert 870 <= found <= 960


def test_the_crossover_lies_between_the_measured_concurrencies_with_its_interval():
    case = next(one for one in PLANTED if one["name"].startswith("Three steps win"))
    found = judged(case).crossover
    assert 4 < found.low < found.at < found.high < 16
    true = {c: math.log(2.88 / 17.6 * 13) if c == 4 else math.log(2.88 / 57.2 * 17) for c in (4, 16)}
    expected = 2 ** (2 + 2 * true[4] / (true[4] - true[16]))
    assert found.low < expected < found.high
