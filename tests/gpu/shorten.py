"""A benchmark session as it is kept in recorded/: ``python -m tests.gpu.shorten SESSION.jsonl INTO.jsonl``.

Left out: variables of the measured servers that say nothing of them, unset server arguments, what each measurement of a
variant says again, and which processes were ended.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TELLING = re.compile("SGLANG_|CUDA_|NCCL_|NVSHMEM_|TORCH|HF_HUB_|PYTHONPATH$|LD_LIBRARY_PATH$|GPU_SESSION_MARK$")
SAID_ONCE = ("server_command", "environment", "versions", "client_module", "server_arguments", "prompt_set")


def telling(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if TELLING.match(name)}


def measurement(line: Mapping[str, Any], said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`said`: by variant what its earlier measurements have told."""
    data = (line["result"] or {}).get("measurement")
    if not data:
        return dict(line)
    data = {**data, "environment": telling(data["environment"])}
    known = said.setdefault(line["variant"], {})
    kept = {key: value for key, value in data.items() if key not in SAID_ONCE or known.get(key) != value}
    known.update({key: data[key] for key in SAID_ONCE if key in data})
    return {**line, "result": {**line["result"], "measurement": kept}}


def server_info(line: Mapping[str, Any]) -> dict[str, Any]:
    """The body is cut off where it was too long, so it is no JSON any more."""
    return {**line, "body": re.sub(r'"\w+":(null|"null"|\[\]|""),', "", line["body"])}


def shortened(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    said: dict[str, dict[str, Any]] = {}
    informed: set[str] = set()
    for line in lines:
        kind = line["kind"]
        if kind == "measurement":
            yield measurement(line, said)
        elif kind == "server_info" and line["variant"] not in informed:
            informed.add(line["variant"])
            yield server_info(line)
        elif kind not in ("swept", "samples", "server_info"):
            yield dict(line)


def whole(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With what the measurements of a variant said once put back into each."""
    said: dict[str, dict[str, Any]] = {}
    found = []
    for line in lines:
        data = (line["result"] or {}).get("measurement") if line["kind"] == "measurement" else None
        if data:
            known = said.setdefault(line["variant"], {})
            known.update({key: data[key] for key in SAID_ONCE if key in data})
            line = {**line, "result": {**line["result"], "measurement": {**known, **data}}}
        found.append(dict(line))
    return found


def main(source: Path, target: Path) -> None:
    lines = map(json.loads, source.read_text(encoding="utf-8").splitlines())
    target.write_text("".join(json.dumps(line) + "\n" for line in shortened(lines)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
