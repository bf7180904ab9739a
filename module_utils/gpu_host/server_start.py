"""Starts a server again as its record says, and waits until it listens on its port.

A recorded unit is started by systemctl. Otherwise the recorded command line runs in the recorded folder with the
recorded environment as the recorded user, its output appended to the recorded log: as a transient unit where systemd
is pid 1 and we are root, else detached with a pid file. Both survive the end of the ssh connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from . import listeners, masking, server_launcher, server_log, server_record
from .child import run_command
from .deadline import Deadline
from .ports import port_holders
from .procfs import Proc, Process
from .server_record import ServerRecord
from .storage import StorageError, private_folder, safe_name, write_private

POLL_SECONDS = (0.1, 1.0)  # first and longest pause between two looks
COMMAND_SECONDS = 15.0  # longest wait for one systemctl or systemd-run
LOCK_SECONDS = 10.0
LOG_LINES = 12
SYSTEMD = "/run/systemd/system"  # exists exactly where systemd is pid 1 (sd_booted(3))
UNIT_FACTS = "LoadState,ActiveState,SubState,MainPID,Transient,Job"
RUN_ID = "SGLANG_RUN_ID"


class CannotStart(Exception):
    """The server was not started, or died; the text is one sentence that says what to do."""


@dataclass(frozen=True)
class Unit:
    """What systemd says of a unit. ``load`` is not-found for one that does not exist."""

    name: str
    load: str = "not-found"
    active: str = "inactive"
    sub: str = ""
    main_pid: int = 0
    transient: bool = False
    job: bool = False  # a start or stop is queued

    @property
    def ended(self) -> bool:
        """Its main process is gone, also where systemd will start another one."""
        return (self.active in ("failed", "inactive") and not self.job) or self.sub == "auto-restart"


@dataclass(frozen=True)
class Started:
    """A start under way: ``pid`` is the main process (0: not known yet), ``unit`` the unit that keeps it, if any."""

    pid: int
    unit: str
    how: str  # 'unit' | 'transient unit' | 'detached'


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module server_start: ``params`` are those of library/server_start.py."""
    began = time.monotonic()
    deadline = Deadline(params["timeout"])
    start = Start(params, deadline)
    result: dict[str, Any] = {"changed": False, "name": params["name"]}
    result.update(pid=None, port=None, log="", unit="", command=[])
    try:
        result.update(start.run(check_mode))
    except (CannotStart, StorageError) as reason:
        result.update(start.known, failed=True, msg=str(reason))
    result["seconds"] = round(time.monotonic() - began, 2)
    if diff:
        line = " ".join(result.get("command", [])) + "\n"
        result["diff"] = {"before": "" if result["changed"] else line, "after": line}
    return result


class Start:
    """One start: from the record to a port that listens. ``known`` is what the result may say also of a failure."""

    def __init__(self, params: Mapping[str, Any], deadline: Deadline, proc: Proc | None = None) -> None:
        self._name: str = params["name"]
        self._state_folder: str = params["state_folder"]
        self._wait: bool = params["wait"]
        self._grace: float = params["grace"]
        self._deadline = deadline
        self._timeout: float = params["timeout"]
        self._proc = proc or Proc()
        self._log_from = 0
        self.known: dict[str, Any] = {}

    def run(self, check_mode: bool) -> dict[str, Any]:
        record = self._record()
        unit = self._unit(record.unit) if record.unit else None
        by_unit = unit is not None and unit.load == "loaded" and not unit.transient
        if not by_unit and record.unit and not record.argv:
            raise CannotStart(
                f"systemd does not know the unit {record.unit} of {self._name} any more: install it again (the"
                " deployment does), or start the server by hand."
            )
        shown = ["systemctl", "start", record.unit] if by_unit else list(masking.mask_argv(record.argv))
        log = record.log or ("" if by_unit else self._own_log())
        self.known = {"port": record.port or None, "log": log, "command": shown, "unit": record.unit if by_unit else ""}
        if not by_unit:
            self._check(record)
        with self._lock(check_mode):
            running = self._running(record, unit if by_unit else None)
            if running is None:
                self._refuse_taken_port(record.port)
                if check_mode:
                    return {**self.known, "changed": True, "msg": f"{self._name} would be started: {' '.join(shown)}"}
                self._log_from = _size(log)
                started = self._start_unit(record.unit, unit) if by_unit else self._start_command(record, log)
            else:
                started = Started(running.pid, record.unit if by_unit else "", "running")
        self.known.update(pid=started.pid or None, unit=started.unit)
        if self._wait and not check_mode:
            started = self._wait_for_port(record, started, log)
        if running is None:
            self._write_record(record, started, log, by_unit)
            words = "was started" + (f" and listens on port {record.port}" if self._wait and record.port else "")
            return {
                **self.known,
                "pid": started.pid,
                "how": started.how,
                "changed": True,
                "msg": f"{self._name} {words} (pid {started.pid}).",
            }
        return {
            **self.known,
            "pid": started.pid,
            "how": "running",
            "msg": f"{self._name} runs already (pid {started.pid}); nothing was started.",
        }

    # ---- before anything is started ----

    def _record(self) -> ServerRecord:
        record = server_record.load(self._state_folder, self._name)
        if record is None:
            names = [one.name for one in server_record.load_all(self._state_folder)[0]]
            there = f"records exist of {', '.join(names)}" if names else "there is no record of any server"
            raise CannotStart(
                f"There is no record of a server {self._name} on this host ({there}), so what to start is not known:"
                " start it by hand or deploy it."
            )
        if record.why_not_startable():
            raise CannotStart(record.why_not_startable())
        return record

    def _check(self, record: ServerRecord) -> None:
        """Refuse what would fail, or would start something else than what ran."""
        if record.environment is None and not record.environment_file:
            raise CannotStart(
                f"The environment of {self._name} could not be read when it was recorded, so it can't be started as it"
                " was: start it by hand or deploy it."
            )
        if record.uid != os.geteuid():
            if os.geteuid() != 0:
                raise CannotStart(f"{self._name} ran as uid {record.uid}: run this as root (become: true).")
            try:
                pwd.getpwuid(record.uid)
            except KeyError:
                raise CannotStart(f"{self._name} ran as uid {record.uid}, which this host does not know.") from None
        if not record.cwd or not os.path.isdir(record.cwd):
            raise CannotStart(f"The folder {record.cwd or '(unknown)'} in which {self._name} ran is not there.")
        self._program(record, environment(record))

    def _program(self, record: ServerRecord, variables: Mapping[str, str]) -> str:
        """The file to run: as named on the command line, which keeps a virtual environment, else the recorded one."""
        first = record.argv[0]
        named = os.path.join(record.cwd, first) if "/" in first else shutil.which(first, path=variables.get("PATH", ""))
        for path in (named, record.exe):
            if path and os.access(path, os.X_OK) and os.path.isfile(path):
                return path
        raise CannotStart(f"The program {first} that {self._name} ran with is not there any more.")

    def _running(self, record: ServerRecord, unit: Unit | None) -> Process | None:
        """The server itself, where it runs already."""
        if unit is not None:
            if unit.active in ("active", "activating", "reloading") and unit.main_pid:
                return self._proc.process(unit.main_pid)
            return None
        if record.main_alive(self._proc):
            return self._proc.process(record.main_pid)
        return next(
            (
                one
                for one in self._proc.snapshot().values()
                if not one.gone
                and one.argv == record.argv
                and one.uid == record.uid
                and (self._proc.cwd(one.pid) in (None, record.cwd))
            ),
            None,
        )

    def _refuse_taken_port(self, port: int) -> None:
        if not port:
            return
        for holder in port_holders(self._proc, [port]):
            who = masking.mask_text(holder["name"]) + (f" (pid {holder['pid']})" if holder["pid"] else "")
            raise CannotStart(f"Port {port} of {self._name} is taken by {who}: end that, or reset the host, first.")

    @contextlib.contextmanager
    def _lock(self, check_mode: bool) -> Iterator[None]:
        """One start of a server at a time: between the look and the start nobody else may start it."""
        if check_mode:
            yield
            return
        private_folder(self._state_folder)
        private_folder(server_record.folder(self._state_folder))
        path = self._file(".lock")
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            wait = self._deadline.capped(LOCK_SECONDS)
            while True:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if wait.expired():
                        raise CannotStart(f"Another call is starting {self._name} now; look again later.") from None
                    time.sleep(POLL_SECONDS[0])
            yield
        finally:
            os.close(number)

    def _file(self, ending: str) -> str:
        """A file of ours beside the record; the leading dot keeps it from being taken for one."""
        name = safe_name(self._name, "server name")
        return os.path.join(server_record.folder(self._state_folder), f".{name}{ending}")

    def _own_log(self) -> str:
        return os.path.join(self._state_folder, "logs", safe_name(self._name, "server name") + ".log")

    # ---- starting ----

    def _systemctl(self, *words: str) -> tuple[int | None, str]:
        # At the very end of the time there is still a moment to ask why.
        answer = run_command(
            ["systemctl", *words], Deadline(min(COMMAND_SECONDS, max(0.5, self._deadline.remaining())))
        )
        return answer.returncode, (answer.stdout or answer.stderr or answer.trouble).strip()

    def _unit(self, name: str) -> Unit:
        code, text = self._systemctl("show", name, "-p", UNIT_FACTS)
        if code is None:
            raise CannotStart(f"systemd does not answer about {name} ({text}): see `systemctl status` and try again.")
        return parse_unit(name, text)

    def _start_unit(self, name: str, unit: Unit | None) -> Started:
        if unit is not None and unit.active == "failed":
            self._systemctl("reset-failed", name)  # a start limit that was hit would refuse the start
        # A unit that is ready only once loaded would keep systemctl waiting; the wait is ours.
        code, text = self._systemctl("start", "--no-block", name)
        if code != 0:
            raise CannotStart(f"systemctl start {name} failed: {masking.mask_text(text) or 'no answer in time'}.")
        return Started(self._unit(name).main_pid, name, "unit")

    def _start_command(self, record: ServerRecord, log: str) -> Started:
        variables = environment(record)
        by_systemd = os.geteuid() == 0 and os.path.isdir(SYSTEMD) and shutil.which("systemd-run") is not None
        plan = {
            "argv": list(record.argv),
            "program": self._program(record, variables),
            "environment": variables,
            "cwd": record.cwd,
            "uid": record.uid,
            "log": log,
            # A log that the user chose is opened as that user, who might have put a link there.
            "log_is_ours": not record.log,
            "errors": self._file(".error"),
            "pid_file": self._file(".pid"),
            "detach": not by_systemd,
        }
        if not record.log:
            private_folder(os.path.dirname(log))
        path = self._file(".start")
        _remove(self._file(".error"))
        write_private(path, json.dumps(plan))
        command = [sys.executable or "/usr/bin/python3", "-c", server_launcher.SOURCE, path]
        try:
            return self._transient(command) if by_systemd else self._detached(command)
        except CannotStart:
            _remove(path)  # the launcher takes it away; where it never ran, the secrets must not stay
            raise

    def _transient(self, command: Sequence[str]) -> Started:
        """A transient unit named like the server, so that a later look calls it the same."""
        name = safe_name(self._name, "server name")
        unit = f"{name}.service"
        there = self._unit(unit)
        if there.load == "loaded" and there.active == "failed" and there.transient:
            self._systemctl("reset-failed", unit)
        elif there.load not in ("not-found", ""):
            unit = f"gpu-server-{name}.service"
            self._systemctl("reset-failed", unit)
        properties = (
            "KillMode=mixed",
            f"TimeoutStopSec={self._grace:g}",
            "LimitNOFILE=1048576",
            "LimitMEMLOCK=infinity",
            "TasksMax=infinity",
        )
        words = ["systemd-run", f"--unit={unit}", "--collect", "--quiet", "--no-ask-password"]
        words += [word for one in properties for word in ("-p", one)]
        # systemd expands dollar signs in arguments of its own accord.
        answer = run_command(
            [*words, "--", *(word.replace("$", "$$") for word in command)], self._deadline.capped(COMMAND_SECONDS)
        )
        if answer.returncode != 0:
            raise CannotStart(f"systemd-run could not start {self._name}: {(answer.stderr or answer.trouble).strip()}")
        return Started(self._unit(unit).main_pid, unit, "transient unit")

    def _detached(self, command: Sequence[str]) -> Started:
        launcher = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            out, _ = launcher.communicate(timeout=max(1.0, min(COMMAND_SECONDS, self._deadline.remaining())))
        except subprocess.TimeoutExpired:
            launcher.kill()
            raise CannotStart(f"{self._name} could not be started: its launcher did not end in time.") from None
        if not out.strip().isdigit():
            reason = _text(self._file(".error")) or "its launcher failed"
            raise CannotStart(f"{self._name} could not be started: {reason}.")
        return Started(int(out), "", "detached")

    # ---- waiting ----

    def _wait_for_port(self, record: ServerRecord, started: Started, log: str) -> Started:
        """Until the server listens on its port; CannotStart when it dies or the time is up."""
        began, pause = time.monotonic(), POLL_SECONDS[0]
        ticks = self._proc.start_ticks(started.pid) if started.pid else None
        while True:
            if started.unit:
                unit = self._unit(started.unit)
                if unit.main_pid and unit.main_pid != started.pid and not ticks:
                    started = replace(started, pid=unit.main_pid)
                    ticks = self._proc.start_ticks(unit.main_pid)
                    self.known["pid"] = started.pid
                if unit.ended or (ticks and unit.main_pid not in (0, started.pid)):
                    raise CannotStart(self._died(record, started, log, time.monotonic() - began))
            if started.pid and not self._alive(started.pid, ticks):
                raise CannotStart(self._died(record, started, log, time.monotonic() - began))
            if started.pid and (not record.port or self._listens(started.pid, record.port)):
                return started
            if self._deadline.expired():
                last = " ".join(self._tail(log, 1))
                raise CannotStart(
                    f"{self._name} (pid {started.pid}) runs but does not listen on port {record.port} after"
                    f" {self._timeout:g} s; it may still be loading, see {log or 'its journal'}"
                    + (f" (last line: {last})" if last else "")
                    + "."
                )
            time.sleep(min(pause, max(0.01, self._deadline.remaining())))
            pause = min(pause * 1.1, POLL_SECONDS[1])

    def _alive(self, pid: int, ticks: int | None) -> bool:
        process = self._proc.process(pid)
        return process is not None and not process.gone and process.start_ticks == ticks

    def _listens(self, main: int, port: int) -> bool:
        """Whether the main process or a process below it listens on the port."""
        taken = [one for one in listeners.listeners(self._proc, main) if one.port == port]
        if not taken:
            return False
        return bool(listeners.of_processes(self._proc, family(self._proc.snapshot(), main), taken))

    def _died(self, record: ServerRecord, started: Started, log: str, seconds: float) -> str:
        refused = _text(self._file(".error"))
        if refused and not self._tail(log, 1):
            return f"{self._name} could not be started: {refused}."
        lines = self._tail(log, LOG_LINES) if log else self._journal(started.unit)
        end = "; its last lines: " + " | ".join(lines) if lines else "; it wrote nothing"
        return f"{self._name} died {seconds:.0f} s after its start, see {log or 'its journal'}{end}"

    def _tail(self, log: str, count: int) -> list[str]:
        lines = server_log.tail_lines(log, count, self._log_from) if log else ()
        return [masking.mask_text(line)[:500] for line in lines]

    def _journal(self, unit: str) -> list[str]:
        if not unit:
            return []
        answer = run_command(
            ["journalctl", "-u", unit, "-o", "cat", "-n", str(LOG_LINES), "--no-pager"], Deadline(COMMAND_SECONDS)
        )
        return [masking.mask_text(line)[:500] for line in answer.stdout.splitlines()]

    # ---- after it ----

    def _write_record(self, record: ServerRecord, started: Started, log: str, by_unit: bool) -> None:
        """Make the record point at the process that runs now."""
        main = self._proc.process(started.pid) if started.pid else None
        if main is None:
            return
        run_id = ""
        for pid in family(self._proc.snapshot(), main.pid):
            run_id = run_id or (self._proc.environ(pid) or {}).get(RUN_ID, "") if pid != main.pid else run_id
        server_record.save(
            replace(
                record,
                unit=record.unit if by_unit else "",
                log=log,
                run_id=run_id,
                main_pid=main.pid,
                main_start_ticks=main.start_ticks,
                boot_id=self._proc.boot_id(),
                when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                who=record.who or "restart",
            ),
            self._state_folder,
        )


def family(processes: Mapping[int, Process], main: int) -> list[int]:
    """The process and everything below it."""
    found = [main]
    for pid in found:
        found += [one.pid for one in processes.values() if one.ppid == pid and one.pid not in found]
    return found


def environment(record: ServerRecord) -> dict[str, str]:
    """The recorded environment, its environment file over it. CannotStart when that file can't be read."""
    variables = dict(record.environment or {})
    if record.environment_file:
        try:
            with open(record.environment_file, encoding="utf-8") as file:
                variables.update(parse_environment(file.read()))
        except (OSError, UnicodeDecodeError) as error:
            raise CannotStart(
                f"The environment file {record.environment_file} of {record.name} can't be read ({error}): deploy it"
                " again, or start the server by hand."
            ) from None
    return variables


def parse_environment(text: str) -> dict[str, str]:
    """NAME=value lines as systemd reads them: comments and blank lines are passed over, outer quotes come off."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            continue
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def parse_unit(name: str, text: str) -> Unit:
    """The answer of ``systemctl show -p`` with UNIT_FACTS."""
    facts = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    pid = facts.get("MainPID", "0")
    return Unit(
        name=name,
        load=facts.get("LoadState", "not-found"),
        active=facts.get("ActiveState", "inactive"),
        sub=facts.get("SubState", ""),
        main_pid=int(pid) if pid.isdigit() else 0,
        transient=facts.get("Transient") == "yes",
        job=facts.get("Job", "") not in ("", "0"),
    )


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(2000).strip()
    except OSError:
        return ""
