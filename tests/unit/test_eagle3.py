from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import arguments, checkpoint, eagle3, json_text
from gpu_host.eagle3 import CONFIG_BACKUP, KEEP, MODES, OVERRIDE, OVERRIDE_VARIABLE, RAISE, REVERT

from tests.unit.model_folders import MODELS, drafter_tensors, integers, write_drafter

PAIRS = yaml.safe_load((Path(__file__).parent / "cases" / "eagle3_pairs.yml").read_text(encoding="utf-8"))


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {**copy.deepcopy(config), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def codes(findings: list[dict[str, Any]], severity: str) -> list[str]:
    return [finding["code"] for finding in findings if finding["severity"] == severity]


def run(target: Path, drafter: Path, mode: str = KEEP, check: bool = False, **more: Any) -> dict[str, Any]:
    params = {"target": str(target), "drafter": str(drafter), "context_length": mode, "served_context_length": 0,
              "weights": True, **more}  # fmt: skip
    return eagle3.run(params, check_mode=check, diff=True)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target of 2048 tokens and a drafter of 512 that fits it otherwise."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(MODELS["tiny_target"]), encoding="utf-8")
    return target, write_drafter(tmp_path / "drafter", MODELS["tiny_drafter"])


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case["name"])
def test_pair(case: dict[str, Any], tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    drafter.mkdir()
    config = changed(MODELS[case["drafter"]], case.get("set", {}))
    (target / "config.json").write_text(json.dumps(MODELS[case["target"]]), encoding="utf-8")
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before = sorted(os.listdir(drafter)), (drafter / "config.json").read_bytes()
    result = run(target, drafter, weights=False, served_context_length=case.get("served", 0))
    assert sorted(codes(result["findings"], "error")) == sorted(case.get("errors", []))
    assert codes(result["findings"], "warning") == case.get("warnings", [])
    assert result["context_length"]["before"] == case["context"]
    assert result["compatible"] is (not case.get("errors")) and bool(result.get("failed")) is bool(case.get("errors"))
    assert case.get("says", "") in result["msg"]
    assert (sorted(os.listdir(drafter)), (drafter / "config.json").read_bytes()) == before, "keep changes nothing"


def test_the_target_of_a_multimodal_wrapper_is_its_text_config() -> None:
    facts = eagle3.facts(MODELS["kimi_k25"])
    assert (facts.hidden_size, facts.layers, facts.context_length) == (7168, 61, 262144)
    assert facts.dtype == "bfloat16", "said at the top alone"


# Weights


def weights_of(config: dict[str, Any], changes: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    tensors = {name: value for name, value in {**drafter_tensors(config), **changes}.items() if value is not None}
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text(json.dumps(MODELS["tiny_target"]), encoding="utf-8")
    result = run(folder / "target", write_drafter(folder / "drafter", config, tensors), OVERRIDE)
    return [finding for finding in result["findings"] if finding["severity"] != "info"]


WEIGHTS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("what was trained fits", {}, [], ""),
    ("no d2t is refused, its drafts would be other tokens", {"d2t": None}, ["d2t_missing"], "taken for other tokens"),
    ("a d2t of another length is refused", {"d2t": ("I64", (100,), integers([0] * 100))}, ["d2t_shape"], "[256]"),
    ("a t2d of another length is refused", {"t2d": ("BOOL", (100,), bytes(100))}, ["t2d_shape"], "[512]"),
    (
        "a d2t that leaves the vocabulary is refused",
        {"d2t": ("I64", (256,), integers([0] * 255 + [400]))},
        ["d2t_range"],
        "1 of 256",
    ),
    (
        "a d2t of negative tokens is refused",
        {"d2t": ("I64", (256,), integers([-1] + [0] * 255))},
        ["d2t_range"],
        "1 of 256",
    ),
    (
        "token numbers instead of differences are told",
        {"d2t": ("I64", (256,), integers(range(0, 512, 2)))},
        ["d2t_range"],
        "subtract each entry's index",
    ),
    (
        "a d2t that repeats a token is a warning",
        {"d2t": ("I64", (256,), integers([0, -1] + [0] * 254))},
        ["d2t_repeats"],
        "1 entries",
    ),
    (
        "d2t and t2d that disagree are a warning",
        {"t2d": ("BOOL", (512,), bytes([1] * 256 + [0] * 256))},
        ["maps_disagree"],
        "SGLang uses d2t",
    ),
    (
        "an fc for another number of layers is refused",
        {"fc.weight": ("BF16", (32, 64), None)},
        ["tensor_shape"],
        "[32, 96]",
    ),
    (
        "an lm_head of the whole vocabulary is refused",
        {"lm_head.weight": ("BF16", (512, 32), None)},
        ["tensor_shape"],
        "[256, 32]",
    ),
    (
        "a q_proj that takes one input is refused",
        {"midlayer.self_attn.q_proj.weight": ("BF16", (32, 32), None)},
        ["tensor_shape"],
        "[32, 64]",
    ),
    (
        "a missing projection is refused, SGLang would draft with random numbers",
        {"midlayer.mlp.up_proj.weight": None},
        ["tensors_missing"],
        "mlp.up_proj",
    ),
    ("a missing lm_head is refused", {"lm_head.weight": None}, ["tensors_missing"], "lm_head"),
]


@pytest.mark.parametrize(("name", "changes", "expected", "says"), WEIGHTS, ids=[case[0] for case in WEIGHTS])
def test_weights(name: str, changes: dict[str, Any], expected: list[str], says: str, tmp_path: Path) -> None:
    found = weights_of(MODELS["tiny_drafter"], changes, tmp_path)
    assert [finding["code"] for finding in found] == expected
    assert says in " ".join(finding["found"] + finding["cure"] for finding in found)


def test_newer_names_of_the_layer_and_a_quantized_projection_are_accepted(tmp_path: Path) -> None:
    config = {**MODELS["tiny_drafter"], "quantization_config": {"quant_method": "quark"}}
    tensors = {name.replace("midlayer", "layers.0"): value for name, value in drafter_tensors(config).items()}
    tensors["layers.0.mlp.up_proj.weight"] = ("I32", (8, 32), None)
    renamed = {name: None for name in drafter_tensors(config) if name.startswith("midlayer")}
    assert weights_of(config, {**renamed, **tensors}, tmp_path) == []


def test_a_plain_llama_with_eagle3_weights_is_told_what_to_change(tmp_path: Path) -> None:
    config = {**MODELS["tiny_drafter"], "architectures": ["LlamaForCausalLM"]}
    (found,) = weights_of(config, {}, tmp_path)
    assert found["code"] == "architecture_unknown" and "LlamaForCausalLMEagle3" in found["cure"]


def test_a_truncated_drafter_is_refused_by_name(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = run(target, drafter, RAISE)
    assert result["failed"] and "model.safetensors is truncated" in result["msg"]


# Context length


def test_raise_changes_one_number_and_revert_puts_the_very_file_back(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    config = drafter / "config.json"
    rest = json.dumps(MODELS["tiny_drafter"])[1:].replace('"max_position_embeddings": 512, ', "")
    config.write_text('{\n\t"b": [1,  2],\n\t"max_position_embeddings" :512,\n\t' + rest, encoding="utf-8")
    config.chmod(0o640)
    original = config.read_bytes()

    raised = run(target, drafter, RAISE)
    assert raised["changed"] and not raised.get("failed")
    assert raised["context_length"] == {"needed": 2048, "before": 512, "after": 2048}
    assert config.read_bytes() == original.replace(b'" :512,', b'" :2048,')
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    assert (drafter / CONFIG_BACKUP).read_bytes() == original and raised["backup"] == str(drafter / CONFIG_BACKUP)
    assert raised["diff"]["after"].encode() == config.read_bytes()

    again = run(target, drafter, RAISE)
    assert not again["changed"] and again["compatible"]
    assert not run(target, drafter, KEEP)["changed"] and run(target, drafter, KEEP)["compatible"]

    reverted = run(target, drafter, REVERT)
    assert reverted["changed"] and config.read_bytes() == original
    assert sorted(os.listdir(drafter)) == ["config.json", "model.safetensors"]
    assert codes(reverted["findings"], "warning") == ["context_length"], "told, but asked for"
    assert not run(target, drafter, REVERT)["changed"]


def test_check_mode_tells_and_changes_nothing(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    before = (drafter / "config.json").read_bytes()
    result = run(target, drafter, RAISE, check=True)
    assert result["changed"] and result["context_length"]["after"] == 2048 and result["backup"] == ""
    assert '"max_position_embeddings": 2048' in result["diff"]["after"]
    assert (drafter / "config.json").read_bytes() == before and not (drafter / CONFIG_BACKUP).exists()
    run(target, drafter, RAISE)
    assert run(target, drafter, REVERT, check=True)["changed"] and (drafter / CONFIG_BACKUP).exists()


def test_raise_is_refused_for_a_wrong_pair_before_anything_changes(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    (target / "config.json").write_text(json.dumps({**MODELS["tiny_target"], "hidden_size": 64}), encoding="utf-8")
    before = (drafter / "config.json").read_bytes()
    result = run(target, drafter, RAISE)
    assert result["failed"] and "hidden size is 32, the target's 64" in result["msg"] and not result["changed"]
    assert (drafter / "config.json").read_bytes() == before and not (drafter / CONFIG_BACKUP).exists()


def test_override_returns_the_variable_only_when_it_is_needed(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    result = run(target, drafter, OVERRIDE)
    assert result["environment"] == {OVERRIDE_VARIABLE: "1"} and result["compatible"] and not result["changed"]
    assert run(target, drafter, OVERRIDE, served_context_length=512)["environment"] == {}


def test_raise_never_lowers(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    assert not run(target, drafter, RAISE, served_context_length=256)["changed"]


def test_raise_reckons_with_the_scaling_and_the_key_that_decides() -> None:
    text = json.dumps({**MODELS["tiny_drafter"], "rope_scaling": {"rope_type": "linear", "factor": 3.0}})
    raised = json.loads(eagle3.raised_text(text, 2048))
    assert raised["max_position_embeddings"] == 683 and eagle3.context_length(raised)[0] >= 2048
    text = json.dumps({**MODELS["tiny_drafter"], "model_max_length": 100})
    raised = json.loads(eagle3.raised_text(text, 2048))
    assert (raised["model_max_length"], raised["max_position_embeddings"]) == (2048, 2048)


def test_a_link_of_a_hub_cache_is_replaced_and_comes_back_and_its_blob_is_never_written(
    pair: tuple[Path, Path],
) -> None:
    target, drafter = pair
    blob = drafter.parent / "blobs" / "0123abc"
    blob.parent.mkdir()
    os.replace(drafter / "config.json", blob)
    (drafter / "config.json").symlink_to("../blobs/0123abc")
    published = blob.read_bytes()
    assert run(target, drafter, RAISE)["changed"]
    assert not (drafter / "config.json").is_symlink() and blob.read_bytes() == published
    assert run(target, drafter, REVERT)["changed"]
    assert os.readlink(drafter / "config.json") == "../blobs/0123abc" and blob.read_bytes() == published


def test_revert_refuses_when_the_file_was_changed_in_other_ways_since(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    run(target, drafter, RAISE)
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    (drafter / "config.json").write_text(json.dumps({**config, "head_dim": 9}), encoding="utf-8")
    result = run(target, drafter, REVERT)
    assert result["failed"] and "changed in other ways" in result["msg"]


def test_the_backup_of_a_drafter_that_was_staged_anew_gives_way(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    run(target, drafter, RAISE)
    newer = json.dumps({**MODELS["tiny_drafter"], "rms_norm_eps": 1e-6})
    (drafter / "config.json").write_text(newer, encoding="utf-8")
    assert run(target, drafter, RAISE)["changed"]
    assert (drafter / CONFIG_BACKUP).read_text(encoding="utf-8") == newer


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is malformed"),
        ("[1]", "holds a list"),
        ("version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    ],
)
def test_a_config_that_is_none_is_refused_in_one_sentence(pair: tuple[Path, Path], content: str, says: str) -> None:
    target, drafter = pair
    (drafter / "config.json").write_text(content, encoding="utf-8")
    result = run(target, drafter)
    assert result["failed"] and says in result["msg"] and "config.json" in result["msg"]


def test_a_missing_target_is_refused(pair: tuple[Path, Path]) -> None:
    result = run(Path("/nowhere/model"), pair[1])
    assert result["failed"] and "no model folder /nowhere/model" in result["msg"]


def test_the_modules_choices_are_the_modes_of_the_code() -> None:
    assert tuple(arguments.EAGLE3_DRAFTER["context_length"]["choices"]) == MODES
    assert eagle3.CONFIG_BACKUP == checkpoint.CONFIG_BACKUP


# Text of JSON


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ('{"a": 1,"b":2}', ["b"], '{"a": 1,"b":9}'),
        ('{"a": {"b": 2, "b": 3}}', ["a", "b"], '{"a": {"b": 2, "b": 9}}'),
        ('{\n  "a": 1\n}\n', ["b"], '{\n  "b": 9,\n  "a": 1\n}\n'),
        ('{"a": 1}', ["b"], '{"b": 9, "a": 1}'),
        ("{}", ["b"], '{"b": 9}'),
        ('{"\\u0062": 2, "x": "}\\"b\\": 1"}', ["b"], '{"\\u0062": 9, "x": "}\\"b\\": 1"}'),
    ],
)
def test_one_value_of_a_json_text_changes_and_nothing_else(text: str, path: list[str], expected: str) -> None:
    assert json_text.replace(text, path, 9) == expected
    json.loads(expected)
