"""Judges a planned launch: what is installed for the server against itself, the GPUs and the arguments. Pure.

Facts are those of python_packages.py; the speculation is judged by speculation.py, the models by eagle3.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import cuda_toolkit, versions
from .finding import ERROR, INFO, WARNING, Finding
from .python_packages import FLASHINFER_PACKAGES, KERNEL_PACKAGES, pinned

# Names in the environment that do nothing unless a local patch of SGLang reads them.
PATCH_VARIABLES = ("EAGLE3_PROFILE",)
# Lowest kernel package that the version's own start-up check lets pass (entrypoints/engine.py) is pinned in its wheel.
_INSTALL = "Run the role sgl_kernel, or install it in the server's Python: {python} -m pip install --no-deps {what}"

CODES = (
    "flashinfer_missing", "flashinfer_versions", "kernel_abi", "kernel_editable", "kernel_import_library",
    "kernel_missing", "kernel_not_compiled", "kernel_packages_both", "kernel_version", "port_in_use",
    "profile_without_patch", "python_unusable", "sglang_missing", "torch_cpu_only", "torch_cuda_old",
    "torch_driver_old", "torch_missing", "torch_not_pinned", "open_without_key",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is to be launched."""

    compute_capability: str = ""
    driver_version: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""  # that the server binds
    key: bool = False  # whether an API key is set
    built_kernel: Mapping[str, str] = field(default_factory=dict)  # how the installed kernel was built here, {} unknown


def check(packages: Mapping[str, Any], plan: Plan) -> list[Finding]:
    """Everything that is wrong or odd about what is installed."""
    if packages.get("error"):
        cure = "Correct sglang_python, or install SGLang for it."
        return [Finding(ERROR, "python_unusable", str(packages["error"]), "a Python with SGLang", cure)]
    found = _sglang(packages)
    found += _torch(packages, plan)
    found += _kernel(packages, plan)
    found += _flashinfer(packages, plan)
    found += _patches(packages, plan.environment)
    found += _exposure(plan)
    return found


def _have(packages: Mapping[str, Any], name: str) -> str:
    return str(packages["versions"].get(name) or "")


def _sglang(packages: Mapping[str, Any]) -> list[Finding]:
    if packages["folders"].get("sglang") or _have(packages, "sglang"):
        return []
    text = f"SGLang is not installed for {packages['asked']}."
    cure = f"Install it ({packages['asked']} -m pip install sglang), or correct sglang_python."
    return [Finding(ERROR, "sglang_missing", text, "sglang", cure)]


def _torch(packages: Mapping[str, Any], plan: Plan) -> list[Finding]:
    version = packages["torch"].get("version") or _have(packages, "torch")
    python = packages["asked"]
    if not version:
        text = f"torch is not installed for {python}."
        return [Finding(ERROR, "torch_missing", text, "torch", f"Install it: {python} -m pip install torch")]
    found = []
    cuda = packages["torch"].get("cuda") or ""
    need = cuda_toolkit.first_cuda(plan.compute_capability) if plan.compute_capability else ""
    if not cuda:
        text = f"torch {version} is built without CUDA."
        cure = f"Install a CUDA build: {python} -m pip install --force-reinstall torch=={version.split('+')[0]}"
        found.append(Finding(ERROR, "torch_cpu_only", text, "a CUDA build", cure))
    elif need and versions.older(cuda, need):
        text = f"torch {version} is built for CUDA {cuda}; compute capability {plan.compute_capability} needs {need}."
        found.append(Finding(ERROR, "torch_cuda_old", text, need, "Install a build of torch for a newer CUDA."))
    elif versions.older(plan.driver_version, cuda_toolkit.driver_for_cuda(cuda) or "0"):
        least = cuda_toolkit.driver_for_cuda(cuda)
        text = f"torch {version} is built for CUDA {cuda}, which needs driver {least}; it is {plan.driver_version}."
        cure = "Install a newer driver, or a build of torch for an older CUDA."
        found.append(Finding(ERROR, "torch_driver_old", text, least, cure))
    wanted = pinned(packages["requires"]).get("torch", "")
    if wanted and not versions.same_release(version, wanted):
        text = f"torch is {version}, SGLang {_have(packages, 'sglang')} is made for {wanted}."
        cure = "Install that one; with another, the kernel package must be built here (role sgl_kernel)."
        found.append(Finding(WARNING, "torch_not_pinned", text, wanted, cure))
    return found


def _kernel(packages: Mapping[str, Any], plan: Plan) -> list[Finding]:
    there = [name for name in KERNEL_PACKAGES if _have(packages, name)]
    python = packages["asked"]
    wanted = pinned(packages["requires"]).get(KERNEL_PACKAGES[0], "")
    install = _INSTALL.format(python=python, what=f"sglang-kernel=={wanted}" if wanted else "sglang-kernel")
    if len(there) > 1:
        both = " and ".join(f"{name} {_have(packages, name)}" for name in there)
        text = f"{both} are both installed; each overwrites files of the other's package sgl_kernel."
        cure = f"Remove both and install one: {python} -m pip uninstall -y {' '.join(there)}"
        return [Finding(ERROR, "kernel_packages_both", text, "one of them", cure)]
    kernel = packages.get("kernel")
    if not kernel:
        text = f"SGLang's kernel package (sgl_kernel) is not installed for {python}."
        return [Finding(ERROR, "kernel_missing", text, "sglang-kernel", install)]
    found = []
    if there and there[0] in packages["editable"]:
        text = f"{there[0]} is installed from a source folder (editable), which compiles no CUDA code."
        found.append(Finding(ERROR, "kernel_editable", text, "a wheel", "Build and install a wheel (role sgl_kernel)."))
    if there and wanted and there[0] == KERNEL_PACKAGES[0] and versions.older(_have(packages, there[0]), wanted):
        text = f"sglang-kernel is {_have(packages, there[0])}, SGLang {_have(packages, 'sglang')} is made for {wanted}."
        found.append(Finding(ERROR, "kernel_version", text, wanted, install))
    if not kernel["loaded"]:
        variant = "sm90" if plan.compute_capability == "9.0" else "sm100"
        text = f"{kernel['folder']} holds no compiled {variant}/common_ops, which this GPU's kernels are in."
        found.append(Finding(ERROR, "kernel_not_compiled", text, f"{variant}/common_ops", install))
    for library, symbols in sorted((kernel.get("missing") or {}).items()):
        text = (
            f"The kernel library {library} does not fit torch {packages['torch'].get('version')}: it needs "
            f"{symbols[0]}{f' and {len(symbols) - 1} more' if len(symbols) > 1 else ''}, so it was built for another."
        )
        cure = "Build the kernel package for this torch (role sgl_kernel), or install the torch that SGLang names."
        found.append(Finding(ERROR, "kernel_abi", text, "built for this torch", cure))
    for library in kernel.get("unfound") or []:
        found.append(_unfound(library))
    return found


def _unfound(library: str) -> Finding:
    text = f"The kernel package needs {library}, which is not on this host."
    cure = f"Install the package that has it (apt-file search {library})."
    if library.startswith("libnuma"):
        cure = "Install it: apt-get install libnuma1"
    elif library.startswith("libcuda.so"):
        cure = "Install the NVIDIA driver, or, in a container, pass its libraries in."
    elif re.match(r"lib(?:nvrtc|cudart|cublas|cublasLt|nvJitLink)\b", library):
        number = library.rpartition(".so.")[2].split(".")[0]
        cure = f"It is of CUDA {number}: install a kernel package for the CUDA of this torch, or that CUDA's libraries."
    return Finding(ERROR, "kernel_import_library", text, library, cure)


def _flashinfer(packages: Mapping[str, Any], plan: Plan) -> list[Finding]:
    there = {name: _have(packages, name) for name in FLASHINFER_PACKAGES if _have(packages, name)}
    main = there.get(FLASHINFER_PACKAGES[0], "")
    python = packages["asked"]
    if not main:
        backends = {
            str(plan.arguments.get(name) or "")
            for name in (
                "attention_backend",
                "prefill_attention_backend",
                "decode_attention_backend",
                "sampling_backend",
            )
        }
        if there or "flashinfer" in backends:
            text = "flashinfer-python is not installed" + (
                f", but {', '.join(there)} is." if there else ", and the arguments ask for FlashInfer."
            )
            cure = f"Install it: {python} -m pip install flashinfer-python"
            return [Finding(ERROR, "flashinfer_missing", text, "flashinfer-python", cure)]
        return []
    found = []
    # A build of jit-cache carries its CUDA in the version (0.7.2+cu130).
    if len({version.split("+")[0] for version in there.values()}) > 1:
        text = (
            "FlashInfer's packages differ: " + ", ".join(f"{name} {version}" for name, version in there.items()) + "."
        )
        others = " ".join(f"{name}=={main.split('+')[0]}" for name in there if name != FLASHINFER_PACKAGES[0])
        cure = f"Install one version of all: {python} -m pip install {others}"
        found.append(Finding(ERROR, "flashinfer_versions", text, main, cure))
    wanted = pinned(packages["requires"]).get(FLASHINFER_PACKAGES[0], "")
    if wanted and versions.older(main, wanted):
        text = f"flashinfer-python is {main}, SGLang {_have(packages, 'sglang')} refuses anything below {wanted}."
        cure = f"Install it: {python} -m pip install flashinfer-python=={wanted}"
        found.append(Finding(ERROR, "flashinfer_versions", text, wanted, cure))
    return found


def _patches(packages: Mapping[str, Any], environment: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in PATCH_VARIABLES:
        if environment.get(name, "") not in ("", "0") and packages["folders"].get("sglang"):
            if not packages["readers"].get(name):
                text = f"{name} is set, but nothing in {packages['folders']['sglang']} reads it."
                cure = "Apply the patch that does, or leave the variable out."
                found.append(Finding(WARNING, "profile_without_patch", text, "a patch that reads it", cure))
            else:
                text = f"{name} is read by a local patch: {', '.join(packages['readers'][name][:3])}."
                found.append(Finding(INFO, "profile_without_patch", text))
    return found


def _exposure(plan: Plan) -> list[Finding]:
    if not plan.host or plan.key or plan.host in ("localhost", "::1") or plan.host.startswith("127."):
        return []
    text = f"The server is to listen on {plan.host} without an API key: whoever reaches this host may use it."
    cure = "Set sglang_api_key_file, or leave sglang_host at 127.0.0.1."
    return [Finding(ERROR, "open_without_key", text, "a key or loopback", cure)]


def check_ports(holders: Sequence[Mapping[str, Any]], own: Sequence[int] = ()) -> list[Finding]:
    """Ports that are to be the server's and are somebody's; `own` are the pids of the server that is replaced."""
    found = []
    for holder in holders:
        if holder["pid"] in own:
            continue
        who = f"{holder['name']} (pid {holder['pid']})" if holder["pid"] else holder["name"]
        text = f"Port {holder['port']} is held by {who}."
        cure = "End it (a server of ours: playbooks/reset.yml), or choose another sglang_port."
        found.append(Finding(ERROR, "port_in_use", text, "a free port", cure))
    return found
