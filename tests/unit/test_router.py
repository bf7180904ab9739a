"""Taking a worker out of SGLang's router and putting it back, by both of its interfaces, against a double of it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host import router
from gpu_host.router import Out, Router, RouterTrouble
from gpu_host.storage import StorageError

from tests.router_double import RouterDouble

HERE, OTHER = "http://gpu01:30000", "http://gpu02:30000"
INTERFACES = ("uuid", "url", "old")


@pytest.fixture(params=INTERFACES)
def double(request: pytest.FixtureRequest) -> Iterator[RouterDouble]:
    with RouterDouble([HERE, OTHER], request.param) as double:
        yield double


def test_a_worker_that_was_taken_out_is_out_when_the_call_returns(double: RouterDouble) -> None:
    Router(double.url).remove(HERE)
    assert list(double.workers) == [OTHER]


def test_a_worker_that_was_put_back_is_in_when_the_call_returns_with_its_own_key(double: RouterDouble) -> None:
    one = Router(double.url)
    one.remove(HERE)
    one.add(HERE, {"priority": 70}, "w0rker&key")
    assert sorted(double.workers) == [HERE, OTHER]
    assert double.keys == {HERE: "w0rker&key"}


def test_a_worker_goes_back_as_it_was_registered() -> None:
    facts = {"url": HERE, "id": "1", "model_id": "kimi", "priority": 70, "cost": 2.0, "worker_type": "regular"}
    with RouterDouble() as double:
        double.workers[HERE] = {**facts, "load": 3, "is_healthy": True, "metadata": {"tier": "gold"}}
        one = Router(double.url)
        found = one.find(HERE)[0]
        one.remove(HERE)
        one.add(HERE, found.facts)
        back = {name: value for name, value in double.workers[HERE].items() if name != "id"}
    assert back == {
        "url": HERE, "model_id": "kimi", "priority": 70, "cost": 2.0, "worker_type": "regular",
        "labels": {"tier": "gold"},
    }  # fmt: skip


def test_all_ranks_of_a_worker_with_data_parallelism_go() -> None:
    with RouterDouble([f"{HERE}@0", f"{HERE}@1", "http://gpu01:300001", OTHER]) as double:
        Router(double.url).remove(HERE)
        assert list(double.workers) == ["http://gpu01:300001", OTHER]


def test_taking_out_what_is_not_there_and_putting_in_what_is_there_changes_nothing(double: RouterDouble) -> None:
    Router(double.url).remove("http://gpu09:30000")
    Router(double.url).add(HERE)
    assert list(double.workers) == [HERE, OTHER]
    assert {method for method, path in double.calls if "list" not in path} <= {"GET"}


def test_a_router_with_a_key_gets_it_and_one_without_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("r0uter\n")
    with RouterDouble([HERE], key="r0uter") as double:
        with pytest.raises(RouterTrouble, match="router_api_key_file"):
            Router(double.url).workers()
        assert [one.url for one in Router(double.url, router.read_key(str(tmp_path / "key"))).workers()] == [HERE]


@pytest.mark.parametrize("text", [None, "", "\nkey\n"])
def test_a_key_file_without_a_key_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RouterTrouble, match=str(path)):
        router.read_key(str(path))
    assert router.read_key("") == ""


def test_a_router_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RouterTrouble, match=f"http://127.0.0.1:{port} refuses the connection or can't be reached"):
        Router(f"http://127.0.0.1:{port}").workers()


def test_a_router_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "REQUEST_SECONDS", 0.2)
    with RouterDouble([HERE]) as double:
        double.silent = True
        with pytest.raises(RouterTrouble, match="does not answer"):
            Router(double.url).workers()


def test_something_else_than_a_router_is_told_from_one() -> None:
    with RouterDouble(interface="none") as double:
        double.interface = "old"
        double._http.RequestHandlerClass.old = lambda self, _parts: self.answer(404, b"")
        with pytest.raises(RouterTrouble, match="neither GET /workers nor GET /list_workers"):
            Router(double.url).workers()


def test_a_removal_that_the_router_never_does_is_told(double: RouterDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "REMOVE_SECONDS", 0.3)
    double.stuck = True
    with pytest.raises(RouterTrouble, match=f"take out {HERE} and lists it still"):
        Router(double.url).remove(HERE)


def test_the_key_of_the_router_is_never_in_what_is_told() -> None:
    with RouterDouble([HERE], key="r0uter") as double:
        one = Router(double.url, "r0uter")
        double._http.RequestHandlerClass.rest = lambda self, _name, _data: self.answer(500, b"bad token r0uter")
        with pytest.raises(RouterTrouble) as told:
            one.workers()
    assert "bad token ***" in str(told.value)
    assert "r0uter" not in repr(vars(one))


def test_the_note_is_private_and_goes_when_nothing_is_out(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    out = [Out("http://r", HERE, 30000, {"priority": 1}, "/etc/key", "2026-01-01", "run")]
    router.write_note(state, out)
    assert router.noted(state) == out
    assert os.stat(router.note_path(state)).st_mode & 0o777 == 0o600
    router.write_note(state, [])
    assert router.noted(state) == [] and not os.path.exists(router.note_path(state))


@pytest.mark.parametrize("text", ["{", '[{"worker": "x"}]', "[1]"])
def test_a_broken_note_is_told_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "router.json").write_text(text)
    with pytest.raises(StorageError, match=r"router\.json of what is out of the router is broken"):
        router.noted(str(tmp_path))
    assert (tmp_path / "router.json").read_text() == text


def test_a_later_note_of_the_same_worker_replaces_the_earlier_one() -> None:
    old = [Out("http://r", HERE, 1), Out("http://r", OTHER, 2)]
    assert router.merged(old, [Out("http://r", HERE, 3)]) == [Out("http://r", HERE, 3), Out("http://r", OTHER, 2)]


def test_a_servers_address_has_its_own_port() -> None:
    assert router.worker_address("http://gpu01:{port}/", 30001) == "http://gpu01:30001"
    assert json.dumps(router.worker_address("http://gpu01:9", 1)) == '"http://gpu01:9"'
