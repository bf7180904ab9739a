"""Servers on a lab host: the SGLang stand-in, started in the ways in which people start the real one."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.lab.command import LabError, wait_for

if TYPE_CHECKING:
    from tests.lab.host import Host
    from tests.lab.processes import Process

READY = "The server is fired up and ready to roll!"
STANDIN = "/opt/simulator/sglang_standin"

# Prints "<status> <body>"; 000 where nobody answers.
REQUEST = """
import json, sys, urllib.error, urllib.request
url, body, timeout = sys.argv[1], sys.argv[2] or None, float(sys.argv[3])
request = urllib.request.Request(url, body and body.encode(), {"Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("000", error)
"""


@dataclass(frozen=True)
class Server:
    """A server that was started: its main process, port and log on the host, and the unit if it has one."""

    host: Host
    pid: int
    port: int
    log: str
    unit: str = ""

    def tree(self) -> list[Process]:
        """The main process and its descendants, as they are now: whoever is orphaned is no longer in it."""
        everyone = self.host.processes()
        members = {self.pid}
        while grown := {p.pid for p in everyone if p.ppid in members} - members:
            members |= grown
        return [process for process in everyone if process.pid in members]

    def log_text(self) -> str:
        if self.unit:
            return self.host.exec(["journalctl", "--unit", self.unit, "--output", "cat", "--no-pager"]).stdout
        return self.host.read(self.log)

    def is_ready(self) -> bool:
        return READY in self.log_text()

    def wait_until_ready(self, seconds: float = 60) -> Server:
        """Wait for the line that ends the start-up; LabError with the end of the log when it does not come."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(LabError):
            wait_for(lambda: self.is_ready() or not self.host.alive(self.pid), "the server", deadline, interval=0.1)
        if not self.is_ready():
            raise LabError(f"The server {self.pid} on {self.host.name} did not start:\n{self.log_text()[-3000:]}")
        return self

    def request(self, path: str, body: object = None, timeout: float = 10) -> tuple[int, str]:
        """GET, or POST of a JSON body, from the host itself; status 0 where nobody answers."""
        text = json.dumps(body) if body is not None else ""
        url = f"http://127.0.0.1:{self.port}{path}"
        words = ["python3", "-c", REQUEST, url, text, str(timeout)]
        status, _, answer = self.host.exec(words, timeout=timeout + 10).stdout.partition(" ")
        return int(status), answer


def launch(
    host: Host,
    *arguments: str,
    tp: int = 8,
    port: int = 30000,
    how: str = "nohup",
    name: str = "sglang",
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    user: str = "root",
    interpreter: Sequence[str] = ("python3", "-m", "sglang.launch_server"),
) -> Server:
    """Start a server and return at once.

    `how`: ``nohup`` over a non-interactive ssh that ends afterwards; ``setsid``, the same in a session of its own;
    ``unit``, a systemd service `name` with Restart=always. `settings` are the stand-in's, without their prefix.
    """
    home = "/root" if user == "root" else f"/home/{user}"
    log = f"{home}/{name}.log"
    command = [*interpreter, "--model-path", "/models/kimi-k2.5", "--tp-size", str(tp), "--port", str(port), *arguments]
    variables = {"PYTHONPATH": STANDIN, "PYTHONDONTWRITEBYTECODE": "1"} | dict(environment or {})
    variables |= {f"SGLANG_STANDIN_{key}": str(value) for key, value in (settings or {}).items()}
    if how == "unit":
        return _as_unit(host, command, variables, name, port, user)
    words = shlex.join(["env", *(f"{key}={value}" for key, value in variables.items()), *command])
    starter = {"nohup": "nohup", "setsid": "setsid nohup"}[how]
    done = host.ssh(f"{starter} {words} > {log} 2>&1 < /dev/null & echo $!", user=user)
    return Server(host, int(done.stdout), port, log)


def _as_unit(host: Host, command: list[str], variables: dict[str, str], name: str, port: int, user: str) -> Server:
    lines = [f"Environment={json.dumps(f'{key}={value}')}" for key, value in variables.items()]
    program = shlex.join(["/usr/bin/env", *command])
    unit = ["[Service]", f"User={user}", *lines, f"ExecStart={program}", "Restart=always", "RestartSec=1"]
    host.write(f"/etc/systemd/system/{name}.service", "\n".join([*unit, "TimeoutStopSec=30", ""]))
    host.exec(["systemctl", "daemon-reload"])
    host.exec(["systemctl", "start", f"{name}.service"])
    pid = int(host.exec(["systemctl", "show", "--property=MainPID", "--value", f"{name}.service"]).stdout)
    return Server(host, pid, port, "", f"{name}.service")
