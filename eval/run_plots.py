"""Figures of what the run made: its training curves and its token tree."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from drafthead.data.token_tree import TokenTree
from drafthead.eval.plot_style import GRID, INK, MUTED, new_axes, percent, save_png, shades, styled

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
