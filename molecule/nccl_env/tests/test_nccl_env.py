"""After converge: one file, readable by all, as a unit and a shell read it."""

from __future__ import annotations

from typing import Any

FILE = "/etc/sglang/nccl.env"


def test_the_file_is_readable_by_all_and_writable_by_root_alone(host: Any) -> None:
    file = host.file(FILE)
    assert (file.user, file.mode, host.file("/etc/sglang").mode) == ("root", 0o644, 0o755)


def test_a_unit_gets_the_profile_with_the_hosts_own_variables(host: Any) -> None:
    command = f"systemd-run --quiet --pipe --wait --property=EnvironmentFile={FILE} env"
    got = {line for line in host.check_output(command).splitlines() if line.startswith("NCCL_")}
    assert got == {
        "NCCL_ALGO=Ring",
        "NCCL_BUFFSIZE=16777216",
        "NCCL_DEBUG=WARN",
        "NCCL_MAX_NCHANNELS=16",
        "NCCL_P2P_LEVEL=SYS",
        "NCCL_PROTO=LL",
    }


def test_the_second_run_left_no_backup_since_nothing_had_changed(host: Any) -> None:
    assert host.check_output("ls /etc/sglang").split() == ["nccl.env"]
