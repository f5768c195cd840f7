"""Figures of what was measured. Every function returns a ``Figure`` without a backend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from drafthead.eval.plot_style import ACCENT, INK, MUTED, SOFT, WARM, new_axes, percent, styled


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
