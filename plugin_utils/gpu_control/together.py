"""What the hosts that share one server let each other know while each of them is followed: notes in a folder of this
run of Ansible, one file a host, written by the processes that follow them side by side.

A host that has loaded waits for a slower one without a sign of work, and one whose neighbour died waits for ever: no
host can tell by itself. Where the others are not followed at the same time (too few forks) there are no notes, and each
host is judged alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BAD = ("failed", "stuck")
# Seconds that a host is given to end by itself, with a cause of its own, after another has ended.
OWN_END = 10.0
# Seconds in which the end of one host shows on the others.
ALL_ENDED = 6.0
# Seconds after which another host that has told nothing is one that nobody follows.
NO_NOTE = 15.0


class Together:
    """The notes of one server's hosts in one task. `task` keeps those of another task of the same run apart."""

    def __init__(self, folder: Path, task: str, nodes: Sequence[str], host: str) -> None:
        self._folder = folder / f"together-{task}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._nodes = list(nodes)
        self._host = host
        self._began = time.monotonic()
        self._seen_bad: float | None = None
        self.tell({"carry": {}})  # followed, though nothing is known of it yet

    def tell(self, result: Mapping[str, Any]) -> None:
        """Note how far this host is: the result of a slice."""
        now = time.monotonic()
        note = {
            "idle": float(result.get("idle") or 0.0),
            "ended_at": now if result.get("ended") or "carry" not in result else None,
            "verdict": result.get("verdict") or ("failed" if result.get("failed") else ""),
            "reason": str(result.get("reason") or result.get("msg") or ""),
        }
        passing = self._path(self._host).with_suffix(f".{os.getpid()}")
        passing.write_text(json.dumps(note), encoding="utf-8")
        passing.replace(self._path(self._host))

    def for_host(self) -> dict[str, Any]:
        """What the next slice has to know of the others: `others_idle`, and `give_up` where one has ended badly."""
        notes = self._others()
        known: dict[str, Any] = {}
        working = [note["idle"] for note in notes.values() if note["ended_at"] is None]
        if working:
            known["others_idle"] = min(working)
        bad = self._bad(notes)
        if bad:
            known["others_idle"] = 0.0  # it waits for one that does not come any more: no cause of its own
            now = time.monotonic()
            self._seen_bad = self._seen_bad or now
            if now - self._seen_bad >= OWN_END or notes[bad]["verdict"] == "stuck":
                words = "is stuck" if notes[bad]["verdict"] == "stuck" else "failed"
                why = f"{bad}, which shares this server, {words}: {notes[bad]['reason']}"
                known["give_up"] = [notes[bad]["verdict"], why]
        return known

    def waits(self) -> str:
        """The host whose proof is still out while this one has nothing left to do; '' where there is none."""
        first = self._nodes[0]
        if self._host == first:
            return ""
        note = self._others().get(first)
        if note is None:
            return first if time.monotonic() - self._began < NO_NOTE else ""
        return "" if note["verdict"] == "ready" else first

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result of this host, noted; a bad one says which other host ended badly as well, and why. All parts of a
        server die within seconds of each other, and the cause may be in another's log."""
        cause = (result.get("diagnosis") or {}).get("cause") or ""
        self.tell({**result, "ended": True, "reason": f"{result.get('reason') or result.get('msg')} {cause}".strip()})
        if result.get("verdict") not in BAD or "which shares this server" in str(result.get("reason")):
            return result
        until = time.monotonic() + ALL_ENDED
        while not (bad := self._bad(notes := self._others())):
            working = any(note["ended_at"] is None for note in notes.values())
            if not working or time.monotonic() >= until:
                return result
            time.sleep(0.2)
        words = "is stuck" if notes[bad]["verdict"] == "stuck" else "failed"
        result["msg"] = f"{result['msg']} Also, {bad} {words}: {notes[bad]['reason']}"
        return result

    def _bad(self, notes: Mapping[str, Mapping[str, Any]]) -> str:
        """Who ended badly first."""
        ended = [(note["ended_at"], host) for host, note in notes.items() if note["verdict"] in BAD]
        return min(ended)[1] if ended else ""

    def _path(self, host: str) -> Path:
        return self._folder / f"{self._nodes.index(host)}.json"

    def _others(self) -> dict[str, dict[str, Any]]:
        found = {}
        for host in self._nodes:
            if host != self._host and self._path(host).exists():
                found[host] = json.loads(self._path(host).read_text(encoding="utf-8"))
        return found
