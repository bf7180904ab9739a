"""What a measurement says of acceptance, steps, energy and trouble; what it can't know is None with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_host import gpu_samples, measurement
from gpu_host.bench_output import NUMBERS, Notes, Output, Request
from gpu_host.gpu_samples import Sample
from gpu_host.measurement import Asked, Span
from gpu_host.readings import Gpu, Readings

SPECULATES = {"speculative_algorithm": "EAGLE3", "max_running_requests": 48}
BASELINE = {"speculative_algorithm": None}
LINE = (
    "Decode batch, #running-req: {}, #token: 9, token usage: 0.00, accept len: {}, accept rate: 0.3, cuda graph: True"
)


def request(tokens: int = 101, accepted: float | None = None, step: float = 0.02, **more: Any) -> Request:
    """One whose decoding took `step` seconds a verification (or a token)."""
    steps = tokens / accepted if accepted else tokens - 1
    return Request(True, 0.1, 0.1 + steps * step, tokens, accepted, **more)


def output(requests: list[Request], info: dict[str, Any] = SPECULATES, average: float | None = None) -> Output:
    numbers = {
        **dict.fromkeys(NUMBERS, 1.0),
        "completed": float(sum(one.success for one in requests)),
        "total_output_tokens": float(sum(one.output_tokens for one in requests)),
    }
    return Output(numbers, tuple(requests), tuple("text" for _ in requests), info, average)


def build(requests: list[Request], asked: Asked | None = None, **more: Any) -> dict[str, Any]:
    given = {"info": SPECULATES, "average": None, "log": "", "samples": [], "span": Span(0.0, 10.0), **more}
    return measurement.build(
        asked or Asked(len(requests), 1, 101),
        output(requests, given["info"], given["average"]),
        Notes(requests=tuple(requests)),
        given["span"],
        given["samples"],
        "",
        given["log"],
    )


# Acceptance


def test_told_with_each_answer_it_is_weighed_by_verifications_not_by_answers() -> None:
    found = build([request(30, 3.0), request(100, 2.0)])
    assert (found["accept_length"], found["accept_length_source"]) == (pytest.approx(130 / 60), "requests")
    assert found["verify_steps"] == 60


def test_an_answer_of_one_token_has_nothing_to_tell_and_spoils_nothing() -> None:
    found = build([request(100, 2.0), request(1)])
    assert (found["accept_length"], found["accept_length_source"]) == (2.0, "requests")


def test_where_one_longer_answer_tells_nothing_the_servers_average_counts() -> None:
    found = build([request(100, 2.0), request(100)], average=2.2)
    assert (found["accept_length"], found["accept_length_source"]) == (2.2, "server_counters")
    assert found["verify_steps"] == round(200 / 2.2)


def test_without_counters_the_log_counts_weighed_by_its_batches() -> None:
    log = "\n".join((LINE.format(1, "2.00"), LINE.format(3, "3.00"), "Prefill batch, accept len: 9.00"))
    found = build([request(100)], log=log)
    assert (found["accept_length"], found["accept_length_source"]) == (pytest.approx(2.75), "log")


@pytest.mark.parametrize("log", ["", LINE.format(1, "0.00"), "Decode batch, #running-req: 1, no more"])
def test_too_short_to_measure_is_none_with_the_reason_never_zero(log: str) -> None:
    found = build([request(12)], log=log)
    for name in ("accept_length", "accept_length_source", "verify_steps", "step_ms"):
        assert found[name] is None
    for name in ("accept_length", "verify_steps", "step_ms"):
        assert "had not moved after 12 tokens: they do every 40 steps" in found["not_measured"][name]


def test_a_server_that_does_not_speculate_has_no_accept_length_but_a_step_time() -> None:
    found = build([request(101, step=0.012)], info=BASELINE, average=1.0)
    assert found["accept_length"] is None
    assert found["not_measured"]["accept_length"] == "The server does not speculate."
    assert found["step_ms"] == pytest.approx(12)


def test_an_accept_length_of_one_is_measured_as_one() -> None:
    assert build([request(100, 1.0)])["accept_length"] == 1.0


# Steps and rates


@pytest.mark.parametrize(("accepted", "step"), [(1.0, 0.03), (2.1, 0.03), (2.88, 0.017)])
def test_the_time_of_a_verification_is_found_again(accepted: float, step: float) -> None:
    assert build([request(101, accepted, step), request(77, accepted, step)])["step_ms"] == pytest.approx(1000 * step)


def test_by_the_servers_average_the_step_time_is_the_same_within_what_the_average_allows() -> None:
    plain = Request(True, 0.1, 0.1 + 50 * 0.03, 101)
    assert build([plain], average=2.0)["step_ms"] == pytest.approx(30)


def test_tokens_a_second_of_a_request_count_what_follows_the_first_token() -> None:
    fast, slow = Request(True, 1.0, 2.0, 101), Request(True, 0.0, 2.0, 101)
    assert build([fast, slow], info=BASELINE)["output_tokens_per_s_per_request"] == pytest.approx(75)


def test_answers_of_one_token_have_no_rate_and_no_step() -> None:
    found = build([request(1)], info=BASELINE)
    assert found["output_tokens_per_s_per_request"] is None and found["step_ms"] is None
    assert found["not_measured"]["step_ms"] == "No answer has more than one token."


# Energy and memory


def looks(*points: tuple[float, float], uuid: str = "GPU-a") -> list[Sample]:
    return [Sample(at, {uuid: watts}, {uuid: int(watts)}) for at, watts in points]


def test_energy_is_the_area_under_the_power_cut_at_the_runs_ends() -> None:
    rising = looks((0, 0), (2, 200), (4, 400), (6, 600), (8, 800))
    found = gpu_samples.energy(rising, 1.0, 7.0)
    assert found.joules == pytest.approx(100 * (49 - 1) / 2)
    assert found.watts_mean == pytest.approx(400)


def test_gpus_are_added_up_each_by_its_own_readings() -> None:
    both = [Sample(at, {"a": 100.0, "b": 50.0}) for at in (0.0, 0.75, 1.5, 2.25, 3.0)]
    assert gpu_samples.energy(both, 0.5, 2.5).joules == pytest.approx(300)


def test_a_run_longer_than_its_readings_is_held_level_at_their_ends() -> None:
    assert gpu_samples.energy(looks((1, 10), (2, 10), (3, 10)), 0.0, 4.0).joules == pytest.approx(40)


@pytest.mark.parametrize("samples", [[], looks((0, 30)), looks((0, 30), (5, 30), (20, 30))])
def test_a_run_of_too_few_readings_has_no_energy_and_says_why(samples: list[Sample]) -> None:
    found = build([request(101, 2.0)], samples=samples, span=Span(4.0, 6.0))
    assert found["gpu"]["joules"] is None and found["gpu"]["watts_mean"] is None
    assert found["gpu"]["tokens_per_joule"] is None
    assert found["not_measured"]["joules"] == (
        "The run of 2.0 s saw %d readings of the power; 3 are needed." % (len(samples) == 3)
        if samples
        else "The GPUs could not be read."
    )


def gpu(index: int, watts: float | None, **errors: str) -> Gpu:
    return Gpu(index, f"GPU-{index}", index, "x", "", None, 100, 7 + index, 93, 0, 0, watts, False, (), errors)


def test_a_gpu_that_does_not_tell_its_power_leaves_memory_measured_and_energy_not() -> None:
    readings = Readings("nvml", "580", None, (gpu(0, 300.0), gpu(1, None, power_watts="Not Supported")), None)
    sample, trouble = gpu_samples.sample_of(readings, [], 5.0)
    assert sample is not None and sample.mib == {"GPU-0": 7, "GPU-1": 8}
    assert trouble == "GPU 1 does not tell its power (Not Supported)."
    found = gpu_samples.energy([sample] * 4, 4.0, 6.0, trouble)
    assert (found.joules, found.why) == (None, trouble)


def test_only_the_servers_gpus_are_looked_at_and_the_most_memory_is_kept() -> None:
    readings = Readings("nvml", "580", None, (gpu(0, 300.0), gpu(1, 50.0)), None)
    sample, _ = gpu_samples.sample_of(readings, ["GPU-1"], 1.0)
    assert sample is not None and sample.watts == {"GPU-1": 50.0}
    assert gpu_samples.most_mib([Sample(0, {}, {"a": 5}), Sample(1, {}, {"a": 9}), Sample(2, {}, {"a": 2})]) == {"a": 9}


def test_gpus_that_are_gone_are_said_to_be_so() -> None:
    assert gpu_samples.sample_of(Readings("none", None, None, (), "No driver."), [], 0.0) == (None, "No driver.")
    sample, why = gpu_samples.sample_of(Readings("nvml", "1", None, (gpu(0, 1.0),), None), ["GPU-9"], 0.0)
    assert sample is None and "GPU-9 is not on this host" in why


# Trouble


def test_a_clock_that_jumped_is_told_and_changes_no_figure() -> None:
    still, jumped = build([request(101, 2.0)]), build([request(101, 2.0)], span=Span(0.0, 10.0, -3600.0))
    assert "was set by -3600.0 s meanwhile" in jumped["problems"][0]
    assert jumped.pop("clock_jump_s") == -3600.0 and still.pop("clock_jump_s") == 0.0
    assert {**jumped, "problems": []} == {**still, "problems": []} and still["problems"] == []


def test_a_clock_that_is_only_slewed_is_no_news() -> None:
    assert build([request(101, 2.0)], span=Span(0.0, 600.0, 0.4))["problems"] == []


def test_shorter_answers_and_requests_that_queued_are_told() -> None:
    found = build([request(101, 2.0), request(50, 2.0)], Asked(2, 64, 101))["problems"]
    assert found[0] == "1 of 2 answers are shorter than the 101 tokens asked for."
    assert found[1].startswith("The server runs at most 48 requests at once, 64 were sent")


def test_failed_and_missing_requests_are_a_failure_in_the_servers_own_words() -> None:
    bad = Request(False, 0, 0, 0, error="Traceback (most recent call last):\n  x\nClientOSError: [Errno 104] reset\n")
    asked = Asked(3, 1, 101)
    assert measurement.failure(asked, [request(), bad, bad], 1) == (
        "2 of 3 requests failed (ClientOSError: [Errno 104] reset)."
    )
    assert measurement.failure(asked, [request()] * 2, 2) == "2 of 3 requests were completed."
    capped = Asked(3, 1, 101, input_length=50)
    assert "only so many prompts have at most 50 tokens" in measurement.failure(capped, [request()] * 2, 2)
    assert measurement.failure(asked, [request()] * 3, 3) == ""


def test_of_the_servers_arguments_no_key_is_shown() -> None:
    found = build([request(101, 2.0)], info={**SPECULATES, "api_key": "secret", "admin_api_key": "more"})
    assert "secret" not in str(found) and "more" not in str(found["server_arguments"])
