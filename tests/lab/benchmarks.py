"""Benchmarks of the stand-in on a lab host: servers of known step times and accept lengths, and what came of them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
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
QUICK = {
    "benchmark_steps": [1],
    "benchmark_concurrencies": [1],
    "benchmark_num_prompts": 4,
    "benchmark_output_lengths": [64],
    "benchmark_rounds": 1,
    "benchmark_max_rounds": 1,
    "benchmark_repeats_per_start": 1,
}


@dataclass(frozen=True)
class Outcome:
    """One run of the playbook; `results` is what the report was made of, {} without one."""

    status: int
    output: str
    folder: Path
    results: dict[str, Any]

    def says(self, words: str) -> bool:
        """Whether the sentence is in the output, however it was wrapped."""
        return words in " ".join(self.output.split())

    def measured(self, variant: str = "") -> list[dict[str, Any]]:
        """The measurements that were kept, by round and repeat."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("measurements/*/*.json"))]
        return [one for one in found if one["variant"] == variant or not variant]

    def failures(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("failures/*/*.json"))]


class Bench:
    """A host with a model and a drafter, its inventory, and prompts. `settings` are the stand-in's for all variants."""

    def __init__(self, host: Host, folder: Path, settings: Mapping[str, Any] | None = None, **variables: Any) -> None:
        self.host = host
        self.artifacts = folder / "artifacts"
        host.write("/models/kimi-k2.5/config.json", json.dumps(MODEL))
        host.write("/models/drafter/config.json", json.dumps(DRAFTER))
        given = {"SPEED": 1, "CLIENT_PAUSE": 0, "IMPORT_SECONDS": 0.02, "TERM_POLL_SECONDS": 0.2, **(settings or {})}
        given = {"RELEASE_SECONDS": 0.1, "HEALTH_SECONDS": 0.1, "MEMORY_MIB": 9000, **given}
        self.variables = {
            "sglang_python": "/usr/bin/python3",
            "sglang_model_path": "/models/kimi-k2.5",
            "sglang_drafter_path": "/models/drafter",
            "sglang_arguments": {"tp_size": 1},
            "sglang_environment": {"PYTHONPATH": STANDIN, "PYTHONDONTWRITEBYTECODE": 1, **standin(given)},
            "server_health_chat_expect": "model",
            "gpu_reset_grace": 5,
            "deploy_soak": 8,
            **variables,
        }
        self.folder = folder

    def command(self, *words: str, **variables: Any) -> list[str]:
        """The command line of a benchmark; the host's own variables stand in an inventory beside the lab's."""
        inventory = self.host.lab.write_inventory()
        mine = self.folder / "variables.json"
        replace(mine, json.dumps({"all": {"hosts": {self.host.name: self.variables}}}))
        extra = json.dumps({**QUICK, **variables})
        command = ["ansible-playbook", "-i", str(inventory), "-i", str(mine), "--limit", self.host.name, "-e", extra]
        self.host.lab.check_no_way_out(self.host.address)
        return self.host.lab.enter([*command, *words, str(REPOSITORY / "playbooks/benchmark.yml")])

    @property
    def environment(self) -> dict[str, str]:
        return {**self.host.lab.ansible_environment(), "GPU_ARTIFACTS": str(self.artifacts)}

    def run(self, *words: str, **variables: Any) -> Outcome:
        """Run the playbook to its end; its status is not checked."""
        done = run(self.command(*words, **variables), self.environment, check=False, timeout=1200, folder=REPOSITORY)
        return self.outcome(done.returncode, done.stdout + done.stderr)

    def start(self, **variables: Any) -> subprocess.Popen[bytes]:
        """Run it beside the test, in a session of its own."""
        import os

        log = (self.folder / "started.log").open("wb")
        return subprocess.Popen(
            self.command(**variables), env={**os.environ, **self.environment}, cwd=REPOSITORY, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def outcome(self, status: int, output: str) -> Outcome:
        folder = (self.artifacts / "benchmarks" / "latest").resolve()
        try:
            results = json.loads((folder / "results.json").read_text())
        except OSError:
            results = {}
        return Outcome(status, output, folder, results)

    def active(self, unit: str) -> str:
        return self.host.exec(["systemctl", "is-active", unit], check=False).stdout.strip()

    def deploy(self) -> None:
        """The server that runs before: a baseline under its usual name."""
        done = self.host.playbook(
            "playbooks/deploy-baseline.yml",
            {**self.variables, "deploy_preflight": False, "deploy_sgl_kernel": False, "deploy_model_staging": False},
        )
        assert done.returncode == 0, done.stdout


def standin(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stand-in's settings as variables of its environment."""
    return {f"SGLANG_STANDIN_{name.upper()}": value for name, value in settings.items()}


def wait_until(happened: Any, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def plain(text: str) -> str:
    """Without colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
