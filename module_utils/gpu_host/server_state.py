"""The state of each server on the host, and the evidence for it. Never changes anything.

========  ==========================================================================================================
starting  its start-up has not finished: loading for 25 minutes is starting, not hung
idle      no request runs or waits, and its schedulers report
busy      requests run or wait, or a scheduler computes; a long prefill is busy, though /health says 503
hung      its start-up has finished, its main process answers, and it makes no progress
zombie    memory is held (or will be taken), but the main process is gone or deaf
absent    a record without processes
========  ==========================================================================================================

``judge`` is pure and decides from ``Facts``; ``observe`` gathers them for all servers at once; ``run`` is the module.
No progress means: between two looks no scheduler reported, no counter moved and no batch line came, a scheduler does
not answer a question of its own (/server_info), and either it used no CPU time or it has been silent for long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from . import later_rank, listeners, server_http, server_log, server_record
from .deadline import Deadline
from .managers import NEVER_STOPPED, Managers
from .nvml import Reader
from .processes import Patterns, classify, program
from .procfs import Proc, Process
from .readings import Readings
from .scope import Scope
from .server_record import ServerRecord

STATES = ("starting", "idle", "busy", "hung", "zombie", "absent")
SIMULATED = "-simulated"  # ends the driver version of a simulated host
RUN_ID = "SGLANG_RUN_ID"
STOPPED = ("T", "t")

FRESH = 1.5  # seconds: a scheduler's report this young is progress (idle ones report at least once a second)
QUIET = 5.0  # seconds of silence before a scheduler that uses no CPU time is called hung
HUNG_AFTER = 300.0  # seconds of silence after which computing is no excuse (SGLang's own watchdog ends a batch then)
YOUNG = 60.0  # seconds: a main this young that does not listen yet is starting, whatever an older log says
LOOK_PAUSE = 0.5  # seconds between two looks
ANSWER_SECONDS = 3.0  # longest wait for one HTTP answer
READ_SHARE = 0.4  # part of the time that the GPUs may take to be read


@dataclass(frozen=True)
class Facts:
    """What was seen of one server. None means that it could not be known, which is never the same as no.

    Times are seconds. ``listening``: a process of this server listens on its port. ``log_ready``: the log has the
    ready line of this start. ``answered``: the main process answered an HTTP request. ``progress`` is the evidence of
    work or attention between two looks, empty without any. ``ticks`` is the CPU time (clock ticks) that the
    schedulers used over ``watched`` seconds. ``silent`` is how long ago a scheduler last reported or wrote a batch
    line. ``echo``: whether the schedulers answered a question. ``later_rank``: another host serves the requests.
    """

    recorded: bool = False
    main: str = ""  # state letter of the main process, empty when it is gone
    main_pid: int = 0
    main_age: float = 1e9
    workers: int = 0
    schedulers: int | None = None
    memory_mib: int | None = None
    port: int | None = None
    listening: bool | None = None
    reachable: bool = True
    log_ready: bool | None = None
    draining: bool = False
    ready: bool | None = None
    answered: bool | None = None
    trouble: str = ""
    running: int | None = None
    waiting: int | None = None
    progress: str = ""
    stopped: tuple[int, ...] = ()
    ticks: int | None = None
    watched: float = 0.0
    silent: float | None = None
    echo: bool | None = None
    later_rank: bool = False

    @property
    def requests(self) -> int | None:
        if self.running is None and self.waiting is None:
            return None
        return (self.running or 0) + (self.waiting or 0)

    @property
    def still(self) -> bool:
        """The schedulers used no CPU time while we watched."""
        return self.ticks == 0 and self.watched > 0


@dataclass(frozen=True)
class ServerState:
    """One server: who it is, where it runs, its state and in one sentence why. Holds no secret.

    ``gpus`` are UUIDs by the driver's list, ``memory_mib`` what it holds there (None: can't be known); the request
    counts are the server's own, None where it does not tell. ``silent_seconds``: see ``Facts.silent``.
    """

    name: str
    state: str
    why: str
    main_pid: int | None = None
    pids: tuple[int, ...] = ()
    port: int | None = None
    unit: str = ""
    gpus: tuple[str, ...] = ()
    memory_mib: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    model: str = ""
    running: int | None = None
    waiting: int | None = None
    silent_seconds: float | None = None
    log: str = ""
    run_id: str = ""
    started: str = ""  # ISO 8601, UTC
    recorded: bool = False
    draining: bool = False

    def to_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        shown["pids"], shown["gpus"] = list(self.pids), list(self.gpus)
        return shown


@dataclass(frozen=True)
class Observation:
    """All servers of the host at one moment. ``problems`` holds one sentence for each thing that could not be read."""

    servers: tuple[ServerState, ...]
    readings: Readings
    problems: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        return (self.readings.driver_version or "").endswith(SIMULATED)


def judge(facts: Facts, hung_after: float = HUNG_AFTER) -> tuple[str, str]:
    """State and the sentence that says why."""
    if not facts.main and not facts.workers:
        known = "a record of it but no" if facts.recorded else "neither a record nor a"
        return "absent", f"There is {known} process."
    if not facts.main:
        one = facts.workers == 1
        left = "1 worker process is left and" if one else f"{facts.workers} worker processes are left and"
        return "zombie", f"Its main process is gone; {left} {_held(facts, 'holds' if one else 'hold')}."
    main = f"Its main process {facts.main_pid}"
    finished, evidence = _finished(facts)
    stopped = _stopped(facts)
    if not finished:
        return "starting", f"Its start-up has not finished: {evidence}{'; note that ' + stopped if stopped else ''}."
    if stopped:
        return "hung", f"{stopped[0].upper()}{stopped[1:]} and computes nothing."
    if facts.main in STOPPED:
        return _deaf(facts), f"{main} is stopped (state {facts.main}) and {_held(facts)}."
    if facts.listening is False and not facts.later_rank:
        ending = ", since it is shutting down" if facts.draining else ""
        return _deaf(facts), f"{main} no longer listens on port {facts.port}{ending}, and {_held(facts)}."
    if facts.schedulers == 0:
        return _deaf(facts), f"{main} lives, but none of its schedulers does, and {_held(facts)}."
    if facts.later_rank:
        return "busy", "It is a part of a server over several hosts and computes or waits for the first of them."
    if facts.answered is False:
        if facts.progress:
            return "busy", f"{main} is slow to answer, but {facts.progress}."
        return _deaf(facts), f"{main} does not answer on port {facts.port}, and {_held(facts)}."
    return _by_progress(facts, hung_after)


def _by_progress(facts: Facts, hung_after: float) -> tuple[str, str]:
    """Idle, busy or hung, for a server whose main answers and whose start-up has finished."""
    count = facts.requests
    load = _load(facts)
    drains = "It is shutting down and finishes accepted requests; " if facts.draining else ""
    progress = facts.progress or ("its schedulers answered a question" if facts.echo else "")
    if progress:
        return ("busy" if count else "idle"), _sentence(f"{drains}{load}, and {progress}")
    silence = f"for {facts.silent:.0f} s" if facts.silent is not None else f"while watched for {facts.watched:.1f} s"
    long_silent = facts.silent is not None and facts.silent >= hung_after
    quiet = facts.silent is None or facts.silent >= QUIET
    # Without an answer of the schedulers themselves only waiting requests show that there is something to do.
    suspect = facts.echo is False or bool(count)
    if suspect and facts.still and quiet:
        return "hung", _sentence(f"{load}, but its schedulers reported nothing {silence} and use no CPU time")
    if suspect and long_silent:
        return "hung", _sentence(f"{load}, but its schedulers reported nothing {silence}, though they use CPU time")
    if suspect:
        return "busy", _sentence(f"{drains}{load}, and its schedulers compute, though they reported nothing {silence}")
    if count is None and not facts.reachable:
        return "busy" if facts.ticks else "idle", "It can't be asked from here (another network namespace)."
    return "idle", _sentence(f"{drains}{load}{'; ' + facts.trouble if facts.trouble else ''}")


def _finished(facts: Facts) -> tuple[bool, str]:
    """Whether the start-up has finished, and if not, by what evidence."""
    if facts.listening is False and not facts.log_ready:
        where = f"port {facts.port} does not listen yet"
        return False, f"{where} and the log has no ready line" if facts.log_ready is False else where
    if facts.listening is False and not facts.later_rank and facts.main_age < YOUNG:
        return False, f"it is {facts.main_age:.0f} s old and port {facts.port} does not listen yet"
    if facts.log_ready or facts.ready:
        return True, ""
    if facts.log_ready is False:
        return False, f"port {facts.port} listens, but the log has no ready line yet"
    if facts.ready is False:
        return False, f"port {facts.port} listens, but /ready says that it is not"
    return True, ""


def _stopped(facts: Facts) -> str:
    if not facts.stopped:
        return ""
    pids = ", ".join(map(str, facts.stopped))
    return (
        f"scheduler process {pids} is stopped (state T)"
        if len(facts.stopped) == 1
        else (f"each of its scheduler processes {pids} is stopped (state T)")
    )


def _deaf(facts: Facts) -> str:
    """A main that does not answer makes a zombie where memory is held; unknown memory counts as held."""
    return "hung" if facts.memory_mib == 0 else "zombie"


def _held(facts: Facts, holds: str = "it holds") -> str:
    if facts.memory_mib is None:
        return f"{holds} an amount of GPU memory that can't be read"
    if facts.memory_mib == 0:
        return f"{holds} no GPU memory now" if facts.main else f"{holds} no GPU memory yet"
    return f"{holds} {facts.memory_mib} MiB of GPU memory"


def _load(facts: Facts) -> str:
    if facts.requests is None:
        return "the number of its requests is not known"
    if facts.requests == 0:
        return "no request runs or waits"
    running, waiting = facts.running or 0, facts.waiting or 0
    runs = "1 request runs" if running == 1 else f"{running} requests run"
    return f"{runs} and {waiting} {'waits' if waiting == 1 else 'wait'}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# ---- gathering ----


@dataclass(frozen=True)
class Server:
    """One server as the process table and the records show it, before it is asked anything."""

    name: str
    main: Process | None
    members: tuple[Process, ...]
    schedulers: tuple[Process, ...] | None  # None: its processes wear no titles
    record: ServerRecord | None
    unit: str
    gpus: tuple[str, ...]
    memory_mib: int | None
    run_id: str

    @property
    def workers(self) -> tuple[Process, ...]:
        return tuple(one for one in self.members if self.main is None or one.pid != self.main.pid)


@dataclass(frozen=True)
class Sight:
    """One look at a running server."""

    at: float
    stopped: frozenset[int]
    main: str
    ticks: int | None
    answer: server_http.LoadAnswer | None
    log: server_log.LogSight


def observe(
    deadline: Deadline,
    *,
    patterns: Patterns | None = None,
    scope: Scope | None = None,
    state_folder: str = "/var/lib/gpu-host",
    device_folder: str = "/dev",
    names: Sequence[str] = (),
    hung_after: float = HUNG_AFTER,
    readings: Readings | None = None,
    proc: Proc | None = None,
) -> Observation:
    """The state of every server on the host, all asked in parallel and within the deadline.

    ``names`` narrows it to servers of these names; one that is neither recorded nor running is absent. ``readings``
    saves another look at the GPUs where the caller has just had one.
    """
    proc = proc or Proc()
    seen = readings or _read_gpus(deadline)
    records, problems = server_record.load_all(state_folder)
    servers = find(
        proc, patterns or Patterns(), scope or Scope(), device_folder, seen, records, Managers(proc), deadline
    )
    chosen = [server for server in servers if not names or server.name in names]
    facts = _ask_all(chosen, proc, deadline, hung_after)
    states = [_state(server, fact, version, proc, hung_after) for server, (fact, version) in zip(chosen, facts)]
    known = {server.name for server in servers}
    for record in records:
        if record.name not in known and (not names or record.name in names):
            states.append(_absent(record))
            known.add(record.name)
    states += [ServerState(name, *judge(Facts())) for name in dict.fromkeys(names) if name not in known]
    if seen.error and not seen.gpus:
        problems = [*problems, seen.error]
    return Observation(tuple(sorted(states, key=lambda state: state.name)), seen, tuple(problems))


def observe_for(params: Mapping[str, Any], deadline: Deadline, **more: Any) -> Observation:
    """``observe`` with the patterns, scope and folders among a module's parameters."""
    folders = {name: params[name] for name in ("state_folder", "device_folder")}
    return observe(deadline, patterns=Patterns.of(params), scope=Scope.of(params), **folders, **more)


def _read_gpus(deadline: Deadline) -> Readings:
    reader = Reader()
    try:
        return reader.read(deadline.capped(deadline.remaining() * READ_SHARE))
    finally:
        reader.close()


def find(
    proc: Proc,
    patterns: Patterns,
    scope: Scope,
    device_folder: str,
    readings: Readings,
    records: Iterable[ServerRecord],
    managers: Managers,
    deadline: Deadline,
) -> list[Server]:
    """The servers that have processes, each joined with its record. Asks systemd about a main that is in a unit."""
    processes = proc.snapshot()
    listed = _listed(readings)
    findings = classify(
        processes,
        proc,
        patterns,
        os.getpid(),
        lambda process: scope.sees(proc, process),
        listed,
        device_folder.rstrip("/"),
    )
    groups: dict[str, list[Process]] = {}
    mains: dict[str, Process] = {}
    for finding in findings.values():
        if not finding.ours:
            continue
        key = finding.group
        if key.startswith("orphan-"):  # nothing tells the workers of one dead main from each other but their session
            key = f"session-{finding.process.session}"
        groups.setdefault(key, []).append(finding.process)
        if finding.main:
            mains[key] = finding.process
    unseen = any(pid not in processes for pid in listed)
    found: list[Server] = []
    unmatched = list(records)
    # Servers with a main choose their record first: what is left may be of a dead one.
    for key in sorted(groups, key=lambda key: (key not in mains, groups[key][0].pid)):
        members = tuple(sorted(groups[key], key=lambda process: process.pid))
        main = mains.get(key)
        uuids = frozenset().union(*(listed.get(one.pid, {}).keys() for one in members))
        run_id = _run_id(proc, members)
        unit = _unit(proc, managers, main, deadline) if main else ""
        record = _record_of(main, members, run_id, unit, uuids, unmatched, proc)
        if record is not None:
            unmatched.remove(record)
        found.append(
            Server(
                name=_name(record, main, members, unit, {server.name for server in found}),
                main=main,
                members=members,
                schedulers=_schedulers(members, listed),
                record=record,
                unit=unit,
                gpus=tuple(sorted(uuids)),
                memory_mib=_memory(members, listed, unseen, readings),
                run_id=run_id,
            )
        )
    return found


def _listed(readings: Readings) -> dict[int, dict[str, int | None]]:
    """MiB by GPU of each pid that the driver lists."""
    found: dict[int, dict[str, int | None]] = {}
    for gpu in readings.gpus:
        for process in gpu.processes or ():
            found.setdefault(process.pid, {})[gpu.uuid] = process.used_mib
    return found


def _memory(
    members: Iterable[Process], listed: Mapping[int, Mapping[str, int | None]], unseen: bool, readings: Readings
) -> int | None:
    """MiB that the driver lists for these processes; None when it lists processes that can't be told apart."""
    amounts = [amount for one in members for amount in listed.get(one.pid, {}).values()]
    if None in amounts or not readings.gpus or any(gpu.processes is None for gpu in readings.gpus):
        return None
    if not amounts and unseen:
        return None
    return sum(amount for amount in amounts if amount is not None)


def _schedulers(
    members: Sequence[Process], listed: Mapping[int, Mapping[str, int | None]]
) -> tuple[Process, ...] | None:
    """The processes that compute: by title, else those that the driver lists; None where neither tells."""
    titled = [one for one in members if "::" in one.title and len(one.argv) == 1]
    working = tuple(
        one for one in titled if one.title.startswith(("sglang::scheduler", "VLLM::EngineCore", "VLLM::Worker"))
    )
    on_gpus = tuple(one for one in members if one.pid in listed)
    if working or on_gpus:
        return working or on_gpus
    return () if titled else None


def _run_id(proc: Proc, members: Iterable[Process]) -> str:
    for one in members:
        run_id = (proc.environ(one.pid) or {}).get(RUN_ID, "")
        if run_id:
            return run_id
    return ""


def _unit(proc: Proc, managers: Managers, main: Process, deadline: Deadline) -> str:
    """The systemd unit whose main process this is (or its parent, a wrapper), or an empty string."""
    manager = managers.of(main, deadline.capped(deadline.remaining() / 4))
    if manager is None or manager.kind != "unit" or NEVER_STOPPED.match(manager.name):
        return ""
    return manager.name if manager.main_pid in (main.pid, main.ppid) else ""


def _record_of(
    main: Process | None,
    members: Sequence[Process],
    run_id: str,
    unit: str,
    uuids: frozenset[str],
    records: Sequence[ServerRecord],
    proc: Proc,
) -> ServerRecord | None:
    """The record that this server was started by. Of a dead one: by run id, by its main, or alone on the same GPUs."""
    for record in records:
        if run_id and record.run_id == run_id:
            return record
    if main is not None:
        port = server_record.port_of(main.argv)
        for record in records:
            if (unit and record.unit == unit) or (record.main_pid == main.pid and record.main_alive(proc)):
                return record
        for record in records:
            # A record that names a unit is another server when this one runs without.
            if record.port == port and not record.unit and not unit:
                return record
        return None
    dead = [record for record in records if not record.main_alive(proc)]
    for record in dead:
        if record.main_pid and record.main_pid in {one.session for one in members} | {one.group for one in members}:
            return record
    same = [record for record in dead if uuids and uuids & set(record.gpu_uuids)]
    return same[0] if len(same) == 1 else None


def _name(
    record: ServerRecord | None, main: Process | None, members: Sequence[Process], unit: str, taken: set[str]
) -> str:
    if record is not None:
        return record.name
    if main is None:
        return f"orphans-{members[0].pid}"
    name = server_record.server_name(unit, server_record.port_of(main.argv))
    return name if name not in taken else f"{name}-{main.pid}"


def _ask_all(servers: Sequence[Server], proc: Proc, deadline: Deadline, hung_after: float) -> list[tuple[Facts, str]]:
    """Facts and version of each server, gathered in parallel.

    Each has a thread of its own that is left behind when it blocks (a log on a dead file server): then what it had
    found so far counts.
    """
    results: list[tuple[Facts, str]] = [(_base(server, proc), "") for server in servers]
    threads = []
    for position, server in enumerate(servers):

        def work(position: int = position, server: Server = server) -> None:
            def note(facts: Facts, version: str) -> None:
                results[position] = (facts, version)

            Watch(server, proc, deadline.capped(deadline.remaining() * 0.9), hung_after, note).run()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(deadline.remaining())
    return list(results)


def _base(server: Server, proc: Proc) -> Facts:
    main = server.main
    return Facts(
        recorded=server.record is not None,
        main=main.state if main else "",
        main_pid=main.pid if main else 0,
        main_age=max(0.0, time.time() - proc.start_time_epoch(main)) if main else 0.0,
        workers=len(server.workers),
        schedulers=None if server.schedulers is None else len(server.schedulers),
        memory_mib=server.memory_mib,
        port=_port(server) or None,
        later_rank=main is not None and later_rank.is_later_rank(main.argv),
    )


def _port(server: Server) -> int:
    if server.main is not None:
        return server_record.port_of(server.main.argv)
    return server.record.port if server.record else 0


class Watch:
    """Watches one server until its state is certain or the time is up; ``note`` takes what is known so far."""

    def __init__(
        self,
        server: Server,
        proc: Proc,
        deadline: Deadline,
        hung_after: float,
        note: Callable[[Facts, str], None],
    ) -> None:
        self._server = server
        self._proc = proc
        self._deadline = deadline
        self._hung_after = hung_after
        self._note = note
        self._facts = _base(server, proc)
        self._version = ""
        self._endpoint: server_http.Endpoint | None = None
        self._log = ""
        self._ready_line = server_log.READY

    def run(self) -> None:
        main = self._server.main
        if main is None:
            return
        self._find_endpoint(main)
        first = self._look(main)
        self._update(first, first)
        if self._endpoint is not None and not self._facts.log_ready and self._facts.main not in STOPPED:
            self._set(ready=server_http.is_ready(self._endpoint, self._cap(ANSWER_SECONDS)))
        if not _finished(self._facts)[0]:
            return
        last = first
        while not self._certain() and self._deadline.remaining() > ANSWER_SECONDS / 2 + LOOK_PAUSE:
            time.sleep(min(LOOK_PAUSE, self._deadline.remaining()))
            last = self._look(main)
            self._update(first, last)
        if self._doubtful() and self._endpoint is not None:
            echo, version = server_http.scheduler_answers(self._endpoint, self._cap(ANSWER_SECONDS))
            self._version = version or self._version
            self._set(echo=echo)
            if self._deadline.remaining() > 0.1:
                self._update(first, self._look(main))

    def _set(self, **changes: Any) -> None:
        self._facts = replace(self._facts, **changes)
        self._note(self._facts, self._version)

    def _cap(self, seconds: float) -> Deadline:
        return self._deadline.capped(min(seconds, self._deadline.remaining() * 0.6))

    def _find_endpoint(self, main: Process) -> None:
        """Where the server listens, by the sockets that its own processes have open: the key goes nowhere else."""
        argv, proc, server = main.argv, self._proc, self._server
        cwd = proc.cwd(main.pid) or ""
        wanted = server_http.config_value(argv, cwd, "port")
        port = int(wanted) if wanted.isdigit() and not server_http.option(argv, "--port") else self._facts.port or 0
        everything = listeners.listeners(proc, main.pid)
        own = listeners.of_processes(proc, [one.pid for one in server.members], everything)
        here = [one for one in own if one.port == port]
        proven = bool(here)
        if not here and proc.open_files(main.pid) is None:  # another user's process: its sockets can't be seen
            here = [one for one in everything if one.port == port]
        environment = proc.environ(main.pid)
        self._log = _log_of(server.record, main, proc)
        module = program(argv).module or program(argv).script
        if "vllm" in module:
            self._ready_line = server_log.VLLM_READY
        elif self._facts.later_rank:
            self._ready_line = server_log.LATER_RANK_READY
        same_network = _network(proc, main.pid) == _network(proc, "self")
        if here and same_network:
            key = server_http.api_key(argv, environment, cwd) if proven else ""
            tls = bool(server_http.option(argv, "--ssl-certfile"))
            self._endpoint = server_http.Endpoint(here[0].address, port, tls, key)
        self._set(port=port or None, listening=bool(here), reachable=same_network)

    def _look(self, main: Process) -> Sight:
        proc = self._proc
        answer = None
        if self._endpoint is not None:
            if cpu_ticks(proc, main)[0] in STOPPED:
                answer = server_http.LoadAnswer(False, None, "silent")
            else:
                answer = server_http.load(self._endpoint, self._cap(ANSWER_SECONDS))
        now = proc.process(main.pid)
        same = now is not None and now.start_ticks == main.start_ticks and not now.gone
        ticks: list[int | None] = []
        stopped = set()
        for one in self._server.schedulers or self._server.workers:
            state, used = cpu_ticks(proc, one)
            ticks.append(used)
            if state in STOPPED and self._server.schedulers:
                stopped.add(one.pid)
        known = [used for used in ticks if used is not None]
        return Sight(
            at=time.monotonic(),
            stopped=frozenset(stopped),
            main=now.state if same and now is not None else "",
            ticks=sum(known) if known else None,
            answer=answer,
            log=server_log.look(self._log, self._ready_line, proc.start_time_epoch(main))
            if self._log
            else server_log.LogSight(),
        )

    def _update(self, first: Sight, last: Sight) -> None:
        before, after = (sight.answer.load if sight.answer else None for sight in (first, last))
        if after is not None and after.version:
            self._version = after.version
        now = time.time()
        answered = None
        if self._endpoint is not None:
            answered = any(sight.answer is not None and sight.answer.answered for sight in (first, last))
        # When the last look got no number, the first one's is still the best that is known.
        load = after or before
        progress = _progress(first, last, before, after, now)
        silent = None
        if load is not None and load.stamps:
            silent = max(0.0, now - min(load.stamps))
        elif last.log.batch_age is not None and load is not None and load.requests:
            silent = last.log.batch_age
        self._set(
            main=last.main,
            workers=self._alive(last.main),
            log_ready=last.log.ready,
            draining=last.log.draining,
            answered=answered,
            trouble=(last.answer.trouble if last.answer and last.answer.answered and load is None else ""),
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            progress="" if last.stopped else progress,
            # Stopped in both looks: a debugger or a profiler stops a process for a moment.
            stopped=tuple(sorted(first.stopped & last.stopped)) if last is not first else (),
            ticks=last.ticks - first.ticks if first.ticks is not None and last.ticks is not None else None,
            watched=last.at - first.at,
            silent=silent,
        )

    def _certain(self) -> bool:
        """Nothing that another look could show would change the state."""
        facts = self._facts
        if facts.later_rank:
            return facts.watched > 0
        if self._stopped_once():
            return facts.watched >= LOOK_PAUSE
        if not facts.main or facts.main in STOPPED or facts.listening is False or facts.schedulers == 0:
            return facts.watched > 0 or not facts.main
        if facts.progress:
            return True
        if facts.answered is False:
            return False  # as much time as there is
        if facts.silent is None and facts.requests in (0, None):
            return facts.watched > 0  # ask the schedulers themselves
        long_enough = facts.watched >= 2 * LOOK_PAUSE
        if facts.silent is not None:
            return long_enough and facts.silent >= QUIET
        return facts.watched >= 4 * LOOK_PAUSE

    def _alive(self, main: str) -> int:
        """Workers that live; counted again once the main has gone, since they go with it."""
        if main:
            return len(self._server.workers)
        return sum(cpu_ticks(self._proc, one)[0] not in ("", "Z", "X") for one in self._server.workers)

    def _stopped_once(self) -> bool:
        return any(cpu_ticks(self._proc, one)[0] in STOPPED for one in self._server.schedulers or ())

    def _doubtful(self) -> bool:
        facts = self._facts
        return bool(facts.main) and facts.answered is True and not facts.progress and not facts.stopped


def _progress(
    first: Sight, last: Sight, before: server_http.Load | None, after: server_http.Load | None, now: float
) -> str:
    """The evidence that the schedulers work or listen, or an empty string."""
    if after is not None and after.stamps:
        oldest = now - min(after.stamps)
        if abs(oldest) <= FRESH:
            return f"its schedulers reported {max(0.0, oldest):.1f} s ago"
        old = before.stamps if before is not None else ()
        if len(old) == len(after.stamps) and all(new > was for was, new in zip(old, after.stamps)):
            return "its schedulers reported between two looks"
    if last is first:
        return ""
    if before is not None and after is not None and not after.stamps and before.counters != after.counters:
        return "its counters moved between two looks"
    if last.log.batch_at is not None and last.log.batch_at != first.log.batch_at:
        return "its log got a new batch line between two looks"
    return ""


def _network(proc: Proc, pid: int | str) -> int | None:
    try:
        return os.stat(f"{proc.root}/{pid}/ns/net").st_ino
    except OSError:
        return None


def cpu_ticks(proc: Proc, process: Process) -> tuple[str, int | None]:
    """State letter of the process now, and the CPU time of all its threads in clock ticks; None when it is no more."""
    try:
        with open(f"{proc.root}/{process.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if int(fields[19]) != process.start_ticks:
            return "", None
        return fields[0].decode(), int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return "", None


def _log_of(record: ServerRecord | None, main: Process, proc: Proc) -> str:
    """Where the server writes: as recorded, or where its own output goes when it is a later start than the record's."""
    recorded = record.log if record else ""
    own = server_record.log_file(proc, main.pid) if record is None or record.main_pid != main.pid else ""
    return own or recorded or server_record.log_file(proc, main.pid)


def _state(server: Server, facts: Facts, version: str, proc: Proc, hung_after: float) -> ServerState:
    state, why = judge(facts, hung_after)
    main, record = server.main, server.record
    versions = dict(record.versions) if record else {}
    if version:
        versions["vllm" if main and "vllm" in " ".join(main.argv[:3]) else "sglang"] = version
    argv = main.argv if main else record.argv if record else ()
    log = _log_of(record, main, proc) if main else record.log if record else ""
    return ServerState(
        name=server.name,
        state=state,
        why=why,
        main_pid=main.pid if main and facts.main else None,
        pids=tuple(one.pid for one in server.members),
        port=facts.port,
        unit=server.unit or (record.unit if record else ""),
        gpus=server.gpus,
        memory_mib=server.memory_mib,
        versions=versions,
        model=server_http.option(argv, "--model-path") or server_http.option(argv, "--model"),
        running=facts.running,
        waiting=facts.waiting,
        silent_seconds=None if facts.silent is None else round(facts.silent, 1),
        log=log,
        run_id=server.run_id,
        started=_iso(proc.start_time_epoch(main)) if main else "",
        recorded=record is not None,
        draining=facts.draining,
    )


def _absent(record: ServerRecord) -> ServerState:
    state, why = judge(Facts(recorded=True))
    return ServerState(
        name=record.name,
        state=state,
        why=why,
        port=record.port or None,
        unit=record.unit,
        versions=dict(record.versions),
        model=server_http.option(record.argv, "--model-path") or server_http.option(record.argv, "--model"),
        log=record.log,
        recorded=True,
    )


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds")


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module server_info: ``params`` are those of library/server_info.py. Nothing is ever changed."""
    del check_mode, diff
    seen = observe_for(
        params,
        Deadline(params["timeout"]),
        names=params["servers"],
        hung_after=params.get("hung_after", HUNG_AFTER),
    )
    servers = [state.to_dict() for state in seen.servers]
    words = ", ".join(f"{state.name} is {state.state}" for state in seen.servers)
    return {
        "changed": False,
        "servers": servers,
        "states": {state.name: state.state for state in seen.servers},
        "problems": list(seen.problems),
        "source": seen.readings.source,
        "simulated": seen.simulated,
        "msg": f"{words}." if words else "There is no server on this host, and no record of one.",
    }
