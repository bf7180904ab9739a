from __future__ import annotations

import ast
import importlib
import os
import py_compile
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import arguments, delegation
from gpu_host.delegation import BACKUP, BEGIN, METHODS

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "wrappers.yml").read_text(encoding="utf-8"))["cases"]
KIMI = CASES[0]


def folder_of(case: dict[str, Any], folder: Path) -> Path:
    """The case's files below the folder, as a package; the first of them is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    for name, source in case["files"].items():
        (folder / name).write_bytes(source.encode())
    return folder / next(iter(case["files"]))


def run(path: Path | str, check: bool = False, **more: Any) -> dict[str, Any]:
    defaults = {name: option["default"] for name, option in arguments.MODEL_DELEGATION.items()}
    return delegation.run({**defaults, "path": str(path), **more}, check_mode=check, diff=True)


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return folder_of(KIMI, tmp_path / "models")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import `models.kimi_k25` from, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield tmp_path
    for name in [name for name in sys.modules if name == "models" or name.startswith("models.")]:
        del sys.modules[name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    path = folder_of(case, tmp_path / "models")
    original = path.read_bytes()
    given = {"class_name": case.get("class_name", ""), "attribute": case.get("attribute_given", "")}
    result = run(path, **given)
    if "refused" in case:
        assert result["failed"] and result["refused"] and case["refused"] in result["msg"]
        assert path.read_bytes() == original and sorted(os.listdir(path.parent)) == sorted(
            [*case["files"], "__init__.py"]
        )
        return
    assert (result["added"], result["class_name"]) == (case["added"], case["class"])
    assert result["changed"] is bool(case["added"]) and result["attribute"] == case.get("attribute", "")
    edited = path.read_bytes()
    if not case["added"]:
        assert edited == original and not result["backup"]
        return
    ast.parse(edited)
    assert edited.count(BEGIN.encode()) == 1 and Path(result["backup"]).read_bytes() == original
    again = run(path, **given)
    assert not again["changed"] and again["added"] == case["added"] and path.read_bytes() == edited
    assert run(path, state="absent")["changed"]
    assert path.read_bytes() == original and not os.path.exists(result["backup"])
    assert not run(path, state="absent")["changed"]


def test_the_wrapper_answers_with_its_language_model(package: Path) -> None:
    path = folder_of(KIMI, package / "models")
    run(path)
    wrapper = importlib.import_module("models.kimi_k25").KimiK25ForConditionalGeneration("config")
    wrapper.set_embed_and_head("e", "h")
    assert wrapper.get_embed_and_head() == ("e", "h") == (wrapper.language_model.embed, wrapper.language_model.head)
    wrapper.set_eagle3_layers_to_capture([1, 2])
    assert wrapper.language_model.layers == [1, 2]
    wrapper.set_eagle3_layers_to_capture()
    assert wrapper.language_model.layers == [2, 30, 58]
    wrapper.set_eagle3_layers_to_capture(layer_ids=[3])
    assert wrapper.language_model.layers == [3]


def test_only_lines_are_added_and_everything_else_stays_where_it_was(kimi: Path) -> None:
    before = kimi.read_text(encoding="utf-8").splitlines()
    run(kimi)
    after = kimi.read_text(encoding="utf-8").splitlines()
    added = [line for line in after if line not in before]
    assert [line for line in after if line not in added or line == ""].count("") == before.count("") + 3
    assert [line for line in after if line and line not in added] == [line for line in before if line]
    assert added[0].strip() == BEGIN


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "\n# the end", "\nEntryClass = [Wrapper]"])
def test_line_ends_and_the_end_of_the_file_are_kept(tmp_path: Path, newline: str, end: str) -> None:
    path = tmp_path / "wrapper.py"
    source = "class Wrapper:\n    def __init__(self):\n        self.language_model = make()" + end
    path.write_bytes(source.replace("\n", newline).encode())
    original = path.read_bytes()
    assert run(path, class_name="Wrapper")["changed"]
    edited = path.read_bytes()
    assert edited.startswith(original.rstrip()[:60]) and edited.count(b"\r") == (
        edited.count(b"\n") if "\r" in newline else 0
    )
    assert not run(path, class_name="Wrapper")["changed"]
    assert run(path, class_name="Wrapper", state="absent")["changed"] and path.read_bytes() == original


def test_another_encoding_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "wrapper.py"
    path.write_bytes(
        "# -*- coding: latin-1 -*-\n# \xe9\nclass W:\n    def f(self):\n        self.llm = m()\n".encode("latin-1")
    )
    assert run(path, class_name="W")["changed"]
    assert b"# \xe9\n" in path.read_bytes()


def test_stale_bytecode_of_the_module_goes_and_no_other(package: Path) -> None:
    path = folder_of(KIMI, package / "models")
    os.utime(path, (1, 1))
    compiled = [py_compile.compile(str(path), optimize=level) for level in (0, 1)]
    other = py_compile.compile(str(path.parent / "deepseek_v2.py"))
    assert run(path, check=True)["bytecode"] == sorted(map(str, compiled)) and all(
        map(os.path.exists, map(str, compiled))
    )
    assert run(path)["bytecode"] == sorted(map(str, compiled))
    assert not any(map(os.path.exists, map(str, compiled))) and os.path.exists(str(other))


def test_check_mode_shows_the_lines_and_changes_nothing(kimi: Path) -> None:
    original = kimi.read_bytes()
    result = run(kimi, check=True)
    assert result["changed"] and "return self.language_model.get_embed_and_head()" in result["diff"]["after"]
    assert kimi.read_bytes() == original and not os.path.exists(f"{kimi}{BACKUP}")


def test_mode_and_another_name_of_the_file_are_kept(kimi: Path, tmp_path: Path) -> None:
    kimi.chmod(0o664)
    cache = tmp_path / "cache.py"
    os.link(kimi, cache)
    original = cache.read_bytes()
    run(kimi)
    assert stat.S_IMODE(kimi.stat().st_mode) == 0o664 and cache.read_bytes() == original


def test_a_newer_sglang_over_the_edited_file_is_backed_up_anew(kimi: Path) -> None:
    run(kimi)
    newer = KIMI["files"]["kimi_k25.py"].replace("# vision first", "# the vision tower first")
    kimi.write_text(newer, encoding="utf-8")
    assert run(kimi)["changed"]
    assert Path(f"{kimi}{BACKUP}").read_text(encoding="utf-8") == newer


def test_lines_that_others_changed_since_stay_when_ours_go(kimi: Path) -> None:
    run(kimi)
    kimi.write_text(kimi.read_text(encoding="utf-8").replace("# vision first", "# mine"), encoding="utf-8")
    result = run(kimi, state="absent")
    assert (
        result["changed"]
        and "# mine" in kimi.read_text(encoding="utf-8")
        and BEGIN not in kimi.read_text(encoding="utf-8")
    )
    assert result["backup"], "it is not what lies there, so it is kept"


def test_methods_of_an_earlier_run_that_are_not_wanted_any_more_go(kimi: Path) -> None:
    run(kimi)
    result = run(kimi, methods=["set_eagle3_layers_to_capture"])
    assert result["changed"] and result["added"] == ["set_eagle3_layers_to_capture"]
    assert "get_embed_and_head" not in kimi.read_text(encoding="utf-8")
    assert Path(result["backup"]).read_text(encoding="utf-8") == KIMI["files"]["kimi_k25.py"]


def test_marks_that_someone_broke_are_refused(kimi: Path) -> None:
    run(kimi)
    kimi.write_text(kimi.read_text(encoding="utf-8").replace(delegation.END, "#"), encoding="utf-8")
    result = run(kimi)
    assert result["failed"] and "put the backup back by hand" in result["msg"]


@pytest.mark.parametrize("given", ["", "sglang", "python"])
def test_the_class_is_found_in_sglangs_folder(tmp_path: Path, given: str) -> None:
    folder = tmp_path / "tree"
    models = folder / {"": "srt/models", "sglang": "sglang/srt/models", "python": "python/sglang/srt/models"}[given]
    path = folder_of(KIMI, models)
    result = run("", sglang_folder=str(folder), class_name=KIMI["class"])
    assert result["changed"] and result["path"] == str(path)
    nothing = run("", sglang_folder=str(folder), class_name="Other")
    assert nothing["failed"] and "is in no file of" in nothing["msg"]
    assert "holds no srt/models" in run("", sglang_folder=str(tmp_path), class_name="Other")["msg"]


def test_a_missing_file_is_said() -> None:
    assert "There is no file /nowhere/x.py" in run("/nowhere/x.py")["msg"]


def test_the_modules_choices_are_the_methods_of_the_code() -> None:
    assert arguments.MODEL_DELEGATION["methods"]["choices"] == list(METHODS)
