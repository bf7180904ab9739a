"""Findings about a host from its facts; the cases are data (cases/host_facts.yml)."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import all_reduce, arguments, host_checks, host_info, plan_checks
from gpu_host.finding import Finding

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = yaml.safe_load((Path(__file__).parent / "cases/host_facts.yml").read_text())


def facts_of(change: dict[str, Any]) -> dict[str, Any]:
    """The good host's facts with some of them changed."""
    facts = copy.deepcopy(DATA["good"]["facts"])
    facts["gpus"] = [{**copy.deepcopy(DATA["good"]["gpu"]), "index": index} for index in range(8)]
    for path, value in change.items():
        if path == "gpus.keep":
            facts["gpus"] = facts["gpus"][:value]
            continue
        *way, last = path.split(".")
        places: list[Any] = [facts]
        for part in way:
            places = [
                one
                for place in places
                for one in (place if part == "*" else [place[int(part) if isinstance(place, list) else part]])
            ]
        for place in places:
            place[last] = copy.deepcopy(value)
    return facts


def found_in(case: dict[str, Any]) -> list[Finding]:
    wanted = dict(case.get("wanted", {}))
    if "ports" in wanted:
        wanted["ports"] = tuple(wanted["ports"])
    return host_checks.check(facts_of(case.get("change", {})), host_checks.Wanted(**wanted))


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_a_host_is_judged_as_the_case_says(case):
    found = found_in(case)
    assert [f"{one.severity} {one.code}" for one in found] == case["finds"]
    if "says" in case:
        assert any(case["says"] in one.sentence for one in found), [one.sentence for one in found]


def test_every_code_is_listed_where_users_look_for_it():
    readme = (ROOT / "roles/preflight/README.md").read_text()
    table: dict[str, set[str]] = {"host": set(), "plan": set()}
    for part, codes in re.findall(r"^\| (host|plan) \| (`[^|]*`) \|", readme, re.M):
        table[part] |= set(re.findall(r"`(\w+)`", codes))
    assert table["host"] == set(host_checks.CODES)
    assert table["plan"] == set(plan_checks.CODES)


def test_every_code_of_the_host_has_a_case():
    proved = {line.split()[1] for case in DATA["cases"] for line in case["finds"]}
    assert set(host_checks.CODES) - proved == {"all_reduce_hangs", "all_reduce_wrong", "all_reduce_impossible"}


def test_every_finding_says_what_to_do_unless_it_is_mere_information():
    for case in DATA["cases"]:
        for one in found_in(case):
            assert one.found.endswith("."), one
            if one.severity != "info" and one.code != "gpu_unreadable":
                assert one.cure, one


def test_a_host_that_is_to_get_the_rest_of_a_model_needs_room_for_the_rest():
    spaces = [
        {"purpose": "model", "path": "/m", "present_mib": 400_000},
        {"purpose": "drafter", "path": "/d", "present_mib": 0},
        {"purpose": "kernel build", "path": "/b"},
    ]
    needs = [space["need_mib"] for space in host_checks.with_needs(spaces, 567_000, 30_720)]
    assert needs == [167_000 + host_checks.DISK_RESERVE, 0, 30_720]


def test_a_model_that_is_there_needs_no_room():
    spaces = [{"purpose": "model", "path": "/m", "present_mib": 567_000}]
    assert host_checks.with_needs(spaces, 567_000)[0]["need_mib"] == 0


ANSWER = {"detail": "After 60 s rank 0, 1 of 2 had not finished (phase first)."}


@pytest.mark.parametrize(
    ("verdict", "without", "code", "words"),
    [
        (all_reduce.OK, "", "", ""),
        (all_reduce.HANGS, all_reduce.OK, "error all_reduce_hangs", "NCCL_P2P_DISABLE"),
        (all_reduce.HANGS, all_reduce.HANGS, "error all_reduce_hangs", "fails without peer-to-peer too"),
        (all_reduce.HANGS, "", "error all_reduce_hangs", "Xid"),
        (all_reduce.WRONG, all_reduce.OK, "error all_reduce_wrong", "NCCL_P2P_DISABLE"),
        (all_reduce.IMPOSSIBLE, "", "warning all_reduce_impossible", "leave out all_reduce"),
    ],
)
def test_an_all_reduce_that_fails_only_with_peer_to_peer_blames_it(verdict, without, code, words):
    found = host_info.all_reduce_findings({**ANSWER, "verdict": verdict, "without_p2p": without})
    assert " ".join(f"{one.severity} {one.code}" for one in found) == code
    assert words in " ".join(one.cure for one in found)


def params(**given: Any) -> dict[str, Any]:
    return {"part": "host", "skip": [], "fail": True, **given}


ERROR = Finding("error", "shm_small", "It is small.", "", "Enlarge it.")
WARNING = Finding("warning", "persistence_off", "It is off.", "", "Turn it on.")


def test_an_error_fails_the_task_with_what_to_do():
    result = host_info._judged(params(), [WARNING, ERROR])
    assert (result["failed"], result["passed"]) == (True, False)
    assert result["msg"] == "It is small. Enlarge it."
    assert [row["code"] for row in result["findings"]] == ["shm_small", "persistence_off"]
    assert result["findings"][0]["switch"] == "preflight_skip: [shm_small]"


def test_a_finding_that_is_switched_off_counts_no_more_and_stays_in_the_report():
    result = host_info._judged(params(skip=["shm_small"]), [WARNING, ERROR])
    assert (result["failed"], result["passed"], result["msg"]) == (False, True, "No errors, 1 warning.")
    assert [row["code"] for row in result["switched_off"]] == ["shm_small"]
    assert "skipped" not in result  # Ansible would say that the task did not run


def test_errors_are_only_reported_where_they_are_not_to_fail():
    result = host_info._judged(params(fail=False), [ERROR])
    assert (result["failed"], result["passed"]) == (False, False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compute_capability": "sm120"}, "compute_capability: 'sm120' is none; give for example '12.0'"),
        ({"compute_capability": "12"}, "compute_capability: '12' is none"),
        ({"model_mib": -1}, "model_mib: -1 is no amount of memory"),
        ({"all_reduce_timeout": float("nan")}, "all_reduce_timeout: nan is no time to wait"),
        ({"build_folder": "cache"}, "build_folder: 'cache' is no absolute path"),
        ({"gpus": ["GPU0"]}, "gpus: 'GPU0' names no GPU"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(given, words):
    values = {name: spec.get("default") for name, spec in arguments.GPU_HOST_INFO.items()} | {"part": "host"}
    (sentence,) = arguments.problems({**values, **given})
    assert words in sentence
