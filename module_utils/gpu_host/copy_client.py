"""Copies a model's files from a mounted path, several at a time. A program of its own.

It runs as ``python copy_client.py REQUEST``: a mount whose server is gone hangs this process, not the one that watches
it. What has come of a file lies beside it as <name>.part, and is gone on with. The request is a JSON file: `source`,
`folder`, `files` (name -> size in bytes), `parallel` and `answer` (the file that takes the outcome).
"""

from __future__ import annotations

import errno
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PART = ".part"
_CHUNK = 16 << 20
_NOT_HERE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def move_bytes(source: int, target: int, offset: int) -> int:
    """Copy at most one chunk at `offset`, in the kernel where it can; the number of bytes, 0 at the end."""
    try:
        return os.sendfile(target, source, offset, _CHUNK)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    data = os.pread(source, _CHUNK, offset)
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return done


def copy(source: str, path: str, size: int) -> None:
    """One file. OSError: unreadable, no space, or not of that size any more."""
    if os.path.isfile(path) and os.stat(path).st_size == size:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(path + PART, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        there = os.fstat(writing).st_size
        if there > size:
            os.ftruncate(writing, 0)
            there = 0
        os.lseek(writing, there, os.SEEK_SET)
        while moved := move_bytes(reading, writing, there):
            there += moved
    finally:
        os.close(reading)
        os.close(writing)
    if there != size:
        os.unlink(path + PART)
        raise OSError(errno.EIO, f"it has {there} bytes now, not {size}", source)
    os.replace(path + PART, path)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    answer: dict[str, Any] = {}
    with ThreadPoolExecutor(max_workers=request["parallel"]) as pool:
        outcomes = [
            pool.submit(copy, os.path.join(request["source"], name), os.path.join(request["folder"], name), size)
            for name, size in request["files"].items()
        ]
    for outcome in outcomes:
        error = outcome.exception()
        if isinstance(error, OSError):
            answer = {"error": f"{error.filename}: {error.strerror}", "permanent": error.errno == errno.ENOSPC}
        elif error is not None:
            raise error
    passing = f"{request['answer']}.new"
    with open(passing, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(passing, request["answer"])
    return 1 if answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
