"""What a run of resets over many hosts may do: its switches, its window, its batches, and the hosts it leaves out.

Pure functions on the control node; breaker.py keeps what outlives a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

DEFAULT_SHARE = 0.2
HALF_DAY = 12 * 3600.0
HELD_OUT = "held out (reset_held_out)"

# The switches of playbooks/reset.yml and restart.yml, as an argument spec. Those of a role start with its own name.
SWITCHES: dict[str, dict[str, Any]] = {
    "reset_confirmed": {"type": "bool"},
    "reset_serial": {"type": "raw"},
    "reset_breaker_share": {"type": "raw"},
    "reset_breaker_clear": {"type": "bool"},
    "reset_not_after": {"type": "raw"},
    "reset_held_out": {"type": "list", "elements": "str"},
    "reset_schedule_name": {"type": "str"},
    "restart_servers": {"type": "list", "elements": "str"},
}
ROLES = ("reset_schedule_",)  # their variables share the prefix, and are theirs to check


class Problem(ValueError):
    """A switch that makes no sense; the text names it, what was found, and what to do."""


def unknown_switches(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Variables that look like switches of the plays and are none: a misspelt one would be passed over in silence."""
    looks_like = [name for name in names if name.startswith(("reset_", "restart_")) and not name.startswith(ROLES)]
    return sorted(set(looks_like) - set(known))


def not_after(value: Any, now: float) -> float | None:
    """The moment (seconds since the epoch) after which no further host is begun; None where there is no such moment.

    An ISO 8601 time (the control node's own zone unless it names one), HH:MM for the next such time of day, or seconds
    since the epoch. Raises Problem for anything else and for a moment that is over.
    """
    if value is None or value == "":
        return None
    text = str(value).strip()
    how = "give a time of day (05:30), a date with it (2027-01-31T05:30) or seconds since the epoch"
    if isinstance(value, bool):
        raise Problem(f"reset_not_after is {text!r}: {how}.")
    if re.fullmatch(r"\d{1,2}:\d{2}", text):
        return _time_of_day(text, now, how)
    if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
        moment = float(text)
    else:
        try:
            moment = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            # YAML reads an unquoted 05:30 as a number in base 60.
            quoted = "; a time of day needs quotes in YAML" if re.fullmatch(r"\d{1,5}", text) else ""
            raise Problem(f"reset_not_after is {text!r}, which is no time: {how}{quoted}.") from None
    if moment <= now:
        raise Problem(f"reset_not_after is {text}, and that is over since {_minutes(now - moment)}: {how}.")
    return moment


def _time_of_day(text: str, now: float, how: str) -> float:
    hour, minute = (int(part) for part in text.split(":"))
    if hour > 23 or minute > 59:
        raise Problem(f"reset_not_after is {text!r}, which is no time of day: {how}.")
    today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=0, microsecond=0)
    moment = today.timestamp()
    if moment <= now:
        # The same clock time of the next day, also where a clock change lies between.
        moment = datetime.fromordinal(today.toordinal() + 1).replace(hour=hour, minute=minute).timestamp()
    if moment - now > HALF_DAY:
        # A run that was late for its window must not get a window of nearly a day.
        raise Problem(
            f"reset_not_after is {text}: that was {_minutes(now - today.timestamp())} ago, or is the end of a window of"
            f" {_minutes(moment - now)}; give the date as well where the latter is meant ({iso(moment)})."
            if today.timestamp() <= now
            else f"reset_not_after is {text}, in {_minutes(moment - now)}: a time of day alone means one within 12"
            f" hours; give the date as well ({iso(moment)})."
        )
    return moment


def _minutes(seconds: float) -> str:
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M", time.localtime(moment))


def share(value: Any) -> float:
    """The share of newly dirty hosts, 0 to 1, more than which stops the run. Raises Problem."""
    if value is None or value == "":
        return DEFAULT_SHARE
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise Problem(f"reset_breaker_share is {text!r}: give a share of the hosts from 0 to 1, or 0% to 100%.")
    return number


def sizes(value: Any, count: int, variable: str = "reset_serial") -> list[int]:
    """How many of ``count`` hosts each batch may have; the last size holds for all that follow. Raises Problem."""
    wanted = list(value) if isinstance(value, (list, tuple)) else [value]
    found = []
    for one in wanted:
        text = str(one).strip()
        match = re.fullmatch(r"(\d+)(%?)", text)
        if isinstance(one, bool) or not match or (match[2] and int(match[1]) > 100) or int(match[1]) == 0:
            raise Problem(
                f"{variable} is {value!r}: give the hosts of a batch as a number (5), a share (20%), or a list of"
                " those for the first, the second and all further batches."
            )
        found.append(max(1, count * int(match[1]) // 100) if match[2] else int(match[1]))
    if not found:
        raise Problem(f"{variable} is an empty list: give at least one number or share.")
    return found


def units(hosts: Sequence[str], nodes_of: Callable[[str], Sequence[str]]) -> list[list[str]]:
    """The hosts in their order, those of one server over several hosts together, in the order of its ranks."""
    known = set(hosts)
    unit_of: dict[str, list[str]] = {}
    for host in hosts:
        members = [node for node in nodes_of(host) if node in known]
        if host not in members:
            members = [host]
        joined = list(dict.fromkeys(other for member in members for other in unit_of.get(member, [member])))
        for member in joined:
            unit_of[member] = joined
    done: set[str] = set()
    result = []
    for host in hosts:
        if host not in done:
            result.append(unit_of[host])
            done.update(unit_of[host])
    return result


def batches(parts: Sequence[Sequence[str]], most: Sequence[int]) -> list[list[str]]:
    """Units packed into batches of at most the given sizes; a unit is never cut, even where it is larger than those."""
    result: list[list[str]] = []
    current: list[str] = []
    for part in parts:
        if current and len(current) + len(part) > most[min(len(result), len(most) - 1)]:
            result.append(current)
            current = []
        current = [*current, *part]
    return [*result, current] if current else result


def held_out(wanted: Iterable[str], match: Callable[[str], Sequence[str]], groups: Iterable[str]) -> list[str]:
    """The hosts that are held out: ``match`` gives those of a host pattern, a name or a group most of the time.

    Raises Problem for what the inventory does not have: a misspelt host would be reset.
    """
    wanted = list(wanted)
    found = {one: match(one) for one in wanted}
    if unknown := [one for one in wanted if not found[one] and one not in set(groups)]:
        raise Problem(
            f"reset_held_out names {', '.join(unknown)}, and the inventory has no such host or group: see"
            " ansible-inventory --graph."
        )
    return list(dict.fromkeys(host for hosts in found.values() for host in hosts))


def why_left_out(
    host: str, nodes: Sequence[str], held: Sequence[str], play: Iterable[str], not_ready: Mapping[str, str]
) -> str:
    """Why a host of this play is not reset at all, whatever the time; '' where nothing speaks against it.

    ``nodes`` are the hosts of the server that runs over this one and others, or empty. ``not_ready`` has the sentences
    of those nodes that can't be used now.
    """
    if host in held:
        return HELD_OUT
    others = [node for node in nodes if node != host]
    if others and host in nodes:
        together = f"its server runs over {', '.join(nodes)}, which are reset together or not at all"
        if named := [node for node in others if node in held]:
            return f"{together}, and {', '.join(named)} is held out (reset_held_out)"
        there = set(play)
        if absent := [node for node in others if node not in there]:
            return f"{together}, and {', '.join(absent)} is not in this run"
        if broken := [f"{node}: {not_ready[node]}" for node in others if not_ready.get(node)]:
            return f"{together}, and {'; '.join(broken)}"
    return ""
