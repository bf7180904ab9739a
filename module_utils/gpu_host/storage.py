"""Files of the state folder: private, whole or not there at all, and never reached through a link.

What lies there (environments of servers, the journal of kills) is read back later by root, so nobody else may have
written it.
"""

from __future__ import annotations

import os
import re
import stat

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
    folder, name = os.path.split(path)
    passing = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.new")
    number = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(number, text.encode("utf-8", "surrogateescape"))
            os.fsync(number)
        finally:
            os.close(number)
        os.rename(passing, path)
    except BaseException:
        os.unlink(passing)
        raise
    sync_folder(folder)


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
