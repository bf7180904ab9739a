"""Real processes with the command lines and titles of a server, in a few lines of Python and without GPUs."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    import setproctitle
    kind = os.environ.get("MAIN", "orderly")
    os.environ["SGLANG_RUN_ID"] = "run-" + str(os.getpid())
    worker = (
        "from multiprocessing.spawn import spawn_main\\n"  # as SGLang's children read until they have their title
        "import os, signal, sys, time\\n"
        "import setproctitle\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
        "parent = os.getppid()\\n"
        "setproctitle.setproctitle(sys.argv[1])\\n"
        "while os.getppid() == parent or os.environ.get('STAY'): time.sleep(0.02)\\n"
    )
    for title in os.environ.get("TITLES", "sglang::scheduler_TP0,sglang::detokenizer").split(","):
        subprocess.Popen([sys.executable, "-c", worker, title])
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "orderly":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os.kill(os.getpid(), 9)))
    open(os.environ["READY"], "w").close()
    while True:
        time.sleep(60)
    """
)

WORKER = "from multiprocessing.spawn import spawn_main"


class Nursery:
    """Starts processes and ends every one of them by pid when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "sglang"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(LAUNCHER)
        self._pids: list[int] = []
        self._shells: list[subprocess.Popen[bytes]] = []

    def server(self, main: str = "orderly", under: str = "", words: tuple[str, ...] = (), **environment: str) -> int:
        """Start `python -m sglang.launch_server` detached; ``under`` wraps it in a shell command with {} for it."""
        ready = self.folder / f"ready-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "sglang.launch_server", "--port", "1", *words]
        env = os.environ | {"PYTHONPATH": str(self.folder), "MAIN": main, "READY": str(ready)} | environment
        if under:
            self.start(["bash", "-c", under.format(" ".join(command))], env)
        else:
            self.start(["bash", "-c", "setsid " + " ".join(command) + " & exit 0"], env, keep=False)
        wait_for(ready.exists)
        # Titles come a moment later; until then the workers are children of another name.
        wait_for(lambda: not any(WORKER in line for line in self.living().values()))
        return self.pid_of("sglang.launch_server")

    def typed(self, line: str, main: str = "orderly") -> int:
        """Start a server by a line typed into a shell, {} standing for its command; the shell lives on."""
        ready = self.folder / f"ready-{time.monotonic_ns()}"
        env = os.environ | {"PYTHONPATH": str(self.folder), "MAIN": main, "READY": str(ready)}
        shell = subprocess.Popen(
            ["bash"], cwd=self.folder, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._pids.append(shell.pid)
        assert shell.stdin is not None
        shell.stdin.write(line.format(f"{sys.executable} -m sglang.launch_server --port 1").encode() + b"\n")
        shell.stdin.flush()
        self._shells.append(shell)
        wait_for(ready.exists)
        return shell.pid

    def start(self, argv: list[str], env: dict[str, str] | None = None, keep: bool = True) -> int:
        child = subprocess.Popen(
            argv, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        if keep:
            self._pids.append(child.pid)
        else:
            child.wait(10)
        return child.pid

    def living(self) -> dict[int, str]:
        """Processes that run in the folder, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "cwd") == str(self.folder):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def pid_of(self, words: str) -> int:
        return max(pid for pid, line in self.living().items() if words in line and not line.startswith("bash"))

    def close(self) -> None:
        for pid in [*self.living(), *self._pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def wait_for(ready: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"not ready after {seconds} s")
        time.sleep(0.01)
