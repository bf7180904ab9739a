"""Makes flashinfer and deep_gemm optional in an unpacked sglang 0.5.17, and stubs IPython: patch_site.py SITE."""

from __future__ import annotations

import sys
from pathlib import Path

SAMPLER = """    from flashinfer.sampling import (
        min_p_sampling_from_probs,
        top_k_top_p_sampling_from_probs,
    )
    from sgl_kernel import ("""
SAMPLER_OPTIONAL = """    try:  # bundle patch: flashinfer is optional with --sampling-backend pytorch
        from flashinfer.sampling import (
            min_p_sampling_from_probs,
            top_k_top_p_sampling_from_probs,
        )
    except ImportError:
        min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = None
    from sgl_kernel import ("""
DEEP_GEMM = "if is_cuda():\n    import deep_gemm\n"
DEEP_GEMM_OPTIONAL = """if is_cuda():
    try:  # bundle patch: deep_gemm is optional (DeepSeek sparse attention only)
        import deep_gemm
    except ImportError:
        deep_gemm = None
"""
SWITCHED_OFF = """    import os as _os  # bundle patch: honour sglang's switch, so no flashinfer JIT
    if _os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE","true").lower() in ("0","false"):
        raise ImportError("flashinfer switched off")
"""


def replace(path: Path, old: str, new: str) -> None:
    """Exactly one place may match: another version of the package must not be patched by guess."""
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{path}: expected one place to patch, found {text.count(old)}; is this sglang 0.5.17?")
    path.write_text(text.replace(old, new))


def main(site: Path) -> None:
    replace(site / "sglang/srt/layers/sampler.py", SAMPLER, SAMPLER_OPTIONAL)
    replace(site / "sglang/srt/layers/attention/dsa_backend.py", DEEP_GEMM, DEEP_GEMM_OPTIONAL)
    for name, module in (("elementwise", "norm"), ("sampling", "sampling")):
        line = f"    import flashinfer.{module} as _flashinfer_{module}\n"
        replace(site / f"sgl_kernel/{name}.py", line, SWITCHED_OFF + line)
    stub = site / "IPython"
    stub.mkdir(exist_ok=True)
    (stub / "__init__.py").touch()
    (stub / "display.py").write_text(
        "def display(*a, **k): pass\n\n\nclass HTML:\n    def __init__(self, *a, **k): pass\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
