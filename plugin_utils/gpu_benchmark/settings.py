"""The variables of a benchmark: one table for the plays, the modules' documentation and docs/benchmark.md.

``benchmark_<name>`` is the variable, ``<name>`` the option of ``benchmark_plan``. Values that come from a command line
are texts (``-e benchmark_steps=1,2``), so lists are read from ``1,2`` and ``[1, 2]`` alike.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PREFIX = "benchmark_"
AFTERWARDS = ("restore", "clean")


@dataclass(frozen=True)
class Setting:
    """`kind`: int, float, bool, str, ints, strs or dicts. `shape`: it says what is measured, so a run that is resumed
    keeps its own."""

    name: str
    kind: str
    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    shape: bool = True

    @property
    def variable(self) -> str:
        return PREFIX + self.name


SETTINGS = (
    Setting(
        "variants", "dicts", [],
        "The variants, each with a name and what differs: steps or speculation, drafter, nccl_profile, arguments, "
        "environment. Empty: a baseline and EAGLE-3 with each number of steps, for each drafter and NCCL profile.",
    ),
    Setting("drafters", "strs", [], "Folders of EAGLE-3 drafters on the host. Empty: sglang_drafter_path."),
    Setting("nccl_profiles", "strs", [], "NCCL profiles, each with its own baseline. Empty: nccl_env_profile."),
    Setting("steps", "ints", [1, 2, 3], "Numbers of draft steps, each a variant.", 1, 16),
    Setting("adaptive", "bool", False, "Also measure SGLang's adaptive speculation (0.5.17 and later)."),
    Setting("concurrencies", "ints", [1, 4, 16], "How many requests run at a time, each measured.", 1, 4096),
    Setting("output_lengths", "ints", [256], "Tokens that each request generates.", 4, 1 << 20),
    Setting("input_lengths", "ints", [0], "Longest prompt in tokens. 0: as the prompts are.", 0, 1 << 20),
    Setting(
        "prompts", "strs", ["data/prompts/mixed.json"],
        "Prompt files on the control node in ShareGPT's format, relative to the repository or absolute.",
    ),
    Setting(
        "num_prompts", "int", 0,
        "Requests of one measurement. 0: 4 times the concurrency, at least 16, at most what the file has.", 0, 1 << 20,
    ),
    Setting("repeats_per_start", "int", 3, "Measurements of each concurrency in one start of the server.", 1, 50),
    Setting(
        "max_running_requests", "int", 0,
        "SGLang's max_running_requests, the same for every variant. 0: that of sglang_arguments, else 48, and at least "
        "the largest concurrency.", 0, 1 << 20,
    ),
    Setting("seed", "int", 1, "Decides the order of the variants in each round.", 0, 1 << 31),
    Setting("rounds", "int", 3, "Rounds at least. In a round each variant is started once.", 1, 100, shape=False),
    Setting("max_rounds", "int", 8, "Rounds at most, where the verdict is not certain earlier.", 1, 200, shape=False),
    Setting("certainty", "float", 0.95, "How certain the verdict has to be.", 0.5, 0.999, shape=False),
    Setting(
        "smallest_effect", "float", 0.05,
        "The smallest change of the tokens per second that matters; 0.05 is 5 %.", 0.002, 1, shape=False,
    ),
    Setting("run", "str", "", "Name of the run. An earlier name resumes that run, latest the newest one.", shape=False),
    Setting("compare_to", "str", "", "Name of an earlier run that the report compares this one with.", shape=False),
    Setting(
        "afterwards", "str", "restore",
        "What the host ends with: restore starts the server that ran before, clean leaves none.",
        choices=AFTERWARDS, shape=False,
    ),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}
SHAPE = tuple(setting.name for setting in SETTINGS if setting.shape)
# Variables of the role serving_benchmark that are this table's for each measurement, and what to give instead.
EACH_TIME = {
    "serving_benchmark_prompts": "benchmark_prompts",
    "serving_benchmark_num_prompts": "benchmark_num_prompts",
    "serving_benchmark_concurrency": "benchmark_concurrencies",
    "serving_benchmark_input_length": "benchmark_input_lengths",
    "serving_benchmark_output_length": "benchmark_output_lengths",
}
# Those that say how each request is asked: one run has one way.
ASKED = ("chat_template", "ignore_eos", "temperature", "seed", "warmup")
# Variables that begin alike and belong to the play itself.
RESERVED = ("benchmark_serial", "benchmark_confirmed")


def specification() -> dict[str, dict[str, Any]]:
    """The settings as options of an Ansible module."""
    kinds: dict[str, dict[str, Any]] = {
        "ints": {"type": "list", "elements": "int"},
        "strs": {"type": "list", "elements": "str"},
        "dicts": {"type": "list", "elements": "dict"},
    }
    return {
        one.name: {
            **kinds.get(one.kind, {"type": one.kind}),
            **({"choices": list(one.choices)} if one.choices else {}),
            "default": one.default,
        }
        for one in SETTINGS
    }


def read(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All settings by name, defaults where nothing is given, and what is wrong, one sentence each."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        value = given.get(setting.name)
        if value is None:
            values[setting.name] = setting.default
            continue
        try:
            values[setting.name] = _value(setting, value)
        except ValueError as error:
            values[setting.name] = setting.default
            problems.append(f"{setting.variable}: {error}")
    return values, problems


def too_few_rounds(values: Mapping[str, Any]) -> list[str]:
    """A sentence where the two numbers of rounds contradict each other."""
    least, most = values["rounds"], values["max_rounds"]
    return [f"benchmark_max_rounds: {most} is less than benchmark_rounds, {least}; raise it."] if most < least else []


def unknown(names: Iterable[str], known: Iterable[str] = RESERVED) -> list[str]:
    """A sentence for each variable that begins with benchmark_ and does nothing."""
    mine = {setting.variable for setting in SETTINGS} | set(known)
    found = []
    for name in sorted(set(names)):
        if name.startswith(PREFIX) and name not in mine:
            tails = [one.removeprefix(PREFIX) for one in sorted(mine)]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), tails, 1, 0.6)
            cure = f"did you mean {PREFIX}{near[0]}?" if near else "take it out; docs/benchmark.md lists all."
            found.append(f"{name}: there is no such variable; {cure}")
    return found


def _value(setting: Setting, value: Any) -> Any:
    """ValueError: what was found and what is expected."""
    if setting.kind == "bool":
        return _bool(value)
    if setting.kind in ("int", "float"):
        return _number(setting, value, whole=setting.kind == "int")
    if setting.kind == "str":
        text = str(value).strip()
        if setting.choices and text not in setting.choices:
            raise ValueError(f"{text!r} is none of {', '.join(setting.choices)}; choose one.")
        return text
    items = _items(value)
    if setting.kind == "dicts":
        for one in items:
            if not isinstance(one, Mapping):
                raise ValueError(f"{one!r} is no variant; give a list of {{name: .., steps: ..}}.")
        return [dict(one) for one in items]
    if setting.kind == "ints":
        items = [_number(setting, one, whole=True) for one in items]
    else:
        for one in items:
            if not isinstance(one, str) or not one.strip():
                raise ValueError(f"{one!r} is no text; give a list of texts.")
        items = [one.strip() for one in items]
    if setting.default and not items:
        raise ValueError("the list is empty; give at least one, or leave the variable out.")
    twice = sorted({str(one) for one in items if items.count(one) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there twice; give each once.")
    return items


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = yaml.safe_load(text if text.startswith("[") else f"[{text}]")
        except yaml.YAMLError:
            raise ValueError(f"{text!r} is no list; write it as [1, 2] in YAML or JSON.") from None
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        value = [value]
    return list(value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        return words[str(value).strip().lower()]
    except KeyError:
        raise ValueError(f"{value!r} is neither true nor false.") from None


def _number(setting: Setting, value: Any, whole: bool) -> Any:
    assert setting.least is not None and setting.most is not None
    limits = f"{setting.least:.0f} to {setting.most:.0f}" if whole else f"{setting.least:g} to {setting.most:g}"
    wanted = ("a whole number" if whole else "a number") + f" from {limits}"
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(str(value).strip())
        if not math.isfinite(number) or (whole and number != int(number)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{value!r} is not {wanted}.") from None
    if not setting.least <= number <= setting.most:
        raise ValueError(f"{value} is not {wanted}.")
    return int(number) if whole else number


def table() -> str:
    """The settings as a table in Markdown."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for one in SETTINGS:
        default = "`" + (", ".join(map(str, one.default)) if isinstance(one.default, list) else str(one.default)) + "`"
        if one.kind == "bool":
            default = default.lower()
        rows.append(f"| `{one.variable}` | {default if default != '``' else ''} | {one.meaning} |")
    return "\n".join(rows) + "\n"


BEGIN = "<!-- variables: written by `make docs` from plugin_utils/gpu_benchmark/settings.py -->"
END = "<!-- end of variables -->"


def updated(document: str) -> str:
    """The document with the table between the two marks written anew. ValueError: a mark is missing."""
    head, begin, rest = document.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {BEGIN!r} and {END!r}")
    return f"{head}{begin}\n\n{table()}\n{end}{tail}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(updated(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
