"""Schedules of resets: what a person writes, judged, and when they fire. Nothing here touches the machine.

A schedule can't end strangers: no key of it says so, its `variables` may not, and what runs it (plugin_utils'
scheduled.py) sets the variable to false above everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from . import masking

POLICIES = ("drain", "idle_only", "zombies_only", "force")
AFTERWARDS = ("clean", "restore")
# A window's end by the clock counts when it is nearer than this: at noon, one until 06:00 is over, not 18 hours long.
LONGEST_WINDOW = timedelta(hours=12)
LONGEST_SECONDS = 86400
FIXED_ENVIRONMENT = (
    "ANSIBLE_CONFIG",
    "ANSIBLE_HOME",
    "ANSIBLE_SSH_CONTROL_PATH_DIR",
    "ANSIBLE_CALLBACK_PLUGINS",
    "GPU_ARTIFACTS",
    "PATH",
    "HOME",
)
# The name of the data folder is part of the paths of ssh's control sockets, which may have 108 bytes.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_DURATION = re.compile(r"(?:(\d{1,4})h)?(?:(\d{1,5})min|(\d{1,5})m)?(?:(\d{1,6})s)?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CALENDAR = re.compile(r"[A-Za-z0-9 *:,./~+_-]{1,200}")


@dataclass(frozen=True)
class Schedule:
    """One schedule. Times are in seconds; `window` is '' (none), a length ('90m') or its end by the clock ('06:00')."""

    name: str
    calendar: str
    inventory: str
    random_delay: int = 0
    persistent: bool = False
    limit: str = ""
    policy: str = "drain"
    afterwards: str = "clean"
    window: str = ""
    held_out: tuple[str, ...] = ()
    serial: Any = None
    breaker_share: float | None = None
    timeout: int = 14400
    keep: int = 30
    vault_password_file: str = ""
    ssh_key: str = ""
    hook: str | tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


KEYS = tuple(Schedule.__dataclass_fields__)


class Wrong(Exception):
    """A key of a schedule says something that it may not; the text is one sentence."""


def parse(entries: Any) -> tuple[list[Schedule], list[str]]:
    """The schedules, and one sentence for each thing that is wrong with them."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return [], ["reset_schedule_schedules is no list; give one entry for each schedule, or [] for none."]
    schedules: list[Schedule] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, 1):
        schedule, wrong = _schedule(entry, number)
        problems += wrong
        if schedule:
            schedules.append(schedule)
    names = [one.name for one in schedules]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"Two schedules are named {name!r}; give each a name of its own.")
    return schedules, problems


def _schedule(entry: Any, number: int) -> tuple[Schedule | None, list[str]]:
    """The schedule, or None and one sentence for each key that is wrong."""
    if not isinstance(entry, Mapping):
        needs = "it needs at least name, calendar and inventory"
        return None, [f"Schedule {number} is {entry!r}, no dictionary; {needs}."]
    name, which, problems = entry.get("name"), f"Schedule {number}", []
    if isinstance(name, str) and _NAME.fullmatch(name):
        which = f"Schedule {name!r}"
    else:
        problems.append(
            f"{which} has the name {name!r}; give 1 to 40 lower-case letters, digits and dashes, since its timer is "
            "named after it."
        )
    if unknown := [str(key) for key in entry if key not in KEYS]:
        problems.append(f"{which} has no key {', '.join(unknown)}; it knows {', '.join(KEYS)}.")
    lacking = [needed for needed in _EXAMPLES if not entry.get(needed)]
    problems += [f"{which} lacks {needed}; give {_EXAMPLES[needed]}." for needed in lacking]
    given = {key: value for key, value in entry.items() if value is not None and key not in lacking}
    for key, check in _CHECKS.items():
        if key in given:
            try:
                given[key] = check(given[key])
            except Wrong as wrong:
                problems.append(f"{which}, {key}: {wrong}")
    return (None, problems) if problems else (Schedule(**given), [])


_EXAMPLES = {
    "calendar": "when it fires, as systemd's OnCalendar has it, for example 'Mon..Fri 03:00'",
    "inventory": "the path of the inventory, absolute or from the repository on",
}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Wrong(f"{value!r} is no text; put it in quotes (YAML reads 23:00 without them as the number 1380).")
    if "\n" in value or "\0" in value:
        raise Wrong(f"{value!r} has more than one line.")
    return value.strip()


def _calendar(value: Any) -> str:
    text = _text(value)
    if not _CALENDAR.fullmatch(text):
        raise Wrong(f"{text!r} is no calendar expression; give for example 'Mon..Fri 03:00'.")
    return text


def _limit(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(map(_text, value))
    return _text(value)


def _path(value: Any) -> str:
    text = _text(value)
    if text and (not text.startswith("/") or ".." in text.split("/")):
        raise Wrong(f"{text!r} is no absolute path on the control node.")
    return text


def _paths(value: Any) -> tuple[str, ...]:
    return tuple(map(_path, _words(value)))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Wrong(f"{value!r} is no list.")
    return tuple(map(_text, value))


def _hook(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return _text(value)
    if isinstance(value, str):
        raise Wrong(f"{value!r} is neither a list of words (a command) nor an address that begins with https://.")
    return _words(value)


def _whole(least: int, most: int, what: str) -> Any:
    def check(value: Any) -> int:
        number = seconds(value) if isinstance(value, str) and what == "seconds" else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise Wrong(f"{value!r} is none; give {what} from {least} to {most}.")
        return number

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong(f"{value!r} is neither true nor false.")
    return value


def _one_of(choices: Sequence[str]) -> Any:
    def check(value: Any) -> str:
        if value not in choices:
            raise Wrong(f"{value!r} is unknown; give {', '.join(choices[:-1])} or {choices[-1]}.")
        return str(value)

    return check


def _window(value: Any) -> str:
    text = _text(value)
    if text and not _CLOCK.fullmatch(text) and not 0 < (seconds(text) or 0) <= LONGEST_SECONDS:
        raise Wrong(f"{text!r} is no window; give its length ('90m', '2h', a day at most) or its end ('06:00').")
    return text


def _serial(value: Any) -> Any:
    for one in value if isinstance(value, list) and value else [value]:
        whole = isinstance(one, int) and not isinstance(one, bool) and one > 0
        share = isinstance(one, str) and re.fullmatch(r"[1-9]\d?%|100%|[1-9]\d*", one)
        if not whole and not share:
            raise Wrong(f"{one!r} is no size of a batch; give a number of hosts or a share such as '10%'.")
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise Wrong(f"{value!r} is no share of the hosts; give a number from 0 to 1, such as 0.1.")
    return float(value)


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise Wrong(f"{value!r} is no dictionary.")
    for name, one in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise Wrong(f"{name!r} is no name of an environment variable.")
        if name in FIXED_ENVIRONMENT:
            raise Wrong(f"{name} is set by what runs the schedule; leave it out.")
        if isinstance(one, (Mapping, list, tuple)) or one is None:
            raise Wrong(f"the value of {name} is {one!r}; give a text or a number.")
        _no_secret(name)
    return {name: str(one) for name, one in value.items()}


def _variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Wrong(f"{value!r} is no dictionary.")
    for name in value:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise Wrong(f"{name!r} is no name of a variable.")
        if name == "gpu_reset_kill_strangers":
            raise Wrong("a schedule never ends strangers, so gpu_reset_kill_strangers can't be set; reset by hand.")
        if name == "reset_breaker_clear":
            raise Wrong("the breaker is for a person to clear, so reset_breaker_clear can't be set.")
        if name in SET_BY_KEYS:
            raise Wrong(f"{name} is set by the schedule's own {SET_BY_KEYS[name]}; leave it out of the variables.")
        _no_secret(name)
    return dict(value)


# Variables of the plays that a schedule sets itself, and by what.
SET_BY_KEYS = {
    "gpu_reset_policy": "key policy",
    "reset_not_after": "key window",
    "reset_held_out": "key held_out",
    "reset_serial": "key serial",
    "reset_breaker_share": "key breaker_share",
    "reset_hook": "key hook",
    "reset_schedule_name": "name",
    "reset_confirmed": "declaration",
}


def _no_secret(name: str) -> None:
    if masking.is_secret_name(name):
        raise Wrong(f"{name} looks like a secret, which would lie in a file here; give it by a path or from a vault.")


_CHECKS: dict[str, Any] = {
    "calendar": _calendar,
    "inventory": _text,
    "random_delay": _whole(0, LONGEST_SECONDS, "seconds"),
    "persistent": _flag,
    "limit": _limit,
    "policy": _one_of(POLICIES),
    "afterwards": _one_of(AFTERWARDS),
    "window": _window,
    "held_out": _words,
    "serial": _serial,
    "breaker_share": _share,
    "timeout": _whole(60, 7 * 86400, "seconds"),
    "keep": _whole(1, 10000, "a number of runs"),
    "vault_password_file": _path,
    "ssh_key": _path,
    "hook": _hook,
    "writable": _paths,
    "environment": _environment,
    "variables": _variables,
}


def seconds(text: str) -> int | None:
    """'2h', '1h30m', '90m', '45s' in seconds; None for anything else."""
    found = _DURATION.fullmatch(text.replace(" ", ""))
    if not found or not any(found.groups()):
        return None
    hours, minutes, short_minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600 + (minutes + short_minutes) * 60 + rest


def window_end(window: str, begin: datetime) -> datetime | None:
    """When a window ends that is entered at `begin` (local time); None where it is not open then."""
    clock = _CLOCK.fullmatch(window)
    if not clock:
        return begin + timedelta(seconds=seconds(window) or 0)
    end = begin.replace(hour=int(clock.group(1)), minute=int(clock.group(2)), second=0, microsecond=0)
    if end <= begin:
        end += timedelta(days=1)
    return end if end - begin <= LONGEST_WINDOW else None


def window_problem(schedule: Schedule, firings: Iterable[datetime]) -> str:
    """Why a run could begin when the window is closed, one sentence; '' where it can't."""
    if not schedule.window:
        return ""
    for firing in firings:
        what = f"Schedule {schedule.name!r}: the window {schedule.window!r} is impossible: it fires at {firing:%H:%M}"
        end = window_end(schedule.window, firing)
        if end is None:
            hours = LONGEST_WINDOW.seconds // 3600
            return f"{what}, when that window is over (an end counts for the {hours} hours before it)."
        if _CLOCK.fullmatch(schedule.window) and firing + timedelta(seconds=schedule.random_delay) >= end:
            return f"{what}, and with random_delay ({schedule.random_delay} s) the window may be over before it begins."
    return ""
