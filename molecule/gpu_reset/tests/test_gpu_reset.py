"""After converge: the server is gone, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def test_no_process_of_the_server_is_left(host: Any) -> None:
    titles = host.check_output("ps -eo args").splitlines()
    assert [title for title in titles if title.startswith("sglang::") or "-m sglang.launch_server" in title] == []


@pytest.mark.parametrize("name", ["tail", "job", "monitor"])
def test_a_bystander_lives(host: Any, name: str) -> None:
    pid = host.file(f"/run/{name}.pid").content_string.strip()
    assert host.file(f"/proc/{pid}/cmdline").exists


def test_every_gpu_is_empty_but_for_the_protected_process(host: Any) -> None:
    used = host.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    assert used == ["300"] + ["0"] * 7


def test_the_hosts_own_folder_is_closed_to_others(host: Any) -> None:
    assert host.file("/var/lib/gpu-host").mode == 0o700


def test_the_records_tell_of_one_reset_and_of_a_second_that_found_nothing() -> None:
    lines = Path(os.environ["GPU_ARTIFACTS"], "resets.jsonl").read_text().splitlines()
    first, second = [json.loads(line) for line in lines]
    assert [first["verdict"], second["verdict"]] == ["clean", "clean"]
    assert {entry["class"] for entry in first["killed"]} >= {"server"}
    assert len(first["gpus"]) == 8 and all(gpu["used_mib_before"] > 1024 for gpu in first["gpus"])
    assert second["killed"] == []
