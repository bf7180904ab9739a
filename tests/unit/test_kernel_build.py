"""Sources, keys, job counts and messages of a kernel build; the real compilation is in tests/integration."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from gpu_host import arguments, job, kernel_build, kernel_source
from gpu_host.deadline import Deadline
from gpu_host.kernel_source import SourceError
from hypothesis import given
from hypothesis import strategies as st

PACKAGE = Path(__file__).resolve().parent.parent / "kernel_package"
GIT = {
    **os.environ,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
}


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, text=True, env=GIT
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    """SGLang's layout: the package below sgl-kernel, a tag and a branch."""
    folder = tmp_path / "repository"
    (folder / "sgl-kernel").mkdir(parents=True)
    (folder / "sgl-kernel/pyproject.toml").write_text('[build-system]\nrequires = ["scikit-build-core"]\n')
    (folder / "sgl-kernel/CMakeLists.txt").write_text("project(x LANGUAGES CUDA)\n")
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "tag", "-a", "v1", "-m", "one")
    (folder / "more").write_text("x")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "two")
    return folder


def resolve(source: Path | str, ref: str = "") -> kernel_source.Source:
    return kernel_source.resolve(str(source), ref, Deadline(30))


def test_a_tag_a_branch_and_a_commit_name_commits(repository):
    first, second = git(repository, "rev-parse", "HEAD~1"), git(repository, "rev-parse", "HEAD")
    assert resolve(repository, "v1").identity == first  # the commit, not the tag's own object
    assert resolve(repository, "main").identity == second
    assert resolve(repository, first).identity == first


@pytest.mark.parametrize(
    ("ref", "words"),
    [("v9", "has no tag or branch v9"), ("", "name the commit, tag or branch")],
)
def test_a_reference_that_is_not_there_is_refused_in_one_sentence(repository, ref, words):
    with pytest.raises(SourceError, match=words):
        resolve(f"file://{repository}", ref)


def test_a_repository_that_can_not_be_reached_is_refused_without_its_password(tmp_path):
    with pytest.raises(SourceError) as caught:
        resolve("https://user:hunter2@127.0.0.1:1/x.git", "v1")
    assert "can't be asked for v1" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_folders_identity_changes_with_its_content_and_not_with_what_a_build_leaves(tmp_path):
    (tmp_path / "a.cu").write_text("one")
    first = resolve(tmp_path).identity
    (tmp_path / "build").mkdir()
    (tmp_path / "build/a.o").write_text("object")
    assert resolve(tmp_path).identity == first
    (tmp_path / "a.cu").write_text("two")
    assert resolve(tmp_path).identity != first


def test_a_clean_git_folder_is_its_commit_and_a_changed_one_is_not(repository):
    assert resolve(repository).identity == git(repository, "rev-parse", "HEAD")
    (repository / "more").write_text("changed")
    assert resolve(repository).identity.startswith("sha256-")


def fetch(source: kernel_source.Source, target: Path) -> None:
    target.mkdir()
    for command in kernel_source.fetch_command(source, str(target), sys.executable):
        subprocess.run(command, check=True, capture_output=True)


def test_each_sort_of_source_gives_the_package(repository, tmp_path):
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(repository, "sglang-0.5.23", filter=lambda one: None if ".git" in one.name else one)
    sources = {"git": resolve(repository, "v1"), "archive": resolve(archive), "folder": resolve(repository)}
    assert [one.kind for one in sources.values()] == ["git", "archive", "folder"]
    for name, source in sources.items():
        fetch(source, tmp_path / name)
        found = kernel_source.package_folder(str(tmp_path / name), "")
        assert found.endswith("/sgl-kernel") and os.path.isfile(f"{found}/CMakeLists.txt")
    assert not (tmp_path / "git/more").exists()  # the tag, not the branch


def test_a_source_without_a_kernel_package_says_where_it_was_looked_for(tmp_path):
    (tmp_path / "README").touch()
    with pytest.raises(SourceError, match="no kernel package in its top, sgl-kernel"):
        kernel_source.package_folder(str(tmp_path), "")


def test_what_cmake_would_fetch_is_listed_and_found_on_disk(tmp_path):
    wanted = kernel_source.dependencies(str(PACKAGE))
    assert [one.name for one in wanted] == ["repo-tiny-headers"]
    variables, missing = kernel_source.local_dependencies(wanted, str(PACKAGE / "dependencies"))
    assert variables == {"FETCHCONTENT_SOURCE_DIR_REPO-TINY-HEADERS": str(PACKAGE / "dependencies/repo-tiny-headers")}
    assert missing == []
    assert kernel_source.local_dependencies(wanted, str(tmp_path)) == ({}, wanted)


FACTS = {
    "cuda": "13.0",
    "torch": "2.14.1",
    "python": "cpython-312",
    "architecture": "120a",
    "options": "{}",
    "folder": "",
}


@pytest.mark.parametrize("fact", FACTS)
def test_each_fact_is_part_of_the_key(fact):
    key = kernel_source.cache_key("commit", FACTS)
    assert kernel_source.cache_key("commit", dict(reversed(FACTS.items()))) == key
    assert kernel_source.cache_key("commit", {**FACTS, fact: "other"}) != key
    assert kernel_source.cache_key("other", FACTS) != key


@given(st.integers(1, 512), st.integers(0, 4 << 20))
def test_compilers_never_exceed_cores_nor_memory_and_there_is_always_one(cores, free):
    compilers, threads = kernel_build.job_counts(cores, free)
    assert 1 <= compilers <= cores and threads == 1
    assert compilers == 1 or compilers * kernel_build.MIB_PER_JOB <= free


@pytest.mark.parametrize(
    ("log", "now", "line"),
    [
        (
            "  [3/412] Building CUDA\n  [37/412] Building CUDA object x.cu.o\n",
            job.Status("running", "compile", 740, step_seconds=720),
            "building: 37 of 412 compiled, 12 min, about 122 min left",
        ),
        ("-- Configuring\n", job.Status("running", "compile", 9, step_seconds=8), "building (compile), 9 s"),
        ("", job.Status("running", "fetch the source", 30, step_seconds=30), "building (fetch the source), 30 s"),
    ],
)
def test_progress_is_one_line_for_people(log, now, line):
    assert kernel_build.progress_line("building", now, log) == line


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        ("[9/10] Building\nnvcc error : 'cicc' died due to signal 9 (Kill signal)\n", 1, "lower sgl_kernel_jobs"),
        ("c++: fatal error: Killed signal terminated program cc1plus\n", 1, "too little memory"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'\n", 1, "install CUDA 12.8"),
        ("x.cc:1:10: fatal error: Python.h: No such file or directory\n", 1, "python3-dev"),
        ("fatal: unable to access 'https://x/': Could not resolve host: x\n", 128, "Give a source that exists"),
        ("CMake Error: Failed to clone repository: 'https://x/cutlass'\n", 1, "sgl_kernel_dependencies"),
        ("cp: No space left on device\n", 1, "Free space"),
        ("== compile\nexpected a ';' error: in a.cu\nninja: build stopped\n", 1, "expected a ';' error: in a.cu"),
        ("", 3, "it printed nothing"),
    ],
)
def test_why_a_build_failed_is_one_sentence_with_the_cure(log, code, words):
    text = kernel_build.why_failed(job.Status("failed", "compile", 5, code), log, "/x/log")
    assert words in text and text.endswith("Log: /x/log")


def params(**given_: object) -> dict:
    values = {name: spec.get("default") for name, spec in arguments.KERNEL_BUILD.items()}
    return {**values, "python": sys.executable, "package": "tiny_kernel", **given_}


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"python": "/nonexistent/python"}, "There is no Python at /nonexistent/python"),
        ({}, "Neither a source nor a wheel is named"),
        (
            {"source": "/nonexistent/x.tar.gz", "compute_capability": "12.0"},
            "There is no archive /nonexistent/x.tar.gz",
        ),
        ({"source": "/nonexistent", "compute_capability": "12.0"}, "There is no source /nonexistent"),
    ],
)
def test_what_can_not_be_built_is_refused_in_one_sentence(tmp_path, given_, words):
    if "source" in given_:
        nvcc = tmp_path / "bin/nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
        nvcc.chmod(0o755)
        given_ = {**given_, "environment": {"CUDA_HOME": str(tmp_path)}}
    answer = kernel_build.run(params(build_folder=str(tmp_path / "b"), **given_))
    assert answer["failed"] and words in answer["msg"]
    assert not (tmp_path / "b").exists()


def test_a_compiler_of_before_blackwell_is_refused_before_anything_is_fetched(tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    answer = kernel_build.run(
        params(source=str(PACKAGE), compute_capability="12.0", environment={"CUDA_HOME": str(tmp_path)})
    )
    assert answer["failed"] and "can't compile for compute capability 12.0; install CUDA 12.8" in answer["msg"]


def test_check_mode_builds_nothing_and_says_that_it_would(tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    answer = kernel_build.run(
        params(
            source=str(PACKAGE),
            compute_capability="12.0",
            environment={"CUDA_HOME": str(tmp_path)},
            build_folder=str(tmp_path / "b"),
        ),
        check_mode=True,
    )
    assert (answer["changed"], answer["failed"], answer["architecture"]) == (True, False, "sm_120a")
    assert "Would build" in answer["msg"] and not (tmp_path / "b").exists()


# ---- the published wheel ----


class Python:
    """A server's Python without pip, with SGLang's metadata, and a folder of wheels."""

    def __init__(self, folder: Path, requires: str = "sglang-kernel==0.4.10") -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.site = next((folder / "venv/lib").glob("python*/site-packages"))
        self.put("sglang", "0.5.23", f"Requires-Dist: {requires}\n" if requires else "")
        (folder / "wheels").mkdir()
        for version in ("0.4.9", "0.4.10", "0.4.11"):
            self.wheel(version)

    def put(self, name: str, version: str, more: str = "") -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")

    def wheel(self, version: str) -> None:
        """A package that imports, with a library in it that is one."""
        library = Path(import_module("_ctypes").__file__)
        name = f"sglang_kernel-{version}"
        files = {
            "sgl_kernel/__init__.py": f"version = {version!r}\n".encode(),
            "sgl_kernel/common_ops.abi3.so": library.read_bytes(),
            f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang-kernel\nVersion: {version}\n".encode(),
            f"{name}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        }
        files[f"{name}.dist-info/RECORD"] = "".join(f"{one},,\n" for one in files).encode()
        with zipfile.ZipFile(self.folder / f"wheels/{name}-py3-none-any.whl", "w") as archive:
            for path, data in files.items():
                archive.writestr(path, data)

    def unpack(self, version: str) -> None:
        """Installed by something that leaves no pip behind."""
        zipfile.ZipFile(self.folder / f"wheels/sglang_kernel-{version}-py3-none-any.whl").extractall(self.site)

    def run(self, pip: bool = True, check_mode: bool = False, **given_: object) -> dict:
        environment = {}
        if pip:
            place = self.folder / "pip"
            place.mkdir(exist_ok=True)
            if not (place / "pip").exists():
                (place / "pip").symlink_to(Path(import_module("pip").__file__).parent)
            environment["PYTHONPATH"] = str(place)
        values = params(
            python=str(self.folder / "venv/bin/python"),
            build_folder=str(self.folder / "build"),
            wheels=str(self.folder / "wheels"),
            environment=environment,
            **{"package": "sgl_kernel", "offline": True, **given_},
        )
        return kernel_build.run(values, check_mode=check_mode)

    def version(self) -> str:
        return (self.site / "sgl_kernel/__init__.py").read_text()


def test_the_published_wheel_is_the_one_that_the_installed_sglang_requires(tmp_path):
    python = Python(tmp_path)
    predicted = python.run(check_mode=True)
    assert (predicted["changed"], predicted["msg"]) == (True, "Would install sglang-kernel==0.4.10.")
    first = python.run()
    assert (first["failed"], first["changed"], "0.4.10" in python.version()) == (False, True, True), first["msg"]
    second = python.run(pip=False)  # nothing is to be installed: no pip is asked for
    assert (second["failed"], second["changed"], second["installed"]) == (False, False, True)


def test_a_wheel_that_the_user_names_wins_over_what_sglang_requires(tmp_path):
    python = Python(tmp_path)
    done = python.run(wheel="sglang-kernel==0.4.11")
    assert (done["failed"], "0.4.11" in python.version()) == (False, True), done["msg"]
    refused = Python(tmp_path / "other").run(pip=False, wheel="sglang-kernel==0.4.11")
    assert refused["failed"] and refused["msg"].startswith("sglang-kernel==0.4.11 has to be installed, but ")


def test_a_kernel_package_that_works_stays_where_there_is_no_pip(tmp_path):
    python = Python(tmp_path)
    python.unpack("0.4.9")
    left = python.run(pip=False)
    assert (left["failed"], left["changed"], left["installed"]) == (False, False, True), left["msg"]
    assert left["msg"].startswith(
        "sglang-kernel 0.4.9 works here and is left alone, though SGLang requires sglang-kern"
    )
    done = python.run()
    assert (done["changed"], "0.4.10" in python.version()) == (True, True), done["msg"]


def test_nothing_usable_and_no_pip_is_one_sentence(tmp_path):
    python = Python(tmp_path)
    answer = python.run(pip=False)
    program = tmp_path / "venv/bin/python"
    assert answer["failed"] and answer["msg"] == (
        f"sglang-kernel==0.4.10 has to be installed, but {program} has no pip; install it: {program} -m ensurepip"
        " (or: uv pip install pip) (sgl_kernel is not installed.)"
    )


@pytest.mark.parametrize(("requires", "words"), [("torch", "SGLang 0.5.23 requires no kernel package")])
def test_a_sglang_that_names_no_kernel_package_asks_for_one(tmp_path, requires, words):
    answer = Python(tmp_path, requires).run()
    assert answer["failed"] and words in answer["msg"] and "set sgl_kernel_wheel" in answer["msg"]
