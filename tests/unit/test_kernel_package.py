"""Whether a compiled package works: causes of failed imports, and packages that are really imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gpu_host import kernel_package, python_packages
from gpu_host.deadline import Deadline

from .test_binaries import compile_library, fat_library

CASES = yaml.safe_load((Path(__file__).parent / "cases/import_errors.yml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_inner_cause_of_a_failed_import_is_named(case):
    known = kernel_package.cause(case["text"])
    assert (known.code if known else None) == case["cause"]
    if "says" in case:
        assert case["says"] in f"{known.found} {known.cure}"


@pytest.fixture
def python(tmp_path) -> Path:
    """An interpreter with a site-packages folder of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv/bin/python"


def site_packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python*/site-packages"))


def package(python: Path, library: Path | None, text: str = "") -> None:
    folder = site_packages(python) / "sgl_kernel"
    (folder / "sm100").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        text or "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).parent / 'sm100/common_ops.abi3.so'))\n"
    )
    if library:
        library.rename(folder / "sm100/common_ops.abi3.so")


def inspect(python: Path, capability: str = "12.0") -> dict:
    return kernel_package.inspect(str(python), "sgl_kernel", capability, Deadline(30), cuobjdump="/nonexistent")


def test_a_package_with_code_for_the_gpu_is_usable(python, tmp_path):
    package(python, fat_library(tmp_path, "120a"))
    answer = inspect(python)
    assert (answer["usable"], answer["imported"], answer["architectures"]) == (True, True, ["120a"])
    assert answer["cause"] == "" and answer["findings"] == []


def test_a_package_without_code_for_the_gpu_is_not_though_it_imports(python, tmp_path):
    package(python, fat_library(tmp_path, "90a", "100a"))
    answer = inspect(python)
    assert (answer["usable"], answer["imported"], answer["cause"]) == (False, True, "no_cubin")
    assert "code for: sm_100a, sm_90a" in answer["msg"]


def test_a_package_that_must_be_compiled_at_first_use_is_usable_with_a_warning(python, tmp_path):
    package(python, fat_library(tmp_path, "90a", "ptx 90"))
    answer = inspect(python)
    assert (answer["usable"], [row["code"] for row in answer["findings"]]) == (True, ["ptx_only"])


def test_a_library_for_another_torch_is_named_by_its_symbol(python, tmp_path):
    source = "int _ZN3c103oldEv(void); int run(void) { return _ZN3c103oldEv(); }"
    text = """import ctypes, os, pathlib
ctypes.CDLL(str(pathlib.Path(__file__).parent / 'sm100/common_ops.abi3.so'), mode=os.RTLD_NOW)
"""
    package(python, compile_library(tmp_path, "ops", source), text)
    answer = inspect(python)
    assert answer["cause"] == "other_torch" and "_ZN3c103oldEv" in answer["msg"]
    assert "undefined symbol" in answer["import_error"]


def test_a_package_of_source_files_alone_is_not_compiled(python):
    package(python, None, "x = 1\n")
    assert inspect(python)["cause"] == "not_compiled"


def test_a_package_that_is_not_there_is_not_installed(python):
    assert inspect(python)["cause"] == "not_installed"


def test_an_import_that_crashes_is_told_as_such(python, tmp_path):
    package(python, fat_library(tmp_path, "120a"), "import os\nos.abort()\n")
    answer = inspect(python)
    assert (answer["cause"], answer["usable"]) == ("import_failed", False)
    assert "ended by signal 6" in answer["msg"]


def test_an_unknown_error_is_said_to_be_unknown(python, tmp_path):
    package(python, fat_library(tmp_path, "120a"), "raise ValueError('numpy.dtype size changed')\n")
    answer = inspect(python)
    assert answer["cause"] == "import_failed" and "numpy.dtype size changed" in answer["msg"]


def test_a_python_that_is_not_there_is_said_so():
    answer = kernel_package.inspect("/nonexistent/python", "sgl_kernel", "12.0", Deadline(5))
    assert (answer["usable"], answer["cause"]) == (False, "python_unusable")


def test_a_listing_of_cuobjdump_is_read():
    elves = "ELF file    1: tmpxft_00_0.sm_120a.cubin\nELF file    2: common_ops.2.sm_90a.cubin\n"
    code = kernel_package.parse_listing(elves, "PTX file    1: common_ops.1.sm_90.ptx\n")
    assert (code.sass, code.ptx) == (frozenset({"120a", "90a"}), frozenset({"90"}))


# ---- what a Python has installed ----


def metadata(python: Path, name: str, version: str, *lines: str, **files: str) -> None:
    folder = site_packages(python) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""])
    )
    for file, text in files.items():
        (folder / file.replace("_json", ".json")).write_text(text)


def test_versions_requirements_and_folders_are_read_without_importing_anything(python):
    metadata(python, "sglang", "0.5.23", "Requires-Dist: torch==2.14.1", 'Requires-Dist: accelerate; extra == "test"')
    metadata(python, "torch", "2.14.1+cu130")
    metadata(
        python, "sglang-kernel", "0.4.10", direct_url_json='{"url": "file:///src", "dir_info": {"editable": true}}'
    )
    for name in ("torch", "sglang"):
        (site_packages(python) / name).mkdir()
        (site_packages(python) / name / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    version = "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (site_packages(python) / "torch/version.py").write_text(version)
    (site_packages(python) / "sglang/worker.py").write_text(
        "import os\nif os.environ.get('EAGLE3_PROFILE'):\n    pass\n"
    )
    answer = python_packages.ask(str(python), Deadline(20), ["EAGLE3_PROFILE", "EAGLE3_PROF"])
    assert answer["versions"] == {"sglang": "0.5.23", "torch": "2.14.1+cu130", "sglang-kernel": "0.4.10"}
    assert (answer["requires"], answer["editable"]) == (["torch==2.14.1"], ["sglang-kernel"])
    assert answer["torch"] == {"cuda": "13.0", "version": "2.14.1+cu130", "hip": ""}
    assert answer["readers"] == {"EAGLE3_PROFILE": ["worker.py"]}
    assert answer["packages"] == str(site_packages(python))


def test_packages_on_the_servers_own_path_are_seen(python, tmp_path):
    (tmp_path / "tree/sglang").mkdir(parents=True)
    (tmp_path / "tree/sglang/__init__.py").touch()
    without = python_packages.ask(str(python), Deadline(20))
    given = python_packages.ask(str(python), Deadline(20), python_path=str(tmp_path / "tree"))
    assert "sglang" not in without["folders"] and given["folders"]["sglang"] == str(tmp_path / "tree/sglang")


@pytest.mark.parametrize(
    ("script", "words"), [("exit 3", "exit status 3"), ("echo broken >&2; exit 1", "broken"), ("sleep 60", "in time")]
)
def test_a_python_that_can_not_answer_is_told_with_its_reason(tmp_path, script, words):
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    answer = python_packages.ask(str(file), Deadline(1))
    assert words in answer["error"] and str(file) in answer["error"]
