"""Units and containers that run a server: whether one may be stopped as a whole, and stopping it.

A manager is used only if its main process is a server of ours (or a wrapper whose only children are) and every
member of its control group is to be ended too. Everything else is ended process by process, and a manager that would
start it again is named.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from .child import Completed, run_command
from .deadline import Deadline
from .processes import Finding
from .procfs import Proc, Process

# Units that keep more than a server alive, whatever their main process looks like.
NEVER_STOPPED = re.compile(
    r"^(?:ssh|sshd|cron|crond|atd|dbus|docker|containerd|podman|crio|kubelet|lxc|supervisor|supervisord|getty@.*|"
    r"serial-getty@.*|user@.*|systemd-.*)\.service$"
)
CONTAINER = re.compile(r"(?:^|[/-])(docker|libpod)[-/]([0-9a-f]{64})(?:\.scope)?(?:/|$)")
RUNTIMES = {"docker": "docker", "libpod": "podman"}
COMMAND_SECONDS = 5.0
GUESTS_UNIT = "guest's unit"


@dataclass(frozen=True)
class Manager:
    """A systemd unit or a container, as its own manager describes it.

    ``restarts`` is the restart policy where it has one that would bring an ended process back, else empty. A unit of
    a guest belongs to a systemd that cannot be asked from here.
    """

    kind: str  # 'unit' | 'container' | "guest's unit"
    name: str
    main_pid: int
    restarts: str
    program: str  # systemctl, docker or podman

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def stop_command(self) -> str:
        """What a person would type to stop it."""
        where = " inside the guest" if self.kind == GUESTS_UNIT else ""
        return f"{self.program} stop {self.name}{where}"


@dataclass(frozen=True)
class Stop:
    """A manager that will be asked to stop, and the pids that end with it."""

    manager: Manager
    pids: frozenset[int]


Runner = Callable[[Sequence[str], Deadline], Completed]


def unit_of(cgroup: str) -> str:
    """The system service that owns a control group, or an empty string: never a scope, never a user's manager."""
    parts = cgroup.split("/")
    services = [part for part in parts if part.endswith(".service")]
    if not services or any(part.endswith(".scope") or part.startswith("user@") for part in parts):
        return ""
    return services[0]


def container_of(cgroups: Iterable[str]) -> tuple[str, str]:
    """Runtime command and container id that own one of these control groups, or two empty strings."""
    for cgroup in cgroups:
        found = CONTAINER.search(cgroup)
        if found:
            return RUNTIMES[found.group(1)], found.group(2)
    return "", ""


class Managers:
    """Asks systemd and container runtimes, each question under a deadline. ``run`` is replaced in tests.

    ``notes`` has a sentence for each container whose other processes end with the server that is its first one.
    """

    def __init__(self, proc: Proc, run: Runner = run_command) -> None:
        self._proc = proc
        self._run = run
        self.unanswered: list[str] = []
        self._silent_units: set[str] = set()
        self.notes: list[str] = []

    def of(self, process: Process, deadline: Deadline) -> Manager | None:
        """The manager that keeps this process, or None. A manager that does not answer is noted."""
        program, container = container_of(self._proc.cgroups(process.pid))
        own = self._proc.cgroups("self")
        if container and (self._is_foreign(process) or (own and container != container_of(own)[1])):
            return self._container(program, container, deadline)
        unit = unit_of(self._proc.systemd_cgroup(process.pid))
        if not unit or self._is_foreign(process):
            return None
        return self._unit(unit, deadline)

    def _is_foreign(self, process: Process) -> bool:
        """Whether it lives in another PID namespace: its systemd is not the one that we could ask."""
        return self._proc.pid_namespace(process.pid) != self._proc.pid_namespace()

    def _guests_unit(self, process: Process, processes: Mapping[int, Process]) -> Manager | None:
        """The unit of a guest's own systemd that started this process, or None."""
        unit = unit_of(self._proc.systemd_cgroup(process.pid))
        parent = processes.get(process.ppid)
        if not unit or not self._is_foreign(process) or parent is None or parent.exe_name != "systemd":
            return None
        return Manager(GUESTS_UNIT, unit, process.pid, "which is not known here", "systemctl")

    def _ask(self, argv: list[str], deadline: Deadline) -> str | None:
        answer = self._run(argv, deadline.capped(COMMAND_SECONDS))
        if answer.returncode is None:
            self.unanswered.append(answer.trouble)
        return answer.stdout if answer.returncode == 0 else None

    def _unit(self, unit: str, deadline: Deadline) -> Manager | None:
        asked = len(self.unanswered)
        text = self._ask(["systemctl", "show", unit, "-p", "Id,MainPID,Restart,LoadState"], deadline)
        if len(self.unanswered) > asked:
            self._silent_units.add(unit)
        facts = dict(line.split("=", 1) for line in (text or "").splitlines() if "=" in line)
        if facts.get("LoadState") != "loaded":
            return None
        restart = facts.get("Restart", "no")
        return Manager("unit", facts["Id"], int(facts["MainPID"]), "" if restart == "no" else restart, "systemctl")

    def _container(self, program: str, container: str, deadline: Deadline) -> Manager | None:
        template = "{{.State.Pid}} {{.HostConfig.RestartPolicy.Name}}"
        words = (self._ask([program, "inspect", "--format", template, container], deadline) or "").split()
        if not words or not words[0].isdigit():
            return None
        policy = words[1] if len(words) > 1 else "no"
        return Manager("container", container[:12], int(words[0]), "" if policy == "no" else policy, program)

    def members(self, process: Process, processes: Mapping[int, Process]) -> set[int]:
        """Pids in the control group of a manager's main process, groups below it included."""
        home = self._proc.systemd_cgroup(process.pid)
        found = set()
        for other in processes.values():
            group = self._proc.systemd_cgroup(other.pid)
            if group == home or group.startswith(home.rstrip("/") + "/"):
                found.add(other.pid)
        return found

    def plan(
        self, chosen: Mapping[int, Finding], processes: Mapping[int, Process], deadline: Deadline
    ) -> tuple[list[Stop], list[Manager]]:
        """Managers to stop as a whole, and managers that are left alone though they would restart a server."""
        stops: dict[str, Stop] = {}
        left: dict[str, Manager] = {}
        for finding in chosen.values():
            if not finding.main:
                continue
            manager = self.of(finding.process, deadline)
            silent = unit_of(self._proc.systemd_cgroup(finding.process.pid))
            if manager is None and silent in self._silent_units and not NEVER_STOPPED.match(silent):
                unknown = "unknown, since systemctl does not answer"
                left[silent] = Manager("unit", silent, finding.process.pid, unknown, "systemctl")
            pids = self._stoppable(manager, chosen, processes) if manager is not None else set()
            if manager is not None and pids:
                stops.setdefault(manager.name, Stop(manager, frozenset(pids)))
                continue
            if manager is not None and manager.main_pid in chosen and manager.name not in left:
                if manager.restarts:
                    left[manager.name] = manager
                if manager.kind == "container":
                    self._note_company(manager, chosen, processes)
            unit = self._guests_unit(finding.process, processes)
            if unit is not None:
                left[unit.name] = unit
        return list(stops.values()), list(left.values())

    def _note_company(self, manager: Manager, chosen: Mapping[int, Finding], processes: Mapping[int, Process]) -> None:
        """Nothing in a container outlives its first process."""
        others = sorted(self.members(processes[manager.main_pid], processes) - set(chosen))
        names = ", ".join(f"{processes[pid].name} ({pid})" for pid in others)
        if names and processes[manager.main_pid].namespaced_pid == 1:
            self.notes.append(f"{manager.label} ends with its first process, the server, and with it {names}")

    def _stoppable(
        self, manager: Manager, chosen: Mapping[int, Finding], processes: Mapping[int, Process]
    ) -> set[int]:
        main = processes.get(manager.main_pid)
        if main is None or (manager.kind == "unit" and NEVER_STOPPED.match(manager.name)):
            return set()
        allowed = set(chosen)
        if main.pid not in chosen:
            children = [process.pid for process in processes.values() if process.ppid == main.pid]
            if not children or not all(pid in chosen and chosen[pid].main for pid in children):
                return set()
            allowed.add(main.pid)
        members = self.members(main, processes)
        return members if members and members <= allowed else set()

    def stop(self, manager: Manager, grace: float, deadline: Deadline) -> None:
        """Begin a stop without waiting for its end; the caller waits on the processes."""
        if manager.kind == "unit":
            self._ask(["systemctl", "stop", "--no-block", manager.name], deadline)
        else:
            subprocess.Popen(
                [manager.program, "stop", "-t", str(max(1, math.ceil(grace))), manager.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def settle(self, manager: Manager, deadline: Deadline) -> str:
        """After its processes are gone: clear the failure that our own stop left. What is wrong, or nothing.

        SGLang's main ends itself by SIGKILL, so that a stop that was asked for reads as a failure.
        """
        if manager.kind != "unit":
            return ""
        poll = Deadline(min(COMMAND_SECONDS, deadline.remaining()))
        state = ""
        while not poll.expired():
            state = self._state(manager, poll)
            if state in ("inactive", "failed"):
                if state == "failed":
                    self._ask(["systemctl", "reset-failed", manager.name], deadline)
                return ""
            if not state:
                break
            time.sleep(0.05)
        return f"{manager.label} is {state or 'not answering'} after its processes ended; see systemctl status"

    def _state(self, manager: Manager, deadline: Deadline) -> str:
        answer = self._ask(["systemctl", "show", manager.name, "-p", "ActiveState", "--value"], deadline)
        return (answer or "").strip()
