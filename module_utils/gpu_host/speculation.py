"""The arguments of speculative decoding, judged before anything is loaded.

The rules are SGLang's (0.5.17 and 0.5.23: arg_groups/speculative_hook.py, arg_groups/attention_hook.py,
layers/attention/attention_registry.py, speculative/draft_utils.py). SGLang meets most of them with an AssertionError
or a TypeError, some not at all: `EAGLE` with an EAGLE-3 drafter starts, serves and accepts nothing.

Arguments are SGLang's own names with underscores (`sglang_arguments`); the speculation is `sglang_speculation`, a dict.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import eagle3
from .finding import ERROR, INFO, WARNING, Finding

# Keys of sglang_speculation and the argument of SGLang that each becomes.
NAMES = {
    "algorithm": "speculative_algorithm",
    "num_steps": "speculative_num_steps",
    "eagle_topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
    "draft_attention_backend": "speculative_draft_attention_backend",
    "draft_model_quantization": "speculative_draft_model_quantization",
    "adaptive": "speculative_adaptive",
    "adaptive_config": "speculative_adaptive_config",
}
DRAFTER_ARGUMENT = "speculative_draft_model_path"
# Arguments of SGLang that have a place of their own, which other roles read as well.
_PLACES = {argument: f"sglang_speculation, as {key}" for key, argument in NAMES.items()}
_PLACES[DRAFTER_ARGUMENT] = "sglang_drafter_path"
COUNTS = ("num_steps", "eagle_topk", "num_draft_tokens")
# NEXTN is another name of EAGLE.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO")
_EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

# Attention backends that can't run where the compute capability is 12.x, and why.
_NOT_ON_SM120 = {
    "trtllm_mla": "its kernels are for SM100",
    "cutedsl_mla": "its kernels are for SM100",
    "tokenspeed_mla": "its kernels are for SM100",
    "flashmla": "its kernels are for SM90",
    "hpc_ops": "its kernels are for SM90",
    "fa3": "FlashAttention 3 ends at SM90",
}
# The first version whose own check lets trtllm_mha run on SM120.
_TRTLLM_MHA_ON_SM120 = (0, 5, 23)
# Without a draft worker of their own (speculative/draft_utils.py).
_NO_EAGLE = ("torch_native", "flex_attention", "wave")
# For MLA (DeepSeek's attention) alone; a drafter with Llama's attention can't use them.
_MLA_ONLY = ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "flashmla", "dsa", "nsa", "dsv4", "compressed")
# topk > 1 together with page_size > 1.
_PAGED_TREES = ("flashinfer", "fa3", "triton")
# Other spellings of SGLang's arguments.
_ALIASES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size", "pipeline_parallel_size": "pp_size",
    "dp": "dp_size", "data_parallel_size": "dp_size",
    "speculative_draft_model": DRAFTER_ARGUMENT,
}  # fmt: skip
SAFE_DRAFT_BACKENDS = "flashinfer or triton"


@dataclass(frozen=True)
class Host:
    """Where it is to run. '' and 0: not known, then nothing is said about it."""

    compute_capability: str = ""  # '12.0'
    sglang_version: str = ""  # '0.5.23'
    gpus: int = 0  # on this host, for this server


@dataclass(frozen=True)
class Models:
    """What is known of the models' configs; None: not known."""

    target: eagle3.Facts | None = None
    drafter: eagle3.Drafter | None = None
    drafter_kind: str = ""  # as of eagle3.kind()


UNKNOWN, ANYWHERE = Models(), Host()


def models(target_config: Mapping[str, Any] | None, drafter_config: Mapping[str, Any] | None = None) -> Models:
    """From the two config.json."""
    return Models(
        target=eagle3.facts(target_config) if target_config else None,
        drafter=eagle3.drafter_facts(drafter_config) if drafter_config else None,
        drafter_kind=eagle3.kind(drafter_config) if drafter_config else "",
    )


def normalized(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under one name each, underscores, without those that are unset (null or false)."""
    result = {}
    for name, value in arguments.items():
        if value is not None and value is not False and value != "":
            result[_plain(name)] = value
    return result


def _plain(name: Any) -> str:
    plain = str(name).lstrip("-").replace("-", "_")
    return _ALIASES.get(plain, plain)


def arguments_of(speculation: Mapping[str, Any], drafter: str = "") -> dict[str, Any]:
    """SGLang's arguments for sglang_speculation; {} for none. `drafter`: the drafter's folder."""
    given = {
        NAMES[name]: value
        for name, value in speculation.items()
        if name in NAMES and value not in (None, "") and value is not False
    }
    return {DRAFTER_ARGUMENT: drafter, **given} if given and drafter else given


def judge(
    speculation: Mapping[str, Any],
    arguments: Mapping[str, Any],
    drafter: str = "",
    known: Models = UNKNOWN,
    host: Host = ANYWHERE,
) -> list[Finding]:
    """Everything that is wrong or odd about a server's speculation, parallelism and attention backends."""
    found = _names(speculation) + _misplaced(arguments)
    others = {name: value for name, value in normalized(arguments).items() if name not in _PLACES}
    given = {**others, **arguments_of(speculation, drafter)}
    algorithm = str(given.get("speculative_algorithm") or "").upper()
    found += parallelism(given, known, host)
    found += attention(given, algorithm, known, host)
    if not algorithm:
        left = sorted(name for name in given if name.startswith("speculative_"))
        if left:
            text = f"{', '.join(left)} is set without an algorithm."
            cure = "Set the speculation's algorithm (EAGLE3), or leave out all of it."
            found.append(Finding(ERROR, "algorithm_missing", text, "algorithm", cure))
        return found
    if algorithm not in ALGORITHMS:
        close = difflib.get_close_matches(algorithm, ALGORITHMS, n=1)
        cure = f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(ALGORITHMS)}."
        text = f"SGLang knows no speculative algorithm {algorithm}."
        return [*found, Finding(ERROR, "algorithm_unknown", text, ", ".join(ALGORITHMS), cure)]
    found += pairing(algorithm, given, known)
    if algorithm in _EAGLE_FAMILY and not given.get("speculative_adaptive"):
        found += counts(given)
    found += _quantization(given, known)
    if "max_running_requests" not in given:
        text = "max_running_requests is unset: with speculation SGLang takes 48."
        cure = "Set it, alike for every variant of a comparison."
        found.append(Finding(INFO, "max_running_requests", text, "", cure))
    return found


def _names(speculation: Mapping[str, Any]) -> list[Finding]:
    found = []
    for name in speculation:
        if name not in NAMES:
            close = difflib.get_close_matches(str(name), NAMES, n=1)
            cure = f"Did you mean {close[0]}?" if close else "Give other arguments in sglang_arguments."
            text = f"sglang_speculation has no key {name}."
            found.append(Finding(ERROR, "speculation_key", text, ", ".join(NAMES), cure))
    return found


def _misplaced(arguments: Mapping[str, Any]) -> list[Finding]:
    found = []
    for name in map(_plain, arguments):
        if name in _PLACES:
            text = f"sglang_arguments: {name} belongs to {_PLACES[name]}."
            found.append(Finding(ERROR, "speculation_misplaced", text, _PLACES[name], "Take it out there."))
    return found


# The three counts


def counts(given: Mapping[str, Any]) -> list[Finding]:
    """Steps, topk and draft tokens: all or none, whole numbers, and fitting each other."""
    values = {key: given.get(NAMES[key]) for key in COUNTS}
    missing = [key for key, value in values.items() if value is None]
    if len(missing) == len(COUNTS):
        text = "num_steps, eagle_topk and num_draft_tokens are unset: SGLang chooses them by the target's architecture."
        return [Finding(INFO, "counts_default", text, "", "Set all three to know what is measured.")]
    if missing:
        there = ", ".join(key for key in COUNTS if key not in missing)
        text = f"{there} is set without {' and '.join(missing)}: SGLang ends with a bare AssertionError or TypeError."
        steps = values["num_steps"] if isinstance(values["num_steps"], int) else 3
        cure = f"Set all three or none, for example num_steps {steps}, eagle_topk 1, num_draft_tokens {steps + 1}."
        return [Finding(ERROR, "counts_incomplete", text, "all three or none", cure)]
    numbers: dict[str, int] = {}
    for key, value in values.items():
        number = _whole(value)
        if number is None or number < 1:
            text = f"{key} is {value!r}, which is no number of at least 1."
            return [Finding(ERROR, "count_invalid", text, "1 or more", f"Correct {key}.")]
        numbers[key] = number
    steps, topk, tokens = (numbers[key] for key in COUNTS)
    if topk == 1 and tokens != steps + 1:
        text = f"num_draft_tokens is {tokens}; with eagle_topk 1 SGLang takes num_steps + 1 = {steps + 1} instead."
        return [Finding(ERROR, "draft_tokens", text, str(steps + 1), f"Set num_draft_tokens to {steps + 1}.")]
    most = 1 + topk + (steps - 1) * topk * topk
    if tokens > most or tokens < 2:
        text = f"num_draft_tokens is {tokens}; a tree of {steps} steps with topk {topk} gives 2 to {most}."
        return [Finding(ERROR, "draft_tokens", text, f"2 to {most}", f"Set num_draft_tokens to at most {most}.")]
    return _tree_backend(given, topk) if topk > 1 else []


def _tree_backend(given: Mapping[str, Any], topk: int) -> list[Finding]:
    backends = {name for name in _target_backends(given) if name}
    page = _whole(given.get("page_size")) or 1
    if "trtllm_mha" in backends:
        text = f"eagle_topk is {topk}, the attention backend trtllm_mha takes 1."
        return [Finding(ERROR, "topk_backend", text, "1", "Set eagle_topk to 1, or another attention_backend.")]
    wrong = sorted(backends - set(_PAGED_TREES))
    if page > 1 and wrong:
        text = f"eagle_topk {topk} with page_size {page} does not run on {', '.join(wrong)}."
        cure = "Set eagle_topk to 1, page_size to 1, or attention_backend to flashinfer or triton."
        return [Finding(ERROR, "topk_page_size", text, ", ".join(_PAGED_TREES), cure)]
    return []


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()) else None


# Algorithm and drafter


def pairing(algorithm: str, given: Mapping[str, Any], known: Models) -> list[Finding]:
    """The algorithm against the sort of drafter."""
    path = given.get(DRAFTER_ARGUMENT)
    if algorithm == "EAGLE3" and not path and not known.drafter:
        text = "The algorithm EAGLE3 needs a drafter, and none is named."
        return [Finding(ERROR, "drafter_missing", text, DRAFTER_ARGUMENT, "Set sglang_drafter_path.")]
    if algorithm in ("STANDALONE", "DFLASH") and not path and not known.drafter:
        text = f"The algorithm {algorithm} needs a drafter, and none is named."
        return [Finding(ERROR, "drafter_missing", text, DRAFTER_ARGUMENT, "Set sglang_drafter_path.")]
    name = known.drafter.architecture if known.drafter else ""
    kind = known.drafter_kind
    if algorithm in ("EAGLE", "NEXTN") and kind == eagle3.KIND_EAGLE3:
        text = f"The algorithm is {algorithm}, the drafter is for EAGLE-3 ({name}): it would serve and accept nothing."
        return [Finding(ERROR, "algorithm_differs", text, "EAGLE3", "Set the algorithm to EAGLE3.")]
    wanted = {
        eagle3.KIND_EAGLE: "EAGLE",
        eagle3.KIND_MTP: "NEXTN",
        eagle3.KIND_DFLASH: "DFLASH",
        eagle3.KIND_MODEL: "STANDALONE",
    }
    if algorithm == "EAGLE3" and kind in wanted:
        text = f"The algorithm is EAGLE3, but the drafter is {_article(kind)} ({name or 'no architecture'})."
        cure = f"Use an EAGLE-3 drafter, or the algorithm {wanted[kind]}."
        return [Finding(ERROR, "algorithm_differs", text, "an EAGLE-3 drafter", cure)]
    return []


def _article(kind: str) -> str:
    return {eagle3.KIND_MODEL: "a whole model", eagle3.KIND_MTP: "an MTP head"}.get(kind, f"one for {kind}")


# Attention backends


def _target_backends(given: Mapping[str, Any]) -> tuple[str, str]:
    """Prefill and decode backend of the target, '' where SGLang chooses."""
    common = str(given.get("attention_backend") or "")
    return (
        str(given.get("prefill_attention_backend") or common),
        str(given.get("decode_attention_backend") or common),
    )


def attention(given: Mapping[str, Any], algorithm: str, known: Models, host: Host) -> list[Finding]:
    """Backends that this GPU or this algorithm lacks; a drafter without its own inherits the target's."""
    prefill, decode = _target_backends(given)
    own = str(given.get(NAMES["draft_attention_backend"]) or "")
    found = []
    uses = [("the target", prefill), ("the target", decode)]
    inherited = algorithm in _EAGLE_FAMILY and not own
    if algorithm in _EAGLE_FAMILY and own:
        uses.append(("the drafter", own))
    for user, backend in dict.fromkeys(uses):
        for finding in (_on_gpu(backend, host, given), _with_eagle(backend, algorithm)):
            if finding is not None:
                found.append(_for(finding, user, user == "the drafter"))
    if inherited and known.drafter is not None and known.drafter.architecture != eagle3.MLA:
        for backend in sorted({prefill, decode} & set(_MLA_ONLY)):
            text = f"The drafter would inherit the target's attention backend {backend}, which its attention can't use."
            cure = f"Set draft_attention_backend to {SAFE_DRAFT_BACKENDS}."
            found.append(Finding(ERROR, "draft_backend_inherited", text, SAFE_DRAFT_BACKENDS, cure))
    wrong = [finding for finding in found if finding.code == "backend_not_on_gpu"]
    if inherited and wrong and not any(finding.code == "draft_backend_inherited" for finding in found):
        text = "The drafter inherits that attention backend, since it has none of its own."
        cure = f"Set draft_attention_backend to {SAFE_DRAFT_BACKENDS} too."
        found.append(Finding(wrong[0].severity, "draft_backend_not_on_gpu", text, SAFE_DRAFT_BACKENDS, cure))
    return found


def _for(finding: Finding, user: str, draft: bool) -> Finding:
    argument = "draft_attention_backend" if draft else "attention_backend"
    return Finding(
        finding.severity,
        ("draft_" if draft else "") + finding.code,
        finding.found.replace("{user}", user),
        finding.expected,
        finding.cure.replace("{argument}", argument),
    )


def _on_gpu(backend: str, host: Host, given: Mapping[str, Any]) -> Finding | None:
    if not host.compute_capability.startswith("12."):
        return None
    safe, code = SAFE_DRAFT_BACKENDS, "backend_not_on_gpu"
    cure = f"Set {{argument}} to {safe}."
    where = f"compute capability {host.compute_capability}"
    if backend in _NOT_ON_SM120:
        text = f"The attention backend {backend} of {{user}} does not run on {where}: {_NOT_ON_SM120[backend]}."
        return Finding(ERROR, code, text, safe, cure)
    if backend != "trtllm_mha":
        return None
    version = tuple(int(part) for part in re.findall(r"\d+", host.sglang_version)[:3])
    if not version or version < _TRTLLM_MHA_ON_SM120:
        which = f"SGLang {host.sglang_version}" if version else "SGLang before 0.5.23"
        text = f"The attention backend trtllm_mha of {{user}} does not run on {where}: {which} refuses it."
        return Finding(ERROR, code, text, safe, cure)
    if str(given.get("kv_cache_dtype")) == "fp8_e4m3":
        text = f"The attention backend trtllm_mha of {{user}} can't prefill with kv_cache_dtype fp8_e4m3 on {where}."
        return Finding(ERROR, code, text, safe, cure)
    text = f"The attention backend trtllm_mha of {{user}} is new on {where}."
    return Finding(WARNING, "backend_untried", text, safe, f"Where it fails, set {{argument}} to {safe}.")


def _with_eagle(backend: str, algorithm: str) -> Finding | None:
    if algorithm not in _EAGLE_FAMILY or backend not in _NO_EAGLE:
        return None
    text = f"The attention backend {backend} of {{user}} can't do {algorithm}."
    return Finding(
        ERROR, "backend_without_eagle", text, SAFE_DRAFT_BACKENDS, f"Set {{argument}} to {SAFE_DRAFT_BACKENDS}."
    )


# Quantization and parallelism


def _quantization(given: Mapping[str, Any], known: Models) -> list[Finding]:
    target = given.get("quantization")
    if not target or given.get(NAMES["draft_model_quantization"]) or DRAFTER_ARGUMENT not in given:
        return []
    if known.drafter is not None and known.drafter.quantized:
        return []
    text = f"The drafter inherits quantization {target} of the target."
    cure = "Set draft_model_quantization to unquant, unless the drafter is quantized so."
    return [Finding(WARNING, "draft_quantization_inherited", text, "unquant", cure)]


def parallelism(given: Mapping[str, Any], known: Models, host: Host) -> list[Finding]:
    """Tensor parallelism against the attention heads and the GPUs."""
    found = []
    tp, pp, dp, nodes = (_whole(given.get(name, 1)) for name in ("tp_size", "pp_size", "dp_size", "nnodes"))
    for name, value in (("tp_size", tp), ("pp_size", pp), ("dp_size", dp), ("nnodes", nodes)):
        if value is None or value < 1:
            text = f"{name} is {given.get(name)!r}, which is no number of at least 1."
            found.append(Finding(ERROR, "size_invalid", text, "1 or more", f"Correct {name}."))
    if tp is None or pp is None or dp is None or nodes is None or found:
        return found
    # With DP attention each group of tp / dp ranks shares the heads.
    attention_tp = tp // dp if given.get("enable_dp_attention") and tp % dp == 0 else tp
    for whose, facts in (("target", known.target), ("drafter", known.drafter)):
        if facts is None or not facts.heads or facts.heads % attention_tp == 0:
            continue
        fitting = [size for size in range(1, facts.heads + 1) if facts.heads % size == 0 and size <= 64]
        text = f"The {whose}'s {facts.heads} attention heads can't be shared by tp_size {attention_tp}."
        cure = f"Set tp_size to one of {', '.join(map(str, fitting))}."
        found.append(Finding(ERROR, "tp_heads", text, ", ".join(map(str, fitting)), cure))
    for whose, facts in (("target", known.target), ("drafter", known.drafter)):
        if facts is None or not facts.kv_heads or not facts.heads or facts.heads % attention_tp:
            continue
        if facts.kv_heads % attention_tp and attention_tp % facts.kv_heads:
            text = f"The {whose}'s {facts.kv_heads} KV heads and tp_size {attention_tp} don't divide each other."
            cure = f"Set tp_size to a divisor or a multiple of {facts.kv_heads}."
            found.append(Finding(ERROR, "tp_kv_heads", text, "a divisor or a multiple", cure))
    ranks = tp * pp * (1 if given.get("enable_dp_attention") else dp)
    if ranks % nodes:
        text = f"{ranks} ranks (tp_size {tp}, pp_size {pp}) can't be spread evenly over {nodes} hosts."
        found.append(Finding(ERROR, "ranks_uneven", text, f"a multiple of {nodes}", "Correct tp_size or nnodes."))
    elif host.gpus and ranks // nodes > host.gpus:
        text = f"The server needs {ranks // nodes} GPUs a host, {host.gpus} are there for it."
        found.append(
            Finding(ERROR, "too_few_gpus", text, f"at most {host.gpus}", "Lower tp_size, or give it more GPUs.")
        )
    elif host.gpus and ranks // nodes < host.gpus:
        text = f"The server uses {ranks // nodes} of the {host.gpus} GPUs that are there for it."
        found.append(Finding(INFO, "gpus_unused", text))
    return found
