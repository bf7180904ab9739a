"""A model folder as Hugging Face lays it out: is it whole, and what is in it. Offline, changes nothing.

Whole means: a readable config.json, every shard that the index names, each shard as long as its own header says and
holding the tensors that the index says it holds, a tokenizer. That takes one small read a shard, so 600 GB are judged
in seconds. SHA-256 sums, which read everything, are compared when they are given. Links into a hub cache
(snapshots/<revision>/) are followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import safetensors
from .finding import ERROR, INFO, WARNING, Finding, errors, rows, summary
from .safetensors import Header, HeaderError

INDEX = "model.safetensors.index.json"
# What is left of a config.json that eagle3 changed; see there.
CONFIG_BACKUP = "config.json.before-context-length"
# Any of these sets makes a tokenizer that SGLang can load.
TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("tiktoken.model",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("tekken.json",),
)
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# hf download, curl and wget wrappers, rclone, aria2, browsers; rsync's temporary names are told by _RSYNC.
_PARTIAL = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download")
_RSYNC = re.compile(r"\.(?P<name>.+\.(?:safetensors|json|model|jinja|txt|py))\.[A-Za-z0-9]{6}")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_HEX = re.compile(r"[0-9a-f]{64}")
# Smallest stretch that a file system leaves out of a file (bytes) that is worth a word.
_HOLE = 1 << 20
_CHUNK = 8 << 20


class CheckpointError(Exception):
    """A model folder can't be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class Shard:
    """`bytes` is the file's size, `header` None where there is none to trust, `problem` '' for a whole file."""

    name: str
    bytes: int
    header: Header | None
    problem: str
    code: str = ""


def read_json(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of the folder. CheckpointError: missing, unreadable or malformed."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        what = "points to a file that is gone" if os.path.islink(path) else "is missing"
        if not os.path.isdir(folder):
            raise CheckpointError(f"There is no model folder {folder}.") from None
        raise CheckpointError(f"{path} {what}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from error
    if safetensors.is_pointer(data):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself.")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is malformed: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except ValueError as error:  # no UTF-8
        raise CheckpointError(f"{path} is malformed: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is malformed: it holds a {type(value).__name__}, not an object.")
    return value


def read_config(folder: str) -> dict[str, Any]:
    """The folder's config.json. CheckpointError: one sentence."""
    return read_json(folder, "config.json")


def look_at_shard(folder: str, name: str) -> Shard:
    """One shard judged by its header and size."""
    path = os.path.join(folder, name)
    try:
        size = os.stat(path).st_size
    except OSError as error:
        gone = "is a link to a file that is gone" if os.path.islink(path) else "is missing"
        if isinstance(error, FileNotFoundError):
            return Shard(name, 0, None, gone, "shard_missing")
        return Shard(name, 0, None, f"can't be read: {error.strerror}", "shard_unreadable")
    try:
        header = safetensors.read(path)
    except OSError as error:
        return Shard(name, size, None, f"can't be read: {error.strerror}", "shard_unreadable")
    except HeaderError as error:
        code = "git_lfs_pointer" if "git-lfs" in str(error) else "shard_damaged"
        return Shard(name, size, None, f"can't be used: {error}", code)
    if size < header.file_bytes:
        return Shard(name, size, header, f"is truncated: {size} of {header.file_bytes} bytes", "shard_truncated")
    if size > header.file_bytes:
        return Shard(name, size, header, f"has {size} bytes, its header tells {header.file_bytes}", "shard_too_long")
    return Shard(name, size, header, "")


def look_at_shards(folder: str, names: Sequence[str], threads: int = 16) -> list[Shard]:
    """All shards, several at a time: what takes time is the wait for a network file system."""
    if not names:
        return []
    with ThreadPoolExecutor(max_workers=min(threads, len(names))) as pool:
        return list(pool.map(lambda name: look_at_shard(folder, name), names))


def weight_map(folder: str, files: Iterable[str]) -> tuple[str, dict[str, str], int | None]:
    """The index: its file name ('' for none), tensor -> shard, and the total size in bytes that it states.

    CheckpointError: malformed, or it names a file outside of the folder.
    """
    indexes = sorted(name for name in files if name.endswith(".safetensors.index.json"))
    name = INDEX if INDEX in indexes else indexes[0] if len(indexes) == 1 else ""
    if not name:
        return "", {}, None
    index = read_json(folder, name)
    mapping = index.get("weight_map")
    path = os.path.join(folder, name)
    if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
        raise CheckpointError(f"{path} is malformed: weight_map maps no tensors to files.")
    for shard in set(mapping.values()):
        if not shard or shard.startswith("/") or ".." in shard.split("/"):
            raise CheckpointError(f"{path} is malformed: weight_map names {shard!r}, which is no file of the folder.")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return name, mapping, int(total) if isinstance(total, (int, float)) and not isinstance(total, bool) else None


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _expected_by_number(names: Iterable[str]) -> set[str]:
    """Where there is no index: the shards that the numbers in the names present call for."""
    expected = set()
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            count = int(match["count"])
            expected |= {f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    return expected


def _shard_findings(shards: Iterable[Shard]) -> list[Finding]:
    by_problem: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.problem:
            by_problem.setdefault(shard.code, []).append(shard)
    found = []
    for code, wrong in by_problem.items():
        if code == "shard_missing":
            gone = [shard.name for shard in wrong if "link" in shard.problem]
            text = f"{len(wrong)} shards are missing: {_some(shard.name for shard in wrong)}."
            if len(wrong) == 1:
                text = f"The shard {wrong[0].name} {wrong[0].problem}."
            elif gone:
                text += f" ({len(gone)} of them are links to files that are gone.)"
            found.append(Finding(ERROR, code, text, "every shard that the index names", "Stage the model again."))
            continue
        for shard in wrong:
            found.append(
                Finding(
                    ERROR,
                    code,
                    f"The shard {shard.name} {shard.problem}.",
                    f"{shard.header.file_bytes} bytes" if shard.header else "a safetensors file",
                    "Fetch this file with git lfs pull or hf download." if code == "git_lfs_pointer"
                    else "Delete this file and stage the model again.",
                )
            )  # fmt: skip
    return found


def _index_findings(
    index: str, mapping: Mapping[str, str], total: int | None, shards: Mapping[str, Shard]
) -> list[Finding]:
    """Index and headers against each other; only shards with a header count."""
    cure = "Stage index and shards again, from one revision."
    found = []
    absent: dict[str, list[str]] = {}
    for tensor, name in mapping.items():
        header = shards[name].header
        if header is not None and tensor not in header.tensors:
            absent.setdefault(name, []).append(tensor)
    for name, tensors in sorted(absent.items()):
        text = f"{index} puts {len(tensors)} tensors into {name} that it does not hold ({_some(tensors)})."
        found.append(Finding(ERROR, "index_disagrees", text, "one revision of all files", cure))
    extra = [
        tensor for name in set(mapping.values()) if (header := shards[name].header) is not None
        for tensor in header.tensors if mapping.get(tensor) != name
    ]  # fmt: skip
    if extra:
        text = f"The shards hold {len(extra)} tensors that {index} does not name there ({_some(extra)})."
        found.append(Finding(WARNING, "tensors_not_in_index", text, "one revision of all files", cure))
    headers = [shards[name].header for name in set(mapping.values())]
    held = sum(header.file_bytes - header.data_start for header in headers if header is not None)
    if total is not None and None not in headers and total != held:
        text = f"{index} states {total} bytes of tensors, the shards hold {held}."
        found.append(
            Finding(INFO, "total_size_differs", text, str(total), "Published indexes are often wrong in this.")
        )
    return found


@dataclass(frozen=True)
class _Files:
    """What lies in the folder: names of files (links followed), of links to nowhere, of left-over downloads."""

    names: frozenset[str]
    dangling: frozenset[str]
    partial: tuple[str, ...]
    pointers: frozenset[str]


def _list(folder: str) -> _Files:
    names, dangling, partial, pointers = set(), set(), [], set()
    for entry in os.scandir(folder):
        if entry.name.endswith(_PARTIAL) or _RSYNC.fullmatch(entry.name):
            partial.append(entry.name)
        elif entry.is_file():
            names.add(entry.name)
            if entry.stat().st_size < 1024 and not entry.name.endswith(".safetensors"):
                try:
                    with open(entry.path, "rb") as file:
                        if safetensors.is_pointer(file.read(64)):
                            pointers.add(entry.name)
                except OSError:
                    pass  # said where the file is needed
        elif entry.is_symlink() and not os.path.exists(entry.path):
            dangling.add(entry.name)
    # hf download keeps what it has of a file below the folder, or beside the snapshots of a hub cache.
    local, blobs = os.path.join(folder, ".cache", "huggingface", "download"), ""
    if os.path.basename(os.path.dirname(os.path.realpath(folder))) == "snapshots":
        blobs = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(folder))), "blobs")
    for below in (local, blobs, os.path.join(folder, ".~tmp~")):
        if below and os.path.isdir(below):
            partial += [
                os.path.relpath(os.path.join(below, name), folder)
                for name in sorted(os.listdir(below))
                if name.endswith(_PARTIAL) or below.endswith(".~tmp~")
            ]
    return _Files(frozenset(names), frozenset(dangling), tuple(sorted(partial)), frozenset(pointers))


def _config_findings(folder: str, config: Mapping[str, Any], files: _Files) -> list[Finding]:
    found = []
    if not config.get("architectures"):
        text = f"{folder}/config.json names no architecture."
        found.append(Finding(WARNING, "no_architecture", text, "architectures", "Compare it with the published file."))
    code = config.get("auto_map")
    values = code.values() if isinstance(code, dict) else ()
    # "repository--module.Class" is fetched from elsewhere; a list holds the slow and the fast tokenizer.
    named = {
        f"{str(value).split('.', 1)[0]}.py"
        for entry in values
        for value in (entry if isinstance(entry, list) else [entry])
        if value and "--" not in str(value)
    }
    missing = named - files.names
    if missing:
        text = f"{_some(missing)} in {folder} is missing, which config.json names under auto_map."
        found.append(
            Finding(ERROR, "remote_code_missing", text, _some(named), "Stage the *.py files of the model too.")
        )
    return found


def _tokenizer_findings(folder: str, files: _Files, needed: bool) -> list[Finding]:
    usable = files.names - files.pointers
    if any(usable.issuperset(wanted) for wanted in TOKENIZERS):
        return []
    text = f"{folder} has no tokenizer."
    return [
        Finding(
            ERROR if needed else INFO,
            "tokenizer_missing",
            text,
            " or ".join(" + ".join(wanted) for wanted in TOKENIZERS),
            "Stage the tokenizer's files too." if needed else "A drafter uses the target's.",
        )
    ]


def _partial_findings(folder: str, files: _Files, broken: set[str]) -> list[Finding]:
    """A left-over download means trouble when what it was to become isn't whole."""
    found = []
    for name in files.partial:
        match = _RSYNC.fullmatch(os.path.basename(name))
        base = match["name"] if match else os.path.splitext(os.path.basename(name))[0]
        # hf download names them by content, so there which file it was is not known.
        unknown = "/" in name
        wrong = base in broken or (unknown and bool(broken)) or not (unknown or base in files.names)
        text = f"{os.path.join(folder, name)} is an unfinished download"
        text += "." if wrong else ", though the model is whole."
        found.append(
            Finding(
                ERROR if wrong else WARNING,
                "half_staged" if wrong else "leftover_download",
                text,
                "no such file",
                "Finish staging the model before it is used." if wrong else "Delete it.",
            )
        )
    return found


def _holes(folder: str, shards: Iterable[Shard]) -> list[Finding]:
    """Space that a downloader reserved and never wrote reads as zeros, in a file of the right size."""
    found = []
    for shard in shards:
        if shard.problem:
            continue
        missing = hole_bytes(os.path.join(folder, shard.name))
        if missing >= _HOLE:
            text = f"{missing} bytes of {shard.name} were never written: they read as zeros."
            cure = "Compare its SHA-256, or stage it again."
            found.append(Finding(WARNING, "holes", text, "no holes", cure))
    return found


def hole_bytes(path: str) -> int:
    """Bytes of the file that have no space on disk; 0 where the file system does not tell."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        size, at, missing = os.fstat(number).st_size, 0, 0
        while at < size:
            hole = os.lseek(number, at, os.SEEK_HOLE)
            if hole >= size:
                break
            try:
                at = os.lseek(number, hole, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole to the end
                at = size
            missing += at - hole
        return missing
    except OSError:
        return 0
    finally:
        os.close(number)


# Checksums


def parse_manifest(text: str) -> dict[str, str]:
    """SHA-256 by file name, from `sha256sum` lines, BSD lines (`SHA256 (name) = hex`) or a JSON object.

    CheckpointError: nothing of the kind.
    """
    if text.lstrip().startswith("{"):
        try:
            pairs = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"The checksum file is malformed JSON: {error}.") from error
        sums = {str(name): str(value) for name, value in pairs.items()}
    else:
        sums = {}
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            bsd = re.fullmatch(r"SHA256 ?\((.+)\) ?= ?([0-9A-Fa-f]{64})", line.strip())
            plain = re.fullmatch(r"\\?([0-9A-Fa-f]{64})[ \t][ *]?(.+)", line.strip())
            if not (bsd or plain):
                raise CheckpointError(f"The checksum file holds the line {line.strip()[:80]!r}, which is no SHA-256.")
            name, value = (bsd[1], bsd[2]) if bsd else (plain[2], plain[1]) if plain else ("", "")
            sums[name] = value
    return normalized(sums)


def normalized(sums: Mapping[str, str]) -> dict[str, str]:
    """File name -> SHA-256 in lower case, `./` cut off. CheckpointError: a name or a sum that can't be."""
    result = {}
    for name, value in sums.items():
        name, value = re.sub(r"^(?:\./)+", "", str(name)), str(value).strip().lower().removeprefix("sha256:")
        if not _HEX.fullmatch(value):
            raise CheckpointError(f"The checksum of {name} is no SHA-256: {value[:80]!r}.")
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"The checksums name {name!r}, which is no file of the model folder.")
        result[name] = value
    return result


def hub_checksums(folder: str) -> dict[str, str]:
    """The SHA-256 of large files as the hub told it to `hf download`, from what that left beside them.

    In a hub cache a large file is a link to a blob named after its SHA-256; in a local folder the second line of
    .cache/huggingface/download/<file>.metadata is it. (Small files carry a git hash there, of another length.)
    """
    sums = {}
    for entry in os.scandir(folder):
        if entry.is_symlink():
            blob = os.path.basename(os.readlink(entry.path))
            if _HEX.fullmatch(blob):
                sums[entry.name] = blob
    below = os.path.join(folder, ".cache", "huggingface", "download")
    for name in os.listdir(below) if os.path.isdir(below) else ():
        if name.endswith(".metadata"):
            with open(os.path.join(below, name), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            if len(lines) > 1 and _HEX.fullmatch(lines[1].strip()):
                sums[name[: -len(".metadata")]] = lines[1].strip()
    return sums


def sha256(path: str, buffer: bytearray | None = None) -> str:
    """The file's SHA-256. OSError: it can't be read."""
    digest = hashlib.sha256()
    buffer = buffer if buffer is not None else bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def sums_of(folder: str, names: Sequence[str], threads: int) -> dict[str, str | None]:
    """The SHA-256 of each file, None where it can't be read; the largest first, hashing needs no interpreter lock."""

    def size(name: str) -> int:
        try:
            return os.stat(os.path.join(folder, name)).st_size
        except OSError:
            return 0

    own = threading.local()

    def one(name: str) -> str | None:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(_CHUNK)
        try:
            return sha256(os.path.join(folder, name), own.buffer)
        except OSError:
            return None

    ordered = sorted(names, key=size, reverse=True)
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(ordered) or 1))) as pool:
        return dict(zip(ordered, pool.map(one, ordered)))


def checksum_findings(
    folder: str, expected: Mapping[str, str], found: Mapping[str, str | None], optional: Iterable[str] = ()
) -> list[Finding]:
    """Sums compared. Names in `optional` may be absent: a published manifest lists files that nobody needs here."""
    result = []
    for name in sorted(expected):
        actual = found.get(name)
        if actual == expected[name]:
            continue
        path = os.path.join(folder, name)
        if actual is None:
            severity = WARNING if name in optional else ERROR
            text = f"{path} has a published SHA-256, but it can't be read here."
            result.append(Finding(severity, "checksum_unread", text, expected[name], "Stage the model again."))
            continue
        backup = os.path.join(folder, CONFIG_BACKUP)
        if name == "config.json" and os.path.exists(backup) and sha256(backup) == expected[name]:
            text = f"{path} was changed here (its context length), and its backup is the published file."
            result.append(Finding(INFO, "changed_here", text, expected[name]))
            continue
        text = f"The SHA-256 of {path} is {actual}, published is {expected[name]}."
        cure = "Delete this file and stage the model again."
        result.append(Finding(ERROR, "checksum_differs", text, expected[name], cure))
    return result


# The whole


def inspect(
    folder: str,
    *,
    tokenizer: bool = True,
    checksums: Mapping[str, str] | None = None,
    optional_checksums: Iterable[str] = (),
    threads: int = 0,
) -> dict[str, Any]:
    """Everything about one model folder, as `checkpoint_info` returns it. `threads` 0: by the host's cores."""
    began = time.monotonic()
    cores = os.cpu_count() or 1
    result: dict[str, Any] = {
        "path": folder, "exists": False, "complete": False, "findings": [], "msg": "", "architectures": [],
        "model_type": "", "dtype": "", "index": "", "shards": [], "bytes": 0, "tensors": 0, "missing": [],
        "damaged": [], "extra": [], "partial": [], "tokenizer_files": [], "chat_template": False, "checked_sha256": 0,
    }  # fmt: skip
    found: list[Finding] = []

    def done() -> dict[str, Any]:
        wrong = errors(found)
        whole = f"{folder} is whole: {len(result['shards'])} shards, {result['bytes']} bytes."
        result.update(
            complete=not wrong,
            findings=rows(found),
            msg=summary(found) if wrong else whole,
            seconds=round(time.monotonic() - began, 3),
        )
        return result

    try:
        files = _list(folder)
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        text = f"There is no model folder {folder}." if gone else f"{folder} can't be read: {error.strerror}."
        found.append(Finding(ERROR, "folder_missing", text, "a model folder", "Stage the model, or correct its path."))
        return done()
    result["exists"] = True

    try:
        config = read_config(folder)
        result["architectures"] = list(config.get("architectures") or [])
        result["model_type"] = str(config.get("model_type") or "")
        result["dtype"] = str(config.get("dtype") or config.get("torch_dtype") or "")
        found += _config_findings(folder, config, files)
    except CheckpointError as error:
        found.append(Finding(ERROR, "config", str(error), "a JSON object", "Stage config.json again."))

    mapping: dict[str, str] = {}
    index, total = "", None
    try:
        index, mapping, total = weight_map(folder, files.names | files.dangling)
    except CheckpointError as error:
        found.append(Finding(ERROR, "index", str(error), "weight_map", "Stage the index again."))
    present = {name for name in files.names | files.dangling if name.endswith(".safetensors")}
    wanted = set(mapping.values()) or _expected_by_number(present) or present
    extra = sorted(present - wanted)
    if mapping and extra:
        text = f"{_some(extra)} in {folder} belongs to no entry of {index}."
        found.append(
            Finding(WARNING, "extra_shards", text, "", "SGLang skips what the index does not name; delete it.")
        )
    if not mapping and not errors(found) and len(wanted) > 1:
        text = f"{folder} has {len(wanted)} shards and no {INDEX}."
        found.append(Finding(WARNING, "index_missing", text, INDEX, "Stage the index too."))
    shards = {shard.name: shard for shard in look_at_shards(folder, sorted(wanted | set(extra)))}
    needed = [shards[name] for name in sorted(wanted)]
    found += _shard_findings(needed)
    found += _shard_findings(shard for shard in map(shards.__getitem__, extra) if not mapping)
    found += _holes(folder, needed)
    if mapping:
        found += _index_findings(index, mapping, total, shards)
    if not wanted:
        other = sorted(name for name in files.names if name.endswith(_OTHER_WEIGHTS) and name != "training_state.pt")
        text = f"{folder} holds no safetensors files" + (f", only {_some(other)}." if other else ".")
        found.append(Finding(ERROR, "no_weights", text, "*.safetensors", "Stage the model's weights."))

    for name in sorted(files.dangling - present):
        text = f"{os.path.join(folder, name)} is a link to a file that is gone."
        found.append(Finding(ERROR, "dangling_link", text, "", "Stage the model again."))
    for name in sorted(files.pointers):
        text = f"{os.path.join(folder, name)} is a git-lfs pointer, not the file itself."
        found.append(Finding(ERROR, "git_lfs_pointer", text, "", "Fetch it with git lfs pull or hf download."))
    found += _tokenizer_findings(folder, files, tokenizer)
    broken = {shard.name for shard in needed if shard.problem} | set(files.dangling)
    if any(finding.code in ("config", "index", "tokenizer_missing") for finding in errors(found)):
        broken |= {"config.json", INDEX, *(name for wanted_files in TOKENIZERS for name in wanted_files)} - files.names
    found += _partial_findings(folder, files, broken)
    if "training_state.pt" in files.names:
        size = os.stat(os.path.join(folder, "training_state.pt")).st_size
        text = f"{folder}/training_state.pt ({size} bytes) is of no use to a server."
        found.append(Finding(INFO, "training_state", text, "", "Leave it out when staging."))

    if checksums:
        sums = sums_of(folder, sorted(checksums), threads or min(16, cores))
        result["checked_sha256"] = sum(value is not None for value in sums.values())
        found += checksum_findings(folder, checksums, sums, optional_checksums)

    result.update(
        index=index,
        shards=[
            {
                "name": shard.name, "bytes": shard.bytes, "tensors": len(shard.header.tensors) if shard.header else 0,
                "problem": shard.problem,
            }
            for shard in needed
        ],
        bytes=sum(shard.bytes for shard in needed),
        tensors=sum(len(shard.header.tensors) for shard in needed if shard.header),
        missing=[shard.name for shard in needed if shard.code == "shard_missing"],
        damaged=[shard.name for shard in needed if shard.problem and shard.code != "shard_missing"],
        extra=extra,
        partial=list(files.partial),
        tokenizer_files=sorted(
            files.names & ({*TOKENIZER_FILES} | {name for wanted_files in TOKENIZERS for name in wanted_files})
        ),
        chat_template=_has_chat_template(folder, files),
    )  # fmt: skip
    return done()


def _has_chat_template(folder: str, files: _Files) -> bool:
    if files.names & {"chat_template.jinja", "chat_template.json"}:
        return True
    try:
        return bool(read_json(folder, "tokenizer_config.json").get("chat_template"))
    except CheckpointError:
        return False


def run(params: Mapping[str, Any], *, check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module `checkpoint_info` returns; it never changes anything."""
    folder = params["path"]
    try:
        sums: dict[str, str] = {}
        optional: set[str] = set()
        if params["verify_hub"]:
            try:
                sums = hub_checksums(folder)
            except OSError:
                sums = {}  # no folder: inspect says so
        if params["sha256_manifest"]:
            try:
                with open(params["sha256_manifest"], encoding="utf-8") as file:
                    published = parse_manifest(file.read())
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise CheckpointError(
                    f"The checksum file {params['sha256_manifest']} can't be read: {reason}."
                ) from error
            # Weights are needed anyway; a README in the manifest is not.
            optional = {name for name in published if not name.endswith(".safetensors")}
            sums.update(published)
        given = normalized(params["sha256"] or {})
        sums.update(given)
        optional -= set(given)
    except CheckpointError as error:
        return {"changed": False, "failed": True, "refused": True, "msg": str(error)}
    outcome = inspect(
        folder, tokenizer=params["tokenizer"], checksums=sums, optional_checksums=optional, threads=params["threads"]
    )
    return {"changed": False, **outcome}
