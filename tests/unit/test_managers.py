"""When a unit or a container may be stopped as a whole, with systemd's and podman's answers made by hand."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_host.child import Completed
from gpu_host.deadline import Deadline
from gpu_host.managers import Managers, container_of, unit_of
from gpu_host.processes import Finding, Patterns, classify
from gpu_host.procfs import Proc, Process

from tests.unit.fake_proc import FakeProc

SERVER = ["/usr/bin/python3", "-m", "sglang.launch_server"]
SYSTEMD = "/usr/lib/systemd/systemd"
CONTAINER = "c0ffee" * 10 + "abcd"


class Host:
    """A fake /proc, and managers that answer from a table: unit -> (main pid, restart policy)."""

    def __init__(self, root: Path) -> None:
        self.fake = FakeProc(root)
        self.proc = Proc(str(root))
        self.units: dict[str, tuple[int, str]] = {}
        self.containers: dict[str, tuple[int, str]] = {}
        self.states: list[str] = ["inactive"]
        self.asked: list[str] = []
        self.silent = False

    def run(self, argv: Sequence[str], deadline: Deadline) -> Completed:
        self.asked.append(" ".join(argv))
        if self.silent:
            return Completed(None, "", "", f"{argv[0]} did not end in time")
        if argv[:2] == ["systemctl", "show"] and "ActiveState" in argv:
            return Completed(0, (self.states.pop(0) if len(self.states) > 1 else self.states[0]) + "\n", "", "")
        if argv[:2] == ["systemctl", "show"]:
            if argv[2] not in self.units:
                return Completed(0, "LoadState=not-found\n", "", "")
            main, restart = self.units[argv[2]]
            return Completed(0, f"Restart={restart}\nMainPID={main}\nId={argv[2]}\nLoadState=loaded\n", "", "")
        if argv[1] == "inspect" and argv[-1] in self.containers:
            main, policy = self.containers[argv[-1]]
            return Completed(0, f"{main} {policy}\n", "", "")
        return Completed(0 if argv[0] == "systemctl" else 125, "", "", "")

    def plan(self, spare: frozenset[int] = frozenset()) -> tuple[dict[str, frozenset[int]], list[str]]:
        """Names of what would be stopped with their pids, and of what is left though it restarts its server."""
        processes: dict[int, Process] = self.proc.snapshot()
        findings = classify(processes, self.proc, Patterns(), own_pid=9999)
        chosen: dict[int, Finding] = {pid: one for pid, one in findings.items() if one.ours and pid not in spare}
        self.managers = Managers(self.proc, self.run)
        stops, left = self.managers.plan(chosen, processes, Deadline(5))
        return {stop.manager.name: stop.pids for stop in stops}, [manager.name for manager in left]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def serve(host: Host, main: int = 100, cgroup: str = "/system.slice/sglang.service", ppid: int = 1) -> None:
    host.fake.add(main, ppid=ppid, argv=SERVER, cgroup=cgroup)
    host.fake.add(main + 1, ppid=main, argv=["sglang::scheduler"], exe="/usr/bin/python3", cgroup=cgroup)


def test_a_unit_whose_main_is_the_server_is_stopped_as_a_whole(host: Host) -> None:
    serve(host)
    host.units["sglang.service"] = (100, "always")
    assert host.plan() == ({"sglang.service": frozenset({100, 101})}, [])


def test_a_unit_whose_main_is_a_wrapper_with_nothing_but_the_server_is_stopped_as_a_whole(host: Host) -> None:
    host.fake.add(90, argv=["/bin/bash", "/opt/start.sh"], cgroup="/system.slice/sglang.service")
    serve(host, ppid=90)
    host.units["sglang.service"] = (90, "always")
    assert host.plan() == ({"sglang.service": frozenset({90, 100, 101})}, [])


def test_a_wrapper_with_another_child_keeps_its_unit(host: Host) -> None:
    host.fake.add(90, argv=["/bin/bash", "/opt/start.sh"], cgroup="/system.slice/sglang.service")
    host.fake.add(91, ppid=90, argv=["/usr/bin/tail", "-f", "x"], cgroup="/system.slice/sglang.service")
    serve(host, ppid=90)
    host.units["sglang.service"] = (90, "always")
    assert host.plan() == ({}, [])


def test_a_unit_with_a_foreign_member_is_not_stopped_and_told_because_it_restarts_its_server(host: Host) -> None:
    serve(host)
    host.fake.add(110, argv=["/usr/bin/python3", "prep.py"], cgroup="/system.slice/sglang.service/job")
    host.units["sglang.service"] = (100, "on-failure")
    assert host.plan() == ({}, ["sglang.service"])


def test_a_unit_with_a_member_that_is_to_live_is_not_stopped(host: Host) -> None:
    serve(host)
    host.units["sglang.service"] = (100, "no")
    assert host.plan(spare=frozenset({101})) == ({}, [])


@pytest.mark.parametrize("unit", ["ssh.service", "cron.service", "docker.service", "supervisord.service"])
def test_a_unit_that_keeps_more_than_a_server_is_never_stopped(unit: str, host: Host) -> None:
    serve(host, cgroup=f"/system.slice/{unit}")
    host.units[unit] = (100, "no")
    assert host.plan() == ({}, [])


def test_a_server_in_the_cgroup_of_ssh_says_nothing_about_ssh(host: Host) -> None:
    host.fake.add(50, argv=["sshd"], exe="/usr/sbin/sshd", cgroup="/system.slice/ssh.service")
    serve(host, cgroup="/system.slice/ssh.service")
    host.units["ssh.service"] = (50, "on-failure")
    assert host.plan() == ({}, [])


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/sglang.service", "sglang.service"),
        ("/system.slice/sglang.service/worker", "sglang.service"),
        ("/system.slice/system-sglang.slice/sglang@0.service", "sglang@0.service"),
        ("/user.slice/user-0.slice/session-3.scope", ""),
        ("/user.slice/user-0.slice/user@0.service/app.slice/sglang.service", ""),
        ("/system.slice/run-r1.scope", ""),
        ("/", ""),
    ],
)
def test_only_a_system_service_owns_a_control_group(cgroup: str, unit: str) -> None:
    assert unit_of(cgroup) == unit


@pytest.mark.parametrize(
    ("cgroup", "program"),
    [
        (f"/docker/{CONTAINER}", "docker"),
        (f"/system.slice/docker-{CONTAINER}.scope", "docker"),
        (f"/machine.slice/libpod-{CONTAINER}.scope/container", "podman"),
        (f"/libpod_parent/libpod-{CONTAINER}", "podman"),
        ("/lxc/101", ""),
        (f"/kubepods/pod1/{CONTAINER}", ""),
    ],
)
def test_a_container_is_told_by_the_name_that_its_runtime_gives_the_control_group(cgroup: str, program: str) -> None:
    assert container_of([cgroup])[0] == program


def test_a_container_whose_first_process_is_the_server_is_stopped_as_a_whole_by_its_runtime(host: Host) -> None:
    cgroup = f"/machine.slice/libpod-{CONTAINER}.scope"
    host.fake.add(100, argv=SERVER, cgroup=cgroup, own_namespace=True, namespaced=1)
    host.fake.add(101, ppid=100, argv=["sglang::scheduler"], exe="/usr/bin/python3", cgroup=cgroup, own_namespace=True)
    host.containers[CONTAINER] = (100, "always")
    assert host.plan() == ({CONTAINER[:12]: frozenset({100, 101})}, [])


def test_a_container_that_runs_an_init_keeps_it(host: Host) -> None:
    cgroup = f"/docker/{CONTAINER}"
    host.fake.add(90, argv=["/sbin/init"], cgroup=cgroup, own_namespace=True, namespaced=1)
    host.fake.add(91, ppid=90, argv=["/usr/sbin/cron"], cgroup=cgroup, own_namespace=True)
    host.fake.add(100, ppid=90, argv=SERVER, cgroup=cgroup, own_namespace=True)
    host.containers[CONTAINER] = (90, "always")
    assert host.plan() == ({}, [])


def test_a_container_that_its_runtime_does_not_know_is_not_stopped_as_a_whole(host: Host) -> None:
    host.fake.add(100, argv=SERVER, cgroup=f"/docker/{CONTAINER}", own_namespace=True, namespaced=1)
    assert host.plan() == ({}, [])


def test_a_container_without_a_pid_namespace_of_its_own_is_stopped_as_a_whole_too(host: Host) -> None:
    host.fake.add(100, argv=SERVER, cgroup=f"/docker/{CONTAINER}")
    host.containers[CONTAINER] = (100, "always")
    assert host.plan() == ({CONTAINER[:12]: frozenset({100})}, [])


def test_what_ends_with_the_first_process_of_its_container_is_told(host: Host) -> None:
    cgroup = f"/docker/{CONTAINER}"
    host.fake.add(100, argv=SERVER, cgroup=cgroup, own_namespace=True, namespaced=1)
    host.fake.add(110, ppid=50, argv=["/usr/bin/python3", "prep.py"], cgroup=cgroup, own_namespace=True, namespaced=7)
    host.containers[CONTAINER] = (100, "always")
    assert host.plan() == ({}, [CONTAINER[:12]])
    (note,) = host.managers.notes
    assert note.endswith("and with it python3 prep.py (110)")


@pytest.mark.parametrize("guest", [f"/docker/{CONTAINER}", "/lxc/101"])
def test_the_unit_of_a_guests_systemd_is_told_and_not_taken_for_one_of_ours(guest: str, host: Host) -> None:
    host.fake.add(90, argv=["/sbin/init"], exe=SYSTEMD, cgroup=f"{guest}/init.scope", own_namespace=True, namespaced=1)
    cgroup = f"{guest}/system.slice/sglang.service"
    host.fake.add(100, ppid=90, argv=SERVER, cgroup=cgroup, own_namespace=True, namespaced=7)
    host.units["sglang.service"] = (100, "always")
    assert host.plan() == ({}, ["sglang.service"])
    assert not [asked for asked in host.asked if asked.startswith("systemctl")]


def test_inside_a_container_its_runtime_is_not_asked(host: Host) -> None:
    host.fake.add(1, ppid=0, argv=["/sbin/init"], exe=SYSTEMD, cgroup=f"/docker/{CONTAINER}")
    host.fake.add(100, argv=SERVER, cgroup=f"/docker/{CONTAINER}")
    host.plan()
    assert not [asked for asked in host.asked if asked.startswith("docker")]


def test_a_manager_that_does_not_answer_is_told_since_it_may_restart_its_server(host: Host) -> None:
    serve(host)
    host.silent = True
    assert host.plan() == ({}, ["sglang.service"])
    assert host.managers.unanswered == ["systemctl did not end in time"]


def test_our_own_stop_is_cleared_when_it_reads_as_a_failure(host: Host) -> None:
    serve(host)
    host.units["sglang.service"] = (100, "no")
    host.plan()
    manager = host.managers.of(host.proc.snapshot()[100], Deadline(5))
    assert manager is not None
    host.states = ["deactivating", "failed"]
    assert host.managers.settle(manager, Deadline(5)) == ""
    assert "systemctl reset-failed sglang.service" in host.asked


def test_a_unit_that_does_not_come_to_rest_is_told(host: Host) -> None:
    serve(host)
    host.units["sglang.service"] = (100, "no")
    host.plan()
    manager = host.managers.of(host.proc.snapshot()[100], Deadline(5))
    assert manager is not None
    host.states = ["activating"]
    assert "unit sglang.service is activating" in host.managers.settle(manager, Deadline(0.2))
