"""Run commands, wait for things: what the rest of the lab is made of."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class LabError(RuntimeError):
    """Something in the lab did not do what it should; the message names the host and the step."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    timeout: float = 120,
    stdin: str | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and catch its output. LabError when it fails (with `check`) or takes longer than `timeout` s."""
    feed = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            list(command), env=os.environ | dict(environment or {}), text=True, capture_output=True, timeout=timeout,
            cwd=folder, errors="replace", **feed,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LabError(f"After {timeout:g} s this had not ended: {shlex.join(command)[-300:]}") from error
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"Status {done.returncode} of {shlex.join(command)[-300:]}: {said[-2000:]}")
    return done


def wait_for(happened: Callable[[], bool], what: str, deadline: float, interval: float = 0.02) -> None:
    """Poll until it happened; LabError at the deadline (a time.monotonic() instant)."""
    while not happened():
        if time.monotonic() > deadline:
            raise LabError(f"Waited in vain for {what}.")
        time.sleep(interval)


def replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
