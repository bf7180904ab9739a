"""What a schedule becomes on the control node, as texts: settings, service and timer, or a crontab."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .schedules import Schedule
from .server_unit import _escaped, _word

PREFIX = "gpu-reset-"
MARK = "Written by the role reset_schedule; a change made here is replaced by its next run."
HEADER = f"# {MARK}\n"
# Exit status of a run that did nothing since another one of the same schedule was going on (gpu_control/scheduled.py).
OVERLAP = 3
MARGIN = 60  # seconds from the end of a run's own time until systemd ends it


@dataclass(frozen=True)
class Place:
    """The control node's side: where the repository is, what runs it, and where things are kept."""

    repository: str
    python: str
    user: str
    home: str
    folder: str
    config_folder: str
    artifacts: str

    def settings_path(self, name: str) -> str:
        return f"{self.config_folder}/{name}.json"

    def data_folder(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def command(self, *words: str) -> list[str]:
        """The wrapper with an isolated interpreter: neither PYTHONPATH nor a file beside it is imported."""
        return [self.python, "-I", f"{self.repository}/plugin_utils/gpu_control/scheduled.py", *words]


def settings(schedule: Schedule, place: Place) -> str:
    """What the wrapper reads; no secrets, only where they are."""
    facts = {
        "about": MARK,
        "schema": 1,
        "repository": place.repository,
        "folder": place.data_folder(schedule.name),
        "artifacts": place.artifacts,
        "schedule": schedule.as_dict(),
    }
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def service(schedule: Schedule, place: Place) -> str:
    """One run. A host is reached by ssh as this user, so nothing here needs more than its files and the network."""
    writable = [place.data_folder(schedule.name), place.artifacts, *schedule.writable]
    lines = [
        "[Unit]",
        f"Description=Reset of GPU hosts, schedule {schedule.name}",
        "After=network-online.target",
        "Wants=network-online.target",
        "",
        "[Service]",
        "Type=oneshot",
        f"User={place.user}",
        f"WorkingDirectory={_escaped(place.repository)}",
        f"ExecStart={_line(place.command('run', place.settings_path(schedule.name)))}",
        "# Another run of this schedule was still going on, and nothing was done.",
        f"SuccessExitStatus={OVERLAP}",
        "# The run ends itself after its timeout; this is for one that can't.",
        f"TimeoutStartSec={schedule.timeout + MARGIN}",
        "TimeoutStopSec=30",
        "# The last line of the play becomes the status text.",
        "NotifyAccess=main",
        "LimitCORE=0",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={_word(path)}" for path in writable),
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "RestrictSUIDSGID=yes",
        "RestrictRealtime=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "LockPersonality=yes",
        "SystemCallArchitectures=native",
    ]
    return HEADER + "\n".join(lines) + "\n"


def timer(schedule: Schedule) -> str:
    lines = [
        "[Unit]",
        f"Description=When GPU hosts are reset, schedule {schedule.name}",
        "",
        "[Timer]",
        f"OnCalendar={schedule.calendar}",
        "AccuracySec=1s",
        f"RandomizedDelaySec={schedule.random_delay}",
        "# With false, a time that passes while the machine is off passes for good.",
        f"Persistent={'true' if schedule.persistent else 'false'}",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return HEADER + "\n".join(lines) + "\n"


def crontab(schedule: Schedule, place: Place, line: str) -> str:
    """A file of /etc/cron.d. Cron has no random delay, so the wrapper waits; % ends a command there."""
    words = ["run", place.settings_path(schedule.name)]
    words += ["--random-delay", str(schedule.random_delay)] if schedule.random_delay else []
    name = f"{PREFIX}{schedule.name}"
    command = shlex.join(place.command(*words)).replace("%", r"\%")
    return (
        f'{HEADER}SHELL=/bin/sh\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nMAILTO=""\n'
        f"{line} {place.user} {command} 2>&1 | logger -t {name}\n"
    )


def _line(words: Sequence[str]) -> str:
    return " ".join(map(_word, words))
