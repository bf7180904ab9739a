"""The folder of a run: written so that an interrupted run loses at most the measurement that was going on.

``artifacts/benchmarks/<run>/``
    run.json                       who, when
    plans/<host>.json              settings, variants, loads (secrets masked)
    nodes/<host>.json              the same of a host that only has a part of another one's server
    measurements/<host>/*.json     one file a measurement
    failures/<host>/*.json         one file a start that failed
    progress/<host>.json           how long the steps took
    before/<host>.json             the servers that it had before
    report.html ...                written by report.py
``artifacts/benchmarks/latest`` is a link to the newest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_control import records, whole_file
from gpu_host import masking

SCHEMA = 1
FOLDER = "benchmarks"
LATEST = "latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class RunError(Exception):
    """The run can't be used: one sentence that says which, why and what to do."""


@dataclass(frozen=True)
class Failure:
    """A start of a variant that gave nothing, or not all. `session` tells one play from the next."""

    variant: str
    round: int
    cause: str
    cure: str = ""
    phase: str = ""
    evidence_line: str = ""
    session: str = ""
    when: str = ""
    log: str = ""


@dataclass(frozen=True)
class Measurement:
    """One measurement as the module returned it, with its place in the plan. `server`: command, environment and
    versions of what was measured, masked."""

    variant: str
    round: int
    cell: str
    repeat: int
    data: Mapping[str, Any]
    server: Mapping[str, Any] = field(default_factory=dict)
    session: str = ""

    @property
    def key(self) -> tuple[int, str, str, int]:
        return (self.round, self.variant, self.cell, self.repeat)


def root(artifacts: Path | None = None) -> Path:
    return (artifacts or records.artifacts_folder()) / FOLDER


def file_name(text: str) -> str:
    """The text as one file's name; a host's name can't lead elsewhere."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".") or "host"


def write(target: Path, data: Any) -> None:
    """Replace the file as a whole, on disk before this returns. OSError."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    whole_file.write(target, text.encode("utf-8", "surrogatepass"))


def read(path: Path) -> Any:
    """None: missing or cut short; then it is as if it had never been written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Run:
    """One run's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def head(self) -> dict[str, Any]:
        return read(self.folder / "run.json") or {}

    def hosts(self) -> list[str]:
        """In the order of their names."""
        found = [read(path) for path in sorted((self.folder / "plans").glob("*.json"))]
        return [one["host"] for one in found if isinstance(one, dict) and "host" in one]

    def plan(self, host: str, part: bool = False) -> dict[str, Any] | None:
        """`part`: of a host whose measurements are kept under the name of its server's first host."""
        found = read(self._plan(host, part))
        return found if isinstance(found, dict) else None

    def write_plan(self, host: str, plan: Mapping[str, Any], part: bool = False) -> None:
        write(self._plan(host, part), {"schema": SCHEMA, "host": host, **plan})

    def _plan(self, host: str, part: bool) -> Path:
        return self.folder / ("nodes" if part else "plans") / f"{file_name(host)}.json"

    def measurements(self, host: str) -> list[Measurement]:
        """All that are whole, in the order of rounds."""
        found = []
        for path in sorted((self.folder / "measurements" / file_name(host)).glob("*.json")):
            data = read(path)
            if isinstance(data, dict) and isinstance(data.get("data"), dict):
                known = {key: data[key] for key in Measurement.__dataclass_fields__ if key in data}
                try:
                    found.append(Measurement(**known))
                except TypeError:
                    continue
        return sorted(found, key=lambda one: one.key)

    def write_measurement(self, host: str, one: Measurement) -> Path:
        name = f"{one.round:02d}-{one.variant}-{one.cell}-{one.repeat}.json"
        target = self.folder / "measurements" / file_name(host) / name
        write(target, {"schema": SCHEMA, "host": host, **asdict(one)})
        return target

    def failures(self, host: str) -> list[Failure]:
        """The oldest first."""
        found = []
        for path in (self.folder / "failures" / file_name(host)).glob("*.json"):
            data = read(path)
            if isinstance(data, dict):
                known = {key: data[key] for key in Failure.__dataclass_fields__ if key in data}
                try:
                    found.append(Failure(**known))
                except TypeError:
                    continue
        return sorted(found, key=lambda one: (one.when, one.round, one.variant))

    def write_failure(self, host: str, one: Failure) -> Path:
        folder = self.folder / "failures" / file_name(host)
        target = folder / f"{one.round:02d}-{one.variant}.json"
        if target.exists():  # of an earlier session: kept
            target = folder / f"{one.round:02d}-{one.variant}-{secrets.token_hex(3)}.json"
        write(target, {"schema": SCHEMA, "host": host, **asdict(one)})
        return target

    def progress(self, host: str) -> dict[str, Any]:
        found = read(self.folder / "progress" / f"{file_name(host)}.json")
        return found if isinstance(found, dict) else {}

    def write_progress(self, host: str, progress: Mapping[str, Any]) -> None:
        write(self.folder / "progress" / f"{file_name(host)}.json", dict(progress))


def begin(name: str, now: float, artifacts: Path | None = None, reserve: Path | None = None) -> tuple[Run, bool]:
    """The run of this name, made where it is new ('': a new name; latest: the newest run); True where it was there.

    `reserve` is a file that all hosts of one play share: the first of them chooses the new name, the others read it.
    RunError, OSError.
    """
    base = root(artifacts)
    if name == LATEST:
        return existing(name, artifacts), True
    if name and not _NAME.fullmatch(name):
        raise RunError(f"benchmark_run: {name!r} can't be a folder's name; use letters, digits and . _ - only.")
    base.mkdir(parents=True, exist_ok=True)
    if not name and reserve is not None and reserve.exists():
        return Run(base / reserve.read_text(encoding="utf-8")), False
    if name and (base / name / "run.json").exists():
        return Run(base / name), True
    wanted = name or records.timestamp(now).replace("-", "").replace(":", "").replace("T", "-").rstrip("Z")
    run = _reserved(base, wanted, reserve) if not name else Run(base / wanted)
    run.folder.mkdir(exist_ok=True)
    head = {"schema": SCHEMA, "run": run.name, "started": records.timestamp(now), "who": records.who()}
    write(run.folder / "run.json", head)
    point_latest(run)
    return run, False


def _reserved(base: Path, wanted: str, reserve: Path | None) -> Run:
    """A new folder; where two hosts of one play come at once, the one that writes the note decides for both."""
    for number in range(1, 1000):
        folder = base / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        if reserve is None:
            return Run(folder)
        passing = reserve.with_name(f"{reserve.name}.{secrets.token_hex(4)}")
        passing.write_text(folder.name, encoding="utf-8")
        try:
            os.link(passing, reserve)
        except FileExistsError:
            folder.rmdir()
            folder = base / reserve.read_text(encoding="utf-8")
        finally:
            passing.unlink()
        return Run(folder)
    raise RunError(f"{base} has a thousand runs of this second; name one with benchmark_run.")


def existing(name: str, artifacts: Path | None = None) -> Run:
    """An earlier run by name ('latest': the newest) or by its folder's path. RunError."""
    base = root(artifacts)
    folder = Path(name) if "/" in name else base / name
    folder = folder.resolve()
    if not (folder / "run.json").exists():
        there = sorted(path.parent.name for path in base.glob("*/run.json") if path.parent.name != LATEST)
        known = f"there are {', '.join(there[-5:])}" if there else "there is none yet"
        raise RunError(f"There is no benchmark run {name} in {base}; {known}.")
    return Run(folder)


def point_latest(run: Run) -> None:
    """`latest` leads to this run; a folder of that name is left alone."""
    link = run.folder.parent / LATEST
    if link.exists() and not link.is_symlink():
        return
    passing = link.with_name(f".{LATEST}.{secrets.token_hex(4)}")
    passing.symlink_to(run.folder.name)
    os.replace(passing, link)


def masked_server(server: Mapping[str, Any]) -> dict[str, Any]:
    """What a server was started with, for reports: keys and tokens masked."""
    result = dict(masking.mask_value(dict(server)))
    command = server.get("command")
    if isinstance(command, (list, tuple)):
        result["command"] = list(masking.mask_argv([str(word) for word in command]))
    if isinstance(server.get("environment"), Mapping):
        result["environment"] = masking.mask_environ({str(k): str(v) for k, v in server["environment"].items()})
    return result
