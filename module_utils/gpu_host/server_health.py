"""Follows one server from its start until it is ready, has failed, or is stuck. Changes nothing on the host but its own
notes: the verdict in the deployment's record, evidence of a stuck server, answers to compare with.

Work is done in slices of a few seconds, so that the control node can show progress in between: ``carry`` is what one
slice hands to the next (JSON). Without it ``run`` goes on until the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import (
    deployment,
    evidence,
    later_rank,
    listeners,
    masking,
    server_http,
    server_log,
    server_record,
    server_start,
    serving_proof,
    stack_outliers,
    startup_phases,
    startup_watch,
)
from .child import run_command
from .deadline import Deadline
from .nvml import Reader
from .procfs import Proc, Process
from .readings import Readings
from .server_http import Endpoint
from .server_record import ServerRecord
from .server_state import cpu_ticks
from .serving_proof import Expected, NotProven, Proof
from .startup_watch import Look, Watch
from .storage import StorageError

POLL_SECONDS = 0.5
LOOK_SECONDS = 1.0  # between two looks at the processes
GPU_SECONDS = 4.0  # between two readings of the GPUs
FRESH_SECONDS = 3.0  # so old may be what is known of the other hosts when this one is called stuck
STARTING_SECONDS = 15.0  # a start is queued, its process is about to be there
ENDING_SECONDS = 3.0  # a main process is gone, its unit is about to say so
EVIDENCE_SECONDS = 6.0
READ_AT_ONCE = 4 << 20  # bytes of the log
LOG_KEPT = 1 << 20  # bytes of the log from which phases are read: its start-up
SEARCHED_BYTES = 32 << 20  # of the log, for the begin of a restart
TAIL_BYTES = 256 << 10  # of the log, for the control node
EVIDENCE_FILE_BYTES = 512 << 10
_ACCESS = re.compile(rb'"(?:GET|POST|HEAD|PUT) \S+ HTTP/')
_ENDING = re.compile(rb"^.*(?:kill_process_tree called:|Draining requests and shutting down).*$", re.MULTILINE)
FINISHED = ("ready", "drain")


class NoServer(Exception):
    """There is nothing to follow; the text is one sentence."""


@dataclass(frozen=True)
class Target:
    """The server as it is now: its main process (None: gone), and what its unit says."""

    record: ServerRecord
    main: Process | None
    unit: server_start.Unit | None
    later_rank: bool


@dataclass(frozen=True)
class Collected:
    """Evidence of a server that hangs: its folder on the host, its texts by name, the rank that it points at ('' none),
    and where that one stands, a clause."""

    folder: str
    files: dict[str, str]
    rank: str
    where: str


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module server_health: ``params`` are those of library/server_health.py."""
    del check_mode, diff
    carry = params.get("carry")
    while True:
        health = Health(params, carry or {})
        try:
            result = health.slice()
        except (NoServer, StorageError) as reason:
            result = {"ended": True, "verdict": "failed", "failed": True, "reason": str(reason), "msg": str(reason)}
        finally:
            health.close()
        if result["ended"] or params["one_slice"]:
            if not params["one_slice"]:
                result.pop("carry", None)
            return {"changed": False, **result}
        carry = result["carry"]


class Health:
    """One slice."""

    def __init__(self, params: Mapping[str, Any], carry: Mapping[str, Any], proc: Proc | None = None) -> None:
        self._params = params
        self._proc = proc or Proc()
        self._name: str = params["name"]
        self._state_folder: str = params["state_folder"]
        self._carry = dict(carry)
        self._now = time.monotonic()
        # monotonic is one clock for the whole host, so slices can hand moments to each other
        self._began: float = self._carry.setdefault("began", self._now)
        self._reader = Reader()
        self._readings: Readings | None = None
        self._read_at = 0.0
        self._text = b""

    def close(self) -> None:
        self._reader.close()

    def slice(self) -> dict[str, Any]:
        """Look until the slice is over or the end is known."""
        until = Deadline(min(self._params["slice_seconds"], max(0.1, self._left())))
        target = self._target()
        last_look = 0.0
        while True:
            target = self._again(target)
            if target.main is None:
                return self._failed(target)
            self._read_log(target.record.log)
            progress = self._progress()
            if "give_up" in self._carry:
                return self._given_up(target, progress)
            if progress.phase in FINISHED:
                return self._prove(target)
            if time.monotonic() - last_look >= LOOK_SECONDS:
                last_look = time.monotonic()
                watch = self._watch(target, progress.phase)
                # Ranks that have loaded wait, without a sign of work, for those of a slower host.
                others = self._carry.get("others_idle", float("inf"))
                if min(watch.idle(time.monotonic()), others) >= self._params["stall"]:
                    if len(self._params["nodes"]) < 2 or time.monotonic() - self._now < FRESH_SECONDS:
                        return self._stuck(target, progress, watch)
                    until = Deadline(0.0)  # first hear what the others do now
            if self._left() <= 0:
                return self._too_slow(target, progress)
            if until.expired():
                line, idle = self._line(progress), self._idle()
                return {"ended": False, "carry": self._carry, "progress": line, "phase": progress.phase, "idle": idle}
            time.sleep(min(POLL_SECONDS, max(0.01, until.remaining())))

    def _left(self) -> float:
        return float(self._params["timeout"] - (time.monotonic() - self._began))

    # ---- who is followed ----

    def _target(self) -> Target:
        record = server_record.load(self._state_folder, self._name)
        if record is None:
            raise NoServer(f"There is no record of a server {self._name} on this host: start it with server_launch.")
        later = later_rank.is_later_rank(record.argv)
        target = self._again(Target(record, None, None, later))
        if "log_from" not in self._carry:
            present = deployment.load(self._state_folder, self._name)
            restarted = target.main is not None and record.main_pid not in (0, target.main.pid)
            self._carry["log_from"] = _log_from(record.log, present.log_from if present else 0, restarted)
        return target

    def _again(self, target: Target) -> Target:
        """The same server, looked at now. Its main process is kept by pid and start time once it is known."""
        known = self._carry.get("main_pid")
        if known:
            main = self._proc.process(known)
            if main is not None and not main.gone and main.start_ticks == self._carry["main_ticks"]:
                return replace(target, main=main)
        wait = Deadline(ENDING_SECONDS if known else STARTING_SECONDS)
        while True:
            unit = self._unit(target.record.unit) if target.record.unit else None
            main = None if known else self._found(target, unit)
            if main is not None:
                self._carry.update(main_pid=main.pid, main_ticks=main.start_ticks)
            # A unit may be about to start it, or about to say that it ended.
            if main is not None or unit is None or unit.ended or self._another(unit) or wait.expired():
                return replace(target, main=main, unit=unit)
            time.sleep(0.1)

    def _found(self, target: Target, unit: server_start.Unit | None) -> Process | None:
        """The main process that was launched, or the present one where none was."""
        if unit is None:
            return self._proc.process(target.record.main_pid) if target.record.main_alive(self._proc) else None
        main = self._proc.process(unit.main_pid) if unit.main_pid else None
        return None if main is None or main.gone or self._another(unit) else main

    def _another(self, unit: server_start.Unit) -> bool:
        """Whether systemd has started another main process since the one that was launched."""
        launched = self._carry.get("main_pid") or self._params["main_pid"]
        return bool(launched) and unit.main_pid not in (0, launched)

    def _unit(self, name: str) -> server_start.Unit:
        answer = run_command(["systemctl", "show", name, "-p", server_start.UNIT_FACTS], Deadline(10.0))
        return server_start.parse_unit(name, answer.stdout)

    def _tree(self, target: Target) -> list[Process]:
        """The main process and what belongs to it: its descendants, and all of its unit's control group."""
        if target.main is None:
            return []
        everyone = self._proc.snapshot()
        pids = set(server_start.family(everyone, target.main.pid))
        if target.record.unit:
            home = self._proc.systemd_cgroup(target.main.pid)
            pids |= {pid for pid in everyone if home.endswith(".service") and self._proc.systemd_cgroup(pid) == home}
        return [process for pid, process in everyone.items() if pid in pids and not process.gone]

    # ---- what it does ----

    def _read_log(self, log: str) -> None:
        """Read what the log got since the last look; count its lines, keep those of the start-up."""
        start = self._carry["log_from"]
        at = self._carry.setdefault("log_at", start)
        try:
            with open(log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < at:  # truncated by logrotate
                    at = self._carry["log_from"] = start = 0
                if not self._text and at > start:
                    file.seek(start)
                    self._text = file.read(min(at - start, LOG_KEPT))
                file.seek(at)
                new = file.read(READ_AT_ONCE)
        except OSError:
            return
        whole = new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
        if not whole:
            return
        self._carry["log_at"] = at + len(whole)
        lines = [line for line in re.split(rb"[\r\n]+", whole) if line.strip() and not _ACCESS.search(line)]
        self._carry["log_lines"] = self._carry.get("log_lines", 0) + len(lines)
        self._text = (self._text + whole)[-LOG_KEPT:] if len(self._text) < LOG_KEPT else self._text
        if server_log.READY in whole or server_log.LATER_RANK_READY in whole:
            self._carry["ready"] = True

    def _progress(self) -> startup_phases.Progress:
        if self._carry.get("ready"):
            return startup_phases.Progress("ready")
        key = (self._carry.get("log_at"), len(self._text))
        if getattr(self, "_parsed", (None, None))[0] != key:
            # How SGLang ends its processes says nothing about how far they had come.
            found = startup_phases.progress_of(_ENDING.sub(b"", self._text).decode("utf-8", "replace"))
            self._parsed = (key, found)
        return self._parsed[1]

    def _watch(self, target: Target, phase: str) -> Watch:
        tree = self._tree(target)
        look = Look(
            at=time.monotonic(),
            phase=phase,
            log_lines=self._carry.get("log_lines", 0),
            cpu_ticks=sum(cpu_ticks(self._proc, process)[1] or 0 for process in tree),
            read_bytes=sum(self._bytes_read(process.pid) for process in tree),
            compilers=tuple(sorted({one.exe_name for one in tree} & set(startup_watch.COMPILERS))),
            gpu_mib=self._gpu_mib(tree),
            pids=frozenset(process.pid for process in tree),
        )
        known = self._carry.get("watch")
        watch = startup_watch.advance(startup_watch.from_dict(known), look) if known else startup_watch.begin(look)
        self._carry["watch"] = watch.to_dict()
        return watch

    def _bytes_read(self, pid: int) -> int:
        """What a process had read from disk (or a network file system) so far; 0 where it can't be known."""
        try:
            with open(f"{self._proc.root}/{pid}/io", "rb") as file:
                for line in file:
                    if line.startswith(b"read_bytes:"):
                        return int(line.split()[1])
        except (OSError, ValueError):
            pass
        return 0

    def _gpus(self) -> Readings:
        if self._readings is None or time.monotonic() - self._read_at >= GPU_SECONDS:
            self._readings = self._reader.read(Deadline(5.0))
            self._read_at = time.monotonic()
        return self._readings

    def _gpu_mib(self, tree: Sequence[Process]) -> int | None:
        """MiB that the server holds; where the driver can't tell its processes apart, what is used of all its GPUs."""
        readings = self._gpus()
        pids = {process.pid for process in tree}
        held: dict[int, int] = {}
        for gpu in readings.gpus:
            own = [process.used_mib for process in gpu.processes or () if process.pid in pids]
            if own and None not in own:
                held[gpu.index] = sum(mib for mib in own if mib is not None)
        if held:
            self._carry["held"] = sorted(held.values())
            return sum(held.values())
        used = [gpu.used_mib for gpu in readings.gpus if gpu.used_mib is not None]
        return sum(used) if used else None

    def _idle(self) -> float:
        """Seconds without a sign of work, at the last look."""
        known = self._carry.get("watch")
        return startup_watch.from_dict(known).idle(time.monotonic()) if known else 0.0

    # ---- the ends ----

    def _line(self, progress: startup_phases.Progress) -> str:
        """One line of progress: phase, seconds, GiB per GPU, and the last sign of work when that is a while ago."""
        seconds = time.monotonic() - self._began
        words = [f"{self._name}: {progress.phase.replace('_', ' ')}", f"{seconds:.0f} s"]
        held = [mib / 1024 for mib in self._carry.get("held", [])]
        if held:
            words.append(f"{held[0]:.1f} to {held[-1]:.1f} GiB on each of {len(held)} GPUs")
        if self._carry.get("watch"):
            watch = startup_watch.from_dict(self._carry["watch"])
            idle = watch.idle(time.monotonic())
            words.append(f"last sign of work: {watch.sign}, {idle:.0f} s ago" if idle >= 5 else f"{watch.sign}")
        if progress.behind:
            words.append(f"behind: {', '.join(progress.behind)}")
        return ", ".join(words)

    def _end(self, verdict: str, reason: str, **more: Any) -> dict[str, Any]:
        with contextlib.suppress(StorageError):  # the verdict itself does not hang on its record
            deployment.judge(self._state_folder, self._name, "ready" if verdict == "ready" else f"{verdict}: {reason}")
        seconds = round(time.monotonic() - self._began, 1)
        words = {"ready": "is ready", "failed": "failed", "stuck": "is stuck"}[verdict]
        return {
            "ended": True,
            "verdict": verdict,
            "failed": verdict != "ready",
            "reason": reason,
            "seconds": seconds,
            "gpu_mib": self._carry.get("held", []),
            "msg": f"{self._name} {words} after {seconds:.0f} s: {reason}",
            "evidence": "",
            "evidence_files": {},
            "log_tail": "",
            "exit_status": None,
            **more,
        }

    def _failed(self, target: Target) -> dict[str, Any]:
        """Its main process is gone. Nothing more is waited for."""
        self._read_log(target.record.log)
        self._carry.pop("ready", None)
        progress = self._progress()
        status = self._exit_status(target)
        ended = f" with status {status}" if status is not None else ""
        return self._end(
            "failed",
            f"its main process ended{ended} in the phase {progress.phase.replace('_', ' ')}.",
            phase=progress.phase,
            alive=False,
            exit_status=status,
            log_tail=self._tail(target.record.log),
        )

    def _exit_status(self, target: Target) -> int | None:
        """Of the main process, as its unit tells: negative for a signal."""
        if not target.record.unit:
            return None
        answer = run_command(
            ["systemctl", "show", target.record.unit, "-p", "ExecMainStatus,ExecMainCode"], Deadline(10.0)
        )
        facts = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
        status, code = facts.get("ExecMainStatus", ""), facts.get("ExecMainCode", "")
        if not status.isdigit():
            return None
        return -int(status) if code in ("2", "3") else int(status)  # CLD_KILLED, CLD_DUMPED

    def _too_slow(self, target: Target, progress: startup_phases.Progress) -> dict[str, Any]:
        phase = progress.phase.replace("_", " ")
        return self._end(
            "failed",
            f"it still works on its start-up (phase {phase}) after {self._params['timeout']:g} s: raise"
            " server_health_timeout, or find out what is slow.",
            phase=progress.phase,
            alive=True,
            timed_out=True,
            log_tail=self._tail(target.record.log),
        )

    def _stuck(self, target: Target, progress: startup_phases.Progress, watch: Watch) -> dict[str, Any]:
        idle = watch.idle(time.monotonic())
        evidence_found = self._collect(target)
        phase = progress.phase.replace("_", " ")
        where = evidence_found.where or (f"{', '.join(progress.behind)} is behind" if progress.behind else "")
        alone = progress.phase in startup_watch.CPU_ALONE and time.monotonic() - watch.worked_at < (
            time.monotonic() - watch.strong_at - 1
        )
        why = (
            "only CPU time was used for too long, as in a first collective that never ends"
            if alone
            else f"no log line, CPU time, compiler, disk read or change of GPU memory for {idle:.0f} s"
        )
        return self._end(
            "stuck",
            f"in the phase {phase}{f', and {where}' if where else ''}: {why}.",
            phase=progress.phase,
            rank=evidence_found.rank or ", ".join(progress.behind),
            alive=True,
            evidence=evidence_found.folder,
            evidence_files=evidence_found.files,
            log_tail=self._tail(target.record.log),
        )

    def _given_up(self, target: Target, progress: startup_phases.Progress) -> dict[str, Any]:
        """Another host of the same server has failed or is stuck: nothing can come of this one either."""
        found = self._collect(target)
        verdict, why = self._carry["give_up"]
        return self._end(
            verdict,
            f"{why}{f' Here {found.where}.' if found.where else ''}",
            phase=progress.phase,
            rank=found.rank,
            alive=True,
            evidence=found.folder,
            evidence_files=found.files,
        )

    def _collect(self, target: Target) -> Collected:
        """Evidence on the host, and which rank it points at: one that stands elsewhere, is stopped, or is alone."""
        tree = self._tree(target)
        folder = evidence.collect(
            self._state_folder,
            self._params["run_id"] or f"health-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}",
            self._proc,
            tree,
            readings=self._gpus(),
            deadline=Deadline(EVIDENCE_SECONDS),
        )
        files: dict[str, str] = {}
        for name in sorted(os.listdir(folder)) if folder else []:
            try:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    files[name] = file.read(EVIDENCE_FILE_BYTES)
            except OSError:
                continue
        schedulers = [(one.name, one.pid) for one in _schedulers(tree)]
        stopped = [pid for _, pid in schedulers if (one := self._proc.process(pid)) and one.state in ("T", "t")]
        return Collected(folder, files, *stack_outliers.pointed_at(files.get("stacks.txt", ""), schedulers, stopped))

    def _tail(self, log: str) -> str:
        """The end of this start's log, masked."""
        try:
            with open(log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._carry["log_from"], size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return masking.mask_text(text)

    # ---- ready ----

    def _prove(self, target: Target) -> dict[str, Any]:
        assert target.main is not None
        params, main = self._params, target.main
        tree = self._tree(target)
        endpoint = self._endpoint(target, tree)
        expected = Expected(
            chat_prompt=params["chat_prompt"],
            chat_expect=params["chat_expect"],
            chat_tokens=params["chat_tokens"],
            speculation=None if params["speculation"] is None else _asked(params["speculation"]),
            accept_length=params["accept_length"],
            accept_tokens=params["accept_tokens"],
            environment=self._profile(),
            gpu_mib=params["gpu_mib"],
            soak=params["soak"],
            lossless=params["lossless"],
            lossless_tie=params["lossless_tie"],
            request_seconds=params["request_seconds"],
        )
        proof = Proof(
            endpoint or Endpoint("127.0.0.1", target.record.port),
            expected,
            Deadline(max(1.0, self._left())),
            lambda: self._alive(main),
            serving_proof.lossless_path(self._state_folder, server_http.option(target.record.argv, "--model-path")),
        )
        try:
            if not target.later_rank:
                if endpoint is None:
                    raise NotProven("port", f"none of its processes listens on port {target.record.port}.")
                proof.serve()
            tree = self._tree(target)
            self._readings = None
            pids = frozenset(process.pid for process in tree)
            proof.workers(self._proc, _schedulers(tree), self._gpus(), pids)
            self._gpu_mib(tree)
        except NotProven as reason:
            return self._not_proven(target, proof, reason)
        proven = proof.proven
        found = {step.name: step.found for step in proven.steps}
        length = f", accept length {proven.accept_length:.2f}" if proven.accept_length is not None else ""
        return self._end(
            "ready",
            f"{', '.join(found)} proven{length}.",
            phase="ready",
            alive=True,
            carry=self._carry,
            **_shown(proven),
        )

    def _not_proven(self, target: Target, proof: Proof, reason: NotProven) -> dict[str, Any]:
        if target.main is None or not self._alive(target.main):
            result = self._failed(self._again(target))
            result["reason"] = f"{reason.step}: {reason} Then {result['reason']}"
            return {**result, **_shown(proof.proven)}
        more: dict[str, Any] = {}
        said = f"{reason.step}: {reason}"
        if reason.hangs:
            found = self._collect(target)
            more = {"evidence": found.folder, "evidence_files": found.files, "rank": found.rank}
            said = f"{reason.step}: {reason}{f' {found.where}.' if found.where else ''}"
        return self._end(
            "stuck" if reason.hangs else "failed",
            said,
            phase="ready",
            alive=True,
            step=reason.step,
            log_tail=self._tail(target.record.log),
            **more,
            **_shown(proof.proven),
        )

    def _alive(self, main: Process) -> bool:
        process = self._proc.process(main.pid)
        return process is not None and not process.gone and process.start_ticks == main.start_ticks

    def _endpoint(self, target: Target, tree: Sequence[Process]) -> Endpoint | None:
        """Where it listens, by a socket of its own: the key goes nowhere else."""
        assert target.main is not None
        record, wait = target.record, Deadline(min(10.0, max(0.5, self._left())))
        while True:
            everything = listeners.listeners(self._proc, target.main.pid)
            own = listeners.of_processes(self._proc, [one.pid for one in tree], everything)
            here = [one for one in own if one.port == record.port]
            if here or wait.expired() or not self._alive(target.main):
                break
            time.sleep(0.1)
        if not here:
            return None
        key = server_http.api_key(record.argv, self._proc.environ(target.main.pid), record.cwd)
        return Endpoint(here[0].address, record.port, bool(server_http.option(record.argv, "--ssl-certfile")), key)

    def _profile(self) -> dict[str, str]:
        """The variables of the NCCL profile that the workers must carry."""
        path = self._params["environment_file"]
        if not path:
            return {}
        try:
            with open(path, encoding="utf-8") as file:
                return server_start.parse_environment(file.read())
        except OSError as error:
            raise NoServer(f"The environment file {path} can't be read: {error.strerror}.") from None


def _log_from(log: str, offset: int, restarted: bool) -> int:
    """Where the last start in the log begins (bytes): where our launch began, or at the first line of a later one."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if not restarted:
                return offset if offset <= size else 0
            start = file.seek(max(0, size - SEARCHED_BYTES))
            mark = max(file.read(SEARCHED_BYTES).rfind(one) for one in server_log.STARTS)
            return start + mark if mark >= 0 else size
    except OSError:
        return 0


def _asked(speculation: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in speculation.items() if value not in (None, "")}


def _schedulers(tree: Sequence[Process]) -> list[Process]:
    return [one for one in tree if one.title.startswith("sglang::scheduler")]


def _shown(proven: serving_proof.Proven) -> dict[str, Any]:
    return {
        "proof": [dict(step.__dict__) for step in proven.steps],
        "accept_length": proven.accept_length,
        "version": proven.version,
        "unreadable_workers": proven.unreadable_workers,
    }
