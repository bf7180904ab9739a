"""JIT caches carried between hosts that are alike, with folders that stand for hosts."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest
from gpu_host import arguments, jit_cache

KEY_FILES = {
    "sglang/jit/sm_120a/norm/build-1/deps-2/norm.so": b"machine code",
    "flashinfer/.cache/flashinfer/0.7.2/120a/cached_ops/sampling/sampling.so": b"more code",
    "tvm/norm_ab12/build.ninja": b"rule compile\n",
    "triton/ABC/kernel.cubin": b"\0\1\2",
    "inductor/fxgraph/x": b"graph",
}
LOCKS = (
    "flashinfer/.cache/flashinfer/0.7.2/120a/cached_ops/sampling/lock",
    "tvm/norm_ab12/lock",
    "tvm/norm_ab12/.ninja_lock",
    "sglang/jit/.staging-1/half.so",
    "sglang/deep_gemm/locks/a",
    "triton/ABC.lock",
    "inductor/tmpabc/x",
)


class Machine:
    """One host: a folder whose caches lie where the environment says. Both hosts use the same paths in turn."""

    def __init__(self, folder: Path, environment: dict[str, str], archive: Path) -> None:
        self.folder, self.environment, self.archive = folder, environment, archive

    def call(self, state: str, check_mode: bool = False, **given) -> dict:
        values = {name: spec.get("default") for name, spec in arguments.JIT_CACHE.items()}
        values.update(
            python=sys.executable,
            compute_capability="12.0",
            environment=self.environment,
            archive=str(self.archive),
            state=state,
        )
        return jit_cache.run({**values, **given}, check_mode=check_mode)

    def fill(self, names=KEY_FILES, content: bytes | None = None) -> None:
        for name in names:
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(KEY_FILES.get(name, b"") if content is None else content)

    def files(self) -> dict[str, bytes]:
        return {
            str(file.relative_to(self.folder)): file.read_bytes()
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        }

    def empty(self) -> None:
        """Another host with the same paths: bare."""
        os.rename(self.folder, f"{self.folder}.{time.monotonic_ns()}")
        self.folder.mkdir()


@pytest.fixture
def machine(tmp_path) -> Machine:
    folder = tmp_path / "caches"
    folder.mkdir()
    environment = {
        "SGLANG_CACHE_DIR": f"{folder}/sglang",
        "SGLANG_JIT_CACHE_DIR": f"{folder}/sglang/jit",
        "FLASHINFER_WORKSPACE_BASE": f"{folder}/flashinfer",
        "TVM_FFI_CACHE_DIR": f"{folder}/tvm",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
        "SGLANG_DG_CACHE_DIR": f"{folder}/sglang/deep_gemm",
    }
    return Machine(folder, environment, tmp_path / "archive/caches.tar.gz")


def test_a_host_without_kernels_is_bare_and_one_with_locks_alone_too(machine):
    assert machine.call("described")["bare"] is True
    machine.fill(LOCKS)
    assert machine.call("described")["bare"] is True
    machine.fill()
    described = machine.call("described")
    assert (described["bare"], described["files"], described["changed"]) == (False, len(KEY_FILES), False)


def test_caches_are_carried_to_a_host_alike_without_locks(machine):
    machine.fill()
    machine.fill(LOCKS)
    os.utime(machine.folder / "tvm/norm_ab12/build.ninja", (1_700_000_000, 1_700_000_000.9))
    packed = machine.call("packed")
    assert packed["changed"] is True
    machine.empty()
    unpacked = machine.call("unpacked")
    assert (unpacked["changed"], unpacked["new"], unpacked.get("failed")) == (True, len(KEY_FILES), None)
    assert machine.files() == KEY_FILES
    # Never newer than it was: ninja would build it again.
    assert (machine.folder / "tvm/norm_ab12/build.ninja").stat().st_mtime == 1_700_000_000


def test_a_second_time_nothing_changes(machine):
    machine.fill()
    machine.call("packed")
    assert machine.call("packed")["changed"] is False
    machine.empty()
    machine.call("unpacked")
    assert machine.call("unpacked")["changed"] is False


def test_a_cache_that_grew_is_packed_anew(machine):
    machine.fill()
    machine.call("packed")
    machine.fill(["triton/NEW/kernel.cubin"], b"new")
    assert machine.call("packed")["changed"] is True


def test_what_a_host_has_is_not_replaced(machine):
    machine.fill()
    machine.call("packed")
    machine.empty()
    machine.fill(["triton/ABC/kernel.cubin"], b"its own")
    assert machine.call("unpacked")["new"] == len(KEY_FILES) - 1
    assert machine.files()["triton/ABC/kernel.cubin"] == b"its own"


def test_check_mode_packs_and_unpacks_nothing(machine):
    machine.fill()
    assert machine.call("packed", check_mode=True)["changed"] is True
    assert not machine.archive.exists()
    machine.call("packed")
    machine.empty()
    assert machine.call("unpacked", check_mode=True)["new"] == len(KEY_FILES)
    assert machine.files() == {}


@pytest.mark.parametrize("field", jit_cache.FIELDS)
def test_a_host_that_differs_in_any_field_is_refused_and_gets_nothing(machine, field):
    machine.fill()
    machine.call("packed")
    rewrite(machine.archive, lambda head: head["key"].update({field: "another"}))
    machine.empty()
    answer = machine.call("unpacked")
    assert (answer["failed"], answer["refused"]) == (True, True)
    assert f"{jit_cache.FIELDS[field]} another there" in answer["msg"]
    assert machine.files() == {}


def rewrite(archive: Path, change) -> None:
    """The archive with another head."""
    with tarfile.open(archive, "r:gz") as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar if member.isreg()]
    with tarfile.open(archive, "w:gz") as tar:
        for member, content in members:
            if member.name == "key.json":
                head = json.loads(content)
                change(head)
                content = json.dumps(head).encode()
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def add_members(archive: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        old = [(member, tar.extractfile(member).read()) for member in tar if member.isreg()]
    with tarfile.open(archive, "w:gz") as tar:
        for member, content in [*old, *members]:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if content else None)


def test_an_archive_that_leads_elsewhere_writes_nothing_there(machine, tmp_path):
    machine.fill()
    machine.call("packed")
    link = tarfile.TarInfo("triton/link")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
    names = ("../evil", "triton/../../evil", "/evil", "unknown/evil", "triton//evil", "triton/lock")
    add_members(machine.archive, (link, b""), *((tarfile.TarInfo(name), b"x") for name in names))
    machine.empty()
    machine.call("unpacked")
    assert machine.files() == KEY_FILES
    assert not (machine.folder / "triton/link").exists() and not list(tmp_path.glob("**/evil"))


def test_a_cache_folder_that_leads_elsewhere_by_a_link_is_refused(machine, tmp_path):
    machine.fill()
    machine.call("packed")
    machine.empty()
    (tmp_path / "elsewhere").mkdir()
    (machine.folder / "triton").mkdir()
    (machine.folder / "triton/ABC").symlink_to(tmp_path / "elsewhere")
    answer = machine.call("unpacked")
    assert answer["failed"] and "leads elsewhere by a link" in answer["msg"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_is_no_archive_is_refused(machine):
    machine.archive.parent.mkdir()
    machine.archive.write_text("not an archive")
    answer = machine.call("unpacked")
    assert answer["failed"] and "is no archive of JIT caches" in answer["msg"]


def test_a_bare_host_has_nothing_to_pack(machine):
    answer = machine.call("packed")
    assert answer["failed"] and "nothing to pack" in answer["msg"]


def test_an_unknown_user_is_refused(machine):
    assert "There is no user nobody-here" in machine.call("described", user="nobody-here")["msg"]


@pytest.mark.skipif(os.getuid() != 0, reason="giving files to a user needs root")
def test_files_belong_to_the_servers_user(machine):
    machine.fill()
    machine.call("packed", user="nobody")
    machine.empty()
    machine.call("unpacked", user="nobody")
    owners = {file.stat().st_uid for file in machine.folder.rglob("*")}
    assert owners == {65534}


def test_the_processor_is_told_by_what_it_can_do(tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: AMD EPYC 9354\nflags\t\t: avx512f\n\nmodel name: x\n")
    one = jit_cache.processor(str(tmp_path))
    (tmp_path / "cpuinfo").write_text("model name\t: AMD EPYC 9354\nflags\t\t: avx2\n")
    assert one.startswith("AMD EPYC 9354 ") and jit_cache.processor(str(tmp_path)) != one
