"""One look for all figures: readable at phone width, one colour scheme, no global matplotlib state."""

import base64
import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
