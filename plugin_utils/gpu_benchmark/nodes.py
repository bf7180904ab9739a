"""A server over several hosts: its first host, the head, is measured and gives the results their name; the others go
through the same steps beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# So the others of a server say that one of them failed: it is not a cause of their own.
SHARED = ", which shares this server,"


def head(nodes: Any, host: str) -> str:
    """The host under whose name the results of a host's server are kept."""
    several = isinstance(nodes, Sequence) and not isinstance(nodes, str) and len(nodes) > 1
    return str(nodes[0]) if several else host


def problems(
    nodes: Any, host: str, of_others: Mapping[str, Any], here: Sequence[str], begun: Sequence[str]
) -> list[str]:
    """What keeps the hosts of one server from being measured together, one sentence. `of_others`: sglang_nodes of each
    of them, `begun`: the play's hosts, `here`: those of them that are left."""
    if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not all(isinstance(one, str) for one in nodes):
        return [f"sglang_nodes is {nodes!r}, not a list of inventory names."]
    if len(nodes) < 2:
        return []
    shared = ", ".join(nodes)
    if len(set(nodes)) < len(nodes) or host not in nodes:
        return [f"sglang_nodes is {shared}: give each host of the server once, {host} among them."]
    for one in nodes:
        if one in of_others and list(of_others[one] or []) != list(nodes):
            return [
                f"sglang_nodes of {one} differs from that of {host} ({shared}); say it in a group that both are in."
            ]
    if any(one not in begun for one in nodes):
        return [f"One server runs over {shared}, and this play has not all of them; say --limit {','.join(nodes)}."]
    gone = lost(nodes, here)
    return [f"{gone}{SHARED} failed or could not be reached; its own message says why."] if gone else []


def lost(nodes: Sequence[str], here: Sequence[str]) -> str:
    """Those that have dropped out of the play."""
    return " and ".join(one for one in nodes if one not in here) if len(nodes) > 1 else ""


def failure(of_nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Why a start failed, from what each of its hosts says (with `node`, `rank` and `seconds` until its part ended):
    one that has a cause of its own goes before those that only tell of another; then one that is explained; then the
    first one, since the others die of it."""
    own = [one for one in of_nodes if SHARED not in str(one.get("cause"))] or list(of_nodes)
    best = min(own, key=lambda one: (not one.get("cure"), not one.get("evidence_line"), _seconds(one)))
    chosen = dict(best)
    node, rank, _ = chosen.pop("node", ""), chosen.pop("rank", 0), chosen.pop("seconds", 0)
    if node:
        chosen["cause"] = f"{node} (node rank {rank}): {chosen.get('cause')}"
    return chosen


def _seconds(one: Mapping[str, Any]) -> float:
    value = one.get("seconds")
    return float(value) if isinstance(value, (int, float)) else 0.0
