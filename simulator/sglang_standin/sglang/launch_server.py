"""``python -m sglang.launch_server``: the server's main process. Spawned children import this module too."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from sglang.standin.main import run

    sys.exit(run(sys.argv[1:], program="launch_server.py"))
