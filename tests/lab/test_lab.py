"""The lab itself: its hosts are real where the reset's tests rely on it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.lab.command import LabError, run
from tests.lab.host import Host
from tests.lab.image import REPOSITORY, LabUnavailableError, require
from tests.lab.lab import Lab, sweep


def test_a_host_boots_with_systemd_and_ssh_within_five_seconds(start_gpu_host: Callable[..., Host]) -> None:
    started = time.monotonic()
    host = start_gpu_host()
    answer = host.ssh("cat /proc/1/comm; systemctl is-system-running; systemctl is-active ssh")
    assert time.monotonic() - started < 5
    assert answer.stdout.split() == ["systemd", "running", "active"]


def test_neither_the_lab_nor_a_host_has_a_way_out(lab: Lab, shared_gpu_host: Host) -> None:
    for prefix in (["nsenter", f"--net=/run/netns/{lab.namespace}", "--"], shared_gpu_host.enter([])):
        for address in ("192.0.2.1", "2001:db8::1"):
            refused = run([*prefix, "ip", "route", "get", address], check=False)
            assert "unreachable" in refused.stderr, refused
    assert os.readlink(f"/proc/{shared_gpu_host.init}/ns/net") != os.readlink("/proc/self/ns/net")


def test_a_lab_with_a_default_route_starts_nothing() -> None:
    with Lab.create(f"route-{os.getpid()}", owner=os.getpid()) as lab:
        first = lab.start_host("gpu-1")
        run(["ip", "-n", lab.namespace, "route", "add", "default", "via", "10.89.0.1", "dev", "podman1"])
        for refused in (lambda: lab.start_host("gpu-2"), lambda: first.ssh("true"), lambda: first.ansible("ping")):
            with pytest.raises(LabError, match="has a way out"):
                refused()
        assert lab.host_names() == ["gpu-1"]


def test_an_address_off_the_bridge_is_not_connected_to(lab: Lab, shared_gpu_host: Host) -> None:
    with pytest.raises(LabError, match="not an address of the lab's network"):
        lab.connect("192.0.2.1", 22)


def test_a_connection_is_made_inside_the_lab_and_this_thread_stays_outside(lab: Lab, shared_gpu_host: Host) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with lab.connect(shared_gpu_host.address, 22) as connection:
        assert connection.recv(4) == b"SSH-"
    assert os.readlink("/proc/thread-self/ns/net") == before
    with pytest.raises(OSError), socket.socket() as outside:
        outside.settimeout(0.2)
        outside.bind((shared_gpu_host.address, 0))


def test_hosts_know_each_other_by_name(lab: Lab, start_gpu_host: Callable[..., Host]) -> None:
    first, second = start_gpu_host("one"), start_gpu_host("two")
    assert first.exec(["getent", "hosts", "two"]).stdout.split()[0] == second.address


def test_a_host_has_the_device_nodes_of_eight_gpus(shared_gpu_host: Host) -> None:
    nodes = shared_gpu_host.exec("ls -d /dev/nvidia*").stdout.split()
    gpus = [node for node in nodes if re.fullmatch(r"/dev/nvidia\d+", node)]
    assert gpus == [f"/dev/nvidia{number}" for number in range(8)]
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps"} <= set(nodes)


def test_a_holder_of_a_device_node_is_seen_and_can_map_it(shared_gpu_host: Host) -> None:
    script = (
        "import mmap, os, time; node = os.open('/dev/nvidia3', os.O_RDWR); "
        "kept = mmap.mmap(node, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ); print('up', flush=True); "
        "time.sleep(60)"
    )
    command = shared_gpu_host.enter(["python3", "-c", script], user="engineer")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "up\n"
        (process,) = shared_gpu_host.find("import mmap")
        assert process.uid == 1000
        fuser = shared_gpu_host.exec("fuser /dev/nvidia3 2> /dev/null").stdout.split()
        assert fuser == [str(process.pid)]
        assert "/dev/nvidia3" in shared_gpu_host.exec(["cat", f"/proc/{process.pid}/maps"]).stdout
        assert shared_gpu_host.exec("fuser /dev/nvidia4 2> /dev/null", check=False).stdout == ""
        holder.kill()


def test_minor_numbers_stand_in_another_order_than_indices(shared_gpu_host: Host) -> None:
    minors = [gpu.minor for gpu in shared_gpu_host.state.gpus()]
    assert sorted(minors) == list(range(8))
    assert minors != list(range(8))


def test_a_host_sees_its_gpus_through_nvidia_ml_py_and_the_memory_of_a_process(shared_gpu_host: Host) -> None:
    script = """
import os, sys
sys.path.insert(0, "/opt")
import pynvml
from simulator.gpu_state import GpuState
held = GpuState("/run/simulated-gpu").allocate(5, 1024)
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(5)
(process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
print(pynvml.nvmlDeviceGetCount(), process.pid == os.getpid(), process.usedGpuMemory // 2**20)
"""
    assert shared_gpu_host.exec(["python3", "-c", script]).stdout.split() == ["8", "True", "1024"]


def test_a_host_has_nvidia_smi(shared_gpu_host: Host) -> None:
    listed = shared_gpu_host.ssh("nvidia-smi -L", user="engineer").stdout.splitlines()
    assert [line.split(":")[0] for line in listed] == [f"GPU {index}" for index in range(8)]


def test_a_frozen_process_is_in_state_d_and_outlives_sigkill_until_it_thaws(gpu_host: Host) -> None:
    gpu_host.exec("sleep 600 > /dev/null 2>&1 &")
    (sleeper,) = gpu_host.find("sleep 600")
    gpu_host.freeze(sleeper.pid)
    gpu_host.kill(sleeper.pid)
    time.sleep(0.3)
    frozen = gpu_host.process(sleeper.pid)
    assert frozen is not None and frozen.state == "D"
    gpu_host.thaw(sleeper.pid)
    deadline = time.monotonic() + 2
    while gpu_host.alive(sleeper.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_host_with_a_frozen_process_is_removed(lab: Lab) -> None:
    host = lab.start_host("frozen")
    host.exec("sleep 600 > /dev/null 2>&1 &")
    (sleeper,) = host.find("sleep 600")
    host.freeze(sleeper.pid)
    lab.stop_hosts(["frozen"])
    assert not os.path.exists(f"/proc/{sleeper.outside_pid}")


def test_the_next_process_gets_the_pid_that_was_forced(gpu_host: Host) -> None:
    gpu_host.force_next_pid(7000)
    assert gpu_host.exec("echo $$").stdout.strip() == "7000"


def test_a_pid_is_used_again_by_another_process(gpu_host: Host) -> None:
    first = gpu_host.start_with_pid(8000, ["sleep", "600"])
    gpu_host.kill(8000, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while gpu_host.process(8000) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = gpu_host.start_with_pid(8000, ["sleep", "700"])
    assert (first.pid, first.command) == (8000, ("sleep", "600"))
    assert (second.pid, second.command) == (8000, ("sleep", "700"))
    assert second.start_ticks > first.start_ticks
    assert gpu_host.cgroup in gpu_host.exec(["cat", "/proc/8000/cgroup"]).stdout
    with pytest.raises(LabError, match="8000 is in use"):
        gpu_host.force_next_pid(8000)


def test_the_machine_sees_the_processes_of_its_host_by_their_cgroup(shared_gpu_host: Host) -> None:
    sshd = next(process for process in shared_gpu_host.processes() if process.comm == "sshd")
    with open(f"/proc/{sshd.outside_pid}/cgroup") as file:
        assert f":{shared_gpu_host.cgroup}/system.slice/ssh.service" in file.read()
    assert shared_gpu_host.process(1).outside_pid == shared_gpu_host.init


def test_a_command_in_a_host_is_in_its_cgroup_and_has_a_fresh_environment(shared_gpu_host: Host) -> None:
    seen = shared_gpu_host.exec(
        "cat /proc/self/cgroup; env; id -un; pwd", environment={"WORD": "two words"}, user="engineer"
    )
    assert f":name=systemd:{shared_gpu_host.cgroup}\n" in seen.stdout or f"0::{shared_gpu_host.cgroup}" in seen.stdout
    assert "WORD=two words" in seen.stdout
    assert "LAB_" not in seen.stdout and "ANSIBLE" not in seen.stdout
    assert seen.stdout.split()[-2:] == ["engineer", "/home/engineer"]


def test_an_ansible_module_runs_over_ssh_as_root_and_as_a_user_with_sudo(shared_gpu_host: Host) -> None:
    for user in ("root", "engineer"):
        result = shared_gpu_host.ansible("ansible.builtin.command", {"cmd": "id -un"}, user=user)
        assert result["stdout"] == "root"


def test_a_playbook_runs_against_its_host_with_the_repositorys_group_vars(
    shared_gpu_host: Host, tmp_path: object
) -> None:
    play = f"{tmp_path}/play.yml"
    with open(play, "w") as file:
        file.write(
            "- hosts: blackwell\n  tasks:\n"
            '    - ansible.builtin.debug:\n        msg: "{{ inventory_hostname }} {{ word }} {{ ansible_become }}"\n'
        )
    done = shared_gpu_host.playbook(play, {"word": "hello"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared hello True" in done.stdout


def test_a_server_starts_by_nohup_over_ssh_and_as_a_unit_and_answers(start_gpu_host: Callable[..., Host]) -> None:
    for how in ("nohup", "unit"):
        host = start_gpu_host()
        server = host.start_server(tp=2, how=how, settings={"SPEED": 5})
        titles = [process.line for process in server.tree()]
        assert [title for title in titles if title.startswith("sglang::scheduler")], titles
        assert server.request("/health")[0] == 200
        assert host.state.used_mib(0) > 1024


def test_a_process_that_ssh_started_outlives_its_session(gpu_host: Host) -> None:
    process = gpu_host.start("sleep 600", user="engineer")
    assert gpu_host.process(process.pid).command == ("sleep", "600")
    assert gpu_host.find("sshd: engineer") == []


def test_down_removes_everything_of_a_lab_and_only_that(lab: Lab, shared_gpu_host: Host) -> None:
    other = Lab.create(f"down-{os.getpid()}", owner=os.getpid())
    host = other.start_host("gpu-1")
    init, cgroup = host.init, host.cgroup
    other.down()
    assert not other.folder.exists()
    assert not os.path.exists(f"/run/netns/{other.namespace}")
    assert not os.path.exists(f"/proc/{init}")
    assert not os.path.exists(f"/sys/fs/cgroup/systemd{cgroup}")
    with open("/proc/self/mounts") as mounts:
        assert str(other.folder) not in mounts.read()
    assert shared_gpu_host.ssh("true").returncode == 0


def test_a_lab_whose_run_was_killed_is_swept_by_the_next(lab: Lab) -> None:
    name = f"dead-{os.getpid()}"
    script = (
        f"import os; from tests.lab.lab import Lab; Lab.create({name!r}, owner=os.getpid()); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)
    assert Lab(name).folder.exists()
    assert sweep() == [name]
    assert not Lab(name).folder.exists()
    assert lab.folder.exists()


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_without_podman_tests_are_skipped_with_what_to_install_but_fail_in_ci(ci: str, status: int) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", "neither_the_lab"]
    environment = {"PATH": "/nonexistent", "CI": ci, "HOME": "/root"}
    done = subprocess.run(words, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout
    assert "apt-get install --no-install-recommends podman" in done.stdout


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LabUnavailableError, match=r"apt-get install --no-install-recommends podman runc iproute2"):
        require("podman", "runc", "ip")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabUnavailableError, match="run this as root"):
        require("podman")
