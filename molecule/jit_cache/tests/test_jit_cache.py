"""After converge: the host alike has the caches without their locks, the other one has none."""

from __future__ import annotations

from typing import Any

import pytest

FILES = (
    "/root/.cache/sglang/triton/ABC/kernel.cubin",
    "/root/.cache/sglang/.cache/flashinfer/0.7.2/120a/cached_ops/norm/norm.so",
    "/tmp/torchinductor_root/fxgraph/entry",
)
LOCK = "/root/.cache/sglang/.cache/flashinfer/0.7.2/120a/cached_ops/norm/lock"


@pytest.mark.parametrize("path", FILES)
def test_caches_are_where_they_belong(host: Any, path: str) -> None:
    name = host.check_output("hostname")
    assert host.file(path).exists == (name != "gpu-3")
    if name == "gpu-2":
        assert host.file(path).content_string == "built on gpu-1"
        assert host.file(path).user == "root"


def test_the_lock_stayed_where_it_was(host: Any) -> None:
    assert host.file(LOCK).exists == (host.check_output("hostname") == "gpu-1")


def test_no_archive_is_left_where_it_was_unpacked(host: Any) -> None:
    left = host.file("/var/cache/gpu-host/jit-caches.tar.gz").exists
    assert left == (host.check_output("hostname") == "gpu-1")
