"""What the checks before a deployment found, kept on the control node: one JSON file a host and part."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import records, whole_file

FOLDER = "preflight"
_KEPT = ("schema", "part", "passed", "findings", "switched_off", "all_reduce", "facts", "msg", "seconds")


def path_of(host: str, part: str, folder: Path | None = None) -> Path:
    """Where the newest report of a host's part lies; the host's name can't lead elsewhere."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "host"
    return (folder or records.artifacts_folder()) / FOLDER / f"{name}-{part}.json"


def misspelt_codes(codes: Iterable[str]) -> list[str]:
    """A sentence for each code that is nearly one of the checks. The model's and drafter's codes have no list."""
    if not (codes := list(codes)):
        return []
    from gpu_host import host_info  # not paid for by calls without a switch

    near = {code: difflib.get_close_matches(code, host_info.CHECKS, 1, 0.85) for code in codes}
    return [
        f"preflight_skip: there is no check {code!r}; did you mean {found[0]}?"
        for code, found in near.items()
        if found and code not in host_info.CHECKS
    ]


def warnings(host: str, returned: dict[str, Any]) -> list[str]:
    """What Ansible shows beside an error: the warnings, each with its cure and the switch that silences it."""
    return [
        f"{host}: {row['found']} {row['cure']} ({row['code']})"
        for row in returned.get("findings", [])
        if row["severity"] == "warning"
    ]


def write(host: str, returned: dict[str, Any], folder: Path | None = None) -> str:
    """Keep the report of a call that judged something; its path, '' where there is none or it can't be written."""
    if returned.get("part") not in ("host", "plan"):
        return ""
    target = path_of(host, returned["part"], folder)
    returned["warnings"] = [*returned.get("warnings", []), *warnings(host, returned)]
    report = {"host": host, "when": records.timestamp(), **{key: returned[key] for key in _KEPT if key in returned}}
    try:
        whole_file.write(target, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        returned.setdefault("warnings", []).append(f"The report {target} could not be written: {error.strerror}.")
        return ""
    if returned.get("failed"):
        returned.pop("facts", None)  # Ansible shows all that a failed task returned; the report has them
    return str(target)
