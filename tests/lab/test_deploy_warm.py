"""JIT caches that a deployment seeds from one host to another, before the server starts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.host import Host
from tests.lab.test_deploy import Target

KERNELS = {
    "/root/.triton/cache/abc/kernel.cubin": "triton",
    "/root/.cache/flashinfer/0.7.2/batch/one.so": "flashinfer",
    "/root/.cache/tvm-ffi/two.so": "tvm",
    "/tmp/torchinductor_root/fxgraph/graph": "inductor",
}
LOCK = "/root/.cache/torch_extensions/py311_cu130/x/lock"
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    return tmp_path


def kernels(host: Host) -> dict[str, str]:
    words = " ".join([*KERNELS, LOCK])
    found = host.exec(f'for f in {words}; do [ ! -e $f ] || echo "$f $(cat $f)"; done').stdout
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in found.splitlines()}


def test_a_deployment_seeds_a_bare_host_from_one_alike_and_starts_cold_with_a_warning_where_it_differs(
    start_gpu_host: Callable[..., Host],
) -> None:
    built, bare = start_gpu_host(), Target(start_gpu_host())
    cold = bare.deploy(jit_cache_source=built.name)
    assert cold.status == 0 and cold.says(f"the first start on {bare.host.name} is cold"), cold.output
    assert cold.says("There is nothing to pack: no kernels are cached on this host yet."), cold.output
    for path, text in {**KERNELS, LOCK: ""}.items():
        built.write(path, text)
    bare.host.write("/usr/local/cuda/bin/nvcc", NVCC, "0755")
    other = bare.deploy(jit_cache_source=built.name, sglang_arguments={"tp_size": 2})
    assert other.status == 0, other.output
    assert other.says(f"{bare.host.name} differs from {built.name} in nvcc, so its JIT caches were not taken"), (
        other.output
    )
    assert kernels(bare.host) == {}
    bare.host.exec(["rm", "/usr/local/cuda/bin/nvcc"])
    warm = bare.deploy(jit_cache_source=built.name)
    assert warm.status == 0 and "is cold" not in warm.output, warm.output
    assert kernels(bare.host) == KERNELS
    started = int(bare.host.exec(["stat", "-c", "%Y", f"/proc/{bare.main_pid()}"]).stdout)
    changed = bare.host.exec(["stat", "-c", "%Z", *KERNELS]).stdout.split()
    assert max(int(moment) for moment in changed) <= started
    again = bare.deploy(jit_cache_source=built.name)
    assert (again.status, again.changed) == (0, 0), again.output
