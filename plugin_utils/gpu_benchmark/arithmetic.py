"""Why a drafter pays or does not: the arithmetic of speculative decoding. It explains a verdict and never makes it.

A decoding step of the baseline gives one token, a step with speculation `accept length` tokens (its bonus token is one
of them) and takes longer, since it drafts and verifies. So

    speed-up = accept length x baseline's step time / speculative step time

and it pays where the accept length is above the ratio of the two step times. That is decoding; requests also wait for
their first token, so `predicted` weighs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# An accept length up to here means that nothing is accepted: the bonus token alone is 1.
NOTHING_ACCEPTED = 1.02


@dataclass(frozen=True)
class Arithmetic:
    """Times in milliseconds. `predicted` is of the throughput, first token included; None where that is not known."""

    accept_length: float
    baseline_step_ms: float
    step_ms: float
    predicted: float | None

    @property
    def predicted_decode(self) -> float:
        return self.accept_length * self.baseline_step_ms / self.step_ms

    @property
    def break_even_accept_length(self) -> float:
        return self.step_ms / self.baseline_step_ms

    @property
    def break_even_step_ms(self) -> float:
        return self.accept_length * self.baseline_step_ms

    def as_dict(self) -> dict[str, float | None]:
        return {
            "accept_length": self.accept_length,
            "baseline_step_ms": self.baseline_step_ms,
            "step_ms": self.step_ms,
            "predicted_decode": self.predicted_decode,
            "predicted": self.predicted,
            "break_even_accept_length": self.break_even_accept_length,
            "break_even_step_ms": self.break_even_step_ms,
        }

    def sentences(self) -> list[str]:
        """What would have to change, by how much."""
        ratio = f"{self.accept_length:.2f} x {self.baseline_step_ms:.1f} ms / {self.step_ms:.1f} ms"
        if self.accept_length <= NOTHING_ACCEPTED:
            return [
                f"An accept length of {self.accept_length:.2f} means that no drafted token is accepted: {ratio} = "
                f"{self.predicted_decode:.2f}. Check that the drafter belongs to this model and that the algorithm is "
                "EAGLE3; no step time can make up for it."
            ]
        needed = self.break_even_accept_length
        if self.predicted_decode < 1:
            more, less = needed / self.accept_length - 1, 1 - self.break_even_step_ms / self.step_ms
            return [
                f"{ratio} = {self.predicted_decode:.2f}: a step gives {self.accept_length:.2f} tokens and takes as "
                f"long as {needed:.2f} steps of the baseline.",
                f"It would break even at an accept length of {needed:.2f} ({100 * more:.0f} % more), or at "
                f"{self.break_even_step_ms:.1f} ms a step ({100 * less:.0f} % less).",
            ]
        return [
            f"{ratio} = {self.predicted_decode:.2f}: a step gives {self.accept_length:.2f} tokens and takes as long as "
            f"{needed:.2f} steps of the baseline.",
            f"It would stop paying at an accept length below {needed:.2f}, or above {self.break_even_step_ms:.1f} ms a "
            "step.",
        ]


def explain(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> Arithmetic | None:
    """From the figures of the two at one load; None where one is not measurable."""
    accept, step = variant.get("accept_length"), variant.get("step_ms")
    before = baseline.get("step_ms")
    if not accept or not step or not before:
        return None
    return Arithmetic(float(accept), float(before), float(step), _throughput(variant, baseline, accept, step, before))


def _throughput(
    variant: Mapping[str, Any], baseline: Mapping[str, Any], accept: float, step: float, before: float
) -> float | None:
    """The ratio of the times of a whole request: time to the first token, then the rest of its tokens."""
    first, first_before, tokens = (
        variant.get("ttft_mean_ms"),
        baseline.get("ttft_mean_ms"),
        baseline.get("output_length"),
    )
    if first is None or first_before is None or not tokens:
        return None
    rest = float(tokens) - 1
    return (float(first_before) + rest * before) / (float(first) + rest * step / accept)
