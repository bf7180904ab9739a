"""Long work on a host, told while it goes on.

A module that can't finish within one call (a build, a copy, a start) works in a process of its own on the host and
returns ``unfinished: true`` with ``progress``, one line for people. It is called again with the same parameters until
it has finished; each call waits for news for ``patience`` seconds. A connection that is lost costs a call, not the
work: the next run of the play finds it going on, or finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Seconds that one call waits for news: a line at least every 15 s, the call itself included.
PATIENCE = 13.0


def follow(call: Callable[[], dict[str, Any]], tell: Callable[[str], None], host: str) -> dict[str, Any]:
    """Call until the work has finished; `tell` gets a line after each call that did not finish it."""
    told = ""
    returned = call()
    while returned.get("unfinished") and not returned.get("failed"):
        line = f"  {host}: {returned.get('progress') or 'no news'}"
        tell(line if line != told else f"{line} (no change)")
        told = line
        returned = call()
    returned.pop("unfinished", None)
    return returned
