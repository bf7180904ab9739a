"""How far a start of SGLang has come, read from its log.

The lines are those of 0.5.17 and 0.5.23, in the order in which a start prints them. A server of several ranks prints
most of them once a rank, so the phase of a server is that of its slowest rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# In the order of a start; a later one is further. `drain` and `stopped` follow `ready`.
PHASES = (
    "import",
    "arguments",
    "distributed",
    "weights",
    "draft_weights",
    "memory_pool",
    "capture",
    "scheduler_ready",
    "warmup",
    "ready",
    "drain",
    "stopped",
)
_ORDER = {name: number for number, name in enumerate(PHASES)}

_LINES = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("arguments", r"\bserver_args="),
        ("distributed", r"Init (?:parallel|torch distributed) (?:begin|ends)\b"),
        ("weights", r"Load weight begin\b"),
        ("weights_end", r"Load weight end\b"),
        ("memory_pool", r"KV Cache is allocated\b|Memory pool end\b"),
        ("capture", r"\bCapture .*\bgraph (?:begin|bs)\b|^Capturing "),
        ("scheduler_ready", r"\bmax_total_num_tokens=\d"),
        ("warmup", r"Application startup complete\.|Uvicorn running on "),
        # The second is the last line of a host that has only later ranks of a server.
        ("ready", r"The server is fired up and ready to roll!|Dummy health check server started in background thread"),
        ("drain", r"Draining requests and shutting down"),
        ("stopped", r"kill_process_tree called: parent_pid=\d+, include_parent=True|Finished server process \["),
    )
)
# `[2026-11-29 16:46:32 DP0 TP3] text`, or without brackets' rank; groups: the moment, the rank.
STAMPED = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: ([^\]]+))?\] ?")
# What the journal, `docker logs -t`, `docker compose logs`, Ray and vLLM's logger write before a line; a terminal's
# colours; torchrun's `[rank0]:`.
_FRAME = re.compile(
    r"^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s\[]+\[\d+\]: "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S* (?:\S+ [^\s\[]+\[\d+\]: )?"
    r"|[\w.-]+-\d+ +\| )?"
    r"(?:ERROR: {4})?(?:\(\w+(?: \w+=\d+)* pid=\d+\) )*"
    r"(?:(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] )?"
)
_RANK = re.compile(r"^\[rank\d+\]:[ ]?(?!\[[A-Z]\d)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Progress:
    """`phase` is one of PHASES; `line` the last line that told of it, `stamp` its moment (the server's local time);
    `ranks` maps the name of each rank ('TP3', 'DP0 TP3', '' where ranks are not named) to its own phase."""

    phase: str
    line: str = ""
    stamp: str = ""
    ranks: dict[str, str] = field(default_factory=dict)

    @property
    def behind(self) -> tuple[str, ...]:
        """The ranks that have not come as far as others, once any has: where to look first when a start is stuck."""
        if not self.ranks:
            return ()
        furthest = max(_ORDER[phase] for phase in self.ranks.values())
        return tuple(sorted(rank for rank, phase in self.ranks.items() if rank and _ORDER[phase] < furthest))


def lines_of(text: str) -> list[str]:
    """The lines of a log without colours and without what a supervisor wrote before them; a progress bar that
    rewrites its line is one line a state."""
    plain = _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return [_RANK.sub("", _FRAME.sub("", line)).rstrip() for line in plain.split("\n")]


def progress_of(text: str) -> Progress:
    """How far the start in this log has come. The log should hold one start (`failures.last_start` cuts it)."""
    return _progress(lines_of(text))


def phase_of(text: str) -> str:
    """The phase alone, one of PHASES."""
    return progress_of(text).phase


def _progress(lines: list[str]) -> Progress:
    ranks: dict[str, str] = {}
    loaded: set[str] = set()  # ranks whose target is loaded: the next load is the drafter's
    server, said, stamp, rank = "import", "", "", ""
    for line in lines:
        stamped = STAMPED.match(line)
        if stamped:
            rank = stamped.group(2) or ""
        found = next((phase for phase, pattern in _LINES if pattern.search(line)), None)
        if found is None:
            continue
        said, stamp = line, stamped.group(1) if stamped else stamp
        if found == "weights_end":
            loaded.add(rank)
            continue
        if found == "weights" and rank in loaded:
            found = "draft_weights"
        if found in ("distributed", "weights", "draft_weights", "memory_pool", "capture", "scheduler_ready"):
            # A drafter of 0.5.17 begins with `Init torch distributed` once more: no step back.
            if _ORDER[found] > _ORDER.get(ranks.get(rank, "import"), 0):
                ranks[rank] = found
        elif _ORDER[found] > _ORDER[server]:
            server = found
    if ranks and _ORDER[server] <= _ORDER["arguments"]:
        named = {name: phase for name, phase in ranks.items() if name} or ranks
        server = min(named.values(), key=_ORDER.__getitem__)
    return Progress(phase=server, line=said, stamp=stamp, ranks=ranks)
