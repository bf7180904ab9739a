"""What a reset must not end: the engineer's own session, jobs beside the server, monitors, strangers on a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.host import Host
from tests.lab.resets import (
    FAST,
    JOBS,
    TOOLS,
    Session,
    assert_clean,
    bystanders,
    interpreter,
    living,
    numbers,
    pids,
    program,
    reset,
    server_command,
    signals,
    until,
)
from tests.lab.server import STANDIN, Server


def group_and_session(host: Host, pid: int) -> list[str]:
    return host.exec(["ps", "-o", "pgid=,sid=", "-p", str(pid)]).stdout.split()


def ready(host: Host, pid: int, log: str, port: int = 30000) -> Server:
    return Server(host, pid, port, log).wait_until_ready()


def editor(host: Host) -> str:
    """An executable of that name; the hosts have no editor."""
    host.exec(f"mkdir -p {TOOLS} && cp /usr/bin/sleep {TOOLS}/vim")
    return f"{TOOLS}/vim 100000"


def test_a_terminal_with_the_server_its_shell_an_editor_and_a_data_job_loses_the_server_only(gpu_host: Host) -> None:
    vim = editor(gpu_host)
    with Session(gpu_host) as session:
        log = "/root/sglang.log"
        main = session.type(f"nohup {server_command()} > {log} 2>&1 &", "-m sglang.launch_server")
        mine = {
            session.shell,
            session.type(f"python3 {JOBS}/data_job.py &", "data_job.py"),
            session.type(vim, "vim"),
        }
        server = ready(gpu_host, main, log)
        assert group_and_session(gpu_host, main)[1] == group_and_session(gpu_host, session.shell)[1]
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=20.0)
        assert pids(record) == tree
        assert living(gpu_host, mine) == mine and session.open
        assert_clean(gpu_host, record)


def test_an_ssh_command_whose_jobs_share_the_servers_process_group_loses_the_server_only(gpu_host: Host) -> None:
    vim = editor(gpu_host)
    script = (
        f"nohup {server_command(tp=2, settings={'IGNORE_TERM': 1})} > /root/sglang.log 2>&1 < /dev/null & "
        f"python3 {JOBS}/data_job.py > /dev/null & {vim} & wait"
    )
    ssh = subprocess.Popen(gpu_host.ssh_command(script), stdin=subprocess.DEVNULL)
    try:
        until(lambda: gpu_host.find("-m sglang.launch_server --model") and gpu_host.find("data_job.py"), "the jobs")
        (main,) = [p.pid for p in gpu_host.find("python3 -m sglang.launch_server") if "bash" not in p.line]
        (shell,) = [p.pid for p in gpu_host.find("wait") if p.line.startswith("bash -c")]
        server = ready(gpu_host, main, "/root/sglang.log")
        tree = numbers(server.tree())
        jobs = numbers(p for p in gpu_host.processes() if p.line.startswith(("python3 /opt", vim))) | {shell}
        assert len(jobs) == 3
        assert {tuple(group_and_session(gpu_host, pid)) for pid in [*jobs, main]} == {(str(shell), str(shell))}
        record = reset(gpu_host, grace=0.5)
        assert pids(record) == tree
        assert living(gpu_host, jobs) == jobs
        assert ssh.poll() is None
        assert {gpu["verdict"] for gpu in record["gpus"]} == {"free"}
        # A script may have more to do than to wait: what it does next is not known, and so it is named.
        (doubt,) = record["respawners"]
        assert f"bash ({shell}) started the server and lives on" in doubt
        assert record["reason"] == doubt
    finally:
        ssh.kill()
        ssh.wait()


def test_a_data_job_that_lives_in_the_session_of_a_dead_servers_orphans_lives_on(gpu_host: Host) -> None:
    """The session's leader is gone, and so is the server: nothing but its own marks makes a process ours."""
    script = (
        f"nohup {server_command(tp=2, settings={'OUTLIVE_MAIN': 1})} > /root/sglang.log 2>&1 < /dev/null & echo $!; "
        f"nohup python3 {JOBS}/data_job.py --orphan-child > /root/job.log 2>&1 < /dev/null &"
    )
    main = int(gpu_host.ssh(script).stdout)
    ready(gpu_host, main, "/root/sglang.log")
    child = int(gpu_host.read("/root/job.log").split()[0])
    gpu_host.kill(main)
    record = reset(gpu_host)
    assert len(record["killed"]) >= 3
    assert gpu_host.alive(child)
    assert_clean(gpu_host, record)


@contextmanager
def training(host: Host, *options: str) -> Iterator[int]:
    """A training job on GPU 5, of the same user, interpreter and PYTHONPATH as the servers; its pid."""
    command = f"env PYTHONPATH={STANDIN} nohup python3 {JOBS}/train_draft.py --gpu 5 --mib 20000 {' '.join(options)}"
    pid = int(host.ssh(f"{command} > /root/train.log 2>&1 < /dev/null & echo $!").stdout)
    until(lambda: host.state.used_mib(5) >= 20000, "the training job")
    yield pid
    if host.alive(pid):
        host.kill(pid)


def test_a_training_job_on_gpu_5_lives_on_and_the_host_is_dirty_by_its_name(gpu_host: Host) -> None:
    with bystanders(gpu_host), training(gpu_host) as job:
        server = gpu_host.start_server(tp=4, settings=FAST)
        tree = numbers(server.tree())
        record = reset(gpu_host, grace=20.0)
        assert pids(record) == tree
        assert gpu_host.alive(job)
        assert record["verdict"] == "dirty" and record["failed"] is True
        assert "GPU 5" in record["reason"] and "train_draft.py" in record["reason"] and str(job) in record["reason"]
        verdicts = {gpu["index"]: gpu["verdict"] for gpu in record["gpus"]}
        assert verdicts.pop(5) == "in_use"
        assert set(verdicts.values()) == {"free", "protected_only"}
        assert record["gpus"][5]["pids"] == [job]
        assert record["seconds"]["verify"] < 2  # nobody waits for a job that will not end


def test_a_stranger_on_a_gpu_ends_with_kill_strangers_and_nobody_else_does(gpu_host: Host) -> None:
    with bystanders(gpu_host), training(gpu_host) as job:
        record = reset(gpu_host, kill_strangers=True, grace=2.0)
        assert pids(record) == {job}
        assert signals(record)[job] == "TERM"
        assert_clean(gpu_host, record)


def test_a_stranger_on_a_gpu_that_was_not_asked_for_lives_with_kill_strangers(gpu_host: Host) -> None:
    with training(gpu_host) as job:
        record = reset(gpu_host, kill_strangers=True, gpus=["4", "6"])
        assert record["killed"] == []
        assert gpu_host.alive(job)
        assert_clean(gpu_host, record, [4, 6])


def test_an_engine_inside_a_training_job_lives_on_though_it_has_a_servers_title(gpu_host: Host) -> None:
    with training(gpu_host, "--engine") as job:
        (engine,) = gpu_host.find("sglang::scheduler")
        record = reset(gpu_host)
        assert record["killed"] == []
        assert living(gpu_host, {job, engine.pid}) == {job, engine.pid}
        assert record["verdict"] == "dirty"
        assert {job, engine.pid} <= pids(record, "spared")


def test_a_protected_monitor_that_holds_more_than_its_bound_lives_on_and_the_host_is_dirty(gpu_host: Host) -> None:
    with bystanders(gpu_host):
        record = reset(gpu_host, protected_mib=100, kill_strangers=True)
        assert record["killed"] == []
        assert record["verdict"] == "dirty"
        assert "nv-hostengine" in record["reason"] and "GPU 0" in record["reason"]


def test_a_name_on_the_callers_protected_list_is_spared_though_it_holds_a_gpu(gpu_host: Host) -> None:
    command = ["python3", f"{JOBS}/monitor.py", "acme-gpu-agent", "--tools", TOOLS, "--gpu", "2", "--mib", "500"]
    agent = int(gpu_host.ssh(f"nohup {' '.join(command)} > /dev/null 2>&1 < /dev/null & echo $!").stdout)
    until(lambda: gpu_host.find("acme-gpu-agent 1000000"), "the agent")
    unknown = reset(gpu_host)
    assert unknown["verdict"] == "dirty" and "acme-gpu-agent" in unknown["reason"]
    known = reset(gpu_host, protected=["acme-gpu-agent"], kill_strangers=True)
    assert known["verdict"] == "clean" and known["gpus"][2]["verdict"] == "protected_only"
    assert gpu_host.alive(agent)


def test_other_ssh_sessions_stay_open(gpu_host: Host) -> None:
    with Session(gpu_host) as session, Session(gpu_host, user="engineer") as other:
        main = gpu_host.start_server(tp=1, settings=FAST).pid
        record = reset(gpu_host, grace=20.0)
        assert main in pids(record)
        assert session.open and gpu_host.alive(session.shell)
        assert other.open and gpu_host.alive(other.shell)
        assert_clean(gpu_host, record)


def test_a_reset_that_was_started_from_within_a_server_does_not_end_its_own_ancestors(gpu_host: Host) -> None:
    gpu_host.write(
        "/root/sglang/launch_server.py",
        f"import subprocess; subprocess.run({interpreter()!r}, shell=True)",
    )
    command = gpu_host.ssh_command("cd /root && python3 -m sglang.launch_server")
    done = subprocess.run(command, input=program({}), stdout=subprocess.PIPE, timeout=30)
    assert b'"verdict": "clean"' in done.stdout and b'"killed": []' in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("uses_driver", [True, False], ids=["device-open", "no-device"])
def test_a_jobs_orphan_whose_environment_is_blanked_is_never_ended(gpu_host: Host, uses_driver: bool) -> None:
    """Unreadable is not absent: in doubt it lives, and is reported where it uses the driver."""
    gpu_host.write(
        "/root/etl.py",
        "import os, signal, setproctitle\n"
        + ("os.open('/dev/nvidia3', os.O_RDWR)\n" if uses_driver else "")
        + "setproctitle.setproctitle('etl: stage 3')\nsignal.pause()\n",
    )
    gpu_host.start("python3 /root/etl.py")
    until(lambda: gpu_host.find("etl: stage 3"), "the job to rename itself")
    (job,) = gpu_host.find("etl: stage 3")
    assert gpu_host.exec(f"tr -d '\\0' < /proc/{job.pid}/environ").stdout == ""
    record = reset(gpu_host, kill_strangers=True)
    assert record["killed"] == [] and gpu_host.alive(job.pid)
    assert record["verdict"] == ("dirty" if uses_driver else "clean")
    assert (f"etl: stage 3 ({job.pid})" in record["reason"]) == uses_driver
