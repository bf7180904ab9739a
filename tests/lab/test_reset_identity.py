"""A pid that another process has by now ends nobody: forced for real, between the look and the signal."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from tests.lab.command import LabError
from tests.lab.host import Host
from tests.lab.processes import Process
from tests.lab.resets import FAST, assert_clean, finish, living, numbers, pids, reset, start_reset, start_scene, until

MAIN = 20000
INNOCENT = ["sleep", "54321"]

# Looks, says so, and goes on when told to: with what it saw then, as a reset that was slow would.
SCENE = """
from __future__ import annotations

import os, signal, time

from .ending import Ending
from .managers import Managers
from .processes import Patterns, classify
from .procfs import Proc
from .signals import gone, send, take


class Silent:
    def will_signal(self, processes): pass
    def signalled(self, processes): pass


def pause(name):
    open("/run/scene." + name, "w").close()
    while not os.path.exists("/run/scene.go"):
        time.sleep(0.01)
    os.unlink("/run/scene.go")


def run(params, check_mode, diff):
    if not params["pidfd"]:
        del os.pidfd_open  # a kernel or a Python without it
    proc = Proc()
    processes = proc.snapshot()
    findings = classify(processes, proc, Patterns(), os.getpid())
    chosen = {pid: finding for pid, finding in findings.items() if finding.ours}
    seen = sorted(chosen)
    if params["when"] == "between look and open":
        pause("looked")
        targets = [take(proc, finding) for finding in chosen.values()]
        outcome = Ending(proc, lambda: (processes, chosen), Managers(proc), Silent(), 0.2, 0.2).run()
        taken = [target.pid for target in targets if target is not None]
        return {"seen": seen, "taken": taken, "killed": outcome.killed, "alive": len(outcome.alive)}
    targets = [take(proc, finding) for finding in chosen.values()]
    pause("looked")
    sent = [target.pid for target in targets if send(proc, target, signal.SIGKILL)]
    return {"seen": seen, "taken": [t.pid for t in targets], "sent": sent, "gone": [gone(proc, t) for t in targets]}
"""


def lone_server(host: Host, pid: int) -> Process:
    """The main of a server without children, under this pid."""
    host.write("/root/lone/sglang/launch_server.py", "import signal\nwhile True: signal.pause()\n")
    words = ["env", "PYTHONPATH=/root/lone", "python3", "-m", "sglang.launch_server", "--port", "30000"]
    process = host.start_with_pid(pid, words)
    until(lambda: host.find("python3 -m sglang.launch_server"), "the server")
    return process


def replace(host: Host, pid: int) -> Process:
    """End whoever has the pid and give it to a process that has nothing to do with anything."""
    host.kill(pid)
    until(lambda: host.process(pid) is None, f"{pid} to be free", 5)
    return host.start_with_pid(pid, INNOCENT)


def is_still(host: Host, process: Process) -> bool:
    now = host.process(process.pid)
    return now is not None and now.state != "Z" and now.outside_pid == process.outside_pid


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "no-pidfd"])
@pytest.mark.parametrize("when", ["between look and open", "between open and signal"])
def test_a_pid_reused_after_the_look_ends_nobody(gpu_host: Host, when: str, pidfd: bool) -> None:
    lone_server(gpu_host, MAIN)
    running = start_scene(gpu_host, SCENE, {"when": when, "pidfd": pidfd})
    until(lambda: gpu_host.exec("test -e /run/scene.looked", check=False).returncode == 0, "the look")
    innocent = replace(gpu_host, MAIN)
    gpu_host.exec(["touch", "/run/scene.go"])
    said = finish(running)
    assert said["seen"] == [MAIN]
    if when == "between look and open":
        assert (said["taken"], said["killed"], said["alive"]) == ([], [], 0)
    else:
        assert (said["taken"], said["sent"], said["gone"]) == ([MAIN], [], [True])
    assert is_still(gpu_host, innocent)


def test_the_same_scene_without_a_replacement_ends_the_server(gpu_host: Host) -> None:
    """That the scene above can end somebody at all."""
    lone_server(gpu_host, MAIN)
    running = start_scene(gpu_host, SCENE, {"when": "between open and signal", "pidfd": True})
    until(lambda: gpu_host.exec("test -e /run/scene.looked", check=False).returncode == 0, "the look")
    gpu_host.exec(["touch", "/run/scene.go"])
    assert finish(running)["sent"] == [MAIN]
    until(lambda: living(gpu_host, {MAIN}) == set(), "its end")


def test_a_reset_whose_victims_pids_are_all_reused_during_its_grace_ends_none_of_the_new_ones(gpu_host: Host) -> None:
    """The whole reset, stopped after its TERM; when it goes on, its grace is over and every pid is somebody else's."""
    server = gpu_host.start_server(tp=2, settings=FAST | {"IGNORE_TERM": 1})
    tree = numbers(server.tree())
    running = start_reset(gpu_host, grace=1.5)
    until(lambda: any('"signal": "TERM"' in line for line in journal(gpu_host)), "TERM")
    resetting, *_readers = [p.pid for p in gpu_host.processes() if p.line.startswith("/usr/bin/python3 -c import sys")]
    gpu_host.kill(resetting, signal.SIGSTOP)
    for pid in sorted(tree):
        with contextlib.suppress(LabError, ProcessLookupError):  # its parent's death took it along
            gpu_host.kill(pid)
    until(lambda: not any(gpu_host.process(pid) for pid in tree), "the tree to be reaped")
    innocent = {pid: gpu_host.start_with_pid(pid, INNOCENT) for pid in sorted(tree)}
    time.sleep(1.5)
    gpu_host.kill(resetting, signal.SIGCONT)
    record = finish(running)
    assert pids(record) == tree  # they ended, by another hand
    assert "KILL" not in {row["signal"] for row in record["killed"]}
    assert all(is_still(gpu_host, process) for process in innocent.values())
    assert_clean(gpu_host, record)


def journal(host: Host) -> list[str]:
    return host.exec("cat /var/lib/gpu-host/journal.jsonl", check=False).stdout.splitlines()


def test_a_main_that_became_another_program_under_the_same_pid_is_let_go(gpu_host: Host) -> None:
    """Same pid, same start time: exec makes another program of a process, and that was never judged."""
    gpu_host.write(
        "/root/lone/sglang/launch_server.py",
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.execvp('sleep', ['sleep', '54321']))\n"
        "while True: signal.pause()\n",
    )
    gpu_host.start("env PYTHONPATH=/root/lone python3 -m sglang.launch_server --port 30000")
    (main,) = gpu_host.find("python3 -m sglang.launch_server")
    record = reset(gpu_host, grace=1.0)
    now = gpu_host.process(main.pid)
    assert now is not None and now.command == ("sleep", "54321") and now.start_ticks == main.start_ticks
    assert record["killed"] == []
    assert any(f"process {main.pid} was python3 -m sglang.launch_server, runs sleep now" in n for n in record["notes"])
