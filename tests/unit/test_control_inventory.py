"""The inventories that come with the repository, as Ansible itself loads them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
INVENTORIES = sorted(path for path in (ROOT / "inventory").iterdir() if path.is_dir())
GROUP_VARS = {path.stem: yaml.safe_load(path.read_text()) or {} for path in sorted((ROOT / "group_vars").glob("*.yml"))}


def load(inventory: Path | None = None, **environment: str) -> dict:
    """What ansible-inventory shows; without an inventory the one that ansible.cfg names."""
    chosen = ["-i", str(inventory)] if inventory else []
    done = subprocess.run(
        # As plays see it: by itself it would take this folder for a playbook's, and its group_vars before all others.
        ["ansible-inventory", "--list", "--playbook-dir", "playbooks", *chosen],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def _file(path: Path) -> dict:
    return yaml.safe_load(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda path: path.name)
def test_group_vars_load_with_every_inventory(inventory):
    loaded = load(inventory)
    for name in GROUP_VARS:
        assert (inventory / "group_vars" / f"{name}.yml").resolve() == ROOT / "group_vars" / f"{name}.yml"
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text())["all"]["children"]["gpu_hosts"]["children"][
        "blackwell"
    ]
    groups = {None: hosts, **hosts.get("children", {})}
    assert any(facts.get("hosts") for facts in groups.values())
    for host, own in (
        (host, {**(own or {}), **_file(inventory / "group_vars" / f"{group}.yml")})
        for group, facts in groups.items()
        for host, own in facts.get("hosts", {}).items()
    ):
        expected = set().union(*(GROUP_VARS[group] for group in ("all", "gpu_hosts", "blackwell")))
        missing = expected - set(loaded["_meta"]["hostvars"][host])
        assert not missing
        for group in ("all", "gpu_hosts", "blackwell"):
            for name, value in GROUP_VARS[group].items():
                if name not in (own or {}):
                    assert loaded["_meta"]["hostvars"][host][name] == value


def test_the_inventory_as_shipped_is_the_simulated_host():
    assert list(load()["_meta"]["hostvars"]) == ["simulated-gpu-host"]


def test_a_reset_of_the_simulated_host_says_how_to_start_it_when_it_is_not_running(tmp_path):
    done = subprocess.run(
        ["ansible-playbook", "playbooks/reset.yml"],
        cwd=ROOT,
        env={**os.environ, "SIMULATED_HOST": str(tmp_path), "GPU_ARTIFACTS": str(tmp_path / "artifacts")},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    assert "The simulated GPU host is not running. Start it with: make simulator-start" in " ".join(done.stdout.split())
    assert not (tmp_path / "artifacts/resets.jsonl").exists()


def test_an_inventory_that_can_not_be_read_is_an_error_also_beside_a_good_one(tmp_path):
    broken = tmp_path / "hosts.yml"
    broken.write_text("all:\n  hosts:\n    a:\n   b: [\n")
    command = ["ansible-inventory", "--list", "-i", "inventory/example", "-i", str(broken)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"Completely failed to parse inventory source {broken}" in done.stderr


def test_every_key_of_ansible_cfg_does_something():
    done = subprocess.run(
        ["ansible-config", "validate", "-t", "all"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_original_deployment_stands_ready_in_the_example():
    loaded = load(ROOT / "inventory/example")["_meta"]["hostvars"]["gpu01.example.com"]
    assert loaded["sglang_arguments"] == {
        "tp_size": 8,
        "mem_fraction_static": 0.88,
        "num_continuous_decode_steps": 4,
        "disable_custom_all_reduce": True,
        "trust_remote_code": True,
        "max_running_requests": 48,
    }
    assert (loaded["nccl_env_profile"], loaded["sglang_speculation"]["algorithm"]) == ("latency", "EAGLE3")
    assert loaded["sglang_model_path"] and loaded["sglang_drafter_path"] and loaded["sglang_host"] == "127.0.0.1"
