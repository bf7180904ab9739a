"""Draws what the kills at any instant left, and what came back: ``python plot_instants.py DATA.json PLOT.png``.

Runs where matplotlib is installed, which `make rehearsal-instants` sees to (the rehearsal's own environment).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {
    "sglang.launch_server": ("main", "#444444"),
    "multiprocessing.resource_tracker": ("resource tracker", "#bbbbbb"),
    "multiprocessing.spawn": ("child that still imports", "#e08214"),
    "sglang::scheduler": ("scheduler", "#b2182b"),
    "sglang::detokenizer": ("detokenizer", "#f4a582"),
    "other": ("g++, cc1plus", "#2166ac"),
}


def kind(name: str) -> str:
    return name if name in KINDS else "other"


def main(data: Path, plot: Path) -> None:
    result = json.loads(data.read_text())
    rows = [one for one in result["instants"] if one["reset"]]
    controls = [one for one in result["instants"] if not one["reset"]]
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 7), sharex=True, height_ratios=(2, 1))
    width = result["start_up_seconds"] / 75

    bottoms = [0] * len(rows)
    for name, (label, colour) in KINDS.items():
        heights = [sum(kind(one) == name for one in row["left"]) for row in rows]
        if any(heights):
            above.bar([row["at"] for row in rows], heights, width, bottoms, color=colour, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for row, top in zip(rows, bottoms, strict=True):
        clean = row["verdict"] == "clean" and not row["back"]
        mark, colour = ("$\\checkmark$", "#1b7837") if clean else ("x", "#d6604d")
        above.plot(row["at"], top + 0.35, marker=mark, color=colour, markersize=9, linestyle="none")
    above.set_ylabel("processes left right after the kill")
    above.set_title(
        f"SGLang {result['sglang']} with {result['speculation']} on a CPU: main killed at {len(rows)} instants of its"
        f" start-up, then reset\n\u2713 verdict clean, and nothing back {result['watch_seconds']:.0f} s later",
        fontsize=11,
    )
    above.set_ylim(0, max(bottoms, default=0) + 1.2)
    above.legend(fontsize=8, loc="upper left", ncols=2)

    times, later = [row["at"] for row in rows], f"{result['watch_seconds']:.0f} s later"
    below.plot(times, [row["left_mib"] for row in rows], "o", color="#b2182b", label="at the kill")
    style = {"color": "#1b7837", "markersize": 12, "markeredgewidth": 2, "linestyle": "none"}
    below.plot(times, [row["back_mib"] for row in rows], marker="_", label=f"{later}, reset", **style)
    times = [row["at"] for row in controls]
    style = {"color": "none", "markeredgecolor": "#2166ac", "markersize": 8, "linestyle": "none"}
    below.plot(
        times,
        [row["back_mib"] for row in controls],
        marker="D",
        label=f"at most within {result['watch_seconds']:.0f} s, not reset",
        **style,
    )
    for row in controls:
        place = {"textcoords": "offset points", "xytext": (7, 5)}
        below.annotate(f"{len(row['back'])}", (row["at"], row["back_mib"]), fontsize=8, color="#2166ac", **place)
    below.set_ylabel("MiB of the simulated GPU")
    below.set_ylim(-80, 1450)
    below.set_xlabel("seconds after the start (at diamonds: processes still there in the end)")
    below.legend(fontsize=8, loc="center left")
    figure.tight_layout()
    figure.savefig(plot, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
