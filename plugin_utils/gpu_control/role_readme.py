"""Writes the variables of a role's argument specs into its README, between two markers.

``python -m gpu_control.role_readme roles/gpu_reset ...`` (make docs) writes; a unit test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

BEGIN = "<!-- variables: written by `make docs` from meta/argument_specs.yml -->"
END = "<!-- end of variables -->"


def variables(options: dict[str, dict[str, Any]]) -> str:
    """One heading a variable with its type, default and what it does."""
    sections = []
    for name, option in options.items():
        kind = option.get("type", "str") + (f" of {option['elements']}" if "elements" in option else "")
        default = f", default `{json.dumps(option['default'])}`" if "default" in option else ""
        choices = f"; any of {', '.join(f'`{one}`' for one in option['choices'])}" if "choices" in option else ""
        sections.append(f"### {name}\n{kind}{default}{choices}\n\n{option['description'].strip()}\n")
    return "\n".join(sections)


def updated(readme: str, specs: dict[str, Any]) -> str:
    """The README with the section between the markers written anew. Raises ValueError where a marker is missing."""
    head, begin, rest = readme.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks the lines {BEGIN!r} and {END!r}")
    return f"{head}{begin}\n\n{variables(specs['argument_specs']['main']['options'])}\n{end}{tail}"


def written(role: Path) -> str:
    """What the README of the role in this folder should be."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    return updated((role / "README.md").read_text(encoding="utf-8"), specs)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (Path(name) / "README.md").write_text(written(Path(name)), encoding="utf-8")
