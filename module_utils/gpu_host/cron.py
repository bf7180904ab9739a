"""systemd's calendar expressions in the words of cron, as far as cron has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DAY_NUMBERS = {name: number for number, day in enumerate(_DAYS) for name in (day, day[:3])}
_SHORTHANDS = {
    "minutely": "*:*",
    "hourly": "*:00",
    "daily": "00:00",
    "weekly": "Mon 00:00",
    "monthly": "*-*-01 00:00",
    "quarterly": "*-01,04,07,10-01 00:00",
    "semiannually": "*-01,07-01 00:00",
    "yearly": "*-01-01 00:00",
    "annually": "*-01-01 00:00",
}
_SEARCHED_DAYS = 4 * 366 + 1  # a 29 February is never further away, but over a century that is no leap year


class NotInCron(Exception):
    """Cron can't say this; the text is the reason in half a sentence."""


@dataclass(frozen=True)
class Times:
    """The minutes, hours, days, months and weekdays (0 is Monday) of a firing."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]

    @property
    def line(self) -> str:
        """The five fields of a crontab."""
        weekdays = tuple(sorted((day + 1) % 7 for day in self.weekdays))  # cron's week begins with Sunday as 0
        fields = (
            (self.minutes, range(60)),
            (self.hours, range(24)),
            (self.days, range(1, 32)),
            (self.months, range(1, 13)),
            (weekdays, range(7)),
        )
        return " ".join("*" if list(have) == list(all_) else ",".join(map(str, have)) for have, all_ in fields)

    def after(self, begin: datetime) -> Iterator[datetime]:
        """The firings after a local time, for some four years."""
        for number in range(_SEARCHED_DAYS):
            day = begin.date() + timedelta(days=number)
            if self._on(day):
                moments = (datetime.combine(day, time(hour, minute)) for hour in self.hours for minute in self.minutes)
                yield from (moment for moment in moments if moment > begin)

    def _on(self, day: date) -> bool:
        return day.month in self.months and day.day in self.days and day.weekday() in self.weekdays


def times(calendar: str) -> Times:
    """What a calendar expression says; NotInCron where cron has no words for it."""
    words = _SHORTHANDS.get(calendar.strip().lower(), calendar).split()
    weekdays: tuple[int, ...] = tuple(range(7))
    if words and words[0][:1].isalpha():
        weekdays = _weekdays(words.pop(0))
    days = "*-*-*"
    if words and "-" in words[0]:
        days = words.pop(0)
    clock = words.pop(0) if words else "00:00"
    if words:
        raise NotInCron(f"{' '.join(words)!r} is nothing that cron knows; it has no time zones")
    date_parts = days.split("-")
    if len(date_parts) == 2:
        date_parts.insert(0, "*")
    clock_parts = clock.split(":")
    if len(date_parts) != 3 or date_parts[0] != "*" or len(clock_parts) not in (2, 3):
        raise NotInCron(f"{calendar!r} is more than weekdays, a date without a year, and a time of day")
    if clock_parts[2:] not in ([], ["00"], ["0"]):
        raise NotInCron("cron fires at full minutes only")
    month_days, months = _numbers(date_parts[2], 1, 31), _numbers(date_parts[1], 1, 12)
    if len(weekdays) < 7 and len(month_days) < 31:
        raise NotInCron("cron would fire on the days of the month and on the weekdays as well, not on both at once")
    return Times(_numbers(clock_parts[1], 0, 59), _numbers(clock_parts[0], 0, 23), month_days, months, weekdays)


def _weekdays(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.lower().split(","):
        ends = [_DAY_NUMBERS.get(name, -1) for name in re.split(r"\.\.|-", part)]
        if -1 in ends or len(ends) > 2:
            raise NotInCron(f"{part!r} is no weekday; give Mon or Monday")
        day = ends[0]
        found.add(day)
        while day != ends[-1]:
            day = (day + 1) % 7
            found.add(day)
    return tuple(sorted(found))


def _numbers(text: str, least: int, most: int) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        shape = re.fullmatch(r"(\*|\d{1,2})(?:\.\.(\d{1,2}))?(?:/(\d{1,2}))?", part)
        if not shape or shape.group(3) in ("0", "00"):
            raise NotInCron(f"{part!r} is no number, list, range or step")
        first = least if shape.group(1) == "*" else int(shape.group(1))
        step = int(shape.group(3) or 1)
        last = int(shape.group(2)) if shape.group(2) else most if shape.group(1) == "*" or shape.group(3) else first
        if not least <= first <= last <= most:
            raise NotInCron(f"{part!r} is not within {least} to {most}")
        found.update(range(first, last + 1, step))
    return tuple(sorted(found))
