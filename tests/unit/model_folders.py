"""Model folders for tests: real safetensors files, written by the format alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

BYTES = {"BOOL": 1, "U8": 1, "I32": 4, "I64": 8, "BF16": 2, "F32": 4}
MODELS = yaml.safe_load((Path(__file__).parent / "cases" / "models.yml").read_text(encoding="utf-8"))
Tensors = Mapping[str, "tuple[str, Sequence[int], bytes | None]"]


def header_of(tensors: Tensors) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, _) in tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """A whole file; a tensor without bytes is filled with 0x01."""
    text = json.dumps(header_of(tensors)).encode()
    data = [
        content if content is not None else b"\x01" * (math.prod(shape) * BYTES[dtype])
        for dtype, shape, content in tensors.values()
    ]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    return path


def integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def write_target(folder: Path, shards: int = 3, per_shard: int = 4, config: dict[str, Any] | None = None) -> Path:
    """A target of some shards with index, tokenizer and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors: dict[str, Any] = {
            f"model.layers.{number}.weight_{i}": ("BF16", (8, 16), None) for i in range(per_shard)
        }
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
        total += per_shard * 8 * 16 * 2
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps(config or {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, indent=2), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}', encoding="utf-8")
    return folder


def drafter_tensors(config: Mapping[str, Any]) -> dict[str, Any]:
    """What an EAGLE-3 drafter of that config.json holds, the first tokens as its draft vocabulary."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head, kv = config["head_dim"], config["num_key_value_heads"]
    entries, vocabulary = config["draft_vocab_size"], config["vocab_size"]
    aux = len(config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [0, 0, 0]))
    shapes = {
        "fc.weight": (hidden, aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (entries, hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv * head, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv * head, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    tensors: dict[str, Any] = {name: ("BF16", shape, None) for name, shape in shapes.items()}
    tensors["d2t"] = ("I64", (entries,), integers([2 * i - i for i in range(entries)]))
    tensors["t2d"] = ("BOOL", (vocabulary,), bytes(i % 2 == 0 and i < 2 * entries for i in range(vocabulary)))
    return tensors


def write_drafter(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors if tensors is not None else drafter_tensors(config))
    return folder
