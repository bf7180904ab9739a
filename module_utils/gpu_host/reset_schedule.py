"""Installs the schedules of resets on a control node, and removes those that are no longer declared.

Everything is judged before the first file is written: the schedules themselves, when they fire, and (by the control
node's own Ansible, as the user that will run them) whether the inventory has the hosts that they name.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import cron, masking, schedule_units, schedules
from .child import Completed, run_command
from .deadline import Deadline
from .schedule_units import MARK, PREFIX, Place
from .schedules import Schedule
from .server_start import SYSTEMD
from .storage import replace_file

COMMAND_SECONDS = 30.0
LOOK_SECONDS = 120.0  # an inventory script or plugin may ask a slow service
SHOWN_FIRINGS = 3
SCHEDULERS = ("auto", "systemd", "cron")
JUDGED_FIRINGS = 8  # more than a week of weekdays
_FIRING = re.compile(
    r"^ *(?:Next elapse|Iter(?:ation|\.) #\d+): (?:\w+ )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE
)


class Refused(Exception):
    """Nothing was changed; the text says why."""


class Unfinished(Exception):
    """Something had been written when it failed; the text says what failed, without a full stop."""


@dataclass(frozen=True)
class File:
    """A file of ours, as it is to be: None for none."""

    path: str
    text: str | None
    mode: int = 0o644
    group: int = 0

    def now(self) -> str | None:
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def as_it_is(self) -> bool:
        if self.text is None or self.now() != self.text:
            return self.text == self.now()
        facts = os.stat(self.path)
        return (facts.st_mode & 0o777, facts.st_gid) == (self.mode, self.group)


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module reset_schedule: ``params`` are those of library/reset_schedule.py."""
    try:
        return _run(params, check_mode, diff)
    except (Refused, OSError) as error:
        return {"changed": False, "failed": True, "refused": True, "msg": f"Nothing was done. {error}"}
    except Unfinished as error:
        text = f"The schedules are partly written: {error}. Run the play again when that is put right."
        return {"changed": True, "failed": True, "msg": text}


def _run(params: Mapping[str, Any], check_mode: bool, diff: bool) -> dict[str, Any]:
    declared, problems = schedules.parse(params["schedules"])
    if params["scheduler"] not in SCHEDULERS:
        problems.append(f"reset_schedule_scheduler: {params['scheduler']!r} is unknown; give auto, systemd or cron.")
    if problems:
        raise Refused(" ".join(problems))
    if os.geteuid() != 0:
        raise Refused("Timers and their files need root on the control node: use become: true.")
    uses_cron = params["scheduler"] == "cron" or (params["scheduler"] == "auto" and not os.path.isdir(SYSTEMD))
    place, account = _place(params)
    lines, firings = {}, {}
    for one in declared:
        try:
            lines[one.name], firings[one.name] = _when(one, uses_cron)
        except Refused as refused:
            problems.append(str(refused))
            continue
        if problem := schedules.window_problem(one, firings[one.name]):
            problems.append(problem)
    if declared and not problems:
        problems += _tool_problems(place)
    hosts: dict[str, list[str]] = {}
    if not problems:
        for one in declared:
            hosts[one.name], found = _look(one, place, account)
            problems += found
    if problems:
        raise Refused(" ".join(problems))

    wanted = list(_files(declared, place, account, uses_cron, lines, params["unit_folder"], params["cron_folder"]))
    taken = [file.path for file in wanted if (text := file.now()) is not None and MARK not in text]
    if taken:
        raise Refused(f"{', '.join(taken)} is there and was not written by this role; give the schedule another name.")
    wanted += [
        File(path, None)
        for path in _ours(params["unit_folder"], params["cron_folder"], place.config_folder)
        if path not in {file.path for file in wanted}
    ]
    changes = [file for file in wanted if not file.as_it_is()]
    timers = [f"{PREFIX}{one.name}.timer" for one in declared] if not uses_cron else []
    asleep = [] if not timers else [name for name in timers if not _runs(name)]
    folders = [path for path in _folders(declared, place) if not _is_private(path, account)]
    folders += [place.artifacts] if declared and not os.path.isdir(place.artifacts) else []
    removed = sorted({_name(file.path) for file in wanted if file.text is None} - {one.name for one in declared})
    result: dict[str, Any] = {
        "changed": bool(changes or asleep or folders),
        "schedules": [
            {
                "name": one.name,
                "next": [f"{moment:%a %Y-%m-%d %H:%M:%S}" for moment in firings[one.name][:SHOWN_FIRINGS]],
                "hosts": hosts[one.name],
                "by": "cron" if uses_cron else "systemd",
                "policy": one.policy,
            }
            for one in declared
        ],
        "removed": removed,
        "files": [file.path for file in changes],
    }
    result["lines"] = _lines(result)
    result["msg"] = "; ".join(result["lines"])
    if diff:
        result["diff"] = [_difference(file) for file in changes]
    if not check_mode and result["changed"]:
        try:
            _apply(changes, timers, asleep, _folders(declared, place), account, place)
        except OSError as error:
            raise Unfinished(str(error)) from error
    return result


def _place(params: Mapping[str, Any]) -> tuple[Place, pwd.struct_passwd]:
    repository = params["repository"].rstrip("/")
    if not os.path.isfile(f"{repository}/playbooks/reset.yml"):
        raise Refused(
            f"reset_schedule_repository: {repository} has no playbooks/reset.yml on this control node; check the "
            "repository out there, or give the folder where it is."
        )
    try:
        user = params["user"] or pwd.getpwuid(os.stat(repository).st_uid).pw_name
        account = pwd.getpwnam(user)
    except KeyError:
        raise Refused(
            f"reset_schedule_user: {params['user'] or 'the owner of ' + repository} is no user of this control node."
        ) from None
    place = Place(
        repository=repository,
        python=params["python"] or f"{repository}/.venv/bin/python",
        user=user,
        home=account.pw_dir,
        folder=params["folder"].rstrip("/"),
        config_folder=params["config_folder"].rstrip("/"),
        artifacts=params["artifacts"].rstrip("/") or f"{repository}/artifacts",
    )
    return place, account


def _when(one: Schedule, uses_cron: bool) -> tuple[str, list[datetime]]:
    """The crontab's five fields ('' with systemd) and the next firings in local time; Refused where there are none."""
    which = f"Schedule {one.name!r}, calendar:"
    if uses_cron:
        if one.persistent:
            raise Refused(f"Schedule {one.name!r}: cron can't make up for a missed time; leave persistent out.")
        try:
            when = cron.times(one.calendar)
        except cron.NotInCron as error:
            raise Refused(f"{which} {one.calendar!r} can't be said in cron: {error}.") from None
        found = [moment for moment, _ in zip(when.after(datetime.now()), range(JUDGED_FIRINGS))]
    else:
        done = _command("systemd-analyze", "calendar", f"--iterations={JUDGED_FIRINGS}", "--", one.calendar)
        if done.returncode != 0:
            said = (done.stderr or done.trouble).strip().splitlines()
            raise Refused(
                f"{which} {one.calendar!r} is no calendar expression ({said[-1] if said else 'no answer'}); give for "
                "example 'Mon..Fri 03:00', and try one with: systemd-analyze calendar EXPRESSION"
            )
        found = [datetime.strptime(text, "%Y-%m-%d %H:%M:%S") for text in _FIRING.findall(done.stdout)]
        when = None
    if not found:
        raise Refused(f"{which} {one.calendar!r} never comes (again).")
    return when.line if when else "", found


def _tool_problems(place: Place) -> list[str]:
    if not os.access(place.python, os.X_OK):
        return [
            f"{place.python} is missing on this control node: run `make setup` in {place.repository}, or give "
            "reset_schedule_python."
        ]
    return []


def _look(one: Schedule, place: Place, account: pwd.struct_passwd) -> tuple[list[str], list[str]]:
    """The hosts of a schedule and what is wrong with what it names, as the control node's Ansible sees it."""
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": account.pw_dir, "USER": account.pw_name}
    try:
        done = subprocess.run(
            place.command("look"),
            input=schedule_units.settings(one, place),
            capture_output=True,
            text=True,
            timeout=LOOK_SECONDS,
            cwd=place.repository,
            env=environment | {"LC_ALL": "C.UTF-8"},
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=groups,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [], [f"Schedule {one.name!r}: its inventory could not be read within {LOOK_SECONDS:.0f} s."]
    except (OSError, ValueError) as error:
        said = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        return [], [
            f"{place.python} in {place.repository} can't run as {place.user} ({' '.join(said) or 'no answer'}): run "
            "`make setup` there, and see that this user can read it."
        ]
    return list(answer["hosts"]), [f"Schedule {one.name!r}: {problem}" for problem in answer["problems"]]


def _files(
    declared: list[Schedule],
    place: Place,
    account: pwd.struct_passwd,
    uses_cron: bool,
    lines: Mapping[str, str],
    unit_folder: str,
    cron_folder: str,
) -> Iterator[File]:
    for one in declared:
        yield File(place.settings_path(one.name), schedule_units.settings(one, place), 0o640, account.pw_gid)
        if uses_cron:
            path = os.path.join(cron_folder, f"{PREFIX}{one.name}")
            yield File(path, schedule_units.crontab(one, place, lines[one.name]))
        else:
            yield File(os.path.join(unit_folder, f"{PREFIX}{one.name}.service"), schedule_units.service(one, place))
            yield File(os.path.join(unit_folder, f"{PREFIX}{one.name}.timer"), schedule_units.timer(one))


def _ours(unit_folder: str, cron_folder: str, config_folder: str) -> list[str]:
    """Files of this role that are there, told by their mark."""
    found = []
    for folder, shape in (
        (unit_folder, rf"{PREFIX}.+\.(?:service|timer)"),
        (cron_folder, rf"{PREFIX}.+"),
        (config_folder, r".+\.json"),
    ):
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                if re.fullmatch(shape, name) and not os.path.islink(path) and MARK in (File(path, None).now() or ""):
                    found.append(path)
    return found


def _name(path: str) -> str:
    """The schedule that a file belongs to."""
    return re.sub(r"\.(?:json|service|timer)$", "", os.path.basename(path)).replace(PREFIX, "", 1)


def _folders(declared: list[Schedule], place: Place) -> list[str]:
    return [place.data_folder(one.name) for one in declared]


def _is_private(path: str, account: pwd.struct_passwd) -> bool:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    return facts.st_uid == account.pw_uid and facts.st_mode & 0o170777 == 0o40700


def _apply(
    changes: list[File],
    timers: list[str],
    asleep: list[str],
    folders: list[str],
    account: pwd.struct_passwd,
    place: Place,
) -> None:
    """Timers that go are stopped first, and those that stay are started last: none fires half written."""
    units = [os.path.basename(file.path) for file in changes if file.path.endswith((".service", ".timer"))]
    going = [os.path.basename(file.path) for file in changes if file.text is None and file.path.endswith(".timer")]
    if going:
        _systemctl("disable", "--now", *going)
    for path in (place.folder, place.config_folder):
        os.makedirs(path, mode=0o755, exist_ok=True)
    for path in folders:
        _make_private(path, account)
    if not os.path.isdir(place.artifacts):
        os.makedirs(place.artifacts)
        os.chown(place.artifacts, account.pw_uid, account.pw_gid)
    for file in changes:
        if file.text is None:
            os.unlink(file.path)
        else:
            replace_file(file.path, file.text, file.mode, 0, file.group)
    if units:
        _systemctl("daemon-reload")
    again = [name for name in timers if name in units or name in asleep]
    if again:
        _systemctl("enable", *again)
        _systemctl("restart", *again)


def _make_private(path: str, account: pwd.struct_passwd) -> None:
    """A folder of the user alone. What lies at that place and is none, or is a link, is not touched."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(number, account.pw_uid, account.pw_gid)
        os.fchmod(number, 0o700)
    finally:
        os.close(number)


def _runs(timer: str) -> bool:
    states = [_command("systemctl", verb, timer).stdout.strip() for verb in ("is-enabled", "is-active")]
    return states == ["enabled", "active"]


def _systemctl(*words: str) -> None:
    done = _command("systemctl", *words)
    if done.returncode != 0:
        raise Unfinished(f"`systemctl {' '.join(words)}` said {(done.stderr or done.trouble).strip()!r}")


def _command(*words: str) -> Completed:
    return run_command(list(words), Deadline(COMMAND_SECONDS))


def _lines(result: Mapping[str, Any]) -> list[str]:
    """Lines for the person who runs the play."""
    lines = []
    for one in result["schedules"]:
        count = len(one["hosts"])
        lines.append(
            f"{one['name']}: {one['policy']} on {count} host{'' if count == 1 else 's'}, by {one['by']}; next "
            f"{', then '.join(one['next'])}"
        )
    lines += [f"{name}: removed, what it kept under its folder stays" for name in result["removed"]]
    return lines or ["No schedules."]


def _difference(file: File) -> dict[str, str]:
    now = masking.mask_text(file.now() or "")
    return {"before_header": file.path, "after_header": file.path, "before": now, "after": file.text or ""}
