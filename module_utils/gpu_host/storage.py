"""Files that are there as a whole or not at all; those of the state folder private, and never reached through a link.

What lies there (environments of servers, the journal of kills) is read back later by root, so nobody else may have
written it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,127}")


class StorageError(Exception):
    """A file of the state folder can't be used; the text says which, why and what to do."""


def safe_name(name: str, what: str) -> str:
    """`name` itself when it can be a file name of ours; StorageError when it could lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"The {what} {name!r} can't be a file name: use letters, digits and . _ - @ only, and begin with a letter "
            "or digit."
        )
    return name


def private_folder(path: str) -> str:
    """Make `path` (its parent too, where missing) a folder that only we can write to, mode 0700, and return it."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(f"The folder {path} can't be used: {error.strerror}; give another state folder.") from error
    try:
        facts = os.fstat(number)
        if facts.st_uid != os.geteuid():
            raise StorageError(
                f"The folder {path} belongs to uid {facts.st_uid}, not to uid {os.geteuid()} that runs this; give "
                "another state folder."
            )
        if stat.S_IMODE(facts.st_mode) & 0o077:
            os.fchmod(number, 0o700)
    finally:
        os.close(number)
    return path


def write_private(path: str, text: str) -> None:
    """Replace the file as a whole, mode 0600, on disk before this returns. OSError when that fails."""
    replace_file(path, text, 0o600)
    sync_folder(os.path.dirname(path))


def replace_file(path: str, content: str | bytes, mode: int | None = None, uid: int = -1, gid: int = -1) -> None:
    """Replace the file as a whole (a link itself, never what it points to), the content on disk. OSError: it stays.

    ``mode`` None is that of any new file. Nobody can read the new content who could not in the end.
    """
    folder, name = os.path.split(path)
    passing = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    number = os.open(passing, flags, 0o666 if mode is None else 0o600)
    try:
        try:
            write_all(number, content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
            if (uid, gid) != (-1, -1):
                os.fchown(number, uid, gid)
            if mode is not None:
                os.fchmod(number, mode)
            os.fsync(number)
        finally:
            os.close(number)
        os.rename(passing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise


def replace_content(path: str, content: str | bytes) -> None:
    """As ``replace_file``, owner and mode of the file kept; another name of it stays as it was."""
    facts = os.stat(path)
    owner = (facts.st_uid, facts.st_gid) if os.geteuid() == 0 else (-1, -1)
    replace_file(path, content, stat.S_IMODE(facts.st_mode), *owner)


def write_all(number: int, data: bytes) -> None:
    """Write everything to the file descriptor."""
    while data:
        data = data[os.write(number, data) :]


def sync_folder(path: str) -> None:
    """Make a rename or a new file in the folder outlast a power cut."""
    number = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def text_of(path: str, last: int = 0) -> str:
    """What a file says, or its ``last`` bytes; '' where it can't be read."""
    try:
        with open(path, "rb") as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def dict_of(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        value = json.loads(text_of(path))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_private(path: str, most_bytes: int = 64 << 20) -> bytes:
    """The file's content. OSError: missing, or a link; StorageError: another user could have written it."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
            raise StorageError(f"{path} isn't a file of ours: another user could have written it; move it away.")
        parts = []
        while most_bytes > 0:
            part = os.read(number, min(most_bytes, 1 << 20))
            if not part:
                break
            parts.append(part)
            most_bytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(number)
