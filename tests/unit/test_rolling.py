"""Windows, batches, hosts held out and the breaker: pure decisions of a run over many hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_control import breaker, records, rolling
from gpu_control.gate import Gate
from hypothesis import given
from hypothesis import strategies as st

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC


@pytest.fixture(autouse=True)
def berlin() -> Iterator[None]:
    old = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Berlin"  # 09:00 then
    time.tzset()
    yield
    os.environ.pop("TZ") if old is None else os.environ.update(TZ=old)
    time.tzset()


# The window


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("09:30", 1800),
        ("9:30", 1800),
        ("20:59", 12 * 3600 - 60),
        ("2027-01-15T10:00", 3600),
        ("2027-01-15 10:00:30", 3630),
        ("2027-01-15T08:10:00Z", 600),
        ("2027-01-15T08:10:00+00:00", 600),
        (1_800_000_060, 60),
        ("1800000060.5", 60.5),
    ],
)
def test_a_moment_is_a_time_of_day_a_date_or_seconds(value, seconds):
    assert rolling.not_after(value, NOW) == NOW + seconds


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_moment_there_is_no_end(value):
    assert rolling.not_after(value, NOW) is None


def test_a_time_of_day_is_tomorrows_where_todays_is_over():
    late = NOW + 14 * 3600  # 23:00
    assert rolling.not_after("05:00", late) == late + 6 * 3600


def test_a_time_of_day_is_the_clocks_own_also_over_a_change_of_the_clocks():
    before = time.mktime((2027, 3, 27, 23, 0, 0, 0, 0, -1))  # 02:00 becomes 03:00 that night
    assert rolling.not_after("05:00", before) == before + 5 * 3600


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("08:30", "that was 30 min ago, or is the end of a window of 23 h 30 min; give the date as well"),
        ("22:00", "in 13 h 0 min: a time of day alone means one within 12 hours; give the date as well (2027-01-15T22"),
        ("2027-01-15T08:59", "is over since 1 min"),
        ("1799999999", "is over since 0 min"),
        ("24:00", "no time of day"),
        ("05:60", "no time of day"),
        ("soon", "'soon', which is no time: give a time of day (05:30)"),
        ("2027-02-30", "which is no time"),
        (330, "a time of day needs quotes in YAML"),
        (True, "'True'"),
        ([], "'[]'"),
    ],
)
def test_an_impossible_or_malformed_window_is_refused_in_one_sentence(value, words):
    with pytest.raises(rolling.Problem) as caught:
        rolling.not_after(value, NOW)
    assert words in str(caught.value) and str(caught.value).startswith("reset_not_after is ")


# Batches


@pytest.mark.parametrize(
    ("value", "sizes"),
    [(5, [5]), ("5", [5]), ("20%", [2]), ("1%", [1]), ([1, "50%"], [1, 5]), ("100%", [10])],
)
def test_a_batch_is_a_number_a_share_or_a_list_of_those(value, sizes):
    assert rolling.sizes(value, 10) == sizes


@pytest.mark.parametrize("value", [0, -1, "0%", "101%", "half", 1.5, True, [], [1, None], {"a": 1}])
def test_a_batch_of_no_size_is_refused(value):
    with pytest.raises(rolling.Problem, match="reset_serial is"):
        rolling.sizes(value, 10)


def test_hosts_of_one_server_go_together_in_the_order_of_its_ranks_wherever_the_inventory_has_them():
    nodes = {"a": ["d", "a"], "d": ["d", "a"], "e": ["e", "gone"]}
    parts = rolling.units(["a", "b", "c", "d", "e"], lambda host: nodes.get(host, []))
    assert parts == [["d", "a"], ["b"], ["c"], ["e"]]
    assert rolling.batches(parts, [1]) == [["d", "a"], ["b"], ["c"], ["e"]]
    assert rolling.batches(parts, [2]) == [["d", "a"], ["b", "c"], ["e"]]
    assert rolling.batches(parts, [1, 3]) == [["d", "a"], ["b", "c", "e"]]
    # Also where one of them alone says so, and comes last.
    assert rolling.units(["a", "b", "d"], lambda host: nodes["d"] if host == "d" else []) == [["d", "a"], ["b"]]


@given(st.integers(4, 30), st.lists(st.integers(1, 8), min_size=1, max_size=3), st.data())
def test_every_host_is_in_one_batch_and_no_server_is_cut(count, most, data):
    hosts = [f"h{number}" for number in range(count)]
    servers = data.draw(st.lists(st.lists(st.sampled_from(hosts), unique=True, min_size=2, max_size=4), max_size=3))
    disjoint: list[list[str]] = []
    for server in servers:
        if not any(set(server) & set(other) for other in disjoint):
            disjoint.append(server)
    nodes = {host: server for server in disjoint for host in server}
    made = rolling.batches(rolling.units(hosts, lambda host: nodes.get(host, [])), most)
    assert sorted(host for batch in made for host in batch) == sorted(hosts)
    for server in disjoint:
        assert sum(bool(set(batch) & set(server)) for batch in made) == 1
    for number, batch in enumerate(made):
        assert len(batch) <= most[min(number, len(most) - 1)] or len(batch) <= 4


# Who is left out


def test_hosts_are_held_out_by_what_the_inventory_knows_and_nothing_else_is_passed_over():
    inventory = {"a1": ["a1"], "a*": ["a1", "a2"], "racks": ["b1"]}

    def held_out(*wanted: str) -> list[str]:
        return rolling.held_out(wanted, lambda pattern: inventory.get(pattern, []), ["racks", "empty"])

    assert held_out() == []
    assert held_out("a1", "a*", "racks", "empty") == ["a1", "a2", "b1"]
    with pytest.raises(rolling.Problem, match=r"reset_held_out names a3, z\*, and the inventory has no such host"):
        held_out("a1", "a3", "z*")


@pytest.mark.parametrize(
    ("held", "play", "not_ready", "words"),
    [
        ([], "abc", {}, ""),
        (["c"], "abc", {}, ""),
        (["a"], "abc", {}, "held out (reset_held_out)"),
        (["b"], "abc", {}, "which are reset together or not at all, and b is held out"),
        ([], "ac", {}, "and b is not in this run"),
        ([], "abc", {"b": "Its riser is broken."}, "and b: Its riser is broken."),
    ],
)
def test_a_server_over_several_hosts_is_left_alone_where_one_of_them_is(held, play, not_ready, words):
    reason = rolling.why_left_out("a", ["a", "b"], held, play, not_ready)
    assert (words in reason) if words else reason == ""


@pytest.mark.parametrize(("value", "share"), [(None, 0.2), (0.05, 0.05), ("5%", 0.05), ("1", 1.0), (0, 0.0)])
def test_a_share_is_a_fraction_or_a_percentage(value, share):
    assert rolling.share(value) == share


@pytest.mark.parametrize("value", [20, -0.1, "many", True, "120%"])
def test_what_is_no_share_is_refused(value):
    with pytest.raises(rolling.Problem, match="reset_breaker_share is"):
        rolling.share(value)


def test_a_misspelt_switch_is_found_and_variables_of_others_are_left_to_them():
    names = ["reset_serial", "reset_sreial", "restart_server", "reset_schedule_folder", "sglang_port"]
    assert rolling.unknown_switches(names, rolling.SWITCHES) == ["reset_sreial", "restart_server"]


# The breaker


@pytest.mark.parametrize(
    ("dirty", "hosts", "share", "stops"),
    [
        (1, 4, 0.2, False),
        (2, 10, 0.2, False),
        (3, 10, 0.2, True),
        (1, 1, 0.0, True),
        (0, 5, 0.0, False),
        (1, 1, 0.2, False),
        (2, 2, 0.2, True),
        (9, 9, 1.0, False),
    ],
)
def test_more_than_the_share_stops_the_run_and_one_host_alone_is_no_pattern(dirty, hosts, share, stops):
    assert breaker.too_many(dirty, hosts, share) is stops


def trip(fleet: str = "/etc/fleet", **changes) -> breaker.Trip:
    since = "2027-01-15T08:00:00Z"
    return replace(breaker.Trip(fleet, since, "p1", "nightly", 0.2, 10, ("a", "b", "c")), **changes)


def test_what_is_stopped_stays_so_for_its_inventory_alone_until_it_is_cleared(tmp_path):
    file = tmp_path / "artifacts" / "breaker.json"
    assert breaker.tripped(file, "/etc/fleet") is None
    breaker.trip(file, trip())
    breaker.trip(file, trip(play="p2"))
    breaker.trip(file, trip("/etc/other"))
    assert breaker.tripped(file, "/etc/fleet") == trip()
    assert "the schedule nightly at 2027-01-15T08:00:00Z, since 3 of 10 hosts are newly dirty" in trip().sentence
    assert breaker.clear(file, "/etc/fleet") == trip()
    assert breaker.tripped(file, "/etc/fleet") is None
    assert breaker.tripped(file, "/etc/other") is not None
    assert breaker.clear(file, "/etc/fleet") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stopped": [{"fleet": "x"}]}', "null"])
def test_a_breaker_that_cannot_be_read_is_no_open_door(tmp_path, text):
    file = tmp_path / "breaker.json"
    file.write_text(text)
    with pytest.raises(breaker.Unreadable, match=r"breaker\.json can't be read"):
        breaker.tripped(file, "x")


def test_an_inventory_is_the_same_by_whatever_path(tmp_path):
    (tmp_path / "fleet").mkdir()
    (tmp_path / "link").symlink_to("fleet")
    assert breaker.fleet([str(tmp_path / "link")]) == breaker.fleet([f"{tmp_path}/fleet/"]) == f"{tmp_path}/fleet"
    assert breaker.fleet(["a,b,"]) == "a,b,"


# The gate


def plan(**changes) -> dict:
    facts: dict = {
        "id": "p1",
        "held_out": [],
        "not_after": None,
        "share": 0.2,
        "fleet": "f",
        "schedule": "",
        "count": 10,
    }
    return {**facts, **changes}


def gate(tmp_path: Path, host: str, *nodes: str, now: float = NOW, check_mode: bool = False, **changes) -> Gate:
    return Gate(plan(**changes), host, nodes, tmp_path, tmp_path / "artifacts", check_mode, lambda: now)


def begin(one: Gate, play: str = "abcdefghij") -> str:
    return one.begin(list(play), lambda node: "")


def test_a_host_whose_turn_comes_too_late_is_not_begun_and_one_that_is_begun_goes_on(tmp_path):
    assert begin(gate(tmp_path, "a", not_after=NOW)) == ""
    assert "after 2027-01-15T09:00 (reset_not_after)" in begin(gate(tmp_path, "b", now=NOW + 1, not_after=NOW))
    assert begin(gate(tmp_path, "a", now=NOW + 99, not_after=NOW)) == ""


def test_the_nodes_of_a_server_are_begun_together_though_the_window_ends_between_them(tmp_path):
    assert begin(gate(tmp_path, "b", "a", "b", not_after=NOW)) == ""
    assert begin(gate(tmp_path, "a", "a", "b", now=NOW + 60, not_after=NOW)) == ""
    assert begin(gate(tmp_path, "c", "c", "d", now=NOW + 60, not_after=NOW)) != ""
    assert begin(gate(tmp_path, "d", "c", "d", not_after=NOW)) != ""


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_node_that_is_not_held_out_itself_says_which_one_is_whoever_is_asked_first(tmp_path, order):
    said = {host: begin(gate(tmp_path, host, "a", "b", held_out=["b"])) for host in order}
    assert said["b"] == "held out (reset_held_out)"
    assert said["a"].endswith("are reset together or not at all, and b is held out (reset_held_out)")


def dirty(tmp_path: Path, host: str, before: str = "", **changes) -> None:
    if before:
        known = records.record({"verdict": before}, host)
        records.append(tmp_path / "artifacts" / records.FILE_NAME, [known])
    gate(tmp_path, host, **changes).end({"verdict": "dirty"})


def test_hosts_that_become_dirty_stop_the_run_and_the_ones_after_it(tmp_path):
    dirty(tmp_path, "a", before="clean")
    dirty(tmp_path, "b")
    assert begin(gate(tmp_path, "c")) == ""
    dirty(tmp_path, "c", before="clean")
    assert "3 of 10 hosts are newly dirty" in begin(gate(tmp_path, "d"))
    assert "3 of 10" in begin(gate(tmp_path, "d", id="p2"))
    assert begin(gate(tmp_path, "d", id="p3", fleet="other")) == ""
    assert begin(gate(tmp_path, "d", id="p4", check_mode=True)) == ""


def test_hosts_that_were_dirty_before_are_no_news_even_when_they_were_skipped_since(tmp_path):
    for host in "abcdef":
        dirty(tmp_path, host, before="dirty")
    file = tmp_path / "artifacts" / records.FILE_NAME
    for host in "gh":
        records.append(file, [records.record({"verdict": verdict}, host) for verdict in ("dirty", "skipped")])
        dirty(tmp_path, host)
    assert begin(gate(tmp_path, "i")) == ""


def test_the_share_is_of_the_hosts_that_are_not_skipped(tmp_path):
    for host in "abcde":
        gate(tmp_path, host).end({"verdict": "skipped"})
    dirty(tmp_path, "f")
    assert begin(gate(tmp_path, "g")) == ""
    dirty(tmp_path, "g")
    assert "2 of 5 hosts" in begin(gate(tmp_path, "h"))


def test_a_host_that_did_not_get_its_server_back_counts_as_well(tmp_path):
    for host in "abc":
        gate(tmp_path, host).end({"verdict": "clean"})
        gate(tmp_path, host).failed_afterwards()
    assert "3 of 10 hosts" in begin(gate(tmp_path, "d"))


def test_memory_without_an_owner_is_not_counted_before_the_hypervisor_was_asked(tmp_path):
    for host in "abc":
        ownerless = {"verdict": "dirty", "gpus": [{"verdict": "unowned_memory"}]}
        gate(tmp_path, host).end(ownerless, asks_hypervisor=True)
    assert begin(gate(tmp_path, "d")) == ""


def test_a_breaker_that_can_not_be_written_stops_its_own_run_all_the_same(tmp_path):
    (tmp_path / "artifacts").write_text("a file where the folder should be")
    for host in "abc":
        try:
            dirty(tmp_path, host)
        except OSError:
            assert host == "c"
    assert "3 of 10 hosts" in begin(gate(tmp_path, "d"))


@pytest.mark.parametrize(
    ("verdict", "policy", "reason"),
    [
        ("clean", "drain", ""),
        ("dirty", "drain", ""),
        ("skipped", "idle_only", "and a, which answers for it, is skipped"),
        (None, "idle_only", "and a, which answers for it, is without a verdict"),
    ],
)
def test_the_other_nodes_of_a_server_do_what_came_of_the_one_that_answers(tmp_path, verdict, policy, reason):
    head, other = gate(tmp_path, "a", "a", "b"), gate(tmp_path, "b", "a", "b")
    assert begin(head) == begin(other) == ""
    assert head.wait_for_head(policy) is None
    head.end({"verdict": verdict} if verdict else None)
    waited = other.wait_for_head(policy)
    assert (reason in waited) if reason else waited == ""
    assert other.wait_for_head("force") is None


def test_a_record_of_a_host_that_was_not_reached_hides_neither_its_state_nor_its_own_runs(tmp_path):
    file = tmp_path / "r.jsonl"
    known = [("r1", "dirty"), ("r2", "unreachable"), ("r3", "skipped")]
    records.append(file, [records.record({"run_id": run, "verdict": verdict}, "a") for run, verdict in known])
    assert (records.last_recorded_run(file, "a"), records.last_state(file, "a")) == ("r1", "dirty")
    new = records.record({"run_id": "r4", "verdict": "clean"}, "a")
    assert records.unrecorded(file, [new, json.loads(file.read_text().splitlines()[0])]) == [new]
    assert records.unrecorded(tmp_path / "none", [new]) == [new]
