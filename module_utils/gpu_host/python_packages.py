"""What is installed for a server's Python, asked of that Python itself in one process and without importing torch.

Importing torch takes 5 s and needs a GPU to say more than the files do: versions stand in the packages' metadata and
in torch/version.py, and whether a compiled package fits this torch stands in the symbol tables (elf.py).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import elf
from .child import run_command
from .deadline import Deadline

# Both wheels install the import package sgl_kernel; the second replaced the first (sgl-kernel ended at 0.3.21).
KERNEL_PACKAGES = ("sglang-kernel", "sgl-kernel")
FLASHINFER_PACKAGES = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
_ASKED = (
    "sglang",
    "torch",
    "triton",
    "apache-tvm-ffi",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "transformers",
    *KERNEL_PACKAGES,
    *FLASHINFER_PACKAGES,
)

_IMPORTED = ("torch", "sgl_kernel", "sglang", "flashinfer")

# Runs on the server's Python (any from 3.8 on), standard library only. find_spec does not import the package.
_PROGRAM = r"""
import sys
sys.path[:] = [one for one in sys.path if one]  # not the folder that this happens to run in
import importlib.metadata as metadata, importlib.util, json, os, re
asked, needles, folders = json.loads(sys.argv[1])
answer = {'python': '%d.%d.%d' % sys.version_info[:3], 'prefix': sys.prefix, 'versions': {}, 'editable': [],
          'requires': [], 'folders': {}, 'torch': {}, 'readers': {}, 'tag': sys.implementation.cache_tag}
for name in asked:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    answer['versions'][name] = found.version
    origin = found.read_text('direct_url.json')
    try:
        if origin and json.loads(origin).get('dir_info', {}).get('editable'):
            answer['editable'].append(name)
    except ValueError:
        pass
    if name == 'sglang':
        answer['requires'] = [line for line in found.requires or [] if 'extra ==' not in line]
for name in folders:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    if places:
        answer['folders'][name] = places[0]
answer['packages'] = os.path.dirname(next(iter(answer['folders'].values()), ''))
folder = answer['folders'].get('torch')
if folder:
    try:
        text = open(os.path.join(folder, 'version.py'), encoding='utf-8').read()
    except (OSError, ValueError):
        text = ''
    for key, name in (('cuda', 'cuda'), ('version', '__version__'), ('hip', 'hip')):
        match = re.search(r"^%s\b[^=\n]*=\s*['\"]([^'\"]*)['\"]" % name, text, re.M)
        answer['torch'][key] = match.group(1) if match else ''
folder = answer['folders'].get('sglang')
patterns = {name: re.compile(r'\b%s\b' % re.escape(name)) for name in needles}
if folder and patterns:
    for at, inner, files in os.walk(folder):
        inner[:] = [one for one in inner if one not in ('test', '__pycache__', 'multimodal_gen')]
        for file in files:
            if not file.endswith('.py'):
                continue
            try:
                text = open(os.path.join(at, file), encoding='utf-8', errors='replace').read()
            except OSError:
                continue
            for name, pattern in patterns.items():
                if name in text and pattern.search(text):
                    answer['readers'].setdefault(name, []).append(os.path.relpath(os.path.join(at, file), folder))
json.dump(answer, sys.stdout)
"""


def ask(
    python: str,
    deadline: Deadline,
    readers_of: Sequence[str] = (),
    python_path: str = "",
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """What the interpreter says; {'error': one sentence} where it can't be asked.

    `readers_of` are names (of environment variables) whose readers are looked for in the installed sglang,
    `python_path` is the PYTHONPATH that the server is given, `packages` are import names to find besides.
    """
    if not os.access(python, os.X_OK) or not os.path.isfile(python):
        return {"error": f"There is no Python at {python}."}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if python_path:
        environment["PYTHONPATH"] = python_path
    done = run_command(
        [python, "-c", _PROGRAM, json.dumps([_ASKED, readers_of, [*_IMPORTED, *packages]])], deadline, environment
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = (done.trouble or done.stderr.strip().split("\n")[-1] or f"exit status {done.returncode}").strip()
        return {"error": f"The Python {python} can't be asked what is installed: {said}."}
    return answer


_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:==\s*([^\s;,()]+))?")


def pinned(requires: Iterable[str]) -> dict[str, str]:
    """Package (normal name) -> version, of the requirements that name exactly one version.

    >>> pinned(['flashinfer_python[cu13]==0.7.2', 'torchvision', 'torch==2.14.1; sys_platform == "linux"'])
    {'flashinfer-python': '0.7.2', 'torch': '2.14.1'}
    """
    found = {}
    for line in requires:
        match = _REQUIREMENT.match(line)
        if match and match.group(2):
            found[normal(match.group(1))] = match.group(2)
    return found


def kernel_requirement(requires: Iterable[str]) -> str:
    """The kernel package that SGLang's metadata asks for, with its version where one is named; '' where it has none.

    >>> kernel_requirement(['quack-kernels==0.6.5', 'sglang-kernel==0.4.10', 'torch'])
    'sglang-kernel==0.4.10'
    >>> kernel_requirement(['sgl_kernel @ https://example.org/sgl_kernel.whl'])
    'sgl-kernel'
    """
    lines = list(requires)
    versions = pinned(lines)
    for line in lines:
        match = _REQUIREMENT.match(line)
        name = normal(match.group(1)) if match else ""
        if name in KERNEL_PACKAGES:
            return f"{name}=={versions[name]}" if name in versions else name
    return ""


def normal(name: str) -> str:
    """PyPI's normal form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- does the compiled kernel package fit this torch ----

# Names that only torch's own libraries offer: of namespace c10, at, torch or caffe2 in C++, or its C entry points.
_TORCHS_OWN = re.compile(r"^(?:_ZNK?(?:3c10|2at|5torch|6caffe2)|_ZT[IVS]N?(?:3c10|2at|5torch)|aoti_torch_|THP)")


def kernel_libraries(folder: str) -> list[str]:
    """The compiled libraries of the package sgl_kernel, relative to its folder."""
    found = glob.glob(f"{folder}/**/*.so", recursive=True)
    return sorted(os.path.relpath(path, folder) for path in found)


def common_ops(libraries: Iterable[str], compute_capability: str) -> list[str]:
    """Those libraries that the package loads at import on a GPU of this capability (sgl_kernel/load_utils.py)."""
    wanted = "sm90" if compute_capability == "9.0" else "sm100"
    names = list(libraries)
    own = [name for name in names if re.match(rf"{wanted}/common_ops\.", name)]
    return own or [name for name in names if re.match(r"(?:\w+\.)?common_ops\.|common_ops\.", name)]


def fit(folder: str, libraries: Sequence[str], torch_folder: str) -> dict[str, Any]:
    """Each library's symbols against torch's libraries.

    `missing` has, by library, the torch symbols (up to five) that this torch does not offer; `needed` all shared
    libraries that are asked for by name, `unreadable` why a file could not be judged.
    """
    offered: set[str] = set()
    unreadable: dict[str, str] = {}
    torch_names: set[str] = set()
    for path in sorted(glob.glob(f"{torch_folder}/lib/lib*.so*")):
        name = os.path.basename(path)
        torch_names.add(name)
        try:
            offered |= elf.read(path).defined
        except (OSError, elf.ElfError) as error:
            unreadable[path] = str(error)
    missing: dict[str, list[str]] = {}
    needed: set[str] = set()
    for relative in libraries:
        try:
            library = elf.read(f"{folder}/{relative}")
        except (OSError, elf.ElfError) as error:
            unreadable[f"{folder}/{relative}"] = str(error)
            continue
        needed |= set(library.needed)
        lacking = sorted(name for name in library.undefined - offered if _TORCHS_OWN.match(name))
        if lacking:
            missing[relative] = lacking[:5]
    return {"missing": missing, "needed": sorted(needed - torch_names), "unreadable": unreadable}


def find_libraries(names: Iterable[str], packages: str, deadline: Deadline) -> list[str]:
    """Those of the shared libraries that neither the linker nor a wheel beside torch offers."""
    wanted = set(names)
    if not wanted:
        return []
    for tool in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if os.access(tool, os.X_OK):
            done = run_command([tool, "-p"], deadline.capped(10))
            wanted -= {line.split()[0] for line in done.stdout.splitlines() if line.startswith("\t")}
            break
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        wanted -= {name for name in wanted if folder and os.path.exists(f"{folder}/{name}")}
    for name in list(wanted):
        if (
            packages and (glob.glob(f"{packages}/nvidia/*/lib/{name}") or glob.glob(f"{packages}/*.libs/{name}"))
        ) or name.startswith(("ld-linux", "libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so")):
            wanted.discard(name)
    return sorted(wanted)


def facts(
    python: str,
    compute_capability: str,
    deadline: Deadline,
    readers_of: Sequence[str] = (),
    python_path: str = "",
) -> dict[str, Any]:
    """All of the above for one server's Python, as plain data."""
    answer = ask(python, deadline, readers_of, python_path)
    folders: Mapping[str, str] = answer.get("folders", {})
    kernel: dict[str, Any] | None = None
    if folders.get("sgl_kernel"):
        libraries = kernel_libraries(folders["sgl_kernel"])
        loaded = common_ops(libraries, compute_capability)
        kernel = {"folder": folders["sgl_kernel"], "libraries": libraries, "loaded": loaded}
        if folders.get("torch") and loaded:
            kernel.update(fit(folders["sgl_kernel"], loaded, folders["torch"]))
            kernel["unfound"] = find_libraries(kernel["needed"], answer.get("packages", ""), deadline)
    return {**answer, "asked": python, "kernel": kernel}
