"""Figures of a report, of training curves and of a token tree, as PNG, readable at the width of a phone. They have no
backend and leave matplotlib's global state unchanged."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from drafthead.errors import visible
from drafthead.eval.metrics.summary import fastest_autoregressive, nodes_per_step, speedup_of
from drafthead.files.local import write_atomic
from drafthead.models.token_tree import TokenTree

INK, MUTED, GRID = "#1b2430", "#5b6775", "#e3e7ec"  # also in report.mplstyle
ACCENT, SOFT, WARM = "#0b6e99", "#9fc9dc", "#c8501e"
styled: ContextDecorator = rc_context(fname=Path(__file__).with_name("report.mplstyle"))  # applied while drawing
SPEED_LABEL = "speed, autoregressive decoding = 1"
TRAINING = {  # figures by prefix of their metrics: file name, label of the vertical axis, how to read it
    "loss_": ("training_loss", "loss (nats per token)", "lower is better; dots: text not trained on"),
    "accept_": ("training_acceptance", "first candidate right", "higher is better; dots: text not trained on"),
}
LONGEST_LABEL = 20  # characters of a name left of its bar; if one is longer, all names stand above the bars
BarRow = tuple[str, float, float | None, float | None]  # name, value, bounds of its interval (None: unknown)


def draw_figures(evaluation: dict[str, Any], training_log: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Figure]]:
    """Yield (file name without suffix, figure) for everything that was measured."""
    overall = evaluation["overall"]
    groups = [*evaluation["tasks"].items(), ("overall", overall)]
    if tasks := _with_speedup((name, speedup_of(group), group) for name, group in groups):
        yield "speedup", speedup(tasks)
    # The headline's method comes last: the bar in full colour.
    by_method = list(overall["methods"].items())[::-1]
    methods = _with_speedup((name, speedup_of(overall, name), numbers) for name, numbers in by_method)
    if len(methods) > 1:
        yield "methods", speedup(methods)
    if explained := evaluation["speedup_breakdown"][fastest_autoregressive(overall)[0]]:
        yield "waterfall", waterfall(explained)
    if costs := evaluation.get("costs"):
        varies = "steps" in evaluation["tree"]
        chosen = None if varies else evaluation["tree"].get("drafters", [evaluation["tree"]])[0]["nodes"]
        yield "cost", cost(costs["verify"], chosen, overall["mean_accepted_length"], nodes_per_step(evaluation))
    if rows := evaluation.get("load"):
        yield "load", load(rows)
    if overall["acceptance_per_depth"]:
        of_all = evaluation["metrics"][evaluation["headline"]]["acceptance_per_depth_of_all"]
        yield "acceptance", acceptance(overall["acceptance_per_depth"], of_all)
    for prefix, (name, _, _) in TRAINING.items():
        if (figure := training(training_log, prefix)) is not None:
            yield name, figure
    if sizes := evaluation["tree"].get("steps"):
        yield "tree_sizes", tree_sizes({int(n): steps for n, steps in sizes.items()})
    if choices := evaluation["tree"].get("choices"):
        parts = [(short_name(part["drafter"]), part["choices"]) for part in evaluation["tree"].get("drafters", [])]
        widths = [(name, 1 + max((path[0] for path in paths), default=-1)) for name, paths in parts]
        yield "tree", draw_tree(TokenTree.from_paths([tuple(path) for path in choices]), drafters=widths)


@styled
def new_axes(height: float = 3.0) -> tuple[Figure, Axes]:
    """Return a figure without a backend, and its axes; ``height`` in inches. Shown 350 pixels wide on a phone, text of
    11 points in a figure of 4.6 inches is still 12 pixels high."""
    figure = Figure(figsize=(4.6, height), layout="constrained", facecolor="white")
    return figure, figure.subplots()


@styled
def save_png(figure: Figure, path: Path) -> bytes:
    """Write ``figure`` to ``path`` as a PNG of 200 dots per inch, atomically; return the PNG's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    write_atomic(path, buffer.getvalue())
    return buffer.getvalue()


def save_training_plots(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the figures of ``TRAINING`` whose metrics occur in ``rows`` of ``metrics.jsonl`` into ``folder``."""
    for prefix, (name, _, _) in TRAINING.items():
        if (figure := training(rows, prefix)) is not None:
            save_png(figure, folder / f"{name}.png")


def short_name(spec: str) -> str:
    """Shorten paths in a drafter's name: "head:outputs/run/head" becomes "head:run", "max_gram:a/b" "max_gram:b"."""
    spec = re.sub(r"head:(?:[^+@()]*/)?([^/+@()]+)/head\b", r"head:\1", spec)
    return visible(re.sub(r"max_gram:(?:[^+@()]*/)?([^/+@()]+)", r"max_gram:\1", spec))


def speedup(rows: Sequence[BarRow]) -> Figure:
    """Draw a bar per speedup, best first, except that the last row (such as the total) stays last."""
    return interval_bars([*sorted(rows[:-1], key=lambda row: -row[1]), rows[-1]], SPEED_LABEL)


@styled
def interval_bars(rows: Sequence[BarRow], label: str) -> Figure:
    """Draw a bar with its interval for every row, the last one in full colour, and a line at 1."""
    names, values, _, _ = zip(*rows, strict=True)
    names, positions = tuple(map(short_name, names)), range(len(rows))
    beside = max(map(len, names)) <= LONGEST_LABEL
    figure, axes = new_axes(height=0.9 + (0.33 if beside else 0.5) * len(rows))
    axes.barh(positions, values, height=0.66 if beside else 0.4, color=[*[SOFT] * (len(rows) - 1), ACCENT])
    axes.set_yticks(positions if beside else [], names if beside else [])
    for y, name in enumerate(() if beside else names):  # long names of combined drafters stand above their bars
        _label(axes, name, (0, y - 0.27), (3, 0), va="bottom")
    for y, (_, value, low, high) in enumerate(rows):
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=INK, linewidth=1.4)
        _label(axes, f"{value:.2f}", (max(value, high or 0.0), y))
    axes.axvline(1, color=WARM, linestyle="--", linewidth=1.4)
    right = max(1.0, *(high or value for _, value, _, high in rows))
    axes.set(xlabel=label, xlim=(0, right * 1.14))
    if not beside:
        axes.set_ylim(-0.9, len(rows) - 0.6)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@styled
def waterfall(explained: dict[str, Any]) -> Figure:
    """Draw how each cost reduces the speedup, from the mean accepted length (top) to the measured speedup (bottom)."""
    levels = explained["waterfall"]
    rows = [(level["name"], level["speedup"] - level["change"], level["speedup"]) for level in levels]
    rows[0] = (levels[0]["name"], 0.0, levels[0]["speedup"])
    if abs(explained["residual"]) >= 0.005:  # else it would read as 0.00
        rows.append(("residual", levels[-1]["speedup"], explained["measured"]))
    rows.append(("measured", 0.0, explained["measured"]))
    figure, axes = new_axes(height=0.8 + 0.42 * len(rows))
    for y, (name, start, end) in enumerate(rows):
        change, is_total = end - start, y in (0, len(rows) - 1)
        colour = ACCENT if name == "measured" else SOFT if is_total or change > 0 else WARM
        axes.barh([y], [change], left=start, height=0.62, color=colour)
        text = f"{change:+.2f}".replace("-", "−") if abs(change) >= 0.005 else "0.00"
        _label(axes, f"{end:.2f}" if is_total else text, (max(start, end), y))
        if y + 1 < len(rows):
            axes.plot([end, end], [y, y + 1], color=MUTED, linewidth=1, zorder=0)
    axes.axvline(1, color=MUTED, linestyle="--", linewidth=1.2, zorder=0)
    axes.set(xlabel=SPEED_LABEL, xlim=(0, max(max(start, end) for _, start, end in rows) * 1.16))
    axes.set_yticks(range(len(rows)), [name.replace(": ", ":\n").replace(", ", ",\n") for name, *_ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@styled
def cost(
    verify: Mapping[Any, float], nodes: int | None, mean_accepted: float | None, per_step: float | None = None
) -> Figure:
    """Draw the cost of verifying n tokens in one forward pass, in autoregressive steps: v(n) / v(1). ``nodes``, the
    size of the draft tree (None: it is chosen in every step), is marked on the curve, and so is ``per_step``, the mean
    size of the verified trees, which other drafters enlarge and early stops reduce."""
    sizes, seconds = np.array(sorted((int(n), s) for n, s in verify.items())).T  # JSON has turned n into a string
    relative = seconds / seconds[0]
    figure, axes = new_axes()
    axes.plot(sizes, relative, "o-", color=MUTED, markersize=4, label="cost of one verification")
    if mean_accepted is not None:
        axes.axhline(mean_accepted, color=ACCENT, linestyle="--", label=f"tokens committed: {mean_accepted:.2f}")
    differs = per_step is not None and (nodes is None or abs(per_step - nodes) >= 0.05)
    if nodes is not None:
        at = float(np.interp(nodes, sizes, relative))
        face = "white" if differs else WARM
        label = f"chosen tree: {nodes} tokens, {at:.2f}"
        axes.plot([nodes], [at], "D", color=WARM, markerfacecolor=face, markersize=9, label=label)
    if per_step is not None and differs:
        at = float(np.interp(per_step, sizes, relative))
        label = f"average step: {per_step:.1f} tokens, {at:.2f}"
        axes.plot([per_step], [at], "D", color=WARM, markersize=9, label=label)
    top = max(relative.max(), mean_accepted or 0.0) * 1.55  # room for the legend above the data
    axes.set(xlabel="n, tokens in one forward pass", ylabel="in autoregressive steps", ylim=(0, top))
    axes.set_xscale("log", base=2)
    ticks = [1 << n for n in range(int(sizes.max()).bit_length()) if 1 << n >= sizes.min()]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    return figure


@styled
def load(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw tokens per second of all requests over the number of concurrent ones, a line per method."""
    figure, axes = new_axes()
    names = list(dict.fromkeys(row["method"] for row in rows))
    for colour, name in zip(_shades(len(names)), names, strict=True):
        points = sorted((row["requests"], row["tokens_per_second"]) for row in rows if row["method"] == name)
        label = short_name(name)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=5, label=label)
    counts = sorted({row["requests"] for row in rows})
    top = max(row["tokens_per_second"] for row in rows) * (1.1 + 0.1 * len(names))  # room for the legend
    axes.set(xlabel="requests at once", ylabel="tokens per second, of all", ylim=(0, top))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    return figure


@styled
def acceptance(per_depth: Sequence[float | None], of_all: Sequence[float]) -> Figure:
    """Draw P(draft i accepted | draft i-1 accepted) as bars, and the share of steps that accepted draft i as a line. A
    share is not the product of the probabilities up to i, because these leave out steps that drafted fewer tokens."""
    figure, axes = new_axes()
    depths = np.arange(1, len(per_depth) + 1)
    conditional = np.array([value or 0.0 for value in per_depth])
    label = "of steps that drafted it and accepted the one before"
    bars = axes.bar(depths, conditional, width=0.6, color=SOFT, label=label)
    axes.bar_label(bars, fmt="{:.0%}", padding=3, fontsize=10)
    axes.plot(depths, of_all, "o-", color=ACCENT, label="of all steps that drafted")
    ticks: dict[str, Any] = {"xticks": depths, "ylim": (0, 1.12), "yticks": [0, 0.25, 0.5, 0.75, 1]}
    axes.set(xlabel="draft position", ylabel="steps that accept it", **ticks)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left")
    return figure


@styled
def training(rows: Sequence[dict[str, Any]], prefix: str) -> Figure | None:
    """Draw a metric for each draft position over the optimiser steps of all phases; None if no row has the metric.
    ``prefix`` is "loss_" or "accept_". Values with "held_out_" before the prefix become dots."""
    keys = {key for row in rows for key in row if key.startswith(prefix)}
    positions = sorted(int(key.removeprefix(prefix)) for key in keys if key.removeprefix(prefix).isdigit())
    if not positions:
        return None
    figure, axes = new_axes(height=3.4)
    phases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        phases.setdefault(str(row["phase"]), []).append(row)
    handles = []
    for position, colour in zip(positions, _shades(len(positions)), strict=True):
        for phase_rows in phases.values():  # one line per phase: nothing was measured in between
            x, y = _curve(phase_rows, f"{prefix}{position}")
            # A single point would not be visible as a line, and thousands of points need a thin one.
            line = {"marker": "_", "markersize": 10} if len(x) == 1 else {"linewidth": 2 if len(x) < 500 else 1}
            axes.plot(x, y, color=colour, **line)
            dots = _curve(phase_rows, f"held_out_{prefix}{position}")
            axes.plot(*dots, "o", color=colour, markeredgecolor="white", markersize=7, zorder=3)
        handles.append(Line2D([], [], color=colour, label=str(position)))
    if any(f"held_out_{prefix}1" in row for row in rows):
        handles.append(Line2D([], [], color=MUTED, marker="o", markeredgecolor="white", linestyle="", label="held out"))
    _mark_phases(axes, phases)
    axes.set_xlim(left=0)  # a run with one recorded step would have no width
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _, label, note = TRAINING[prefix]
    axes.set(xlabel="optimiser step", ylabel=label)
    figure.suptitle(note, fontsize=10)
    if prefix == "accept_":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    columns = min(len(handles), 6)
    figure.legend(handles=handles, title="draft position", loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure


@styled
def tree_sizes(steps: Mapping[int, int]) -> Figure:
    """Draw the share of steps by the number of tokens that they verify, the root included."""
    figure, axes = new_axes()
    total = sum(steps.values())
    colours = [SOFT if n > 1 else MUTED for n in steps]
    axes.bar([*steps], [count / total for count in steps.values()], width=0.8, color=colours)
    axes.set(xlabel="tokens verified in a step (1: no draft)", ylabel="steps", xlim=(0.3, max(steps) + 0.7))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    return figure


@styled
def draw_tree(tree: TokenTree, labels: Sequence[str] | None = None, drafters: Sequence[tuple[str, int]] = ()) -> Figure:
    """Draw the token tree, root at the left. A node's number is its rank (from 1) among its drafter's candidates.
    ``labels`` replace the ranks. ``drafters`` are names and numbers of children of the root, in the order of the
    ``union`` of their trees; colours tell them apart."""
    inner = set(tree.parents)
    leaves = [node for node in sorted(range(len(tree)), key=lambda node: tree.paths[node]) if node not in inner]
    heights = {node: float(y) for y, node in enumerate(leaves)}
    for node in reversed(range(len(tree))):  # children come after their parents
        if node in inner:
            below = [heights[child] for child, parent in enumerate(tree.parents) if parent == node]
            heights[node] = (min(below) + max(below)) / 2
    size, leaf = (11, 0.17) if labels is None else (21, 0.3)
    figure, axes = new_axes(height=max(1.6, 0.7 + leaf * len(leaves)) + 0.25 * len(drafters))
    depths = [len(path) for path in tree.paths]
    # The union numbers first candidates through: with 2 and 1 of them, rank 2 is the second drafter's rank 0.
    owners = [(n, rank) for n, (_, count) in enumerate(drafters) for rank in range(count)]
    shades = _shades(len(drafters) or max(tree.depth, 1))
    for node, parent in enumerate(tree.parents):
        x, y = depths[node], heights[node]
        colour, rank = INK, tree.ranks[node]
        if parent >= 0:
            shade, first_rank = owners[tree.paths[node][0]] if owners else (x - 1, rank)
            colour, rank = shades[shade], first_rank if x == 1 else rank
            axes.plot([depths[parent], x], [heights[parent], y], color=GRID, zorder=1)
        axes.plot([x], [y], "o", color=colour, markersize=size, zorder=2)
        label = labels[node] if labels is not None else "" if parent < 0 else str(rank + 1)
        axes.text(x, y, label, color="white", fontsize=7.5, ha="center", va="center_baseline")
    axes.set(xlabel="draft position", xticks=range(tree.depth + 1), yticks=[], ylim=(len(leaves) - 0.3, -0.7))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    if drafters:
        handles = [
            Line2D([], [], color=shades[n], label=name, marker="o", linestyle="", markersize=size)
            for n, (name, _) in enumerate(drafters)
        ]
        figure.legend(handles=handles, loc="outside upper left")
    return figure


def _label(
    axes: Axes, text: str, point: tuple[float, float], shift: tuple[float, float] = (5, 0), **align: Any
) -> None:
    """Write ``text`` next to ``point``, moved by ``shift`` (in typographic points; by default to the right)."""
    axes.annotate(text, point, shift, textcoords="offset points", fontsize=10, **(align or {"va": "center"}))


def _shades(count: int) -> list[Any]:
    """Return ``count`` colours from dark to light that are still visible on white."""
    return [colormaps["viridis"](x) for x in np.linspace(0.1, 0.8, count)]


def _with_speedup(rows: Iterable[tuple[str, float | None, dict[str, Any]]]) -> list[BarRow]:
    """Return bars with intervals for those ``rows`` (name, speedup, all results of this task or method) with one."""
    return [(name, value, *group["speedup"]["interval_95"]) for name, value, group in rows if value is not None]


def _curve(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the optimiser steps at which the metric ``key`` was measured, and its values."""
    measured = [row for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return [row["total_step"] for row in measured], [row[key] for row in measured]


def _mark_phases(axes: Axes, phases: dict[str, list[dict[str, Any]]]) -> None:
    """Draw vertical lines between training phases, and their names; the first name ends at its phase's end."""
    ends = [rows[-1]["total_step"] for rows in phases.values()]
    for end in ends[:-1]:
        axes.axvline(end, color=MUTED, linestyle=":", linewidth=1.4)
    for n, phase in enumerate(phases):
        is_left = n == 0 and len(phases) > 1
        x, shift, side = (ends[0], -4, "right") if is_left else ([0, *ends][n], 4, "left")
        style: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": side}
        axes.annotate(phase, (x, 1), (shift, 4), color=MUTED, **style)
