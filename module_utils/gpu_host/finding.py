"""One thing that a check found, in the shape that all checks before a launch share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# An error would end in a failed start or in a server that does not do what was asked; a warning may be meant so.
ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)


@dataclass(frozen=True)
class Finding:
    """`code` names the check and stays the same over versions; `found` and `cure` are for people, one sentence each."""

    severity: str
    code: str
    found: str
    expected: str = ""
    cure: str = ""

    @property
    def sentence(self) -> str:
        """What was found and what to do about it."""
        return f"{self.found} {self.cure}".strip()

    def row(self) -> dict[str, Any]:
        return asdict(self)


def rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings as results of a module, the worst first, otherwise in the order in which they were found."""
    return [finding.row() for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))]


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == ERROR]


def summary(found: Iterable[Finding], most: int = 3) -> str:
    """The errors in one message; beyond `most` of them the rest is counted."""
    wrong = [finding.sentence for finding in errors(found)]
    rest = f" {len(wrong) - most} more errors are in findings." if len(wrong) > most else ""
    return " ".join(wrong[:most]) + rest
