"""The table and the figure of ``heads.py``, from its record."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from drafthead.eval.report import plots

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


COLOURS = {"alone": "#2f81f7", "with_lookup": "#d4770c"}
NAMES = {"alone": "head alone", "with_lookup": "head and prompt lookup"}


@plots.styled
def figure(record: dict[str, Any]) -> Figure:
    """Return tau by head: a dot per seed, open for all but the longest budget; dashed: prompt lookup alone."""
    heads, minutes = ordered(record), budgets(record)
    drawn, axes = plots.new_axes(height=1.6 + 0.34 * len(heads))
    for kind, shift in zip(KINDS, (-0.17, 0.17), strict=True):
        for m in minutes:
            dots = [(tau, y + shift) for y, head in enumerate(heads) for tau in taus(record, head, m, kind)]
            fill = COLOURS[kind] if m == minutes[-1] else "none"
            label = f"{NAMES[kind]}, {m:g} min"
            axes.plot(
                *zip(*dots, strict=True), "o", color=COLOURS[kind], markerfacecolor=fill, markersize=5, label=label
            )
    if record["lookup"]:
        axes.axvline(record["lookup"]["tau"], color=COLOURS["with_lookup"], linestyle="--", linewidth=1.2)
    right = 1.03 * max(run[kind]["tau"] for run in record["runs"] for kind in KINDS)
    axes.set(xlabel="tau: tokens per pass of the base", xlim=(1, right), yticks=range(len(heads)), yticklabels=heads)
    axes.invert_yaxis()
    drawn.legend(loc="outside upper left", ncols=len(KINDS), fontsize=8)
    return drawn
