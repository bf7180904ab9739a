"""The verdict on a GPU follows from plain readings: one case a sentence, in cases/verdicts.yml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from gpu_host.kernel_log import KernelEvent
from gpu_host.readings import Gpu, GpuProcess
from gpu_host.verdict import CLEAN, VERDICTS, Policy, Sight, judge, settled

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "verdicts.yml").read_text())
IDLE = Gpu(
    index=3, uuid="GPU-11111111-aaaa-bbbb-cccc-000000000003", minor=0, name="NVIDIA RTX PRO 6000 Blackwell",
    pci_bus_id="00000000:61:00.0", compute_capability="12.0", total_mib=97887, used_mib=0, free_mib=97249,
    reserved_mib=638, utilization_percent=0, power_watts=30.0, mig=False, processes=(), errors={},
)  # fmt: skip


def judged(case):
    given = dict(case.get("gpu", {}))
    if given.get("processes") is not None:
        given["processes"] = tuple(GpuProcess(*one) for one in given["processes"] or ())
    gpu = replace(IDLE, **given)
    seen = case.get("sight", {})
    sight = Sight(
        states=seen.get("states", {}),
        names=seen.get("names", {}),
        protected=frozenset(seen.get("protected", ())),
        unkillable=frozenset(seen.get("unkillable", ())),
        guest=seen.get("guest", False),
    )
    policy = Policy(utilization=tuple((at, load) for at, load in case.get("policy", {}).get("utilization", ())))
    events = [KernelEvent(kind="xid", seconds=1.0, time=1.0, text="", **one) for one in case.get("events", ())]
    return judge(gpu, sight, policy, events), settled(gpu, policy)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_case_gets_its_verdict(case):
    verdict, is_settled = judged(case)
    assert verdict.verdict == case["verdict"]
    assert verdict.pids == case.get("pids", verdict.pids)
    for words in case.get("cure", ()):
        assert words in verdict.cure
    for words in case.get("detail", ()):
        assert words in verdict.detail
    assert is_settled == case.get("settled", True)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_whatever_is_not_clean_has_a_cure_of_one_sentence(case):
    verdict, _ = judged(case)
    if verdict.verdict in CLEAN:
        assert verdict.clean and verdict.cure == ""
    else:
        assert not verdict.clean and verdict.cure.endswith(".") and ". " not in verdict.cure


def test_every_verdict_of_the_design_has_a_case():
    assert {case["verdict"] for case in CASES} == set(VERDICTS)
