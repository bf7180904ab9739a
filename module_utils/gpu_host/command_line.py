"""What a command line runs, an interpreter and its options taken off."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass

_INTERPRETER = re.compile(r"^(?:python|pypy)[\d.]*t?$")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh")
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Program:
    """What an interpreter was asked to run: a module, a script or code, and the arguments after it."""

    module: str = ""
    script: str = ""
    code: str = ""
    arguments: tuple[str, ...] = ()


def file_name(path: str) -> str:
    """The last part of a path. (pathlib, which knows it too, costs a host 10 ms to import.)"""
    return path.rstrip("/").rpartition("/")[2]


def is_interpreter(path: str) -> bool:
    return bool(_INTERPRETER.match(file_name(path)))


def program(argv: tuple[str, ...]) -> Program:
    """What a command line runs, its interpreter and the interpreter's own options taken off."""
    if not argv:
        return Program()
    if not is_interpreter(argv[0]):
        return Program(script=argv[0], arguments=argv[1:])
    index = 1
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "-":
        word = argv[index]
        index += 1
        if word.startswith("--"):
            index += word == "--check-hash-based-pycs"
            continue
        for position, letter in enumerate(word[1:], start=1):
            if letter not in "mcWX":
                continue
            attached = word[position + 1 :]
            value = attached or (argv[index] if index < len(argv) else "")
            index += not attached
            if letter == "m":
                return Program(module=value, arguments=argv[index:])
            if letter == "c":
                return Program(code=value, arguments=argv[index:])
            break
    if index >= len(argv):
        return Program()
    return Program(script=argv[index], arguments=argv[index + 1 :])


def short_name(argv: tuple[str, ...]) -> str:
    """A name for people: the program and what it runs. No options and no further arguments: they may hold secrets."""
    run = program(argv)
    name = file_name(argv[0]) or argv[0]
    if run.module:
        name = f"{name} -m {run.module}"
    elif run.code.startswith("from multiprocessing."):
        name = f"{name} {run.code.split()[1]}"
    elif run.code:
        name = f"{name} -c"
    elif is_interpreter(argv[0]) and run.script:
        script = file_name(run.script)
        # Of a package that is run as a program, the package's name tells more.
        name = f"{name} {file_name(os.path.dirname(run.script)) if script == '__main__.py' else script}"
    elif name in SHELLS and len(argv) > 1 and not argv[1].startswith("-"):
        name = f"{name} {file_name(argv[1])}"
    elif argv[1:2] == ("serve",):
        name = f"{name} serve"
    return name[:_NAME_LENGTH]
