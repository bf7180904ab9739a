"""How good the failure catalogue is: ``make score LOGS=folder``.

A folder (and each folder in it) that has a ``labels.yml`` is scored: it maps the name of a log to what is true of it,
``{ is: ID }`` with an id of the catalogue, ``healthy`` or ``unknown`` (it failed, and nobody could tell from this log),
and where they are known ``exit_status`` and ``stuck``. A log without a label is shown and not counted.

precision: of the causes named, how many are right. recall: of the failures whose cause is known, how many are named
right. An abstention is a failure that the catalogue leaves unknown; a wrong name is worse, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import failures

LABELS = "labels.yml"


@dataclass(frozen=True)
class Case:
    log: Path
    label: str | None
    diagnosis: failures.Diagnosis

    @property
    def right(self) -> bool:
        return self.label == self.diagnosis.id

    @property
    def wrong(self) -> bool:
        """A name was given and it is not the true one: the one outcome that must not be."""
        return self.label is not None and self.diagnosis.known and not self.right

    @property
    def abstained(self) -> bool:
        return self.label is not None and not self.right and not self.diagnosis.known


@dataclass(frozen=True)
class Score:
    cases: tuple[Case, ...]

    @property
    def labelled(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.label is not None)

    @property
    def precision(self) -> float:
        """1.0 where nothing was named: then nothing was named wrong."""
        named = [case for case in self.labelled if case.diagnosis.known]
        return sum(case.right for case in named) / len(named) if named else 1.0

    @property
    def recall(self) -> float:
        nameable = [case for case in self.labelled if case.label not in (failures.HEALTHY, failures.UNKNOWN)]
        return sum(case.right for case in nameable) / len(nameable) if nameable else 1.0

    def report(self) -> str:
        lines = []
        for case in self.cases:
            if case.label is None:
                lines.append(f"no label   {case.log}: {case.diagnosis.id}")
            elif not case.right:
                word = "wrong" if case.wrong else "abstained"
                lines.append(f"{word:<10} {case.log}: is {case.label}, called {case.diagnosis.id}")
                if case.diagnosis.evidence_line:
                    lines.append(f"           line {case.diagnosis.line_number}: {case.diagnosis.evidence_line}")
        wrong = sum(case.wrong for case in self.cases)
        abstained = sum(case.abstained for case in self.cases)
        count = len(self.labelled)
        lines.append(
            f"{count} log{'' if count == 1 else 's'} with a label: precision {self.precision:.3f}, "
            f"recall {self.recall:.3f}, abstentions {abstained}, wrong {wrong}"
        )
        return "\n".join(lines)


def score(folder: Path) -> Score:
    """Scores all logs of the folder and of the folders in it. Raises ValueError where a label can't be used."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give LOGS=folder with logs (*.log) and a {LABELS}.")
    cases: list[Case] = []
    for place in sorted({folder, *(path.parent for path in folder.rglob("*.log"))}):
        labels = _labels(place)
        for log in sorted(place.glob("*.log")):
            label = labels.get(log.name, {})
            text = log.read_text(encoding="utf-8", errors="replace")
            diagnosis = failures.diagnose(text, label.get("exit_status"), stuck=label.get("stuck", False))
            cases.append(Case(log=log, label=label.get("is"), diagnosis=diagnosis))
    if not cases:
        raise ValueError(f"{folder} has no *.log file.")
    return Score(tuple(cases))


def _labels(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / LABELS
    if not file.exists():
        return {}
    labels: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    known = {entry.id for entry in failures.load().entries} | {failures.HEALTHY, failures.UNKNOWN}
    for name, label in labels.items():
        if not isinstance(label, dict) or label.get("is") not in known:
            raise ValueError(f"{file}: {name} needs `is:` with an entry's id, healthy or unknown, not {label!r}.")
        if not (folder / name).exists():
            raise ValueError(f"{file}: there is no {name} in {folder}.")
    return labels


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make score LOGS=folder", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    try:
        result = score(parser.parse_args(arguments).folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(result.report())
    return 1 if any(case.wrong for case in result.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
