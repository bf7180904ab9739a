"""``python -m sglang_router.launch_router``: a router that waits for requests nobody sends."""

from __future__ import annotations

if __name__ == "__main__":
    import signal

    while True:
        signal.pause()
