"""What a timer runs: one reset by ansible-runner, as its schedule says (roles/reset_schedule).

``python -I scheduled.py run SETTINGS`` runs it; ``look`` reads settings on its standard input and tells as JSON which
hosts they reach and what they name that is not there; ``collect FILE...`` adds records that a worker brought back
(docs/engines.md) to the records here.

Exit status of ``run``: 0 every host is clean or skipped, or the window is over and nothing was begun; 2 some host is
not; 3 another run of the same schedule is going on, nothing was done; 5 it could not begin, nothing was done; 6 it
broke off (a full disk, a broken Python); 124 the run's own time was over; 130 it was stopped. Any other is
ansible-playbook's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
for _folder in (REPOSITORY / "module_utils", REPOSITORY / "plugin_utils"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_host import schedules  # noqa: E402
from gpu_host.procfs import Proc  # noqa: E402
from gpu_host.schedules import Schedule  # noqa: E402
from gpu_host.storage import StorageError, private_folder, write_private  # noqa: E402

from gpu_control import interrupted, records  # noqa: E402

OVERLAP = 3
CANNOT_BEGIN = 5
BROKEN_OFF = 6
TIMED_OUT = 124
STOPPED = 130
PLAYBOOKS = {"clean": "playbooks/reset.yml", "restore": "playbooks/restart.yml"}
# Above everything that an inventory, a group or a schedule says: variables of the command line win.
FORCED = {"gpu_reset_kill_strangers": False, "reset_confirmed": True}
_AGAIN = "run playbooks/schedule-resets.yml again"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class CannotBegin(Exception):
    """Nothing was done; the text is one sentence."""


@dataclass(frozen=True)
class Settings:
    """What the role wrote for one schedule."""

    schedule: Schedule
    repository: Path
    folder: Path
    artifacts: Path

    @classmethod
    def read(cls, text: str) -> Settings:
        """Raises CannotBegin where the text is none of the role's."""
        try:
            facts = json.loads(text)
            declared, problems = schedules.parse([facts["schedule"]])
            paths = [Path(facts[name]) for name in ("repository", "folder", "artifacts")]
        except (ValueError, KeyError, TypeError) as error:
            raise CannotBegin(f"the settings can't be read ({error!r}); {_AGAIN}") from error
        if problems:
            raise CannotBegin(f"{problems[0].rstrip('.')}; {_AGAIN}")
        return cls(declared[0], *paths)

    @property
    def inventory(self) -> str:
        return str(self.repository / self.schedule.inventory)  # an absolute one stays as it is


def variables(schedule: Schedule, now: datetime) -> dict[str, Any] | None:
    """The variables of the run; None where its window is over."""
    chosen: dict[str, Any] = {
        **schedule.variables,
        "gpu_reset_policy": schedule.policy,
        "reset_schedule_name": schedule.name,
    }
    if schedule.window:
        end = schedules.window_end(schedule.window, now.astimezone().replace(tzinfo=None))
        if end is None:
            return None
        chosen["reset_not_after"] = end.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for name, value in (
        ("reset_held_out", list(schedule.held_out)),
        ("reset_serial", schedule.serial),
        ("reset_breaker_share", schedule.breaker_share),
        ("reset_hook", schedule.hook if isinstance(schedule.hook, str) else list(schedule.hook)),
    ):
        if value not in (None, [], ""):
            chosen[name] = value
    return {**chosen, **FORCED}


def environment(settings: Settings) -> dict[str, str]:
    """The environment of ansible-playbook, over the service's own."""
    repository = settings.repository
    programs = f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}"
    return {
        # ansible-runner would switch it off.
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        **settings.schedule.environment,
        "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
        # ansible-runner sets the variable, which ansible.cfg can't add to.
        "ANSIBLE_CALLBACK_PLUGINS": str(repository / "callback_plugins"),
        # Runs of other schedules, or by hand, keep their own.
        "ANSIBLE_HOME": str(settings.folder / "ansible"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(settings.folder / "cp"),
        "GPU_ARTIFACTS": str(settings.artifacts),
        "PATH": programs,
    }


def options(schedule: Schedule) -> str:
    """Options of ansible-playbook: where the secrets are."""
    words = []
    if schedule.vault_password_file:
        words += ["--vault-password-file", schedule.vault_password_file]
    if schedule.ssh_key:
        words += ["--private-key", schedule.ssh_key]
    return shlex.join(words)


def run(path: str, tell: Callable[[str], None], random_delay: int = 0) -> int:
    """One run; returns the exit status."""
    try:
        settings = Settings.read(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotBegin(f"{path} can't be read ({error.strerror}); {_AGAIN}") from error
    if random_delay:  # cron's runs; a timer has its own
        time.sleep(random.uniform(0, random_delay))
    try:
        folder = private_folder(str(settings.folder))
        lock = _lock(Path(folder) / "lock")
    except (OSError, StorageError) as error:
        raise CannotBegin(str(error).rstrip(".")) from error
    try:
        if other := _other(lock):
            tell(f"Nothing was done: the run of this schedule that began {other} is still going on.")
            return OVERLAP
        return _run_alone(settings, tell)
    finally:
        os.close(lock)  # releases it


def _run_alone(settings: Settings, tell: Callable[[str], None]) -> int:
    began = datetime.now(UTC)
    extra = variables(settings.schedule, began)
    if extra is None:
        tell(f"Nothing was begun: the window {settings.schedule.window!r} is over.")
        return 0
    _adopt_children()
    try:
        status, last_line = _play(settings, extra, began.strftime("%Y%m%dT%H%M%SZ"), tell)
    except (OSError, StorageError) as error:
        status, last_line = BROKEN_OFF, f"The run broke off: {error}"
    finally:
        _end_children()
    # A run that had to be killed (its timeout, a stop) could not do this itself.
    for sentence in interrupted.settle_dead(settings.artifacts):
        tell(sentence)
    facts = {
        "schema": 1,
        "schedule": settings.schedule.name,
        "started": records.timestamp(began.timestamp()),
        "ended": records.timestamp(),
        "exit_status": status,
        "last_line": last_line,
    }
    write_private(str(settings.folder / "last-run.json"), json.dumps(facts, indent=1) + "\n")
    tell(f"Exit status {status}. {last_line}".strip())
    return status


def _play(settings: Settings, extra: Mapping[str, Any], ident: str, tell: Callable[[str], None]) -> tuple[int, str]:
    """Run the playbook by ansible-runner, its output passed on; the exit status and the last line."""
    try:
        import ansible_runner
    except ImportError as error:
        raise CannotBegin(f"ansible-runner is missing; run `make setup` in {settings.repository}") from error
    schedule = settings.schedule
    private = _emptied(settings.folder / "runner")
    last = ""

    def on_event(event: dict[str, Any]) -> bool:
        nonlocal last
        if text := event.get("stdout"):
            tell(text)
            lines = [line for line in _COLOURS.sub("", text).splitlines() if line.strip()]
            last = lines[-1].strip() if lines else last
        return True

    done = ansible_runner.run(
        private_data_dir=str(private),
        project_dir=str(settings.repository),
        playbook=PLAYBOOKS[schedule.afterwards],
        inventory=settings.inventory,
        limit=schedule.limit or None,
        extravars=dict(extra),
        envvars=environment(settings),
        cmdline=options(schedule) or None,
        # A second is the longest that a stop waits to be noticed.
        settings={"pexpect_timeout": 1, "job_timeout": schedule.timeout},
        ident=_free(private / "artifacts", ident),
        rotate_artifacts=schedule.keep,
        quiet=True,
        event_handler=on_event,
    )
    if done.status == "timeout":
        return TIMED_OUT, f"The run was ended after {schedule.timeout} s, its timeout. {last}".strip()
    if done.status == "canceled":
        return STOPPED, f"The run was stopped. {last}".strip()
    return int(done.rc), last


def _emptied(private: Path) -> Path:
    """ansible-runner's folder with nothing but the artifacts: it takes variables, options, even commands from files."""
    private_folder(str(private))
    for entry in private.iterdir():
        if entry.name == "artifacts" and not entry.is_symlink():
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return private


def _free(folder: Path, ident: str) -> str:
    """A name that no run has yet, should two begin within one second."""
    number, name = 1, ident
    while (folder / name).exists():
        number, name = number + 1, f"{ident}-{number + 1}"
    return name


def _lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _other(lock: int) -> str:
    """Take the lock, or tell since when another run has it. It goes with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 200, 0).decode(errors="replace").strip() or "just now"
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{records.timestamp()} (pid {os.getpid()})\n".encode(), 0)
    return ""


def _adopt_children() -> None:
    """What the play leaves behind (ssh's shared connections, for a minute) becomes ours, to be ended with the run."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _end_children(seconds: float = 3.0) -> None:
    """SIGTERM to every child, SIGKILL to those that are there after some seconds."""
    number, until = signal.SIGTERM, time.monotonic() + seconds
    told: set[int] = set()
    while children := {one.pid for one in Proc().snapshot().values() if one.ppid == os.getpid()}:
        for pid in children - told:
            os.kill(pid, number)  # ours until it is reaped: the pid can't be another's
        told |= children
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > until:
            if number == signal.SIGKILL:
                return
            number, until, told = signal.SIGKILL, time.monotonic() + seconds, set()
        time.sleep(0.02)


def look(text: str) -> dict[str, Any]:
    """The hosts that a schedule reaches, and one sentence for each thing that it names and that is not there."""
    settings = Settings.read(text)
    schedule = settings.schedule
    problems = []
    for key in ("vault_password_file", "ssh_key"):
        path = getattr(schedule, key)
        if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            problems.append(f"{key}: {path} is no file that the user of the schedules can read.")
    if schedule.hook and not isinstance(schedule.hook, str) and not shutil.which(schedule.hook[0]):
        problems.append(f"hook: there is no program {schedule.hook[0]!r} on the control node.")
    problems += _unknown_variables(settings)
    if not os.path.exists(settings.inventory):
        problems.append(f"inventory: {settings.inventory} is not there (or can't be seen by the schedules' user).")
    if problems:
        return {"hosts": [], "problems": problems}
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(environment(settings) | {"ANSIBLE_HOME": home})
        return _look_at_inventory(settings)


def _unknown_variables(settings: Settings) -> list[str]:
    """A misspelt variable of the reset would be refused at each firing, when nobody looks."""
    import yaml

    specs = settings.repository / "roles/gpu_reset/meta/argument_specs.yml"
    known = yaml.safe_load(specs.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    given = sorted(name for name in settings.schedule.variables if name.startswith("gpu_reset_"))
    return [f"variables: the role gpu_reset has no {name}." for name in given if name not in known]


def _look_at_inventory(settings: Settings) -> dict[str, Any]:
    # Not before the environment is set: Ansible reads its configuration when it is imported.
    try:
        import ansible_runner  # noqa: F401
        from ansible.cli import CLI
        from ansible.errors import AnsibleError
        from ansible.inventory.manager import InventoryManager, split_host_pattern
        from ansible.parsing.dataloader import DataLoader
    except ImportError as error:
        return {"hosts": [], "problems": [f"{error.name} is missing: run `make setup` in {settings.repository}."]}
    schedule = settings.schedule
    try:
        loader = DataLoader()
        passwords = [schedule.vault_password_file] if schedule.vault_password_file else []
        loader.set_vault_secrets(CLI.setup_vault_secrets(loader, [], passwords, auto_prompt=False))
        inventory = InventoryManager(loader=loader, sources=[settings.inventory])

        def names(pattern: str) -> set[str]:
            return {host.name for host in inventory.get_hosts(pattern) if not host.implicit}

        problems = []
        for key, patterns in (("limit", split_host_pattern(schedule.limit)), ("held_out", list(schedule.held_out))):
            for pattern in patterns:
                bare = pattern.lstrip("!&")
                if not bare.startswith("@") and not names(bare):
                    problems.append(f"{key}: {bare!r} is no host or group of {settings.inventory}.")
        inventory.subset(schedule.limit or None)
        held_out = set().union(*map(names, schedule.held_out))
        hosts = sorted(names("gpu_hosts") - held_out)
    except AnsibleError as error:
        return {"hosts": [], "problems": [f"inventory: {' '.join(str(error).split())}"]}
    if not hosts and not problems:
        left = f" that limit {schedule.limit!r} and held_out leave" if schedule.limit or schedule.held_out else ""
        problems.append(f"no host of the group gpu_hosts in {settings.inventory}{left}.")
    return {"hosts": hosts, "problems": problems}


def collect(files: list[str], artifacts: Path) -> tuple[int, list[str]]:
    """Add the records of these files to those here; how many were new, and what could not be read."""
    found: list[dict[str, Any]] = []
    broken = []
    for name in files:
        try:
            lines = Path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            broken.append(f"{name} could not be read ({error.strerror}): did its worker come to an end?")
            continue
        for number, line in enumerate(lines, 1):
            try:
                one = json.loads(line)
                found.append(one | {"run_id": str(one["run_id"]), "host": str(one["host"])})
            except (ValueError, KeyError, TypeError):
                broken.append(f"{name}, line {number}, is no record and was left out.")
    return len(records.append(artifacts / records.FILE_NAME, found)), broken


def _notify(status: str) -> None:
    """The status text of the service, where systemd asks for one."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect("\0" + path[1:] if path.startswith("@") else path)
            notify.send(b"STATUS=" + " ".join(status.split()).encode()[:400])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run the schedule of a settings file")
    one.add_argument("settings")
    one.add_argument("--random-delay", type=int, default=0, metavar="SECONDS")
    commands.add_parser("look", help="judge the settings on the standard input")
    many = commands.add_parser("collect", help="add records that a worker brought back to the records here")
    many.add_argument("files", nargs="+")
    given = parser.parse_args(arguments)
    if given.command == "look":
        print(json.dumps(look(sys.stdin.read())))
        return 0
    if given.command == "collect":
        added, broken = collect(given.files, records.artifacts_folder())
        print("\n".join([*broken, f"{added} new records in {records.artifacts_folder() / records.FILE_NAME}."]))
        return 1 if broken else 0

    said = ""

    def tell(text: str) -> None:
        nonlocal said
        said = text
        print(text, flush=True)

    try:
        status = run(given.settings, tell, given.random_delay)
    except CannotBegin as error:
        tell(f"Nothing was done: {error}.")
        status = CANNOT_BEGIN
    _notify(said)
    return status


if __name__ == "__main__":
    sys.exit(main())
