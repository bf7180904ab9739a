"""Whether a reset may touch the servers of a host now, and how it lets accepted requests finish first.

============  ==========================================================================================================
drain         every host; requests that were accepted get up to the grace to finish, then the servers are told to end
idle_only     only where no server has, or may have, a request that runs or waits
zombies_only  only where every server that would end holds memory and does not answer
force         every host, at once
============  ==========================================================================================================

``decide`` is pure. ``Gate`` looks at the servers and at the router around it, under the host lock, before anything is
signalled. Where a state can't be known the two sparing policies leave the host alone and say why.

Why a drain waits before it sends SIGTERM, which itself lets SGLang finish what runs: a SGLang whose last health check
failed (a long prefill is enough) ends at once on SIGTERM, and so does vLLM. And why a request that comes between the
last look and SIGTERM is safe: SGLang accepts and finishes it, and SIGKILL comes a whole grace later at the earliest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from . import later_rank, router, server_http, server_state
from .deadline import Deadline
from .processes import Finding, Patterns
from .procfs import Proc
from .readings import Readings
from .router import Out, Router, RouterTrouble
from .scope import Scope
from .server_state import ServerState

DRAIN, IDLE_ONLY, ZOMBIES_ONLY, FORCE = "drain", "idle_only", "zombies_only", "force"
SPARING = (IDLE_ONLY, ZOMBIES_ONLY)
LOOK_SECONDS = {DRAIN: 6.0, IDLE_ONLY: 10.0, ZOMBIES_ONLY: 10.0}  # longest look at all servers
QUIET_SECONDS = 2.0  # how long idle_only watches servers that look idle: requests may come in gaps
SETTLED_SECONDS = 1.0  # a drained server stays without requests this long: an idle scheduler reports once a second
PAUSE_SECONDS = 0.25


@dataclass(frozen=True)
class Decision:
    """``skip`` says why the host is left alone, empty where it may be reset; ``wait_for`` are mains with requests."""

    skip: str = ""
    wait_for: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def decide(
    policy: str, states: Sequence[ServerState], unknown: Sequence[str] = (), headless: Collection[int] = ()
) -> Decision:
    """What the policy says to these servers, which are all that the reset would end.

    ``unknown`` names server processes that belong to none of them, ``headless`` the mains of later ranks whose first
    one is gone: they look busy for ever, and nobody waits for what they do.
    """
    asked = [state for state in states if state.main_pid not in headless]
    if policy == IDLE_ONLY:
        against = [why for state in asked if (why := _against_idle_only(state))]
    elif policy == ZOMBIES_ONLY:
        against = [_seen(state) for state in asked if not _deaf(state)]
        if not states and not unknown:
            against = ["no server here holds memory"]
    else:
        waiting = [state for state in asked if policy == DRAIN and _may_have_requests(state)]
        return Decision(
            wait_for=tuple(state.main_pid for state in waiting if state.main_pid is not None),
            notes=tuple(
                f"{state.name} does not tell its requests; it finishes them by itself if it can"
                for state in asked
                if policy == DRAIN and state.state == "idle" and requests(state) is None
            ),
        )
    if policy in SPARING:
        against += [f"the state of {name} can't be known" for name in unknown]
    return Decision(skip=f"policy {policy}: {', '.join(against)}" if against else "")


def requests(state: ServerState) -> int | None:
    """Requests that run or wait, None where the server does not tell."""
    if state.running is None and state.waiting is None:
        return None
    return (state.running or 0) + (state.waiting or 0)


def _seen(state: ServerState) -> str:
    count = requests(state)
    if count is None:
        told = "" if state.state in ("starting", "zombie") else ", and its requests are not known"
        return f"{state.name} is {state.state}{told}"
    return f"{state.name} is {state.state} ({state.running or 0} running, {state.waiting or 0} waiting)"


def _against_idle_only(state: ServerState) -> str:
    """Why this server forbids a reset of idle hosts; '' where no request can be cut."""
    if state.main_pid is None:
        return ""  # nobody is left who could answer a request
    idle = requests(state) == 0 and state.state in ("idle", "hung", "zombie")
    return "" if idle else _seen(state)


def _deaf(state: ServerState) -> bool:
    """Holds memory and does not answer. A hung server whose memory can't be read is in doubt."""
    return state.state == "zombie" or (state.state == "hung" and bool(state.memory_mib))


def _may_have_requests(state: ServerState) -> bool:
    """Those of a hung or dead server never finish, one that starts has none, an untold number can't be waited for."""
    return state.main_pid is not None and (state.state == "busy" or (state.state == "idle" and bool(requests(state))))


class Gate:
    """The policy of one reset. ``decide`` before anything happens, ``clear`` right before the first signal.

    ``grace`` is the drain's deadline in seconds. ``report`` is for the run record: of which router what was taken
    out and put back.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        patterns: Patterns,
        scope: Scope,
        proc: Proc,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy: str = params["policy"]
        self._grace: float = params["grace"]
        self._state_folder: str = params["state_folder"]
        self._device_folder: str = params["device_folder"]
        self._router_url: str = params["router_url"].rstrip("/")
        self._worker_url: str = params["worker_url"]
        self._key_file: str = params["router_api_key_file"]
        self._head_is_reset: bool = params["head_is_reset"]
        self._patterns, self._scope, self._proc, self._run_id = patterns, scope, proc, run_id
        self._clock, self._sleep = clock, sleep
        self._states: list[ServerState] = []
        self._others: list[ServerState] = []
        self._decision = Decision()
        self.taken: list[Out] = []
        self.notes: list[str] = []
        self.report: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return sorted(state.name for state in self._states)

    def decide(self, chosen: Mapping[int, Finding], readings: Readings) -> str:
        """Why the policy leaves the host alone, or ''. Changes nothing."""
        self._decision = self._look(chosen, readings)
        self.notes += self._decision.notes
        return self._decision.skip

    def intention(self) -> str:
        """For check mode: what would come before the end of the servers, or ''."""
        waited = [
            f"{count if (count := requests(state)) is not None else 'the'} requests of {state.name}"
            for state in self._states
            if state.main_pid in self._decision.wait_for
        ]
        parts = [f"wait up to {self._grace:g} s for {', '.join(waited)}"] if waited else []
        workers = list(self._to_take())
        if workers:
            parts.insert(0, f"take {', '.join(workers)} out of the router {self._router_url}")
        return " and ".join(parts)

    def clear(self, chosen: Mapping[int, Finding], readings: Readings) -> str:
        """Take the servers out of the router, let their requests finish; why the host is left alone after all, or ''.

        RouterTrouble where a living server can't be taken out: then nothing has been changed.
        """
        self._take_out()
        if self._policy == DRAIN:
            self._wait(chosen, readings)
            return ""
        # Evidence took its time: the last look is the one that counts.
        quiet = Deadline(QUIET_SECONDS if self._policy == IDLE_ONLY and self._living() else 0.0, self._clock)
        while True:
            self._decision = self._look(chosen, readings)
            if self._decision.skip or quiet.expired():
                return self._decision.skip
            self._sleep(PAUSE_SECONDS)

    def _living(self) -> bool:
        return any(state.main_pid is not None for state in self._states)

    def _look(self, chosen: Mapping[int, Finding], readings: Readings) -> Decision:
        """The states of the servers that the reset would end, and what the policy says to them."""
        seen = server_state.observe(
            Deadline(LOOK_SECONDS[self._policy], self._clock),
            patterns=self._patterns,
            scope=self._scope,
            state_folder=self._state_folder,
            device_folder=self._device_folder,
            readings=readings,
            proc=self._proc,
        )
        wanted = {pid for pid, finding in chosen.items() if finding.ours}
        self._states = [state for state in seen.servers if wanted & set(state.pids)]
        self._others = [state for state in seen.servers if state.pids and not wanted & set(state.pids)]
        known = {pid for state in seen.servers for pid in state.pids}
        strays = self._strays(chosen, wanted - known)
        headless = [state.main_pid or 0 for state in self._states if self._headless(state)]
        return decide(self._policy, self._states, strays, headless)

    def _headless(self, state: ServerState) -> bool:
        """Whether it is the part of a later host of a server whose first one is gone."""
        main = self._proc.process(state.main_pid) if state.main_pid else None
        if main is None or not later_rank.is_later_rank(main.argv):
            return False
        seen = self._policy == DRAIN and later_rank.head_is_gone(self._proc, main.argv, state.pids)
        return seen or self._head_is_reset

    def _strays(self, chosen: Mapping[int, Finding], pids: Iterable[int]) -> list[str]:
        """Server processes of no known server that still live."""
        found = []
        for pid in sorted(pids):
            now = self._proc.process(pid)
            if now is not None and not now.gone and now.start_ticks == chosen[pid].process.start_ticks:
                found.append(f"{now.name} ({pid})")
        return found

    def _wait(self, chosen: Mapping[int, Finding], readings: Readings) -> None:
        """Until no server has requests, or the grace is over. A server that hangs meanwhile is not waited for."""
        if not self._decision.wait_for and not self.taken:
            return
        deadline = Deadline(self._grace, self._clock)
        since: float | None = None
        while not deadline.expired():
            self._decision = self._look(chosen, readings)
            if self._decision.wait_for:
                since = None
            else:
                since = self._clock() if since is None else since
                if self._clock() - since >= SETTLED_SECONDS:
                    return
            self._sleep(min(PAUSE_SECONDS, deadline.remaining()))
        left = [_seen(state) for state in self._states if state.main_pid in self._decision.wait_for]
        if left:
            self.notes.append(f"after {self._grace:g} s of draining: {', '.join(left)}; told to end all the same")

    # ---- the router ----

    def _to_take(self) -> dict[str, ServerState]:
        """The servers behind a router by their address there, but for an address that a server has that lives on."""
        if not self._router_url:
            return {}
        alone = not any(state.port for state in self._others)
        found: dict[str, ServerState] = {}
        for state in self._states:
            url = router.worker_address(self._worker_url, state.port or 0)
            if state.port and (router.PORT in self._worker_url or alone or self._is_of(state)):
                found.setdefault(url, state)
        return found

    def _is_of(self, state: ServerState) -> bool:
        """Whether a fixed address is this server's: by its port."""
        return self._worker_url.rstrip("/").endswith(f":{state.port}")

    def _take_out(self) -> None:
        servers = self._to_take()
        if not servers:
            return
        self.report = {"url": self._router_url, "taken_out": [], "put_back": []}
        try:
            router_now = Router(self._router_url, router.read_key(self._key_file), self._sleep)
            known = router.noted(self._state_folder)
            listed = router_now.workers()
            for url, state in servers.items():
                here = router_now.find(url)
                out = Out(
                    self._router_url,
                    url,
                    state.port or 0,
                    here[0].facts if here else {},
                    self._key_file,
                    datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    self._run_id,
                )
                before = [one for one in known if (one.router, one.worker) == (out.router, out.worker)]
                if not here and before:
                    self._took(before[0])  # an earlier run died in between
                elif not here:
                    names = ", ".join(sorted(one.url for one in listed)) or "none"
                    self.notes.append(f"the router {self._router_url} does not list {url} (it lists {names})")
                else:
                    known = router.merged(known, [out])
                    router.write_note(self._state_folder, known)
                    self._took(out)
                    router_now.remove(url)
        except RouterTrouble as trouble:
            if any(state.state not in ("hung", "zombie") for state in servers.values()):
                raise
            # No request of these ever finishes: their end must not depend on the router.
            self.report["problem"] = str(trouble)
            self.notes.append(str(trouble))

    def _took(self, out: Out) -> None:
        self.taken.append(out)
        self.report["taken_out"].append(out.worker)

    def mains_left(self) -> bool:
        """Whether a server that was taken out of the router lives on."""
        mains = (self._proc.process(state.main_pid) for state in self._states if state.main_pid)
        return bool(self.taken) and any(main is not None and not main.gone for main in mains)

    def put_back_living(self) -> str:
        """Put back into the router what serves; one sentence for what serves and could not be put back, else ''."""
        try:
            out = router.noted(self._state_folder)
        except router.StorageError as error:
            return str(error)
        if not out:
            return ""
        done, problems = put_back(out, serving(self._proc, self._observe()), self._state_folder, self._sleep)
        self.report.setdefault("url", out[0].router)
        self.report.setdefault("taken_out", [])
        self.report.setdefault("put_back", []).extend(one.worker for one in done)
        if problems:
            self.report["problem"] = " ".join(problems)
        return " ".join(problems)

    def _observe(self) -> Sequence[ServerState]:
        return server_state.observe(
            Deadline(LOOK_SECONDS[DRAIN], self._clock),
            patterns=self._patterns,
            scope=self._scope,
            state_folder=self._state_folder,
            device_folder=self._device_folder,
            proc=self._proc,
        ).servers


def serving(proc: Proc, states: Sequence[ServerState]) -> dict[int, str]:
    """The ports of servers that take requests, with the key that each wants ('' for none)."""
    found = {}
    for state in states:
        main = proc.process(state.main_pid) if state.main_pid else None
        if main is not None and state.port and state.state in ("idle", "busy") and not state.draining:
            found[state.port] = server_http.api_key(main.argv, proc.environ(main.pid), proc.cwd(main.pid) or "")
    return found


def put_back(
    out: Sequence[Out], keys: Mapping[int, str], state_folder: str, sleep: Callable[[float], None] = time.sleep
) -> tuple[list[Out], list[str]]:
    """Put back those of ``out`` whose port is in ``keys``; what is back, and one sentence for each that is not.

    The note keeps what is still out.
    """
    done: list[Out] = []
    problems: list[str] = []
    for one in out:
        if one.port not in keys:
            continue
        try:
            Router(one.router, router.read_key(one.key_file), sleep).add(one.worker, one.facts, keys[one.port])
        except RouterTrouble as trouble:
            problems.append(f"{one.worker} is still out of its router: {trouble}")
        else:
            done.append(one)
    router.write_note(state_folder, [one for one in out if one not in done])
    return done, problems
