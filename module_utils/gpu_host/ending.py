"""Ending servers: TERM to the main, a wait on events, KILL for what remains, and a look for what comes back.

Every look judges all processes anew, so that a child born late or a worker orphaned meanwhile is found, and one that
is no longer what it was is let go.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

from .command_line import SHELLS, file_name
from .deadline import Deadline
from .managers import Manager, Managers, Stop
from .processes import SSHD, Finding, reparented
from .procfs import Proc, Process
from .signals import Target, gone, send, take, wait_any

LOOK_SECONDS = 0.25  # longest time between two looks at all processes
LINGER_SECONDS = 5.0  # a worker whose main just ended in order leaves by itself within this time
WRAPPER_SECONDS = 1.0  # a container's first process that is no server passes its signal on within this time, or never
RESPAWN_SECONDS = 5.0  # how long a parent that outlived its server is watched
PROMPT_LOOKS = 6  # looks in a row, 0.1 s apart: a loop typed at a prompt shows in one of them, if only by its sleep
# Parents that live on and start nothing by themselves.
QUIET_PARENTS = ("tmux", "screen", "SCREEN", "zellij", *SSHD)

Look = Callable[[], "tuple[Mapping[int, Process], Mapping[int, Finding]]"]


class Diary(Protocol):
    """Told of every process before and after it is signalled, so that no kill stays untold; see ``journal``."""

    def will_signal(self, processes: Sequence[Mapping[str, Any]]) -> None: ...

    def signalled(self, processes: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass
class _Victim:
    """``first`` is what it was when first seen and what the record says; ``target`` what it is, ``since`` when."""

    first: Finding
    target: Target
    seen: float
    since: float
    signal: str = "none"
    refused: str = ""
    ended: float | None = None

    @property
    def finding(self) -> Finding:
        return self.target.finding


@dataclass
class Outcome:
    """What happened: ``killed`` in the order of their ends, ``alive`` what KILL did not end, sentences in ``notes``."""

    killed: list[dict[str, Any]] = field(default_factory=list)
    alive: list[Finding] = field(default_factory=list)
    respawners: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_exit: float | None = None
    forced: bool = False

    def add(self, later: Outcome) -> None:
        """Take over what a later run did."""
        self.killed += later.killed
        self.alive += later.alive
        self.respawners += later.respawners
        self.notes += later.notes
        self.last_exit = later.last_exit or self.last_exit
        self.forced = self.forced or later.forced


def planned(chosen: Mapping[int, Finding]) -> list[dict[str, Any]]:
    """What a reset would end, for check mode: the main by TERM, orphans by KILL, the rest with their main."""
    rows = []
    for finding in sorted(chosen.values(), key=lambda finding: finding.process.pid):
        first = "KILL" if finding.kind == "orphan" else "TERM" if finding.main or not finding.ours else "none"
        rows.append(_row(finding, first, None))
    return rows


def _row(finding: Finding, signal_name: str, seconds: float | None) -> dict[str, Any]:
    process = finding.process
    return {
        "pid": process.pid,
        "start_time": process.start_ticks,
        "name": process.name,
        "class": finding.kind,
        "why": finding.why,
        "signal": signal_name,
        "seconds": None if seconds is None else round(seconds, 3),
    }


class Ending:
    """One run of the kill phase.

    ``look`` returns all processes and those that are to end, judged anew each time. ``grace`` and ``kill_timeout``
    are seconds.
    """

    def __init__(
        self,
        proc: Proc,
        look: Look,
        managers: Managers,
        diary: Diary,
        grace: float,
        kill_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._look = look
        self._managers = managers
        self._diary = diary
        self._grace = grace
        self._kill_timeout = kill_timeout
        self._clock = clock
        self._victims: dict[tuple[int, int], _Victim] = {}
        self._wrapped: list[_Victim] = []
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """End what ``look`` chose. Never raises for a process that vanished or may not be signalled."""
        processes, chosen = self._look()
        parents = surviving_parents(processes, chosen)
        self._track(chosen)
        stops, left = self._managers.plan(chosen, processes, Deadline(self._grace + self._kill_timeout, self._clock))
        self._begin(stops)
        self._drain(Deadline(self._grace, self._clock))
        self._force(Deadline(self._kill_timeout, self._clock))
        self._outcome.alive = [victim.finding for victim in self._alive()]
        for stop in stops:
            problem = self._managers.settle(stop.manager, Deadline(self._kill_timeout, self._clock))
            if problem:
                self._outcome.notes.append(problem)
        stopped = {pid for stop in stops for pid in stop.pids}
        self._watch(left, [parent for parent in parents if parent.pid not in stopped], processes)
        for victim in self._victims.values():
            victim.target.close()
        return self._outcome

    def _track(self, chosen: Mapping[int, Finding]) -> None:
        for finding in chosen.values():
            identity = (finding.process.pid, finding.process.start_ticks)
            known = self._victims.get(identity)
            if known is not None:
                # The same process under a new name or in a new state: worker turned orphan, child given its title.
                if known.ended is None and known.finding != finding:
                    if finding.kind != known.finding.kind:
                        known.since = self._clock()
                    known.target = Target(finding, known.target.pidfd)
                continue
            target = take(self._proc, finding)
            if target is not None:
                now = self._clock()
                self._victims[identity] = _Victim(finding, target, seen=now, since=now)

    def _let_go(self, processes: Mapping[int, Process], chosen: Mapping[int, Finding]) -> None:
        """Drop those that execute another program by now, which nobody judged a server: pid and start time stay.

        A new name alone is no other program: workers rename themselves while they start.
        """
        for identity, victim in list(self._victims.items()):
            pid, start_ticks = identity
            now = processes.get(pid)
            if victim.ended is not None or pid in chosen or now is None or now.start_ticks != start_ticks:
                continue
            was = victim.finding.process.exe_name
            if was and now.exe_name not in ("", was):
                name = victim.first.process.name
                self._outcome.notes.append(f"process {pid} was {name}, runs {now.name} now: let go")
                victim.target.close()
                del self._victims[identity]
                self._wrapped = [one for one in self._wrapped if one is not victim]

    def _alive(self) -> list[_Victim]:
        return [victim for victim in self._victims.values() if victim.ended is None]

    def _signal(self, victims: list[_Victim], signum: signal.Signals) -> None:
        name = signum.name[3:]
        victims = [victim for victim in victims if victim.signal != name]
        if not victims:
            return
        self._diary.will_signal([_row(victim.first, name, None) for victim in victims])
        sent = []
        for victim in victims:
            victim.signal = name
            try:
                if send(self._proc, victim.target, signum):
                    sent.append(_row(victim.first, name, None))
            except PermissionError:
                victim.refused = f"{victim.finding.process.name} ({victim.target.pid}) belongs to another user"
                self._outcome.notes.append(victim.refused)
        self._diary.signalled(sent)

    def _begin(self, stops: list[Stop]) -> None:
        """Managers stop their own; orphans are killed at once; a server's main, and nothing else of it, gets TERM."""
        managed = {pid for stop in stops for pid in stop.pids}
        alive = self._alive()
        stopping = [victim for victim in alive if victim.target.pid in managed]
        ends_itself = {stop.manager.main_pid for stop in stops} | {
            pid for stop in stops if stop.manager.kind == "unit" for pid in stop.pids
        }
        self._wrapped = [victim for victim in stopping if victim.finding.main and victim.target.pid not in ends_itself]
        for victim in stopping:
            victim.signal = "TERM"
        rows = [_row(victim.first, "TERM", None) for victim in stopping]
        if stops:
            self._diary.will_signal(rows)
        for stop in stops:
            self._managers.stop(stop.manager, self._grace, Deadline(self._grace, self._clock))
        if stops:
            self._diary.signalled(rows)
        free = [victim for victim in alive if victim.target.pid not in managed]
        self._signal([victim for victim in free if victim.finding.kind == "orphan"], signal.SIGKILL)
        self._signal([victim for victim in free if victim.finding.main or not victim.finding.ours], signal.SIGTERM)

    def _pass_term_on(self) -> None:
        """TERM to a server whose container's first process is a shell around it, which as pid 1 ignores its own."""
        due = [one for one in self._wrapped if one.ended is None and one.since <= self._clock() - WRAPPER_SECONDS]
        self._wrapped = [one for one in self._wrapped if one not in due]
        for victim in due:
            victim.signal = "none"
        self._signal(due, signal.SIGTERM)

    def _collect(self) -> None:
        for victim in self._alive():
            if gone(self._proc, victim.target):
                victim.ended = self._clock()
                self._outcome.last_exit = victim.ended
                self._outcome.killed.append(_row(victim.first, victim.signal, victim.ended - victim.seen))

    def _step(self, deadline: Deadline) -> list[_Victim]:
        """Wait for an end or the next look, then judge anew; the victims still alive."""
        alive = self._alive()
        if alive:
            wait_any(self._proc, [victim.target for victim in alive], deadline.capped(LOOK_SECONDS))
        self._collect()
        processes, chosen = self._look()
        self._track(chosen)
        self._let_go(processes, chosen)
        self._collect()
        return self._alive()

    def _drain(self, deadline: Deadline) -> None:
        alive = self._step(deadline.capped(0.0))
        while any(victim.signal != "KILL" for victim in alive) and not deadline.expired():
            self._pass_term_on()
            late = self._clock() - LINGER_SECONDS
            self._signal(
                [victim for victim in alive if victim.finding.kind == "orphan" and victim.since <= late], signal.SIGKILL
            )
            self._end_headless(alive, late)
            alive = self._step(deadline)

    def _end_headless(self, alive: list[_Victim], late: float) -> None:
        """KILL to what is left of a server over several hosts whose first one has ended it.

        Nobody is there any more who could tell these to stop, or who waits for what they compute.
        """
        for main in alive:
            if not main.finding.main or not main.finding.group or main.since > late:
                continue
            from . import later_rank  # not needed for a server of one host

            own = [one for one in alive if one.finding.group == main.finding.group]
            argv, pids = main.finding.process.argv, [one.target.pid for one in own]
            if later_rank.head_is_gone(self._proc, argv, pids):
                self._signal(own, signal.SIGKILL)

    def _force(self, deadline: Deadline) -> None:
        alive = self._alive()
        while alive:
            self._outcome.forced = True
            self._signal(alive, signal.SIGKILL)
            if deadline.expired() or all(victim.refused for victim in alive):
                return
            alive = self._step(deadline)

    def _watch(self, left: list[Manager], parents: list[Process], before: Mapping[int, Process]) -> None:
        """Look for what would start a server again: the managers left alone and the parents that live on."""
        outcome = self._outcome
        for manager in left:
            outcome.respawners.append(
                f"{manager.label} restarts its server (policy {manager.restarts}) and was not stopped as a whole:"
                f" {manager.stop_command}"
            )
        waiting = {parent.pid: parent for parent in parents}
        known = set(before)
        deadline = Deadline(RESPAWN_SECONDS if outcome.killed else 0.0, self._clock)
        quiet = dict.fromkeys(waiting, 0)
        while waiting:
            processes, chosen = self._look()
            for pid, parent in list(waiting.items()):
                now = processes.get(pid)
                if now is None or now.gone or now.start_ticks != parent.start_ticks:
                    del waiting[pid]
                elif any(finding.main and finding.process.ppid == pid for finding in chosen.values()):
                    outcome.respawners.append(f"{parent.name} ({pid}) started a server again: end it, then reset")
                    del waiting[pid]
                elif at_a_prompt(now):
                    quiet[pid] = 0 if _new_children(now, processes, known) else quiet[pid] + 1
                    if quiet[pid] >= PROMPT_LOOKS:
                        del waiting[pid]
            if deadline.expired():
                break
            if waiting:
                time.sleep(min(0.1, deadline.remaining()))
        for pid, parent in waiting.items():
            outcome.respawners.append(
                f"{parent.name} ({pid}) started the server and lives on, so it may start it again: end it, then reset"
            )


def surviving_parents(processes: Mapping[int, Process], chosen: Mapping[int, Finding]) -> list[Process]:
    """Parents of the mains that are to end, where the parent is not to end with them."""
    found: dict[int, Process] = {}
    for finding in chosen.values():
        process = finding.process
        if not finding.main or reparented(process, processes):
            continue
        parent = processes[process.ppid]
        if parent.pid not in chosen and parent.exe_name not in QUIET_PARENTS:
            found[parent.pid] = parent
    return list(found.values())


def at_a_prompt(process: Process) -> bool:
    """Whether a shell reads its commands from a person: no script and no -c on its command line."""
    if not process.argv or file_name(process.argv[0].lstrip("-")) not in SHELLS:
        return False
    words = iter(process.argv[1:])
    for word in words:
        if word in ("--rcfile", "--init-file"):
            next(words, "")
        elif not word.startswith("-") or (not word.startswith("--") and "c" in word):
            return False
    return True


def _new_children(process: Process, processes: Mapping[int, Process], known: set[int]) -> bool:
    """Whether the shell started something since the server ended, such as the sleep of a loop typed at a prompt."""
    return any(
        other.ppid == process.pid and other.pid not in known and not other.gone for other in processes.values()
    )
