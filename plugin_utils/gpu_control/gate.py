"""Whether a host may be begun now, asked on the control node right before the host is contacted.

What is asked comes from the task ``reset_plan`` at the start of playbooks/reset.yml and restart.yml. Other plays that
reset hosts have no such task, and no gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import breaker, records, rolling

PAUSE_SECONDS = 0.1
OWNERLESS = ("unowned_memory", "other_namespace")


class Gate:
    """The gate of one host. ``plan`` is what reset_plan returned; ``nodes`` share a server with the host, or are none.

    ``run_folder`` lives as long as the run.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        host: str,
        nodes: Sequence[str],
        run_folder: Path,
        artifacts: Path,
        check_mode: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.plan, self.host, self.artifacts, self.check_mode, self.clock = plan, host, artifacts, check_mode, clock
        self.nodes = list(nodes) if host in nodes and len(nodes) > 1 else [host]
        self.tally = breaker.Tally(tally_folder(run_folder, plan["id"]))
        self._unit = "\n".join(self.nodes)

    @property
    def head(self) -> str:
        """The node that answers for the server: the one of rank 0."""
        return self.nodes[0]

    def begin(self, play: Sequence[str], not_ready: Callable[[str], str]) -> str:
        """Why the host is skipped, '' where it may be begun; ``play`` are the run's hosts.

        What is decided for the first node of a server holds for all, and for the host's later calls in the same run.
        """
        reason = self.tally.decided(self._unit)
        if reason is None:
            reason = self.tally.decide(self._unit, self._against(play, not_ready))
        if len(self.nodes) > 1:
            # Each node for itself, too: a run that ends between two of them must not be followed by the second.
            reason = self.tally.decide(self.host, reason)
        if reason and not self.check_mode and self.host not in self.plan["held_out"]:
            self._count(breaker.SKIPPED)
        if reason and self.host in self.plan["held_out"]:
            return rolling.HELD_OUT
        if reason == rolling.HELD_OUT:  # decided by a node that is held out itself
            return self._against(play, not_ready) or reason
        return reason

    def _against(self, play: Sequence[str], not_ready: Callable[[str], str]) -> str:
        sentences = {node: not_ready(node) for node in self.nodes if node != self.host}
        if reason := rolling.why_left_out(self.host, self.nodes, self.plan["held_out"], play, sentences):
            return reason
        end = self.plan["not_after"]
        if end is not None and self.clock() > end:
            return f"not begun: it was its turn after {rolling.iso(end)} (reset_not_after)"
        if self.check_mode:
            return ""
        if reason := self.tally.stopped():
            return f"not begun: {reason}"
        try:
            trip = breaker.tripped(self.artifacts / breaker.FILE_NAME, self.plan["fleet"])
        except breaker.Unreadable as error:
            return f"not begun: {error}"
        return f"not begun: {trip.sentence}" if trip else ""

    def wait_for_head(self, policy: str) -> str | None:
        """Wait until the server's first node is done, where this is another one and the policy asks the server.

        None where nothing was to wait for; '' where the server has ended, so that nobody is left to ask here; else why
        this host is skipped. The task's own timeout ends the wait.
        """
        if self.host == self.head or policy == "force":
            return None
        while (verdict := self.tally.outcome(self.head)) is None:
            time.sleep(PAUSE_SECONDS)
        if verdict in ("clean", "dirty"):
            return ""
        return (
            f"its server runs over {', '.join(self.nodes)}, and {self.head}, which answers for it, is {verdict}: they"
            " are reset together or not at all"
        )

    def end(self, returned: Mapping[str, Any] | None, asks_hypervisor: bool = False) -> None:
        """Count what came of the host; None where it could not be reached.

        With ``asks_hypervisor`` memory without an owner is not the last word yet.
        """
        verdict = "without a verdict" if returned is None else str(returned.get("verdict") or "without a verdict")
        if len(self.nodes) > 1:
            self.tally.ended(self.host, verdict)
        if self.check_mode:
            return
        kind = breaker.SKIPPED if verdict == "skipped" else breaker.DONE
        if verdict == "dirty" and returned is not None and not (asks_hypervisor and _ownerless(returned)):
            before = records.last_state(self.artifacts / records.FILE_NAME, self.host)
            kind = breaker.DONE if before == "dirty" else breaker.NEWLY_DIRTY
        self._count(kind)

    def failed_afterwards(self) -> None:
        """The host was reset, and then did not get its server back."""
        self._count(breaker.NEWLY_DIRTY)

    def _count(self, kind: str) -> None:
        counted = self.tally.count(self.host, kind)
        worse = tuple(sorted(host for host, one in counted.items() if one == breaker.NEWLY_DIRTY))
        hosts = self.plan["count"] - sum(one == breaker.SKIPPED for one in counted.values())
        if not worse or not breaker.too_many(len(worse), hosts, self.plan["share"]) or self.tally.stopped():
            return
        trip = breaker.Trip(
            fleet=self.plan["fleet"],
            since=records.timestamp(self.clock()),
            play=self.plan["id"],
            schedule=self.plan["schedule"],
            share=self.plan["share"],
            hosts=hosts,
            newly_dirty=worse,
        )
        self.tally.stop(trip.sentence)
        breaker.trip(self.artifacts / breaker.FILE_NAME, trip)


def tally_folder(run_folder: Path, play: str) -> Path:
    """Where a run keeps what it decided."""
    return run_folder / f"reset-{play}"


def skipped(reason: str, policy: str, check_mode: bool) -> dict[str, Any]:
    """What gpu_reset returns for a host that was not contacted."""
    one = {"verdict": "skipped", "reason": reason, "msg": f"skipped: {reason}", "policy": policy, "servers": []}
    return {**one, "run_id": records.new_run_id(), "changed": False, **({"predicted": True} if check_mode else {})}


def _ownerless(returned: Mapping[str, Any]) -> bool:
    return any(gpu.get("verdict") in OWNERLESS for gpu in returned.get("gpus", ()))
