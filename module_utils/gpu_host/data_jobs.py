"""Named jobs on the CPU beside a server (data sets prepared, prompts generated against it): started, followed, stopped.

Each is a transient systemd unit in a slice of its own, so a job outlives the connection, and a reset spares it for what
it is: no server starts by its command line, and none is its ancestor. How a job ended is kept in the state folder, and
so a job that succeeded is not run again, and one that failed or was lost with its host is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from . import job_unit, masking, server_unit
from .child import run_command
from .deadline import Deadline
from .job_unit import Job
from .processes import Patterns, server_command
from .storage import StorageError, private_folder, read_private, write_private

SCHEMA = 1
SYSTEMD = "/run/systemd/system"
COMMAND_SECONDS = 15.0
SETTLE_SECONDS = 2.0  # a program that can't be run shows within that
LOCK_SECONDS = 30.0
POLL_SECONDS = (0.05, 0.5)
TAIL_BYTES = 1 << 14
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# No GPU unless a job asks for one: a job that holds memory of a GPU makes its host dirty. Output is wanted as it comes.
DEFAULTS = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
ACTIVE = ("waiting", "running")
ALL = "all"
HEADER = "# Written by the module data_jobs for one attempt; the next one writes it anew.\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SLICE = re.compile(r"[A-Za-z0-9_]+\.slice\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")


class Refused(Exception):
    """Nothing was changed; the text is one sentence or more."""


def problems(params: Mapping[str, Any]) -> list[str]:
    """What is wrong with parameters whose types are right, before a host is touched; one sentence each."""
    found = []
    names = [one["name"] for one in params["jobs"]]
    if not _SLICE.match(params["slice"]):
        found.append(
            f"run_jobs_slice: {params['slice']!r} is no slice; give a name such as datajobs.slice, without '-'."
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(f"run_jobs: two jobs are named {name}; each needs a name of its own.")
    for given in params["jobs"]:
        found += [f"run_jobs: the job {given['name']!r}: {why}" for why in _job_problems(given, names, params)]
    found += [f"run_jobs: {' after '.join(cycle)} would wait for itself." for cycle in _cycle(params["jobs"])]
    known = {*names, ALL}
    for option in ("only", "again"):
        unknown = [name for name in params[option] if name not in known or (option == "only" and name == ALL)]
        if unknown and (names or option == "again"):
            there = ", ".join(names) or "none"
            found.append(f"run_jobs_{option}: there is no job {', '.join(unknown)} in run_jobs; there are {there}.")
    if params["state"] != "status" and not names:
        found.append("run_jobs: no job is named; give a list of jobs, each with name and command.")
    return found


def _job_problems(given: Mapping[str, Any], names: Sequence[str], params: Mapping[str, Any]) -> Iterator[str]:
    if not _NAME.match(given["name"]):
        yield "its name would be no file name; use letters, digits, '.', '_' and '-', 64 at most."
    if not given["command"] or not given["command"][0]:
        yield "its command is empty; give a list of words, the program first."
    patterns = Patterns.of(params)
    for option in ("command", "resume_command"):
        if any("\0" in word or "\n" in word for word in given[option]):
            yield f"its {option} has a word with a line break; put the script into a file."
        elif starts := given[option] and server_command(tuple(given[option]), patterns):
            yield (
                f"its {option} starts a server ({starts}), which a reset ends; deploy it with playbooks/deploy-*.yml, "
                "or see restart.yml."
            )
    if given["user"] and not _USER.match(given["user"]):
        yield f"{given['user']!r} is no user's name."
    for option in ("folder", "environment_file"):
        path = given[option]
        if path and (not path.startswith("/") or ".." in path.split("/") or "\n" in path):
            yield f"its {option} {path!r} is no absolute path on the host."
    for name, value in given["environment"].items():
        if not _VARIABLE.match(str(name)):
            yield f"{name!r} is no name of an environment variable."
        elif isinstance(value, (dict, list)) or "\n" in str(value) or "\0" in str(value):
            yield f"its variable {name} has no plain value of one line."
    if not 0 <= given["cpus"] <= 4096:
        yield f"cpus: {given['cpus']} is no number of CPUs; give 0 (no limit) to 4096, fractions too."
    if given["memory_mib"] < 0:
        yield f"memory_mib: {given['memory_mib']} is no amount of memory; give MiB, or 0 for no limit."
    if not 0 <= given["max_seconds"] <= 365 * 86400:
        yield f"max_seconds: {given['max_seconds']} is no time; give seconds, or 0 for no limit."
    unknown = [name for name in given["after"] if name not in names]
    if unknown:
        yield f"it is after {', '.join(unknown)}, which is not in run_jobs."


def _cycle(jobs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One ring of jobs that wait for each other, if there is one."""
    after = {one["name"]: one["after"] for one in jobs}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in after.get(name, ()):
                found = walk(other, [*path, name])
                if found:
                    return found
            done.add(name)
        return []

    for name in after:
        ring = walk(name, [])
        if ring:
            return [ring]
    return []


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module data_jobs: ``params`` are those of library/data_jobs.py."""
    call = Call(params, check_mode)
    try:
        call.run()
    except (Refused, StorageError) as reason:
        call.result.update(failed=True, msg=f"Nothing was done. {reason}")
    except OSError as error:
        call.result.update(failed=True, msg=f"{error.filename or 'A file'} can't be used: {error.strerror}.")
    if diff:
        call.result["diff"] = call.difference()
    return call.result


@dataclass(frozen=True)
class Unit:
    """What systemd says of a job's unit."""

    state: str = "inactive"
    pid: int = 0
    queued: bool = False

    @property
    def there(self) -> bool:
        return self.queued or self.state in ("active", "activating", "deactivating", "reloading")


@dataclass(frozen=True)
class Status:
    """How far a job is. Seconds; `state`: absent, waiting, running, succeeded, failed, stopped, lost or blocked."""

    name: str
    state: str
    why: str = ""
    rc: int | None = None
    started: str = ""
    ended: str = ""
    seconds: float | None = None
    attempt: int = 0
    resumed: bool = False
    pid: int = 0
    last_line: str = ""
    log: str = ""
    unit: str = ""
    differs: bool = False
    command: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.name}: {self.state}"]
        if self.why:
            parts.append(self.why)
        if self.seconds is not None:
            parts.append(_duration(self.seconds))
        if self.resumed:
            parts.append(f"attempt {self.attempt}, resumed")
        elif self.attempt > 1:
            parts.append(f"attempt {self.attempt}")
        if self.differs:
            parts.append("as defined before")
        return ", ".join(parts) + (f" | {self.last_line}" if self.last_line else "")


class Call:
    """One call. ``result`` is what the module returns."""

    def __init__(self, params: Mapping[str, Any], check_mode: bool) -> None:
        self._params = params
        self._check = check_mode
        self._folder = f"{params['state_folder'].rstrip('/')}/jobs"
        self._jobs = [job_unit.job(given, _own_name()) for given in params["jobs"]]
        self._records: dict[str, dict[str, Any]] = {}
        self._began = False
        self._before: list[Status] = []
        self._after: list[Status] = []
        self.result: dict[str, Any] = {"changed": False, "jobs": [], "msg": ""}

    def run(self) -> None:
        found = problems(self._params)
        if found:
            raise Refused(" ".join(found))
        if os.geteuid() != 0 or not os.path.isdir(SYSTEMD):
            raise Refused("Data jobs are units of the host's systemd: it has to run, and become: true is needed.")
        self._load()
        state = self._params["state"]
        self._before = self._after = self._look()
        if state == "started":
            self._start()
        elif state == "stopped":
            self._stop()
        self._finish()

    def difference(self) -> dict[str, str]:
        """What changes, as Ansible shows it."""
        after = self.result.get("would", []) if self._check else [f"{one.name}: {one.state}" for one in self._after]
        before = [f"{one.name}: {one.state}" for one in self._before]
        return {"before": "".join(f"{line}\n" for line in before), "after": "".join(f"{line}\n" for line in after)}

    # ---- looking ----

    @property
    def _chosen(self) -> list[Job]:
        only = self._params["only"]
        return [one for one in self._jobs if not only or one.name in only]

    def _load(self) -> None:
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return
        for file in names:
            name, dot, kind = file.rpartition(".")
            if dot and kind == "json" and _NAME.match(name):
                with contextlib.suppress(OSError, ValueError):
                    record = json.loads(read_private(f"{self._folder}/{file}"))
                    if isinstance(record, dict) and record.get("schema") == SCHEMA:
                        self._records[name] = record

    def _look(self) -> list[Status]:
        """The status of the jobs asked for; of all that are on record where none is named."""
        names = [one.name for one in self._chosen] if self._jobs else [*self._records]
        if not self._jobs and self._params["only"]:
            names = [name for name in names if name in self._params["only"]]
        defined = {one.name: one for one in self._jobs}
        everyone = {*names, *(other for name in names for other in self._records.get(name, {}).get("after", ()))}
        units = self._units(sorted(everyone))
        return [self._status(name, units, defined.get(name)) for name in names]

    def _units(self, names: Sequence[str]) -> dict[str, Unit]:
        if not names:
            return {}
        argv = ["systemctl", "show", "--property=Id,ActiveState,MainPID,Job", *map(job_unit.unit_of, names)]
        done = run_command(argv, Deadline(COMMAND_SECONDS))
        if done.returncode != 0:
            raise Refused(f"systemd does not tell of its units: {done.trouble or done.stderr.strip()}")
        found = {}
        for block in done.stdout.split("\n\n"):
            facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            name = facts.get("Id", "")[len(job_unit.PREFIX) : -len(".service")]
            found[name] = Unit(
                facts.get("ActiveState", ""), int(facts.get("MainPID") or 0), facts.get("Job", "") not in ("", "0")
            )
        return found

    def _status(self, name: str, units: Mapping[str, Unit], defined: Job | None) -> Status:
        record = self._records.get(name)
        if record is None:
            return Status(name, "absent", unit=job_unit.unit_of(name))
        end = job_unit.ended(_text(f"{self._folder}/{name}.end"))
        if end is not None and end.attempt != record["attempt_id"]:
            end = None
        begun = job_unit.begun(_text(f"{self._folder}/{name}.begun"), record["attempt_id"])
        unit = units.get(name, Unit())
        state, why, rc = "lost", "systemd does not know it and no end is on record: the host was restarted", None
        if unit.there:
            # Until its predecessors have ended it has a job in systemd's queue and no process.
            waits = unit.state == "inactive"
            state, why = ("waiting", f"for {', '.join(record['after'])}") if waits else ("running", "")
        elif record["after"] and begun is None:
            state, why = "blocked", f"{' or '.join(record['after'])} did not succeed"
            if record.get("stopped"):
                state, why = "stopped", "it was asked to stop"
        elif end is not None:
            rc = end.exit_status
            if record.get("stopped"):
                state, why = "stopped", "it was asked to stop"
            elif end.succeeded:
                state, why = "succeeded", ""
            else:
                state, why = "failed", f"it {end.why(record.get('memory_mib', 0), record.get('max_seconds', 0))}"
        elif record.get("stopped"):
            state, why = "stopped", "it was asked to stop"
        running = state in ("running", "succeeded", "failed") or (state == "stopped" and begun is not None)
        first = record["started"] if begun is None else begun
        last = end.at if end is not None else time.time()
        return Status(
            name,
            state,
            why,
            rc,
            started=_iso(first),
            ended=_iso(end.at) if end is not None else "",
            seconds=max(0.0, round(last - first, 1)) if running else None,
            attempt=record["attempt"],
            resumed=record["resumed"],
            pid=unit.pid,
            last_line=_last_line(record["log"], record["log_start"]) if state not in ("waiting", "blocked") else "",
            log=record["log"],
            unit=job_unit.unit_of(name),
            differs=defined is not None and digest(defined) != record["digest"],
            command=tuple(masking.mask_argv(tuple(record["command"]))),
        )

    # ---- starting ----

    def _start(self) -> None:
        again = self._params["again"]
        now = {one.name: one for one in self._before}
        everything = {status.name: status for status in self._of_all()}
        due = []
        for one in self._chosen:
            known = now[one.name]
            asked = one.name in again or ALL in again
            if known.active or self._is_of_this_call(one.name):
                continue
            if known.state != "succeeded" or asked:
                due.append(one)
        names = {one.name for one in due}
        missing = [
            f"{one.name} is after {other}, which is {everything[other].state}: run that one as well (run_jobs_only)."
            for one in due
            for other in one.after
            if other not in names and everything[other].state not in (*ACTIVE, "succeeded")
        ]
        found = [problem for one in due for problem in self._host_problems(one)] + missing
        if found:
            raise Refused(" ".join(found))
        if self._check:
            self.result["changed"] = bool(due)
            self.result["would"] = [
                f"{one.name}: would be {'resumed' if self._resumes(one, now[one.name]) else 'started'}"
                if one.name in names
                else f"{one.name}: {now[one.name].state}"
                for one in self._chosen
            ]
            return
        if due:
            private_folder(self._params["state_folder"])
            private_folder(self._folder)
            with self._locked():
                self._load()
                self._write_scripts()
                fresh = {status.name: status for status in self._look()}
                for one in _in_order(due):
                    if not fresh[one.name].active:
                        self._begin(one, fresh[one.name])
            self._settle(names)

    def _of_all(self) -> list[Status]:
        units = self._units([one.name for one in self._jobs])
        return [self._status(one.name, units, one) for one in self._jobs]

    def _is_of_this_call(self, name: str) -> bool:
        """A call that follows its jobs is made again and again; what failed meanwhile is not started by it again."""
        task = self._params["task"]
        return bool(task) and self._records.get(name, {}).get("task") == task

    def _resumes(self, one: Job, known: Status) -> bool:
        begun = known.state in ("failed", "lost", "stopped")
        return (
            bool(one.resume_command)
            and begun
            and ALL not in self._params["again"]
            and (one.name not in self._params["again"])
        )

    def _host_problems(self, one: Job) -> Iterator[str]:
        """What is missing on this host for the job."""
        try:
            pwd.getpwnam(one.user)
        except KeyError:
            yield f"{one.name}: there is no user {one.user} on this host."
        if one.folder and not os.path.isdir(one.folder):
            yield f"{one.name}: there is no folder {one.folder} on this host."
        if one.environment_file and not os.path.isfile(one.environment_file):
            yield f"{one.name}: there is no environment file {one.environment_file} on this host."
        for command in (one.command, one.resume_command):
            if command and not _program(command[0], one):
                yield f"{one.name}: there is no program {command[0]} on this host."

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Two calls at once start a job once."""
        number = os.open(f"{self._folder}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = Deadline(LOCK_SECONDS)
            while True:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired():
                        raise Refused(
                            f"Another call is starting data jobs since {LOCK_SECONDS:g} s: try again."
                        ) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(number)

    def _write_scripts(self) -> None:
        params = self._params
        texts = {
            job_unit.BEGIN: job_unit.begin_script(
                self._folder, params["log_folder"], params["slice"], server_unit.MASK_KEYS
            ),
            job_unit.END: job_unit.end_script(self._folder),
        }
        for name, text in texts.items():
            if _text(f"{self._folder}/{name}") != text:
                write_private(f"{self._folder}/{name}", text)

    def _begin(self, one: Job, known: Status) -> None:
        resumes = self._resumes(one, known)
        command = one.resume_command if resumes else one.command
        command = (_program(command[0], one), *command[1:])
        log = os.path.join(self._params["log_folder"], f"{one.name}.log")
        number = known.attempt + 1
        begins = f"== {_iso(time.time())} attempt {number}{', resumed' if resumes else ''}\n"
        log_start = _begin_log(log, begins, pwd.getpwnam(one.user).pw_uid)
        record = {
            "schema": SCHEMA,
            "name": one.name,
            "attempt_id": secrets.token_hex(6),
            "attempt": number,
            "resumed": resumes,
            "command": list(command),
            "user": one.user,
            "log": log,
            "log_start": log_start,
            "digest": digest(one),
            "started": time.time(),
            "after": list(one.after),
            "memory_mib": one.memory_mib,
            "max_seconds": one.max_seconds,
            "task": self._params["task"],
            "stopped": False,
        }
        environment = {**DEFAULTS, **one.environment}
        write_private(f"{self._folder}/{one.name}.env", server_unit.environment_text(environment, HEADER))
        write_private(f"{self._folder}/{one.name}.json", json.dumps(record))
        self._records[one.name] = record
        waits = {other: self._records[other]["attempt_id"] for other in one.after}
        argv = job_unit.start_command(
            one, command, record["attempt_id"], self._folder, log, self._params["slice"], self._params["grace"], waits
        )
        deadline = Deadline(COMMAND_SECONDS)
        done = run_command(argv, deadline)
        while done.returncode and "already loaded" in done.stderr and not deadline.expired():
            # The copy of its last attempt's log keeps the unit for two seconds more.
            time.sleep(POLL_SECONDS[1])
            run_command(["systemctl", "reset-failed", one.unit], deadline)
            done = run_command(argv, deadline)
        if done.returncode != 0:
            why = done.trouble or done.stderr.strip() or f"status {done.returncode}"
            raise StorageError(f"systemd did not take the job {one.name}: {why}")
        self._began = True

    def _settle(self, names: set[str]) -> None:
        """Until each one's process is there or gone: what can't be run at all is told by the call that started it."""
        deadline, pause = Deadline(SETTLE_SECONDS), POLL_SECONDS[0]
        while True:
            self._after = self._look()
            if deadline.expired() or not any(
                one.name in names and one.state == "running" and not one.pid for one in self._after
            ):
                return
            time.sleep(pause)

    # ---- stopping ----

    def _stop(self) -> None:
        running = [one for one in self._before if one.active]
        self.result["changed"] = bool(running)
        self.result["would"] = [
            f"{one.name}: {'would be stopped' if one.active else one.state}" for one in self._before
        ]
        if self._check or not running:
            return
        for one in running:
            # A job that waits for this one must not take its exit status 0 for success.
            write_private(f"{self._folder}/{one.name}.stop", f"{self._records[one.name]['attempt_id']}\n")
            record = {**self._records[one.name], "stopped": True}
            write_private(f"{self._folder}/{one.name}.json", json.dumps(record))
            self._records[one.name] = record
        units = [one.unit for one in running]
        done = run_command(["systemctl", "stop", *units], Deadline(self._params["grace"] + COMMAND_SECONDS))
        self._after = self._look()
        left = [one.name for one in self._after if one.active]
        if left:
            why = done.trouble or done.stderr.strip() or "systemctl stop had no effect"
            self.result.update(failed=True, msg=f"{', '.join(left)} still runs: {why}")

    # ---- the answer ----

    def _finish(self) -> None:
        params = self._params
        if params["state"] == "started" and not self._check:
            # A call that follows its jobs is made again and again, and the first one started them.
            self.result["changed"] = self._began or any(self._is_of_this_call(one.name) for one in self._chosen)
            if params["wait"]:
                self._follow()
        self.result["jobs"] = [{**asdict(one), "command": list(one.command)} for one in self._after]
        self.result.setdefault("told", [one.line() for one in self._after])
        if self._check and params["state"] != "status":
            self.result["told"] = self.result.get("would", [])
        if self.result.get("failed") or self.result.get("unfinished"):
            return
        self.result["msg"] = summary(self._after)
        bad = [one for one in self._after if one.state in ("failed", "lost", "blocked")]
        if bad and params["state"] == "started" and not self._check:
            self.result["failed"] = True
            sentences = "; ".join(f"{one.name} {one.state}: {one.why}, see {one.log}" for one in bad)
            self.result["msg"] = f"{summary(self._after)}. {sentences}."

    def _follow(self) -> None:
        """Wait for the end of all jobs, as long as this call may; `unfinished` where there is more to wait for."""
        deadline, pause = Deadline(self._params["patience"] or float("inf")), POLL_SECONDS[0]
        while any(one.active for one in self._after):
            if deadline.expired():
                self.result.update(unfinished=True, progress=self._progress())
                return
            time.sleep(min(pause, max(0.0, deadline.remaining())))
            pause = min(pause * 1.5, POLL_SECONDS[1])
            self._after = self._look()

    def _progress(self) -> str:
        running = [one for one in self._after if one.state == "running"]
        # The one that said something last, told apart by its log's time.
        newest = max(running, key=lambda one: _mtime(one.log), default=None)
        said = f"; {newest.name}: {newest.last_line}" if newest is not None and newest.last_line else ""
        return summary(self._after) + said


def summary(found: Sequence[Status]) -> str:
    """How many jobs are in which state, the ended ones first."""
    order = ("succeeded", "failed", "lost", "blocked", "stopped", "running", "waiting", "absent")
    counts = [(state, sum(one.state == state for one in found)) for state in order]
    told = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{len(found)} data job{'' if len(found) == 1 else 's'}: {told or 'none'}"


def digest(one: Job) -> str:
    """What tells whether a job is defined as it was; limits may change without that."""
    facts = [one.command, one.user, one.folder, sorted(one.environment.items()), one.environment_file]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _in_order(jobs: Sequence[Job]) -> list[Job]:
    """Each after those that it waits for."""
    left = {one.name: one for one in jobs}
    ordered: list[Job] = []
    while left:
        ready = [one for one in left.values() if not any(other in left for other in one.after)]
        for one in ready:
            ordered.append(left.pop(one.name))
    return ordered


def _program(name: str, one: Job) -> str:
    """The program's absolute path on this host, or nothing."""
    if "/" in name:
        path = os.path.join(one.folder or "/", name)
        return path if os.path.isfile(path) and os.access(path, os.X_OK) else ""
    return shutil.which(name, path=one.environment.get("PATH", PATH)) or ""


def _begin_log(path: str, text: str, uid: int) -> int:
    """Append a line to the job's log, made where it is missing (0640, the user's); where its own output begins."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, 0o640)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise StorageError(f"{path} is no file; move it away.")
        os.fchown(number, uid, -1)
        os.write(number, text.encode())
        return os.fstat(number).st_size
    finally:
        os.close(number)


def _last_line(path: str, start: int) -> str:
    """The last line that an attempt wrote; progress bars end their lines by a carriage return."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(min(start, size), size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    line = next((part for part in reversed(re.split(r"[\r\n]+", text)) if part.strip()), "").strip()
    plain = masking.mask_text(_COLOUR.sub("", line))
    shown = "".join(sign if sign.isprintable() else "?" for sign in plain)
    return shown if len(shown) <= 160 else shown[:157] + "..."


def _own_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _text(path: str) -> str:
    try:
        return read_private(path, 1 << 20).decode("utf-8", "replace")
    except (OSError, StorageError):
        return ""
