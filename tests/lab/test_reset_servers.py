"""Servers in every state end, with all that belongs to them, and every bystander lives on.

A process is told by how it was started (the tree of the command that a test gave), not by what the reset calls it.
"""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    EAGLE3,
    FAST,
    assert_clean,
    bystanders,
    leave_orphans,
    listeners,
    living,
    numbers,
    of_a_server,
    pids,
    reset,
    signals,
    until,
)
from tests.lab.server import STANDIN, Server

SLOW = 3600
"""Seconds that nobody waits for."""


def used(host: Host) -> list[int]:
    return [host.state.used_mib(index) for index in range(8)]


def children_of(server: Server, text: str) -> set[int]:
    return numbers(process for process in server.tree() if text in process.line)


def test_a_serving_tp8_tree_with_eagle3_ends_by_term_alone(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(*EAGLE3, settings=FAST)
        tree = numbers(server.tree())
        assert len(tree) == 1 + 1 + 8 + 1 + 8 * 2  # main, tracker, schedulers, detokenizer, inductor workers
        record = reset(gpu_host, grace=30.0)
        assert pids(record) == tree
        assert signals(record).pop(server.pid) == "TERM"
        assert {signal for pid, signal in signals(record).items() if pid != server.pid} == {"none"}
        assert_clean(gpu_host, record)
        assert min(gpu["used_mib_before"] for gpu in record["gpus"]) >= 76000
        assert max(gpu["used_mib_after"] for gpu in record["gpus"]) == 300  # nv-hostengine's


def test_a_request_that_runs_is_answered_before_the_server_ends(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST)
    body = '{"text": "Once", "sampling_params": {"max_new_tokens": 700}}'
    url = f"http://127.0.0.1:{server.port}/generate"
    script = f"import urllib.request; print(urllib.request.urlopen('{url}', b'{body}').status)"
    with subprocess.Popen(gpu_host.enter(["python3", "-c", script]), stdout=subprocess.PIPE, text=True) as client:
        until(lambda: "Decode batch" in server.log_text(), "the request to run")
        record = reset(gpu_host, grace=30.0)
        assert client.communicate(timeout=10)[0] == "200\n"
    assert signals(record)[server.pid] == "TERM"
    assert_clean(gpu_host, record)


def test_a_server_that_ignores_term_ends_by_kill_after_the_grace_and_not_before(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(*EAGLE3, settings=FAST | {"IGNORE_TERM": 1})
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=1.5)
        assert pids(record) == tree
        assert set(signals(record).values()) == {"KILL"}
        assert min(row["seconds"] for row in record["killed"]) >= 1.5
        assert_clean(gpu_host, record)


def test_a_server_with_a_stopped_scheduler_and_a_request_waiting_ends_by_kill_after_the_grace(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(*EAGLE3, settings=FAST)
        tree = numbers(server.tree())
        stopped = min(children_of(server, "sglang::scheduler_TP3"))
        gpu_host.kill(stopped, signal.SIGSTOP)
        assert server.request("/generate", {"text": "Once"}, timeout=1)[0] == 0
        record = reset(gpu_host, grace=2.5)
        assert pids(record) == tree
        assert signals(record)[server.pid] == "KILL" and signals(record)[stopped] == "KILL"
        assert min(row["seconds"] for row in record["killed"]) >= 2.5
        assert "Remaining number of requests" in server.log_text()
        assert_clean(gpu_host, record)


def test_a_server_deaf_to_term_during_its_load_ends_by_kill_after_the_grace(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(wait=False, settings={"LOAD_SECONDS": SLOW, "IGNORE_TERM": 1})
        until(lambda: min(used(gpu_host)) > 0, "all ranks to load")
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=1.0)
        assert pids(record) == tree
        assert set(signals(record).values()) == {"KILL"}
        assert_clean(gpu_host, record)


def test_workers_that_outlive_a_main_ended_by_term_during_its_load_end_too(gpu_host: Host) -> None:
    server = gpu_host.start_server(wait=False, settings={"LOAD_SECONDS": SLOW, "OUTLIVE_MAIN": 1})
    until(lambda: min(used(gpu_host)) > 0, "all ranks to load")
    tree = numbers(server.tree())
    record = reset(gpu_host, grace=20.0)
    assert pids(record) == tree
    assert signals(record)[server.pid] == "TERM"
    assert record["seconds"]["kill"] < 10  # orphans are not given the grace
    assert_clean(gpu_host, record)


@pytest.mark.parametrize("blank", [0, 1], ids=["environment-readable", "environment-blanked"])
def test_titled_orphans_end_at_once_though_the_port_is_free(gpu_host: Host, blank: int) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(*EAGLE3, settings=FAST | {"OUTLIVE_MAIN": 1, "BLANK_ENVIRON": blank})
        orphans = leave_orphans(server)
        titled = numbers(process for process in gpu_host.processes() if process.line.startswith("sglang::"))
        assert len(titled) == 9 and titled <= orphans
        assert listeners(gpu_host) == set()
        assert min(used(gpu_host)) >= 76000
        record = reset(gpu_host, grace=30.0)
        assert titled <= pids(record) <= orphans
        assert {signals(record)[pid] for pid in titled} == {"KILL"}
        assert record["seconds"]["kill"] < 3
        assert living(gpu_host, orphans) == set()
        assert_clean(gpu_host, record)


def test_orphans_of_an_import_that_are_left_alone_take_the_gpu_later(gpu_host: Host) -> None:
    """Why the next test matters: the stand-in's orphans do what the real ones did."""
    server = gpu_host.start_server(wait=False, settings={"IMPORT_SECONDS": 2})
    leave_orphans(server, early=True)
    assert max(used(gpu_host)) == 0
    until(lambda: min(used(gpu_host)) > 500, "the orphans to take the GPUs")


def test_orphans_of_an_import_that_hold_no_gpu_yet_end_and_never_take_it(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(wait=False, settings={"IMPORT_SECONDS": 3})
        orphans = leave_orphans(server, early=True)
        spawned = time.monotonic()
        assert len(orphans) == 10
        assert all("from multiprocessing" in p.line for p in gpu_host.processes() if p.pid in orphans)
        assert (max(used(gpu_host)[1:]), listeners(gpu_host)) == (0, set())
        record = reset(gpu_host, grace=30.0)
        assert time.monotonic() - spawned < 3
        assert pids(record) == orphans
        assert_clean(gpu_host, record)
        time.sleep(max(0.0, spawned + 4 - time.monotonic()))
        assert max(used(gpu_host)[1:]) == 0
        assert living(gpu_host, orphans) == set()


def test_a_detokenizer_orphan_without_gpu_memory_ends(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(settings=FAST | {"OUTLIVE_MAIN": 1, "BLANK_ENVIRON": 1})
        detokenizer = children_of(server, "sglang::detokenizer")
        everybody = numbers(server.tree())
        for pid in [server.pid, *(everybody - detokenizer - {server.pid})]:
            gpu_host.kill(pid)
        until(lambda: living(gpu_host, everybody) == detokenizer and max(used(gpu_host)[1:]) == 0, "the rest to end")
        record = reset(gpu_host)
        assert pids(record) == detokenizer
        assert_clean(gpu_host, record)


def in_capture(gpu_host: Host, **settings: object) -> tuple[Server, dict[str, set[int]]]:
    """A server that builds a kernel: ninja, and nvcc in a process group of its own, and inductor workers."""
    server = gpu_host.start_server(*EAGLE3, tp=2, wait=False, settings={"JIT_SECONDS": SLOW, **settings})
    until(lambda: children_of(server, "/nvcc ") and len(children_of(server, "compile_worker")) == 4, "the compilers")
    helpers = {name: children_of(server, text) for name, text in HELPERS.items()}
    groups = gpu_host.exec(["ps", "-o", "pgid=", "-p", ",".join(map(str, helpers["nvcc"]))]).stdout.split()
    assert set(map(int, groups)) == helpers["nvcc"]
    return server, helpers


HELPERS = {"ninja": "/ninja ", "nvcc": "/nvcc ", "inductor": "compile_worker"}


def test_inductor_ninja_and_nvcc_children_end_with_their_server(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server, helpers = in_capture(gpu_host)
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=10.0)
        assert pids(record) == tree >= helpers["ninja"] | helpers["nvcc"] | helpers["inductor"]
        assert living(gpu_host, tree) == set()
        assert_clean(gpu_host, record)


def test_ninja_and_nvcc_whose_main_was_killed_end(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server, helpers = in_capture(gpu_host)
        compilers = helpers["ninja"] | helpers["nvcc"]
        tree = numbers(server.tree())
        gpu_host.kill(server.pid)
        until(lambda: living(gpu_host, tree) == compilers, "all but the compilers to end")
        record = reset(gpu_host, grace=30.0)
        assert pids(record) == compilers
        assert living(gpu_host, compilers) == set()
        assert_clean(gpu_host, record)


def test_an_inductor_worker_whose_scheduler_was_killed_ends(gpu_host: Host) -> None:
    server = gpu_host.start_server(*EAGLE3, tp=1, settings=FAST | {"OUTLIVE_MAIN": 1})
    inductor = children_of(server, "compile_worker")
    for pid in inductor:
        gpu_host.kill(pid, signal.SIGSTOP)  # it would leave by itself within a second
    everybody = numbers(server.tree())
    for pid in everybody - inductor:
        gpu_host.kill(pid)
    until(lambda: living(gpu_host, everybody) == inductor, "the rest to end")
    record = reset(gpu_host)
    assert pids(record) == inductor
    assert_clean(gpu_host, record)


def holds(host: Host, node: str) -> set[int]:
    return set(map(int, host.exec(f"fuser {node} 2> /dev/null", check=False).stdout.split()))


def test_a_renamed_worker_that_holds_nvidia3_ends_with_its_server_and_as_an_orphan(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        settings = FAST | {"RENAME_WORKER": "kimi-rank-3", "OUTLIVE_MAIN": 1, "IGNORE_TERM": 1}
        server = gpu_host.start_server(tp=4, settings=settings)
        (renamed,) = children_of(server, "kimi-rank-3")
        assert renamed in holds(gpu_host, "/dev/nvidia3")
        first = reset(gpu_host, grace=0.5)
        assert renamed in pids(first)
        assert_clean(gpu_host, first)

        server = gpu_host.start_server(tp=4, settings=settings)
        (renamed,) = children_of(server, "kimi-rank-3")
        leave_orphans(server)
        second = reset(gpu_host, grace=30.0)
        assert signals(second)[renamed] == "KILL"
        assert_clean(gpu_host, second)


def test_a_renamed_orphan_whose_environment_is_blanked_is_reported_and_the_host_is_dirty(gpu_host: Host) -> None:
    settings = FAST | {"RENAME_WORKER": "kimi-rank-3", "OUTLIVE_MAIN": 1, "BLANK_ENVIRON": 1}
    server = gpu_host.start_server(tp=4, settings=settings)
    (renamed,) = children_of(server, "kimi-rank-3")
    leave_orphans(server)
    record = reset(gpu_host)
    assert renamed not in pids(record) and gpu_host.alive(renamed)
    assert renamed in pids(record, "spared")
    assert record["verdict"] == "dirty"
    assert f"kimi-rank-3 ({renamed})" in record["reason"]
    assert [gpu["index"] for gpu in record["gpus"] if gpu["verdict"] != "free"] == [3]


@pytest.mark.parametrize(
    "words",
    [
        ("python3", f"{STANDIN}/bin/sglang", "serve"),
        ("python3", "-u", "-X", "faulthandler", "-m", "sglang.launch_server"),
        ("python3", f"{STANDIN}/sglang/launch_server.py"),
    ],
    ids=["sglang-serve", "python-with-options", "path-of-the-module"],
)
def test_every_way_to_start_a_server_is_known(gpu_host: Host, words: tuple[str, ...]) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST, interpreter=words, user="engineer")
    tree = numbers(server.tree())
    record = reset(gpu_host, grace=20.0, user="engineer")
    assert pids(record) == tree
    assert signals(record)[server.pid] == "TERM"
    assert_clean(gpu_host, record)


def test_two_servers_and_the_orphans_of_a_third_end_in_one_reset(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        orphaned = gpu_host.start_server(tp=2, port=30002, name="c", settings=FAST | {"OUTLIVE_MAIN": 1})
        leave_orphans(orphaned)
        orphans = numbers(process for process in gpu_host.processes() if process.line.startswith("sglang::"))
        assert len(orphans) == 3
        first = gpu_host.start_server("--base-gpu-id", "2", tp=2, port=30000, name="a", settings=FAST)
        second = gpu_host.start_server("--base-gpu-id", "4", tp=2, port=30001, name="b", settings=FAST, how="setsid")
        ours = numbers(first.tree()) | numbers(second.tree()) | orphans
        record = reset(gpu_host, grace=20.0, ports=[30000, 30001, 30002])
        assert pids(record) >= ours
        assert living(gpu_host, ours) == set()
        assert len(record["servers"]) == 2
        assert_clean(gpu_host, record)


def test_of_all_that_a_server_was_nothing_is_left_to_see(gpu_host: Host) -> None:
    """The helper that the tests above rely on sees what it should."""
    gpu_host.start_server(tp=2, settings=FAST)
    assert len([process for process in gpu_host.processes() if of_a_server(process)]) == 4
    assert listeners(gpu_host) == {"30000"}
