"""An EAGLE-3 drafter against its target: what would fail, or accept nothing, after 25 minutes of loading.

The rules are those of SGLang 0.5.23 (models/llama_eagle3.py, models/kimi_k25_eagle3.py, configs/model_config.py
`_derive_context_length`, utils/hf_transformers/common.py `get_context_length` and `get_hf_text_config`,
model_executor/model_runner_components/spec_aux_hidden_state.py); 0.5.17 has the same ones.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import checkpoint, json_text, safetensors
from .checkpoint import CONFIG_BACKUP, CheckpointError
from .finding import ERROR, INFO, WARNING, Finding, errors, rows, summary
from .safetensors import Header, HeaderError, Tensor
from .storage import replace_content

RAISE, OVERRIDE, KEEP, REVERT = "raise", "override", "keep", "revert"
MODES = (RAISE, OVERRIDE, KEEP, REVERT)
OVERRIDE_VARIABLE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"

# The classes of SGLang that run an EAGLE-3 drafter: attention like Llama's, and DeepSeek's (MLA).
LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
EAGLE3 = (LLAMA, MLA)
# The first of them that is set decides, times the rope scaling's factor.
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
# What SGLang takes where a config has none of them, and where transformers' config class brings no default of its own.
DEFAULT_CONTEXT = 2048
_CLASS_DEFAULTS = {"deepseek_v3": 4096, "kimi_k2": 4096}

# Kinds of drafters.
KIND_EAGLE3, KIND_EAGLE, KIND_MTP, KIND_DFLASH, KIND_MODEL = "EAGLE-3", "EAGLE", "MTP", "DFLASH", "whole model"


@dataclass(frozen=True)
class Facts:
    """What matters of a config.json. None: not said there; `context_length` in tokens, as SGLang derives it."""

    architecture: str
    model_type: str
    hidden_size: int | None
    vocab_size: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    dtype: str
    context_length: int
    context_key: str
    quantized: bool


@dataclass(frozen=True)
class Drafter(Facts):
    """`aux_layers`: whose hidden states it reads; None: SGLang's default for the target."""

    target_hidden_size: int | None
    draft_vocab_size: int | None
    aux_layers: tuple[int, ...] | None
    aux_count: int
    tied: bool


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the language model's config stands in a multimodal one, as SGLang looks for it; () for itself."""
    names = config.get("architectures") or [""]
    if str(names[0]).startswith("Llava") and str(names[0]).endswith("ForCausalLM"):
        return ()
    for key in ("thinker_config", "llm_config", "language_config", "text_config"):
        inner = config.get(key)
        if isinstance(inner, dict):
            nested = key == "thinker_config" and isinstance(inner.get("text_config"), dict)
            return (key, "text_config") if nested else (key,)
    return ()


def _at(config: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    for key in path:
        config = config[key]
    return config


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def rope_factor(text: Mapping[str, Any]) -> float:
    """By how much SGLang stretches the stated context length."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 1
    kind = scaling.get("rope_type") or scaling.get("type")
    if "original_max_position_embeddings" in scaling or kind == "llama3":
        return 1
    factor = scaling.get("factor", 1)
    return factor if isinstance(factor, (int, float)) and not isinstance(factor, bool) else 1


def context_length(text: Mapping[str, Any]) -> tuple[int, str]:
    """The context length that SGLang derives (tokens) and the key that decided, '' for none."""
    factor = rope_factor(text)
    for key in CONTEXT_KEYS:
        value = _number(text, key)
        if value is not None:
            return int(factor * value), key
    return int(factor * _CLASS_DEFAULTS.get(str(text.get("model_type")), DEFAULT_CONTEXT)), ""


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for where in (text, config):
        value = where.get("dtype") or where.get("torch_dtype")
        if isinstance(value, str):
            return value.rpartition(".")[2]
    return ""


def facts(config: Mapping[str, Any]) -> Facts:
    text = _at(config, text_path(config))
    names = config.get("architectures") or [""]
    length, key = context_length(text)
    return Facts(
        architecture=str(names[0]),
        model_type=str(config.get("model_type") or ""),
        hidden_size=_number(text, "hidden_size"),
        vocab_size=_number(text, "vocab_size"),
        layers=_number(text, "num_hidden_layers"),
        heads=_number(text, "num_attention_heads"),
        kv_heads=_number(text, "num_key_value_heads"),
        dtype=_dtype(config, text),
        context_length=length,
        context_key=key,
        quantized=bool(config.get("quantization_config") or text.get("quantization_config")),
    )


def _layers(config: Mapping[str, Any], key: str = "eagle_aux_hidden_state_layer_ids") -> tuple[Any, ...] | None:
    value = config.get(key)
    return tuple(value) if isinstance(value, list) and value else None


def drafter_facts(config: Mapping[str, Any]) -> Drafter:
    text = _at(config, text_path(config))
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    layers = _layers(eagle)
    stated = _number(config, "num_aux_hidden_states")
    width_of = layers if layers is not None else _layers(config)
    return Drafter(
        **asdict(facts(config)),
        target_hidden_size=_number(config, "target_hidden_size"),
        draft_vocab_size=_number(text, "draft_vocab_size"),
        aux_layers=layers,
        aux_count=stated if stated is not None else len(width_of) if width_of else 3,
        tied=bool(text.get("tie_word_embeddings")),
    )


def kind(config: Mapping[str, Any], tensors: Iterable[str] = ()) -> str:
    """What sort of drafter this is, by its architecture and, where that says a plain Llama, by its tensors."""
    name = str((config.get("architectures") or [""])[0])
    if "eagle3" in name.lower():
        return KIND_EAGLE3
    if name.endswith("Eagle") or "eagle" in name.lower():
        return KIND_EAGLE
    if name.endswith(("NextN", "MTP")) or "AssistantForCausalLM" in name or "nextn" in name.lower():
        return KIND_MTP
    if "DFlash" in name or "DSpark" in name:
        return KIND_DFLASH
    names = set(tensors)
    if {"d2t", "t2d"} & names or any(tensor.startswith("midlayer.") for tensor in names):
        return KIND_EAGLE3
    if "fc.weight" in names and "lm_head.weight" not in names:
        return KIND_EAGLE
    return KIND_MODEL


# Comparing


def compare(config: Mapping[str, Any], target_config: Mapping[str, Any], kind_of: str = KIND_EAGLE3) -> list[Finding]:
    """The two configs against each other, without the context length."""
    drafter, target = drafter_facts(config), facts(target_config)
    found = _architecture(drafter, kind_of)
    if kind_of != KIND_EAGLE3:
        return found
    pair = "Use a drafter that was trained for this target."
    width = drafter.target_hidden_size if drafter.target_hidden_size is not None else drafter.hidden_size
    for name, ours, theirs, key in (
        ("hidden size", width, target.hidden_size, "hidden_size"),
        ("vocabulary", drafter.vocab_size, target.vocab_size, "vocab_size"),
    ):
        if ours is None or theirs is None:
            whose = "drafter's" if ours is None else "target's"
            text = f"The {whose} config.json states no {key}."
            found.append(Finding(ERROR, f"{key}_unknown", text, key, "Stage its config.json again."))
        elif ours != theirs:
            text = f"The drafter's {name} is {ours}, the target's {theirs}."
            found.append(Finding(ERROR, f"{key}_differs", text, str(theirs), pair))
    found += _draft_vocabulary(config, drafter)
    found += _aux(config, drafter, target)
    if drafter.architecture == MLA and drafter.layers not in (None, 1):
        text = f"The drafter has {drafter.layers} layers, {MLA} of SGLang takes 1."
        found.append(Finding(ERROR, "drafter_layers", text, "1", pair))
    if drafter.dtype and target.dtype and drafter.dtype != target.dtype:
        text = f"The drafter is {drafter.dtype}, the target {target.dtype}: with --dtype auto each keeps its own."
        found.append(
            Finding(WARNING, "dtype_differs", text, target.dtype, f"Set the argument dtype to {target.dtype}.")
        )
    return found


def _architecture(drafter: Drafter, kind_of: str) -> list[Finding]:
    name = drafter.architecture
    if kind_of != KIND_EAGLE3:
        what = {
            KIND_EAGLE: f"The drafter is one for EAGLE, not EAGLE-3 ({name})",
            KIND_MTP: f"The drafter is an MTP (NextN) head, not EAGLE-3 ({name})",
            KIND_DFLASH: f"The drafter is one for DFLASH or DSPARK, not EAGLE-3 ({name})",
            KIND_MODEL: f"The drafter is no EAGLE-3 drafter but a whole model ({name or 'no architecture'})",
        }[kind_of]
        cure = {
            KIND_EAGLE: "Use the algorithm EAGLE with it, or an EAGLE-3 drafter.",
            KIND_MTP: "Use the algorithm NEXTN with it, or an EAGLE-3 drafter.",
            KIND_DFLASH: "Use the algorithm DFLASH or DSPARK with it, or an EAGLE-3 drafter.",
            KIND_MODEL: "Use the algorithm STANDALONE with it, or an EAGLE-3 drafter.",
        }[kind_of]
        return [Finding(ERROR, "no_eagle3_drafter", f"{what}.", " or ".join(EAGLE3), cure)]
    if name in EAGLE3:
        return []
    close = difflib.get_close_matches(name, EAGLE3, n=1)
    text = f"The drafter is one for EAGLE-3, but its architecture {name or '(none)'} is none of SGLang's for that."
    cure = (
        f"Set architectures in its config.json to {close[0] if close else LLAMA}, if its tensors are named as SGLang's."
    )
    return [Finding(ERROR, "architecture_unknown", text, " or ".join(EAGLE3), cure)]


def _draft_vocabulary(config: Mapping[str, Any], drafter: Drafter) -> list[Finding]:
    if drafter.tied:
        return []
    if drafter.architecture == LLAMA and "draft_vocab_size" not in _at(config, text_path(config)):
        text = "The drafter's config.json has no draft_vocab_size, and SGLang ends with an AttributeError."
        cure = "Add it: the number of rows of its lm_head, or null where it uses the target's."
        return [Finding(ERROR, "draft_vocab_size_missing", text, "draft_vocab_size", cure)]
    if drafter.vocab_size is None or drafter.draft_vocab_size is None:
        return []
    if not 0 < drafter.draft_vocab_size <= drafter.vocab_size:
        text = f"The draft vocabulary has {drafter.draft_vocab_size} entries, the vocabulary {drafter.vocab_size}."
        return [
            Finding(
                ERROR, "draft_vocab_size", text, f"1 to {drafter.vocab_size}", "Stage the drafter's config.json again."
            )
        ]
    return []


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """What SGLang reads of a target with so many layers when the drafter does not say."""
    return 2, layers // 2, layers - 3


def _aux(config: Mapping[str, Any], drafter: Drafter, target: Facts) -> list[Finding]:
    layers = drafter.aux_layers
    if layers is None:
        if _layers(config):
            text = (
                "The drafter's eagle_aux_hidden_state_layer_ids are not in eagle_config, where SGLang looks for them."
            )
            cure = "Move them into eagle_config in its config.json."
            same = target.layers is not None and _layers(config) == default_aux_layers(target.layers)
            return [Finding(INFO if same else ERROR, "aux_layers_misplaced", text, "eagle_config", cure)]
        default = list(default_aux_layers(target.layers)) if target.layers else "its default"
        text = f"The drafter names no auxiliary layers: SGLang takes {default} of the target's {target.layers} layers."
        if drafter.aux_count != 3:
            cure = "Put eagle_aux_hidden_state_layer_ids into its config.json, as it was trained."
            text = f"The drafter reads {drafter.aux_count} auxiliary layers and names none; SGLang takes {default}."
            return [Finding(ERROR, "aux_layers_unknown", text, f"{drafter.aux_count} layer numbers", cure)]
        return [Finding(INFO, "aux_layers_default", text)]
    shown = list(layers)
    pair = "Use a drafter that was trained for this target."
    if any(type(layer) is not int for layer in layers) or len(set(layers)) != len(layers):
        text = f"The drafter's auxiliary layers {shown} are no distinct layer numbers."
        return [Finding(ERROR, "aux_layers", text, "distinct numbers", "Stage the drafter's config.json again.")]
    found = []
    if target.layers is not None and not all(0 <= layer < target.layers for layer in layers):
        text = f"The drafter reads the target's layers {shown}, which has {target.layers}."
        found.append(Finding(ERROR, "aux_layers_out_of_range", text, f"0 to {target.layers - 1}", pair))
    if drafter.aux_count != len(layers):
        text = f"num_aux_hidden_states is {drafter.aux_count}, but {len(layers)} auxiliary layers are named: {shown}."
        found.append(
            Finding(ERROR, "aux_count_differs", text, str(len(layers)), "Stage the drafter's config.json again.")
        )
    return found


# Weights


def compare_weights(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Finding]:
    """The drafter's tensors against its own config. SGLang skips in silence what it does not expect or find."""
    drafter = drafter_facts(config)
    found = _required_tensors(drafter, tensors)
    hidden, vocabulary = drafter.hidden_size, drafter.vocab_size
    width = drafter.target_hidden_size if drafter.target_hidden_size is not None else hidden
    entries = drafter.draft_vocab_size if drafter.draft_vocab_size is not None else vocabulary
    if hidden is None or vocabulary is None or width is None or entries is None:
        return found
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width * drafter.aux_count), "norm.weight": (hidden,)}
    if not drafter.tied and drafter.draft_vocab_size is not None:
        shapes["lm_head.weight"] = (entries, hidden)
    if drafter.architecture == LLAMA and drafter.heads and hidden:
        head = _number(config, "head_dim") or hidden // drafter.heads
        kv_heads = drafter.kv_heads or drafter.heads
        for prefix in ("midlayer", "layers.0"):
            shapes[f"{prefix}.self_attn.q_proj.weight"] = (drafter.heads * head, 2 * hidden)
            shapes[f"{prefix}.self_attn.k_proj.weight"] = (kv_heads * head, 2 * hidden)
            shapes[f"{prefix}.self_attn.v_proj.weight"] = (kv_heads * head, 2 * hidden)
            shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, drafter.heads * head)
    for name, shape in shapes.items():
        tensor = tensors.get(name) or tensors.get(f"model.{name}")
        # Quantized weights are packed.
        packed = drafter.quantized or (tensor is not None and tensor.dtype in ("U8", "I8", "I32", "F4"))
        if tensor is not None and tensor.shape != shape and not packed:
            text = f"The drafter's {name} is {list(tensor.shape)}, its config.json calls for {list(shape)}."
            cure = "Stage config.json and weights of the drafter again, from one revision."
            found.append(Finding(ERROR, "tensor_shape", text, str(list(shape)), cure))
    if entries < vocabulary and "d2t" not in tensors:
        text = (
            f"The drafter has a draft vocabulary of {entries} and no d2t: its drafts would be taken for other tokens."
        )
        found.append(Finding(ERROR, "d2t_missing", text, f"d2t [{entries}]", "Stage the drafter's weights again."))
    for name, length in (("d2t", entries), ("t2d", vocabulary)):
        if name in tensors and tensors[name].shape != (length,):
            text = f"The drafter's {name} is {list(tensors[name].shape)}, its config.json calls for [{length}]."
            cure = "Stage config.json and weights of the drafter again, from one revision."
            found.append(Finding(ERROR, f"{name}_shape", text, f"[{length}]", cure))
    return found


def _required_tensors(drafter: Drafter, tensors: Mapping[str, Tensor]) -> list[Finding]:
    names = {name[len("model.") :] if name.startswith("model.") else name for name in tensors}

    def there(*prefixes: str) -> bool:
        return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes for name in names)

    wanted: list[tuple[str, ...]] = [("fc",), ("norm",)]
    if not drafter.tied and drafter.draft_vocab_size is not None:
        wanted.append(("lm_head",))
    inner = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
    if drafter.architecture == LLAMA:
        inner += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    if drafter.architecture == LLAMA or drafter.architecture == MLA:
        wanted += [(f"midlayer.{name}", f"layers.0.{name}") for name in inner]
    if drafter.target_hidden_size not in (None, drafter.hidden_size):
        wanted.append(("embed_tokens",))  # can't be the target's
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    fused.update(dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"))

    def whole(prefixes: tuple[str, ...]) -> tuple[str, ...]:
        last = prefixes[0].rpartition(".")[2]
        return tuple(prefix[: -len(last)] + fused[last] for prefix in prefixes) if last in fused else ()

    missing = [prefixes[0] for prefixes in wanted if not there(*prefixes, *whole(prefixes))]
    if not missing:
        return []
    text = f"The drafter's weights lack {', '.join(missing[:4])}" + (
        f" and {len(missing) - 4} more" * (len(missing) > 4)
    )
    cure = "Stage the drafter's weights again, or rename its tensors to SGLang's names."
    return [
        Finding(ERROR, "tensors_missing", f"{text}: SGLang would draft with random numbers.", "EAGLE-3 weights", cure)
    ]


def check_maps(d2t: Sequence[int] | None, t2d: Sequence[int] | None, vocabulary: int) -> list[Finding]:
    """The values: d2t[i] + i is the target's token for draft token i; t2d says which of the target's tokens these are.

    SGLang uses d2t alone.
    """
    found = []
    if d2t is not None:
        tokens = [index + offset for index, offset in enumerate(d2t)]
        outside = sum(not 0 <= token < vocabulary for token in tokens)
        if outside:
            text = f"{outside} of {len(tokens)} entries of d2t lead outside of the vocabulary of {vocabulary} tokens."
            cure = "Stage the drafter's weights again."
            if all(0 <= offset < vocabulary for offset in d2t) and len(set(d2t)) == len(d2t):
                cure = "It seems to hold token numbers instead of differences: subtract each entry's index."
            found.append(Finding(ERROR, "d2t_range", text, f"0 to {vocabulary - 1}", cure))
        elif len(set(tokens)) != len(tokens):
            text = f"{len(tokens) - len(set(tokens))} entries of d2t lead to a token that another one leads to."
            found.append(Finding(WARNING, "d2t_repeats", text, "distinct tokens", "Compare the drafter's SHA-256."))
        elif t2d is not None and set(tokens) != {token for token, flag in enumerate(t2d) if flag}:
            text = "The drafter's d2t and t2d name different tokens; SGLang uses d2t."
            found.append(Finding(WARNING, "maps_disagree", text, "the same tokens", "Compare the drafter's SHA-256."))
    if t2d is not None and any(flag not in (0, 1) for flag in t2d):
        text = "The drafter's t2d holds other values than true and false; SGLang does not use it."
        found.append(Finding(WARNING, "t2d_values", text, "0 or 1"))
    return found


def read_weights(folder: str) -> tuple[dict[str, tuple[str, Header]], list[Finding]]:
    """The drafter's tensors: name -> file and header; what is wrong with the files as findings."""
    found: list[Finding] = []
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        _index, mapping, _ = checkpoint.weight_map(folder, os.listdir(folder))
    except OSError as error:
        text = f"{folder} can't be read: {error.strerror}."
        return {}, [Finding(ERROR, "drafter_weights", text, "", "Stage the drafter.")]
    except CheckpointError as error:
        return {}, [Finding(ERROR, "drafter_weights", str(error), "", "Stage the drafter again.")]
    wanted = sorted(set(mapping.values())) or names
    tensors: dict[str, tuple[str, Header]] = {}
    for shard in checkpoint.look_at_shards(folder, wanted):
        if shard.problem or shard.header is None:
            text = f"The drafter's {shard.name} {shard.problem}."
            found.append(Finding(ERROR, "drafter_weights", text, "a whole file", "Stage the drafter again."))
        else:
            tensors.update((name, (shard.name, shard.header)) for name in shard.header.tensors)
    if not wanted:
        text = f"{folder} holds no safetensors files."
        found.append(Finding(ERROR, "drafter_weights", text, "*.safetensors", "Stage the drafter's weights."))
    return tensors, found


def _read_map(folder: str, tensors: Mapping[str, tuple[str, Header]], name: str) -> Sequence[int] | None:
    if name not in tensors:
        return None
    file, header = tensors[name]
    try:
        return safetensors.read_integers(os.path.join(folder, file), header, name)
    except (OSError, HeaderError):
        return None  # the file was whole a moment ago; the shapes were compared


# Context length


@dataclass(frozen=True)
class ContextLength:
    """Tokens: what the server will ask of the drafter, and what the drafter's config.json gives."""

    needed: int
    drafter: int
    key: str

    @property
    def enough(self) -> bool:
        return self.drafter >= self.needed


def context_of(config: Mapping[str, Any], target_config: Mapping[str, Any], served: int = 0) -> ContextLength:
    """`served`: the argument context_length of the server, 0 for the target's own."""
    length, key = context_length(_at(config, text_path(config)))
    return ContextLength(served or facts(target_config).context_length, length, key)


def raised_text(text: str, needed: int) -> str:
    """The config.json with the context length that SGLang derives at least `needed` tokens; unchanged if it is."""
    config = json.loads(text)
    path = text_path(config)
    inner = _at(config, path)
    length, key = context_length(inner)
    if length >= needed:
        return text
    value = math.ceil(needed / rope_factor(inner))
    key = key or "max_position_embeddings"
    text = json_text.replace(text, (*path, key), value)
    positions = _number(inner, "max_position_embeddings")
    if key != "max_position_embeddings" and positions is not None and positions < value:
        text = json_text.replace(text, (*path, "max_position_embeddings"), value)
    return text


def _context_findings(context: ContextLength, target: Facts, mode: str) -> list[Finding]:
    found = []
    if context.needed > target.context_length:
        text = f"A context length of {context.needed} is asked for, the target's is {target.context_length}."
        cure = f"Lower it, or set {OVERRIDE_VARIABLE}=1 in the server's environment."
        severity = WARNING if mode == OVERRIDE else ERROR
        found.append(Finding(severity, "context_length_beyond_target", text, str(target.context_length), cure))
    if not context.enough:
        text = f"The drafter's context length is {context.drafter}, the server's {context.needed}."
        cure = f"Raise it with context_length: raise, or set {OVERRIDE_VARIABLE}=1 (context_length: override)."
        # After a revert or with the override that is how it was meant.
        severity = {KEEP: ERROR, REVERT: WARNING}.get(mode, INFO)
        found.append(Finding(severity, "context_length", text, f"at least {context.needed}", cure))
    return found


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def _same_but_context(one: str, other: str) -> bool:
    """Whether two config.json differ in nothing but the keys that a raise may set."""

    def rest(text: str) -> Any:
        config = json.loads(text)
        inner = _at(config, text_path(config))
        for key in CONTEXT_KEYS:
            inner.pop(key, None)  # type: ignore[attr-defined]
        return config

    try:
        return bool(rest(one) == rest(other))
    except ValueError:
        return False


def keep_backup(path: str, backup: str) -> None:
    """Keep the file as it is under the other name: a link stays a link, so a hub cache is as it was after a revert."""
    if os.path.lexists(backup):
        os.unlink(backup)
    if os.path.islink(path):
        os.symlink(os.readlink(path), backup)
    else:
        shutil.copy2(path, backup)


def _refused(message: str, **results: Any) -> dict[str, Any]:
    return {"changed": False, "failed": True, "refused": True, "msg": f"Nothing was done. {message}", **results}


def run(params: Mapping[str, Any], *, check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module `eagle3_drafter` does and returns."""
    folder, mode = params["drafter"], params["context_length"]
    path, backup = os.path.join(folder, "config.json"), os.path.join(folder, CONFIG_BACKUP)
    try:
        target_config = checkpoint.read_config(params["target"])
        config = checkpoint.read_config(folder)
        before = _read_text(path)
    except CheckpointError as error:
        return _refused(f"{error} Stage it again, or correct its path.", findings=[], compatible=False)

    tensors: dict[str, tuple[str, Header]] = {}
    found: list[Finding] = []
    if params["weights"]:
        tensors, found = read_weights(folder)
    kind_of = kind(config, tensors)
    found = compare(config, target_config, kind_of) + found
    if kind_of == KIND_EAGLE3 and tensors:
        found += compare_weights(config, {name: header.tensors[name] for name, (_, header) in tensors.items()})
        vocabulary = drafter_facts(config).vocab_size
        if vocabulary is not None and not any(finding.code in ("d2t_shape", "t2d_shape") for finding in found):
            found += check_maps(_read_map(folder, tensors, "d2t"), _read_map(folder, tensors, "t2d"), vocabulary)

    context = context_of(config, target_config, params["served_context_length"])
    after, restore = before, False
    if mode == RAISE:
        after = raised_text(before, context.needed)
    elif mode == REVERT and os.path.lexists(backup):
        try:
            after = _read_text(backup)
        except (OSError, ValueError) as error:
            return _refused(f"The backup {backup} can't be read ({error}); stage the drafter's config.json again.")
        if not _same_but_context(before, after):
            return _refused(
                f"{path} was changed in other ways since its backup {CONFIG_BACKUP} was made; put the right one back "
                "by hand and delete the backup."
            )
        restore = True
    final = context_of(json.loads(after), target_config, params["served_context_length"])
    found += _context_findings(final if mode in (RAISE, REVERT) else context, facts(target_config), mode)

    overridden = mode == OVERRIDE and (not context.enough or context.needed > facts(target_config).context_length)
    result: dict[str, Any] = {
        "changed": False,
        "compatible": not errors(found),
        "kind": kind_of,
        "findings": rows(found),
        "drafter": asdict(drafter_facts(config)),
        "target": asdict(facts(target_config)),
        "context_length": {"needed": context.needed, "before": context.drafter, "after": final.drafter},
        "environment": {OVERRIDE_VARIABLE: "1"} if overridden else {},
        "backup": backup if os.path.lexists(backup) else "",
        "msg": "",
    }
    if errors(found) and mode != REVERT:
        return {**result, **_refused(summary(found))}
    if after != before or restore:
        result["changed"] = True
        try:
            if not check_mode and restore:
                os.replace(backup, path)
                result["backup"] = ""
            elif not check_mode:
                keep_backup_of_original(path, backup, before)
                replace_content(path, after)
                result["backup"] = backup
        except OSError as error:
            reason = f"{error.filename or path} can't be written: {error.strerror}; check owner and mount."
            return {**result, **_refused(reason)}
        if diff:
            result["diff"] = {"before": before, "after": after, "before_header": path, "after_header": path}
    result["msg"] = _message(result, folder, mode)
    return result


def keep_backup_of_original(path: str, backup: str, text: str) -> None:
    """Back up what was published: an older backup of the same file is nearer to that than what lies there now."""
    if os.path.lexists(backup):
        try:
            if _same_but_context(_read_text(backup), text):
                return
        except (OSError, ValueError):
            pass  # a link to nowhere, or cut short: worth nothing
    keep_backup(path, backup)


def _message(result: Mapping[str, Any], folder: str, mode: str) -> str:
    length = result["context_length"]
    if mode == REVERT and result["changed"]:
        return f"{folder}/config.json is as it was published again: context length {length['after']}."
    if result["changed"]:
        return f"The context length of {folder} was raised from {length['before']} to {length['after']}."
    if result["environment"]:
        return f"The drafter fits, with {OVERRIDE_VARIABLE}=1 for the server."
    if not result["compatible"]:
        return "Nothing to revert, and drafter and target do not fit: see findings."
    return f"The drafter fits its target, context length {length['after']}."
