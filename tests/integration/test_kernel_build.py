"""A kernel package compiled for real with nvcc, offline: sm_120a code comes out of it, and nothing is built twice.

About a minute. It skips where there is no nvcc; make unit does not run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import arguments, fatbin, kernel_build, kernel_package
from gpu_host.deadline import Deadline

from tests.integration.cuda_tools import PACKAGE, ROOT, require_nvcc, server_python, wheels


class Build:
    """A host's build folder and server's Python, and what building in them returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = server_python(folder / "venv")
        self.lines: list[str] = []

    def params(self, **given: Any) -> dict[str, Any]:
        values = {name: spec.get("default") for name, spec in arguments.KERNEL_BUILD.items()}
        return {
            **values,
            "python": str(self.python),
            "package": "tiny_kernel",
            "source": str(PACKAGE),
            "compute_capability": "12.0",
            "offline": True,
            "dependencies": str(PACKAGE / "dependencies"),
            "wheels": str(wheels()),
            "build_folder": str(self.folder / "build"),
            "patience": 1,
            **given,
        }

    def run(self, **given: Any) -> dict[str, Any]:
        while True:
            returned = kernel_build.run(self.params(**given))
            if not returned.get("unfinished"):
                return returned
            self.lines.append(returned["progress"])


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Build:
    require_nvcc()
    return Build(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def first(build) -> dict[str, Any]:
    return build.run()


def test_a_build_for_compute_capability_12_holds_sm_120a_code_and_imports(build, first):
    assert first["failed"] is False, first["msg"]
    assert (first["built"], first["installed"], first["architecture"]) == (True, True, "sm_120a")
    check = first["check"]
    assert (check["usable"], check["imported"], check["architectures"]) == (True, True, ["120a"])
    assert check["tool"].endswith("/cuobjdump")
    assert check["loaded"] == ["sm100/common_ops.abi3.so"]


def test_progress_was_told_while_it_was_built(build, first):
    assert any("compiled" in line or "compile" in line for line in build.lines), build.lines


def test_our_reader_lists_what_cuobjdump_lists(build, first):
    library = f"{first['check']['folder']}/sm100/common_ops.abi3.so"
    tool = kernel_package.find_cuobjdump("", str(Path(first["check"]["folder"]).parent))
    assert tool and kernel_package.listed(library, tool, Deadline(30)) == fatbin.read(library)


def test_an_unchanged_host_builds_nothing_and_asks_nothing_of_the_compiler(build, first):
    started = time.monotonic()
    second = build.run()
    assert time.monotonic() - started < 5
    assert (second["changed"], second["built"], second["installed"]) == (False, False, True)
    assert second["key"] == first["key"]


def test_a_package_that_was_touched_is_installed_again_from_the_kept_wheel(build, first):
    with open(f"{first['check']['folder']}/__init__.py", "a") as file:
        file.write("# a change\n")
    again = build.run()
    assert (again["changed"], again["built"], again["installed"]) == (True, False, True)


def test_what_lacks_offline_is_named_before_anything_is_compiled(build, first, tmp_path):
    answer = build.run(dependencies=str(tmp_path), cmake_options={"other": "key"})
    assert answer["failed"] and "lacks repo-tiny-headers (https://git.invalid/tiny-headers" in answer["msg"]


def test_the_role_builds_and_installs_in_one_task(build, first, tmp_path):
    """Through Ansible, with the wheel that is kept: the action plugin, the role, its defaults."""
    host = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": str(build.python),
        "sglang_python": str(build.python),
        "gpu_host_compute_capability": "12.0",
        "sgl_kernel_package": "tiny_kernel",
        "sgl_kernel_source": str(PACKAGE),
        "sgl_kernel_offline": True,
        "sgl_kernel_dependencies": str(PACKAGE / "dependencies"),
        "sgl_kernel_wheels": str(wheels()),
        "sgl_kernel_build_folder": str(build.folder / "build"),
    }
    # The second one takes the wheel of the first.
    other = {**host, "sglang_python": str(server_python(tmp_path / "other")), "sgl_kernel_build_host": "gpu01"}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"gpu01": host, "gpu02": other}}}))
    (tmp_path / "group_vars").symlink_to(ROOT / "group_vars")
    keep = {
        "copy": {
            "content": "{{ sgl_kernel_result | to_json }}",
            "dest": f"{tmp_path}/{{{{ inventory_hostname }}}}.json",
        }
    }
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "gpu_hosts", "roles": ["sgl_kernel"], "post_tasks": [keep]}])
    )
    command = ["ansible-playbook", "-i", tmp_path / "hosts.yml", tmp_path / "play.yml"]
    environment = {**os.environ, "GPU_ARTIFACTS": str(tmp_path / "artifacts"), "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, taken = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("gpu01", "gpu02"))
    assert (mine["built"], mine["installed"]) == (False, True)
    assert (taken["built"], taken["installed"], taken["check"]["usable"]) == (False, True, True)
    assert taken["key"] == mine["key"]
