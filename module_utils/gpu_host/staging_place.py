"""Where a staged model lies: its record, what is there now, and the switch from the staging folder.

A model is brought into ``<path>.staging-<revision>`` and gets its record there. Then one rename makes it <path>, so a
server finds the old model or the new one, never a half. The record says where the model came from and how long each
file is: that, the headers and the index are what is looked at to call a model unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import checkpoint
from .staging_sources import File, Listing
from .storage import replace_file, sync_folder

RECORD = ".model-staging.json"
MISSING, OTHER, DAMAGED, UNRECORDED, PRESENT = "missing", "other", "damaged", "unrecorded", "present"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MOST_RECORD = 64 << 20


@dataclass(frozen=True)
class Model:
    """What is asked for. `tokenizer` is false for a drafter, which uses the target's."""

    path: str
    source: str
    tokenizer: bool = True


@dataclass(frozen=True)
class Found:
    """What is there. `damaged` names the shards to fetch again; `bytes` counts the model's weights."""

    state: str
    reason: str
    record: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()
    bytes: int = 0


def read_record(folder: str) -> dict[str, Any] | None:
    """The record of a staged model; None where there is none that can be used."""
    try:
        with open(os.path.join(folder, RECORD), encoding="utf-8") as file:
            record = json.loads(file.read(_MOST_RECORD))
        Listing.of(record)
        return record if isinstance(record.get("source"), str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_record(folder: str, model: Model, listing: Listing, staged_at: str, via: str) -> None:
    """Write the record. OSError as from open(2)."""
    row = {"schema": 1, "source": model.source, "staged_at": staged_at, "via": via, **listing.row()}
    replace_file(os.path.join(folder, RECORD), json.dumps(row, indent=1))


def is_weight(name: str) -> bool:
    """Whether a server reads tensors from this file. Other files (config.json) may be edited on the host."""
    return name.endswith((".safetensors", ".bin", ".pt", ".pth"))


def wrong_files(folder: str, files: Mapping[str, File], weights_only: bool = False) -> list[str]:
    """Names of files that are missing or of another length. With `weights_only` others need only be there."""
    wrong = []
    for name, one in files.items():
        try:
            size = os.stat(os.path.join(folder, name)).st_size
        except OSError:
            wrong.append(name)
            continue
        if size != one.size and (is_weight(name) or not weights_only):
            wrong.append(name)
    return sorted(wrong)


def look(model: Model) -> Found:
    """What is at the model's path. Reads names, sizes and headers only."""
    if not os.path.exists(model.path):
        return Found(MISSING, f"There is no model at {model.path}.", None)
    outcome = checkpoint.inspect(model.path, tokenizer=model.tokenizer)
    record = read_record(model.path)
    damaged = tuple(sorted({*outcome["damaged"], *outcome["missing"]}))
    if not model.source:
        state = PRESENT if outcome["complete"] else DAMAGED
        return Found(state, outcome["msg"], record, damaged, outcome["bytes"])
    if record is None:
        return Found(UNRECORDED, f"{model.path} was not staged by this role.", None, damaged, outcome["bytes"])
    if record["source"] != model.source:
        reason = f"{model.path} was staged from {record['source']}."
        return Found(OTHER, reason, record, damaged, outcome["bytes"])
    wrong = wrong_files(model.path, Listing.of(record).files, weights_only=True)
    if wrong or not outcome["complete"]:
        reason = f"{model.path}: {wrong[0]} is missing or has another length." if wrong else outcome["msg"]
        return Found(DAMAGED, reason, record, tuple(sorted({*damaged, *wrong})), outcome["bytes"])
    return Found(PRESENT, "", record, (), outcome["bytes"])


def holds(found: Found, listing: Listing) -> bool:
    """Whether the model that is there is, by its record, what the source holds now."""
    if found.record is None:
        return False
    had = Listing.of(found.record)
    sizes = {name: one.size for name, one in listing.files.items()}
    return had.commit == listing.commit and {name: one.size for name, one in had.files.items()} == sizes


def staging_folder(path: str, label: str) -> str:
    return f"{path}.staging-{label}"


def above(path: str) -> str:
    """The nearest folder above the path that exists."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def staged_bytes(folder: str) -> tuple[int, int]:
    """Bytes of all files below the folder as far as they are on disk, and a number that any growth changes.

    A downloader may reserve a file's whole length at once: what has no blocks yet has not come yet.
    """
    total = beat = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.join(here, name))
                held = facts.st_blocks * 512
                total += min(facts.st_size, held) if held else 0 if facts.st_size > 4096 else facts.st_size
                beat += facts.st_size + held
    return total, beat


@contextlib.contextmanager
def path_lock(path: str) -> Iterator[int]:
    """A file beside the model that one staging at a time holds, also over hosts that share the file system.

    Yields its file number; taking it is for the caller (`try_lock`). It stays: removing it would let two hold it.
    """
    name = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.staging-lock")
    number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield number
    finally:
        os.close(number)


def try_lock(number: int) -> bool:
    """Take the lock now; False when somebody has it. A file system without locks has no other host to fear."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def link_unchanged(old: str, new: str, model: Model, found: Found, listing: Listing) -> int:
    """Give the staging folder the weights of the model at `old` that are the wanted ones already, as hard links.

    They are when both listings publish the same SHA-256, or when only some files of the same source are damaged.
    Returns their bytes.
    """
    if found.record is None or os.path.islink(old):
        return 0
    had = Listing.of(found.record).files
    same_source = found.record["source"] == model.source and found.record.get("commit", "") == listing.commit
    linked = 0
    for name, one in listing.files.items():
        before = had.get(name)
        if before is None or not is_weight(name) or name in found.damaged or before.size != one.size:
            continue
        if not (same_source or (one.sha256 and one.sha256 == before.sha256)):
            continue
        source, target = os.path.join(old, name), os.path.join(new, name)
        with contextlib.suppress(OSError):
            if os.lstat(source).st_size != one.size or os.path.lexists(target):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.link(source, target, follow_symlinks=False)
            linked += one.size
    return linked


def sync(folder: str) -> None:
    """Everything below the folder on disk: after a power cut the record must not be truer than the shards."""
    for here, _, names in os.walk(folder):
        for name in [*names, "."]:
            number = os.open(os.path.join(here, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def tidy(folder: str, keep: Mapping[str, File]) -> None:
    """Remove what the downloaders left in the staging folder besides the wanted files."""
    for here, folders, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(here, name)
            if os.path.relpath(path, folder) not in keep and os.path.relpath(path, folder) != RECORD:
                os.unlink(path)
        for name in folders:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(here, name))


def switch(staging: str, path: str) -> str:
    """Make the staging folder the model; returns where the old one is now, '' when there was none.

    One step wherever the file system can exchange two names; else the old one is moved away first.
    """
    if not os.path.lexists(path):
        os.rename(staging, path)
        sync_folder(os.path.dirname(path))
        return ""
    if _exchange(staging, path):
        sync_folder(os.path.dirname(path))
        return staging
    aside = f"{path}.replaced"
    discard(aside)
    os.rename(path, aside)
    try:
        os.rename(staging, path)
    except OSError:
        os.rename(aside, path)
        raise
    sync_folder(os.path.dirname(path))
    return aside


def _exchange(one: str, other: str) -> bool:
    """renameat2 with RENAME_EXCHANGE; False where kernel, libc or file system don't have it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), one)


def discard(path: str) -> None:
    """Remove a folder of ours, or a link without what it leads to."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def half_staged(path: str) -> list[str]:
    """Staging folders of this model that are left, of whatever revision."""
    folder, start = os.path.dirname(path), f"{os.path.basename(path)}.staging-"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(os.path.join(folder, name) for name in names if name.startswith(start))
