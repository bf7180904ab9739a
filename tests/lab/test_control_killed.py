"""The control node's processes killed at random instants of a reset: nothing done on the host stays untold, and the
next run finishes the job.

Ten times here, a hundred with `make control-kills`, in four ways by turns: all of Ansible dies, as when the machine
loses its power; its process group alone, as when a terminal or a service manager ends it, and its workers live on; it
is told to end by SIGINT, as by Ctrl-C; by SIGTERM.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.lab import small_server
from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.lab.resets import living, until

KILLS = int(os.environ.get("CONTROL_KILLS", "10"))
SEED = int(os.environ.get("CONTROL_KILLS_SEED", "1"))
WAITS = {
    "gpu_reset_grace": 0.3,
    "gpu_reset_kill_timeout": 5,
    "gpu_reset_verify_timeout": 5,
    "gpu_reset_policy": "force",
}
JOURNAL = "/var/lib/gpu-host/journal.jsonl"


class Control:
    """`playbooks/reset.yml` against one host, again and again, with one file of records."""

    def __init__(self, host: Host, artifacts: Path) -> None:
        self.host = host
        self.file = artifacts / "resets.jsonl"
        self._log = artifacts / "play.log"
        self._command = ["ansible-playbook", "-i", str(host.lab.write_inventory()), "playbooks/reset.yml"]
        self._command += ["--limit", host.name, "-e", json.dumps(WAITS)]
        self._environment = os.environ | host.lab.ansible_environment() | {"GPU_ARTIFACTS": str(artifacts)}

    def start(self) -> subprocess.Popen[bytes]:
        self.host.lab.check_no_way_out(self.host.address)
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self.host.lab.enter(self._command),
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self) -> float:
        """One run to its end; its seconds."""
        began = time.monotonic()
        status = self.start().wait(timeout=120)
        assert status == 0, self._log.read_text()
        return time.monotonic() - began

    def records(self) -> list[dict[str, Any]]:
        """All records so far: no line is a broken one."""
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def kill(play: subprocess.Popen[bytes], way: int) -> None:
    if way >= 2:
        play.send_signal((signal.SIGINT, signal.SIGTERM)[way - 2])
        play.wait(timeout=60)
        return
    family = descendants(play.pid) if way == 0 else set()
    os.killpg(play.pid, signal.SIGKILL)
    while family:
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        family = {child for pid in family for child in descendants(pid)}
    play.wait()


def descendants(pid: int) -> set[int]:
    """The processes below one, but for ssh's masters, which belong to no run."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level} - found
        found |= level
    return found


def journalled(host: Host) -> set[str]:
    text = host.exec(["cat", JOURNAL], check=False).stdout
    return {json.loads(line)["run_id"] for line in text.splitlines()}


def resetting(host: Host) -> bool:
    return any("import sys,zlib" in process.line for process in host.processes())


def test_whenever_the_control_process_is_killed_the_next_run_finishes_and_tells_what_was_done(
    gpu_host: Host, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    small_server.install(gpu_host)
    control = Control(gpu_host, tmp_path)
    control.run()  # connects
    small_server.start(gpu_host, "--ignore-term")
    whole = control.run()
    told_later = 0
    for number in range(KILLS):
        server = small_server.start(gpu_host, "--ignore-term")
        known = len(control.records())
        instant = chance.uniform(0, whole)
        play = control.start()
        try:
            play.wait(timeout=instant)
        except subprocess.TimeoutExpired:
            kill(play, number % 4)
        until(lambda: not resetting(gpu_host), "the reset on the host to end by itself", 30)
        recorded = {one["run_id"] for one in control.records()}
        told_later += bool(journalled(gpu_host) - recorded)

        control.run()
        records = control.records()
        where = f"kill {number} after {instant:.3f} of {whole:.3f} s"
        assert records[-1]["verdict"] == "clean", where
        assert living(gpu_host, {server}) == set(), where
        assert gpu_host.state.used_mib(0) == 0, where
        # Each run that the host knows of is on the control node, once, and one of them says who was killed.
        ids = [one["run_id"] for one in records]
        assert len(set(ids)) == len(ids) and journalled(gpu_host) <= set(ids), where
        assert [row["pid"] for one in records[known:] for row in one["killed"]] == [server], where
    control.run()
    assert not list((tmp_path / "running").iterdir())  # of each run, each host has a record
    print(f"\n{KILLS} kills within {whole:.2f} s; in {told_later} the next run told what the killed one had done")
    if KILLS >= 50:
        assert told_later >= KILLS // 20
