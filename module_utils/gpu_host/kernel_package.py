"""Does a compiled kernel package work here: imported by the server's own Python, with code for this GPU.

"Could not load any common_ops library" is a headline; what is named here is the cause below it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import elf, fatbin, python_packages, readings
from .child import run_command
from .deadline import Deadline
from .finding import ERROR, INFO, WARNING, Finding, errors, rows, summary

# Torch first: its libraries hold the symbols that a kernel package leaves undefined.
_PROGRAM = r"""
import importlib, json, sys, traceback
sys.path[:] = [one for one in sys.path if one]
answer = {'torch': '', 'file': '', 'error': ''}
try:
    import torch
    answer['torch'] = torch.__version__
except ModuleNotFoundError as error:
    if error.name != 'torch':
        raise
try:
    answer['file'] = importlib.import_module(sys.argv[1]).__file__ or ''
except BaseException:
    answer['error'] = traceback.format_exc()
print('\n' + json.dumps(answer))
"""
_ELF_LINE = re.compile(r"\.sm_(\d+[af]?)\.cubin\b")
_PTX_LINE = re.compile(r"\.sm_(\d+[af]?)\.ptx\b")


@dataclass(frozen=True)
class Cause:
    """Why an import failed: `code` names the sort, `line` is the line that says so."""

    code: str
    line: str
    found: str
    cure: str


def cause(text: str, package: str = "sgl_kernel") -> Cause | None:
    """The inner cause in the text of a failed import; None when nothing known is in it."""
    for code, pattern, found, cure in _CAUSES:
        for line in text.splitlines():
            match = re.search(pattern, line)
            if match:
                words = {name: value or "" for name, value in match.groupdict().items()}
                words["package"] = package
                return Cause(code, line.strip()[:300], found.format(**words), cure.format(**words))
    return None


# The order decides: what stands further up explains what stands below.
_CAUSES = (
    (
        "other_torch",
        r"undefined symbol: (?P<symbol>\S*(?:3c10|2at[0-9]|5torch|THP|aoti_torch)\S*)",
        "The compiled library was built for another torch: this one has no {symbol}.",
        "Build the kernel package for this torch (role sgl_kernel), or install the torch that SGLang names.",
    ),
    (
        "libnuma_missing",
        r"(?P<library>libnuma\.so\S*): cannot open shared object file",
        "{library} is missing on this host.",
        "Install it: apt-get install libnuma1",
    ),
    (
        "driver_library_missing",
        r"(?P<library>libcuda\.so\S*): cannot open shared object file",
        "{library} is missing: there is no NVIDIA driver here, or the container was not given its libraries.",
        "Install the NVIDIA driver, or pass its libraries into the container.",
    ),
    (
        "cuda_library_missing",
        r"(?P<library>lib(?:nvrtc|cudart|cublas|cublasLt|cusparse|nvJitLink|nccl)\S*\.so\S*): cannot open shared",
        "{library} is missing: the package was built for another CUDA than this torch brings.",
        "Install a kernel package for the CUDA of this torch, or build it here (role sgl_kernel).",
    ),
    (
        "library_missing",
        r"(?P<library>\S+\.so\S*): cannot open shared object file",
        "{library} is missing on this host.",
        "Install the package that has {library}.",
    ),
    (
        "old_libc",
        r"version [`'](?P<symbol>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        "The library needs {symbol}, which this system's C or C++ library is too old for.",
        "Build the package on this system (role sgl_kernel), or use a newer one.",
    ),
    (
        "undefined_symbol",
        r"undefined symbol: (?P<symbol>\S+)",
        "The compiled library needs {symbol}, which nothing here offers.",
        "Build the kernel package on this host (role sgl_kernel).",
    ),
    (
        "no_cubin",
        r"no kernel image is available|CUDA error: invalid device function",
        "The package has no code for this GPU.",
        "Build it for this GPU (role sgl_kernel with sgl_kernel_compute_capability).",
    ),
    (
        "not_installed",
        r"No module named '(?P<name>(?P<root>sgl_kernel|[a-z_0-9]*kernel)[\w.]*)'",
        "{name} is not installed for this Python.",
        "Run the role sgl_kernel.",
    ),
)


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module kernel_package_info returns, the same in check mode. Changes nothing."""
    started = time.monotonic()
    deadline = Deadline(params["timeout"])
    number = params["compute_capability"] or _own_capability(deadline)
    result = inspect(params["python"], params["package"], number, deadline, params["cuobjdump"], params["environment"])
    return {**result, "changed": False, "seconds": round(time.monotonic() - started, 3)}


def _own_capability(deadline: Deadline) -> str:
    seen = readings.read(deadline.capped(20))
    return next((gpu.compute_capability for gpu in seen.gpus if gpu.compute_capability), None) or ""


def inspect(
    python: str,
    package: str,
    compute_capability: str,
    deadline: Deadline,
    cuobjdump: str = "",
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Import it, list its code, judge both. `usable` is the verdict."""
    extra = {name: str(value) for name, value in (environment or {}).items()}
    known = python_packages.ask(python, deadline.capped(30), (), extra.get("PYTHONPATH", ""), (package,))
    result: dict[str, Any] = {
        "usable": False,
        "package": package,
        "compute_capability": compute_capability,
        "versions": known.get("versions", {}),
        "torch": known.get("torch", {}),
        "folder": known.get("folders", {}).get(package, ""),
        "libraries": [],
        "architectures": [],
        "ptx": [],
        "tool": "",
        "imported": False,
        "import_error": "",
        "cause": "",
        "findings": [],
    }
    if known.get("error"):
        found = [
            Finding(ERROR, "python_unusable", str(known["error"]), "a Python with torch", "Correct sglang_python.")
        ]
        return _judged(result, found)
    found = _imported(result, python, package, deadline, extra)
    if result["folder"]:
        found += _code(result, package, compute_capability, deadline, cuobjdump, str(known.get("packages") or ""))
    return _judged(result, found)


def _judged(result: dict[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
    wrong = errors(found)
    result.update(findings=rows(found), usable=not wrong)
    result["cause"] = wrong[0].code if wrong else ""
    result["msg"] = summary(found) if wrong else f"{result['package']} works here."
    return result


def _imported(
    result: dict[str, Any], python: str, package: str, deadline: Deadline, extra: Mapping[str, str]
) -> list[Finding]:
    environment = {**os.environ, **extra, "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_command([python, "-c", _PROGRAM, package], deadline, environment)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        code = done.returncode or 0
        died = f"ended by signal {-code}" if code < 0 else done.trouble
        said = died or (lines[-1].strip() if lines else f"exit status {done.returncode}")
        answer = {"error": done.stderr or said}
        if not cause(done.stderr, package):
            text = f"The import of {package} failed: {said}."
            result["import_error"] = (done.stderr or said)[-4000:]
            return [Finding(ERROR, "import_failed", text, "an import without error", "See import_error.")]
    if not answer["error"]:
        result.update(imported=True, file=answer["file"])
        return []
    result["import_error"] = answer["error"][-4000:]
    known = cause(answer["error"], package)
    if known is None:
        last = [line for line in answer["error"].splitlines() if line.strip()][-1].strip()
        text = f"The import of {package} failed, and the cause is none that is known: {last[:300]}"
        return [Finding(ERROR, "import_failed", text, "an import without error", "See import_error.")]
    return [Finding(ERROR, known.code, known.found, "an import without error", known.cure)]


def _code(
    result: dict[str, Any], package: str, number: str, deadline: Deadline, cuobjdump: str, packages: str
) -> list[Finding]:
    """Machine code for this GPU in the libraries that it loads."""
    folder = result["folder"]
    libraries = python_packages.kernel_libraries(folder)
    loaded = python_packages.common_ops(libraries, number) or libraries
    result["libraries"] = libraries
    if not libraries:
        text = f"{folder} holds no compiled library: an editable install, or a wheel of another platform."
        return [Finding(ERROR, "not_compiled", text, "a wheel", "Build and install a wheel (role sgl_kernel).")]
    tool = find_cuobjdump(cuobjdump, packages)
    code, result["tool"], found = fatbin.NONE, tool or "own reader", []
    for relative in loaded:
        try:
            code |= listed(f"{folder}/{relative}", tool, deadline)
        except (OSError, elf.ElfError) as error:
            text = f"{folder}/{relative} can't be read: {error}."
            found.append(Finding(ERROR, "library_unreadable", text, "a whole library", "Install the package again."))
    result.update(architectures=sorted(code.sass), ptx=sorted(code.ptx), loaded=loaded)
    if found or not number:
        return found
    how = fatbin.runs_on(code, number)
    have = ", ".join(f"sm_{name}" for name in sorted(code.sass)) or "none"
    if how == "sass":
        return []
    if how == "ptx":
        text = f"{', '.join(loaded)} has no machine code for compute capability {number}, only PTX (code for: {have})."
        cure = "Expect a slow first start, or build it for this GPU (role sgl_kernel)."
        return [Finding(WARNING, "ptx_only", text, f"sm_{number.replace('.', '')}", cure)]
    if not code.sass and not code.ptx:
        text = f"{', '.join(loaded)} has no GPU code at all."
        severity = INFO if package != "sgl_kernel" else ERROR
        return [Finding(severity, "no_cubin", text, f"sm_{number.replace('.', '')}", "Build it for this GPU.")]
    text = f"{', '.join(loaded)} has no code for compute capability {number} (code for: {have})."
    cure = "Build it for this GPU: role sgl_kernel with CUDA 12.8 or newer."
    return [Finding(ERROR, "no_cubin", text, f"sm_{number.replace('.', '')}", cure)]


def find_cuobjdump(named: str, packages: str) -> str:
    """The tool that was named, of the toolkit, or of the PyPI package nvidia-cuda-cuobjdump; '' for none."""
    candidates = [named] if named else []
    candidates += [f"{folder}/cuobjdump" for folder in os.environ.get("PATH", "").split(":") if folder]
    candidates.append("/usr/local/cuda/bin/cuobjdump")
    if packages:
        candidates += sorted(glob.glob(f"{packages}/nvidia/*/bin/cuobjdump"), reverse=True)
    return next((one for one in candidates if os.path.isfile(one) and os.access(one, os.X_OK)), "")


def listed(path: str, tool: str, deadline: Deadline) -> fatbin.Code:
    """The code in a library, by cuobjdump where there is one and it answers, else by our own reader."""
    if tool:
        elves = run_command([tool, "--list-elf", path], deadline)
        texts = run_command([tool, "--list-ptx", path], deadline)
        if elves.returncode == 0 and texts.returncode == 0:
            return parse_listing(elves.stdout, texts.stdout)
    return fatbin.read(path)


def parse_listing(elves: str, texts: str) -> fatbin.Code:
    """The output of cuobjdump --list-elf and --list-ptx.

    >>> sorted(parse_listing('ELF file    1: a.1.sm_120a.cubin\\n', '').sass)
    ['120a']
    """
    return fatbin.Code(frozenset(_ELF_LINE.findall(elves)), frozenset(_PTX_LINE.findall(texts)))
