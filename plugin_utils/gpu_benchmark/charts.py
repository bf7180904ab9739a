"""The charts of a report, as PNG files and as SVG to put into a page. Legible in grey: each variant has its own marker,
line style and hatch besides its colour.

matplotlib is imported when something is drawn: no other play of the control node needs it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Black for the baseline; then the colours of Okabe and Ito, dark and light in turn.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#7F6000", "#8C564B")
_MARKERS = "osD^vPX*"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)))
_HATCHES = ("", "///", "\\\\\\", "xx", "--", "||", "++", "//--")
# Inches. Narrow, so that it can be read on a phone without turning it.
SIZE = (4.7, 3.7)


@dataclass(frozen=True)
class Chart:
    """`name` is the file's without its suffix, `text` what it shows in words, for those who don't see it."""

    name: str
    title: str
    text: str
    svg: str
    png: bytes


def draw(host: dict[str, Any]) -> list[Chart]:
    """The charts of one host: speed-up, throughput, accept length against break-even, first token, energy."""
    made = []
    loads = host["loads"][:4]
    for load in loads:
        rows = [row for row in host["rows"] if _is_of(row, load)]
        if not rows:
            continue
        tail = f"-{load['prompt_set']}-o{load['output_length']}" + (
            f"-i{load['input_length']}" if load["input_length"] else ""
        )
        name = f"{_word(host['host'])}{tail if len(loads) > 1 else ''}"
        where = f"\n{load['title']}" if len(loads) > 1 else ""
        names = [one["name"] for one in host["variants"] if any(row["variant"] == one["name"] for row in rows)]
        styles = {one["name"]: _style(number) for number, one in enumerate(host["variants"])}
        for maker in (_speed_up, _throughput, _accept_length, _first_token, _energy):
            chart = maker(host, rows, names, styles, name, where)
            if chart is not None:
                made.append(chart)
    return made


def _is_of(row: dict[str, Any], load: dict[str, Any]) -> bool:
    return all(row[key] == load[key] for key in ("prompt_set", "input_length", "output_length"))


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


@dataclass(frozen=True)
class _Style:
    colour: str
    marker: str
    line: Any
    hatch: str


def _style(number: int) -> _Style:
    one = number % len(_COLOURS)
    return _Style(_COLOURS[one], _MARKERS[one], _LINES[one], _HATCHES[one])


def _figure(title: str, maker: Callable[[Any], None], name: str, text: str) -> Chart:
    """Draws on axes of its own and renders twice."""
    import matplotlib

    settings: Any = {
        "font.family": ["DejaVu Sans", "sans-serif"], "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True,
        "svg.fonttype": "none", "svg.hashsalt": "benchmark", "hatch.linewidth": 0.6, "legend.frameon": False,
        "legend.fontsize": 9, "axes.titlesize": 11, "axes.titlelocation": "left", "lines.markersize": 6,
    }  # fmt: skip
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(settings):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        maker(axes)
        png, svg = io.BytesIO(), io.StringIO()
        FigureCanvasAgg(figure).print_figure(png, dpi=160, format="png", metadata={"Software": None})
        FigureCanvasSVG(figure).print_figure(svg, format="svg", metadata={"Date": None})
    return Chart(name, title.replace("\n", ", "), text, inline(svg.getvalue(), name, text), png.getvalue())


def inline(svg: str, name: str, text: str) -> str:
    """An SVG file as a part of a page: no prolog, no fixed size, its ids its own, a text for those who don't see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", name)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height|version)="[^"]*"', "", head)
    label = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head} role="img" aria-label="{label}">{rest}'.strip()


def _concurrency_axis(axes: Any, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel("requests at a time")
    if len(values) == 1:
        axes.set_xlim(values[0] / 2, values[0] * 2)


def _legend(axes: Any, count: int) -> None:
    axes.figure.legend(loc="outside lower center", ncols=2 if count > 1 else 1, handlelength=3.2, columnspacing=1.2)


def _concurrencies(rows: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["concurrency"] for row in rows})


def _line(rows: Sequence[dict[str, Any]], name: str, key: str) -> list[tuple[int, dict[str, Any]]]:
    return sorted(
        ((row["concurrency"], row) for row in rows if row["variant"] == name and row.get(key) is not None),
        key=lambda one: one[0],
    )


def _speed_up(host: Any, rows: Any, names: Any, styles: Any, name: str, where: str) -> Chart | None:
    shown = [one for one in names if _line(rows, one, "speed_up")]
    if not shown:
        return None
    everything = _concurrencies(rows)

    def maker(axes: Any) -> None:
        axes.axhline(1, color="#000000", linewidth=1.2)
        spread = (max(everything) / min(everything)) ** 0.015 if len(everything) > 1 else 1.03
        for number, one in enumerate(shown):
            style, points = styles[one], _line(rows, one, "speed_up")
            shift = spread ** (number - (len(shown) - 1) / 2)
            x, y = [at * shift for at, _ in points], [row["speed_up"] for _, row in points]
            ends = [[row["speed_up"] - (row["speed_up_low"] or row["speed_up"]) for _, row in points],
                    [(row["speed_up_high"] or row["speed_up"]) - row["speed_up"] for _, row in points]]  # fmt: skip
            axes.errorbar(x, y, yerr=ends, color=style.colour, marker=style.marker, linestyle=style.line, capsize=4,
                          label=one, markerfacecolor="white", markeredgewidth=1.6)  # fmt: skip
        axes.set_ylabel("times the baseline")
        highest = max(
            row["speed_up_high"] or row["speed_up"] for one in shown for _, row in _line(rows, one, "speed_up")
        )
        axes.set_ylim(0, max(highest, 1) * 1.1)
        _concurrency_axis(axes, everything)
        _legend(axes, len(shown))

    parts = [f"{one} at {at}: {row['speed_up']:.2f}" for one in shown for at, row in _line(rows, one, "speed_up")]
    return _figure(f"Speed-up with its interval{where}", maker, f"{name}-speed-up", f"Speed-up. {'; '.join(parts)}.")


def _throughput(host: Any, rows: Any, names: Any, styles: Any, name: str, where: str) -> Chart | None:
    everything = _concurrencies(rows)

    def maker(axes: Any) -> None:
        for one in names:
            style, points = styles[one], _line(rows, one, "tokens_per_s")
            axes.plot([at for at, _ in points], [row["tokens_per_s"] for _, row in points], color=style.colour,
                      marker=style.marker, linestyle=style.line, label=one, markerfacecolor="white",
                      markeredgewidth=1.6)  # fmt: skip
        axes.set_ylabel("output tokens a second, all requests")
        axes.set_yscale("log")
        _plain_ticks(axes)
        _concurrency_axis(axes, everything)
        _legend(axes, len(names))

    parts = [
        f"{one} at {at}: {row['tokens_per_s']:.1f}" for one in names for at, row in _line(rows, one, "tokens_per_s")
    ]
    return _figure(f"Throughput{where}", maker, f"{name}-throughput", f"Output tokens a second. {'; '.join(parts)}.")


def _plain_ticks(axes: Any) -> None:
    """Numbers as people write them, at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bars(
    axes: Any,
    groups: Sequence[int],
    names: Sequence[str],
    styles: Any,
    value: Callable[[str, int], float | None],
    mark: Callable[[str, int], float | None] | None = None,
) -> None:
    """Bars side by side at each concurrency, a thick line across each where `mark` says."""
    width = 0.8 / max(len(names), 1)
    for number, one in enumerate(names):
        style = styles[one]
        for place, group in enumerate(groups):
            height, left = value(one, group), place - 0.4 + number * width
            if height is None:
                axes.text(left + width / 2, 0, "not measurable", rotation=90, ha="center", va="bottom", fontsize=8)
                continue
            axes.bar(left + width / 2, height, width * 0.9, facecolor="white" if style.hatch else style.colour,
                     edgecolor=style.colour, hatch=style.hatch, label=one if place == 0 else None)  # fmt: skip
            line = mark(one, group) if mark else None
            if line is not None:
                axes.plot([left, left + width], [line, line], color="#000000", linewidth=3, solid_capstyle="butt")
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlabel("requests at a time")
    axes.grid(False, axis="x")


def _accept_length(host: Any, rows: Any, names: Any, styles: Any, name: str, where: str) -> Chart | None:
    shown = [one for one in names if any(row["variant"] == one and row["speculates"] for row in rows)]
    if not any(row["accept_length"] is not None for row in rows if row["speculates"]):
        return None
    groups = _concurrencies(rows)
    cells = {(row["variant"], row["concurrency"]): row for row in rows}
    needed = {(one["variant"], one["cell"]): one.get("break_even_accept_length") for one in host["explanations"]}

    def value(one: str, group: int) -> float | None:
        row = cells.get((one, group))
        return row["accept_length"] if row else None

    def mark(one: str, group: int) -> float | None:
        row = cells.get((one, group))
        return needed.get((one, row["cell"])) if row else None

    def maker(axes: Any) -> None:
        _bars(axes, groups, shown, styles, value, mark)
        axes.plot([], [], color="#000000", linewidth=3, label="needed to break even")
        axes.set_ylabel("tokens a verify step")
        _legend(axes, len(shown) + 1)

    parts = [
        f"{one} at {group}: {_number(value(one, group))}, needed {_number(mark(one, group))}"
        for one in shown for group in groups if (one, group) in cells
    ]  # fmt: skip
    title = f"Accept length, and what it has to be{where}"
    return _figure(title, maker, f"{name}-accept-length", f"Accept length. {'; '.join(parts)}.")


def _number(value: float | None) -> str:
    return "not measurable" if value is None else f"{value:.2f}"


def _first_token(host: Any, rows: Any, names: Any, styles: Any, name: str, where: str) -> Chart | None:
    if not any(row["ttft_p50_ms"] is not None for row in rows):
        return None
    groups = _concurrencies(rows)
    cells = {(row["variant"], row["concurrency"]): row for row in rows}

    def maker(axes: Any) -> None:
        _bars(
            axes, groups, names, styles,
            lambda one, group: (cells.get((one, group)) or {}).get("ttft_p50_ms"),
            lambda one, group: (cells.get((one, group)) or {}).get("ttft_p99_ms"),
        )  # fmt: skip
        axes.plot([], [], color="#000000", linewidth=3, label="99 of 100 requests")
        axes.set_ylabel("ms, half of the requests")
        _legend(axes, len(names) + 1)

    parts = [f"{one} at {group}: {_number(cells[one, group]['ttft_p50_ms'])} ms" for one in names for group in groups
             if (one, group) in cells]  # fmt: skip
    return _figure(f"Time to the first token{where}", maker, f"{name}-first-token", f"{'; '.join(parts)}.")


def _energy(host: Any, rows: Any, names: Any, styles: Any, name: str, where: str) -> Chart | None:
    if not any(row["tokens_per_joule"] is not None for row in rows):
        return None
    groups = _concurrencies(rows)
    cells = {(row["variant"], row["concurrency"]): row for row in rows}

    def maker(axes: Any) -> None:
        _bars(axes, groups, names, styles, lambda one, group: (cells.get((one, group)) or {}).get("tokens_per_joule"))
        axes.set_ylabel("output tokens a joule")
        _legend(axes, len(names))

    parts = [f"{one} at {group}: {_number(cells[one, group]['tokens_per_joule'])}" for one in names for group in groups
             if (one, group) in cells]  # fmt: skip
    return _figure(f"Energy{where}", maker, f"{name}-energy", f"Output tokens a joule. {'; '.join(parts)}.")
