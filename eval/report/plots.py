"""Figures of what was measured. Every function returns a ``Figure`` without a backend."""
# One look for all figures: readable at phone width, one colour scheme, no global matplotlib state.
# Figures of what the run made: its training curves and its token tree.

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
from matplotlib.lines import Line2D

from drafthead.data.utils.files import write_atomic
from drafthead.models.token_tree import TokenTree

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


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Run ``draw`` in our style and leave matplotlib's own alone."""

    @wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_axes(height: float = 3.0) -> tuple[Figure, Axes]:
    """A figure without a backend, and its axes; ``height`` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    return figure, figure.subplots()


def shades(count: int) -> list[Any]:
    """Dark to light, and still dark enough on white: depth 1 is the darkest."""
    return [colormaps["viridis"](x) for x in np.linspace(0.1, 0.8, count)]


def save_png(figure: Figure, path: Path) -> None:
    """Write ``figure`` at 200 dots per inch, atomically."""
    write_atomic(path, _render(figure, "png", dpi=200))


def svg_uri(figure: Figure) -> str:
    """``figure`` as a data URI for ``<img src>``: sharp at every width, and apart from the page's own ids."""
    return "data:image/svg+xml;base64," + base64.b64encode(_render(figure, "svg")).decode()


@styled
def _render(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None, **options)
    return buffer.getvalue()


def percent(value: float, _: float) -> str:
    """A tick's label."""
    return f"{value:.0%}"


@styled
def acceptance(per_depth: Sequence[float | None]) -> Figure:
    """Conditional acceptance by depth, with the share of steps that get that far as a line.

    Args:
        per_depth: P(draft i accepted | draft i-1 accepted), i = 1, 2, ...; None where never reached.
    """
    figure, axes = new_axes()
    depths = np.arange(1, len(per_depth) + 1)
    conditional = np.array([0.0 if value is None else value for value in per_depth])
    axes.bar(depths, conditional, width=0.6, color=SOFT, label="once the draft before was accepted")
    axes.plot(depths, np.cumprod(conditional), "o-", color=ACCENT, label="of all steps")
    for depth, value in zip(depths, conditional, strict=True):
        axes.annotate(f"{value:.0%}", (depth, value), (0, 7), textcoords="offset points", ha="center", fontsize=10)
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1.12), xticks=depths, yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(percent)
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left")
    return figure


@styled
def ctar(by_width: dict[str, float | None]) -> Figure:
    """CTAR(w), the share of steps that commit more than w tokens, by w."""
    figure, axes = new_axes()
    widths = [int(width) for width in by_width]
    values = [0.0 if value is None else value for value in by_width.values()]
    axes.plot(widths, values, "o-", color=ACCENT)
    axes.fill_between(widths, values, color=SOFT, alpha=0.35, linewidth=0)
    for width, value in zip(widths, values, strict=True):
        axes.annotate(f"{value:.0%}", (width, value), (3, 6), textcoords="offset points", ha="center", fontsize=10)
    axes.set(xlabel="w, tokens", ylabel="steps with more than w", ylim=(0, 1.12), xticks=widths)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(percent)
    return figure


@styled
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
    figure, axes = new_axes()
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


@styled
def speedup(rows: Sequence[tuple[str, float, float | None, float | None]]) -> Figure:
    """Speedup with its interval, best first.

    Args:
        rows: (name, speedup, low, high); the last one is the total and stays at the bottom, in full colour.
    """
    ordered = [*sorted(rows[:-1], key=lambda row: -row[1]), rows[-1]]
    figure, axes = new_axes(height=0.9 + 0.33 * len(ordered))
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


@styled
def waterfall(explained: dict[str, Any]) -> Figure:
    """From tokens per step down to the measured speedup, one cost at a time.

    Args:
        explained: ``Explanation.to_json()``.
    """
    levels = explained["waterfall"]
    rows = [(level["name"], level["speedup"] - level["change"], level["speedup"]) for level in levels]
    if abs(explained["residual"]) >= 0.005:  # else it would read as 0.00
        rows.append(("residual", levels[-1]["speedup"], explained["measured"]))
    rows[0] = (rows[0][0], 0.0, levels[0]["speedup"])
    rows.append(("measured", 0.0, explained["measured"]))
    figure, axes = new_axes(height=0.8 + 0.42 * len(rows))
    for row, (name, start, end) in enumerate(rows):
        whole = name in (rows[0][0], "measured")
        colour = ACCENT if name == "measured" else SOFT if whole or end > start else WARM
        axes.barh([row], [end - start], left=start, height=0.62, color=colour)
        change = f"{end - start:+.2f}".replace("-", "−") if abs(end - start) >= 0.005 else "0.00"
        text = f"{end:.2f}" if whole else change
        edge = (max(start, end), row)
        axes.annotate(text, edge, (5, 0), textcoords="offset points", va="center", fontsize=10)
        if row + 1 < len(rows):
            axes.plot([end, end], [row, row + 1], color=MUTED, linewidth=1, zorder=0)
    axes.axvline(1, color=MUTED, linestyle="--", linewidth=1.2, zorder=0)
    right = max(max(start, end) for _, start, end in rows)
    axes.set(xlabel="speed, plain decoding = 1", xlim=(0, right * 1.16))
    axes.set_yticks(range(len(rows)), [name.replace(": ", ":\n").replace(", ", ",\n") for name, *_ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@styled
def bins(found: Sequence[dict[str, Any]], label: str, pattern: str) -> Figure:
    """Tokens per step over bins of steps, a bar each, with the share of all steps under it.

    Args:
        found: ``Bin.to_json()`` of each bin.
        label: of the axis that was cut into bins.
        pattern: how to write a bin's bounds, as "{:.0f}".
    """
    figure, axes = new_axes()
    places = np.arange(len(found))
    values = [row["mean_accepted_tokens"] for row in found]
    axes.bar(places, values, width=0.7, color=SOFT)
    for place, value in zip(places, values, strict=True):
        # Inside the bar, where the dashed line of the mean does not cross it.
        axes.annotate(f"{value:.2f}", (place, 0), (0, 5), textcoords="offset points", ha="center", fontsize=10)
    total = sum(row["steps"] for row in found)
    mean = sum(value * row["steps"] for value, row in zip(values, found, strict=True)) / total
    axes.axhline(mean, color=ACCENT, linestyle="--", linewidth=1.4, label=f"all steps: {mean:.2f}")
    names = [f"{pattern.format(r['low'])}–{pattern.format(r['high'])}\n{r['steps'] / total:.0%}" for r in found]
    axes.set_xticks(places, names, fontsize=10 if len(found) <= 5 else 8)
    axes.set(xlabel=f"{label}; share of steps", ylabel="tokens per step", ylim=(0, max(values) * 1.28))
    axes.legend(loc="upper right")
    axes.grid(visible=False, axis="x")
    return figure


TRAINING = {"training_loss": "loss_", "training_acceptance": "accept_"}
"""Figures of a run's training by file name, and the metric that each shows."""


@styled
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
    figure, axes = new_axes(height=3.4)
    places, spans = _steps_in_line(rows)
    measured = False
    for head, colour in zip(heads, shades(len(heads)), strict=True):
        for phase in spans:  # apart: a phase has other data, and what lies between the two was never measured
            own = [(x, row) for x, row in places if row["phase"] == phase]
            axes.plot(*_curve(own, f"{prefix}{head}"), **_drawn(colour, len(own)))
        held_out = _curve(places, f"held_out_{prefix}{head}")
        axes.plot(*held_out, "o", color=colour, markeredgecolor="white", markersize=7, zorder=3)
        measured = measured or bool(held_out[0])
    _mark_phases(axes, spans)
    axes.set(xlabel="optimiser step", ylabel="loss" if prefix == "loss_" else "first candidate right")
    if prefix == "accept_":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(percent)
    keys = [Line2D([], [], color=c, label=str(h)) for h, c in zip(heads, shades(len(heads)), strict=True)]
    if measured:
        keys.append(Line2D([], [], color=MUTED, marker="o", markeredgecolor="white", linestyle="", label="held out"))
    figure.legend(
        handles=keys, title="draft position", loc="outside lower center", ncols=min(len(keys), 6), columnspacing=1.2
    )
    return figure


def save_training_plots(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write ``training_loss.png`` and ``training_acceptance.png`` into ``folder``; what was not measured is left out.

    Args:
        rows: of metrics.jsonl.
        folder: is made if needed.
    """
    for name, prefix in TRAINING.items():
        figure = training(rows, prefix)
        if figure is not None:
            save_png(figure, folder / f"{name}.png")


def _drawn(colour: Any, points: int) -> dict[str, Any]:
    """A line; a single point would be no line at all, and thousands of them read better thin."""
    if points == 1:
        return {"color": colour, "marker": "_", "markersize": 10}
    return {"color": colour, "linewidth": 2 if points < 500 else 1}


def _mark_phases(axes: Axes, spans: dict[str, tuple[float, float]]) -> None:
    """A line where one phase ends and another begins, with their names on both sides of it."""
    for _, end in list(spans.values())[:-1]:
        axes.axvline(end, color=MUTED, linestyle=":", linewidth=1.4)
    first = next(iter(spans))
    for phase, (start, end) in spans.items():
        # The first name ends where its phase does and the others begin with theirs: short phases have room so.
        x, side, gap = (end, "right", -4) if phase == first and len(spans) > 1 else (start, "left", 4)
        axes.annotate(
            phase,
            (x, 1),
            (gap, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            color=MUTED,
        )


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


@styled
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
    figure, axes = new_axes(height=max(1.6, 0.7 + 0.17 * leaves))
    depths = shape.depths.tolist()
    colours = [INK, *shades(max(shape.depth, 1))]
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
