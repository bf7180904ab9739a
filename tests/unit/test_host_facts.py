"""What is gathered about a host, from folders that look like /sys and /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gpu_host import cuda_toolkit, filesystems, host_facts, jit_caches, pci, versions
from gpu_host.deadline import Deadline


def config_space(*capabilities: tuple[int, int]) -> bytes:
    """4096 bytes with extended capabilities (id, ACS control register)."""
    space = bytearray(4096)
    at = 0x100
    for number, (identity, control) in enumerate(capabilities):
        following = at + 0x40 if number + 1 < len(capabilities) else 0
        space[at : at + 4] = (identity | 1 << 16 | following << 20).to_bytes(4, "little")
        space[at + 6 : at + 8] = control.to_bytes(2, "little")
        at = following
    return bytes(space)


@pytest.mark.parametrize(
    ("space", "bits"),
    [
        (
            config_space((0x0001, 0), (0x000D, 0x1D)),
            ("RequestRedirect", "CompletionRedirect", "SourceValidation", "UpstreamForwarding"),
        ),
        (config_space((0x000D, 0)), ()),
        (config_space((0x0001, 0)), ()),
        (bytes(4096), ()),
        (bytes(64), None),  # not root
        (b"", None),
        (b"\xff" * 4096, None),  # fell off the bus
    ],
)
def test_acs_bits_are_read_or_unknown_and_never_taken_for_off(space, bits):
    assert pci.acs_bits(space) == bits


def fake_sys(root: Path, config: bytes = b"", kind: str = "DMA-FQ") -> None:
    device = root / "devices/pci0000:40/0000:40:01.1/0000:41:00.0"
    group = root / "kernel/iommu_groups/14"
    for folder in (device, group, root / "bus/pci/devices"):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (group / "type").write_text(kind + "\n")
    (device / "iommu_group").symlink_to(group)
    (root / "bus/pci/devices/0000:41:00.0").symlink_to(device)
    (root / "bus/pci/devices/0000:40:01.1").symlink_to(device.parent)
    (device.parent / "config").write_bytes(config)


def test_a_gpu_is_placed_below_its_bridges_and_in_its_iommu_group(tmp_path):
    fake_sys(tmp_path, config_space((0x000D, 0x04)))
    where = pci.place("00000000:41:00.0", str(tmp_path))
    assert where == pci.Place(
        address="0000:41:00.0",
        bridges=(pci.Bridge("0000:40:01.1", ("RequestRedirect",)),),
        numa_node=1,
        iommu_group="14",
        iommu_type="DMA-FQ",
    )
    assert pci.iommu_groups(str(tmp_path)) == 1


def test_a_device_that_sysfs_does_not_show_has_no_place(tmp_path):
    assert pci.place("00000000:41:00.0", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("8080,9000-9010\n", [[8080, 8080], [9000, 9010]]), ("\n", []), ("", []), ("x,30000", [[30000, 30000]])],
)
def test_reserved_ports_are_read(text, found):
    assert host_facts.ranges(text) == found


def test_a_path_is_placed_on_the_innermost_mount_and_links_to_local_disks_are_followed(tmp_path):
    real = tmp_path / "disk/cache"
    real.mkdir(parents=True)
    (tmp_path / "home").symlink_to(real)
    table = [
        filesystems.Mount(1, "8:1", "/", "/", "ext4"),
        filesystems.Mount(2, "0:50", "/", str(tmp_path / "disk"), "nfs4"),
    ]
    assert host_facts.mount_facts(str(tmp_path / "home/x"), table)["type"] == "nfs4"
    assert host_facts.mount_facts("/etc", table) == {"path": "/etc", "point": "/", "type": "ext4", "local": True}
    assert host_facts.mount_facts("/etc", [])["local"] is None


def test_free_space_of_a_folder_that_is_not_there_yet_is_that_of_the_one_above(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.safetensors").write_bytes(bytes(3 << 20))
    table = filesystems.mounts()
    there, coming = host_facts.space_facts(
        {"model": str(tmp_path / "model"), "drafter": str(tmp_path / "new/one")}, table, Deadline(10)
    )
    assert (there["exists"], there["present_mib"]) == (True, 3)
    assert (coming["exists"], coming["present_mib"]) == (False, 0)
    assert there["free_mib"] == coming["free_mib"] == filesystems.free_mib(str(tmp_path))


def test_work_that_hangs_is_left_behind():
    started = time.monotonic()
    assert host_facts.in_child(lambda: time.sleep(60), Deadline(0.2)) is None
    assert time.monotonic() - started < 2
    assert host_facts.in_child(lambda: {"a": 1}, Deadline(5)) == {"a": 1}
    assert host_facts.in_child(lambda: 1 / 0, Deadline(5)) is None


def test_a_secrets_mode_and_owner_are_told_and_links_are_followed(tmp_path):
    key, link = tmp_path / "key", tmp_path / "link"
    key.write_text("f00ba4")
    key.chmod(0o640)
    link.symlink_to(key)
    found = host_facts.secret_facts([str(key), str(link), str(tmp_path / "none"), str(tmp_path)], "")
    assert [(one["kind"], one["mode"]) for one in found] == [
        ("file", "0640"),
        ("file", "0640"),
        ("missing", None),
        ("other", f"{tmp_path.stat().st_mode & 0o7777:04o}"),
    ]
    assert not any("f00ba4" in str(value) for value in found[0].values())
    assert found[0]["foreign"] is False


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file away needs root")
def test_a_secret_of_another_user_is_foreign(tmp_path):
    key = tmp_path / "key"
    key.write_text("x")
    os.chown(key, 65534, 65534)
    assert host_facts.secret_facts([str(key)], "")[0]["foreign"] is True
    assert host_facts.secret_facts([str(key)], "nobody")[0]["foreign"] is False


def test_memory_is_the_hosts_unless_a_control_group_limits_it(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    assert host_facts.memory_facts(str(tmp_path), str(tmp_path)) == {
        "total_mib": 16000,
        "available_mib": 8000,
        "limit_mib": 4096,
    }
    (tmp_path / "memory.max").write_text("max\n")
    assert host_facts.memory_facts(str(tmp_path), str(tmp_path))["limit_mib"] is None


def test_a_virtual_machine_tells_by_its_processor(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu hypervisor avx2\n")
    (tmp_path / "cmdline").write_text("ro root=/dev/x iommu=pt intel_iommu=on pcie_acs_override=downstream quiet\n")
    facts = host_facts.machine_facts(str(tmp_path), str(tmp_path))
    assert (facts["virtual_machine"], facts["kernel_arguments"]) == (
        True,
        ["iommu=pt", "intel_iommu=on", "pcie_acs_override=downstream"],
    )
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2\n")
    assert host_facts.machine_facts(str(tmp_path), str(tmp_path))["virtual_machine"] is False


# ---- JIT caches ----


def places(environment: dict[str, str]) -> dict[str, str]:
    return {cache.name: cache.path for cache in jit_caches.locations("/home/a", "a", environment)}


def test_caches_are_where_sglang_and_its_libraries_put_them():
    assert places({}) == {
        "sglang": "/home/a/.cache/sglang",
        "sglang_jit": "/home/a/.cache/sglang/jit",
        "flashinfer": "/home/a/.cache/flashinfer",
        "torch_extensions": "/home/a/.cache/torch_extensions",
        "tvm_ffi": "/home/a/.cache/tvm-ffi",
        "triton": "/home/a/.triton/cache",
        "inductor": "/tmp/torchinductor_a",
        "deep_gemm": "/home/a/.cache/sglang/deep_gemm",
    }


def test_variables_move_the_caches():
    moved = places(
        {
            "SGLANG_CACHE_DIR": "/fast/s",
            "FLASHINFER_WORKSPACE_BASE": "/fast/f",
            "TRITON_CACHE_DIR": "~/t",
            "TVM_FFI_CACHE_DIR": "relative",
        }
    )
    assert (moved["sglang"], moved["flashinfer"], moved["triton"]) == (
        "/fast/s",
        "/fast/f/.cache/flashinfer",
        "/home/a/t",
    )
    assert "tvm_ffi" not in moved  # depends on the folder that the server starts in


def test_a_cache_inside_another_one_is_looked_at_once():
    outer = [cache.name for cache in jit_caches.outermost(jit_caches.locations("/home/a", "a", {}))]
    assert outer == ["sglang", "flashinfer", "torch_extensions", "tvm_ffi", "triton", "inductor"]


# ---- versions and toolkits ----


@pytest.mark.parametrize(
    ("version", "than", "is_older"),
    [
        ("12.8", "12.9", True),
        ("12.9.86", "12.9", False),
        ("12.10", "12.9", False),
        ("2.14.1+cu130", "2.14.1", False),
        ("570.86.10", "570.86", False),
        ("13.0", "13", False),
        ("", "1", False),
        (None, "1", False),
        ("unknown", "1", False),
    ],
)
def test_versions_are_compared_as_numbers_and_an_unknown_one_is_not_older(version, than, is_older):
    assert versions.older(version, than) is is_older


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.36424714_0", "13.0.88"),
        ("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93", "12.8.93"),
        ("command not found", ""),
    ],
)
def test_the_compilers_version_is_read(text, version):
    assert cuda_toolkit.parse_version(text) == version


def test_a_jit_compilers_order_decides_which_nvcc_is_taken(tmp_path):
    for name, release in (("home", "12.8, V12.8.93"), ("path", "13.0, V13.0.88")):
        folder = tmp_path / name / "bin"
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        (folder / "nvcc").chmod(0o755)
    path = str(tmp_path / "path/bin")
    by_path = cuda_toolkit.find(Deadline(5), {}, path)
    by_home = cuda_toolkit.find(Deadline(5), {"CUDA_HOME": str(tmp_path / "home")}, path)
    assert by_path is not None and by_path.version == "13.0.88"
    assert by_home is not None and by_home.version == "12.8.93"


def test_an_nvcc_that_does_not_run_is_told_with_its_words(tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'libc too old' >&2; exit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    assert cuda_toolkit.find(Deadline(5), {}, str(tmp_path)) == cuda_toolkit.Nvcc(
        str(tmp_path / "nvcc"), "", "libc too old"
    )


@pytest.mark.parametrize(("capability", "name"), [("12.0", "120a"), ("9.0", "90a"), ("8.9", "89"), ("10.3", "103a")])
def test_the_architectures_own_target_is_named_as_nvcc_does(capability, name):
    assert cuda_toolkit.architecture(capability) == name
