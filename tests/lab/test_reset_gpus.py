"""Which GPUs a reset is about: ``gpus:`` ends the right server only, and the verdict looks at all that were asked for.

Minor numbers of a lab host stand in another order than its indices, and every process of a server holds every node.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    EAGLE3,
    FAST,
    assert_clean,
    bystanders,
    finish,
    leave_orphans,
    living,
    numbers,
    pids,
    reset,
    signals,
    start_reset,
    until,
)
from tests.lab.server import Server

LATER = [str(index) for index in range(4, 8)]

# One answer after the other, until the file stop.it is there; then how many came, and what else came.
CLIENT = """
import json, os, sys, time, urllib.request
body = json.dumps({"text": "Once", "sampling_params": {"max_new_tokens": 12}}).encode()
good, bad = 0, []
while not os.path.exists("/run/stop.it"):
    try:
        request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            tokens = json.load(answer)["meta_info"]["completion_tokens"]
            good += tokens == 12
            if tokens != 12: bad.append(tokens)
    except Exception as error:
        bad.append(str(error))
    open("/run/answers", "w").write(str(good))
print(json.dumps([good, bad]))
"""


class Traffic:
    """A client that asks without a pause."""

    def __init__(self, server: Server) -> None:
        self.host = server.host
        self._said = ""
        url = f"http://127.0.0.1:{server.port}/generate"
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()
        until(lambda: self.answers() > 2, "answers")

    def _run(self, url: str) -> None:
        self._said = self.host.exec(["python3", "-c", CLIENT, url], timeout=60).stdout

    def answers(self) -> int:
        return int(self.host.exec("cat /run/answers || echo 0", check=False).stdout.strip() or 0)

    def stop(self) -> tuple[int, list[str]]:
        """How many answers came, and what else did."""
        self.host.exec(["touch", "/run/stop.it"])
        self._thread.join(timeout=30)
        good, bad = json.loads(self._said)
        return int(good), list(bad)


@contextmanager
def traffic(server: Server) -> Iterator[Traffic]:
    """Every request of a client is answered from the beginning to the end, and after."""
    client = Traffic(server)
    yield client
    before = client.answers()
    until(lambda: client.answers() > before + 2, "more answers")
    good, bad = client.stop()
    assert bad == [] and good > 5


def two_servers(host: Host) -> tuple[Server, Server]:
    """One on GPUs 0-3, one on 4-7."""
    first = host.start_server(tp=4, port=30000, name="first", settings=FAST, wait=False)
    second = host.start_server("--base-gpu-id", "4", tp=4, port=30001, name="second", settings=FAST, wait=False)
    return first.wait_until_ready(), second.wait_until_ready()


def holders(host: Host, node: str) -> set[int]:
    return set(map(int, host.exec(f"fuser {node} 2> /dev/null", check=False).stdout.split()))


def test_gpus_4_to_7_are_reset_while_a_client_of_the_server_on_0_to_3_gets_every_answer(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        first, second = two_servers(gpu_host)
        trees = numbers(first.tree()), numbers(second.tree())
        # What would mislead: each server's processes hold the nodes of the other's GPUs, and minor is not index.
        for node in range(8):
            assert (
                holders(gpu_host, f"/dev/nvidia{node}") & trees[0]
                and holders(gpu_host, f"/dev/nvidia{node}") & trees[1]
            )
        assert [gpu.minor for gpu in gpu_host.state.gpus()] != list(range(8))
        with traffic(first):
            record = reset(gpu_host, gpus=LATER, grace=20.0)
        assert pids(record) == trees[1]
        assert living(gpu_host, trees[0]) == trees[0]
        assert {row["pid"] for row in record["spared"] if "not asked for" in row["why"]} == trees[0]
        assert (record["verdict"], record["reason"]) == ("clean", "")
        assert [gpu["index"] for gpu in record["gpus"]] == [4, 5, 6, 7]
        assert [gpu_host.state.used_mib(index) for index in range(1, 8)] == [76000] * 3 + [0] * 4


def test_gpus_4_to_7_are_reset_though_their_server_hangs_and_the_other_one_goes_on(gpu_host: Host) -> None:
    first, second = two_servers(gpu_host)
    trees = numbers(first.tree()), numbers(second.tree())
    (stopped,) = [process.pid for process in second.tree() if "scheduler_TP2" in process.line]
    gpu_host.kill(stopped, signal.SIGSTOP)
    assert second.request("/generate", {"text": "Once"}, timeout=1)[0] == 0
    with traffic(first):
        record = reset(gpu_host, gpus=[gpu.uuid for gpu in gpu_host.state.gpus()[4:]], grace=1.5)
    assert pids(record) == trees[1]
    assert signals(record)[second.pid] == "KILL"
    assert living(gpu_host, trees[0]) == trees[0]
    assert record["verdict"] == "clean"


def test_gpus_4_to_7_are_reset_of_orphans_and_the_server_on_the_others_goes_on(gpu_host: Host) -> None:
    first = gpu_host.start_server(tp=4, port=30000, name="first", settings=FAST, wait=False)
    orphaned = gpu_host.start_server(
        "--base-gpu-id", "4", tp=4, port=30001, name="second", settings=FAST | {"OUTLIVE_MAIN": 1}
    )
    first.wait_until_ready()
    tree = numbers(first.tree())
    leave_orphans(orphaned)
    titled = numbers(p for p in gpu_host.processes() if p.line.startswith("sglang::")) - tree
    assert len(titled) == 5
    with traffic(first):
        record = reset(gpu_host, gpus=LATER)
    assert pids(record) >= titled
    assert living(gpu_host, tree) == tree
    assert record["verdict"] == "clean"


def test_a_server_that_uses_one_of_the_gpus_ends_as_a_whole(gpu_host: Host) -> None:
    """A TP-4 server of which one rank is on GPU 3: half a server serves nobody."""
    server = gpu_host.start_server(tp=4, settings=FAST)
    tree = numbers(server.tree())
    record = reset(gpu_host, gpus=["3"], grace=20.0)
    assert pids(record) == tree
    assert_clean(gpu_host, record, [3])


def test_a_server_that_the_driver_lists_nowhere_is_not_ended_for_some_gpus_and_the_host_is_dirty(
    gpu_host: Host,
) -> None:
    """While it imports nobody can say which GPUs it will take: reported, not guessed."""
    serving = gpu_host.start_server(tp=2, port=30000, name="first", settings=FAST)
    importing = gpu_host.start_server(
        "--base-gpu-id", "4", tp=2, port=30001, name="second", settings={"IMPORT_SECONDS": 3600}, wait=False
    )
    until(lambda: len(importing.tree()) == 5, "its children")
    everybody = numbers(serving.tree()) | numbers(importing.tree())
    record = reset(gpu_host, gpus=LATER)
    assert record["killed"] == [] and living(gpu_host, everybody) == everybody
    assert record["verdict"] == "dirty"
    assert f"({importing.pid})" in record["reason"] and "reset all GPUs" in record["reason"]
    assert f"({serving.pid})" not in record["reason"]


def test_gpu_7_dirty_while_0_to_6_are_clean_is_a_dirty_host(gpu_host: Host) -> None:
    gpu_host.state.set_fault("unowned", 3000, index=7)
    server = gpu_host.start_server(*EAGLE3, settings=FAST | {"MEMORY_MIB": 40000})
    record = reset(gpu_host, grace=20.0, verify_timeout=1.0)
    assert server.pid in pids(record)
    assert record["verdict"] == "dirty" and record["failed"] is True
    assert [gpu["verdict"] for gpu in record["gpus"]] == ["free"] * 7 + ["unowned_memory"]
    assert record["reason"].startswith("GPU 7 is unowned_memory: 3000 MiB")
    assert "gpu_hypervisor" in record["gpus"][7]["cure"]
    assert reset(gpu_host, gpus=["0", "6"])["verdict"] == "clean"


def test_memory_that_comes_back_late_is_waited_for(gpu_host: Host) -> None:
    for index in range(8):
        gpu_host.state.set_fault("release_ms", 1500, index=index)
    server = gpu_host.start_server(settings=FAST | {"IGNORE_TERM": 1})
    record = reset(gpu_host, grace=0.3, verify_timeout=20.0)
    assert server.pid in pids(record)
    assert 1.0 < record["seconds"]["verify"] < 4
    assert_clean(gpu_host, record)


def test_memory_that_never_comes_back_gets_its_reason_after_the_time_for_it(gpu_host: Host) -> None:
    gpu_host.state.set_fault("never_release", index=2)
    gpu_host.start_server(tp=4, settings=FAST | {"IGNORE_TERM": 1})
    record = reset(gpu_host, grace=0.3, verify_timeout=1.5)
    assert record["verdict"] == "dirty"
    assert [gpu["verdict"] for gpu in record["gpus"] if gpu["index"] != 2] == ["free"] * 7
    assert record["gpus"][2]["verdict"] == "unowned_memory" and record["gpus"][2]["cure"]
    assert "GPU 2 is unowned_memory: 76000 MiB used" in record["reason"]
    assert 1.5 <= record["seconds"]["verify"] < 4


@pytest.mark.parametrize(
    ("fault", "value", "verdict"),
    [
        ("lost", "", "lost"),
        ("dead_pid", "999999 4000", "other_namespace"),
        ("mig", "", "unknown"),
        ("ghost_latch", "", "ghost_latch"),
    ],
    ids=["GPU-lost", "pid-that-is-not-here", "MIG-on", "busy-with-nothing-on-it"],
)
def test_a_gpu_in_trouble_makes_the_host_dirty_or_unknown_never_clean(
    gpu_host: Host, fault: str, value: str, verdict: str
) -> None:
    gpu_host.state.set_fault(fault, value, index=6)
    record = reset(gpu_host, verify_timeout=4.0)
    assert [gpu["verdict"] for gpu in record["gpus"]] == ["free"] * 6 + [verdict, "free"]
    assert record["verdict"] == ("unknown" if verdict == "unknown" else "dirty") and record["failed"]
    assert record["gpus"][6]["cure"] and "GPU 6" in record["reason"]
    assert record["killed"] == []


def test_the_afterglow_of_a_load_is_not_called_a_ghost_latch(gpu_host: Host) -> None:
    gpu_host.state.set_fault("utilization", 100, index=1)
    running = start_reset(gpu_host, verify_timeout=10.0)
    until(
        lambda: '"begun"' in gpu_host.exec("cat /var/lib/gpu-host/journal.jsonl", check=False).stdout, "the first look"
    )
    time.sleep(0.3)
    gpu_host.state.clear_fault("utilization", index=1)
    record = finish(running)
    assert_clean(gpu_host, record)
    assert record["seconds"]["verify"] >= 0.25  # it did not call a busy GPU free either


def test_a_port_that_somebody_else_holds_is_named_and_makes_the_host_dirty(gpu_host: Host) -> None:
    other = gpu_host.start("python3 -m http.server 30005 --bind 127.0.0.1")
    until(lambda: "30005" in gpu_host.exec("ss -Hltn").stdout, "the port")
    record = reset(gpu_host, ports=[30000, 30005])
    assert record["verdict"] == "dirty"
    assert record["reason"] == f"port 30005 is still held by python3 -m http.server ({other.pid})"
    assert gpu_host.alive(other.pid)
