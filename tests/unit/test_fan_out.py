"""Who passes which model on to whom."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_host import swarm_client


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "roles/model_staging/filter_plugins/fan_out.py"
    spec = importlib.util.spec_from_file_location("fan_out", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAN_OUT = load()
HUB = "hf:acme/tiny@main"


def hosts(**states: str | tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Variables of hosts whose look found one model in that state."""
    found: dict[str, dict[str, Any]] = {}
    for name, given in states.items():
        state, more = given if isinstance(given, tuple) else (given, {})
        row = {"path": f"/models/{name}", "state": state}
        found[name] = {"model_staging_result": {"models": [row]}, "ansible_host": f"10.0.0.{len(found) + 1}", **more}
    return found


def plan(variables: dict[str, dict[str, Any]], source: str = HUB, only: list[str] | None = None, **more: Any) -> Any:
    model = {"path": "/models/own", "source": source}
    return FAN_OUT.fan_out([model], variables, only or list(variables), **more)


def test_the_first_host_that_has_the_model_passes_it_on_to_those_that_lack_it():
    [entry] = plan(hosts(a="missing", b="present", c="damaged", d="present"))
    assert (entry["origin"], entry["brings_first"], entry["takers"]) == ("b", False, ["a", "c"])
    assert entry["path"] == "/models/b"
    assert entry["addresses"] == {"b": ["10.0.0.2", 6881], "a": ["10.0.0.1", 6881], "c": ["10.0.0.3", 6881]}
    assert next(iter(entry["addresses"])) == "b"  # those that take it rely on it


def test_where_all_lack_it_the_first_brings_it_from_the_source():
    [entry] = plan(hosts(a="missing", b="missing"))
    assert (entry["origin"], entry["brings_first"], entry["takers"]) == ("a", True, ["b"])


def test_the_origin_can_be_named_and_its_address_too():
    variables = hosts(a="missing", b="missing", c=("missing", {"model_staging_address": "192.168.9.3"}))
    [entry] = plan(variables, origin="c", port=7000)
    assert (entry["origin"], entry["brings_first"], entry["takers"]) == ("c", True, ["a", "b"])
    assert entry["addresses"]["c"] == ["192.168.9.3", 7000]


@pytest.mark.parametrize(
    ("variables", "more"),
    [
        (hosts(a="present", b="present"), {}),
        (hosts(a="missing", b="present"), {}),  # one host alone brings it from the source
        (hosts(a="missing", b="missing"), {"enabled": False}),
        (hosts(a="missing", b="missing"), {"source": ""}),
    ],
)
def test_otherwise_nothing_is_passed_on(variables, more):
    assert plan(variables, **more) == []


def test_a_host_as_the_source_passes_it_on_also_to_one_and_from_outside_of_the_play():
    variables = {**hosts(a="missing"), "store": {"ansible_host": "10.0.0.9"}}
    [entry] = plan(variables, "host:store:/srv/x", only=["a"], enabled=False)
    assert (entry["origin"], entry["path"], entry["brings_first"], entry["takers"]) == ("store", "/srv/x", False, ["a"])
    assert entry["addresses"]["store"] == ["10.0.0.9", 6881]
    assert plan(variables, "host:store", only=["a"])[0]["path"] == "/models/own"


def test_the_host_that_is_the_source_has_it_on_its_own_disk():
    models = [{"path": "/models/x", "source": "host:a:/srv/x"}, {"path": "/models/y", "source": "host:a"}]
    assert [model["source"] for model in FAN_OUT.seen_from(models, "a")] == ["/srv/x", ""]
    assert FAN_OUT.seen_from(models, "b") == models
    [entry] = plan(hosts(a="missing", b="missing"), "host:a:/srv/x")
    assert (entry["origin"], entry["path"], entry["brings_first"]) == ("a", "/srv/x", False)


def test_a_host_that_said_nothing_takes_no_part():
    variables = {**hosts(a="missing", b="missing"), "failed": {}}
    assert plan(variables)[0]["takers"] == ["b"]


def test_what_a_host_takes_from_others_it_does_not_fetch_itself():
    models = [{"path": "/models/x"}, {"path": "/models/y"}]
    entries = [{"number": 1, "takers": ["b"]}]
    assert FAN_OUT.fetched_by(models, entries, "a") == models
    assert FAN_OUT.fetched_by(models, entries, "b") == models[:1]


# Which pieces a host asks for


class Swarm:
    """Stands in for libtorrent's session and handle, which are asked for little here."""

    def __init__(self, availability: list[int]) -> None:
        self.availability = availability
        self.asked: list[int] = []
        self.refused: set[str] = set()

    def piece_availability(self) -> list[int]:
        return self.availability

    def prioritize_pieces(self, asked: list[int]) -> None:
        self.asked = asked

    def get_ip_filter(self) -> Swarm:
        return self

    def set_ip_filter(self, _: object) -> None:
        pass

    def add_rule(self, first: str, last: str, flags: int) -> None:
        assert first == last
        self.refused.add(first) if flags else self.refused.discard(first)

    def step(self, share: swarm_client.Share, have: list[bool], idle: float = 0.0) -> None:
        share.step(have, idle, self, self, "origin")


def test_a_host_asks_for_its_share_and_for_what_others_than_the_origin_have():
    swarm, share = Swarm([1, 1, 2, 1]), swarm_client.Share(4, rank=1, of=2)
    swarm.step(share, [False] * 4)
    assert swarm.asked == [0, 7, 1, 7] and not swarm.refused


def test_with_its_share_complete_it_leaves_the_origin_alone():
    swarm, share = Swarm([0, 1, 1, 1]), swarm_client.Share(4, rank=1, of=2)
    swarm.step(share, [False, True, False, True])
    assert swarm.refused == {"origin"} and swarm.asked == [0, 7, 1, 7]


def test_when_nothing_comes_it_asks_everybody_for_everything():
    swarm, share = Swarm([0, 1, 0, 1]), swarm_client.Share(4, rank=1, of=2)
    swarm.step(share, [False, True, False, True])
    swarm.step(share, [False, True, False, True], idle=6.0)
    assert not swarm.refused and swarm.asked == [4, 4, 4, 4]


def test_a_single_host_asks_for_everything_from_the_start():
    swarm, share = Swarm([1, 1]), swarm_client.Share(2, rank=0, of=1)
    assert share.priorities([]) == [4, 4]
    swarm.step(share, [False, False])
    assert swarm.asked == []


@pytest.mark.parametrize(("mib", "kib"), [(64, 256), (8 << 10, 512), (600 << 10, 16384)])
def test_a_torrent_stays_small_whatever_the_model(mib, kib):
    assert swarm_client.piece_bytes(mib << 20) == kib << 10
