"""Servers in containers, reset from the machine that runs them: podman stops what is a server's, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.host import Host
from tests.lab.image import image_name
from tests.lab.lab import Lab
from tests.lab.machine import Machine
from tests.lab.processes import start_ticks
from tests.lab.resets import FAST, JOBS, of_a_server, pids, server_command, signals, until
from tests.lab.server import READY

LOG = "/run/server.log"
SERVE = f"exec {server_command(tp=2)} > {LOG} 2>&1"


class Container(Host):
    """A container of the lab whose main process is what a test says, not systemd."""

    def run_arguments(self) -> list[str]:
        return [word for word in super().run_arguments() if word != "--systemd=always"]

    def outside(self) -> set[int]:
        """Its processes as the machine numbers them."""
        return {process.outside_pid for process in self.processes()}

    def is_ready(self) -> bool:
        return READY in self.exec(["cat", LOG], check=False).stdout

    def inspect(self) -> dict[str, object]:
        return dict(json.loads(self.lab.podman("inspect", "--format", "{{json .State}}", self.name).stdout))


RunContainer = Callable[..., Container]


@pytest.fixture
def run_container(lab: Lab) -> Iterator[RunContainer]:
    """Runs containers of a lab host's image, removed after the test; each waits until its server is ready."""
    names: list[str] = []

    def start(script: str, *options: str) -> Container:
        container = Container(lab, f"container-{len(names) + 1}", lab._free_address(), 8)
        names.append(container.name)
        container.state_folder.mkdir(parents=True)
        container.reset_state()
        lab.podman(*container.run_arguments(), *options, image_name(), "bash", "-c", script)
        container.save(int(lab.podman("inspect", "--format", "{{.State.Pid}}", container.name).stdout))
        until(container.is_ready, "the server in the container")
        return container

    yield start
    for name in names:
        lab._remove(name)


def stops(machine: Machine) -> list[list[str]]:
    """The calls of `podman stop` that a reset made."""
    return [call for call in machine.asked_of_podman() if call[0] == "stop"]


def assert_free(container: Host, record: dict[str, object]) -> None:
    assert max(container.state.used_mib(index) for index in range(8)) == 0
    assert [gpu["verdict"] for gpu in record["gpus"]] == ["free"] * 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("script", [SERVE, SERVE.replace("exec ", "") + "; exit 1"], ids=["itself", "by-a-wrapper"])
def test_a_container_that_runs_the_server_is_stopped_by_podman_and_not_started_again(
    script: str, run_container: RunContainer, tmp_path: Path
) -> None:
    container = run_container(script, "--restart=always")
    machine = Machine(container.lab, container, tmp_path)
    tree = container.outside()
    name = container.cgroup[-64:][:12]
    assert container.init in tree
    record = machine.reset(container, grace=10.0)
    assert stops(machine) == [["stop", "-t", "10", name]]
    assert (record["verdict"], record["respawners"]) == ("clean", [])
    assert pids(record) >= tree - {container.init}
    assert set(signals(record).values()) == {"TERM"}
    assert record["seconds"]["kill"] < 8  # a shell as first process ignores podman's TERM: nobody waits for the grace
    assert_free(container, record)
    time.sleep(2)  # a restart by policy takes podman less than one
    assert container.inspect()["Status"] == "exited"


def test_a_container_that_shares_the_machines_pid_namespace_is_stopped_by_podman_too(
    run_container: RunContainer, tmp_path: Path
) -> None:
    container = run_container(SERVE, "--restart=always", "--pid=host")
    machine = Machine(container.lab, container, tmp_path)
    main = container.init
    record = machine.reset(container, grace=10.0)
    assert stops(machine) == [["stop", "-t", "10", container.cgroup[-64:][:12]]]
    assert (record["verdict"], record["respawners"]) == ("clean", [])
    assert main in pids(record) and len(pids(record)) == 5
    assert_free(container, record)


def test_a_container_that_holds_a_job_besides_its_server_is_not_stopped_and_its_restart_policy_is_reported(
    run_container: RunContainer, tmp_path: Path
) -> None:
    container = run_container(SERVE, "--restart=always")
    machine = Machine(container.lab, container, tmp_path)
    tree = container.outside()
    container.lab.podman("exec", "--detach", container.name, "sleep", "1000")
    until(lambda: container.find("sleep 1000"), "the job")
    (job,) = container.find("sleep 1000")
    record = machine.reset(container, grace=10.0)
    assert stops(machine) == []
    assert pids(record) >= tree
    assert record["verdict"] == "dirty"
    (respawner,) = record["respawners"]
    assert f"container {container.cgroup[-64:][:12]} restarts its server (policy always)" in respawner
    assert f"podman stop {container.cgroup[-64:][:12]}" in respawner
    assert job.outside_pid not in pids(record)
    note, untold = record["notes"]
    # In a network namespace of its own: the drain can't see its requests, and says so.
    assert untold.startswith("port-30000 does not tell its requests")
    assert note.endswith(f"ends with its first process, the server, and with it sleep ({job.outside_pid})")


def test_a_container_whose_main_is_systemd_lives_on_without_its_server(gpu_host: Host, tmp_path: Path) -> None:
    machine = Machine(gpu_host.lab, gpu_host, tmp_path)
    server = gpu_host.start_server(tp=2, settings=FAST).wait_until_ready()
    bystander = gpu_host.start(f"python3 {JOBS}/data_job.py")
    tree = {process.outside_pid for process in server.tree()}
    booted = start_ticks(gpu_host.init)
    record = machine.reset(gpu_host, grace=10.0)
    assert stops(machine) == []
    assert any(call[0] == "inspect" for call in machine.asked_of_podman())
    assert pids(record) >= tree
    assert (record["verdict"], record["respawners"]) == ("clean", [])
    assert_free(gpu_host, record)
    assert start_ticks(gpu_host.init) == booted
    assert gpu_host.exec(["systemctl", "is-system-running"]).stdout.strip() == "running"
    assert gpu_host.alive(bystander.pid)


def test_a_unit_in_a_container_is_not_asked_of_the_machines_own_systemd(gpu_host: Host, tmp_path: Path) -> None:
    """The machine's systemd may have a unit of the same name, which is another one."""
    machine = Machine(gpu_host.lab, gpu_host, tmp_path)
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/systemctl.log\nexit 1\n')
    systemctl.chmod(0o755)
    server = gpu_host.start_server(tp=2, settings=FAST, how="unit").wait_until_ready()
    tree = {process.outside_pid for process in server.tree()}
    record = machine.reset(gpu_host, grace=10.0)
    assert pids(record) >= tree
    assert not (tmp_path / "systemctl.log").exists()
    assert record["verdict"] == "dirty"
    assert "guest's unit sglang.service restarts its server" in record["reason"]
    until(lambda: any(map(of_a_server, gpu_host.processes())), "the guest's systemd to start it again")
