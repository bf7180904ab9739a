"""Where the JIT compilers of a server keep what they built, and which of it another host can use.

SGLang 0.5.23 points Triton, torch inductor, FlashInfer, TileLang and the driver's own cache below SGLANG_CACHE_DIR
(srt/environ.py, third_party_cache_defaults) unless their variables are set; 0.5.17 leaves them where they are by
themselves. Both places are listed, since a host may have been served by both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cache:
    """`batons`: its builders wait for a lock file that a killed one leaves behind, for ever."""

    name: str
    path: str
    batons: bool


def _absolute(path: str, home: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.normpath(path) if path.startswith("/") else ""


def locations(home: str, user: str, environment: Mapping[str, str]) -> list[Cache]:
    """The caches of a server that runs as `user` with this environment, each path once, in a fixed order."""
    base = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    sglang = environment.get("SGLANG_CACHE_DIR") or f"{home}/.cache/sglang"
    flashinfer = environment.get("FLASHINFER_WORKSPACE_BASE")
    candidates = [
        ("sglang", sglang, True),
        ("sglang_jit", environment.get("SGLANG_JIT_CACHE_DIR") or f"{home}/.cache/sglang/jit", True),
        ("flashinfer", f"{flashinfer or home}/.cache/flashinfer", True),
        ("torch_extensions", environment.get("TORCH_EXTENSIONS_DIR") or f"{base}/torch_extensions", True),
        ("tvm_ffi", environment.get("TVM_FFI_CACHE_DIR") or f"{home}/.cache/tvm-ffi", True),
        (
            "triton",
            environment.get("TRITON_CACHE_DIR") or f"{environment.get('TRITON_HOME') or home}/.triton/cache",
            False,
        ),
        ("inductor", environment.get("TORCHINDUCTOR_CACHE_DIR") or f"/tmp/torchinductor_{user}", False),
        (
            "deep_gemm",
            environment.get("SGLANG_DG_CACHE_DIR") or environment.get("DG_JIT_CACHE_DIR") or f"{sglang}/deep_gemm",
            False,
        ),
    ]
    found: list[Cache] = []
    for name, path, batons in candidates:
        path = _absolute(path, home)
        if path and path != "/" and all(path != other.path for other in found):
            found.append(Cache(name, path, batons))
    return found


def outermost(caches: list[Cache]) -> list[Cache]:
    """Without those that lie inside another one: what is copied or looked at once."""
    return [
        cache
        for cache in caches
        if not any(cache.path.startswith(other.path + "/") for other in caches if other is not cache)
    ]
