"""What ansible-doc shows of each module in library/ is what the module takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.plugins.loader import fragment_loader
from ansible.utils.plugin_docs import get_docstring
from gpu_control import actions, control_modules, host_modules
from gpu_host import arguments

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))
SPECS: dict[str, Mapping[str, dict[str, Any]]] = {
    **{name: module.spec for name, module in host_modules.MODULES.items()},
    **{name: module.spec for name, module in control_modules.MODULES.items()},
    "checkpoint_info": arguments.CHECKPOINT_INFO,
    "eagle3_drafter": arguments.EAGLE3_DRAFTER,
    "model_delegation": arguments.MODEL_DELEGATION,
    "reset_schedule": arguments.RESET_SCHEDULE,
    "server_start": arguments.SERVER_START,
}
JUDGED = ("type", "elements", "choices", "default", "required")

fragment_loader.add_directory(str(ROOT / "doc_fragments"))


@cache
def documents(name: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Its documentation with the fragments that it names, its examples and what it returns."""
    document, examples, returns, _ = get_docstring(str(ROOT / f"library/{name}.py"), fragment_loader, is_module=True)
    return document, yaml.safe_load(examples), returns


def bare(options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {
            **{key: value for key, value in option.items() if key in JUDGED},
            "of": bare(option.get("suboptions") or option.get("options") or {}),
        }
        for name, option in options.items()
    }


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_option_is_documented_as_it_is_taken(name: str) -> None:
    assert bare(documents(name)[0]["options"]) == bare(SPECS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_module_says_what_it_is_how_it_is_used_and_what_it_returns(name: str) -> None:
    document, examples, returns = documents(name)
    assert document["module"] == name and document["short_description"] and returns
    used = [task[name] or {} for task in examples if name in task]
    assert used and all(set(given) <= set(document["options"]) for given in used)


def test_each_action_plugin_is_the_one_file_under_a_name_that_a_table_has() -> None:
    plugins = {path.stem: path.resolve().name for path in (ROOT / "action_plugins").glob("*.py")}
    tables = [import_module(table).MODULES for table in actions.TABLES]
    assert set(plugins.values()) == {"gpu_memory.py"}
    assert sorted(plugins) == sorted(name for table in tables for name in table) and set(plugins) <= set(NAMES)


def test_a_module_whose_action_plugin_is_not_found_says_so_whatever_it_is_given() -> None:
    words = ["ansible", "-i", "localhost,", "localhost", "-c", "local", "-m", "reset_history", "-a", "limit=3 other=1"]
    environment = {**os.environ, "ANSIBLE_ACTION_PLUGINS": "/nonexistent", "ANSIBLE_NOCOLOR": "1"}
    words += ["-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "reset_history works on the control node: name this" in " ".join(done.stdout.split())
