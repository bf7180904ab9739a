"""Starts SGLang's benchmark client without its imports, which take longer than a short measurement.

    python warm_client.py serve SOCKET TOKENIZER     imports the client once, then waits
    python warm_client.py program SOCKET TARGET      writes TARGET: a program to be used where a Python is expected

``TARGET SCRIPT ARGUMENTS..`` is then what ``python SCRIPT ARGUMENTS..`` would be, in a fork of the process that has
imported everything: with the caller's environment and output, and no state of an earlier call. It ends with its caller.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

# The caller's half: no imports that cost, and none of the server's packages.
PROGRAM = """#!{python} -IS
import array, json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({socket!r})
asked = json.dumps({{"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}})
link.sendmsg([asked.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
answer = link.recv(64)
sys.exit(int(answer) if answer else 1)
"""
MOST = 1 << 18


def write_program(path: Path, target: Path) -> None:
    target.write_text(PROGRAM.format(python=sys.executable, socket=str(path)))
    target.chmod(0o755)


def serve(path: Path, tokenizer: str) -> NoReturn:
    """For ever. `path` appears when all is imported."""
    import importlib

    importlib.import_module("sglang.benchmark.serving")
    transformers: Any = importlib.import_module("transformers")
    if tokenizer:
        transformers.AutoTokenizer.from_pretrained(tokenizer)
    passing = path.with_name(path.name + ".new")
    passing.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(passing))
    door.listen(8)
    passing.rename(path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        link, _ = door.accept()
        if os.fork() == 0:
            door.close()
            os._exit(keep(link))
        link.close()


def keep(link: socket.socket) -> int:
    """One call: the client in a process of its own, whose status is the answer; it is killed when the caller goes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, ancillary, _, _ = link.recvmsg(MOST, socket.CMSG_SPACE(8))
    if not data or not ancillary:
        return 1
    numbers = array.array("i")
    numbers.frombytes(ancillary[0][2])
    asked = json.loads(data)
    client = os.fork()
    if client == 0:
        os.setsid()
        link.close()
        os._exit(call(asked, numbers[0], numbers[1]))
    caller, ended = link.fileno(), os.pidfd_open(client)
    while True:
        ready, _, _ = select.select([caller, ended], [], [])
        if ended in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(client, 0)[1])
            with contextlib.suppress(OSError):
                link.send(str(status if status >= 0 else 128 - status).encode())
            return 0
        if not link.recv(64):
            os.killpg(client, signal.SIGKILL)


def call(asked: dict[str, Any], out: int, error: int) -> int:
    """The script to its end; its exit status."""
    for number, given in ((1, out), (2, error)):
        os.dup2(given, number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = list(asked["argv"])
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    if sys.argv[1] == "program":
        write_program(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        serve(Path(sys.argv[2]), sys.argv[3])
