"""Twenty hosts at once, four broken in different ways: one run, a right verdict for each, none waits for ever."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lab import small_server
from tests.lab.command import run
from tests.lab.host import Host
from tests.lab.image import REPOSITORY, LabUnavailableError
from tests.lab.lab import Lab
from tests.lab.resets import FAST, JOBS, living, until
from tests.lab.server import STANDIN

HOSTS = 20
SECONDS = 240  # far more than all deadlines of a run together
WAITS = {"gpu_reset_grace": 1, "gpu_reset_kill_timeout": 2, "gpu_reset_verify_timeout": 3}


@pytest.fixture
def room_for_many() -> Iterator[None]:
    """A systemd watches with some six inotify instances, and root has 128 for all: too few for twenty hosts."""
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    old = int(limit.read_text())
    with contextlib.suppress(OSError):
        limit.write_text(str(max(old, 1024)))
    yield
    with contextlib.suppress(OSError):
        limit.write_text(str(old))


@pytest.fixture
def fleet(lab: Lab, room_for_many: None) -> Iterator[list[Host]]:
    names = [f"fleet-{number:02}" for number in range(1, HOSTS + 1)]
    try:
        hosts = [lab.start_host(name, gpus=2, wait=False) for name in names]
        for host in hosts:
            host.wait_until_up()
        yield hosts
    finally:
        lab.stop_hosts([name for name in names if name in lab.host_names()])


def play(lab: Lab, artifacts: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """`playbooks/reset.yml` over the fleet."""
    lab.check_no_way_out()
    words = ["ansible-playbook", "-i", str(lab.write_inventory()), "--limit", "fleet-*", "playbooks/reset.yml"]
    words += ["-e", json.dumps({**WAITS, **variables})]
    environment = lab.ansible_environment() | {"GPU_ARTIFACTS": str(artifacts)}
    return run(lab.enter(words), environment, check=False, timeout=SECONDS, folder=REPOSITORY)


def prepare(host: Host) -> set[int]:
    """A server on the host; its processes."""
    if host.name.endswith("0"):
        server = host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
        return {process.pid for process in server.tree()}
    small_server.install(host)
    return {small_server.start(host)}


def stranger(host: Host) -> int:
    """Somebody else's training job on GPU 1."""
    command = f"env PYTHONPATH={STANDIN} nohup python3 {JOBS}/train_draft.py --gpu 1 --mib 20000"
    pid = int(host.exec(f"{command} > /dev/null 2>&1 < /dev/null & echo $!").stdout)
    until(lambda: host.state.used_mib(1) >= 20000, "the training job")
    return pid


def test_sixteen_of_twenty_hosts_are_reset_and_the_four_broken_ones_are_told_apart(
    lab: Lab, fleet: list[Host], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as threads:
        servers = dict(zip(fleet, threads.map(prepare, fleet), strict=True))
    dirty, unreachable, hung, unkillable, *good = fleet
    job = stranger(dirty)
    unreachable.exec(["systemctl", "stop", "ssh.socket", "ssh.service"])
    (sshd,) = [process.pid for process in hung.processes() if "sshd: /usr/sbin/sshd" in process.line]
    hung.kill(sshd, signal.SIGSTOP)  # the kernel accepts connections, nobody answers them
    (frozen,) = servers[unkillable]
    try:
        unkillable.freeze(frozen)
    except LabUnavailableError as error:
        pytest.skip(str(error))
    try:
        done = play(lab, tmp_path)
    finally:
        unkillable.thaw_all()

    assert done.returncode == 4, done.stdout + done.stderr  # Ansible's own, where a host was unreachable
    named = ", ".join(f"{host.name} (SIMULATED)" for host in good)
    assert done.stdout.strip().splitlines()[-1] == (
        f"Verdicts - dirty: {dirty.name} (SIMULATED), {unkillable.name} (SIMULATED); "
        f"unreachable: {unreachable.name}, {hung.name}; clean: {named}"
    )
    records = {one["host"]: one for one in map(json.loads, (tmp_path / "resets.jsonl").read_text().splitlines())}
    assert len(records) == HOSTS and len({one["play"] for one in records.values()}) == 1
    for host in good:
        assert {row["pid"] for row in records[host.name]["killed"]} == servers[host]
        assert living(host, servers[host]) == set()
        assert [gpu["verdict"] for gpu in records[host.name]["gpus"]] == ["free", "free"]
    assert f"train_draft.py (pid {job}, 20000 MiB)" in records[dirty.name]["reason"] and dirty.alive(job)
    assert living(dirty, servers[dirty]) == set()
    assert "did not end within 2 s of SIGKILL: reboot the host" in records[unkillable.name]["reason"]
    assert "refused" in records[unreachable.name]["reason"]
    assert "timed out" in records[hung.name]["reason"]
    assert living(hung, servers[hung]) == servers[hung]
    # Two of twenty are no reason to stop.
    assert not (tmp_path / "breaker.json").exists()
