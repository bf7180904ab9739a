"""A tiny random Llama with its tokenizer (tiny_w/) and an EAGLE-3 drafter for it (draft/), in the current folder.

Needs torch, transformers, tokenizers and safetensors. Random weights: the text is gibberish, nothing is accepted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HIDDEN, INTERMEDIATE, VOCABULARY, DRAFT_VOCABULARY = 256, 512, 512, 256
HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 4, 2, 64
TEXT = "The quick brown fox jumps over the lazy dog. Hello world, how are you today?"
TEMPLATE = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"


def config(architecture: str, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        **more,
    }


def make_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_target(folder: Path) -> None:
    values = config("LlamaForCausalLM", 8)
    torch.manual_seed(0)
    known = {key: value for key, value in values.items() if key not in ("architectures", "torch_dtype", "model_type")}
    LlamaForCausalLM(LlamaConfig(**known)).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values, indent=1))


def make_drafter(folder: Path) -> None:
    folder.mkdir()
    values = config("LlamaForCausalLMEagle3", 1, draft_vocab_size=DRAFT_VOCABULARY)
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    def ones() -> Any:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    queries, keys = HEADS * HEAD_SIZE, KEY_VALUE_HEADS * HEAD_SIZE
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[:DRAFT_VOCABULARY] = True
    tensors = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": ones(),
        "lm_head.weight": weight(DRAFT_VOCABULARY, HIDDEN),
        "midlayer.input_layernorm.weight": ones(),
        "midlayer.hidden_norm.weight": ones(),
        "midlayer.post_attention_layernorm.weight": ones(),
        "midlayer.self_attn.q_proj.weight": weight(queries, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": weight(keys, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": weight(keys, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": weight(HIDDEN, queries),
        "midlayer.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        "d2t": torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64),
        "t2d": known,
    }
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    for name in ("tiny_w", "draft"):
        shutil.rmtree(name, ignore_errors=True)
    make_target(Path("tiny_w"))
    make_tokenizer(Path("tiny_w"))
    make_drafter(Path("draft"))
