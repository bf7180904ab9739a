"""One host builds the kernel package, another one that can't compile gets its wheel: over ssh, compiled for real."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.cuda_tools import PACKAGE, require_nvcc, server_python, wheels
from tests.lab.command import run
from tests.lab.host import Host

PLAY = """
- hosts: gpu_hosts
  roles: [sgl_kernel]
  post_tasks:
    - ansible.builtin.copy: {content: "{{ sgl_kernel_result | to_json }}", dest: /root/result.json, mode: "0600"}
      check_mode: false
"""


@pytest.fixture
def pip_folder() -> Path:
    """The pip of this environment: a lab host has none."""
    import pip

    return Path(pip.__file__).parent


def test_a_host_that_can_not_compile_gets_the_wheel_of_the_one_that_builds(
    start_gpu_host: Callable[..., Host], tmp_path: Path, pip_folder: Path
) -> None:
    require_nvcc()
    host = start_gpu_host()
    python = server_python(tmp_path / "venv")  # the same path on both hosts, as in a fleet
    host.ssh(f"python3 -m venv --without-pip {tmp_path}/venv && mkdir -p /opt/pip")
    archive = shutil.make_archive(str(tmp_path / "pip"), "tar", pip_folder.parent, "pip")
    packed = base64.b64encode(Path(archive).read_bytes()).decode()
    run(host.ssh_command("base64 -d | tar -x -C /opt/pip"), stdin=packed)
    inventory = tmp_path / "builder.yml"
    builder = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    inventory.write_text(yaml.safe_dump({"builders": {"hosts": {"builder": builder}}}))
    (tmp_path / "play.yml").write_text(PLAY)
    variables = {
        "sglang_python": str(python),
        "sglang_environment": {"PYTHONPATH": "/opt/pip"},
        "gpu_host_compute_capability": "12.0",
        "sgl_kernel_package": "tiny_kernel",
        "sgl_kernel_source": str(PACKAGE),
        "sgl_kernel_build_host": "builder",
        "sgl_kernel_offline": True,
        "sgl_kernel_dependencies": str(PACKAGE / "dependencies"),
        "sgl_kernel_wheels": str(wheels()),
        "sgl_kernel_build_folder": str(tmp_path / "kernels"),
    }
    artifacts = {"GPU_ARTIFACTS": str(tmp_path / "artifacts")}

    def play() -> dict:
        done = host.playbook(tmp_path / "play.yml", variables, "--inventory", str(inventory), environment=artifacts)
        assert done.returncode == 0, done.stdout + done.stderr
        return {"output": done.stdout, **json.loads(host.read("/root/result.json"))}

    first = play()
    assert (first["installed"], first["check"]["usable"], first["check"]["architectures"]) == (True, True, ["120a"])
    kept = list((tmp_path / "artifacts/wheels").glob("*/*.whl"))
    assert len(kept) == 1 and any(name.endswith(".so") for name in zipfile.ZipFile(kept[0]).namelist())
    second = play()
    assert (second["changed"], second["built"], second["key"]) == (False, False, first["key"])
    assert "Fetch the wheel" in first["output"] and "Fetch the wheel" not in second["output"]
