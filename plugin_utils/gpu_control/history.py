"""What the run records tell together: the history of resets, read from ``resets.jsonl`` and its rotated siblings.

Files are only read. A line that can't be read is named with its file and number and passed over; all else counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import gzip
import json
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import records

LOCK_SECONDS = 2.0  # longest wait for a run that is just writing its line
CLEAN_GPU = ("free", "protected_only")
NOT_JUDGED = ("skipped",)  # nothing was done, so it says nothing about the host


class HistoryError(Exception):
    """The history can't be reported; the text is one sentence for the user."""


class SeenGpu(NamedTuple):
    """One GPU at the end of a reset."""

    number: int | None
    uuid: str
    verdict: str
    pci_bus_id: str


class Xid(NamedTuple):
    """An Xid error in the kernel log. ``seconds`` since boot tell one from the same one in the next record."""

    xid: int
    pci_bus_id: str
    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Reset:
    """What the history keeps of one record, or of several of one play and host. Seconds; ``when`` since 1970."""

    host: str
    run_id: str
    when: float
    verdict: str
    reason: str
    play: str
    schedule: str
    simulated: bool
    killed: int
    orphans: int
    seconds: float | None
    gpus: tuple[SeenGpu, ...]
    xids: tuple[Xid, ...]
    on_hypervisor: bool

    @property
    def judged(self) -> bool:
        return self.verdict not in NOT_JUDGED and not self.on_hypervisor

    @property
    def bad(self) -> bool:
        return self.judged and self.verdict != "clean"

    @property
    def started(self) -> str:
        return records.timestamp(self.when)


@dataclass(frozen=True)
class Problem:
    """A line that could not be read."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.why}"


@dataclass
class History:
    """Resets in the order of their time; ``lines`` that were looked at, ``notes`` on what was read in another way."""

    resets: list[Reset] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: int = 0


@dataclass(frozen=True)
class Filters:
    """``since`` in seconds since 1970, ``newest`` resets of each host (0: all), host names or patterns (none: all)."""

    since: float = 0.0
    newest: int = 0
    hosts: tuple[str, ...] = ()

    def wants(self, host: str) -> bool:
        return not self.hosts or any(fnmatchcase(host, pattern) for pattern in self.hosts)


# ---- reading ----


def find_files(wanted: Sequence[str], folder: Path) -> list[Path]:
    """The files of these names and patterns, relative ones in ``folder``. HistoryError where one is not there."""
    found: list[Path] = []
    for name in wanted:
        path = os.path.join(folder, os.path.expanduser(name))
        matching = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        files = [Path(one) for one in matching if os.path.isfile(one)]
        if not files:
            raise HistoryError(
                f"There is no history in {path}: a reset writes its record there (playbooks/reset.yml), or name other "
                "files in report_resets_files."
            )
        found += [file for file in files if file not in found]
    return found


def read(files: Sequence[Path]) -> History:
    """All records of the files, each run of a host once. HistoryError where a file can't be read at all."""
    history = History(files=[str(file) for file in files])
    seen: set[tuple[str, str]] = set()
    kept: dict[Any, Any] = {}  # equal parts of many records, once
    schemas: Counter[str] = Counter()
    for file in files:
        try:
            for number, line, whole in _lines(file):
                history.lines += 1
                try:
                    one, schema = _reset(line, whole, kept)
                except ValueError as error:
                    history.problems.append(Problem(str(file), number, str(error)))
                    continue
                if schema != records.SCHEMA:
                    schemas[repr(schema)[:40]] += 1
                key = (one.run_id, one.host)
                if not one.run_id or key not in seen:
                    seen.add(key)
                    history.resets.append(one)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if not history.lines or not str(file).endswith(".gz"):
                raise HistoryError(f"The history {file} can't be read: {reason}.") from error
            history.problems.append(Problem(str(file), number + 1, f"the rest can't be read: {reason}"))
    history.notes += [
        f"{count} record{'s' if count > 1 else ''} of schema {schema} instead of {records.SCHEMA}: what has the known "
        "names was taken, the rest left alone"
        for schema, count in schemas.items()
    ]
    history.resets.sort(key=lambda one: one.when)
    history.resets = merged(history.resets)
    return history


def _lines(file: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text and whether it was ended, of each line that is not empty."""
    with _opened(file) as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield number, line, line.endswith(b"\n")


def _opened(file: Path) -> BinaryIO:
    if file.name.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    opened = file.open("rb", buffering=1 << 20)
    end = time.monotonic() + LOCK_SECONDS
    while True:  # a line that is being written is whole once its writer has let go of the lock
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(opened, fcntl.LOCK_UN)
            return opened
        if time.monotonic() >= end:
            return opened
        time.sleep(0.02)


def _reset(line: bytes, whole: bool, kept: dict[Any, Any]) -> tuple[Reset, Any]:
    """One record and its schema. ValueError says why a line is none."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("no record: nested too deep") from None
    except ValueError as error:
        if not whole:
            raise ValueError("cut short: the line has no end (a full disk or a crash)") from None
        where = f" at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"no JSON{where}") from None
    if not isinstance(found, dict):
        raise ValueError("no record: the line holds no JSON object")
    schema = found.get("schema")
    for name in ("host", "verdict", "started"):
        if not isinstance(found.get(name), str) or not found[name]:
            raise ValueError(
                f"no record: {name} is missing" + ("" if schema == records.SCHEMA else f" (schema {schema!r})")
            )
    when = _moment(found["started"])
    if when is None:
        raise ValueError(f"no record: started is {found['started'][:40]!r}, no time")

    def keep(value: Any) -> Any:
        return kept.setdefault(value, value)

    killed = _rows(found.get("killed"))
    seconds = found.get("seconds")
    total = seconds.get("total") if isinstance(seconds, dict) else None
    guest = found.get("guest")
    one = Reset(
        host=keep(_text(guest if isinstance(guest, str) and guest else found["host"])),
        run_id=_text(found.get("run_id")),
        when=when,
        verdict=keep(_text(found["verdict"])),
        reason=keep(_text(found.get("reason"))),
        play=keep(_text(found.get("play"))),
        schedule=keep(_text(found.get("schedule"))),
        simulated=found.get("simulated") is True,
        killed=len(killed),
        orphans=sum(row.get("class") == "orphan" for row in killed),
        seconds=_number(total),
        gpus=keep(tuple(_gpu(row) for row in _rows(found.get("gpus")))),
        xids=tuple(_xids(found.get("kernel_events"))),
        on_hypervisor=bool(guest),
    )
    return one, schema


def _gpu(row: dict[str, Any]) -> SeenGpu:
    index = row.get("index")
    return SeenGpu(
        index if isinstance(index, int) else None,
        _text(row.get("uuid")),
        _text(row.get("verdict")) or "unknown",
        pci(_text(row.get("pci_bus_id"))),
    )


def _xids(events: Any) -> Iterator[Xid]:
    for row in _rows(events):
        number, seconds = row.get("xid"), row.get("seconds")
        if isinstance(number, int):
            at = round(_number(seconds) or 0.0, 3)
            yield Xid(number, pci(_text(row.get("pci_bus_id"))), at, _text(row.get("text")))


def _number(value: Any) -> float | None:
    """A number from 0 on, or None."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
            return float(value)
    return None


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Text that a terminal can show: a record holds names of processes, which may hold anything."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    return value if value.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in value)


_PCI = re.compile(r"(?:0000)?([0-9a-f]{4}):([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?")


def pci(name: str) -> str:
    """A PCI id in the one form: the kernel writes 0000:c1:00, NVML 00000000:C1:00.0."""
    found = _PCI.fullmatch(name.lower())
    return f"{found.group(1)}:{found.group(2)}" if found else name.lower()


def _moment(text: str) -> float | None:
    """Seconds since 1970 of a time as records have it; without a zone it is UTC."""
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def since(text: str, now: float) -> float:
    """The moment that a user names: 36h, 7d, 2w, a date or an ISO time. HistoryError where it is none."""
    units = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
    if found := re.fullmatch(r"(\d{1,5})([hdw])", text.strip()):
        return now - int(found.group(1)) * units[found.group(2)].total_seconds()
    moment = _moment(text.strip())
    if moment is None:
        raise HistoryError(
            f"report_resets_since: {text!r} is no time; give a span (36h, 7d, 2w), a date (2026-07-01) or an ISO time."
        )
    return moment


def merged(resets: Iterable[Reset]) -> list[Reset]:
    """The records that one play made of one host as one reset: a reset may go on to the hypervisor and come back."""
    found: list[Reset] = []
    places: dict[tuple[str, str], int] = {}
    for one in resets:
        place = places.get((one.play, one.host)) if one.play else None
        if place is None:
            places[(one.play, one.host)] = len(found)
            found.append(one)
            continue
        first = found[place]
        last = first if one.on_hypervisor else one
        both = [part for part in (first.seconds, one.seconds) if part is not None]
        found[place] = replace(
            first,
            verdict=last.verdict,
            reason=last.reason,
            on_hypervisor=first.on_hypervisor and one.on_hypervisor,
            killed=first.killed + one.killed,
            orphans=first.orphans + one.orphans,
            seconds=sum(both) if both else None,
            gpus=last.gpus or first.gpus,
            xids=first.xids + one.xids,
        )
    return found


def chosen(resets: Sequence[Reset], filters: Filters) -> list[Reset]:
    """The resets that the filters leave, in the order of their time."""
    left = [one for one in resets if one.when >= filters.since and filters.wants(one.host)]
    if not filters.newest:
        return left
    counts: Counter[str] = Counter()
    newest = []
    for one in reversed(left):
        counts[one.host] += 1
        if counts[one.host] <= filters.newest:
            newest.append(one)
    return newest[::-1]


# ---- what it tells ----

RECENT = 10  # so many newest resets of a host are held against those before
LEAST = 3  # resets that there must be in both parts
MORE_BAD = 0.2
CHANCE = 0.1
MORE_SECONDS = 5.0


def rule(recent: int = RECENT) -> str:
    """How `worse` decides, for the reader of a report."""
    return (
        f"A host gets worse when its newest resets ({recent}, or half of what there is) against all before show a "
        f"share of not clean that is {100 * MORE_BAD:.0f} points higher and would come by chance in less than "
        f"{CHANCE:.0%} of cases; or orphans or Xids a reset at least twice as many and one more, in two or more; "
        f"or a median time half as long again and {MORE_SECONDS:g} s longer. It needs {LEAST} resets in both parts; "
        "skipped ones don't count."
    )


def worse(resets: Sequence[Reset], recent: int = RECENT) -> list[str]:
    """In what ways one host gets worse, one clause each with the numbers; empty where it does not."""
    judged = [one for one in resets if one.judged]
    count = min(recent, len(judged) // 2)
    if count < LEAST:
        return []
    before, new = judged[:-count], judged[-count:]
    found = []
    bad_before, bad_new = sum(one.bad for one in before), sum(one.bad for one in new)
    if (
        bad_new / len(new) - bad_before / len(before) >= MORE_BAD
        and by_chance(bad_new, len(new), bad_before, len(before)) < CHANCE
    ):
        found.append(f"not clean {bad_new} of the last {len(new)}, before {bad_before} of {len(before)}")
    for name, of in (("orphans", _orphans), ("Xids", _xid_count)):
        then, now = (statistics.fmean(map(of, part)) for part in (before, new))
        if now >= 2 * then and now - then >= 1 and sum(of(one) > 0 for one in new) >= 2:
            found.append(f"{now:.1f} {name} a reset, before {then:.1f}")
    times_before, times_new = (
        [one.seconds for one in part if one.seconds is not None and one.verdict != "unreachable"]
        for part in (before, new)
    )
    if len(times_before) >= LEAST and len(times_new) >= LEAST:
        then, now = statistics.median(times_before), statistics.median(times_new)
        if now >= 1.5 * then and now - then >= MORE_SECONDS:
            found.append(f"{now:.0f} s a reset (median), before {then:.0f} s")
    return found


def _orphans(one: Reset) -> int:
    return one.orphans


def _xid_count(one: Reset) -> int:
    return len(one.xids)


def by_chance(bad_new: int, new: int, bad_before: int, before: int) -> float:
    """The chance of so many bad ones among the new or more, if nothing had changed (Fisher's exact test, one side)."""
    bad, total = bad_new + bad_before, new + before
    ways = math.comb(total, new)
    return sum(math.comb(bad, k) * math.comb(total - bad, new - k) for k in range(bad_new, min(bad, new) + 1)) / ways


@dataclass
class HostHistory:
    """All that is told of one host."""

    host: str
    resets: list[Reset]
    xids: Counter[int]
    worse: list[str]

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(one.verdict for one in self.resets if not one.on_hypervisor)

    @property
    def last(self) -> Reset:
        return next((one for one in reversed(self.resets) if not one.on_hypervisor), self.resets[-1])

    @property
    def orphans(self) -> int:
        return sum(one.orphans for one in self.resets)

    @property
    def killed(self) -> int:
        return sum(one.killed for one in self.resets)

    @property
    def times(self) -> list[float]:
        return [one.seconds for one in self.resets if one.seconds is not None and one.judged]

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.times) if self.times else None

    @property
    def slowest_seconds(self) -> float | None:
        return max(self.times, default=None)

    @property
    def always_clean(self) -> bool:
        return set(self.verdicts) <= {"clean"} and not self.orphans and not self.xids and not self.worse


@dataclass
class GpuHistory:
    """One GPU of a host, by UUID. ``index`` and ``last`` as they were at last."""

    host: str
    uuid: str
    index: int | None = None
    last: str = ""
    pci_bus_id: str = ""
    verdicts: Counter[str] = field(default_factory=Counter)
    xids: Counter[int] = field(default_factory=Counter)

    @property
    def seen(self) -> int:
        return sum(self.verdicts.values())

    @property
    def not_free(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if verdict not in CLEAN_GPU)


@dataclass
class Summary:
    """What is reported: `hosts` and `gpus` by name, `broken` lines and `notes` of the files."""

    hosts: list[HostHistory]
    gpus: list[GpuHistory]
    first: float
    last: float
    history: History
    rule: str
    filters: Filters
    missing: list[str]

    @property
    def resets(self) -> int:
        return sum(sum(host.verdicts.values()) for host in self.hosts)

    @property
    def verdicts(self) -> Counter[str]:
        return sum((host.verdicts for host in self.hosts), Counter())

    @property
    def worse(self) -> list[HostHistory]:
        return [host for host in self.hosts if host.worse]

    @property
    def simulated(self) -> bool:
        return any(host.last.simulated for host in self.hosts)

    @property
    def troubled_gpus(self) -> list[GpuHistory]:
        return [gpu for gpu in self.gpus if gpu.not_free or gpu.xids]

    def schedules(self) -> dict[str, Counter[str]]:
        """Verdicts by the schedule that began the reset, '' by hand."""
        found: dict[str, Counter[str]] = {}
        for host in self.hosts:
            for one in host.resets:
                if not one.on_hypervisor:
                    found.setdefault(one.schedule, Counter())[one.verdict] += 1
        return dict(sorted(found.items()))

    def days(self, most: int = 30) -> list[tuple[str, Counter[str]]]:
        """Verdicts by day (UTC), the newest so many days that had a reset."""
        found: dict[str, Counter[str]] = {}
        for host in self.hosts:
            for one in host.resets:
                if not one.on_hypervisor:
                    found.setdefault(one.started[:10], Counter())[one.verdict] += 1
        return sorted(found.items())[-most:]

    def newest_bad(self, most: int = 50) -> list[Reset]:
        """The newest resets that did not end clean, newest first."""
        bad = [one for host in self.hosts for one in host.resets if one.bad]
        return sorted(bad, key=lambda one: one.when, reverse=True)[:most]


def summarise(history: History, filters: Filters | None = None, recent: int = RECENT) -> Summary:
    """The report's numbers. HistoryError where the filters leave nothing."""
    filters = filters or Filters()
    resets = chosen(history.resets, filters)
    known = {one.host for one in history.resets}
    missing = [pattern for pattern in filters.hosts if not any(fnmatchcase(host, pattern) for host in known)]
    if not resets:
        raise HistoryError(_nothing(history, filters, missing))
    by_host: dict[str, list[Reset]] = {}
    for one in resets:
        by_host.setdefault(one.host, []).append(one)
    hosts: list[HostHistory] = []
    gpus: list[GpuHistory] = []
    for host in sorted(by_host):
        own = _xids_once(by_host[host])
        counted = Counter(xid.xid for one in own for xid in one.xids)
        hosts.append(HostHistory(host, own, counted, worse(own, recent)))
        gpus += _gpus(host, own)
    return Summary(hosts, gpus, resets[0].when, resets[-1].when, history, rule(recent), filters, missing)


def _nothing(history: History, filters: Filters, missing: Sequence[str]) -> str:
    files = ", ".join(history.files)
    if not history.resets:
        broken = f" ({len(history.problems)} of its lines can't be read, the first is {history.problems[0]})"
        return f"There is no reset on record in {files}{broken if history.problems else ''}."
    if missing and len(missing) == len(filters.hosts):
        some = sorted({one.host for one in history.resets})
        shown = ", ".join(some[:10]) + (", ..." if len(some) > 10 else "")
        return f"No reset of {', '.join(missing)} is on record in {files}; there are resets of {shown}."
    newest = max(one.when for one in history.resets if filters.wants(one.host))
    return (
        f"No reset since {records.timestamp(filters.since)} is on record in {files}; the newest is of "
        f"{records.timestamp(newest)}."
    )


def _xids_once(resets: Sequence[Reset]) -> list[Reset]:
    """Each Xid in the first record that has it: a reset looks ten minutes back in the kernel log."""
    seen: set[tuple[float, str]] = set()
    found = []
    for one in resets:
        if one.xids:
            new = tuple(xid for xid in dict.fromkeys(one.xids) if (xid.seconds, xid.text) not in seen)
            seen.update((xid.seconds, xid.text) for xid in new)
            one = replace(one, xids=new)
        found.append(one)
    return found


def _gpus(host: str, resets: Sequence[Reset]) -> list[GpuHistory]:
    found: dict[str, GpuHistory] = {}
    last = next((one.gpus for one in reversed(resets) if one.gpus), ())
    for gpus, count in [*Counter(one.gpus for one in resets).items(), (last, 0)]:
        for seen in gpus:
            gpu = found.setdefault(seen.uuid or f"GPU {seen.number}", GpuHistory(host, seen.uuid))
            gpu.verdicts[seen.verdict] += count
            gpu.index, gpu.last, gpu.pci_bus_id = seen.number, seen.verdict, seen.pci_bus_id or gpu.pci_bus_id
    by_address = {gpu.pci_bus_id: gpu for gpu in found.values() if gpu.pci_bus_id}
    for one in resets:
        for xid in one.xids:
            if xid.pci_bus_id in by_address:
                by_address[xid.pci_bus_id].xids[xid.xid] += 1
    return sorted(found.values(), key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.uuid))
