"""Where the kernel package's source is, which state of it that is, and what its build would fetch.

A source is a git repository with a reference, an archive, or a folder. Its identity (a commit, or a digest of the
content) is part of the key under which a built wheel is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .child import run_command
from .deadline import Deadline

GIT, ARCHIVE, FOLDER = "git", "archive", "folder"
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip")
# Where the package lies in SGLang's repository, older and newer.
PACKAGE_FOLDERS = ("", "sgl-kernel", "python/sglang/kernels/aot")
_LEFT_OUT = (".git", "build", "dist", "__pycache__", ".cache", "_skbuild")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Repositories are asked without questions, and whoever owns their files.
GIT_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}


class SourceError(Exception):
    """The source can't be used; the text is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Source:
    """`identity` is the commit, or 'sha256-...' of an archive's or a folder's content."""

    kind: str
    where: str
    ref: str
    identity: str


def kind_of(source: str, ref: str) -> str:
    if source.endswith(ARCHIVES):
        return ARCHIVE
    if source.startswith("/") and os.path.isdir(source) and not ref:
        return FOLDER
    return GIT


def resolve(source: str, ref: str, deadline: Deadline) -> Source:
    """Which state of the source is meant. SourceError with one sentence."""
    kind = kind_of(source, ref)
    if kind == ARCHIVE:
        if not os.path.isfile(source):
            raise SourceError(f"There is no archive {source} on this host; copy it there, or give another source.")
        return Source(ARCHIVE, source, "", "sha256-" + _digest(source))
    if kind == FOLDER:
        return Source(FOLDER, source, "", folder_identity(source, deadline))
    if source.startswith("/") and not os.path.isdir(source):
        raise SourceError(f"There is no source {source} on this host.")
    if not ref:
        raise SourceError(f"The source {_shown(source)} is a git repository: name the commit, tag or branch as well.")
    return Source(GIT, source, ref, _commit(source, ref, deadline))


def _commit(source: str, ref: str, deadline: Deadline) -> str:
    if _COMMIT.fullmatch(ref):
        return ref
    environment = {**os.environ, **GIT_ENVIRONMENT}
    done = run_command(["git", "ls-remote", source, ref, f"{ref}^{{}}"], deadline.capped(60), environment)
    if done.returncode != 0:
        reason = (done.trouble or done.stderr.strip().split("\n")[-1] or "git failed").rstrip(".")
        cure = "install git, make the repository reachable, or give a full commit, an archive or a folder"
        raise SourceError(f"The repository {_shown(source)} can't be asked for {ref} ({_shown(reason)}); {cure}.")
    found = {name: commit for commit, _, name in (line.partition("\t") for line in done.stdout.splitlines())}
    for name in (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref):
        if name in found:
            return found[name]
    raise SourceError(
        f"The repository {_shown(source)} has no tag or branch {ref}; give a full commit or another name."
    )


def _shown(text: str) -> str:
    return re.sub(r"://[^/@\s]*@", "://***@", text)


def folder_identity(folder: str, deadline: Deadline) -> str:
    """The commit of a clean git tree, else a digest of all files' names and contents."""
    environment = {**os.environ, **GIT_ENVIRONMENT}
    if os.path.exists(f"{folder}/.git"):
        head = run_command(["git", "-C", folder, "rev-parse", "HEAD"], deadline.capped(10), environment)
        clean = run_command(["git", "-C", folder, "status", "--porcelain"], deadline.capped(30), environment)
        if head.returncode == 0 and clean.returncode == 0 and not clean.stdout.strip():
            return head.stdout.strip()
    total = hashlib.sha256()
    for path in files_of(folder):
        total.update(f"{path}\0{_digest(os.path.join(folder, path))}\n".encode())
    return "sha256-" + total.hexdigest()


def files_of(folder: str) -> list[str]:
    """All files below, relative, sorted; without what a build or git leaves there."""
    found = []
    for at, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        found += [os.path.relpath(os.path.join(at, name), folder) for name in names]
    return sorted(path for path in found if os.path.isfile(os.path.join(folder, path)))


def _digest(path: str) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            total.update(part)
    return total.hexdigest()


def fetch_command(source: Source, target: str, python: str) -> list[list[str]]:
    """The commands that put the source into the empty folder `target`."""
    if source.kind == GIT:
        git = ["git", "-C", target]
        return [
            [*git, "init", "--quiet"],
            [*git, "fetch", "--depth", "1", "--progress", source.where, source.ref],
            [*git, "checkout", "--quiet", "--detach", source.identity],
        ]
    if source.kind == ARCHIVE:
        program = "import shutil, sys; shutil.unpack_archive(sys.argv[1], sys.argv[2])"
        return [[python, "-c", program, source.where, target]]
    program = (
        "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], symlinks=True, dirs_exist_ok=True, "
        "ignore=shutil.ignore_patterns(*sys.argv[3:]))"
    )
    return [[python, "-c", program, source.where, target, *_LEFT_OUT]]


def package_folder(tree: str, named: str) -> str:
    """The folder with the package's pyproject.toml in an unpacked source; SourceError says where it was looked for."""
    bases = [tree]
    entries = os.listdir(tree)
    if len(entries) == 1 and os.path.isdir(f"{tree}/{entries[0]}"):
        bases.append(f"{tree}/{entries[0]}")  # an archive's own top folder
    wanted: Sequence[str] = (named,) if named else PACKAGE_FOLDERS
    for base in bases:
        for inner in wanted:
            folder = os.path.normpath(f"{base}/{inner}")
            if _builds_with_cmake(folder) or (named and os.path.isfile(f"{folder}/pyproject.toml")):
                return folder
    listed = ", ".join(inner or "its top" for inner in wanted)
    raise SourceError(f"The source has no kernel package in {listed}; name its folder with sgl_kernel_source_folder.")


def _builds_with_cmake(folder: str) -> bool:
    try:
        with open(f"{folder}/pyproject.toml", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return False
    return os.path.isfile(f"{folder}/CMakeLists.txt") and "scikit" in text


# ---- what CMake fetches ----


@dataclass(frozen=True)
class Dependency:
    """One FetchContent_Declare: the name decides the variable and folder by which CMake takes it from disk."""

    name: str
    repository: str
    tag: str

    @property
    def variable(self) -> str:
        return f"FETCHCONTENT_SOURCE_DIR_{self.name.upper()}"


_DECLARE = re.compile(r"\bFetchContent_Declare\s*\(([^)]*)\)", re.I | re.S)
_COMMENT = re.compile(r"#[^\n]*")


def dependencies(folder: str) -> list[Dependency]:
    """All that the package's CMake files declare to be fetched."""
    found: dict[str, Dependency] = {}
    for path in files_of(folder):
        if not (path.endswith(".cmake") or os.path.basename(path) == "CMakeLists.txt"):
            continue
        with open(os.path.join(folder, path), encoding="utf-8", errors="replace") as file:
            for one in parse_dependencies(file.read()):
                found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: one.name)


def parse_dependencies(text: str) -> list[Dependency]:
    """
    >>> parse_dependencies('FetchContent_Declare(repo-fmt GIT_REPOSITORY https://x/fmt # why\\n GIT_TAG 553ec)')
    [Dependency(name='repo-fmt', repository='https://x/fmt', tag='553ec')]
    """
    found = []
    for body in _DECLARE.findall(_COMMENT.sub("", text)):
        words = [word.strip('"') for word in body.split()]
        if not words or "$" in words[0]:
            continue
        after = {word.upper(): words[at + 1] for at, word in enumerate(words[:-1]) if at}
        found.append(
            Dependency(words[0], after.get("GIT_REPOSITORY") or after.get("URL", ""), after.get("GIT_TAG", ""))
        )
    return found


def local_dependencies(wanted: Sequence[Dependency], folder: str) -> tuple[dict[str, str], list[Dependency]]:
    """CMake variables for those that lie in `folder` (as NAME or NAME-src), and those that are missing there."""
    variables: dict[str, str] = {}
    missing = []
    for one in wanted:
        place = next((p for p in (f"{folder}/{one.name}", f"{folder}/{one.name}-src") if _filled(p)), None)
        if place is None:
            missing.append(one)
        else:
            variables[one.variable] = place
    return variables, missing


def _filled(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False


def cache_key(identity: str, facts: Mapping[str, str | None]) -> str:
    """Short name of what a wheel was built from and for; the same facts give the same name."""
    text = "\n".join([identity, *(f"{name}={facts[name] or ''}" for name in sorted(facts))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
