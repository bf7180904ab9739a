"""SGLang's own benchmark client, with notes on what its report leaves out. A program of its own.

It runs on the server's Python, as ``python bench_client.py NOTES ARGUMENTS..``, and imports nothing of this package.
The client keeps for each request how long it took and the accept length that the server told, but writes neither:
they are noted in the file NOTES (a JSON object a line) between the last answer and the client's own statistics, where
they cost no measured time. A version of the client that is built otherwise runs as it is, without notes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import sys
from typing import Any, Callable

# The newest name first; the old one is still there as a warning.
MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
PACKAGES = ("sglang", "torch", "transformers")


def note(path: str, **facts: Any) -> None:
    """Append one line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def versions() -> dict[str, str]:
    """Of the packages that matter, without importing them."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def load() -> tuple[str, Any]:
    """The client's name and module. ImportError where it is there and can't be imported, or is not there at all."""
    for name in MODULES:
        try:
            return name, importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            missing = error
    raise missing


def noting(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """calculate_metrics, which gets every request's outcome, preceded by the note of them."""

    @functools.wraps(original)
    def calculate(*args: Any, **kwargs: Any) -> Any:
        outputs = kwargs.get("outputs", args[1] if len(args) > 1 else None)
        try:
            rows = [row(one) for one in outputs or ()]
            began = [one.start_time for one in outputs or () if one.success]
            ended = [one.start_time + one.latency for one in outputs or () if one.success]
            # perf_counter, which on Linux is the monotonic clock of the whole host.
            note(path, event="requests", rows=rows, began=min(began, default=None), ended=max(ended, default=None))
        except Exception as error:
            note(path, event="unknown_client", why=f"{type(error).__name__}: {error}")
        return original(*args, **kwargs)

    return calculate


def row(output: Any) -> dict[str, Any]:
    """One request; seconds. An accept length of 0 is the client's word for none told."""
    return {
        "success": bool(output.success),
        "ttft": output.ttft,
        "latency": output.latency,
        "output_tokens": output.output_len,
        "accept_length": getattr(output, "spec_accept_length", None) or None,
        "error": output.error,
    }


def main() -> None:
    path = sys.argv.pop(1)
    sys.path[0] = ""  # as with -m, not the folder of this file
    try:
        name, module = load()
    except Exception as error:
        note(path, event="import_failed", why=f"{type(error).__name__}: {error}")
        raise
    client = sys.modules[getattr(getattr(module, "cli_main", None), "__module__", name)]
    sys.argv[0] = str(getattr(client, "__file__", name))
    noted = hasattr(client, "cli_main") and hasattr(client, "calculate_metrics")
    note(path, event="begin", module=name, versions=versions(), noted=noted, pid=os.getpid())
    if noted:
        client.calculate_metrics = noting(path, client.calculate_metrics)  # type: ignore[attr-defined]
        client.cli_main()
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
