"""Servers kept by systemd, by a shell loop or by a supervisor: stopped as a whole, or told by name."""

from __future__ import annotations

import json
import shlex
import time

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    FAST,
    JOBS,
    Session,
    assert_clean,
    bystanders,
    leave_orphans,
    living,
    members_file,
    numbers,
    pids,
    reset,
    server_command,
    signals,
    until,
)
from tests.lab.server import Server


def facts(host: Host, unit: str) -> dict[str, str]:
    shown = host.exec(["systemctl", "show", unit, "-p", "ActiveState,SubState,Result,NRestarts,MainPID"]).stdout
    return dict(line.split("=", 1) for line in shown.splitlines())


def is_stopped(host: Host, unit: str) -> bool:
    """Stopped by a stop job, and not started again.

    Where only cgroup v1 is there, systemd in a guest learns late that a group is empty: it may still be stopping.
    """
    now = facts(host, unit)
    return now["ActiveState"] in ("inactive", "deactivating") and now["NRestarts"] == "0" and now["MainPID"] == "0"


def start_unit(host: Host, name: str, command: str, *lines: str) -> int:
    """A unit with Restart=always; its main process."""
    text = ["[Service]", f"ExecStart={command}", "Restart=always", "RestartSec=0.3", *lines, ""]
    host.write(f"/etc/systemd/system/{name}.service", "\n".join(text))
    host.exec(["systemctl", "daemon-reload"])
    host.exec(["systemctl", "start", f"{name}.service"])
    return int(facts(host, f"{name}.service")["MainPID"])


def through_a_shell(script: str) -> str:
    return f"/bin/bash -c {json.dumps(script)}"


def main_under(host: Host, parent: int) -> Server:
    """The server that a wrapper started, once it is loading on the GPU."""
    children = lambda: [p.pid for p in host.processes() if p.ppid == parent and "sglang.launch_server" in p.line]  # noqa: E731
    until(children, "the wrapper's server")
    server = Server(host, children()[0], 30000, "")
    until(lambda: min(host.state.used_mib(index) for index in range(2)) > 500, "the server to take its GPUs")
    return server


def unit_of(host: Host, pid: int) -> str:
    return host.exec(f"grep name=systemd: /proc/{pid}/cgroup || cat /proc/{pid}/cgroup").stdout.strip()


def test_a_server_run_as_a_unit_is_stopped_as_a_unit_and_restart_always_does_not_bring_it_back(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        server = gpu_host.start_server(how="unit", settings=FAST)
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=20.0)
        assert pids(record) == tree
        assert set(signals(record).values()) == {"TERM"}
        assert record["servers"] == ["sglang"]
        assert_clean(gpu_host, record)
        time.sleep(1.5)  # RestartSec is 1
        assert is_stopped(gpu_host, "sglang.service")
        assert gpu_host.exec("systemctl list-units --failed --plain --no-legend").stdout == ""


def test_a_unit_whose_server_hangs_is_killed_after_the_grace_and_does_not_come_back(gpu_host: Host) -> None:
    server = gpu_host.start_server(how="unit", tp=2, settings=FAST | {"IGNORE_TERM": 1})
    gpu_host.exec("sed -i '/TimeoutStopSec/d; /RestartSec=1/a KillMode=mixed' /etc/systemd/system/sglang.service")
    gpu_host.exec("systemctl daemon-reload")
    tree = numbers(server.tree())
    record = reset(gpu_host, grace=1.0)
    assert pids(record) == tree
    assert set(signals(record).values()) == {"KILL"}
    assert_clean(gpu_host, record)
    time.sleep(1.5)
    assert is_stopped(gpu_host, "sglang.service")
    assert not gpu_host.find("sglang.launch_server")


def test_a_unit_whose_wrapper_has_no_child_but_the_server_is_stopped_as_a_whole(gpu_host: Host) -> None:
    wrapper = start_unit(gpu_host, "kimi", through_a_shell(f"{server_command(tp=2)}; echo ended"))
    server = main_under(gpu_host, wrapper)
    tree = numbers(server.tree())
    record = reset(gpu_host, grace=20.0)
    assert tree <= pids(record) | {wrapper}
    assert record["respawners"] == []
    assert_clean(gpu_host, record)
    time.sleep(1.0)
    assert is_stopped(gpu_host, "kimi.service")
    assert not gpu_host.find("sglang.launch_server")


def test_a_unit_that_has_a_foreign_member_is_not_stopped_as_a_whole_and_is_reported(gpu_host: Host) -> None:
    server = gpu_host.start_server(how="unit", tp=2, settings=FAST)
    # Else systemd itself ends the job once the unit's main process is gone, whoever ended that.
    gpu_host.exec("sed -i '/RestartSec=1/a KillMode=process' /etc/systemd/system/sglang.service")
    gpu_host.exec("systemctl daemon-reload")
    script = f"echo $$ > {members_file(gpu_host, 'sglang.service')}; exec python3 {JOBS}/data_job.py"
    job = gpu_host.start(f"bash -c {shlex.quote(script)}").pid
    until(lambda: "sglang.service" in unit_of(gpu_host, job), "the job to join the unit")
    tree = numbers(server.tree())
    record = reset(gpu_host, grace=20.0)
    assert tree <= pids(record)
    assert gpu_host.alive(job)
    assert record["verdict"] == "dirty"
    (told,) = [line for line in record["respawners"] if "unit" in line]
    assert "unit sglang.service" in told and "always" in told and "systemctl stop sglang.service" in told
    assert told in record["reason"]


@pytest.mark.parametrize("unit", ["cron", "ssh", "nightly-batch"])
def test_a_unit_whose_main_process_is_no_server_lives_on_though_a_server_runs_in_its_cgroup(
    gpu_host: Host, unit: str
) -> None:
    if unit == "ssh":
        daemon = int(facts(gpu_host, "ssh.service")["MainPID"])
    else:
        daemon = start_unit(gpu_host, unit, "/usr/bin/sleep 100000")
    started = gpu_host.start_server(tp=2, settings=FAST)
    members = numbers(started.tree())
    procs = members_file(gpu_host, f"{unit}.service")
    gpu_host.exec(f"for pid in {' '.join(map(str, members))}; do echo $pid > {procs}; done")
    assert f"{unit}.service" in unit_of(gpu_host, started.pid)
    record = reset(gpu_host, grace=20.0)
    assert pids(record) == members
    assert gpu_host.alive(daemon)
    assert int(facts(gpu_host, f"{unit}.service")["MainPID"]) == daemon
    assert facts(gpu_host, f"{unit}.service")["NRestarts"] == "0"
    assert_clean(gpu_host, record)


def test_a_cron_like_daemon_whose_only_child_is_the_server_is_not_stopped_with_it(gpu_host: Host) -> None:
    """The form of a wrapper, the name of a daemon that has more to do: units that keep more than a server alive."""
    daemon = start_unit(gpu_host, "cron", through_a_shell(f"{server_command(tp=2)} & sleep 100000 & wait -n; wait"))
    server = main_under(gpu_host, daemon)
    for sleeper in gpu_host.find("sleep 100000"):
        if sleeper.ppid == daemon and not sleeper.line.startswith("/bin/bash"):
            gpu_host.kill(sleeper.pid)
    record = reset(gpu_host, grace=20.0)
    assert server.pid in pids(record) and daemon not in pids(record)
    assert facts(gpu_host, "cron.service")["NRestarts"] in ("0", "1")


def test_the_orphans_of_a_unit_that_systemd_has_given_up_end(gpu_host: Host) -> None:
    server = gpu_host.start_server(how="unit", tp=2, settings=FAST | {"OUTLIVE_MAIN": 1})
    gpu_host.exec("sed -i 's/Restart=always/Restart=no\\nKillMode=process/' /etc/systemd/system/sglang.service")
    gpu_host.exec("systemctl daemon-reload")
    orphans = leave_orphans(server)
    until(lambda: facts(gpu_host, "sglang.service")["MainPID"] == "0", "systemd to see it")
    record = reset(gpu_host)
    assert numbers(p for p in gpu_host.processes() if p.pid in orphans and p.state != "Z") == set()
    assert len(record["killed"]) >= 3
    assert_clean(gpu_host, record)


def test_a_shell_loop_that_starts_the_server_again_is_reported_by_name_and_the_host_is_dirty(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        script = f"#!/bin/bash\nwhile true; do {server_command(tp=2)}; sleep 0.5; done\n"
        gpu_host.write("/root/keep.sh", script, "0755")
        loop = gpu_host.start("/root/keep.sh").pid
        server = main_under(gpu_host, loop)
        record = reset(gpu_host, grace=20.0)
        assert server.pid in pids(record)
        assert gpu_host.alive(loop) and loop not in pids(record)
        assert record["verdict"] == "dirty"
        assert any(f"keep.sh ({loop}) started a server again" in line for line in record["respawners"])
        assert f"keep.sh ({loop})" in record["reason"]


def test_a_supervisor_that_starts_the_server_again_is_reported_by_name(gpu_host: Host) -> None:
    words = shlex.split(server_command(tp=2))
    gpu_host.write(
        "/opt/acme/supervisord",
        "#!/usr/bin/python3\nimport subprocess, time\n"
        f"while True:\n    subprocess.run({words!r}, stdout=subprocess.DEVNULL)\n    time.sleep(1)\n",
        "0755",
    )
    supervisor = gpu_host.start("/opt/acme/supervisord").pid
    server = main_under(gpu_host, supervisor)
    other = gpu_host.start("sleep 100000").pid
    record = reset(gpu_host, grace=20.0)
    assert server.pid in pids(record)
    assert living(gpu_host, {supervisor, other}) == {supervisor, other}
    assert record["verdict"] == "dirty"
    assert f"supervisord ({supervisor})" in record["reason"]


def test_a_loop_typed_at_a_prompt_is_reported_too(gpu_host: Host) -> None:
    with Session(gpu_host) as session:
        line = f"while true; do {server_command(tp=2)} > /dev/null 2>&1; sleep 0.7; done"
        session.type(line, "python3 -m sglang.launch_server")
        main_under(gpu_host, session.shell)
        record = reset(gpu_host, grace=20.0)
        assert session.open and gpu_host.alive(session.shell)
        assert record["verdict"] == "dirty"
        assert any(f"({session.shell})" in line for line in record["respawners"])
