"""One Python program that carries ``gpu_host`` to a host and runs one of its functions there.

An ordinary module is wrapped into a zip archive with Ansible's own module library, which costs the host 0.13 CPU
seconds to import and the control node as much to build. ``gpu_host`` needs nothing of that: its sources travel
compressed in a program that the pinned interpreter reads from its standard input. Parameters are in the program too,
so they never stand on a command line.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

PACKAGE = "gpu_host"

# Runs on the host, on Python >= 3.9. Whatever the called code prints goes to stderr: stdout carries the result alone.
_PROGRAM = """\
import sys
if sys.version_info < (3, 9):
    sys.stdout.write('{"failed": true, "msg": "Python %%d.%%d is too old on this host; set ansible_python_interpreter '
                     'to Python 3.9 or newer."}\\n' %% sys.version_info[:2])
    sys.exit(1)
import base64, importlib.abc, importlib.util, json, os, zlib

class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, files):
        self.files = files
    def find_spec(self, name, path=None, target=None):
        if name in self.files:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))
    def is_package(self, name):
        return name == %(package)r
    def get_source(self, name):
        return self.files[name]

result_file = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
sys.meta_path.insert(0, Sources(json.loads(zlib.decompress(base64.b64decode(%(sources)r)))))
call = json.loads(base64.b64decode(%(call)r))
try:
    module = importlib.import_module('%(package)s.' + call['module'])
    result = module.run(call['params'], check_mode=call['check_mode'], diff=call['diff'])
    text = json.dumps(result)
except Exception as error:
    import traceback
    text = json.dumps({'failed': True, 'exception': traceback.format_exc(),
                       'msg': 'The reset code itself failed on this host, %%s: %%s' %% (type(error).__name__, error)})
result_file.write(text + '\\n')
result_file.flush()
"""


def sources(package_folder: Path) -> bytes:
    """The sources of ``gpu_host`` by module name, compressed (base64)."""
    files = {
        PACKAGE if path.stem == "__init__" else f"{PACKAGE}.{path.stem}": path.read_text(encoding="utf-8")
        for path in sorted(package_folder.glob("*.py"))
    }
    return base64.b64encode(zlib.compress(json.dumps(files).encode(), 9))


def cached_sources(package_folder: Path, run_folder: Path) -> bytes:
    """``sources``, built once per ansible run: each task of each host is a process of its own (a fork).

    ``run_folder`` lives as long as the run (Ansible's local tmp), so the cache can't go stale.
    """
    cache = run_folder / f"{PACKAGE}.sources"
    try:
        return cache.read_bytes()
    except OSError:
        pass
    built = sources(package_folder)
    try:
        descriptor, name = tempfile.mkstemp(dir=run_folder, prefix=f".{PACKAGE}-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(built)
        os.replace(name, cache)
    except OSError:
        pass  # no cache, same result
    return built


def program(built: bytes, module: str, params: dict[str, Any], *, check_mode: bool, diff: bool) -> bytes:
    """The program that calls ``gpu_host.<module>.run(params, check_mode=..., diff=...)`` and prints its result."""
    call = {"module": module, "params": params, "check_mode": check_mode, "diff": diff}
    return (
        _PROGRAM % {"package": PACKAGE, "sources": built, "call": base64.b64encode(json.dumps(call).encode())}
    ).encode()


def result(status: int, stdout: str, stderr: str, interpreter: str) -> dict[str, Any]:
    """What the program printed, or an error in the form and words in which Ansible tells it of any module.

    A login script may print before it, and ssh or sudo after it: the result is the last line that is a JSON object.
    """
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    text = f"{stdout}\n{stderr}"
    if re.search(rf"{re.escape(interpreter)}: (?:No such file or directory|not found|command not found)", text):
        message = (
            f"The module interpreter {interpreter!r} was not found. Consider overriding the configured interpreter "
            "path for this host (ansible_python_interpreter)."
        )
    else:
        last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it printed no error")
        message = (
            f"The module returned no result, exit status {status}: {last.strip()}. See module_stdout and module_stderr."
        )
    return {"failed": True, "msg": message, "module_stdout": stdout, "module_stderr": stderr, "rc": status}
