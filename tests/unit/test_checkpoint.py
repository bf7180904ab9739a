from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_host import checkpoint, safetensors
from gpu_host.checkpoint import CheckpointError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model_folders import MODELS, header_of, integers, write_drafter, write_safetensors, write_target

SECOND = "model-00002-of-00003.safetensors"


def look(folder: Path, **params: Any) -> dict[str, Any]:
    defaults = {"path": str(folder), "tokenizer": True, "sha256": {}, "sha256_manifest": "", "verify_hub": False,
                "threads": 2}  # fmt: skip
    return checkpoint.run({**defaults, **params})


def codes(result: dict[str, Any], *severities: str) -> list[str]:
    return [row["code"] for row in result["findings"] if row["severity"] in (severities or ("error", "warning"))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_target(tmp_path / "model")


def test_a_whole_model_is_complete_and_counted(model: Path) -> None:
    result = look(model)
    assert result["complete"] and result["findings"] == []
    assert (len(result["shards"]), result["tensors"]) == (3, 12)
    assert result["bytes"] == sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert result["tokenizer_files"] == ["tokenizer.json", "tokenizer_config.json"] and result["chat_template"]
    assert result["architectures"] == ["LlamaForCausalLM"] and result["index"] == "model.safetensors.index.json"
    assert not result["changed"] and 0 <= result["seconds"] < 5


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4998801360\n")


def zero_start(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


def html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html>502 Bad Gateway</html>")


SHARD_FAULTS: list[tuple[Callable[[Path], object], str, str]] = [
    (os.unlink, "shard_missing", "is missing"),
    (cut, "shard_truncated", "is truncated"),
    (lambda path: cut(path, path.stat().st_size - 100), "shard_damaged", "ends within its header (100 of"),
    (lambda path: path.write_bytes(b""), "shard_damaged", "it is empty"),
    (add, "shard_too_long", "its header tells"),
    (pointer, "git_lfs_pointer", "git-lfs pointer"),
    (zero_start, "shard_damaged", "begins with zeros"),
    (html, "shard_damaged", "does not begin with a safetensors header"),
]


@pytest.mark.parametrize(("fault", "code", "says"), SHARD_FAULTS, ids=[case[2] for case in SHARD_FAULTS])
def test_a_broken_shard_is_named_with_what_is_wrong(model: Path, fault: Any, code: str, says: str) -> None:
    fault(model / SECOND)
    result = look(model)
    assert not result["complete"] and codes(result) == [code]
    assert SECOND in result["msg"] and says in result["msg"]
    assert (result["missing"] or result["damaged"]) == [SECOND]


def test_many_missing_shards_are_one_sentence(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    result = look(model)
    assert codes(result) == ["shard_missing"] and result["msg"].startswith("3 shards are missing: model-00001-of-00003")


def test_without_an_index_the_numbers_in_the_names_tell_what_is_missing(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    (model / SECOND).unlink()
    result = look(model)
    assert result["missing"] == [SECOND] and codes(result) == ["shard_missing", "index_missing"]


def test_shards_of_another_revision_are_told_by_their_tensors(model: Path) -> None:
    write_safetensors(model / SECOND, {"model.layers.2.weight_0": ("BF16", (4,), None), "other": ("BF16", (4,), None)})
    result = look(model)
    assert codes(result) == ["index_disagrees", "tensors_not_in_index"]
    assert f"3 tensors into {SECOND}" in result["msg"] and "model.layers.2.weight_1" in result["msg"]
    assert "total_size_differs" in codes(result, "info")


def test_a_shard_that_the_index_does_not_name_is_extra_and_harmless(model: Path) -> None:
    write_safetensors(model / "consolidated.safetensors", {"a": ("BF16", (4,), None)})
    result = look(model)
    assert result["complete"] and result["extra"] == ["consolidated.safetensors"] and codes(result) == ["extra_shards"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", '{"architectures": [}', "config.json is malformed: Expecting value at line 1, column 20."),
        ("config.json", "", "config.json is malformed: Expecting value at line 1, column 1."),
        ("config.json", "[]", "config.json is malformed: it holds a list, not an object."),
        ("model.safetensors.index.json", "{}", "weight_map maps no tensors to files"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors'"),
        ("config.json", '{"architectures": ["A"], "auto_map": {"AutoConfig": "code_x.X"}}', "code_x.py"),
    ],
)  # fmt: skip
def test_malformed_files_are_one_sentence(model: Path, name: str, content: str, says: str) -> None:
    (model / name).write_text(content)
    result = look(model)
    assert not result["complete"] and says in result["msg"] and result["msg"].count("is malformed") <= 1


def test_a_missing_config_or_folder_is_said(model: Path) -> None:
    (model / "config.json").unlink()
    assert "config.json is missing" in look(model)["msg"]
    nowhere = look(model / "nowhere", verify_hub=True)
    assert not nowhere["exists"] and nowhere["msg"].startswith(f"There is no model folder {model}/nowhere.")
    assert not look(model / SECOND)["exists"]


def test_a_target_needs_a_tokenizer_and_a_drafter_none(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert codes(look(model)) == ["tokenizer_missing"]
    (model / "tiktoken.model").write_text("x")
    assert look(model)["complete"]
    drafter = write_drafter(tmp_path / "drafter", MODELS["tiny_drafter"])
    (drafter / "training_state.pt").write_bytes(b"x" * 100)
    result = look(drafter, tokenizer=False)
    assert result["complete"] and codes(result, "info") == ["tokenizer_missing", "training_state"]


def test_pytorch_weights_alone_are_no_model(model: Path) -> None:
    for path in [*model.glob("*.safetensors"), model / "model.safetensors.index.json"]:
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    result = look(model)
    assert codes(result) == ["no_weights"] and "only pytorch_model.bin" in result["msg"]


@pytest.mark.parametrize(
    "partial",
    [
        f"{SECOND}.incomplete",
        f"{SECOND}.part",
        f"{SECOND}.aria2",
        f".{SECOND}.Ab3dE6",
        ".cache/huggingface/download/x.incomplete",
    ],
)
def test_an_unfinished_download_is_an_error_only_where_the_model_is_not_whole(model: Path, partial: str) -> None:
    path = model / partial
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    whole = look(model)
    assert whole["complete"] and codes(whole) == ["leftover_download"] and whole["partial"] == [partial]
    (model / SECOND).unlink()
    broken = look(model)
    assert sorted(codes(broken)) == ["half_staged", "shard_missing"] and partial in broken["msg"]


def test_a_pointer_in_place_of_the_tokenizer_is_named(model: Path) -> None:
    pointer(model / "tokenizer.json")
    result = look(model)
    assert (
        codes(result) == ["git_lfs_pointer", "tokenizer_missing"]
        and "tokenizer.json is a git-lfs pointer" in result["msg"]
    )


def test_space_that_was_reserved_and_never_written_is_told(model: Path) -> None:
    path = write_safetensors(
        model / SECOND, {f"model.layers.2.weight_{i}": ("BF16", (1 << 20,), None) for i in range(4)}
    )
    size = path.stat().st_size
    os.truncate(path, size - (6 << 20))
    os.truncate(path, size)
    if not checkpoint.hole_bytes(str(path)):
        pytest.skip("this file system keeps no holes")
    result = look(model)
    assert result["complete"] and "holes" in codes(result, "warning")


# Hub cache


def hub_cache(model: Path) -> Path:
    """The folder as `hf download` lays it out in its cache."""
    cache = model.parent / "models--org--name"
    snapshot, blobs = cache / "snapshots" / ("a" * 40), cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        blob = blobs / (digest if path.suffix == ".safetensors" else digest[:40])
        os.replace(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_hub_cache_is_read_through_its_links_and_compared_with_their_names(model: Path) -> None:
    snapshot = hub_cache(model)
    assert look(snapshot)["complete"]
    result = look(snapshot, verify_hub=True)
    assert result["complete"] and result["checked_sha256"] == 3
    blob = (snapshot / SECOND).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert look(snapshot)["complete"], "a flipped bit is not in the header"
    flipped = look(snapshot, verify_hub=True)
    assert codes(flipped) == ["checksum_differs"] and SECOND in flipped["msg"]
    (blob.parent / "123.incomplete").write_bytes(b"")
    assert look(snapshot)["partial"] == ["../../blobs/123.incomplete"]
    blob.unlink()
    gone = look(snapshot)
    assert "is a link to a file that is gone" in gone["msg"] and gone["missing"] == [SECOND]


def test_a_local_download_is_compared_with_what_was_left_beside_it(model: Path) -> None:
    notes = model / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    digest = hashlib.sha256((model / SECOND).read_bytes()).hexdigest()
    (notes / f"{SECOND}.metadata").write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")
    (notes / "config.json.metadata").write_text(f"{'a' * 40}\n{'b' * 40}\n1700000000.0\n")
    result = look(model, verify_hub=True)
    assert result["complete"] and result["checked_sha256"] == 1
    (notes / f"{SECOND}.metadata").write_text(f"{'a' * 40}\n{'0' * 64}\n1700000000.0\n")
    assert codes(look(model, verify_hub=True)) == ["checksum_differs"]


# Checksums


def test_published_sums_find_a_changed_byte_that_the_header_does_not(model: Path, tmp_path: Path) -> None:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.glob("*.safetensors")}
    manifest = tmp_path / "SHA256SUMS"
    manifest.write_text("".join(f"{value}  ./{name}\n" for name, value in sums.items()) + f"{'1' * 64}  README.md\n")
    result = look(model, sha256_manifest=str(manifest))
    assert result["complete"] and result["checked_sha256"] == 3 and codes(result) == ["checksum_unread"]
    data = bytearray((model / SECOND).read_bytes())
    data[-3] ^= 4
    (model / SECOND).write_bytes(data)
    result = look(model, sha256_manifest=str(manifest))
    assert codes(result, "error") == ["checksum_differs"] and sums[SECOND] in result["msg"]
    own = {SECOND: hashlib.sha256(data).hexdigest().upper()}
    assert look(model, sha256_manifest=str(manifest), sha256=own)["complete"], "what is given outranks the manifest"
    assert codes(look(model, sha256={"absent.safetensors": "0" * 64}), "error") == ["checksum_unread"]


def test_a_config_whose_context_length_was_raised_here_is_no_wrong_checksum(model: Path) -> None:
    published = (model / "config.json").read_bytes()
    (model / checkpoint.CONFIG_BACKUP).write_bytes(published)
    (model / "config.json").write_bytes(published.replace(b"llama", b"other"))
    result = look(model, sha256={"config.json": hashlib.sha256(published).hexdigest()})
    assert result["complete"] and codes(result, "info") == ["changed_here"]


def test_every_form_of_manifest_says_the_same() -> None:
    one, name = "ab" * 32, "a file.safetensors"
    forms = [f"{one}  {name}\n", f"{one} *{name}\n", f"SHA256 ({name}) = {one}\n", json.dumps({name: f"sha256:{one}"}),
             f"# comment\n\n{one.upper()}  ./{name}\n"]  # fmt: skip
    assert [checkpoint.parse_manifest(form) for form in forms] == [{name: one}] * len(forms)


@pytest.mark.parametrize("text", ["hello\n", "{", "ab  name\n", f"{'a' * 64}  /etc/passwd\n", f"{'a' * 64}  ../x\n"])
def test_a_manifest_that_is_none_is_refused(text: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.parse_manifest(text)
    (tmp_path / "sums").write_text(text)
    result = look(model, sha256_manifest=str(tmp_path / "sums"))
    assert result["failed"] and result["refused"] and "checksum" in result["msg"].lower()
    assert look(model, sha256_manifest=str(tmp_path / "nothing"))["failed"]


# The format


def test_values_of_a_tensor_are_read_where_they_stand(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "x.safetensors",
        {"a": ("BF16", (3,), None), "d2t": ("I64", (3,), integers([-1, 0, 1 << 40])), "t2d": ("BOOL", (2,), b"\1\0")},
    )
    header = safetensors.read(str(path))
    assert list(safetensors.read_integers(str(path), header, "d2t") or ()) == [-1, 0, 1 << 40]
    assert list(safetensors.read_integers(str(path), header, "t2d") or ()) == [1, 0]
    assert safetensors.read_integers(str(path), header, "a") is None


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (entry("BF16", [2, 2], 0, 9), "takes 8 bytes and not 9"),
        (entry("BF16", [2, 2], 8, 16), "a gap or an overlap before the tensor a"),
        ({**entry("U8", [4], 0, 4), "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]}}, "before the tensor b"),
        (entry("BF16", [-2, 2], 0, 8), "describes the tensor a wrongly"),
        (entry("BF16", "22", 0, 8), "describes the tensor a wrongly"),
        (entry("BF16", [2, 2], 0), "describes the tensor a wrongly"),
        ({"a": 1}, "describes the tensor a wrongly"),
        (["a"], "is no JSON object"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(header: Any, says: str) -> None:
    with pytest.raises(safetensors.HeaderError, match=says):
        safetensors.parse(json.dumps(header).encode(), 0)


def test_packed_and_unknown_dtypes_are_read(tmp_path: Path) -> None:
    assert safetensors.parse(json.dumps(entry("F4", [3, 4], 0, 6)).encode(), 8).file_bytes == 14
    assert safetensors.parse(json.dumps(entry("F3_NEW", [3, 4], 0, 5)).encode(), 8).file_bytes == 13


@given(cut=st.integers(min_value=0, max_value=399))
def test_no_file_that_was_cut_short_passes(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = write_safetensors(folder / "x.safetensors", {"a": ("BF16", (8, 8), None), "b": ("I64", (4,), None)})
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data) - 1)])
    assert checkpoint.look_at_shard(str(folder), path.name).problem


@given(content=st.binary(max_size=64))
def test_no_bytes_are_too_strange_for_a_header(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(content)
    shard = checkpoint.look_at_shard(str(path.parent), path.name)
    assert bool(shard.problem) is (shard.header is None or shard.header.file_bytes != len(content))


def test_a_header_that_claims_terabytes_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b'{"a')
    assert "does not begin with" in checkpoint.look_at_shard(str(tmp_path), path.name).problem


def test_the_headers_of_64_shards_with_200000_tensors_take_seconds(tmp_path: Path) -> None:
    """As many as Kimi-K2.5 has; 600 GB of data are left out of the files (sparse), as nobody reads them."""
    weight_map: dict[str, str] = {}
    for number in range(1, 65):
        name = f"model-{number:05d}-of-00064.safetensors"
        tensors: Any = {
            f"language_model.model.layers.{number}.mlp.experts.{i}.weight": ("I32", (3072, 256), b"")
            for i in range(3125)
        }
        text = json.dumps(header_of(tensors)).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(tmp_path / name, 8 + len(text) + 3125 * 3072 * 256 * 4)
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"architectures": ["A"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    result = look(tmp_path)
    assert result["complete"] and result["tensors"] == 200_000 and result["bytes"] > 600e9
    assert result["seconds"] < 15, "seconds, not minutes, on a slow machine too"


def test_nothing_of_it_needs_a_package(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from gpu_host import checkpoint, eagle3, delegation"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-I", "-S", "-c", program, str(root / "module_utils")], check=True, cwd=tmp_path)
