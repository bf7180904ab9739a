"""The variables that a role or a playbook knows. A misspelt one would be passed over in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.common.yaml import yaml_load

ROLES = Path(__file__).resolve().parent.parent.parent / "roles"
# What plays note themselves, besides results: roles/jit_cache, roles/model_staging, roles/sgl_kernel.
NOTED = ("jit_cache_packed", "model_staging_offer", "sgl_kernel_built")

_OPTION = re.compile(r"^(Nothing was done\. (?:value of |argument ')?)(\w+)")


def options(role: str) -> dict[str, dict[str, Any]]:
    """What the role's argument specs say of each of its variables."""
    found: dict[str, dict[str, Any]] = yaml_load((ROLES / role / "meta/argument_specs.yml").read_text("utf-8"))
    return found["argument_specs"]["main"]["options"]


def unknown(names: Iterable[str], prefix: str, known: Iterable[str]) -> list[str]:
    """A sentence for each name that begins with the prefix and is none of the known ones. Results are no mistake."""
    known = sorted(known)
    wrong = {name for name in names if name.startswith(prefix) and not name.endswith("_result")} - {*known, *NOTED}
    return [f"There is no variable {name}; {_cure(name, prefix, known)}" for name in sorted(wrong)]


def _cure(name: str, prefix: str, known: list[str]) -> str:
    tails = [one.removeprefix(prefix) for one in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), tails, 1, 0.6)
    return f"did you mean {known[tails.index(near[0])]}?" if near else f"these are known: {', '.join(known)}."


def in_words_of_the_play(sentence: str, variable: Callable[[str], str]) -> str:
    """A refusal that begins with a module's option names the variable that the option was given by."""
    return _OPTION.sub(lambda found: found[1] + variable(found[2]), sentence, count=1)
