"""The systemd unit of a server, and the files beside it, as texts.

What is not in the unit matters as much: no PrivateDevices, ProtectKernelModules, DeviceAllow, MemoryMax and the like.
CUDA opens device nodes late, maps them, locks memory and loads modules through nvidia-modprobe; a sandbox that forbids
one of these fails after the weights are loaded, or hangs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEADER = "# Written by the role server_launch; a change made here is replaced by the next deployment.\n"
_PLAIN = re.compile(r"[A-Za-z0-9_./:,=+@~-]+")


@dataclass(frozen=True)
class UnitPlan:
    """All that the unit says; seconds. `log` is a file, or empty for the journal alone.

    `load_seconds` is how long a start may take: the start limit counts over that long for each start of `burst`, so
    that a server which dies after 25 minutes of loading, again and again, is given up as well.
    """

    name: str
    command: Sequence[str]
    environment_files: Sequence[str]
    log: str
    user: str
    folder: str
    grace: float
    restart: bool
    restart_seconds: float
    burst: int
    load_seconds: float
    journal: bool


def unit(plan: UnitPlan) -> str:
    output = f"append:{plan.log}" if plan.log else "journal"
    interval = (plan.burst + 1) * (plan.load_seconds + plan.restart_seconds)
    lines = [
        "[Unit]",
        f"Description=SGLang server {plan.name}",
        "After=network-online.target",
        "Wants=network-online.target" + (f" {plan.name}-journal.service" if plan.log and plan.journal else ""),
        f"StartLimitBurst={plan.burst}",
        f"StartLimitIntervalSec={interval:g}",
        "",
        "[Service]",
        "Type=exec",
        f"User={plan.user}",
        f"WorkingDirectory={_escaped(plan.folder)}",
        *(f"EnvironmentFile={_escaped(path)}" for path in plan.environment_files),
        f"ExecStart={' '.join(map(_word, plan.command))}",
        "# TERM goes to the main process alone, which lets running requests finish; KILL ends all that is left.",
        "KillMode=mixed",
        f"TimeoutStopSec={plan.grace:g}",
        "# A killed scheduler makes the main process fail. 0.5.17 ends every stop by SIGKILL as well, but a stop that",
        "# was asked for is not followed by a restart.",
        f"Restart={'on-failure' if plan.restart else 'no'}",
        f"RestartSec={plan.restart_seconds:g}",
        f"StandardOutput={output}",
        f"StandardError={output}",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "LimitCORE=0",
        "TasksMax=infinity",
        "OOMScoreAdjust=-500",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return HEADER + "\n".join(lines) + "\n"


# SGLang prints its key in the server_args line; the log file is 0600, the journal is open to more.
MASK_KEYS = r"""s/(api_key['"]?[=:] ?)('[^']*'|"[^"]*")/\1'***'/g"""


def journal_unit(plan: UnitPlan) -> str:
    """Copies the log file into the journal: systemd sends an output to one place only."""
    follow = f"tail --lines=0 --follow=name --retry {shlex.quote(plan.log)}"
    script = f"{follow} | sed --unbuffered --regexp-extended {shlex.quote(MASK_KEYS)}"
    lines = [
        "[Unit]",
        f"Description=Log of the SGLang server {plan.name}, copied into the journal",
        f"PartOf={plan.name}.service",
        f"After={plan.name}.service",
        "",
        "[Service]",
        f"ExecStart=/bin/sh -c {_word(script)}",
        f"SyslogIdentifier={plan.name}",
        "LogRateLimitIntervalSec=0",
        "# Without it a stop of the server may wait for this one's end, of which cgroup v1 in a guest never tells.",
        "TimeoutStopSec=1",
    ]
    return HEADER + "\n".join(lines) + "\n"


def logrotate(plan: UnitPlan) -> str:
    """Copy and truncate: the server has the file open for appending and would go on writing to a renamed one."""
    return (
        f"{HEADER}{plan.log} {{\n    maxsize 1G\n    weekly\n    rotate 4\n    compress\n    delaycompress\n"
        "    copytruncate\n    missingok\n    notifempty\n}\n"
    )


def watch_service(name: str, interpreter: str, bootstrap: str, program: str) -> str:
    """One look at the server. The program is its standard input, as when the control node sends it."""
    lines = [
        "[Unit]",
        f"Description=One look at the SGLang server {name}",
        "",
        "[Service]",
        "Type=oneshot",
        f"StandardInput=file:{_escaped(program)}",
        f"ExecStart={_word(interpreter)} -c {_word(bootstrap)}",
        "# A reset and a start are the longest that it does.",
        "TimeoutStartSec=600",
        "# What it has started outlives it.",
        "KillMode=process",
    ]
    return HEADER.replace("server_launch", "server_watch") + "\n".join(lines) + "\n"


def watch_timer(name: str, every: float) -> str:
    """Looks every so many seconds, counted from the end of the last look."""
    lines = [
        "[Unit]",
        f"Description=Looks at the SGLang server {name}",
        "",
        "[Timer]",
        f"OnActiveSec={every:g}",
        f"OnUnitInactiveSec={every:g}",
        "AccuracySec=1s",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return HEADER.replace("server_launch", "server_watch") + "\n".join(lines) + "\n"


def environment_text(variables: Mapping[str, str], header: str = HEADER) -> str:
    """NAME=value lines as EnvironmentFile= reads them, in the order of their names."""
    return header + "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(variables.items()))


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value) or not value:
        return value
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def _word(word: str) -> str:
    """A word of ExecStart=: systemd expands % and $ there, and splits at blanks."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_./:,=+@~%$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(path: str) -> str:
    return path.replace("%", "%%")
