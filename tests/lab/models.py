"""Models on lab hosts: made here, put there, compared by their sums."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.command import run
from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.unit.model_folders import write_safetensors, write_target

SUMS = "cd {} && find . -type f ! -name .model-staging.json | sort | xargs sha256sum"


def make_model(folder: Path, mib: int, shards: int = 4) -> Path:
    """A whole model of about so many MiB of random weights."""
    write_target(folder, shards=shards)
    rows = (mib << 20) // shards // 4 // 2
    for number in range(1, shards + 1):
        tensors = {f"model.layers.{number}.weight_{i}": ("BF16", (rows, 1), os.urandom(2 * rows)) for i in range(4)}
        write_safetensors(folder / f"model-{number:05d}-of-{shards:05d}.safetensors", tensors)
    return folder


def put(host: Host, folder: Path, path: str) -> None:
    """Copy a folder onto a host."""
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as packed:
        script = 'mkdir -p "$1" && tar -C "$1" -x'
        subprocess.run(host.enter(["sh", "-c", script, "sh", path]), stdin=packed.stdout, check=True, timeout=120)


def sums(host: Host, path: str) -> str:
    return host.exec(SUMS.format(path)).stdout


def shape(host: Host, mbit: int) -> None:
    """Let the host send and receive so many Mbit/s: its own side and the bridge's side of its link."""
    queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
    inside = ["nsenter", f"--target={host.init}", "--net", "--"]
    run([*inside, "tc", "qdisc", "replace", "dev", "eth0", *queue])
    peer = run([*inside, "cat", "/sys/class/net/eth0/iflink"]).stdout.strip()
    for line in run(host.lab.enter(["ip", "-o", "link"])).stdout.splitlines():
        number, name = line.split(":")[:2]
        if number.strip() == peer:
            run(host.lab.enter(["tc", "qdisc", "replace", "dev", name.strip().split("@")[0], *queue]))


def stage_models(
    hosts: Sequence[Host], variables: Mapping[str, object], *arguments: str, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run playbooks/stage-models.yml on these hosts."""
    import json

    lab = hosts[0].lab
    inventory = lab.write_inventory()
    given = {"model_staging_reserve_mib": 0, "model_staging_install": False, **variables}
    words = ["ansible-playbook", "--inventory", str(inventory), "--limit", ",".join(host.name for host in hosts)]
    words += ["--extra-vars", json.dumps(given), *arguments, str(REPOSITORY / "playbooks/stage-models.yml")]
    for host in hosts:
        lab.check_no_way_out(host.address)
    return run(lab.enter(words), lab.ansible_environment(), check=False, timeout=timeout, folder=REPOSITORY)
