"""The control node's part of serving_benchmark: the prompts are read and judged here, before a host is touched, and a
server that died meanwhile gets its cause from the catalogue of failures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_host import prompt_set

from . import failures


def take_prompts(params: dict[str, Any], repository: Path) -> list[str]:
    """Put the prompts that the host needs into `params`; what is wrong with them, one sentence each.

    A path is taken from the working folder, else from the repository.
    """
    if params["dataset"]:
        return []
    if not params["prompts"]:
        return ["prompts: no file is named; give one in ShareGPT's format, for example data/prompts/mixed.json."]
    path = Path(params["prompts"]).expanduser()
    if not path.exists() and not path.is_absolute():
        path = repository / path
    try:
        given = prompt_set.load(str(path), params["prompts"])
        wanted = given.first(params["num_prompts"], spare=bool(params["input_length"]))
    except prompt_set.PromptError as error:
        return [str(error)]
    params["dataset"] = wanted.dataset()
    return []


def completed(returned: dict[str, Any]) -> dict[str, Any]:
    """With the cause where the server's log tells one, and without the log."""
    log = returned.pop("log_tail", "")
    if returned.get("failed") and log and returned.get("server_alive") is False:
        found = failures.diagnose(log, None)
        returned["diagnosis"] = {key: value for key, value in asdict(found).items() if key != "also"}
        if found.known or found.evidence_line:
            returned["msg"] = f"{returned['msg']} {found.sentence}"
    return returned
