"""Which commit a server's package is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpu_host.installed_server import git_changes, git_commit


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "python" / "sglang").mkdir(parents=True)
    (tmp_path / "python" / "sglang" / "__init__.py").touch()
    (tmp_path / "venv" / "sglang").mkdir(parents=True)
    (tmp_path / "venv" / "sglang" / "__init__.py").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "python")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_a_package_in_a_source_tree_is_of_its_commit_and_tells_its_changes(repository: Path) -> None:
    package = repository / "python" / "sglang"
    assert git_commit(str(package)) == git(repository, "rev-parse", "HEAD")
    assert git_changes(str(package)) == ()
    (package / "__init__.py").write_text("changed = True\n")
    assert git_changes(str(package)) == ("python/sglang/__init__.py",)


def test_a_package_in_an_environment_inside_the_tree_of_something_else_is_of_no_commit(repository: Path) -> None:
    package = repository / "venv" / "sglang"
    assert git_commit(str(package)) == ""
    assert git_changes(str(package)) == ()
