"""Carries ``gpu_host`` to a host and runs one of its functions there, over one exec and nothing on disk.

An ordinary module is wrapped into a zip archive with Ansible's own module library, which costs the host 0.13 CPU
seconds to import and the control node as much to build. ``gpu_host`` needs nothing of that. What the pinned
interpreter gets on its standard input is a compressed text (a program and the sources that it imports) and after it
the call in JSON, so that no parameter stands on a command line. On its command line is BOOTSTRAP, always the same.
(A program on standard input itself would be read line by line, which takes 50 ms for one long line.)

Beside the sources goes what this interpreter compiled of them: a host of the same Python (3.11 and 3.11, say) need not
compile, which would be a third of a reset's CPU time there.
"""

from __future__ import annotations

import ast
import base64
import fcntl
import json
import marshal
import re
import sys
import zlib
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

PACKAGE = "gpu_host"

BOOTSTRAP = (
    "import sys,zlib;d=zlib.decompressobj();"
    "program,_,sources=d.decompress(sys.stdin.buffer.read()).partition(b'\\0');exec(program)"
)

# Runs on the host, on Python >= 3.9. Whatever the called code prints goes to stderr: stdout carries the result alone.
_PROGRAM = f"""\
if sys.version_info < (3, 9):
    sys.stdout.write('{{"failed": true, "msg": "Python %d.%d is too old on this host; set ansible_python_interpreter '
                     'to Python 3.9 or newer."}}\\n' % sys.version_info[:2])
    sys.exit(1)
import json, marshal, os
from importlib.machinery import ModuleSpec
from importlib._bootstrap_external import MAGIC_NUMBER

class Sources:
    # importlib.abc, the base class for this, would cost 11 ms to import.
    def __init__(self, files, compiled):
        self.files, self.compiled = files, compiled
    def find_spec(self, name, path=None, target=None):
        if name in self.files:
            return ModuleSpec(name, self, is_package=name == {PACKAGE!r})
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        code = self.compiled.get(name)
        if code:
            exec(marshal.loads(code), module.__dict__)
        else:
            exec(compile(self.files[name], '<' + name + '>', 'exec', dont_inherit=True), module.__dict__)
    def get_source(self, name):
        return self.files[name]

result_file = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
files, _, compiled = sources.partition(b'\\0')
same = compiled[:len(MAGIC_NUMBER)] == MAGIC_NUMBER and sys.implementation.name == {sys.implementation.name!r}
sys.meta_path.insert(0, Sources(json.loads(files), marshal.loads(compiled[len(MAGIC_NUMBER):]) if same else {{}}))
try:
    call = json.loads(d.unused_data)
    __import__({PACKAGE!r} + '.' + call['module'])
    run = sys.modules[{PACKAGE!r} + '.' + call['module']].run
    text = json.dumps(run(call['params'], check_mode=call['check_mode'], diff=call['diff']))
except Exception as error:
    import traceback
    text = json.dumps({{'failed': True, 'exception': traceback.format_exc(),
                       'msg': 'The code failed on this host, %s: %s' % (type(error).__name__, error)}})
result_file.write(text + '\\n')
result_file.flush()
"""


def modules(package_folder: Path, entry: str, at_once: bool = False) -> dict[str, str]:
    """The sources by module name of what ``gpu_host.<entry>`` imports of its own package, itself and all of those.

    With ``at_once`` without what is imported only when it is needed, inside a function.
    """
    found = {"": (package_folder / "__init__.py").read_text(encoding="utf-8")}
    wanted = [entry]
    while wanted:
        name = wanted.pop()
        file = package_folder / f"{name}.py"
        if name in found or not file.exists():
            continue
        found[name] = file.read_text(encoding="utf-8")
        tree = ast.parse(found[name])
        for node in tree.body if at_once else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                wanted += [node.module] if node.module else [alias.name for alias in node.names]
    return {f"{PACKAGE}.{name}" if name else PACKAGE: text for name, text in found.items()}


def sources(package_folder: Path, entry: str, compiled: bool = True) -> bytes:
    """The program with ``modules`` as text, and ``compiled`` where they are imported at once; all compressed."""
    parts = [_PROGRAM.encode(), json.dumps(modules(package_folder, entry)).encode()]
    if compiled:
        codes = {
            name: marshal.dumps(compile(text, f"<{name}>", "exec", dont_inherit=True))
            for name, text in modules(package_folder, entry, at_once=True).items()
        }
        parts.append(MAGIC_NUMBER + marshal.dumps(codes))
    return zlib.compress(b"\0".join(parts), 9)


def cached_sources(package_folder: Path, entry: str, run_folder: Path) -> bytes:
    """``sources``, built once per ansible run: each task of each host is a process of its own (a fork).

    ``run_folder`` lives as long as the run (Ansible's local tmp), so the cache can't go stale.
    """
    cache = run_folder / f"{PACKAGE}.{entry}"
    try:
        with (run_folder / f"{PACKAGE}.{entry}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first hosts' forks all come at once: one builds for all of them
            if not cache.exists():
                passing = run_folder / f"{PACKAGE}.{entry}.new"
                passing.write_bytes(sources(package_folder, entry))
                passing.replace(cache)
        return cache.read_bytes()
    except OSError:
        return sources(package_folder, entry)  # no cache, same result


def program(built: bytes, module: str, params: dict[str, Any], *, check_mode: bool, diff: bool) -> bytes:
    """What calls ``gpu_host.<module>.run(params, check_mode=..., diff=...)`` and prints its result, for BOOTSTRAP."""
    call = {"module": module, "params": params, "check_mode": check_mode, "diff": diff}
    return built + json.dumps(call).encode()


def kept(package_folder: Path, entry: str, params: dict[str, Any]) -> dict[str, str]:
    """The same program to be kept on a host: ``bootstrap`` for the interpreter, ``program`` (base64) for its input.

    The same sources give the same bytes, which compiled code does not: what marshal writes depends on who else refers
    to a value.
    """
    built = program(sources(package_folder, entry, compiled=False), entry, params, check_mode=False, diff=False)
    return {"bootstrap": BOOTSTRAP, "program": base64.b64encode(built).decode()}


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
