"""docs/engines.md: its commands as they stand there, its survey, and the execution environment's definition."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from gpu_host import arguments

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/engines.md"
PARTS = (
    "action_plugins", "ansible.cfg", "callback_plugins", "group_vars", "inventory", "library", "module_utils",
    "playbooks", "plugin_utils", "roles",
)  # fmt: skip
# Runs a worker here: `ssh HOST COMMAND`.
SSH = '#!/bin/sh\nexec env HOME="$WORKERS/$1" sh -c "mkdir -p $WORKERS/$1; $2"\n'


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """The simulated host."""
    folder = tmp_path / "host"

    def simulator(action: str) -> None:
        command = [sys.executable, "-m", "simulator", action, "--folder", str(folder)]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)

    simulator("start")
    yield folder
    simulator("stop")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with an inventory of its own: two names, and the simulated host behind the first of them."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for words in (["init", "-q"], ["add", *PARTS], ["commit", "-q", "-m", "A checkout"]):
        who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        subprocess.run(["git", *who, *words], cwd=folder, check=True)
    hosts = yaml.safe_load((ROOT / "inventory/simulated/hosts.yml").read_text())
    real = hosts["all"]["children"]["gpu_hosts"]["children"]["blackwell"]["hosts"]
    nowhere = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    real["a-second-one"] = nowhere | {"ansible_ssh_executable": "/usr/bin/ssh"}
    fleet = folder / "inventory/fleet"
    fleet.mkdir()
    (fleet / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    (fleet / "group_vars").symlink_to("../../group_vars")
    return folder


def commands() -> str:
    found = re.search(r"<!-- These commands .*?-->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found.group(1)


def test_two_workers_reset_their_parts_of_the_hosts_and_the_records_come_back(host, checkout, tmp_path):
    script = commands()
    for there, here in (("gpu_hosts[0:49]", "gpu_hosts[0:0]"), ("gpu_hosts[50:99]", "gpu_hosts[1:1]")):
        assert script.count(there) == 1
        script = script.replace(there, here)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    environment = {"SIMULATED_HOST": str(host), "WORKERS": str(tmp_path / "workers"), "TMPDIR": str(tmp_path)}
    environment |= {"PATH": f"{programs}:{ROOT}/.venv/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert "Verdicts - clean: simulated-gpu-host (SIMULATED)" in said, said
    assert "Verdicts - unreachable: a-second-one" in said, said
    assert "2 new records in" in said, said
    lines = (checkout / "artifacts/resets.jsonl").read_text().splitlines()
    verdicts = {one["host"]: one["verdict"] for one in map(json.loads, lines)}
    assert verdicts == {"simulated-gpu-host": "clean", "a-second-one": "unreachable"}
    statuses = {path.parts[-4]: path.read_text() for path in checkout.glob("results/*/artifacts/*/rc")}
    assert statuses["control-a"] == "0" and statuses["control-b"] != "0"
    assert list((tmp_path / "workers").glob("*/gpu-reset-worker")) == []  # --delete


def test_the_survey_asks_for_variables_that_there_are_and_never_for_strangers():
    spec = json.loads((ROOT / "docs/awx-survey.json").read_text())["spec"]
    role = yaml.safe_load((ROOT / "roles/gpu_reset/meta/argument_specs.yml").read_text())
    known = role["argument_specs"]["main"]["options"]
    for question in spec:
        name, kind = question["variable"], question["type"]
        assert name != "gpu_reset_kill_strangers"
        assert {"question_name", "question_description", "required", "default"} <= question.keys()
        if name.startswith("gpu_reset_"):
            assert question["default"] == known[name]["default"], name
            assert question.get("choices") == known[name].get("choices"), name
            assert (kind == "multiplechoice") == ("choices" in known[name])
    assert {question["variable"] for question in spec if question["variable"].startswith("gpu_reset_")} == {
        "gpu_reset_policy",
        "gpu_reset_grace",
    }
    assert arguments.GPU_RESET["policy"]["choices"] == spec[0]["choices"]


def test_the_execution_environment_installs_what_requirements_txt_says(tmp_path):
    context = tmp_path / "context"
    command = [
        "ansible-builder",
        "create",
        "--file",
        str(ROOT / "execution-environment.yml"),
        "--context",
        str(context),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (context / "_build/requirements.txt").read_text() == (ROOT / "requirements.txt").read_text()
    wanted = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("ansible-")}
    installs = re.search(r'ANSIBLE_INSTALL_REFS="([^"]*)"', (context / "Containerfile").read_text())
    assert installs and set(installs.group(1).split()) == wanted
