"""A lab host as the control node: this checkout and its `.venv` on it, the way to the GPU hosts, schedules of resets.

The checkout lies in /opt/gpu-hosts, folder by folder and read-only; the virtual environment and the Python that it was
made from lie where they lie here, since they know their own places.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.command import LabError, replace, run, wait_for
from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.lab.lab import Lab

CHECKOUT = "/opt/gpu-hosts"
VENV = (REPOSITORY / ".venv").resolve()
USER = "engineer"
PARTS = (
    "action_plugins", "ansible.cfg", "callback_plugins", "group_vars", "library", "module_utils", "playbooks",
    "plugin_utils", "roles",
)  # fmt: skip


def mounts() -> dict[Path, str]:
    """What a host needs to be a control node: place here, place on the host."""
    found = {REPOSITORY / part: f"{CHECKOUT}/{part}" for part in PARTS} | {VENV: str(VENV)}
    base = Path(sys.base_prefix)
    if not base.is_relative_to("/usr") or base.is_relative_to("/usr/local"):
        return found | {base: str(base)}
    # The system's own Python: the image has another one, perhaps of another version.
    library = base / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = Path(sys.executable).resolve()
    return found | {library: str(library), program: str(program)}


class ControlNode:
    """A control node and the GPU hosts that it reaches as `engineer`, who may sudo there."""

    def __init__(self, lab: Lab, host: Host, gpu_hosts: Sequence[Host]) -> None:
        self.lab = lab
        self.host = host
        self.gpu_hosts = list(gpu_hosts)
        # The user of the schedules must get to the virtual environment, wherever it lies.
        above = {str(parent) for place in mounts().values() for parent in Path(place).parents} - {"/"}
        host.exec(["chmod", "a+x", *sorted(above, key=len)])
        host.exec(["chown", f"{USER}:", CHECKOUT])
        host.write(f"/home/{USER}/.ssh/id_ed25519", (lab.folder / "key").read_text(), mode="0600")
        keys = {one.address: one.read("/etc/ssh/ssh_host_ed25519_key.pub") for one in gpu_hosts}
        known = "".join(f"{address} {' '.join(key.split()[:2])}\n" for address, key in keys.items())
        host.write(f"/home/{USER}/.ssh/known_hosts", known)
        host.exec(["chown", "-R", f"{USER}:", f"/home/{USER}/.ssh"])
        host.exec(["chmod", "0700", f"/home/{USER}/.ssh"])
        self.write_inventory()
        host.exec(["ln", "-s", f"{CHECKOUT}/group_vars", "/srv/inventory/group_vars"])
        works = host.exec([str(VENV / "bin/python"), "-I", "-c", "import ansible, ansible_runner"], check=False)
        if works.returncode:
            raise LabError(f"The Python of {VENV} does not run on a lab host: {works.stderr[-500:]}")

    def write_inventory(self, **variables: Any) -> None:
        """The inventory of the GPU hosts, as it lies on the control node; `variables` are those of the whole group."""
        hosts = {one.name: {"ansible_host": one.address} for one in self.gpu_hosts}
        group = {"vars": {"ansible_user": USER, **variables}, "hosts": hosts}
        self.host.write("/srv/inventory/hosts.json", json.dumps({"all": {"children": {"gpu_hosts": group}}}))

    def schedule(
        self, schedules: Any, *words: str, cron: bool = False, **variables: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run schedule-resets.yml from this machine; its status is not checked."""
        folder = self.lab.folder / f"control-{self.host.name}"
        folder.mkdir(exist_ok=True)
        all_hosts: dict[str, Any] = self.lab.inventory()["all"]  # type: ignore[assignment]
        connection = all_hosts["children"]["gpu_hosts"]["vars"]
        node = {self.host.name: {"ansible_host": self.host.address}}
        group = {"control_nodes": {"vars": connection, "hosts": node}}
        replace(folder / "hosts.json", json.dumps({"all": {"children": group}}))
        given: Mapping[str, Any] = {
            "reset_schedule_schedules": schedules,
            "reset_schedule_repository": CHECKOUT,
            "reset_schedule_python": str(VENV / "bin/python"),
            "reset_schedule_scheduler": "cron" if cron else "auto",
            **variables,
        }
        command = ["ansible-playbook", "-i", str(folder / "hosts.json"), "-e", json.dumps(given), *words]
        self.lab.check_no_way_out(self.host.address)
        command = self.lab.enter([*command, str(REPOSITORY / "playbooks/schedule-resets.yml")])
        return run(command, self.lab.ansible_environment(), check=False, folder=REPOSITORY)

    def run_now(self, name: str) -> subprocess.CompletedProcess[str]:
        """What the service of a schedule runs, run by hand as its user."""
        done = self.host.exec(["systemctl", "show", "--property=ExecStart", "--value", f"gpu-reset-{name}.service"])
        command = done.stdout.split("argv[]=", 1)[1].split(" ;", 1)[0]
        return self.host.exec(shlex.split(command), check=False, user=USER)

    def by_hand(self, playbook: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a playbook on the control node as its user."""
        command = ["sh", "-c", f'cd {CHECKOUT} && exec {VENV}/bin/ansible-playbook "$@"', "sh", *words, playbook]
        return self.host.exec(command, check=False, user=USER)

    def records(self) -> list[dict[str, Any]]:
        """The run records on the control node."""
        text = self.host.exec(["cat", f"{CHECKOUT}/artifacts/resets.jsonl"], check=False).stdout
        return [json.loads(line) for line in text.splitlines()]

    def last_run(self, name: str) -> dict[str, Any]:
        """What the last finished run of a schedule ended with; empty before the first."""
        text = self.host.exec(["cat", f"/var/lib/gpu-resets/{name}/last-run.json"], check=False).stdout
        return dict(json.loads(text)) if text else {}

    def wait_for_run(self, name: str, seconds: float = 120) -> dict[str, Any]:
        """Wait until a run of the schedule has ended; LabError with its journal where none does."""
        try:
            wait_for(lambda: bool(self.last_run(name)), "a run", time.monotonic() + seconds, interval=0.2)
        except LabError as error:
            raise LabError(f"No run of {name} within {seconds:.0f} s:\n{self.journal(name)}") from error
        return self.last_run(name)

    def journal(self, name: str) -> str:
        words = ["journalctl", "--unit", f"gpu-reset-{name}.service", "--output", "cat", "--no-pager"]
        return self.host.exec(words).stdout

    def property(self, unit: str, name: str) -> str:
        return self.host.exec(["systemctl", "show", f"--property={name}", "--value", unit]).stdout.strip()

    def files(self) -> dict[str, str]:
        """Every file of the role on the host, with its time of change."""
        found = self.host.exec(
            "find /etc/systemd/system /etc/cron.d /etc/gpu-resets -type f \\( -name 'gpu-reset-*' -o -name '*.json' "
            "\\) -printf '%p %C@\\n'",
            check=False,
        )
        return dict(line.rsplit(" ", 1) for line in found.stdout.splitlines())
