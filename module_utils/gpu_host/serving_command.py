"""From variables to the command line of an SGLang server, with what must not stand on a command line kept apart.

Arguments are data: SGLang's own names with underscores, and values. What is secret goes by a YAML file of mode 0600
that `--config` names (SGLang 0.5.17 and 0.5.23 read it before anything else; a process list shows its path alone).
"""

from __future__ import annotations

import ast
import difflib
import ipaddress
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import masking, speculation

MODULE = "sglang.launch_server"
# Each is set by a variable of its own, which other roles read as well.
OWN_VARIABLES = {
    "model_path": "sglang_model_path",
    "model": "sglang_model_path",
    "host": "sglang_host",
    "port": "sglang_port",
    "api_key": "sglang_api_key",
    "config": "sglang_arguments",
    "nnodes": "sglang_nodes",
    "node_rank": "sglang_nodes",
    "dist_init_addr": "sglang_dist_init_addr",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
# Quotes and backslashes would have to survive YAML, argparse and HTTP headers alike; a leading dash argparse.
_KEY = re.compile(r"[A-Za-z0-9_.~+/=:@!#%^*(),?][A-Za-z0-9_.~+/=:@!#%^*(),?-]{7,}")


@dataclass(frozen=True)
class Serving:
    """What is to be served. `nodes` hosts share the server, this one is `node_rank` of them."""

    python: str
    model_path: str
    drafter_path: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str = field(default="", repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""


def argv(serving: Serving, config_path: str) -> tuple[str, ...]:
    """The command line. `config_path` is named only where `secret_arguments` has something to put there."""
    words = [serving.python, "-m", MODULE]
    if secret_arguments(serving):
        words += ["--config", config_path]
    words += ["--model-path", serving.model_path, "--host", serving.host, "--port", str(serving.port)]
    words += [word for name, value in serving.arguments.items() if not _secret(name) for word in _words(name, value)]
    if serving.speculation.get("algorithm"):
        asked = speculation.arguments_of(serving.speculation, serving.drafter_path)
        words += [word for name, value in asked.items() for word in _words(name, value)]
    if serving.nodes > 1:
        words += ["--nnodes", str(serving.nodes), "--node-rank", str(serving.node_rank)]
        words += ["--dist-init-addr", serving.dist_init_addr]
    return tuple(words)


def _words(name: str, value: Any) -> list[str]:
    """True is a flag, False and None are nothing, a list is several values, a dictionary is JSON."""
    option = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, (list, tuple)):
        return [option, *map(_text, value)] if value else []
    return [option, _text(value)]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping) else str(value)


def _secret(name: str) -> bool:
    return masking.is_secret_name(name)


def secret_arguments(serving: Serving) -> dict[str, str]:
    """The arguments that go by the config file, by option name."""
    found = {"api-key": serving.api_key} if serving.api_key else {}
    for name, value in serving.arguments.items():
        if _secret(name) and value not in (None, False, ""):
            found[name.replace("_", "-")] = str(value)
    return found


def config_text(serving: Serving) -> str:
    """The config file, '' where there is nothing secret. A JSON text is YAML as well."""
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in secret_arguments(serving).items()]
    return "".join(lines)


def problems(serving: Serving, known: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with it, one sentence each. `known` are the options of the installed SGLang, empty where it can't
    tell. The speculation and the parallel sizes are judged in `speculation`."""
    found = _argument_problems(serving.arguments, known)
    if not 1 <= serving.port <= 65535:
        found.append(f"sglang_port: {serving.port} is no port; give a number from 1 to 65535.")
    for name, value in secret_arguments(serving).items():
        if not _KEY.fullmatch(value):
            found.append(
                f"The {name} can't be used: give at least 8 letters, digits and punctuation, without quotes,"
                " backslashes and blanks, not beginning with a dash."
            )
    if not serving.api_key and not loopback(serving.host):
        found.append(
            f"sglang_host: {serving.host} would serve the whole network without a key; set sglang_api_key, or keep"
            " 127.0.0.1."
        )
    if serving.nodes > 1:
        found += _meeting_problems(serving.dist_init_addr)
    return found


def _meeting_problems(where: str) -> list[str]:
    """What keeps the ranks of several hosts from meeting there."""
    address, _, port = where.rpartition(":")
    wanted = "give address:port of the first of the hosts in sglang_nodes, as the other hosts reach it"
    if not address or not port.isdigit() or not 1 <= int(port) <= 65535:
        return [f"sglang_dist_init_addr: {where!r} is no address and port; {wanted}."]
    if loopback(address.strip("[]")):
        return [f"sglang_dist_init_addr: {where} is reached from one host alone; {wanted}."]
    return []


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _argument_problems(arguments: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    found = []
    for name, value in arguments.items():
        if name in OWN_VARIABLES:
            found.append(f"sglang_arguments: {name} is set by the variable {OWN_VARIABLES[name]}; take it out.")
        elif not _NAME.fullmatch(name):
            found.append(
                f"sglang_arguments: {name!r} is no argument's name; write it with underscores, as {_spelling(name)}."
            )
        elif problem := _unknown(name, known):
            found.append(f"sglang_arguments: {problem}")
        elif "\n" in _text(value) or "\0" in _text(value):
            found.append(f"sglang_arguments: {name} has a value of several lines; give one line.")
    return found


def _spelling(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "tp_size"


def _unknown(name: str, known: frozenset[str]) -> str:
    option = "--" + name.replace("_", "-")
    # argparse takes a beginning for the whole, as --tp for --tp-size.
    if not known or any(one.startswith(option) for one in known):
        return ""
    near = [one[2:].replace("-", "_") for one in difflib.get_close_matches(option, sorted(known), 3, 0.7)]
    return f"the installed SGLang has no argument {name}" + (f"; near it: {', '.join(near)}." if near else ".")


def known_options(package: str) -> frozenset[str]:
    """The options of the SGLang in this package folder, from its sources: importing it takes seconds and a GPU.

    They are fields (in srt/server_args.py with 0.5.17, in srt/arg_groups with 0.5.23) and some spelt-out options.
    Empty where neither is to be found: then nothing can be said about a name.
    """
    found: set[str] = set()
    for path in _argument_sources(os.path.join(package, "srt")):
        try:
            with open(path, encoding="utf-8") as file:
                tree = ast.parse(file.read())
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _OPTION.fullmatch(node.value):
                found.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _annotated(node.annotation):
                found.add("--" + node.target.id.replace("_", "-"))
    return frozenset(found) if len(found) > 50 else frozenset()


def _annotated(annotation: ast.expr) -> bool:
    """Written as A[type, Arg(...)], which is how SGLang declares a field that is an argument as well."""
    return (
        isinstance(annotation, ast.Subscript)
        and isinstance(annotation.value, ast.Name)
        and annotation.value.id in ("A", "Annotated")
    )


def _argument_sources(folder: str) -> Iterable[str]:
    yield os.path.join(folder, "server_args.py")
    for place, _, names in os.walk(os.path.join(folder, "arg_groups")):
        for name in names:
            if name.endswith(".py"):
                yield os.path.join(place, name)
