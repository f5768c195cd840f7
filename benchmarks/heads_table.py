"""The table and the figure of ``heads.py``, from its record."""

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

Kind = str
"""``alone`` or ``with_lookup``."""
KINDS = ("alone", "with_lookup")
EMPTY = "–"


def runs_of(record: dict[str, Any], head: str, minutes: float) -> list[dict[str, Any]]:
    """Return the finished runs of a head and budget, one per seed."""
    return [run for run in record["runs"] if run["head"] == head and run["minutes"] == minutes]


def budgets(record: dict[str, Any]) -> list[float]:
    """Return the budgets in minutes of which some run is finished."""
    return sorted({run["minutes"] for run in record["runs"]})


def taus(record: dict[str, Any], head: str, minutes: float, kind: Kind) -> list[float]:
    """Return tau by seed."""
    return [run[kind]["tau"] for run in runs_of(record, head, minutes)]


def ordered(record: dict[str, Any]) -> list[str]:
    """Return the heads, best first: by median tau alone, at the longest budget that all of them have."""
    heads = [head for head in record["heads"] if any(run["head"] == head for run in record["runs"])]
    common = [m for m in budgets(record) if all(runs_of(record, head, m) for head in heads)]
    return sorted(heads, key=lambda head: -median(taus(record, head, common[-1], "alone")) if common else 0)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, and the range if there are several values: ``1.61 (1.60–1.63)``."""
    if not values:
        return EMPTY
    text = f"{median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def rows(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row per head, and one for prompt lookup alone."""
    speed, minutes = record.get("speed") or {"heads": {}}, budgets(record)

    def row(name: str, cells: dict[str, list[float]], accepted: list[float], times: Sequence[Any]) -> dict[str, str]:
        """Return a row from the values of every column, the accepted shares by seed, and the speeds of both kinds."""
        shares = spread([100 * share for share in accepted], 0)
        texts = {column: spread(values) for column, values in cells.items()} | {"first draft accepted, %": shares}
        ways = ("speedup", "speedup, + lookup")
        return {"head": name, **texts} | {
            way: f"{value['speedup']:.2f}x" if value else EMPTY
            for way, value in zip(ways, times, strict=True)
            if speed["heads"]
        }

    table = []
    for head in ordered(record):
        cells = {
            f"tau, {m:g} min" + (", + lookup" if kind == "with_lookup" else ""): taus(record, head, m, kind)
            for m in minutes
            for kind in KINDS
        }
        last = [m for m in minutes if runs_of(record, head, m)][-1]
        accepted = [run["acceptance"][0] for run in runs_of(record, head, last)]
        timed = speed["heads"].get(head, {})
        table.append(row(f"`{head}`", cells, accepted, [timed.get(kind) for kind in KINDS]))
    if record["lookup"] and table:
        cells = {column: [] for column in table[0] if column.startswith("tau")}
        lookup = {column: [record["lookup"]["tau"]] if "lookup" in column else [] for column in cells}
        shared = speed["groups"].get("shared", {}).get("lookup") if speed["heads"] else None
        table.append(row("prompt lookup alone", lookup, [], [None, shared]))
    return table


def caption(record: dict[str, Any]) -> str:
    """Return what the table shows, on which machine, and how many seeds every budget has."""
    counts = {m: [len(runs_of(record, head, m)) for head in record["heads"]] for m in budgets(record)}
    seeds = ", ".join(f"{m:g} minutes: {seed_count(n)}" for m, n in counts.items())
    machine, settings = record["hardware"], record["settings"]
    speed_date = record.get("speed", {}).get("date", record["date"])
    dates = sorted({record["date"][:10], speed_date[:10]})
    return (
        f"{settings['limit']} prompts of {settings['suite']}, trees of {settings['nodes']} nodes; {seeds}; one core of "
        f"{machine['cpu']}, {' and '.join(dates)}"
    )


def seed_count(counts: Sequence[int]) -> str:
    """Return the seeds of a budget from the number of every head: ``2 to 3 seeds``, ``1 seed (4 of 9 heads)``."""
    least, most = min(counts), max(counts)
    text = f"{most} seed{'s' * (most > 1)}"
    if not least:
        return f"{text} ({sum(map(bool, counts))} of {len(counts)} heads)"
    return text if least == most else f"{least} to {text}"


def markdown(record: dict[str, Any]) -> str:
    """Return the caption and the table for the pages."""
    table = rows(record)
    columns = list(table[0])
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row[column] for column in columns) + " |" for row in table]
    return "\n".join([f"{caption(record)}.", "", *lines])


STYLE = """<style>
  .paper { fill: #ffffff } .ink { fill: #1b2430 } .muted { fill: #5b6775 } .grid { stroke: #e3e7ec }
  .alone { fill: #0b6e99; stroke: #0b6e99 } .with_lookup { fill: #c8501e; stroke: #c8501e }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #14181d } .ink { fill: #e8ecf1 } .muted { fill: #a7b1bd } .grid { stroke: #333b45 }
    .alone { fill: #5cb8dd; stroke: #5cb8dd } .with_lookup { fill: #f0925f; stroke: #f0925f }
  }
  text { font: 13px system-ui, sans-serif }
  .open { fill-opacity: 0 }
</style>"""
LABEL, WIDTH, ROW, TOP = 130, 720, 34, 64
"""Widths of the names and of the figure, height of a head, and of the legend, in pixels."""
NAMES = {"alone": "head alone", "with_lookup": "head and prompt lookup"}


def figure(record: dict[str, Any]) -> str:
    """Return an SVG of tau by head, for light and dark pages: a dot per seed, open for all but the longest budget."""
    heads, minutes = ordered(record), budgets(record)
    right = 1.04 * max([run[kind]["tau"] for run in record["runs"] for kind in KINDS], default=2.0)
    bottom = TOP + ROW * len(heads)

    def x(tau: float) -> float:
        """Return the horizontal position of a tau."""
        return round(LABEL + (tau - 1) / (right - 1) * (WIDTH - LABEL - 20), 1)

    def dot(at: float, y: float, kind: Kind, m: float) -> str:
        """Return a circle for a run of ``m`` minutes."""
        shade = kind if m == minutes[-1] else f"{kind} open"
        return f'<circle class="{shade}" cx="{at}" cy="{y}" r="4.5" stroke-width="1.6"/>'

    def line(shade: str, at: float, more: str = "") -> str:
        """Return a vertical line through all heads."""
        return f'<line class="{shade}" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"{more}/>'

    def text(words: str, at: float, y: float, shade: str = "muted", anchor: str = "middle") -> str:
        """Return ``words`` at a point."""
        return f'<text class="{shade}" text-anchor="{anchor}" x="{at}" y="{y}">{escape(words)}</text>'

    shapes = [f'<rect class="paper" width="{WIDTH}" height="{bottom + 46}"/>']
    for column, kind in enumerate(KINDS):
        for row, m in enumerate(minutes):
            at, y = 20 + 300 * column, 18 + 20 * row
            shapes += [dot(at, y, kind, m), text(f"{NAMES[kind]}, {m:g} min", at + 12, y + 4.5, "ink", "start")]
    ticks = [1 + n / 4 for n in range(int((right - 1) * 4) + 1)]
    for tick in ticks:
        shapes += [line("grid", x(tick)), text(f"{tick:g}", x(tick), bottom + 18)]
    if record["lookup"]:
        shapes.append(line("with_lookup", x(record["lookup"]["tau"]), ' stroke-dasharray="5 4"'))
    label = "tau: tokens per pass of the base; dashed: prompt lookup alone"
    shapes.append(text(label, (LABEL + WIDTH) / 2, bottom + 38))
    for number, head in enumerate(heads):
        y = TOP + ROW * number + ROW / 2
        shapes.append(text(head, LABEL - 12, y + 4, "ink", "end"))
        for kind, shift in zip(KINDS, (-6, 6), strict=True):
            shapes += [dot(x(tau), y + shift, kind, m) for m in minutes for tau in taus(record, head, m, kind)]
    size = f'viewBox="0 0 {WIDTH} {bottom + 46}" width="{WIDTH}" height="{bottom + 46}"'
    title = "<title>Tau of every head, by training time, alone and with prompt lookup</title>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{title}', STYLE, *shapes, "</svg>\n"])
