"""Where a model comes from: what a source is called, what it holds, and which program brings it.

A source is one word: ``hf:owner/name@revision`` (a Hugging Face hub), ``/path`` (a mount), ``rsync://host/module/path``
or ``rsync:user@host:/path``, ``rclone:remote:path``, or ``host:name`` (another host of the inventory, which needs the
others' help: see swarm_client). Programs that exist do the work; here is how each is asked.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import background, copy_client, hub_client, swarm_client
from .child import Completed, run_command
from .deadline import Deadline
from .masking import mask_text
from .storage import write_private

HUB, PATH, RSYNC, RCLONE, HOST, NONE = "hub", "path", "rsync", "rclone", "host", "none"
# Besides safetensors, the same weights in other formats are of no use.
DUPLICATES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json", "*.msgpack", "*.h5", "*.gguf", "*.onnx", "*.onnx_data")
LIST_SECONDS = 120.0
CLIENTS = {"hub_client": hub_client, "copy_client": copy_client, "swarm_client": swarm_client}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class SourceError(Exception):
    """The source can't be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class Source:
    """`where` is the repository, path, rsync or rclone address, or host; `revision` is a hub's, '' elsewhere."""

    kind: str
    where: str
    revision: str = ""

    @property
    def label(self) -> str:
        """A word for the staging folder's name that differs between revisions of one model."""
        text = self.revision[:12] if _COMMIT.fullmatch(self.revision) else self.revision or self.kind
        return re.sub(r"[^A-Za-z0-9.]+", "-", text)


@dataclass(frozen=True)
class File:
    """`sha256` is the published one, None where none is published."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Listing:
    """What a source holds of use. `commit` is a hub's; `xet` says that the hub's fast way is open."""

    files: Mapping[str, File]
    commit: str = ""
    xet: bool = False
    left_out: Sequence[str] = field(default_factory=tuple)

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.files.values())

    def row(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "xet": self.xet,
            "left_out": list(self.left_out),
            "files": {name: [one.size, one.sha256] for name, one in self.files.items()},
        }

    @staticmethod
    def of(row: Mapping[str, Any]) -> Listing:
        files = {name: File(int(size), sha256) for name, (size, sha256) in row["files"].items()}
        return Listing(files, row.get("commit", ""), bool(row.get("xet")), tuple(row.get("left_out", ())))


def parse(text: str) -> Source:
    """The source that a user wrote. SourceError: none of the kinds."""
    text = text.strip()
    if not text:
        return Source(NONE, "")
    if text.startswith("/"):
        return Source(PATH, os.path.normpath(text))
    kind, colon, rest = text.partition(":")
    if kind == "hf" and colon:
        where, _, revision = rest.partition("@")
        if not _REPOSITORY.fullmatch(where):
            raise SourceError(f"{text!r} names no model of a hub; write hf:owner/name@revision.")
        if not _REVISION.fullmatch(revision):
            raise SourceError(f"{text!r} pins no revision; write hf:{where}@ and a commit, a tag or a branch.")
        return Source(HUB, where, revision)
    if text.startswith("rsync://"):
        return Source(RSYNC, text.rstrip("/"))
    if kind in (RSYNC, RCLONE) and ":" in rest and not rest.startswith(("-", ":-")):
        return Source(kind, rest.rstrip("/"))
    if kind == HOST and _HOST.fullmatch(rest.partition(":")[0]) and rest.partition(":")[2][:1] in ("", "/"):
        return Source(HOST, rest)
    hint = f" (for a hub: hf:{text}@revision)" if _REPOSITORY.fullmatch(text) else ""
    raise SourceError(
        f"{text!r} is no source of a model{hint}; give hf:owner/name@revision, an absolute path, rsync://host/module/path,"
        " rsync:host:/path, rclone:remote:path or host:name."
    )


def problems(params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of the module model_staging, one sentence each."""
    found = []
    paths = [one["path"] for one in params["models"]]
    for one in params["models"]:
        path = one["path"]
        if not path.startswith("/") or ".." in path.split("/") or path.strip("/").count("/") < 1:
            found.append(f"models: {path!r} is no folder of a model; give an absolute path below a top folder.")
        try:
            parse(one.get("source") or "")
        except SourceError as error:
            found.append(f"models: {error}")
    if not paths:
        found.append("models: none is given; name at least one.")
    if len(set(paths)) < len(paths):
        found.append("models: two of them have the same path.")
    if params["endpoint"] and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", params["endpoint"]):
        found.append(f"endpoint: {params['endpoint']!r} is no address of a hub; give http:// or https:// and a host.")
    for name in ("token_file", "rclone_config"):
        if params[name] and not params[name].startswith("/"):
            found.append(f"{name}: {params[name]!r} is no absolute path on the host.")
    if not 1 <= params["parallel"] <= 64:
        found.append(f"parallel: {params['parallel']} is no number of files at a time; give 1 to 64.")
    if not 1 <= params["attempts"] <= 100:
        found.append(f"attempts: {params['attempts']} is no number of attempts; give 1 to 100.")
    if not params["stall"] > 0:
        found.append("stall: give the seconds without a byte after which a download counts as stalled.")
    if params["reserve_mib"] < 0:
        found.append("reserve_mib: give MiB from 0 on.")
    if (params["swarm"] or params["phase"] == "seed") and len(paths) != 1:
        found.append("models: a model is passed on alone.")
    return found


def wanted(files: Mapping[str, File], exclude: Sequence[str]) -> tuple[dict[str, File], list[str]]:
    """The files of use, and the names of those left out. SourceError: a name that leads out of the folder."""
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or "\n" in name:
            raise SourceError(f"The source holds a file named {name!r}, which would lie outside of the model's folder.")
    patterns = list(exclude)
    if any(name.endswith(".safetensors") for name in files):
        patterns += DUPLICATES
    out = sorted(name for name in files if any(_matches(name, pattern) for pattern in patterns))
    return {name: one for name, one in files.items() if name not in set(out)}, out


def _matches(name: str, pattern: str) -> bool:
    """As in a .gitignore: a pattern without a slash is for the file's own name or any folder above it."""
    if "/" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    return any(fnmatch.fnmatchcase(part, pattern) for part in name.split("/"))


def file_trouble(path: str) -> str:
    """Why the file with a token can't be used, one sentence; '' when it can."""
    try:
        facts = os.stat(path)
    except OSError as error:
        return f"The token file {path} can't be read: {error.strerror}."
    if facts.st_mode & 0o077:
        mode = f"{facts.st_mode & 0o777:04o}"
        return f"Other users may read the token file {path} (mode {mode}): chmod 0600 {path}."
    return "" if facts.st_size else f"The token file {path} is empty."


def hub_environment(endpoint: str, token_file: str, home: str, xet: bool) -> dict[str, str]:
    """The environment of a program that talks with a hub. `home` takes what the hub's client keeps for itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment.update(HF_HOME=home, HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")
    # Beside a pinned commit, what the client finds in a user's own cache or login is not asked for.
    environment["HF_TOKEN_PATH" if token_file else "HF_HUB_DISABLE_IMPLICIT_TOKEN"] = token_file or "1"
    if endpoint:
        environment["HF_ENDPOINT"] = endpoint.rstrip("/")
    if not xet:
        environment["HF_HUB_DISABLE_XET"] = "1"
    return environment


def python_with(module: str, candidates: Sequence[str]) -> str:
    """The first of these Pythons that has the module; SourceError names what to do."""
    tried = [python for python in dict.fromkeys([*candidates, sys.executable]) if python]
    for python in tried:
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        if os.path.exists(python) and run_command([python, "-c", look, module], Deadline(20)).returncode == 0:
            return python
    raise SourceError(
        f"No Python here has {module} (looked at {', '.join(tried)}): install it there, name another one in "
        "model_staging_pythons, or let model_staging_install make a virtual environment."
    )


def said(done: Completed) -> str:
    """The last line of what a program said, or why it said nothing; secrets masked."""
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    return mask_text(lines[-1][:300]) if lines else done.trouble or f"status {done.returncode}"


def list_hub(source: Source, exclude: Sequence[str], python: str, job: str, environment: Mapping[str, str]) -> Listing:
    """Ask the hub. SourceError: one sentence."""
    asked: dict[str, Any] = {"do": "list", "repository": source.where, "revision": source.revision}
    answer = ask_client("hub_client", python, job, environment, **asked)
    if "error" in answer:
        text = answer["error"]
        raise SourceError(text if answer.get("permanent") else f"The hub can't be asked for {source.where}: {text}.")
    files = {name: File(int(one["size"]), one["sha256"]) for name, one in answer["files"].items()}
    use, out = wanted(files, exclude)
    return Listing(use, answer["commit"], answer["xet"], out)


def ask_client(
    name: str, python: str, job: str, environment: Mapping[str, str], seconds: float = LIST_SECONDS, **request: Any
) -> dict[str, Any]:
    """Run one of the programs beside this module to its end, and return its answer."""
    command, answer = client(name, python, job, **request)
    done = run_command(command, Deadline(seconds), environment)
    try:
        with open(answer, encoding="utf-8") as file:
            value = json.load(file)
        return dict(value)
    except (OSError, ValueError):
        return {"error": said(done), "permanent": False}


def client(name: str, python: str, job: str, **request: Any) -> tuple[list[str], str]:
    """The command line of one of the programs, written into the job's folder with its request; and its answer file."""
    program = os.path.join(job, f"{name}.py")
    path = os.path.join(job, f"{name}-{request.get('do', 'copy')}.json")
    answer = f"{path}.answer"
    if os.path.exists(answer):
        os.unlink(answer)
    write_private(program, source_of(name))
    write_private(path, json.dumps({**request, "answer": answer}))
    return [python, program, path], answer


@functools.cache
def source_of(name: str) -> str:
    """The text of one of the programs, from wherever this package was loaded (files, an archive, memory).

    Remembered: a worker outlives an archive that it was loaded from.
    """
    text = background.text_of(CLIENTS[name])
    if not text:
        raise SourceError(f"The program {name} did not come along to this host.")
    return text


def list_path(folder: str, exclude: Sequence[str]) -> Listing:
    """Walk a mount, in a child: one whose server is gone hangs. SourceError: one sentence."""
    look = (
        "import json, os, sys\nfound = {}\nif not os.path.isdir(sys.argv[1]): sys.exit(3)\n"
        "for above, _, names in os.walk(sys.argv[1], followlinks=True):\n"
        "    for name in names:\n"
        "        path = os.path.join(above, name)\n"
        "        found[os.path.relpath(path, sys.argv[1])] = os.stat(path).st_size\n"
        "print(json.dumps(found))"
    )
    done = run_command([sys.executable, "-c", look, folder], Deadline(LIST_SECONDS))
    if done.returncode == 3:
        raise SourceError(f"There is no model folder {folder}; mount it, or correct the model's source.")
    if done.returncode != 0:
        raise SourceError(f"{folder} can't be listed: {said(done)}.")
    use, out = wanted({name: File(int(size)) for name, size in json.loads(done.stdout).items()}, exclude)
    return Listing(use, left_out=out)


def list_rsync(source: Source, exclude: Sequence[str], shell: str) -> Listing:
    """A dry run of rsync into an empty folder. SourceError: one sentence."""
    with tempfile.TemporaryDirectory() as empty:
        command = ["rsync", "--dry-run", "--no-human-readable", "--out-format=%l %n", "--8-bit-output", "-rLt"]
        done = run_command([*command, *rsync_shell(source, shell), f"{source.where}/", empty], Deadline(LIST_SECONDS))
    if done.returncode is None and "could not be started" in done.trouble:
        raise SourceError("This host has no rsync, which the model's source asks for: install the package rsync.")
    if done.returncode != 0:
        raise SourceError(f"{source.where} can't be listed by rsync: {said(done)}.")
    files = {}
    for line in done.stdout.splitlines():
        size, _, name = line.partition(" ")
        if size.isdigit() and name and not name.endswith("/"):
            files[name] = File(int(size))
    use, out = wanted(files, exclude)
    return Listing(use, left_out=out)


def rsync_shell(source: Source, shell: str) -> list[str]:
    return [] if source.where.startswith("rsync://") else ["--rsh", shell]


def list_rclone(source: Source, exclude: Sequence[str], config: str) -> Listing:
    """rclone lsjson. SourceError: one sentence."""
    command = ["rclone", "lsjson", "--recursive", "--files-only", "--no-modtime", "--no-mimetype"]
    done = run_command([*command, *rclone_config(config), source.where], Deadline(LIST_SECONDS))
    if done.returncode is None and "could not be started" in done.trouble:
        raise SourceError("This host has no rclone, which the model's source asks for: install the package rclone.")
    if done.returncode != 0:
        raise SourceError(f"{source.where} can't be listed by rclone: {said(done)}.")
    use, out = wanted({one["Path"]: File(int(one["Size"])) for one in json.loads(done.stdout)}, exclude)
    return Listing(use, left_out=out)


def rclone_config(config: str) -> list[str]:
    return ["--config", config] if config else []


def spread(files: Mapping[str, int], parts: int) -> list[list[str]]:
    """The files in at most `parts` lists of about the same number of bytes, none of them empty."""
    lists: list[list[str]] = [[] for _ in range(max(1, parts))]
    weights = [0] * len(lists)
    for name in sorted(files, key=lambda one: (-files[one], one)):
        lightest = weights.index(min(weights))
        lists[lightest].append(name)
        weights[lightest] += files[name] + 1
    return [one for one in lists if one]
