"""The control node's part of server_health: slices in a row, a line of progress at least every 15 s, the cause of a
failure from the catalogue, and the evidence of a stuck server brought here."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import failures, records
from .together import Together

LINE_SECONDS = 15.0
NOT_MET = (
    "The ranks of {hosts} did not all meet: see that each host reaches sglang_dist_init_addr, and that"
    " NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (sglang_environment) name the network between them."
)
PAUSE_SECONDS = 2.0  # of a host that is ready and waits for the proof of the one that serves
FOLDER = "health"
SHOWN_LINES = 15

Call = Callable[[], dict[str, Any]]
Show = Callable[[str], None]


class Heartbeat:
    """Repeats the last line of progress while a call to the host takes longer than usual (a proof, a slow host)."""

    def __init__(self, show: Show, seconds: float) -> None:
        self._show = show
        self._seconds = seconds
        self._line = ""
        self._shown = self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def line(self, text: str) -> None:
        self._line, self._shown = text, time.monotonic()
        self._show(text)

    def _beat(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 3)):
            now = time.monotonic()
            if now - self._shown >= self._seconds:
                self._shown = now
                self._show(f"{self._line or 'waiting for the host'} ({now - self._began:.0f} s so far)")


def follow(
    call: Call, params: dict[str, Any], host: str, show: Show, together: Together | None = None
) -> dict[str, Any]:
    """Call for slices until the end; the end's result, completed. A call that brings no slice back is the end too.

    `call` sends `params` as they are at that moment: each slice gets what the one before it handed on. `together` knows
    of the other hosts of the same server: a later host is ready when the first one has proven that the whole serves.
    """
    params.update(carry={}, one_slice=True, run_id=params["run_id"] or records.new_run_id())
    with Heartbeat(lambda text: show(f"{host}: {text}"), LINE_SECONDS) as heartbeat:
        while True:
            params["carry"].pop("others_idle", None)
            params["carry"].update(together.for_host() if together else {})
            result = call()
            ended = "carry" not in result or result.get("ended")
            if ended and not (together and result.get("verdict") == "ready" and together.waits()):
                done = completed(result, params, host)
                return together.finish(done) if together else done
            if together:
                together.tell(result)
            if together and ended:
                first = together.waits()
                heartbeat.line(f"{params['name']}: its ranks here are ready, {first} is still to prove that it serves")
                time.sleep(PAUSE_SECONDS)
            else:
                heartbeat.line(str(result["progress"]))
            params["carry"] = result["carry"]


def completed(result: dict[str, Any], params: dict[str, Any], host: str) -> dict[str, Any]:
    """With the cause of a failure, and with what came from the host in files instead of in the result."""
    verdict = result.get("verdict")
    result.pop("carry", None)
    log = result.pop("log_tail", "")
    files = {**result.pop("evidence_files", {}), **({"log.txt": log} if log else {})}
    if verdict not in ("failed", "stuck"):
        return result
    if verdict == "stuck" and result.get("phase") == "distributed" and len(params.get("nodes") or ()) > 1:
        result["msg"] = f"{result['msg']} {NOT_MET.format(hosts=', '.join(params['nodes']))}"
    elif log and not result.get("timed_out"):
        found = failures.diagnose(log, result.get("exit_status"), stuck=verdict == "stuck")
        result["diagnosis"] = {key: value for key, value in asdict(found).items() if key != "also"}
        if found.known or found.evidence_line:
            result["msg"] = f"{result['msg']} {found.sentence}"
    if files:
        folder = _keep(files, host, params)
        result["artifacts"] = str(folder)
        result["msg"] = f"{result['msg']} Evidence: {folder}"
    result["log_lines"] = [line for line in re.split(r"[\r\n]+", log) if line.strip()][-SHOWN_LINES:]
    return result


def _keep(files: dict[str, str], host: str, params: dict[str, Any]) -> Path:
    """Write the evidence below artifacts/health/, readable by its owner alone."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", host)
    folder = records.artifacts_folder() / FOLDER / f"{safe}-{params['name']}-{params['run_id']}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / Path(name).name
        path.write_text(text, encoding="utf-8", errors="replace")
        path.chmod(0o600)
    return folder
