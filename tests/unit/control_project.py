"""A copy of the control side with a stand-in for the reset itself, to run real plays against in a test's own folder.

The stand-in's ``reset.run`` returns what the host's environment variable STUB_RESULT says, so that the control side is
tested alone: the plays, the role, the plugins, the transport.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent

STUB = """
import base64, json, os, sys

def run(params, check_mode=False, diff=False):
    print("noise of a library on stdout")
    wanted = json.loads(base64.b64decode(os.environ["STUB_RESULT"]))
    if wanted.get("hang"):
        import time
        with open(wanted["hang"] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, wanted["hang"])
        time.sleep(600)
    if wanted.get("raise"):
        raise RuntimeError(wanted["raise"])
    if wanted.get("exit"):
        print("Segmentation fault", file=sys.stderr)
        os._exit(wanted["exit"])
    result = {
        "schema": 1, "run_id": params["run_id"], "host": "own-name", "servers": [], "policy": params["policy"],
        "started": "2026-01-02T03:04:05Z", "verdict": "clean", "reason": "", "simulated": False, "gpus": [],
        "killed": [], "spared": [], "cleaned": [], "kept": [], "evidence": "/var/lib/x", "kernel_events": [],
        "respawners": [], "ports": [], "shm_free_mib": 1, "source": "nvml", "seconds": {"total": 0.5}, "earlier": [],
        "changed": False, "msg": "",
        "saw": {"params": params, "check_mode": check_mode, "diff": diff, "argv": sys.argv,
                "command_line": open("/proc/self/cmdline").read(), "uid": os.getuid(),
                "python": list(sys.version_info[:2]), "basic": "ansible.module_utils.basic" in sys.modules},
    }
    if check_mode:
        result["predicted"] = True
    if diff:
        result["diff"] = {"before": "pid 7\\n", "after": ""}
    by_phase = wanted.pop("by_phases", {}).get(",".join(params["phases"]), {})
    result.update(wanted)
    result.update(by_phase)
    result["failed"] = result["verdict"] not in ("clean", "skipped")
    return result
"""


@dataclass(frozen=True)
class Outcome:
    """What a play ended with."""

    status: int
    output: str
    records: list[dict[str, Any]]

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


class Project:
    """The repository's control side in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("action_plugins", "callback_plugins", "plugin_utils", "module_utils", "roles", "playbooks"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("library", "group_vars"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "ansible.cfg", folder)
        (folder / "module_utils/gpu_host/reset.py").write_text(STUB)
        self.inventory: dict[str, dict[str, Any]] = {}

    def host(self, name: str, result: dict[str, Any] | None = None, **variables: Any) -> None:
        """A host of the inventory over a local connection, with what the stand-in returns there."""
        self.inventory[name] = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "gpu_host_environment": {"STUB_RESULT": base64.b64encode(json.dumps(result or {}).encode()).decode()},
            **variables,
        }

    def play(self, *arguments: str, playbook: str | Path = "playbooks/reset.yml", **environment: str) -> Outcome:
        """Run a playbook with nobody at the terminal."""
        play = self.start(*arguments, playbook=playbook, **environment)
        return self.outcome(play)

    def start(
        self, *arguments: str, playbook: str | Path = "playbooks/reset.yml", **environment: str
    ) -> subprocess.Popen[str]:
        """The same, without waiting for its end."""
        self.write_inventory()
        return subprocess.Popen(
            ["ansible-playbook", "-i", "inventory", str(playbook), *arguments],
            cwd=self.folder,
            env={**os.environ, "ANSIBLE_HOME": str(self.folder / ".ansible"), "ANSIBLE_NOCOLOR": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcome(self, play: subprocess.Popen[str]) -> Outcome:
        """What a play that was started ends with."""
        with play:
            try:
                output, errors = play.communicate(timeout=120)
            except BaseException:
                play.kill()
                raise
        file = self.folder / "artifacts/resets.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return Outcome(play.returncode, output + errors, [json.loads(one) for one in lines if one])

    def write_inventory(self) -> None:
        """The inventory of the hosts so far, in the project's folder `inventory`."""
        folder = self.folder / "inventory"
        folder.mkdir(exist_ok=True)
        if not (folder / "group_vars").exists():
            (folder / "group_vars").symlink_to("../group_vars")
        hosts = {"all": {"children": {"gpu_hosts": {"hosts": self.inventory}}}}
        (folder / "hosts.yml").write_text(yaml.safe_dump(hosts))
