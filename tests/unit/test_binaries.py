"""ELF symbol tables and fat binaries, read from real files: made by the C compiler here, recorded from nvcc there."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from gpu_host import elf, fatbin, python_packages
from gpu_host.deadline import Deadline


def compile_library(folder: Path, name: str, source: str, *more: str) -> Path:
    """A shared library of C++ source."""
    file = folder / f"{name}.c"
    file.write_text(source)
    target = folder / f"lib{name}.so"
    command = ["gcc", "-shared", "-fPIC", "-Wl,--allow-shlib-undefined", "-o", target, file, f"-L{folder}", *more]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def test_a_library_tells_what_it_needs_and_what_it_offers(tmp_path):
    compile_library(tmp_path, "c10", "int _ZN3c103oldEv(void) { return 1; }")
    source = """int _ZN3c103oldEv(void); __attribute__((weak)) int maybe(void);
    int run(void) { return _ZN3c103oldEv() + (maybe ? maybe() : 0); }"""
    library = elf.read(str(compile_library(tmp_path, "ops", source, "-lc10")))
    assert "libc10.so" in library.needed
    assert "_ZN3c103oldEv" in library.undefined and "maybe" not in library.undefined
    assert "run" in library.defined and "run" not in library.undefined


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as an ELF"),
        (b"#!/bin/sh\n" * 20, "does not begin as an ELF"),
        (b"\x7fELF\x01\x01" + bytes(60), "not 64-bit"),
        (b"\x7fELF\x02\x01" + b"\xff" * 60, "no whole ELF"),
    ],
)
def test_a_file_that_is_no_library_is_refused_with_a_reason(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(elf.ElfError, match=words):
        elf.read(str(tmp_path / "x"))


def test_a_library_cut_short_is_refused(tmp_path):
    whole = compile_library(tmp_path, "ops", "int run(void) { return 1; }").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(elf.ElfError):
        elf.read(str(tmp_path / "cut"))


# ---- does a kernel package fit a torch ----


@pytest.fixture
def installed(tmp_path):
    """A torch with one function, and a kernel package that needs it and one that this torch lacks."""
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "sgl_kernel/sm100").mkdir(parents=True)
    compile_library(tmp_path / "torch/lib", "c10", "int _ZN3c103newEv(void) { return 1; }")
    source = """int _ZN3c103newEv(void); int _ZN3c103oldEv(void); int own(void);
    int run(void) { return _ZN3c103newEv() + _ZN3c103oldEv() + own(); }"""
    made = compile_library(tmp_path, "ops", source)
    made.rename(tmp_path / "sgl_kernel/sm100/common_ops.abi3.so")
    return tmp_path


def test_symbols_that_this_torch_lacks_are_named_and_those_of_others_are_not(installed):
    libraries = python_packages.kernel_libraries(str(installed / "sgl_kernel"))
    assert libraries == ["sm100/common_ops.abi3.so"]
    answer = python_packages.fit(str(installed / "sgl_kernel"), libraries, str(installed / "torch"))
    assert answer["missing"] == {"sm100/common_ops.abi3.so": ["_ZN3c103oldEv"]}
    assert answer["unreadable"] == {}


def test_a_library_that_can_not_be_read_says_so_instead_of_fitting(installed):
    broken = installed / "sgl_kernel/sm100/common_ops.abi3.so"
    broken.write_bytes(b"git-lfs pointer")
    answer = python_packages.fit(str(installed / "sgl_kernel"), ["sm100/common_ops.abi3.so"], str(installed / "torch"))
    assert list(answer["unreadable"]) == [str(broken)]


def test_libraries_that_nothing_offers_are_found_missing(tmp_path):
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libnvrtc.so.13").touch()
    wanted = ["libc.so.6", "libm.so.6", "libnvrtc.so.13", "libnvrtc.so.12", "libnowhere.so.1"]
    assert python_packages.find_libraries(wanted, str(tmp_path), Deadline(10)) == ["libnowhere.so.1", "libnvrtc.so.12"]


@pytest.mark.parametrize(
    ("capability", "loaded"),
    [("9.0", ["sm90/common_ops.abi3.so"]), ("12.0", ["sm100/common_ops.abi3.so"]), ("", ["sm100/common_ops.abi3.so"])],
)
def test_the_library_that_is_loaded_follows_the_gpu(capability, loaded):
    libraries = ["flash_ops.abi3.so", "sm100/common_ops.abi3.so", "sm90/common_ops.abi3.so"]
    assert python_packages.common_ops(libraries, capability) == loaded


# ---- GPU code ----

# The first 64 bytes of an entry as nvcc 13.0 wrote them: kind, architecture, flags.
ENTRIES = {
    "120a": (2, 120, 0x1100011),
    "120": (2, 120, 0x1000011),
    "120f": (2, 120, 0x1200011),
    "90": (2, 90, 0x11),
    "90a": (2, 90, 0x100011),
    "100a": (2, 100, 0x1100011),
    "120a compressed": (2, 120, 0x1108011),
    "ptx 90": (1, 90, 0x8011),
    "ptx 90a": (1, 90, 0x108011),
}


def fat_library(tmp_path: Path, *names: str) -> Path:
    """A library with a section of fat binaries that holds these entries."""
    entries = b""
    for name in names:
        kind, number, flags = ENTRIES[name]
        head = struct.pack("<HHIQIIIIIIQ", kind, 0x101, 64, 32, 0, 0x40, 0x10008, number, 0, 0, flags)
        entries += head.ljust(64, b"\0") + b"\xab" * 32
    blob = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    numbers = ",".join(map(str, blob))
    source = f'__attribute__((section(".nv_fatbin"), used)) static const unsigned char fat[] = {{{numbers}}}; int x;'
    return compile_library(tmp_path, "fat", source)


@pytest.mark.parametrize(
    ("names", "sass", "ptx"),
    [
        (["120a", "90a"], {"120a", "90a"}, set()),
        (["120", "120f", "90"], {"120", "120f", "90"}, set()),
        (["120a compressed", "ptx 90"], {"120a"}, {"90"}),
        (["ptx 90a"], set(), {"90a"}),
    ],
)
def test_architectures_are_read_from_the_fat_binaries(tmp_path, names, sass, ptx):
    assert fatbin.read(str(fat_library(tmp_path, *names))) == fatbin.Code(frozenset(sass), frozenset(ptx))


def test_a_library_without_gpu_code_has_none(tmp_path):
    assert fatbin.read(str(compile_library(tmp_path, "plain", "int x;"))) == fatbin.NONE


@pytest.mark.parametrize(
    ("sass", "ptx", "capability", "how"),
    [
        ({"120a"}, set(), "12.0", "sass"),
        ({"120f"}, set(), "12.1", "sass"),
        ({"120a"}, set(), "12.1", ""),  # 'a' is for its own alone
        ({"80"}, set(), "8.9", "sass"),
        ({"89"}, set(), "8.0", ""),
        ({"90a", "100a"}, set(), "12.0", ""),
        ({"90a"}, {"90"}, "12.0", "ptx"),
        (set(), {"90a"}, "12.0", ""),
        (set(), set(), "9.0", ""),
    ],
)
def test_code_runs_where_cuda_says_it_does(sass, ptx, capability, how):
    assert fatbin.runs_on(fatbin.Code(frozenset(sass), frozenset(ptx)), capability) == how
