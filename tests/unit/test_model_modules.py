"""The modules that look after models, as Ansible runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model_folders import MODELS, write_drafter, write_target
from tests.unit.test_module_documents import documents

ROOT = Path(__file__).resolve().parents[2]
# Added by Ansible itself, some of it since a result has a path.
ANSIBLES = {"invocation", "changed", "diff", "owner", "group", "uid", "gid", "mode", "size", "state", "secontext"}


def run_module(name: str, *, check: bool = False, **params: Any) -> dict[str, Any]:
    """What the module prints, run the way Ansible runs it."""
    program = (
        "import sys, ansible.module_utils as utils; utils.__path__.append(sys.argv[1]); "
        "import runpy; from ansible.module_utils.testing import patch_module_args\n"
        "import json\n"
        "with patch_module_args(json.loads(sys.argv[2])): runpy.run_path(sys.argv[3], run_name='__main__')"
    )
    given = json.dumps({**params, "_ansible_check_mode": check, "_ansible_diff": True})
    command = [sys.executable, "-c", program, str(ROOT / "module_utils"), given, str(ROOT / "library" / f"{name}.py")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ})
    result: dict[str, Any] = json.loads(answer.stdout or json.dumps({"stderr": answer.stderr}))
    return result


def test_checkpoint_info_returns_what_it_documents(tmp_path: Path) -> None:
    model = write_target(tmp_path / "model")
    for path in (model, tmp_path / "nothing"):
        result = run_module("checkpoint_info", path=str(path))
        assert not result["changed"] and "failed" not in result, "an incomplete model is no failure of a gatherer"
        assert set(result) - ANSIBLES == set(documents("checkpoint_info")[2])


def test_eagle3_drafter_returns_what_it_documents(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", config=MODELS["tiny_target"])
    drafter = write_drafter(tmp_path / "drafter", MODELS["tiny_drafter"])
    pair: dict[str, Any] = {"target": str(target), "drafter": str(drafter)}
    assert run_module("eagle3_drafter", **pair)["failed"], "512 tokens are too few for a server of 2048"
    checked = run_module("eagle3_drafter", check=True, context_length="raise", **pair)
    assert checked["changed"] and checked["diff"]["before"] != checked["diff"]["after"]
    for changes in (True, False):
        result = run_module("eagle3_drafter", context_length="raise", **pair)
        assert result["changed"] is changes
        assert set(result) - ANSIBLES == set(documents("eagle3_drafter")[2])


def test_model_delegation_returns_what_it_documents(tmp_path: Path) -> None:
    path = tmp_path / "wrapper.py"
    path.write_text("class W:\n    def __init__(self):\n        self.llm = make()\n", encoding="utf-8")
    for changes in (True, False):
        result = run_module("model_delegation", path=str(path), class_name="W")
        assert result["changed"] is changes
        assert set(result) - ANSIBLES == set(documents("model_delegation")[2])


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("checkpoint_info", {"path": "model"}, "path: 'model' is no absolute path"),
        ("checkpoint_info", {"path": ""}, "path: no folder is given"),
        ("checkpoint_info", {"path": "/m", "threads": -1}, "threads: -1 is no number of threads"),
        ("checkpoint_info", {"path": "/m", "sha256": {"x": "abc"}}, "The checksum of x is no SHA-256"),
        ("eagle3_drafter", {"drafter": "/d/../x", "target": "/t"}, "drafter: '/d/../x' is no absolute path"),
        ("eagle3_drafter", {"drafter": "", "target": "/t"}, "drafter: no folder is given"),
        ("eagle3_drafter", {"drafter": "/d", "target": "/t", "served_context_length": -1}, "give tokens"),
        (
            "eagle3_drafter",
            {"drafter": "/d", "target": "/t", "context_length": "lower"},
            "raise, override, keep, revert",
        ),
        ("model_delegation", {}, "name the file of the wrapper class"),
        ("model_delegation", {"sglang_folder": "/s"}, "give sglang_folder and class_name"),
        ("model_delegation", {"path": "/x.py", "methods": []}, "methods: nothing is chosen"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(name: str, params: dict[str, Any], says: str) -> None:
    result = run_module(name, **params)
    assert result["failed"] and says in result["msg"]
