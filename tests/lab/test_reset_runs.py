"""A reset as a run: through Ansible, twice, two at once, in check mode, refused, and killed in the middle."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    FAST,
    assert_clean,
    finish,
    leave_orphans,
    living,
    numbers,
    pids,
    reset,
    start_reset,
    until,
)

STATE = "/var/lib/gpu-host"


def journal(host: Host) -> list[dict[str, Any]]:
    text = host.exec(f"cat {STATE}/journal.jsonl", check=False).stdout
    return [json.loads(line) for line in text.splitlines()]


def events(host: Host) -> list[str]:
    return [entry["event"] for entry in journal(host)]


def test_the_playbook_resets_a_host_and_its_second_run_reports_ok_and_changed_0(gpu_host: Host, tmp_path: Path) -> None:
    server = gpu_host.start_server(settings=FAST)
    environment = {"GPU_ARTIFACTS": str(tmp_path)}
    first = gpu_host.playbook("playbooks/reset.yml", {}, environment=environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "changed=1" in first.stdout and "failed=0" in first.stdout
    assert living(gpu_host, {server.pid}) == set()
    second = gpu_host.playbook("playbooks/reset.yml", {}, environment=environment)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "changed=0" in second.stdout and "failed=0" in second.stdout
    assert "clean" in second.stdout
    records = [json.loads(line) for line in (tmp_path / "resets.jsonl").read_text().splitlines()]
    assert [record["verdict"] for record in records] == ["clean", "clean"]
    assert server.pid in pids(records[0]) and records[1]["killed"] == []


def test_the_module_ends_a_server_for_a_user_with_sudo(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    result = gpu_host.ansible("gpu_reset", {"grace": 0.5}, user="engineer")
    assert result["verdict"] == "clean" and result["changed"] is True
    assert server.pid in pids(result)
    again = gpu_host.ansible("gpu_reset", {"grace": 0.5}, user="engineer")
    assert again["verdict"] == "clean" and again["changed"] is False and again["killed"] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": ["9"]}, "GPU 9 is not on this host"),
        ({"gpus": ["GPU-00000000-0000-0000-0000-000000000000"]}, "GPU"),
        ({"grace": -1.0}, "grace"),
        ({"kill_timeout": -0.5}, "kill_timeout"),
        ({"server_modules": ["python3"]}, "server_modules"),
        ({"server_titles": [".*"]}, "server_titles"),
        ({"server_commands": ["python3 -m"]}, "server_commands"),
        ({"scope_folder": "/"}, "scope_folder"),
        ({"free_mib": -5}, "free_mib"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused_before_anything_happens(
    shared_gpu_host: Host, given: dict[str, Any], words: str
) -> None:
    started = shared_gpu_host.exec(f"ls -A {STATE} 2> /dev/null | sort; ls /dev/shm", check=False).stdout
    if not shared_gpu_host.find("-m sglang.launch_server"):
        shared_gpu_host.start_server(tp=1, settings=FAST)
    before = numbers(shared_gpu_host.find("sglang"))
    record = reset(shared_gpu_host, **given)
    assert record["failed"] is True and record["killed"] == [] and record["changed"] is False
    assert words in record["msg"]
    assert numbers(shared_gpu_host.find("sglang")) == before
    after = shared_gpu_host.exec(f"ls -A {STATE} 2> /dev/null | sort; ls /dev/shm", check=False).stdout
    assert set(after.split()) - set(started.split()) <= {"lock"}


def test_without_root_it_refuses_unless_only_ones_own_processes_are_meant(gpu_host: Host) -> None:
    ours = gpu_host.start_server(tp=1, port=30000, name="ours", user="engineer", settings=FAST)
    theirs = gpu_host.start_server("--base-gpu-id", "1", tp=1, port=30001, name="theirs", settings=FAST)
    trees = numbers(ours.tree()), numbers(theirs.tree())
    refused = reset(gpu_host, user="engineer", sudo=False, state_folder="/home/engineer/state")
    assert refused["failed"] and refused["killed"] == []
    assert "become: true" in refused["msg"] and "own_processes_only" in refused["msg"]
    assert living(gpu_host, trees[0] | trees[1]) == trees[0] | trees[1]
    own = {"own_processes_only": True, "state_folder": "/home/engineer/state"}
    record = reset(gpu_host, user="engineer", sudo=False, grace=15.0, **own)
    assert pids(record) == trees[0]
    assert living(gpu_host, trees[1]) == trees[1]
    assert record["verdict"] == "dirty"


def test_without_a_driver_it_refuses_and_ends_nobody(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=1, settings=FAST)
    gpu_host.state.set_fault("no_driver")
    record = reset(gpu_host)
    assert record["failed"] and record["killed"] == [] and record["verdict"] == "unknown"
    assert "driver" in record["msg"].lower()
    assert gpu_host.alive(server.pid)


def test_the_second_of_two_resets_waits_for_the_first_and_finds_a_clean_host(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    first = start_reset(gpu_host, grace=2.0, run_id="first")
    until(lambda: "will_signal" in events(gpu_host), "the first to signal")
    second = reset(gpu_host, lock_timeout=20.0, run_id="second")
    record = finish(first)
    assert server.pid in pids(record)
    assert_clean(gpu_host, record)
    assert_clean(gpu_host, second)
    assert second["killed"] == [] and second["changed"] is False
    order = [(entry["run_id"], entry["event"]) for entry in journal(gpu_host)]
    assert order.index(("first", "finished")) < order.index(("second", "begun"))


def test_the_second_of_two_resets_says_who_holds_the_lock_when_its_time_is_over(gpu_host: Host) -> None:
    gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    first = start_reset(gpu_host, grace=3.0, run_id="first")
    until(lambda: "will_signal" in events(gpu_host), "the first to signal")
    second = reset(gpu_host, lock_timeout=0.3, run_id="second")
    assert second["failed"] and second["killed"] == [] and second["verdict"] == "unknown"
    assert "held by run first of root (pid " in second["msg"]
    assert_clean(gpu_host, finish(first))


STALE = """
mkdir -p /root/.cache/torch_extensions/py311_cu130/{mine,hers}
touch -d '1 hour ago' /root/.cache/torch_extensions/py311_cu130/{mine,hers}/lock
head -c 4096 /dev/zero > /dev/shm/sgl_shm_mm_999999_0
echo theirs > /dev/shm/somebody_elses
mkdir -p /opt/src/sglang/__pycache__ && touch /opt/src/sglang/{__init__,engine}.py
echo stale > /opt/src/sglang/__pycache__/engine.cpython-311.pyc
touch /tmp/tmp-of-somebody
"""
FILES = "find /root/.cache /dev/shm /opt/src /tmp -type f | sort"


def test_check_mode_lists_exactly_what_the_real_run_then_kills_and_deletes_and_changes_nothing(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1, "SHM_FOLDER": "/dev/shm"})
    orphaned = gpu_host.start_server(
        "--base-gpu-id", "2", tp=2, port=30001, name="b", settings=FAST | {"OUTLIVE_MAIN": 1}
    )
    leave_orphans(orphaned)
    gpu_host.exec(["bash", "-c", STALE])
    # What the server that is to end has made and holds counts as left behind too.
    gpu_host.exec(f"head -c 4096 /dev/zero > /dev/shm/sgl_shm_mm_{server.pid}_1")
    files = gpu_host.exec(FILES).stdout
    before = {process.pid: process.start_ticks for process in gpu_host.processes() if "sglang" in process.line}
    given: dict[str, Any] = {"grace": 0.5, "bytecode_paths": ["/opt/src/sglang"]}

    plan = reset(gpu_host, check=True, **given)
    assert plan["predicted"] is True and plan["failed"] is False and plan["verdict"] == "dirty"
    assert plan["changed"] is True
    assert gpu_host.exec(FILES).stdout == files
    assert {p.pid: p.start_ticks for p in gpu_host.processes() if "sglang" in p.line} == before
    assert gpu_host.exec(f"ls {STATE}", check=False).stdout == ""

    record = reset(gpu_host, **given)
    assert pids(record) == pids(plan)
    assert {item["path"] for item in record["cleaned"]} == {item["path"] for item in plan["cleaned"]}
    assert {
        "/root/.cache/torch_extensions/py311_cu130/mine/lock",
        "/root/.cache/torch_extensions/py311_cu130/hers/lock",
        "/dev/shm/sgl_shm_mm_999999_0",
        f"/dev/shm/sgl_shm_mm_{server.pid}_1",
        "/opt/src/sglang/__pycache__/engine.cpython-311.pyc",
    } <= {item["path"] for item in record["cleaned"]}
    left = gpu_host.exec(FILES).stdout.split()
    assert set(files.split()) - set(left) == {item["path"] for item in record["cleaned"]}
    assert {"/dev/shm/somebody_elses", "/tmp/tmp-of-somebody", "/opt/src/sglang/__init__.py"} <= set(left)
    assert_clean(gpu_host, record)


def test_a_reset_killed_between_its_signal_and_the_end_is_told_by_the_next_run(gpu_host: Host) -> None:
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    tree = numbers(server.tree())
    first = start_reset(gpu_host, grace=60.0, run_id="killed-run")
    until(lambda: "signalled" in events(gpu_host), "the signal")
    resetting = min(numbers(p for p in gpu_host.processes() if p.line.startswith("/usr/bin/python3 -c import sys")))
    gpu_host.kill(resetting, signal.SIGKILL)
    first.communicate(timeout=20)
    assert living(gpu_host, tree) == tree
    record = reset(gpu_host, grace=0.5, run_id="next-run")
    (earlier,) = record["earlier"]
    assert (earlier["run_id"], earlier["verdict"], earlier["failed"]) == ("killed-run", "unknown", True)
    assert [(row["pid"], row["signal"]) for row in earlier["killed"]] == [(server.pid, "TERM")]
    assert "never finished" in earlier["reason"]
    assert pids(record) == tree
    assert_clean(gpu_host, record)
    # Once the control node has a record of both, nothing is told again.
    assert reset(gpu_host, last_recorded_run="next-run")["earlier"] == []


def test_the_hosts_journal_and_evidence_are_private(gpu_host: Host) -> None:
    gpu_host.start_server("--api-key", "sk-very-secret-0123456789", tp=1, settings=FAST)
    record = reset(gpu_host, grace=15.0)
    assert "sk-very-secret-0123456789" not in json.dumps(record)
    assert record["evidence"].startswith(f"{STATE}/evidence/")
    modes = gpu_host.exec(f"find {STATE} -printf '%m %y %p\\n'").stdout.splitlines()
    assert {line.split()[0] for line in modes if line.split()[1] == "d"} == {"700"}
    assert {line.split()[0] for line in modes if line.split()[1] == "f"} == {"600"}
    leaks = gpu_host.exec(f"grep -rl sk-very-secret-0123456789 {STATE}", check=False).stdout.split()
    assert leaks in ([], [f"{STATE}/servers/port-30000.json"])  # what a restart needs, for root alone
