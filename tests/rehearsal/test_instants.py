"""A handful of kills over the start-up of a real server; `make rehearsal-instants` plays thirty."""

from __future__ import annotations

import json

import pytest

from tests.rehearsal import environment, instants

DATA = environment.ROOT / "docs" / "kill-at-any-instant.json"


def test_killed_at_any_instant_and_reset_nothing_of_a_server_is_back() -> None:
    result = instants.run(count=5, controls=1, seed=20, models=environment.models())
    assert instants.problems(result) == []
    found = result["instants"]
    assert len([one for one in found if one["reset"]]) == 5
    assert min(one["watched"] for one in found) >= instants.WATCH
    assert max(len(one["left"]) for one in found) >= 1, "every kill took all along: nothing was proven"


def test_the_recorded_thirty_instants_were_all_clean_and_nothing_came_back() -> None:
    recorded = json.loads(DATA.read_text())
    assert instants.problems(recorded) == []
    resets = [one for one in recorded["instants"] if one["reset"]]
    assert len(resets) >= 30
    assert min(one["watched"] for one in resets) >= instants.WATCH
    assert {one["phase"] for one in resets} >= {"import", "arguments", "ready"}


def test_an_unclean_reset_and_what_came_back_are_both_problems() -> None:
    clean = {"reset": True, "verdict": "clean", "reason": "", "back": [], "at": 1.0, "phase": "import"}
    rows = [clean, {**clean, "verdict": "dirty"}, {**clean, "back": ["sglang::scheduler"]}, {**clean, "reset": False}]
    assert len(instants.problems({"instants": rows})) == 2


@pytest.mark.parametrize(("count", "until"), [(30, 25.0), (3, 60.0)])
def test_instants_are_spread_over_the_whole_start_up(count: int, until: float) -> None:
    found = sorted(instants.spread(count, until, seed=1))
    assert [int(at * count / until) for at in found] == list(range(count))
