"""Resets of 100, 200 and 1,000 hosts, against parallel-ssh with the one-liner they replace. Run by `make bench`.

The hosts are loopback addresses of one lab host: a real sshd answers each, all on the machine's two cores, and each
"host" has a scope and a state folder of its own. Everything runs inside that lab host's network, the one-liner with
patterns that match nothing there. Asserts what is right, never how long it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.ratios import alternate, report
from tests.bench.test_one_host import ONE_LINER
from tests.lab.conftest import gpu_host, lab, start_gpu_host  # noqa: F401  (fixtures)
from tests.lab.host import Host
from tests.lab.image import REPOSITORY

pytestmark = pytest.mark.bench
WITHOUT_SLEEPS = ONE_LINER.replace("sleep 2; ", "").replace("sleep 3; ", "")
AT_ONCE = 50
HANGS = 2222  # a port whose listener never answers
ROUNDS = 3


@dataclass(frozen=True)
class Run:
    """One play over the fleet. CPU seconds are the control node's; MiB a fork is the largest private memory seen."""

    seconds: float
    cpu_seconds: float
    fork_mib: float
    verdicts: dict[str, int]


class Fleet:
    """Loopback addresses of a lab host that pass for hosts."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.folder = folder
        self.inside = ["nsenter", f"--net=/proc/{host.init}/ns/net", "--"]
        host.write("/etc/ssh/sshd_config.d/0-fleet.conf", "MaxStartups 500\n")
        host.ssh("systemctl restart ssh")
        host.wait_until_up()

    def inventory(self, number: int, hung: int = 0) -> Path:
        """The first `number` of them, the last `hung` with an sshd that accepts and never answers."""
        folder = self.folder / f"fleet-{number}-{hung}"
        folder.mkdir(exist_ok=True)
        hosts = {
            name(count): {
                "ansible_host": address(count),
                "gpu_reset_scope_folder": f"/srv/{name(count)}",
                "gpu_reset_state_folder": f"/var/lib/{name(count)}",
                **({"ansible_port": HANGS} if count >= number - hung else {}),
            }
            for count in range(number)
        }
        variables = self.host.lab.inventory()["all"]["children"]["gpu_hosts"]["vars"]  # type: ignore[index]
        tree = {"all": {"children": {"gpu_hosts": {"vars": variables, "children": {"blackwell": {"hosts": hosts}}}}}}
        (folder / "hosts.json").write_text(json.dumps(tree))
        if not (folder / "group_vars").is_symlink():
            (folder / "group_vars").symlink_to(REPOSITORY / "group_vars")
        (folder / "addresses").write_text("".join(f"{address(count)}\n" for count in range(number - hung)))
        self.host.ssh("mkdir -p " + " ".join(f"/srv/{host}" for host in hosts))
        return folder

    def reset(self, inventory: Path) -> Run:
        """`playbooks/reset.yml` over the fleet."""
        artifacts = self.folder / f"artifacts-{inventory.name}"
        command = ["ansible-playbook", "-i", str(inventory), "playbooks/reset.yml", "-e", "reset_confirmed=true"]
        environment = {**os.environ, **self.host.lab.ansible_environment(), "GPU_ARTIFACTS": str(artifacts)}
        # Connections of its own: those of the run before would stay open for a minute. And none that stays for long:
        # its sshd is one more process on the machine that all the "hosts" share, and each of them looks at every one.
        environment["ANSIBLE_SSH_CONTROL_PATH_DIR"] = tempfile.mkdtemp(dir=self.host.lab.control_paths)
        environment["ANSIBLE_SSH_ARGS"] = "-o ControlMaster=auto -o ControlPersist=5s"
        used, began = children_seconds(), time.perf_counter()
        with (self.folder / "play.log").open("w") as log:
            whole = [*self.inside, *command]
            play = subprocess.Popen(whole, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, process_group=0)
            with Watched(play.pid) as watched:
                play.wait()
        seconds = time.perf_counter() - began
        verdicts = Counter(one["verdict"] for one in json.loads((artifacts / "last-reset.json").read_text()))
        return Run(seconds, children_seconds() - used, watched.most_mib, dict(verdicts))

    def parallel_ssh(self, inventory: Path, line: str) -> None:
        """The line on every host, 50 at once."""
        options = [part for option in self.host.lab.ssh_options()[2:] if option != "-o" for part in ("-O", option)]
        command = ["parallel-ssh", "-h", str(inventory / "addresses"), "-l", "root", "-p", str(AT_ONCE), "-t", "120"]
        key = ["-x", f"-F /dev/null -i {self.host.lab.folder / 'key'}"]
        log = (self.folder / "parallel-ssh.log").open("w")
        subprocess.run([*self.inside, *command, *options, *key, line], stdout=log, stderr=log, check=False)


class Watched:
    """The largest private memory (MiB) that one worker of a play had, sampled."""

    def __init__(self, play: int) -> None:
        self.play = play
        self.most_mib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            for child in (Path(f"/proc/{self.play}/task/{self.play}/children").read_text()).split():
                with contextlib.suppress(OSError):
                    rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                    kib = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
                    self.most_mib = max(self.most_mib, kib / 1024)


def name(count: int) -> str:
    return f"gpu{count:04}"


def address(count: int) -> str:
    return f"127.1.{count // 250}.{count % 250 + 1}"


def children_seconds() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def fleet(gpu_host: Host, tmp_path: Path) -> Fleet:  # noqa: F811
    if not shutil.which("parallel-ssh"):
        pytest.skip("parallel-ssh is missing: apt-get install pssh")
    return Fleet(gpu_host, tmp_path)


@pytest.fixture
def deaf_port(fleet: Fleet) -> Iterator[None]:
    """A port on all of the fleet's addresses that accepts connections and says nothing."""
    words = "import socket, time; s = socket.create_server(('', %d), backlog=2000); time.sleep(3600)" % HANGS
    listener = subprocess.Popen([*fleet.inside, "python3", "-c", words])
    yield
    listener.kill()
    listener.wait()


def test_a_hundred_hosts_against_parallel_ssh(fleet: Fleet) -> None:
    inventory = fleet.inventory(100)
    runs: list[Run] = []
    fleet.parallel_ssh(inventory, "true")
    seconds = alternate(
        {
            "parallel-ssh, one-liner with its sleeps": lambda: fleet.parallel_ssh(inventory, ONE_LINER),
            "parallel-ssh, one-liner without sleeps": lambda: fleet.parallel_ssh(inventory, WITHOUT_SLEEPS),
            "ansible-playbook playbooks/reset.yml": lambda: runs.append(fleet.reset(inventory)),
        },
        ROUNDS,
    )
    assert all(run.verdicts == {"clean": 100} for run in runs)
    report("fleet-100", seconds, "parallel-ssh, one-liner with its sleeps", **used(runs, 100))


def test_a_thousand_hosts_of_which_fifty_hang(fleet: Fleet, deaf_port: None) -> None:
    two_hundred, thousand = fleet.inventory(200), fleet.inventory(1000, hung=50)
    fleet.reset(two_hundred)
    smaller, larger = fleet.reset(two_hundred), fleet.reset(thousand)
    assert smaller.verdicts == {"clean": 200}
    assert larger.verdicts == {"clean": 950, "unreachable": 50}
    seconds = {"200 hosts": [smaller.seconds], "1,000 hosts, 50 of them hung": [larger.seconds]}
    report("fleet-1000", seconds, "200 hosts", **used([larger], 1000))


def used(runs: list[Run], hosts: int) -> dict[str, object]:
    """What the control node spent."""
    return {
        "control_node_cpu_seconds_a_host": round(max(run.cpu_seconds for run in runs) / hosts, 4),
        "most_private_mib_a_fork": round(max(run.fork_mib for run in runs), 1),
        "verdicts": runs[-1].verdicts,
    }
