"""Restarting servers on hosts with a real systemd: what a reset has recorded and ended comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host

RESTART = Path(__file__).parents[2] / "playbooks" / "restart.yml"


def state(host: Host) -> dict[str, Any]:
    """The one server of the host, as server_info sees it."""
    servers: Any = host.ansible("server_info", {})["servers"]
    assert len(servers) == 1, servers
    return dict(servers[0])


@pytest.mark.parametrize("how", ["nohup", "unit"])
def test_a_restart_brings_the_server_back_under_its_name_again_and_again(
    start_gpu_host: Callable[..., Host], how: str
) -> None:
    host = start_gpu_host()
    settings = {"SPEED": 5, "RELEASE_SECONDS": 0.5}
    server = host.start_server(
        "--api-key", "s3cret-k3y", tp=2, how=how, settings=settings, environment={"NCCL_PROTO": "LL"}
    )
    first = state(host)
    assert (first["state"], first["main_pid"]) == ("idle", server.pid), first
    seen = [server.pid]
    for _ in range(2):
        done = host.playbook(str(RESTART), {"gpu_reset_grace": 10})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "s3cret" not in done.stdout + done.stderr
        again = state(host)
        assert again["name"] == first["name"], again
        assert again["state"] in ("starting", "idle"), again
        assert again["main_pid"] not in seen
        assert again["unit"] == ("sglang.service" if how == "unit" else f"{first['name']}.service"), again
        environment = host.exec(["cat", f"/proc/{again['main_pid']}/environ"]).stdout.split("\0")
        assert "NCCL_PROTO=LL" in environment and "SGLANG_STANDIN_SPEED=5" in environment
        seen.append(again["main_pid"])


def test_a_transient_unit_shows_neither_key_nor_environment(start_gpu_host: Callable[..., Host]) -> None:
    host = start_gpu_host()
    host.start_server(
        "--api-key", "s3cret-k3y", tp=2, settings={"SPEED": 5}, environment={"HF_TOKEN": "hf_abcdefghijklmnop"}
    )
    assert host.playbook(str(RESTART), {"gpu_reset_grace": 10}).returncode == 0
    unit = state(host)["unit"]
    shown = host.exec(["systemctl", "show", unit]).stdout + host.exec(["systemctl", "cat", unit]).stdout
    shown += host.exec(["journalctl", "--unit", unit, "--no-pager"]).stdout
    assert "launch_server" not in shown and "s3cret" not in shown and "hf_abc" not in shown
