"""The server record: what it takes to start a server again, kept on its host.

One JSON file a server in `<state folder>/servers/`, mode 0600 in a folder of mode 0700, because the environment and
the command line may hold keys. Nothing of it leaves the host unmasked: `public()` is what may.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from . import masking
from .procfs import Proc, Process
from .storage import StorageError, private_folder, read_private, safe_name, write_private

SCHEMA = 1
# Belongs to one login, one terminal or one start by systemd; a restart gets its own.
_PASSING = """
_ SHLVL OLDPWD TERM COLORTERM LS_COLORS LESSOPEN LESSCLOSE MAIL WINDOWID TMUX TMUX_PANE STY
SSH_AUTH_SOCK SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_ASKPASS XDG_SESSION_ID XDG_SESSION_TYPE
XDG_SESSION_CLASS XDG_RUNTIME_DIR DBUS_SESSION_BUS_ADDRESS DISPLAY XAUTHORITY
INVOCATION_ID JOURNAL_STREAM NOTIFY_SOCKET LISTEN_FDS LISTEN_PID LISTEN_FDNAMES MAINPID SYSTEMD_EXEC_PID
WATCHDOG_PID WATCHDOG_USEC SGLANG_RUN_ID
"""
PASSING_VARIABLES = frozenset(_PASSING.split())


@dataclass(frozen=True)
class ServerRecord:
    """Either `unit` or `argv` says how it is started; `environment` is None where it could not be read.

    `main_start_ticks` (clock ticks since boot) with `boot_id` tells whether the main process is still the same.
    `when` is ISO 8601 in UTC; `log` is a file, or empty when the output went elsewhere.
    """

    name: str
    unit: str = ""
    argv: tuple[str, ...] = ()
    exe: str = ""
    cwd: str = ""
    environment: dict[str, str] | None = None
    environment_file: str = ""
    gpu_uuids: tuple[str, ...] = ()
    port: int = 0
    log: str = ""
    run_id: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    uid: int = 0
    who: str = ""
    when: str = ""
    main_pid: int = 0
    main_start_ticks: int = 0
    boot_id: str = ""
    schema: int = SCHEMA

    def public(self) -> dict[str, Any]:
        """Everything that may leave the host: the environment's names only, the command line masked."""
        shown = asdict(self)
        shown["argv"] = list(masking.mask_argv(self.argv))
        shown["gpu_uuids"] = list(self.gpu_uuids)
        shown["environment"] = sorted(self.environment) if self.environment is not None else None
        return shown

    def main_alive(self, proc: Proc) -> bool:
        """Whether the very process that the record was made for still lives."""
        process = proc.process(self.main_pid) if self.main_pid else None
        return (
            process is not None
            and not process.gone
            and process.start_ticks == self.main_start_ticks
            and (not self.boot_id or proc.boot_id() in ("", self.boot_id))
        )

    def why_not_startable(self) -> str:
        """'' when a restart can go by this record, else one sentence."""
        if self.unit or self.argv:
            return ""
        return f"The record of {self.name} names neither a unit nor a command line; start the server by hand."


def server_name(unit: str, port: int) -> str:
    """The name under which a server is kept: its unit's, or its port's."""
    if unit:
        return unit[: -len(".service")] if unit.endswith(".service") else unit
    return f"port-{port}"


def folder(state_folder: str) -> str:
    return os.path.join(state_folder, "servers")


def path(state_folder: str, name: str) -> str:
    return os.path.join(folder(state_folder), safe_name(name, "server name") + ".json")


def save(record: ServerRecord, state_folder: str) -> str:
    """Write the record as a whole and return its path. StorageError says why that can't be done."""
    target = path(state_folder, record.name)
    private_folder(state_folder)
    private_folder(folder(state_folder))
    try:
        write_private(target, json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise StorageError(f"The server record {target} could not be written: {error.strerror}.") from error
    return target


def load(state_folder: str, name: str) -> ServerRecord | None:
    """The record of this server, None when there is none. StorageError when there is one that can't be used."""
    target = path(state_folder, name)
    try:
        raw = read_private(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"The server record {target} can't be read: {error.strerror}.") from error
    return parse(raw, target)


def load_all(state_folder: str) -> tuple[list[ServerRecord], list[str]]:
    """All records by name, and one sentence for each that can't be used."""
    records, problems = [], []
    try:
        names = sorted(os.listdir(folder(state_folder)))
    except OSError:
        return [], []
    for name in names:
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            record = load(state_folder, name[: -len(".json")])
        except StorageError as error:
            problems.append(str(error))
        else:
            if record is not None:
                records.append(record)
    return records, problems


def parse(raw: bytes, source: str) -> ServerRecord:
    """The record in this JSON; StorageError names `source` and what is wrong. Unknown fields are passed over."""
    try:
        facts = json.loads(raw)
    except ValueError as error:
        raise StorageError(f"The server record {source} is not JSON: {error}; write it again or remove it.") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("name"), str):
        raise StorageError(f"The server record {source} has no name; write it again or remove it.")
    if not isinstance(facts.get("schema"), int) or facts["schema"] > SCHEMA:
        raise StorageError(f"The server record {source} has schema {facts.get('schema')!r}, this reads {SCHEMA}.")
    known = {item.name for item in fields(ServerRecord)}
    values: dict[str, Any] = {key: value for key, value in facts.items() if key in known}
    for key, kind in _KINDS.items():
        if key in values and not isinstance(values[key], kind):
            raise StorageError(f"The server record {source} has a wrong {key}: {type(values[key]).__name__}.")
    for key in ("argv", "gpu_uuids"):
        values[key] = tuple(str(item) for item in values.get(key, ()))
    return ServerRecord(**values)


_KINDS: dict[str, Any] = {
    "unit": str,
    "argv": list,
    "exe": str,
    "cwd": str,
    "environment": (dict, type(None)),
    "environment_file": str,
    "gpu_uuids": list,
    "port": int,
    "log": str,
    "run_id": str,
    "versions": dict,
    "uid": int,
    "who": str,
    "when": str,
    "main_pid": int,
    "main_start_ticks": int,
    "boot_id": str,
}


def from_process(
    proc: Proc,
    main: Process,
    gpu_uuids: Iterable[str] = (),
    *,
    unit: str = "",
    run_id: str = "",
    versions: Mapping[str, str] | None = None,
    who: str = "",
    when: str = "",
) -> ServerRecord | None:
    """The record of a server that we did not launch, from its living main process; None when that is no more.

    The environment is the one at exec. `unit` is the systemd unit whose main process it is, when the caller has
    made sure of that.
    """
    environment = proc.environ(main.pid)
    cwd = proc.cwd(main.pid) or ""
    log = log_file(proc, main.pid)
    boot_id = proc.boot_id()
    again = proc.process(main.pid)
    if again is None or again.gone or again.start_ticks != main.start_ticks or not main.argv:
        return None  # what was read may be of whoever has the pid now
    port = port_of(main.argv)
    if environment is not None:
        environment = {name: value for name, value in environment.items() if name not in PASSING_VARIABLES}
    return ServerRecord(
        name=server_name(unit, port),
        unit=unit,
        argv=main.argv,
        exe=main.exe,
        cwd=cwd,
        environment=environment,
        gpu_uuids=tuple(sorted(gpu_uuids)),
        port=port,
        log=log,
        run_id=run_id,
        versions=dict(versions or {}),
        uid=main.uid,
        who=who,
        when=when or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        main_pid=main.pid,
        main_start_ticks=main.start_ticks,
        boot_id=boot_id,
    )


def log_file(proc: Proc, pid: int) -> str:
    """The regular file behind the process's standard output, else behind its standard error, else ''."""
    for number in (1, 2):
        link = proc.open_file(pid, number)
        if not link.startswith("/") or link.startswith("/dev/") or link.endswith(" (deleted)"):
            continue
        try:
            if stat.S_ISREG(os.stat(f"{proc.root}/{pid}/fd/{number}").st_mode):
                return link
        except OSError:
            continue
    return ""


def port_of(argv: Sequence[str]) -> int:
    """The port that the command line asks for, else the default of its kind: SGLang 30000, vLLM 8000."""
    found = 0
    for position, word in enumerate(argv):
        value = ""
        if word == "--port" and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.startswith("--port="):
            value = word[len("--port=") :]
        if value.isdigit() and 0 < int(value) < 65536:
            found = int(value)  # as with argparse, the last one counts
    if found:
        return found
    return 8000 if any("vllm" in os.path.basename(word) for word in argv[:3]) else 30000
