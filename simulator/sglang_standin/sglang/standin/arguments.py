"""SGLang's arguments: their names and defaults are those that a real server answered in /server_info."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "speculative_draft_model": "speculative_draft_model_path",
    "mem_fraction": "mem_fraction_static",
}
WHOLE_NUMBERS = {
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "max_queued_requests",
    "cuda_graph_max_bs_decode",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "dist_timeout",
}
FRACTIONS = {"mem_fraction_static"}


class Refused(Exception):
    """The arguments are refused as argparse would; status 2."""


def recorded(version: str) -> dict[str, Any]:
    """`arguments` and `internal_state` as recorded from that version."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"arguments-{version}.json").read_text())
    return found


def answers(version: str) -> dict[str, Any]:
    """What a real server of that version answered besides what the stand-in works out, by endpoint.

    0.5.17 was not asked for it; what it has by its source is in the code.
    """
    path = Path(__file__).parent / f"answers-{version}.json"
    parts = (
        "model_info",
        "load",
        "meta_info",
        "finished_meta_info",
        "server_info",
        "metrics",
        "metrics_with_speculation",
    )
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {part: {} for part in parts}
    return found


def parse(argv: list[str], version: str) -> dict[str, Any]:
    """All arguments by name. Unknown options are accepted and kept out. Raises `Refused`."""
    arguments: dict[str, Any] = recorded(version)["arguments"]
    argv = _with_config(argv)
    index = 0
    while index < len(argv):
        option = argv[index]
        index += 1
        if not option.startswith("--"):
            continue
        name, has_value, text = option[2:].partition("=")
        values = [text] if has_value else []
        while not has_value and index < len(argv) and not argv[index].startswith("--"):
            values.append(argv[index])
            index += 1
        name = name.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in arguments:
            arguments[name] = _converted(name, arguments[name], values)
    if not arguments["model_path"]:
        raise Refused("the following arguments are required: --model-path/--model")
    return _resolved(arguments)


def _with_config(argv: list[str]) -> list[str]:
    """The file of `--config` put before the command line, as SGLang does; plain `name: value` lines only."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    path = Path(argv[at + 1] if at + 1 < len(argv) else "")
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise SystemExit(f"ValueError: Config file not found: {path}")
    words = []
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon and not line.startswith("#"):
            text = value.strip()
            words += [f"--{name.strip()}", str(json.loads(text)) if text.startswith('"') else text]
    return words + argv[:at] + argv[at + 2 :]


def _converted(name: str, default: object, values: list[str]) -> object:
    if isinstance(default, bool) and not values:
        return True
    if not values:
        raise Refused(f"argument --{name.replace('_', '-')}: expected one argument")
    text = values[0]
    try:
        if isinstance(default, bool):
            return text.lower() in ("1", "true", "yes")
        if name in WHOLE_NUMBERS or isinstance(default, int):
            return int(text)
        if name in FRACTIONS or isinstance(default, float):
            return float(text)
    except ValueError:
        raise Refused(f"argument --{name.replace('_', '-')}: invalid value: {text!r}") from None
    return text if len(values) == 1 else values


def _resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    path = arguments["model_path"]
    arguments["tokenizer_path"] = arguments["tokenizer_path"] or path
    arguments["served_model_name"] = arguments["served_model_name"] or path
    arguments["random_seed"] = arguments["random_seed"] or random.randint(0, 2**30)
    arguments["attention_backend"] = arguments["attention_backend"] or "flashinfer"
    arguments["sampling_backend"] = arguments["sampling_backend"] or "flashinfer"
    arguments["grammar_backend"] = arguments["grammar_backend"] or "xgrammar"
    arguments["mem_fraction_static"] = arguments["mem_fraction_static"] or 0.846
    if arguments["speculative_algorithm"]:
        arguments["speculative_draft_model_revision"] = "main"
        arguments["max_running_requests"] = arguments["max_running_requests"] or 48
    return arguments


def refusal(arguments: dict[str, Any]) -> str:
    """Name of the recorded failure that these arguments run into before any process starts; '' if none."""
    if not arguments["speculative_algorithm"]:
        return ""
    steps, topk, tokens = (arguments[f"speculative_{n}"] for n in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if steps is None and (topk is not None or tokens is not None):
        return "steps-missing-topk-given"
    if steps is not None and (topk is None or tokens is None):
        return "topk-missing"
    return ""


def fill_speculation(arguments: dict[str, Any]) -> None:
    """Defaults of the three speculation numbers, and topk 1's draft tokens = steps + 1."""
    if not arguments["speculative_algorithm"]:
        return
    if arguments["speculative_num_steps"] is None:
        numbers = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
        arguments.update({f"speculative_{n}": number for n, number in numbers.items()})
    if arguments["speculative_eagle_topk"] == 1:
        arguments["speculative_num_draft_tokens"] = arguments["speculative_num_steps"] + 1


def described(arguments: dict[str, Any], version: str) -> str:
    """The server_args line of the log, api_key and all."""
    if version == "0.5.17":
        return "server_args=ServerArgs(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"
    return f"server_args={arguments!r}"


class Model:
    """What config.json of the model and the drafter say, as far as the stand-in needs it."""

    def __init__(self, arguments: dict[str, Any], max_context: int) -> None:
        config = _config(arguments["model_path"])
        text = config.get("text_config") or config
        self.context = arguments["context_length"] or text.get("max_position_embeddings") or max_context
        self.type = config.get("model_type") or "kimi_k25"
        self.architecture = (config.get("architectures") or ["KimiK25ForConditionalGeneration"])[0]
        draft = _config(arguments["speculative_draft_model_path"])
        self.draft_architecture = (draft.get("architectures") or ["LlamaForCausalLMEagle3"])[0]
        self.draft_context = draft.get("max_position_embeddings")
        self.shards = len(_shards(arguments["model_path"])) or 1

    def draft_too_short(self) -> bool:
        """Whether SGLang refuses the drafter for its context length."""
        allowed = os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0").lower() in ("1", "true")
        return bool(self.draft_context and self.context > self.draft_context and not allowed)


def _config(folder: str | None) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((Path(folder or "") / "config.json").read_text())
        return found
    except (OSError, ValueError):
        return {}


def _shards(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    except OSError:
        return []
