"""One host of a lab: run commands on it, watch its processes, break it, run Ansible against it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab import processes
from tests.lab.command import LabError, run, wait_for
from tests.lab.image import CACHE, REPOSITORY, LabUnavailableError
from tests.lab.processes import Process
from tests.lab.server import Server, launch

if TYPE_CHECKING:
    from simulator.gpu_state import GpuState
    from tests.lab.lab import Lab

STATE = "/run/simulated-gpu"
SIMULATOR = "/opt/simulator"
NVML = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
BOOT_SECONDS = 30.0
# The first process of a host without systemd: it starts sshd, cron, and something that takes what is sent to /dev/log.
OTHER_INIT = """
mkdir -p /run/sshd
python3 -c '
import socket
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.bind("/dev/log")
with open("/var/log/syslog", "ab", buffering=0) as file:
    while True:
        file.write(log.recv(1 << 16) + b"\\n")
' &
until [ -S /dev/log ]; do sleep 0.05; done; chmod 0666 /dev/log
/usr/sbin/sshd -D &
/usr/sbin/cron -f &
wait
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FREEZER = Path("/sys/fs/cgroup/freezer")

# Run the rest of the command line in the container's cgroups, and then in some of its namespaces.
JOIN = """
pid=$1; shift
while IFS=: read -r number names path; do
  case "$number:$names" in
    0:) root=/sys/fs/cgroup/unified; [ -d $root ] || root=/sys/fs/cgroup ;;
    *:name=systemd) root=/sys/fs/cgroup/systemd ;;
    *) root=/sys/fs/cgroup/$names ;;
  esac
  echo $$ > "$root${path%/init.scope}/cgroup.procs" || echo $$ > "$root$path/cgroup.procs"
done < /proc/$pid/cgroup 2> /dev/null
exec nsenter --target "$pid" NAMESPACES -- "$@"
"""
ENTER = JOIN.replace("NAMESPACES", "--mount --uts --ipc --net --pid --cgroup")
ENTER_PIDS = JOIN.replace("NAMESPACES", "--pid")

# The counter belongs to the PID namespace of the process that writes it, but is writable in the outer /proc only:
# opened here, written by the last process before the wanted one.
FORCE_PID = """
pid=$1; last=$2; shift 2
exec 9> /proc/sys/kernel/ns_last_pid
exec nsenter --target "$pid" --mount --uts --ipc --net --cgroup -- env -i "PATH=$PATH" HOME=/root sh -c '
  last=$1; shift
  echo "$last" >&9
  exec 9>&-
  "$@" < /dev/null > /dev/null 2>&1 &
  echo $!' sh "$last" "$@"
"""


class Host:
    """One running host of a lab."""

    def __init__(self, lab: Lab, name: str, address: str, gpus: int) -> None:
        self.lab = lab
        self.name = name
        self.address = address
        self.gpus = gpus
        self.folder = lab.folder / "hosts" / name
        self.mounts: dict[Path, str] = {}  # read-only, besides the simulator: place here, place on the host
        self.systemd = True  # else sshd and cron alone

    # Start

    def run_arguments(self) -> list[str]:
        """Arguments of `podman run`, up to the image."""
        arguments = ["run", "--detach", "--pull=never", f"--name={self.name}", f"--hostname={self.name}"]
        arguments += [f"--systemd={'always' if self.systemd else 'false'}", "--cap-add=SYS_PTRACE"]
        # An address that is used again keeps its MAC: the neighbours' caches stay true.
        hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        arguments += [f"--network=lab:ip={self.address},mac={hardware}"]
        arguments += [f"--volume={self.lab.folder}/key.pub:/etc/ssh/lab_keys:ro"]
        arguments += [f"--volume={self.lab.folder}/logind.conf:/etc/systemd/logind.conf.d/lab.conf:ro"]
        arguments += [f"--volume={self.state_folder}:{STATE}"]
        read_only = {**_simulator_mounts(), **self.mounts}
        arguments += [f"--volume={source}:{target}:ro" for source, target in read_only.items()]
        return arguments + [f"--device={source}:/dev/{node}:rwm" for node, source in _device_nodes(self.gpus).items()]

    def first_process(self) -> list[str]:
        """The command that `podman run` starts, after the image."""
        return ["/lib/systemd/systemd"] if self.systemd else ["/bin/bash", "-c", OTHER_INIT]

    def save(self, init: int) -> None:
        """Remember where the host is, for other processes that open this lab."""
        facts = {"address": self.address, "gpus": self.gpus, "init": init, "cgroup": self._cgroup_of(init)}
        (self.folder / "host.json").write_text(json.dumps(facts))

    def power_off(self) -> None:
        """Switch the host off at once. What it has on its disk stays; `boot` starts it again."""
        self.lab.podman("stop", "--time", "0", self.name)

    def boot(self, seconds: float = BOOT_SECONDS) -> None:
        """Start a host that was switched off, and wait until it is up, with what it begins at boot."""
        self.lab.podman("start", self.name)
        self.save(int(self.lab.podman("inspect", "--format", "{{.State.Pid}}", self.name).stdout))
        self.wait_until_up(seconds)

    def wait_until_up(self, seconds: float = BOOT_SECONDS) -> None:
        """Wait until sshd answers and systemd, where there is one, has finished; LabError when that takes longer."""
        deadline = time.monotonic() + seconds
        wait_for(lambda: self._ssh_banner().startswith(b"SSH-2.0"), f"sshd on {self.name}", deadline)
        if self.systemd:
            wait_for(self._has_booted, f"systemd on {self.name}", deadline)

    def _ssh_banner(self) -> bytes:
        try:
            with self.lab.connect(self.address, 22) as connection:
                return connection.recv(20)
        except OSError:
            return b""

    def _has_booted(self) -> bool:
        done = self.exec(["systemctl", "is-system-running"], check=False)
        if done.stdout.strip() == "degraded":
            failed = self.exec(["systemctl", "list-units", "--failed", "--plain"]).stdout
            raise LabError(f"On {self.name} a unit failed at boot:\n{failed}")
        return done.stdout.strip() == "running"

    # Commands

    def ssh(
        self, command: str, user: str = "root", check: bool = True, timeout: float = 60, tty: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command in a new ssh session. Raises LabError on a non-zero status unless `check` is off."""
        return run(self.ssh_command(command, user, tty), check=check, timeout=timeout)

    def ssh_command(self, command: str, user: str = "root", tty: bool = False) -> list[str]:
        """The command line of `ssh`, for sessions that a test keeps open itself."""
        self.lab.check_no_way_out(self.address)
        options = ["-tt"] if tty else []
        target = [f"{user}@{self.address}", command]
        return self.lab.enter(["ssh", *self.lab.ssh_options(), *options, "-i", str(self.lab.folder / "key"), *target])

    def exec(
        self,
        command: Sequence[str] | str,
        check: bool = True,
        timeout: float = 60,
        environment: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `podman exec` does, without its 0.2 s: no sshd, no session, parent pid 0.

        A string goes to `sh -c`. The environment is a fresh one plus `environment`.
        """
        return run(self.enter(command, environment, user), check=check, timeout=timeout)

    def enter(
        self, command: Sequence[str] | str, environment: Mapping[str, str] | None = None, user: str = "root"
    ) -> list[str]:
        """The command line that runs a command in the host's cgroups and namespaces."""
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        if user != "root":
            words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--", *words]
        home = "/root" if user == "root" else f"/home/{user}"
        fresh = {"PATH": PATH, "HOME": home, "USER": user, "LANG": "C.UTF-8"} | dict(environment or {})
        clean = ["env", "-i", f"--chdir={home}", *(f"{name}={value}" for name, value in fresh.items())]
        return ["sh", "-c", ENTER, "sh", str(self.init), *clean, *words]

    def start(self, command: str, environment: Mapping[str, str] | None = None, user: str = "root") -> Process:
        """Start a shell command by nohup over ssh, which ends afterwards; returns its process."""
        words = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (environment or {}).items())
        started = self.ssh(f"{words}nohup {command} > /dev/null 2>&1 < /dev/null & echo $!", user=user)
        return self._after_exec(int(started.stdout), command)

    def _after_exec(self, pid: int, command: str) -> Process:
        """The process once it is the wanted program and no longer the shell that started it."""
        deadline = time.monotonic() + 5
        while True:
            process = self.process(pid)
            if process is None:
                raise LabError(f"On {self.name} this ended at once: {command}")
            if process.command[:1] != ("nohup",) and "echo $!" not in process.line:
                return process
            if time.monotonic() > deadline:
                raise LabError(f"On {self.name} this did not start: {command}")
            time.sleep(0.01)

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Write a file on the host, with the folders above it."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        run(self.enter(["sh", "-c", script, "sh", path, mode]), stdin=text)

    def read(self, path: str) -> str:
        return self.exec(["cat", path]).stdout

    # Processes

    @property
    def init(self) -> int:
        """Pid of the host's systemd, as the machine sees it."""
        return int(json.loads((self.folder / "host.json").read_text())["init"])

    @property
    def cgroup(self) -> str:
        """The host's cgroup on the machine: what a hypervisor knows a guest by. Known also once the host is dead."""
        return str(json.loads((self.folder / "host.json").read_text())["cgroup"])

    def _cgroup_of(self, init: int) -> str:
        for line in Path(f"/proc/{init}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names in ("name=systemd", "") and path != "/":
                return path.removesuffix("/init.scope")
        raise LabError(f"{self.name} has no cgroup of its own.")

    def processes(self) -> list[Process]:
        """Every process of the host, in the order of their pids."""
        return processes.in_namespace(self.init)

    def process(self, pid: int) -> Process | None:
        return next((process for process in self.processes() if process.pid == pid), None)

    def find(self, text: str) -> list[Process]:
        """Processes whose command line contains the text."""
        return [process for process in self.processes() if text in process.line]

    def alive(self, pid: int) -> bool:
        """Whether a process of that pid is there and no zombie."""
        process = self.process(pid)
        return process is not None and process.state != "Z"

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal from outside."""
        os.kill(self._outside(pid), number)

    def _outside(self, pid: int) -> int:
        process = self.process(pid)
        if process is None:
            raise LabError(f"{self.name} has no process {pid}.")
        return process.outside_pid

    def freeze(self, pid: int) -> None:
        """Put a process into state D, where even SIGKILL does not end it, until `thaw`.

        Needs the freezer of cgroup v1; raises LabUnavailableError where the machine has none.
        """
        if not (FREEZER / "cgroup.procs").exists():
            raise LabUnavailableError(
                "State D needs the cgroup-v1 freezer: boot with systemd.unified_cgroup_hierarchy=0, "
                "or mount it: mount -t cgroup -o freezer freezer /sys/fs/cgroup/freezer"
            )
        group = self._freezer(pid)
        group.mkdir(parents=True)
        outside = self._outside(pid)
        (group / "cgroup.procs").write_text(str(outside))
        (group / "freezer.state").write_text("FROZEN")
        deadline = time.monotonic() + 5
        wait_for(lambda: (group / "freezer.state").read_text().strip() == "FROZEN", f"freezing {pid}", deadline)

    def thaw(self, pid: int) -> None:
        """Let a frozen process go on, or die of the SIGKILL that waits for it."""
        _thaw(self._freezer(pid))

    def thaw_all(self) -> None:
        for group in self._freezer(0).parent.glob("frozen-*"):
            _thaw(group)

    def _freezer(self, pid: int) -> Path:
        """The freezer group of one process, within the host's own."""
        return FREEZER / self.cgroup.lstrip("/") / f"frozen-{pid}"

    def force_next_pid(self, pid: int) -> None:
        """Make the host's next new process get this pid; LabError if a process has it.

        Whatever starts next takes it, so another process of the host can be quicker: `start_with_pid` tries again.
        """
        if self.process(pid) is not None:
            raise LabError(f"On {self.name} the pid {pid} is in use.")
        # A shell's own write: no process starts between the two namespaces.
        script = f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid"
        run(["nsenter", f"--target={self.init}", "--pid", "--", "sh", "-c", script])

    def start_with_pid(self, pid: int, command: Sequence[str], attempts: int = 20) -> Process:
        """Start a command under a given pid, in the background. LabError if it can't be had."""
        words = [str(self.init), str(pid - 1), *command]
        for _ in range(attempts):
            if self.process(pid) is not None:
                raise LabError(f"On {self.name} the pid {pid} is in use.")
            entered = ["sh", "-c", ENTER_PIDS, "sh", str(self.init), "sh", "-c", FORCE_PID, "sh", *words]
            got = int(run(entered, {"PATH": PATH}).stdout)
            if got == pid:
                return self._after_exec(pid, " ".join(command))
            if self.process(got) is not None:
                self.kill(got)
        raise LabError(f"On {self.name} another process took the pid {pid} in each of {attempts} attempts.")

    def start_server(self, *arguments: str, wait: bool = True, **options: Any) -> Server:
        """Start the SGLang stand-in; options as in `tests.lab.server.launch`. With `wait`, until it serves."""
        server = launch(self, *arguments, **options)
        return server.wait_until_ready() if wait else server

    # GPUs

    @property
    def state_folder(self) -> Path:
        """The state of the simulated GPUs, as seen from outside."""
        return self.folder / "state"

    @property
    def state(self) -> GpuState:
        from simulator.gpu_state import GpuState

        return GpuState(self.state_folder)

    def reset_state(self, minors: Sequence[int] | None = None) -> None:
        """Idle GPUs without faults. Only for a host whose GPUs nobody holds."""
        for entry in self.state_folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.state.create(gpus=self.gpus, minors=minors)

    # Ansible

    def ansible(
        self,
        module: str,
        arguments: Mapping[str, object] | None = None,
        check_mode: bool = False,
        user: str = "root",
        timeout: float = 120,
    ) -> dict[str, object]:
        """Run one module on the host over ssh; return its result, a failed one too."""
        results = self.folder / "results"
        shutil.rmtree(results, ignore_errors=True)
        words = ["ansible", self.name, "--inventory", str(self.lab.write_inventory(user)), "--module-name", module]
        words += ["--tree", str(results)]
        words += ["--args", json.dumps(dict(arguments))] if arguments else []
        words += ["--check"] if check_mode else []
        done = self._ansible(words, {}, timeout)
        try:
            return dict(json.loads((results / self.name).read_text()))
        except (OSError, ValueError) as error:
            raise LabError(
                f"{module} gave no result on {self.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            ) from error

    def playbook(
        self,
        path: str | Path,
        extra_vars: Mapping[str, object] | None = None,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        user: str = "root",
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        """Run a playbook of the repository (or an absolute path) against this host alone; its status is not checked."""
        inventory = self.lab.write_inventory(user)
        words = ["ansible-playbook", "--inventory", str(inventory), "--limit", self.name]
        words += ["--extra-vars", json.dumps(dict(extra_vars or {})), *arguments, str(REPOSITORY / path)]
        return self._ansible(words, dict(environment or {}), timeout)

    def _ansible(
        self, words: list[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        self.lab.check_no_way_out(self.address)
        environment = self.lab.ansible_environment() | environment
        return run(self.lab.enter(words), environment, check=False, timeout=timeout, folder=REPOSITORY)


def _device_nodes(gpus: int) -> dict[str, str]:
    """Device node of a real GPU host: what stands behind it here.

    The nodes of the GPUs are over the zero device, since servers map them and the null device can't be mapped. The
    others share their device number with every program's standard input, which must not look like a GPU.
    """
    others = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
    others += ["nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"]
    return dict.fromkeys((f"nvidia{number}" for number in range(gpus)), "/dev/zero") | dict.fromkeys(
        others, "/dev/null"
    )


def _simulator_mounts() -> dict[Path, str]:
    """The simulator and its doubles: place here, place on the host."""
    simulator = REPOSITORY / "simulator"
    return {simulator: SIMULATOR, _nvml_double(): NVML, simulator / "nvidia_smi": "/usr/bin/nvidia-smi"}


def _nvml_double() -> Path:
    """The NVML double, built if its source is newer."""
    from simulator.build import BuildError, build

    try:
        return build(CACHE / "nvml")
    except BuildError as error:
        raise LabUnavailableError(str(error)) from error


def _thaw(group: Path) -> None:
    """Thaw a freezer group, send its processes back to the group above and remove it."""
    if not group.is_dir():
        return
    (group / "freezer.state").write_text("THAWED")
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(pid)
    deadline = time.monotonic() + 5
    wait_for(lambda: not (group / "cgroup.procs").read_text(), f"the processes of {group} to leave", deadline)
    group.rmdir()
