"""Benchmarks of the stand-in on lab hosts: servers of known step times and accept lengths, and what came of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.command import replace, run
from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.lab.server import STANDIN

MODEL = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "num_attention_heads": 64,
    "max_position_embeddings": 262144,
}
DRAFTER = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 262144}
# As quick as the stand-in can be, but for its steps.
STANDIN_SETTINGS = {
    "CLIENT_PAUSE": 0,
    "IMPORT_SECONDS": 0.02,
    "TERM_POLL_SECONDS": 0.2,
    "RELEASE_SECONDS": 0.1,
    "HEALTH_SECONDS": 0.1,
    "CRASH_SECONDS": 0.1,
    "COREDUMP_SECONDS": 0.1,
    "INDUCTOR_WORKERS": 0,
    "MEMORY_MIB": 9000,
    "PREFILL_SECONDS": 0,
}
QUICK = {
    "benchmark_concurrencies": [2],
    "benchmark_num_prompts": 4,
    "benchmark_output_lengths": [64],
    "benchmark_rounds": 1,
    "benchmark_max_rounds": 1,
    "benchmark_repeats_per_start": 1,
}


def standin(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stand-in's settings as variables of its environment."""
    return {f"SGLANG_STANDIN_{name.upper()}": value for name, value in settings.items()}


def server_variables(settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the inventory says of the host's server."""
    environment = standin({**STANDIN_SETTINGS, **(settings or {})})
    return {
        "sglang_python": "/usr/bin/python3",
        "sglang_model_path": "/models/kimi-k2.5",
        "sglang_drafter_path": "/models/drafter",
        "sglang_arguments": {"tp_size": 1},
        "sglang_environment": {"PYTHONPATH": STANDIN, "PYTHONDONTWRITEBYTECODE": 1, **environment},
        "server_health_chat_expect": "model",
        "server_health_chat_tokens": 12,
        "gpu_reset_grace": 5,
        "deploy_soak": 8,
    }


@dataclass(frozen=True)
class Outcome:
    """One run of the playbook. `results` is what the report was made of, {} without one."""

    status: int
    output: str
    folder: Path
    results: Mapping[str, Any]

    def says(self, words: str) -> bool:
        """Whether the sentence is in the output, however it was wrapped."""
        return words in " ".join(self.output.split())

    def of(self, host: Host) -> dict[str, Any]:
        return dict(next(one for one in self.results["hosts"] if one["host"] == host.name))

    def measured(self, host: Host) -> list[dict[str, Any]]:
        """The measurements that were kept, by round."""
        folder = self.folder / "measurements" / host.name
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def failures(self, host: Host) -> list[dict[str, Any]]:
        folder = self.folder / "failures" / host.name
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


class Bench:
    """Hosts with a model and a drafter, and an inventory with what each of them serves and how it is measured."""

    def __init__(self, folder: Path, hosts: Sequence[tuple[Host, Mapping[str, Any]]]) -> None:
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.hosts = [host for host, _ in hosts]
        self.lab = self.hosts[0].lab
        for host in self.hosts:
            host.write("/models/kimi-k2.5/config.json", json.dumps(MODEL))
            host.write("/models/drafter/config.json", json.dumps(DRAFTER))
        self.variables = {host.name: {**QUICK, **variables} for host, variables in hosts}
        # Variables of hosts, since those of groups would give way to group_vars.
        self.inventory = folder / "variables.json"
        replace(self.inventory, json.dumps({"all": {"hosts": self.variables}}))

    def command(self, variables: Mapping[str, Any], *words: str, playbook: str = "benchmark") -> list[str]:
        inventories = ["-i", str(self.lab.write_inventory()), "-i", str(self.inventory)]
        limit = ["--limit", ",".join(host.name for host in self.hosts)]
        for host in self.hosts:
            self.lab.check_no_way_out(host.address)
        command = ["ansible-playbook", *inventories, *limit, "-e", json.dumps(dict(variables)), *words]
        return self.lab.enter([*command, str(REPOSITORY / f"playbooks/{playbook}.yml")])

    @property
    def environment(self) -> dict[str, str]:
        return {**self.lab.ansible_environment(), "GPU_ARTIFACTS": str(self.artifacts)}

    def run(self, *words: str, timeout: float = 600, **variables: Any) -> Outcome:
        """Run the playbook to its end; its status is not checked."""
        command = self.command(variables, *words)
        done = run(command, self.environment, check=False, timeout=timeout, folder=REPOSITORY)
        return self.outcome(done.returncode, done.stdout + done.stderr)

    def start(self, **variables: Any) -> subprocess.Popen[bytes]:
        """Run it beside the test, in a session of its own."""
        with (self.folder / "started.log").open("wb") as log:
            return subprocess.Popen(
                self.command(variables), env={**os.environ, **self.environment}, cwd=REPOSITORY,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def outcome(self, status: int = 0, output: str = "") -> Outcome:
        folder = (self.artifacts / "benchmarks" / "latest").resolve()
        try:
            results = json.loads((folder / "results.json").read_text())
        except OSError:
            results = {}
        return Outcome(status, output, folder, results)

    def deploy(self, **more: Any) -> None:
        """What runs before: a server under its usual name, without speculation."""
        variables = {"deploy_preflight": False, "deploy_sgl_kernel": False, "deploy_model_staging": False, **more}
        command = self.command({**variables, "reset_confirmed": True}, playbook="deploy-baseline")
        done = run(command, self.environment, check=False, timeout=300, folder=REPOSITORY)
        assert done.returncode == 0, done.stdout


def active(host: Host, unit: str) -> str:
    return host.exec(["systemctl", "is-active", unit], check=False).stdout.strip()


def sglang_pid(host: Host, unit: str = "sglang") -> int:
    return int(host.exec(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout)
