"""Guests of one machine: what a guest can't see of its own is ended from the machine, and never another guest's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import processes
from tests.lab.host import JOIN, Host
from tests.lab.machine import Machine
from tests.lab.processes import Process
from tests.lab.resets import FAST, numbers, pids, reset, server_command, signals, until
from tests.lab.server import READY

# The namespaces of the guest, but a PID namespace beside its own: a second container in the same control group.
BESIDE = JOIN.replace("NAMESPACES", "--mount --uts --ipc --net --cgroup")
LOG = "/run/beside.log"


class Beside:
    """Processes in a guest's control group that the guest can't see. `script` is their first process."""

    def __init__(self, guest: Host, script: str) -> None:
        self.guest = guest
        words = [
            "sh",
            "-c",
            BESIDE,
            "sh",
            str(guest.init),
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        words += ["env", "-i", "--chdir=/root", "PATH=/usr/bin:/bin", "HOME=/root", "bash", "-c", script]
        self._outer = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        until(lambda: children.read_text().split(), "the first process beside the guest")
        self.init = int(children.read_text().split()[0])
        until(self._has_a_namespace_of_its_own, "its namespace")

    def _has_a_namespace_of_its_own(self) -> bool:
        return os.readlink(f"/proc/{self.init}/ns/pid") not in (
            os.readlink("/proc/self/ns/pid"),
            os.readlink(f"/proc/{self.guest.init}/ns/pid"),
        )

    def processes(self) -> list[Process]:
        try:
            return [process for process in processes.in_namespace(self.init) if process.state != "Z"]
        except FileNotFoundError:
            return []

    def outside(self) -> set[int]:
        """Their pids as the machine numbers them."""
        return {process.outside_pid for process in self.processes()}

    def close(self) -> None:
        self._outer.kill()
        self._outer.wait()


@pytest.fixture
def start_beside() -> Iterator[Callable[[Host, str], Beside]]:
    started: list[Beside] = []

    def start(guest: Host, script: str) -> Beside:
        started.append(Beside(guest, script))
        until(lambda: READY in guest.exec(["cat", LOG], check=False).stdout, "the server beside the guest")
        return started[-1]

    yield start
    for one in started:
        one.close()


StartBeside = Callable[[Host, str], Beside]
StartHost = Callable[..., Host]


def serve(tp: int = 2, **settings: object) -> str:
    """The command of a server on the first GPUs."""
    return f"{server_command(tp=tp, port=31000, settings=settings)} > {LOG} 2>&1"


def play(guest: Host, machine: Machine, **variables: Any) -> subprocess.CompletedProcess[str]:
    """playbooks/reset.yml on the guest, with the machine as its hypervisor."""
    scope = machine.guest_scope(guest)
    there = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gpu_reset_state_folder": str(machine.state_folder),
        "gpu_host_environment": machine.environment,
    }
    hosts = {"machine": there, guest.name: {"gpu_hypervisor": "machine", "gpu_hypervisor_guest": scope}}
    inventory = machine.state_folder.with_name("hypervisor.json")
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    waits = {"gpu_reset_grace": 4, "gpu_reset_kill_timeout": 3, "gpu_reset_verify_timeout": 2}
    assert not variables.keys() & {"gpu_hypervisor", "gpu_hypervisor_guest"}  # they would overrule the scope
    return guest.playbook(
        "playbooks/reset.yml",
        waits | variables,
        "--inventory",
        str(inventory),
        environment={"GPU_ARTIFACTS": str(machine.state_folder.with_name("artifacts"))},
    )


def recorded(machine: Machine) -> list[dict[str, Any]]:
    text = machine.state_folder.with_name("artifacts").joinpath("resets.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def verdicts(record: dict[str, Any]) -> list[str]:
    return [gpu["verdict"] for gpu in record["gpus"]]


def test_memory_of_an_owner_that_a_guest_cannot_see_names_both_causes_and_ends_nothing(
    gpu_host: Host, start_beside: StartBeside
) -> None:
    hidden = start_beside(gpu_host, "exec " + serve())
    before = hidden.outside()
    assert not gpu_host.find("sglang")
    record = reset(gpu_host, verify_timeout=0.5)
    assert verdicts(record) == ["unowned_memory"] * 2 + ["free"] * 6
    cure = record["gpus"][0]["cure"]
    assert "another PID namespace" in cure and "orphaned" in cure and "gpu_hypervisor" in cure
    assert (record["verdict"], record["killed"]) == ("dirty", [])
    assert hidden.outside() == before


def test_a_guests_hidden_server_is_ended_from_the_machine_and_another_guests_lives_on(
    start_gpu_host: StartHost, start_beside: StartBeside, tmp_path: Path
) -> None:
    guest = start_gpu_host()
    other = start_gpu_host(gpus_of=guest)
    machine = Machine(guest.lab, guest, tmp_path)
    theirs = other.start_server("--base-gpu-id", "2", tp=2, settings=FAST)
    living = numbers(theirs.tree())
    own = guest.start_server("--base-gpu-id", "4", tp=2, settings=FAST)
    own_tree = numbers(own.tree())
    hidden = start_beside(guest, "exec " + serve())
    tree = hidden.outside()

    done = play(guest, machine, gpu_reset_gpus=["0", "1", "4", "5"])
    assert done.returncode == 0, done.stdout + done.stderr
    first, there, last = recorded(machine)
    assert [(one["host"], one.get("guest"), one["verdict"]) for one in (first, there, last)] == [
        (guest.name, None, "dirty"),
        ("machine", guest.name, "clean"),
        (guest.name, None, "clean"),
    ]
    assert pids(first) == own_tree and verdicts(first) == ["unowned_memory"] * 2 + ["free"] * 2
    assert pids(there) == tree
    assert [gpu["index"] for gpu in there["gpus"]] == [0, 1]
    assert min(gpu["used_mib_before"] for gpu in there["gpus"]) >= 76000
    assert verdicts(last) == ["free"] * 4
    assert "Verdicts - clean: " + guest.name in done.stdout.replace(" (SIMULATED)", "")
    assert hidden.processes() == []
    assert numbers(theirs.tree()) == living and theirs.request("/model_info")[0] == 200
    # It looked up the guest's container, whose first process is systemd, and did not stop it.
    assert {call[0] for call in machine.asked_of_podman()} <= {"inspect"}
    assert guest.exec(["systemctl", "is-system-running"]).stdout.strip() == "running"


def test_another_guests_server_is_reported_by_the_machine_and_leaves_the_guest_dirty(
    start_gpu_host: StartHost, start_beside: StartBeside, tmp_path: Path
) -> None:
    guest = start_gpu_host()
    other = start_gpu_host(gpus_of=guest)
    machine = Machine(guest.lab, guest, tmp_path)
    theirs = other.start_server("--base-gpu-id", "2", tp=2, settings=FAST)
    living = numbers(theirs.tree())
    holders = {process.outside_pid for process in theirs.tree() if "sglang::scheduler" in process.line}
    hidden = start_beside(guest, "exec " + serve(IGNORE_TERM=1))
    tree = hidden.outside()

    done = play(guest, machine)
    assert done.returncode == 2, done.stdout + done.stderr
    first, there, last = recorded(machine)
    assert verdicts(first)[:4] == ["unowned_memory"] * 4
    assert pids(there) == tree and "KILL" in signals(there).values()
    assert pids(there, "spared") == holders and len(holders) == 2
    assert all(row["why"] == "uses a GPU and is no server of ours, outside the given scope" for row in there["spared"])
    assert (there["guest"], verdicts(there)) == (guest.name, ["free"] * 2 + ["in_use"] * 2)
    assert (last["verdict"], verdicts(last)) == ("dirty", ["free"] * 2 + ["unowned_memory"] * 2 + ["free"] * 4)
    assert f"Verdicts - dirty: {guest.name}" in done.stdout
    assert hidden.processes() == []
    assert numbers(theirs.tree()) == living and theirs.request("/model_info")[0] == 200


def test_hidden_orphans_whose_main_is_dead_are_ended_from_the_machine(
    start_gpu_host: StartHost, start_beside: StartBeside, tmp_path: Path
) -> None:
    guest = start_gpu_host()
    machine = Machine(guest.lab, guest, tmp_path)
    hidden = start_beside(guest, f"{serve(OUTLIVE_MAIN=1)} & exec sleep 3600")
    (main,) = (process for process in hidden.processes() if "sglang.launch_server --model" in process.line)
    tree = hidden.outside() - {main.outside_pid}
    orphans = tree - {hidden.init}
    os.kill(main.outside_pid, signal.SIGKILL)
    until(lambda: main.outside_pid not in hidden.outside(), "the main to end")
    done = play(guest, machine)
    assert done.returncode == 0, done.stdout + done.stderr
    _, there, last = recorded(machine)
    assert pids(there) <= orphans and len(pids(there)) >= 3
    assert set(signals(there).values()) == {"KILL"}
    assert last["verdict"] == "clean"
    assert hidden.outside() == {hidden.init}  # a bystander in the same control group
