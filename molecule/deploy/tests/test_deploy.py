"""After converge: one server, as a unit, with its key in one private file."""

from __future__ import annotations

import json
from typing import Any

KEY = "k3y-of-this-scenario"


def test_the_server_runs_as_a_unit_that_starts_at_boot(host: Any) -> None:
    unit = host.service("kimi")
    assert unit.is_running and unit.is_enabled
    assert "--tp-size 8" in host.file("/etc/systemd/system/kimi.service").content_string


def test_it_answers_those_who_have_the_key(host: Any) -> None:
    code = (
        "import sys, urllib.request as u; headers = dict(a.split(': ') for a in sys.argv[1:]);"
        " print(u.urlopen(u.Request('http://127.0.0.1:30000/v1/models', headers=headers)).status)"
    )
    assert "401" in host.run(f'python3 -c "{code}"').stderr
    assert host.check_output(f"python3 -c \"{code}\" 'Authorization: Bearer {KEY}'").strip() == "200"


def test_the_key_is_nowhere_but_in_a_private_file(host: Any) -> None:
    assert host.file("/etc/sglang/kimi.yaml").mode == 0o600
    assert host.file("/var/log/sglang/kimi.log").mode == 0o600
    assert KEY not in host.check_output("ps -eo args")
    journal = host.check_output("journalctl --no-pager --output=cat --identifier=kimi")
    assert "fired up and ready to roll" in journal and KEY not in journal


def test_every_worker_carries_the_nccl_profile(host: Any) -> None:
    pids = host.check_output("pgrep -f ^sglang::scheduler").split()
    assert len(pids) == 8
    for pid in pids:
        assert "NCCL_PROTO=LL" in host.file(f"/proc/{pid}/environ").content_string.split("\0")


def test_the_deployment_is_recorded_as_ready(host: Any) -> None:
    file = host.file("/var/lib/gpu-host/deployments/kimi.good.json")
    record = json.loads(file.content_string)
    assert file.mode == 0o600
    assert record["verdict"] == "ready" and record["who"] and record["argv"][0] == "/usr/bin/python3"
    assert KEY not in file.content_string
