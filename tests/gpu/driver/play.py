"""Runs a playbook over the local connection and keeps what its tasks returned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import servers
from .session import REPOSITORY, Session, changed_of, decoded

# Results that go into the session's record; the rest is in the output's end.
KEPT_ACTIONS = (
    "gpu_host_info", "gpu_reset", "kernel_build", "nccl_environment", "server_health", "server_info", "server_launch",
)  # fmt: skip
DROPPED = ("facts", "files", "diff", "spared")


@dataclass(frozen=True)
class Played:
    """`seconds` from the start to the end, which was at `ended` (time.monotonic()); `results` of all tasks in their
    order (kept_results.py)."""

    rc: int
    seconds: float
    changed: int | None
    output: str
    ended: float
    results: list[dict[str, Any]] = field(default_factory=list)

    def last(self, action: str) -> dict[str, Any]:
        """What the last task of this action returned, {} where none ran."""
        found = [one["result"] for one in self.results if one["action"] == action]
        return dict(found[-1]) if found else {}

    @property
    def failed_action(self) -> str:
        """Action of the first task that failed."""
        return next((str(one["action"]) for one in self.results if one["status"] == "failed"), "")


class Running:
    """A playbook that runs; `wait` gives what it did."""

    def __init__(self, s: Session, playbook: str, label: str, variables: dict[str, Any], words: Sequence[str]) -> None:
        self._s, self._playbook, self._label, self._variables = s, playbook, label, variables
        number = sum(1 for _ in s.work.glob("play-*.json"))
        self._kept = s.work / f"play-{number}.results"
        extra = s.work / f"play-{number}.json"
        extra.write_text(json.dumps(variables))
        command = [*s.playbook_command, playbook, "-i", "tests/gpu/inventory", "-e", f"@{extra}", *words]
        plugins = [REPOSITORY / "callback_plugins", servers.HERE / "callback_plugins"]
        environment = {
            **os.environ,
            "PATH": f"{s.bundle.site / 'bin'}:{os.environ['PATH']}",
            "NO_COLOR": "1",
            "KEPT_RESULTS": str(self._kept),
            "ANSIBLE_CALLBACK_PLUGINS": os.pathsep.join(map(str, plugins)),
            "ANSIBLE_CALLBACKS_ENABLED": "gpu_verdicts,kept_results",
        }
        self._began = time.monotonic()
        self._child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._out = b""
        self._ended = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._out += line
        self._ended = time.monotonic()

    def over(self) -> bool:
        return self._child.poll() is not None

    def wait(self, seconds: float) -> Played:
        try:
            rc = self._child.wait(max(1.0, seconds - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            # Our own session: ansible-playbook and its workers. A server that it had started leads one of its own.
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            rc = -1
        self._reader.join(5)
        ended = self._ended or time.monotonic()
        took = round(ended - self._began, 2)
        output = (f"not done after {seconds} s\n" if rc == -1 else "") + decoded(self._out)
        done = Played(rc, took, changed_of(output), output, ended, _lines(self._kept))
        self._s.write(
            "play",
            label=self._label,
            playbook=self._playbook,
            variables=self._variables,
            rc=rc,
            seconds=took,
            changed=done.changed,
            results=[_shown(one) for one in done.results if one["action"] in KEPT_ACTIONS],
            output=output[-5000:],
        )
        health = done.last("server_health")
        self._s.say(f"{self._label}: rc {rc}, {took} s, changed {done.changed}, {health.get('msg', '')[:300]}")
        return done


def play(
    s: Session, playbook: str, label: str, variables: dict[str, Any], seconds: float, words: Sequence[str] = ()
) -> Played:
    """Run it to its end, at most so many seconds."""
    return Running(s, playbook, label, variables, words).wait(seconds)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except OSError:
        return []


def _shown(one: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in one["result"].items() if key not in DROPPED}
    return {**one, "result": result}
