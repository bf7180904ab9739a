"""Real hosts to test on: containers with systemd and sshd, in a network namespace that has no way out.

    with Lab.create("example") as lab:
        host = lab.start_host("gpu-1")
        host.ssh("systemctl is-system-running")

A lab is one network namespace, one podman network in it, one ssh key, and its hosts. Everything of it lies in one
folder (`.lab-cache/labs/<name>`) with a container storage of its own, so labs do not meet each other, and `down`
removes this lab and nothing else. The machine that runs the lab sees the processes of its hosts, as a hypervisor
sees those of its guests.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab import image
from tests.lab.command import LabError, replace, run
from tests.lab.host import PATH, Host
from tests.lab.image import REPOSITORY
from tests.lab.processes import ancestors, start_ticks

LABS = image.CACHE / "labs"
SUBNET = ipaddress.ip_network("10.89.0.0/24")
GPUS = 8

CONTAINERS_CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{folder}/libpod"
[containers]
pids_limit = 0
default_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]
log_driver = "none"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
# On cgroup v1 a host's systemd may miss the end of a user's manager, 10 s after the last session, and a login then
# waits two minutes for it. So the manager stays.
LOGIND_CONF = """\
[Login]
UserStopDelaySec=infinity
"""
STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/storage-run"
[storage.options]
additionalimagestores = ["{store}"]
"""


class Lab:
    """One lab. Get it from `create` (a new one) or `open` (one that is there)."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", name):
            raise ValueError(f"A lab's name has lower-case letters, digits and dashes only: {name!r}")
        self.name = name
        self.folder = LABS / name
        self.namespace = f"gpu-lab-{name}"

    # Life

    @classmethod
    def create(cls, name: str, owner: int | None = None) -> Lab:
        """Make a lab without hosts. With `owner`, a pid, it may be swept away once that process is gone.

        Raises LabUnavailableError with what to install, LabError where the lab is there already.
        """
        image.require(*(name for name in image.PROGRAMS if name != "mmdebstrap"))
        image.build()
        lab = cls(name)
        try:
            lab.folder.mkdir(parents=True)
        except FileExistsError as error:
            raise LabError(f"The lab {name} is there already: `python -m tests.lab --name {name} down`") from error
        try:
            lab._write_files(owner)
            lab._make_mount_namespace()
            run(["ip", "netns", "add", lab.namespace])
            run(["ip", "-n", lab.namespace, "link", "set", "lo", "up"])
            lab.podman("network", "create", "--internal", "--subnet", str(SUBNET), "lab")
            lab.check_no_way_out()
        except BaseException:
            lab.down()
            raise
        return lab

    @classmethod
    def open(cls, name: str) -> Lab:
        """The lab of that name; raises LabError where there is none."""
        lab = cls(name)
        if not (lab.folder / "lab.json").is_file():
            raise LabError(f"There is no lab {name}: `python -m tests.lab --name {name} up 1` starts one.")
        return lab

    def _write_files(self, owner: int | None) -> None:
        (self.folder / "containers.conf").write_text(CONTAINERS_CONF.format(folder=self.folder))
        (self.folder / "storage.conf").write_text(STORAGE_CONF.format(folder=self.folder, store=image.STORE))
        (self.folder / "logind.conf").write_text(LOGIND_CONF)
        born = start_ticks(owner) if owner else None
        (self.folder / "lab.json").write_text(json.dumps({"owner": owner, "owner_start_ticks": born}))
        key = str(self.folder / "key")
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", key])

    def _make_mount_namespace(self) -> None:
        """A mount namespace for this lab's podman, so that nothing of it is mounted on the machine.

        Podman as root keeps the addresses and the name server of all its networks in /run/containers/networks, wherever
        its storage is: labs would share them. Its hosts' namespaces would be listed among the machine's in /run/netns.
        """
        own = {"networks-run": "/run/containers/networks", "netns-run": "/run/netns"}
        holder = self._mount_namespace.parent
        for folder in (*(self.folder / name for name in own), *map(Path, own.values()), holder):
            folder.mkdir(parents=True, exist_ok=True)
        run(["mount", "--bind", str(holder), str(holder)])
        run(["mount", "--make-private", str(holder)])
        self._mount_namespace.touch()
        mounts = " && ".join(f'mount --bind "$1/{name}" {path}' for name, path in own.items())
        make = ["sh", "-c", mounts, "sh", str(self.folder)]
        run(["unshare", f"--mount={self._mount_namespace}", "--propagation", "private", "--", *make])

    @property
    def _mount_namespace(self) -> Path:
        return self.folder / "namespaces" / "mount"

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def abandoned(self) -> bool:
        """Whether the process that this lab was made for is gone."""
        try:
            made_for = json.loads((self.folder / "lab.json").read_text())
        except (OSError, ValueError):
            return False
        return made_for["owner"] is not None and start_ticks(made_for["owner"]) != made_for["owner_start_ticks"]

    def down(self) -> None:
        """Remove the hosts, the namespace, what still runs in it, and the folder; nothing that is not this lab's."""
        with contextlib.suppress(LabError):
            self.stop_hosts()
        spared = ancestors()
        for pid in run(["ip", "netns", "pids", self.namespace], check=False).stdout.split():
            if int(pid) not in spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        run(["ip", "netns", "del", self.namespace], check=False)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mounted = line.split()[1]
            if mounted.startswith(f"{self.folder}/"):
                run(["umount", "--lazy", mounted], check=False)
        shutil.rmtree(self.control_paths, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Network

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command inside the lab's network, where nothing but its hosts is reached."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *command]

    def check_no_way_out(self, address: str | None = None) -> None:
        """Raise LabError if the namespace has a default route, or reaches `address` by another way than the bridge."""
        for family in ("-4", "-6"):
            routes = run(["ip", "-n", self.namespace, family, "route", "show", "default"]).stdout.strip()
            if routes:
                raise LabError(
                    f"The lab's network {self.namespace} has a way out ({routes}): nothing is started in it."
                )
        if address is not None:
            if ipaddress.ip_address(address) not in SUBNET:
                raise LabError(f"{address} is not an address of the lab's network {SUBNET}.")
            route = run(["ip", "-n", self.namespace, "route", "get", address], check=False).stdout
            if not re.match(rf"{re.escape(address)} dev podman\d+ src", route):
                raise LabError(
                    f"Packets to {address} would not go through the lab's bridge: {route.strip() or 'no route'}"
                )

    def connect(self, address: str, port: int, timeout: float = 1.0) -> socket.socket:
        """A TCP connection from inside the lab's network. Raises OSError as a plain connection would."""
        self.check_no_way_out(address)
        with open(f"/run/netns/{self.namespace}") as namespace:
            made = _in_thread(lambda: _socket_in(namespace.fileno()))
        made.settimeout(timeout)
        try:
            made.connect((address, port))
        except OSError:
            made.close()
            raise
        return made

    # Hosts

    def podman(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run podman on this lab's own storage, inside its network."""
        configuration = {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }
        inside = ["nsenter", f"--mount={self._mount_namespace}", f"--net=/run/netns/{self.namespace}", "--"]
        return run([*inside, "podman", "--log-level", "error", *arguments], configuration, check=check)

    def start_host(
        self,
        name: str,
        gpus: int = GPUS,
        minors: Sequence[int] | None = None,
        wait: bool = True,
        gpus_of: Host | None = None,
        mounts: Mapping[Path, str] | None = None,
        systemd: bool = True,
    ) -> Host:
        """Boot one host; with `wait`, until systemd is up and sshd answers.

        `minors` gives the minor number of each GPU by index; without it they stand in another order than the indices.
        With `gpus_of`, it is another guest of the machine that has those GPUs: both see the memory of both.
        `mounts` are read-only: place here, place on the host. Without `systemd` the host has sshd, cron and a log only.
        """
        if name in self.host_names():
            raise LabError(f"The host {name} is there already in the lab {self.name}.")
        self.check_no_way_out()
        host = Host(self, name, self._free_address(), gpus)
        host.mounts |= mounts or {}
        host.systemd = systemd
        host.folder.mkdir(parents=True)
        try:
            if gpus_of is not None:
                host.state_folder.symlink_to(gpus_of.state_folder)
            else:
                host.state_folder.mkdir()
                host.reset_state(minors)
            self.podman(*host.run_arguments(), image.image_name(), *host.first_process())
            host.save(int(self.podman("inspect", "--format", "{{.State.Pid}}", name).stdout))
            self.check_no_way_out(host.address)
            if wait:
                host.wait_until_up()
        except BaseException:
            self._remove(name)
            raise
        return host

    def start_hosts(self, number: int, prefix: str = "gpu-") -> list[Host]:
        """Boot several hosts, `<prefix>1` and so on, and wait for all of them."""
        hosts = [self.start_host(f"{prefix}{count}", wait=False) for count in range(1, number + 1)]
        for host in hosts:
            host.wait_until_up()
        return hosts

    def host_names(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("hosts/*/host.json"))

    def host(self, name: str) -> Host:
        """A host that runs; raises LabError where there is none of that name."""
        try:
            saved = json.loads((self.folder / "hosts" / name / "host.json").read_text())
        except OSError as error:
            there = ", ".join(self.host_names()) or "none"
            raise LabError(f"The lab {self.name} has no host {name} (it has: {there}).") from error
        return Host(self, name, saved["address"], saved["gpus"])

    def hosts(self) -> list[Host]:
        return [self.host(name) for name in self.host_names()]

    def stop_hosts(self, names: Iterable[str] | None = None) -> None:
        """Remove hosts, all of them unless named, with their state."""
        for name in self.host_names() if names is None else names:
            self.host(name).thaw_all()
            self._remove(name)

    def _remove(self, name: str) -> None:
        self.podman("rm", "--force", "--ignore", "--time", "0", "--volumes", name)
        shutil.rmtree(self.folder / "hosts" / name)

    def _free_address(self) -> str:
        taken = {json.loads(path.read_text())["address"] for path in self.folder.glob("hosts/*/host.json")}
        return next(str(address) for address in list(SUBNET.hosts())[9:] if str(address) not in taken)

    # Ansible

    def inventory(self, user: str = "root") -> dict[str, object]:
        """An Ansible inventory of the lab's hosts, as the `blackwell` group of `gpu_hosts`."""
        variables = {
            "ansible_connection": "ssh",
            "ansible_user": user,
            "ansible_ssh_private_key_file": str(self.folder / "key"),
            "ansible_ssh_common_args": " ".join(self.ssh_options()),
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        hosts = {host.name: {"ansible_host": host.address} for host in self.hosts()}
        return {"all": {"children": {"gpu_hosts": {"vars": variables, "children": {"blackwell": {"hosts": hosts}}}}}}

    def write_inventory(self, user: str = "root") -> Path:
        """Write that inventory, with the repository's group_vars beside it; return its folder."""
        path = self.folder / f"inventory-{user}" / "hosts.json"
        path.parent.mkdir(exist_ok=True)
        replace(path, json.dumps(self.inventory(user), indent=1))
        link = path.parent / "group_vars"
        if not link.is_symlink():
            link.symlink_to(REPOSITORY / "group_vars")
        return path.parent

    @staticmethod
    def ssh_options() -> list[str]:
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=5")
        return ["-F", "/dev/null", *(part for option in options for part in ("-o", option))]

    def ansible_environment(self) -> dict[str, str]:
        """What makes Ansible use this checkout, with a home of its own: two runs at once remove each other's state."""
        home = self.folder / "ansible"
        home.mkdir(exist_ok=True)
        self.control_paths.mkdir(mode=0o700, exist_ok=True)
        return ansible_environment(home, self.control_paths)

    @property
    def control_paths(self) -> Path:
        """Where ssh keeps its masters' sockets: a short path, since one has room for 107 characters."""
        return Path(tempfile.gettempdir()) / self.namespace


def ansible_environment(home: Path, control_paths: Path) -> dict[str, str]:
    """Environment in which Ansible finds this repository's modules, roles and plugins from any folder."""
    folders = {
        "ANSIBLE_LIBRARY": "library",
        "ANSIBLE_MODULE_UTILS": "module_utils",
        "ANSIBLE_ROLES_PATH": "roles",
        "ANSIBLE_ACTION_PLUGINS": "action_plugins",
        "ANSIBLE_CALLBACK_PLUGINS": "callback_plugins",
        "ANSIBLE_FILTER_PLUGINS": "filter_plugins",
    }
    paths = {name: str(REPOSITORY / folder) for name, folder in folders.items()}
    venv = f"{REPOSITORY / '.venv' / 'bin'}:{os.environ.get('PATH', PATH)}"
    return paths | {
        "ANSIBLE_HOME": str(home),
        "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(control_paths),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": venv,
    }


def all_labs() -> list[Lab]:
    """Every lab of this checkout, also one that was left half made."""
    return [Lab(path.name) for path in sorted(LABS.glob("*")) if path.is_dir()]


def sweep() -> list[str]:
    """Remove the labs whose owner is gone; return their names."""
    swept = [lab for lab in all_labs() if lab.abandoned()]
    for lab in swept:
        lab.down()
    return [lab.name for lab in swept]


def _socket_in(namespace: int) -> socket.socket:
    """A TCP socket of another network namespace. Changes the calling thread: run it in one of its own."""
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, clone_newnet) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _in_thread(make: Callable[[], socket.socket]) -> socket.socket:
    """Run in a thread that ends afterwards, and hand over what it made or raised."""
    made: list[socket.socket] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return made[0]
