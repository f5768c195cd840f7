"""Draw the plots of the documentation as SVG, readable on light and dark pages, and write its tables of results.

    python benchmarks/figures.py                     # into docs/assets and docs/results
    python benchmarks/figures.py --out build/figures

All numbers come from JSON files in docs/results. The plots are of demo.json, the eval.json of `make demo`. Diagrams
without numbers, such as docs/assets/head_medusa.svg, are edited by hand.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import entry_point, filled, parser
from matplotlib import rc_context
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter
from planted_faults import table as faults
from predictions import shown
from served import table as servers

from drafthead.eval.config import METHOD
from drafthead.eval.report import plots
from drafthead.files.local import read_json, write_atomic
from drafthead.models.token_tree import TokenTree

DOCS = Path(__file__).resolve().parent.parent / "docs"
DEMO = DOCS / "results" / "demo.json"
TEXT = "#768390"
"""A grey with a contrast of 4 on white and on the dark theme's background."""


def tree(demo: dict[str, Any]) -> Figure:
    """Nodes with the probability that each is accepted; blue: the nodes of the demo's tree, in grey those left out."""
    order = demo["calibration"]["order"]
    paths = [tuple(path) for path in order["paths"][:14]]
    shares = dict(zip(paths, order["values"], strict=False))
    nodes = TokenTree.from_paths(paths)
    figure = plots.draw_tree(nodes, ["" if not path else f"{shares[tuple(path)]:.0%}" for path in nodes.paths])
    chosen = {(), *paths[: demo["calibration"]["nodes"] - 1]}
    markers = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    for path, marker in zip(nodes.paths, markers, strict=True):
        marker.set_color("#2f81f7" if tuple(path) in chosen else "#8c96a3")
    return figure


@plots.styled
def by_position(demo: dict[str, Any]) -> Figure:
    """Accepted drafts by position and method; a method's steps without drafts, such as no match, are not counted."""
    names = {"speculative": "head and prompt lookup", "head": "head", "prompt_lookup:8:2": "prompt lookup"}
    figure, axes = plots.new_axes()
    for (method, name), colour in zip(names.items(), ("#2f81f7", "#d4770c", "#8c96a3"), strict=True):
        shares = [share or 0.0 for share in demo["metrics"][method]["acceptance_per_depth_of_all"]]
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=name)
    axes.set(xlabel="draft position", ylabel="drafting steps that accept it", ylim=(0, 0.62))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(loc="upper right")
    return figure


def of_report(name: str) -> Callable[[dict[str, Any]], Figure]:
    """Return a function that draws the figure ``name`` of the report."""
    return lambda demo: dict(plots.draw_figures(demo, []))[name]


PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "tree": tree,
    "acceptance": by_position,
    "waterfall": of_report("waterfall"),
    "cost": lambda demo: plots.cost(demo["costs"]["verify"], demo["calibration"]["nodes"], None),
}


METHODS = {
    "speculative": "head and prompt lookup in one tree",
    "head": "head alone",
    "prompt_lookup:8:2": "prompt lookup alone, no training",
}
"""Methods of the demo and their names in tables."""


def markdown(header: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns whose name starts with "<" are aligned to the left."""
    names = header.split(" | ")
    rule = "|".join("---" if name.startswith("<") else "---:" for name in names)
    lines = [" | ".join(name.removeprefix("<") for name in names), *(" | ".join(row) for row in rows)]
    head, *body = (f"| {line} |\n".replace("  ", " ") for line in lines)  # also around empty cells
    return "".join([head, f"|{rule}|\n", *body])


def methods_table(evaluation: dict[str, Any], methods: Mapping[str, str]) -> str:
    """Return the methods of an eval.json as a Markdown table; ``methods`` are the names of those with drafts."""
    overall, metrics = evaluation["overall"], evaluation["metrics"]
    rows: list[Sequence[str]] = []
    for method, name in methods.items():
        numbers, (low, high) = metrics[method], overall["methods"][method]["speedup"]["interval_95"]
        times = f"{numbers['speedup']:.2f}x"
        tau, speed = f"{numbers['mean_accepted_length']:.2f}", f"{numbers['tokens_per_second']:.1f}"
        same = overall["methods"][method]["identical_outputs"]
        times = f"**{times}**" if method == METHOD else times
        rows.append((name, times, f"{low:.2f}–{high:.2f}", tau, speed, f"{same['same']} of {same['of']}"))
    speeds = overall["autoregressive_tokens_per_second"]
    fastest = max(speeds.values())
    for name, value in (
        ("the fastest of three decoders", fastest),
        ("stock transformers", speeds["transformers_stock"]),
    ):
        rows.append((f"no drafting, {name}", f"{value / fastest:.2f}x", "", "1.00", f"{value:.1f}", ""))
    return markdown("<method | speedup | 95 % interval | tokens per pass (tau) | tokens/s | answers identical", rows)


def demo_table(demo: dict[str, Any]) -> str:
    """Return the table of `make demo`."""
    return methods_table(demo, METHODS)


def sampling_table(evaluation: dict[str, Any]) -> str:
    """Return the table of an evaluation of a Medusa head with another head as a baseline, named by its folder."""
    names = {"speculative": "medusa with prompt lookup", "head": "medusa", "prompt_lookup:8:2": "prompt lookup"}
    for method in evaluation["overall"]["methods"]:
        if found := re.search(r"([a-z0-9_]+)-\w+-seed\d/head(\+?)", method):
            names[method] = found[1] + (" with prompt lookup" if found[2] else "")
    return methods_table(evaluation, names)


def batches_table(record: dict[str, Any]) -> str:
    """Return the table of benchmarks/batches.py."""
    rows = []
    for count, row in record["rows"].items():
        speeds = [f"{row['tokens_per_second'][name]:.1f}" for name in ("head", "loop", "stock")]
        costs = f"{row['verify_ms']['1']:.1f}, {row['verify_ms']['4']:.1f}"
        ratios = (f"{row['expected_speedup']:.2f}x", f"{row['speedup']:.2f}x")
        rows.append((count, costs, str(row["nodes"]), f"{row['tau']:.2f}", *speeds, *ratios))
    speeds_of = "head, tok/s | our loop, tok/s | stock `generate`, tok/s"
    return markdown(f"rows b | v(1, b), v(4, b), ms | nodes | tau | {speeds_of} | expected speedup | speedup", rows)


def predictions_table(record: dict[str, Any]) -> str:
    """Return the table of benchmarks/predictions.py."""
    rows = [list(shown(row).values()) for row in record["rows"]]
    return markdown(" | ".join(["<suite", "<head", *list(shown(record["rows"][0]))[2:]]), rows)


def cells_table(rows: Sequence[Mapping[str, str]], texts: Sequence[str]) -> str:
    """Return a Markdown table of ``rows``, whose keys are its columns; those of ``texts`` are aligned to the left."""
    header = " | ".join(f"<{name}" if name in texts else name for name in rows[0])
    return markdown(header, [list(row.values()) for row in rows])


def faults_table(record: dict[str, Any]) -> str:
    """Return the table of benchmarks/planted_faults.py."""
    return cells_table(faults(record), ("fault", "import", "export check", "eval engines="))


def served_table(record: dict[str, Any]) -> str:
    """Return the table of benchmarks/served.py."""
    return cells_table(servers(record), ("engine", "head", "format", "accepted by position, of steps"))


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo_table,
    "sampling": sampling_table,
    "batches": batches_table,
    "predictions": predictions_table,
    "planted_faults": faults_table,
    "served": served_table,
}
"""Files in docs/results, without .json, and the functions that make tables of them."""


def marks(name: str) -> tuple[str, str]:
    """Return the lines around the table made of ``name``.json."""
    return f"<!-- {name}: table -->\n", "<!-- end -->\n"


def pages() -> Iterator[tuple[str, Path, str]]:
    """Yield every table's name, each page that has it, and the page's new text."""
    for name, table in TABLES.items():
        for page in [*(DOCS / "results").glob("*.md"), DOCS.parent / "README.md"]:
            if marks(name)[0] in page.read_text():
                yield name, page, filled(page, marks(name), table(read_json(DOCS / "results" / f"{name}.json")))


def svg(figure: Figure, name: str) -> bytes:
    """Return ``figure`` as SVG without a background, in colours for light and dark pages."""
    for text in figure.findobj(Text):
        if any(same_color(text.get_color(), colour) for colour in (plots.INK, plots.MUTED)):
            text.set_color(TEXT)
    for axes in figure.axes:
        for artist in [*axes.lines, *axes.get_xgridlines(), *axes.get_ygridlines()]:
            if any(same_color(artist.get_color(), colour) for colour in (plots.INK, plots.MUTED, plots.GRID)):
                artist.set(color=TEXT, alpha=0.35 if artist not in axes.lines else 0.9)
        for patch in axes.patches:
            if same_color(patch.get_facecolor(), plots.SOFT):
                patch.set_facecolor("#6cb0cf")
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def main(given: list[str] | None = None) -> None:
    """Draw all plots and write all tables."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=DOCS / "assets", metavar="DIR", help="default docs/assets")
    arguments = options.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    demo = read_json(DEMO)
    for name, draw in PLOTS.items():
        write_atomic(arguments.out / f"{name}.svg", svg(draw(demo), name))
    for _, page, text in pages():
        page.write_text(text)


if __name__ == "__main__":
    entry_point(main)
