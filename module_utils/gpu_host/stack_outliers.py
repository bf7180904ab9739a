"""Which rank stands elsewhere than its peers: in a collective that never ends, the one that does not take part."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

DEPTH = 8  # innermost frames that are compared
_SECTION = re.compile(r"^==== (?P<name>.+) \(pid (?P<pid>\d+)\) ====$", re.MULTILINE)
_THREAD = re.compile(r"^Thread .*$", re.MULTILINE)
_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^():]+)(?::\d+)?\)$")


def outliers(stacks: str, title: str = "scheduler") -> list[tuple[str, int, str]]:
    """Name, pid and innermost frame of each process of this title whose main thread stands elsewhere than most.

    `stacks` is stacks.txt of the evidence. Nothing where no majority stands together or no stack could be read.
    """
    found = _standing(stacks, title)
    counts = Counter(found.values())
    if len(counts) < 2:
        return []
    common, number = counts.most_common(1)[0]
    if number * 2 <= len(found):
        return []
    return [(name, pid, frames[0]) for (name, pid), frames in sorted(found.items()) if frames != common]


def pointed_at(stacks: str, schedulers: Sequence[tuple[str, int]], stopped: Sequence[int]) -> tuple[str, str]:
    """The ranks that a hang points at, and the same with where they stand, as a clause; '' and '' for none.

    Those that are stopped, else those that stand elsewhere than their peers, else the only one there is.
    """
    there = [pid for _, pid in schedulers]
    odd = [pid for _, pid, _ in outliers(stacks) if pid in there]
    alone = there if len(there) == 1 else []
    pids = list(stopped) or odd or alone
    how = " is stopped" if stopped else " stands elsewhere than the others" if odd else ""
    ranks, places = [], []
    for name, pid in schedulers:
        if pid in pids:
            frame = innermost(stacks, pid)
            ranks.append(f"{name} (pid {pid})")
            if how or frame:
                places.append(ranks[-1] + (how or " stands") + (f" in {frame}" if frame else ""))
    return ", ".join(ranks), ", ".join(places)


def innermost(stacks: str, pid: int) -> str:
    """The frame in which this process's main thread stands, '' where its stack could not be read."""
    return next((frames[0] for (_, one), frames in _standing(stacks).items() if one == pid), "")


def _standing(stacks: str, title: str = "") -> dict[tuple[str, int], tuple[str, ...]]:
    """Frames of the main thread, innermost first, by name and pid of the processes with this word in their name."""
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    heads = list(_SECTION.finditer(stacks))
    for number, head in enumerate(heads):
        end = heads[number + 1].start() if number + 1 < len(heads) else len(stacks)
        frames = _main_thread(stacks[head.end() : end])
        if title in head.group("name") and frames:
            found[(head.group("name"), int(head.group("pid")))] = frames
    return found


def _main_thread(section: str) -> tuple[str, ...]:
    """Function and file of the innermost frames; line numbers differ within one wait."""
    threads = list(_THREAD.finditer(section))
    chosen = next((one for one in threads if '"MainThread"' in one.group()), threads[0] if threads else None)
    if chosen is None:
        return ()
    frames = []
    for line in section[chosen.end() :].lstrip("\n").splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            break
        frames.append(f"{frame.group('function')} ({frame.group('file')})")
    return tuple(frames[:DEPTH])
