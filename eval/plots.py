"""Figures of the report: readable at phone width, one colour scheme, no global matplotlib state.

Every function returns a ``Figure`` without a backend; ``svg_uri`` inlines one in a page, ``save_png`` writes it.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.data.contracts import TokenTree
from drafthead.data.files import write_atomic

WIDTH = 4.6
"""Inches. Shown 350 pixels wide on a phone, 11 point type is still 12 pixels high."""
INK, MUTED, GRID = "#1b2430", "#5b6775", "#e3e7ec"
ACCENT, SOFT, WARM = "#0b6e99", "#9fc9dc", "#c8501e"
STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2,
    "svg.hashsalt": "drafthead",  # equal data, equal file
}


Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


def _styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    @wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def _axes(height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    return figure, figure.subplots()


def _shades(count: int) -> list[Any]:
    """Dark to light, and still dark enough on white: depth 1 is the darkest."""
    return [colormaps["viridis"](x) for x in np.linspace(0.1, 0.8, count)]


def save_png(figure: Figure, path: Path) -> None:
    """Write ``figure`` at 200 dots per inch, atomically."""
    write_atomic(path, _render(figure, "png", dpi=200))


def svg_uri(figure: Figure) -> str:
    """``figure`` as a data URI for ``<img src>``: sharp at every width, and apart from the page's own ids."""
    return "data:image/svg+xml;base64," + base64.b64encode(_render(figure, "svg")).decode()


@_styled
def _render(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None, **options)
    return buffer.getvalue()


@_styled
def acceptance(per_depth: Sequence[float | None]) -> Figure:
    """Conditional acceptance by depth, with the share of steps that get that far as a line.

    Args:
        per_depth: P(draft i accepted | draft i-1 accepted), i = 1, 2, ...; None where never reached.
    """
    figure, axes = _axes()
    depths = np.arange(1, len(per_depth) + 1)
    conditional = np.array([0.0 if value is None else value for value in per_depth])
    axes.bar(depths, conditional, width=0.6, color=SOFT, label="once the draft before was accepted")
    axes.plot(depths, np.cumprod(conditional), "o-", color=ACCENT, label="of all steps")
    for depth, value in zip(depths, conditional, strict=True):
        axes.annotate(f"{value:.0%}", (depth, value), (0, 7), textcoords="offset points", ha="center", fontsize=10)
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1.12), xticks=depths, yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left")
    return figure


@_styled
def ctar(by_width: dict[str, float | None]) -> Figure:
    """CTAR(w), the share of steps that commit more than w tokens, by w."""
    figure, axes = _axes()
    widths = [int(width) for width in by_width]
    values = [0.0 if value is None else value for value in by_width.values()]
    axes.plot(widths, values, "o-", color=ACCENT)
    axes.fill_between(widths, values, color=SOFT, alpha=0.35, linewidth=0)
    for width, value in zip(widths, values, strict=True):
        axes.annotate(f"{value:.0%}", (width, value), (3, 6), textcoords="offset points", ha="center", fontsize=10)
    axes.set(xlabel="w, tokens", ylabel="steps with more than w", ylim=(0, 1.12), xticks=widths)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(_percent)
    return figure


@_styled
def cost(latency: Sequence[tuple[int, float]], nodes: int | None, mean_accepted: float | None) -> Figure:
    """Cost of verifying n tokens in one forward, in plain steps: v(n) / v(1).

    Args:
        latency: (n, seconds) measured; the smallest n is the unit.
        nodes: size of the chosen tree, root included, marked on the curve.
        mean_accepted: what a step with it commits, drawn as a level.
    """
    points = sorted(latency)
    sizes = np.array([n for n, _ in points])
    relative = np.array([seconds for _, seconds in points]) / points[0][1]
    figure, axes = _axes()
    axes.plot(sizes, relative, "o-", color=MUTED, markersize=4, label="cost of one verification")
    if mean_accepted is not None:
        axes.axhline(mean_accepted, color=ACCENT, linestyle="--", label=f"tokens it yields: {mean_accepted:.2f}")
    if nodes is not None:
        at = float(np.interp(nodes, sizes, relative))
        axes.plot([nodes], [at], "D", color=WARM, markersize=9, label=f"chosen tree: {nodes} tokens, {at:.2f}")
    top = max(relative.max(), mean_accepted or 0.0)
    # The legend stands above the data, wherever the curve goes.
    axes.set(xlabel="n, tokens in one forward", ylabel="in plain steps", ylim=(0, top * 1.55))
    axes.set_xscale("log", base=2)
    axes.set_xticks(_powers_of_two(sizes), [str(n) for n in _powers_of_two(sizes)])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    return figure


def _powers_of_two(sizes: np.ndarray) -> list[int]:
    return [1 << n for n in range(int(sizes.max()).bit_length()) if 1 << n >= sizes.min()]


@_styled
def speedup(rows: Sequence[tuple[str, float, float | None, float | None]]) -> Figure:
    """Speedup with its interval, best first.

    Args:
        rows: (name, speedup, low, high); the last one is the total and stays at the bottom, in full colour.
    """
    ordered = [*sorted(rows[:-1], key=lambda row: -row[1]), rows[-1]]
    figure, axes = _axes(height=0.9 + 0.33 * len(ordered))
    names = [name for name, *_ in ordered]
    values = [value for _, value, *_ in ordered]
    axes.barh(names, values, height=0.66, color=[*[SOFT] * (len(ordered) - 1), ACCENT])
    right = max(high or value for _, value, _, high in ordered)
    for row, (_, value, low, high) in enumerate(ordered):
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=INK, linewidth=1.4)
        text = (max(value, high or 0.0), row)
        axes.annotate(f"{value:.2f}", text, (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.axvline(1, color=WARM, linestyle="--", linewidth=1.4)
    axes.set(xlabel="speed, plain decoding = 1", xlim=(0, max(right, 1.0) * 1.14))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@_styled
def training(rows: Sequence[dict[str, Any]], prefix: str) -> Figure | None:
    """A metric per draft position over the steps of all phases, one after the other.

    Args:
        rows: of metrics.jsonl: "phase", "step" (counted within the phase), and ``prefix`` followed by 1, 2, ... where
            measured; "held_out_" and the same become dots.
        prefix: "loss_" or "accept_".

    Returns:
        None when no row holds the metric.
    """
    heads = sorted({int(k.removeprefix(prefix)) for row in rows for k in row if _is_metric(k, prefix)})
    if not heads:
        return None
    figure, axes = _axes(height=3.2)
    places, spans = _steps_in_line(rows)
    for head, colour in zip(heads, _shades(len(heads)), strict=True):
        axes.plot(*_curve(places, f"{prefix}{head}"), color=colour, label=str(head))
        axes.plot(*_curve(places, f"held_out_{prefix}{head}"), "o", color=colour)
    for _, (_, end) in list(spans.items())[:-1]:
        axes.axvline(end, color=MUTED, linestyle=":", linewidth=1.4)
    for phase, (start, end) in spans.items():
        axes.annotate(
            phase, ((start + end) / 2, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", color=MUTED,
        )  # fmt: skip
    axes.set(xlabel="step", ylabel=prefix.rstrip("_").replace("accept", "accepted"))
    if prefix == "accept_":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_percent)
    figure.legend(title="draft position", loc="outside lower center", ncols=min(len(heads), 6), columnspacing=1.2)
    return figure


def _percent(value: float, _: float) -> str:
    return f"{value:.0%}"


def _is_metric(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key.removeprefix(prefix).isdigit()


def _curve(places: Sequence[tuple[float, dict[str, Any]]], key: str) -> tuple[list[float], list[float]]:
    points = [(x, float(row[key])) for x, row in places if key in row and math.isfinite(row[key])]
    return [x for x, _ in points], [y for _, y in points]


def _steps_in_line(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[tuple[float, dict[str, Any]]], dict[str, tuple[float, float]]]:
    """Put the phases' steps on one axis.

    Returns:
        (place, row) pairs, and per phase where it starts and ends.
    """
    places: list[tuple[float, dict[str, Any]]] = []
    spans: dict[str, tuple[float, float]] = {}
    for row in rows:
        phase = str(row["phase"])
        if phase not in spans:
            end = places[-1][0] if places else 0.0
            spans[phase] = (end, end)
        start, _ = spans[phase]
        places.append((start + row["step"], row))
        spans[phase] = (start, places[-1][0])
    return places, spans


@_styled
def tree(shape: TokenTree) -> Figure:
    """The token tree, root at the left; a node's number is its rank among its drafter's candidates."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(shape.parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    heights: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(child) for child in sorted(children.get(node, ()), key=lambda c: shape.ranks[c])]
        heights[node] = (below[0] + below[-1]) / 2 if below else float(leaves)
        leaves += not below
        return heights[node]

    place(0)
    figure, axes = _axes(height=max(1.6, 0.7 + 0.17 * leaves))
    depths = shape.depths.tolist()
    colours = [INK, *_shades(max(shape.depth, 1))]
    for node, parent in enumerate(shape.parents):
        if parent >= 0:
            axes.plot([depths[parent], depths[node]], [heights[parent], heights[node]], color=GRID, zorder=1)
        axes.plot([depths[node]], [heights[node]], "o", color=colours[depths[node]], markersize=11, zorder=2)
        label = "" if parent < 0 else str(shape.ranks[node] + 1)
        axes.text(depths[node], heights[node], label, color="white", fontsize=7.5, ha="center", va="center_baseline")
    axes.set(xlabel="draft position", xticks=range(shape.depth + 1), yticks=[], ylim=(leaves - 0.3, -0.7))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    return figure
