"""``sglang serve ARGS``: SGLang's second entry point."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    if sys.argv[1:2] != ["serve"]:
        print("usage: sglang serve --model-path MODEL [options]", file=sys.stderr)
        return 2
    from sglang.standin.main import run

    return run(sys.argv[2:], program="sglang serve")
