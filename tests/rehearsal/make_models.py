"""Makes target/, a tiny Llama that has learnt a small text by heart, and drafter/, an EAGLE-3 drafter that follows it;
random-target/ and random-drafter/ have learnt nothing.

Runs in the rehearsal's own environment: ``python make_models.py FOLDER``. The
answers are then checkable sentences, and the accept length is one that a drafter earned. Random weights give gibberish
and an accept length of 1.0, which a health check has to refuse.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path(__file__).parent / "text.txt"
TEMPLATE = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"
VOCABULARY, DRAFT_VOCABULARY = 1024, 512
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD = 128, 384, 8, 4, 2, 64
CONTEXT = 2048
CAPTURED = (2, LAYERS // 2, LAYERS - 3)
"""Layers before which SGLang takes the drafter's features (llama.py, set_eagle3_layers_to_capture, 0.5.23)."""
DRAFTS = 3
"""Tokens that are drafted in a row, so many the drafter is trained for."""
COMMON: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
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
}


def pairs(text: str) -> list[tuple[str, str]]:
    """Question and answer of each paragraph; the first lines after # are for people."""
    paragraphs = [part.strip("\n") for part in text.split("\n\n")]
    return [tuple(part.split("\n", 1)) for part in paragraphs if not part.startswith("#")]  # type: ignore[misc]


def documents(found: list[tuple[str, str]]) -> list[str]:
    """Each answer as a chat gets it and as a plain completion."""
    chats = [f"user: {question}\nassistant: {answer}</s>" for question, answer in found]
    return chats + [f"{question} {answer}</s>" for question, answer in found]


def make_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    plain.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def batches(ids: list[list[int]], size: int) -> torch.Tensor:
    """A batch of documents of similar length, padded with -1."""
    first = random.choice(ids)
    near = sorted(ids, key=lambda one: abs(len(one) - len(first)))[: size * 2]
    chosen = random.sample(near, min(size, len(near)))
    longest = max(map(len, chosen))
    return torch.tensor([one + [-1] * (longest - len(one)) for one in chosen])


def new_target() -> LlamaForCausalLM:
    facts = {name: value for name, value in COMMON.items() if name not in ("model_type", "torch_dtype")}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **facts)).float()


def train_target(ids: list[list[int]], steps: int) -> LlamaForCausalLM:
    """So many steps, after which it knows every document by heart."""
    model = new_target().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    began, average = time.monotonic(), 5.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20) * max(0.05, 1 - step / steps)
        batch = batches(ids, 8)
        loss = model(
            input_ids=batch.clamp_min(0), attention_mask=(batch >= 0).long(), labels=batch.masked_fill(batch < 0, -100)
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average = 0.95 * average + 0.05 * float(loss.detach())
        if step % 50 == 0:
            print(f"target: step {step}, {time.monotonic() - began:.0f} s, loss {average:.3f}", flush=True)
    return model.eval().to(torch.bfloat16)


class Norm(nn.Module):
    """RMSNorm as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Drafter(nn.Module):
    """One decoder layer over the target's features, as sglang 0.5.23 computes it (srt/models/llama_eagle3.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (Norm() for _ in range(4))
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCABULARY, bias=False)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores over the draft vocabulary, and the features that the next draft is made from."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        x = self.post_attention_layernorm(hidden)
        hidden = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.lm_head(self.norm(hidden)), hidden

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of a published drafter."""
        names = {"fc": "fc", "norm": "norm", "lm_head": "lm_head"}
        names.update({f"{part}_proj": f"midlayer.self_attn.{part}_proj" for part in "qkvo"})
        names.update({f"{part}_proj": f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")})
        names.update({n: f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")})
        return {f"{names[name.split('.')[0]]}.weight": value for name, value in self.state_dict().items()}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions from 0, halves as in Llama."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.arange(x.shape[2]).float()[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    one, two = x.chunk(2, -1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], -1)


def train_drafter(
    target: LlamaForCausalLM, ids: list[list[int]], draft_ids: torch.Tensor, steps: int
) -> tuple[Drafter, list[float]]:
    """On the target's own features; returns it and the share of right first, second and third drafts."""
    drafter = Drafter().train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    embed = target.get_input_embeddings().weight.detach().float()
    place = torch.full((VOCABULARY,), -100)
    place[draft_ids] = torch.arange(len(draft_ids))
    began, right = time.monotonic(), [0.0] * DRAFTS
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20) * max(0.05, 1 - step / steps)
        batch = batches(ids, 8)
        with torch.no_grad():
            seen = target(batch.clamp_min(0), output_hidden_states=True)
            # The target's own next tokens: what a draft has to guess.
            wanted = seen.logits.argmax(-1).masked_fill(batch < 0, -100)
            features = torch.cat([seen.hidden_states[layer] for layer in CAPTURED], -1).float()
        hidden = drafter.fc(features)
        loss = torch.zeros(())
        for draft in range(DRAFTS):
            # Place t sees the feature of t (after the first draft: its own) and the token of t + 1.
            length = batch.shape[1] - 1 - draft
            if length < 2:
                break
            tokens = batch[:, draft + 1 :].clamp_min(0)
            goal = wanted[:, draft + 1 :]
            scores, hidden = drafter(embed[tokens], hidden[:, :length])
            goal = torch.where(goal >= 0, place[goal.clamp_min(0)], goal)
            loss = loss + F.cross_entropy(scores.flatten(0, 1), goal.flatten(), ignore_index=-100) * 0.8**draft
            known = goal >= 0
            share = float((scores.argmax(-1) == goal)[known].float().mean()) if known.any() else 0.0
            right[draft] = 0.9 * right[draft] + 0.1 * share
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            shown = ", ".join(f"{share:.2f}" for share in right)
            print(f"drafter: step {step}, {time.monotonic() - began:.0f} s, right drafts {shown}", flush=True)
    return drafter.eval(), right


def save_target(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, **COMMON}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_drafter(drafter: Drafter, draft_ids: torch.Tensor, folder: Path) -> None:
    folder.mkdir()
    chosen = torch.zeros(VOCABULARY, dtype=torch.bool)
    chosen[draft_ids] = True
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in drafter.tensors().items()}
    tensors |= {"d2t": draft_ids - torch.arange(DRAFT_VOCABULARY), "t2d": chosen}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **COMMON}
    config["draft_vocab_size"] = DRAFT_VOCABULARY
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, found: list[tuple[str, str]]) -> int:
    """How many of the answers it gives by heart, word for word."""
    known = 0
    for question, answer in found:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=False, pad_token_id=2
            )[0, ids.shape[1] :]
        known += tokenizer.decode(made, skip_special_tokens=True).strip() == answer.strip()
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=360, help="of the target's training")
    parser.add_argument("--drafter-steps", type=int, default=160, help="of the drafter's")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    began = time.monotonic()
    target_folder = options.folder / "target"
    target_folder.mkdir(parents=True)
    found = pairs(TEXT.read_text())
    texts = documents(found)
    tokenizer = make_tokenizer(texts, target_folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]

    target = train_target(ids, options.steps)
    save_target(target, target_folder)
    shutil.copytree(target_folder, options.folder / "random-target")
    save_target(new_target().to(torch.bfloat16), options.folder / "random-target")

    counts = torch.zeros(VOCABULARY)
    for one in ids:
        counts += torch.bincount(torch.tensor(one), minlength=VOCABULARY)
    draft_ids = counts.topk(DRAFT_VOCABULARY).indices.sort().values
    save_drafter(Drafter(), draft_ids, options.folder / "random-drafter")
    drafter, right = train_drafter(target, ids, draft_ids, options.drafter_steps)
    save_drafter(drafter, draft_ids, options.folder / "drafter")

    facts = {
        "known_by_heart": answers(target, tokenizer, found),
        "of": len(found),
        "right_drafts": [round(share, 2) for share in right],
        "tokens": sum(map(len, ids)),
        "seconds": round(time.monotonic() - began, 1),
    }
    (options.folder / "made.json").write_text(json.dumps(facts) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
