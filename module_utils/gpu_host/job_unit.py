"""A data job as a transient systemd unit: the command that starts it, and the scripts at its beginning and end.

Transient, since a unit file would need a daemon-reload, which drops the GPUs of running containers. The unit is of type
oneshot: one that is `after` another then waits in systemd's own queue until that one has ended, and needs nobody to
watch over it. Whether that one succeeded is asked by the script at the beginning: Requires= would start it again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = "datajob-"
BEGIN = "note-begin"
END = "note-end"
_WORD = re.compile(r"[A-Za-z0-9_./:,=+@~-]+")


@dataclass(frozen=True)
class Job:
    """What is to run. `cpus` and `memory_mib` are limits, `max_seconds` the longest it may take; 0 for none."""

    name: str
    command: tuple[str, ...]
    resume_command: tuple[str, ...] = ()
    user: str = "root"
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_file: str = ""
    cpus: float = 0.0
    memory_mib: int = 0
    max_seconds: float = 0.0
    after: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return unit_of(self.name)


def unit_of(name: str) -> str:
    return f"{PREFIX}{name}.service"


def job(given: Mapping[str, Any], user: str) -> Job:
    """A job from the dictionary that the user wrote, which has been validated."""
    return Job(
        name=given["name"],
        command=tuple(given["command"]),
        resume_command=tuple(given["resume_command"]),
        user=given["user"] or user,
        folder=given["folder"],
        environment={name: _plain(value) for name, value in given["environment"].items()},
        environment_file=given["environment_file"],
        cpus=given["cpus"],
        memory_mib=given["memory_mib"],
        max_seconds=given["max_seconds"],
        after=tuple(given["after"]),
    )


def _plain(value: Any) -> str:
    """A YAML value as a variable has it: true is 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def start_command(
    one: Job,
    command: Sequence[str],
    attempt: str,
    jobs_folder: str,
    log: str,
    slice_name: str,
    grace: float,
    waits_for: Mapping[str, str],
) -> list[str]:
    """The systemd-run command line. No value of an environment stands on it: those are in a file of root's.

    `waits_for` maps the jobs that have to succeed first to their attempts.
    """
    begin = " ".join([BEGIN, one.name, attempt, *(f"{name}:{of}" for name, of in waits_for.items())])
    properties = {
        "Type": "oneshot",
        "User": one.user,
        "EnvironmentFile": f"{jobs_folder}/{one.name}.env",
        "StandardOutput": f"append:{log}",
        "StandardError": f"append:{log}",
        "ExecStartPre": f"+/bin/sh {jobs_folder}/{begin}",
        "ExecStopPost": f"+/bin/sh {jobs_folder}/{END} {one.name} {attempt}",
        "TimeoutStopSec": f"{grace:g}",
        # A data job makes way for a server: for the CPU, and when memory runs out.
        "Nice": "5",
        "OOMScoreAdjust": "500",
    }
    if one.folder:
        properties["WorkingDirectory"] = one.folder
    if one.cpus:
        properties["CPUQuota"] = f"{one.cpus * 100:g}%"
    if one.memory_mib:
        properties["MemoryMax"] = f"{one.memory_mib}M"
    if one.max_seconds:
        properties["TimeoutStartSec"] = f"{one.max_seconds:g}"
    words = ["systemd-run", "--quiet", "--no-block", "--collect", f"--unit={one.unit}", f"--slice={slice_name}"]
    words += [f"--description=Data job {one.name}"]
    words += [f"--property={name}={value}" for name, value in properties.items()]
    if one.environment_file:
        words.append(f"--property=EnvironmentFile={one.environment_file}")
    for other in waits_for:
        words.append(f"--property=After={unit_of(other)}")
    # systemd replaces $NAME in the words of a command.
    return [*words, "--", command[0], *(word.replace("$", "$$") for word in command[1:])]


def begin_script(jobs_folder: str, log_folder: str, slice_name: str, mask: str) -> str:
    """Notes that the job begins, and copies what it will write into the journal, by a unit that ends with it.

    It ends with 1, and the job with it, where one that has to succeed first has not. The copy begins where the log ends
    now (`tail` counts bytes from 1), and before its end reads what is left.
    """
    words = [
        *("systemd-run", "--quiet", "--no-block", "--collect", f"--slice={slice_name}"),
        # The copy goes on while ExecStop runs: a busy host may be slow to begin with it.
        *("--property=ExecStop=/bin/sleep 2", "--property=TimeoutStopSec=5", "--property=LogRateLimitIntervalSec=0"),
    ]
    # systemd replaces $NAME in the words of a command.
    copy = f'tail --bytes="+$1" --follow "$2" | sed --unbuffered --regexp-extended {shlex.quote(mask)}'.replace(
        "$", "$$"
    )
    return f"""#!/bin/sh
# Written by the module data_jobs; systemd runs it before a data job begins.
cd {shlex.quote(jobs_folder)} || exit 1
umask 077
name=$1 attempt=$2
shift 2
for first; do
  grep -q "^${{first##*:}} success exited 0 " "${{first%:*}}.end" || exit 1
  ! grep -qs "^${{first##*:}}" "${{first%:*}}.stop" || exit 1
done
log={shlex.quote(log_folder)}/$name.log
printf '%s %s\\n' "$attempt" "$(date +%s)" > ".$name.begun" && mv -f ".$name.begun" "$name.begun"
{shlex.join(words)} "--unit={PREFIX}$name-log-$attempt.service" "--property=BindsTo={PREFIX}$name.service" \\
  "--property=SyslogIdentifier={PREFIX}$name" "--description=Log of data job $name, copied into the journal" \\
  -- /bin/sh -c {shlex.quote(copy)} sh "$(($(stat --format=%s "$log") + 1))" "$log"
exit 0
"""


def end_script(jobs_folder: str) -> str:
    """Keeps how the job ended, as systemd tells it in the environment, where a later call finds it."""
    return f"""#!/bin/sh
# Written by the module data_jobs; systemd runs it when a data job has ended.
cd {shlex.quote(jobs_folder)} || exit 1
umask 077
printf '%s %s %s %s %s\\n' "$2" "${{SERVICE_RESULT:-unknown}}" "${{EXIT_CODE:-none}}" "${{EXIT_STATUS:-0}}" \\
  "$(date +%s)" > ".$1.end" && mv -f ".$1.end" "$1.end"
"""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended. `code`: exited, killed, dumped or none; `at` seconds since 1970."""

    attempt: str
    result: str
    code: str
    status: str
    at: float

    @property
    def succeeded(self) -> bool:
        return (self.result, self.code, self.status) == ("success", "exited", "0")

    @property
    def exit_status(self) -> int | None:
        return int(self.status) if self.code == "exited" and self.status.isdigit() else None

    def why(self, memory_mib: int, max_seconds: float) -> str:
        """One clause; empty where it succeeded."""
        if self.succeeded:
            return ""
        if self.result == "oom-kill":
            limit = f" (memory_mib: {memory_mib})" if memory_mib else ""
            return f"was killed for lack of memory{limit}"
        if self.result == "timeout":
            limit = f" (max_seconds: {max_seconds:g})" if max_seconds else ""
            return f"was ended since it took too long{limit}"
        if self.code in ("killed", "dumped"):
            return f"was ended by SIG{self.status}"
        if self.status in ("200", "203", "217"):
            part = {
                "200": "its folder can't be entered",
                "203": "its program can't be run",
                "217": "its user is unknown",
            }
            return f"could not be started: {part[self.status]}"
        if self.exit_status:
            return f"ended with exit status {self.exit_status}"
        return f"could not be started ({self.result})"


def begun(text: str, attempt: str) -> float | None:
    """When this attempt began, in seconds since 1970; None where it has not."""
    words = text.split()
    return float(words[1]) if len(words) == 2 and words[0] == attempt and words[1].isdigit() else None


def ended(text: str) -> Ended | None:
    """What the end script wrote; None where it is not (yet) there."""
    words = text.split()
    if len(words) != 5 or not words[4].isdigit():
        return None
    return Ended(words[0], words[1], words[2], words[3], float(words[4]))
