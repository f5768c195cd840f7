"""Draw the figures of the documentation as SVG, readable on light and dark pages, and write its tables of results.

    python benchmarks/figures.py                     # into docs/assets and docs/results
    python benchmarks/figures.py --out build/figures

Diagrams need no data. Plots and tables come from docs/results/demo.json, which is the eval.json of `make demo`.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import entry_point, filled, parser
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter

from drafthead.data.utils.files import read_json, write_atomic
from drafthead.eval.report import plots
from drafthead.models.token_tree import TokenTree

DOCS = Path(__file__).resolve().parent.parent / "docs"
DEMO = DOCS / "results" / "demo.json"
TEXT = "#768390"
"""A grey with a contrast of 4 on white and on the dark theme's background."""
FROZEN, TRAINED, TOKEN = "#8c96a3", "#2f81f7", "#d4770c"
DRAFTS = (4.6, 6.5, 8.4)
"""x of the draft positions; the base's positions are left of them."""
READ = (0.4, 2.2)
"""x of the base's last two positions."""
WIDE_X = (READ[0] + DRAFTS[-1]) / 2
"""x of boxes over all positions."""


class Sketch:
    """A diagram of boxes and arrows. Heights: 0 the tokens read, 1 the base, 2 its states, 3 the head, 4 the drafts."""

    def __init__(self, height: float = 3.1, width: float = 6.2) -> None:
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.axes: Axes = self.figure.subplots()
        self.axes.set_axis_off()

    def box(
        self, x: float, y: float, text: str, colour: str, width: float = 1.35, height: float = 0.5, shift: float = 0
    ) -> None:
        """Draw a box with its centre at (x, y), and ``text`` that is moved by ``shift``."""
        style = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "facecolor": colour, "alpha": 0.22}
        corner = (x - width / 2, y - height / 2)
        self.axes.add_patch(FancyBboxPatch(corner, width, height, edgecolor="none", **style))
        frame = {"boxstyle": style["boxstyle"], "facecolor": "none", "edgecolor": colour, "linewidth": 1.3}
        self.axes.add_patch(FancyBboxPatch(corner, width, height, **frame))
        self.axes.text(x + shift, y, text, ha="center", va="center", color=TEXT, fontsize=9.5)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = TEXT, bend: float = 0) -> None:
        """Draw an arrow between two points."""
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 1}
        self.axes.annotate("", end, start, arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"})

    def note(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write ``text`` at (x, y)."""
        self.axes.text(x, y, text, **{"color": TEXT, "fontsize": 9.5, "ha": "center", "va": "center", **style})

    def up(self, x: float, y: int) -> None:
        """Draw an arrow from the box at height ``y`` to the one above it."""
        self.arrow((x, y + 0.28), (x, y + 0.72))

    def base(self, label: str = "base, frozen", colour: str = FROZEN, states: str = "$h_{AT}$") -> None:
        """Draw the base over its last two positions, and the token that it chose."""
        for x, at in zip(READ, ("t-1", "t"), strict=True):
            self.box(x, 0, f"$x_{{{at}}}$", TOKEN, 0.9)
            self.up(x, 0)
            self.up(x, 1)
            self.box(x, 2, states.replace("AT", at), FROZEN, 1.1)
        self.box(sum(READ) / 2, 1, label, colour, 3.0)

    def drafts(self, last: bool = True) -> None:
        """Draw the draft tokens at the top, and the last committed token below them."""
        for n, x in enumerate(DRAFTS):
            self.box(x, 4, f"$x_{{t+{n + 2}}}$", TOKEN, 1.0)
        if last:
            self.box(DRAFTS[0], 0, "$x_{t+1}$", TOKEN, 1.0)

    def read_token(self, n: int) -> None:
        """Draw the arrow from the token before draft position ``n`` to the part of the head that reads it."""
        if n:
            self.arrow((DRAFTS[n - 1] + 0.5, 3.9), (DRAFTS[n] - 0.5, 3.28), TOKEN)
        else:
            self.arrow((DRAFTS[0], 0.27), (DRAFTS[0], 2.72), TOKEN)

    def recurrent(self, part: str) -> None:
        """Draw the part of the head that passes a state from position to position and reads one token in each."""
        before = (READ[1] + 0.5, 2.05)
        for n, x in enumerate(DRAFTS):
            self.box(x, 3, part, TRAINED)
            self.arrow(before, (x - 0.7, 3))
            self.up(x, 3)
            self.read_token(n)
            before = (x + 0.7, 3)

    def language_model(self, *layers: tuple[str, str, float]) -> None:
        """Draw ``layers`` (text, colour, shift) below the drafts, over all tokens; drafts are read as tokens again."""
        bottom, xs = 2 - len(layers), (*READ, *DRAFTS)
        for y, (text, colour, shift) in enumerate(layers, start=bottom + 1):
            self.box(WIDE_X, y, text, colour, 9.4, shift=shift)
        for n, (x, at) in enumerate(zip(xs, ("t-1", "t", "t+1", "t+2", "t+3"), strict=True)):
            self.box(x, bottom, f"$x_{{{at}}}$", TOKEN, 1.0)
            for y in range(bottom, 2 + (n > 1)):
                self.up(x, y)
            if n > 1:
                self.box(x, 3, f"$x_{{t+{n}}}$", TOKEN, 1.0)
            if 1 < n < 4:
                self.arrow((x + 0.5, 2.9), (xs[n + 1] - 0.5, bottom + 0.1), TOKEN)

    def done(self, note: str) -> Figure:
        """Return the figure, with ``note`` below it."""
        self.note(sum(DRAFTS[:2]) / 2 - 0.6, -0.75, note)
        self.axes.set(xlim=(-0.35, 9.25), ylim=(-1, 4.3))
        return self.figure


def medusa(tuned: bool = False) -> Figure:
    """Every position has its own blocks over the last state."""
    s = Sketch()
    s.base(*(("base with LoRA, trained", TRAINED) if tuned else ()))
    s.drafts(last=False)
    for n, x in enumerate(DRAFTS):
        s.box(x, 3, f"blocks {n + 1}", TRAINED)
        s.arrow((READ[1] + 0.5, 2.05), (x - 0.3, 2.7))
        s.up(x, 3)
    if tuned:
        return s.done("as Medusa, but the base is trained too: the output is that of the tuned base")
    return s.done("one pass: all positions read the same state, none reads a draft")


def hydra(prefix: bool = False) -> Figure:
    """Every position has its own blocks, which also read the drafts before it."""
    s = Sketch()
    s.base()
    s.drafts()
    start = (READ[1] + 0.5, 3 if prefix else 2.05)
    if prefix:
        for x in READ:
            s.box(x, 3, "layer", TRAINED, 0.9)
            s.up(x, 2)
        s.arrow((READ[0] + 0.5, 3), (READ[1] - 0.5, 3))
    for n, x in enumerate(DRAFTS):
        s.box(x, 3, f"blocks {n + 1}", TRAINED)
        s.arrow(start, (x - 0.4, 2.7) if n else (x - 0.72, 2.9), bend=0.18 if n else 0.0)
        s.up(x, 3)
        s.read_token(n)
    if prefix:
        return s.done("a decoder layer over all states first; then each position reads the tokens before it")
    return s.done("each position reads the last state and the tokens before it")


def mlp_speculator() -> Figure:
    """A recurrent cell passes a state from position to position."""
    s = Sketch()
    s.base()
    s.drafts()
    s.recurrent("cell")
    return s.done("a state passes from position to position and reads one token in each")


def kangaroo() -> Figure:
    """The first layers of the base and an adapter draft; verification continues behind them."""
    s = Sketch()
    s.language_model(
        ("first layers of the base, frozen", FROZEN, -2.2), ("adapter: attention and two norms", TRAINED, -2.2)
    )
    s.box(WIDE_X, 4, "verification: the other layers of the base, from the states of the first", FROZEN, 9.4)
    return s.done("drafts pass through the base's first layers, whose work verification uses again")


def eagle3() -> Figure:
    """One decoder layer over fused states, then over its own output."""
    s = Sketch()
    s.base(states="3 states")
    s.drafts()
    s.recurrent("layer")
    s.arrow((READ[0], 2.28), (DRAFTS[0] - 0.7, 3.12), FROZEN, -0.2)
    s.note(READ[1] + 0.3, 3.45, "attends to all\npositions read", fontsize=8)
    return s.done("one decoder layer: first over states of three layers of the base, then over its own output")


def dspark() -> Figure:
    """A block of slots in one pass, corrected by the token before."""
    s = Sketch()
    s.base(states="states")
    s.drafts()
    s.box(DRAFTS[1], 2, "layers, once for the block", TRAINED, 5.2)
    for n, x in enumerate(DRAFTS):
        if n:
            s.box(x, 0, "mask", TRAINED, 1.0)
            s.read_token(n)
        s.arrow((x, 0.27), (x, 1.72))
        s.up(x, 2)
        s.box(x, 3, "+ Markov", TRAINED)
        s.up(x, 3)
    s.arrow((READ[1] + 0.5, 2), (DRAFTS[0] - 0.72, 2))
    return s.done("all slots in one pass; a low-rank product of the token before corrects each of them")


def draft_lm() -> Figure:
    """A small language model drafts token by token."""
    s = Sketch()
    s.language_model(("a few layers, copied from the base and trained", TRAINED, -1.6))
    return s.done("a language model of its own, which reads tokens only")


def loop() -> Figure:
    """One decoding step: draft, verify, accept, commit."""
    s = Sketch(height=3.4)
    for n, word in enumerate(("The", "sky", "is")):
        s.box(0.2 + 1.1 * n, 4, word, FROZEN, 1.0)
    s.note(1.3, 4.6, "the text so far")
    for row, words in enumerate((("blue", "because"), ("very", "blue"), ("a",))):
        y = 4 - 0.75 * row
        s.arrow((2.95, 4), (4.15, y))
        for n, word in enumerate(words):
            s.box(4.85 + 1.9 * n, y, word, FROZEN if row else TRAINED, 1.4)
        if len(words) == 2:
            s.arrow((5.57, y), (6.03, y))
    s.note(5.8, 4.6, "1. the head drafts a tree")
    s.arrow((7.47, 4), (8.1, 4), TOKEN)
    s.box(8.7, 4, "of", TOKEN, 1.15)
    s.box(4.45, 1.5, "2. the model reads all drafts in one pass, each after its own path", FROZEN, 9.6)
    s.box(4.45, 0.7, "3. accept what it would have written itself, and add its next token", TRAINED, 9.6)
    s.box(4.45, -0.1, "4. commit “blue because of”: three tokens for one pass", TOKEN, 9.6)
    for y in (2.25, 1.23, 0.43):
        s.arrow((4.45, y), (4.45, y - 0.26))
    s.axes.set(xlim=(-0.45, 9.35), ylim=(-0.5, 4.85))
    return s.figure


def tree(demo: dict[str, Any]) -> Figure:
    """Nodes in the order in which the search adds them, with the probability that each is accepted."""
    order = demo["calibration"]["order"]
    paths = [tuple(path) for path in order["paths"][:14]]
    shares = dict(zip(paths, order["values"], strict=False))
    nodes = TokenTree.from_paths(paths)
    labels = ["" if not path else f"{shares[tuple(path)]:.0%}" for path in nodes.paths]
    return plots.draw_tree(nodes, labels)


@plots.styled
def by_position(demo: dict[str, Any]) -> Figure:
    """Accepted drafts of all steps, by position and method."""
    names = {"speculative": "head and prompt lookup", "head": "head", "prompt_lookup:8:2": "prompt lookup"}
    figure, axes = plots.new_axes()
    for (method, name), colour in zip(names.items(), (TRAINED, TOKEN, FROZEN), strict=True):
        shares = [share or 0.0 for share in demo["metrics"][method]["acceptance_per_depth_of_all"]]
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=name)
    axes.set(xlabel="draft position", ylabel="steps that accept it", ylim=(0, 0.62))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(loc="upper right")
    return figure


def tasks(demo: dict[str, Any]) -> Figure:
    """Speedup by task and overall."""
    rows = [
        (name, group["speedup"]["vs_transformers"], *group["speedup"]["interval_95"])
        for name, group in [*demo["tasks"].items(), ("overall", demo["overall"])]
    ]
    return plots.speedup(rows)


def waterfall(demo: dict[str, Any]) -> Figure:
    """From the mean accepted length to the measured speedup."""
    return plots.waterfall(demo["speedup_breakdown"]["transformers"])


def cost(demo: dict[str, Any]) -> Figure:
    """The cost of verifying n tokens."""
    return plots.cost(demo["costs"]["verify"], demo["calibration"]["nodes"], None)


DIAGRAMS: dict[str, Callable[[], Figure]] = {
    "loop": loop,
    "head_medusa": medusa,
    "head_medusa2": lambda: medusa(tuned=True),
    "head_hydra": hydra,
    "head_hydra_pp": lambda: hydra(prefix=True),
    "head_mlp_speculator": mlp_speculator,
    "head_kangaroo": kangaroo,
    "head_eagle3": eagle3,
    "head_dspark": dspark,
    "head_draft_lm": draft_lm,
}
PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "tree": tree,
    "acceptance": by_position,
    "tasks": tasks,
    "waterfall": waterfall,
    "cost": cost,
}


METHODS = {
    "speculative": "head and prompt lookup in one tree",
    "head": "head alone",
    "prompt_lookup:8:2": "prompt lookup alone, no training",
}
"""Methods of the demo and their names in tables."""
MARKS = "<!-- demo: table -->\n", "<!-- end -->\n"


def demo_table(demo: dict[str, Any]) -> str:
    """Return the methods of the demo as a Markdown table."""
    overall, metrics = demo["overall"], demo["metrics"]
    lines = [
        "| method | speedup | 95 % interval | tokens per pass (tau) | tokens/s | answers identical |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, name in METHODS.items():
        numbers, (low, high) = metrics[method], overall["methods"][method]["speedup"]["interval_95"]
        times = f"{numbers['speedup']:.2f}x"
        same = overall["methods"][method]["identical_outputs"]
        cells = (name, f"**{times}**" if method == "speculative" else times, f"{low:.2f}–{high:.2f}")
        cells += (f"{numbers['mean_accepted_length']:.2f}", f"{numbers['tokens_per_second']:.1f}")
        lines.append(f"| {' | '.join(cells)} | {same['same']} of {same['of']} |")
    speeds = overall["autoregressive_tokens_per_second"]
    fastest = max(speeds.values())
    for name, speed in (
        ("no drafting, the fastest of three decoders", fastest),
        ("no drafting, stock transformers", speeds["transformers_stock"]),
    ):
        lines.append(f"| {name} | {speed / fastest:.2f}x | | 1.00 | {speed:.1f} | |")
    return "\n".join(lines) + "\n"


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as SVG without a background, in colours for light and dark pages."""
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
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    write_atomic(path, buffer.getvalue())


def main(given: list[str] | None = None) -> None:
    """Draw all figures and write all tables."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=DOCS / "assets", metavar="DIR", help="default docs/assets")
    arguments = options.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    demo = read_json(DEMO)
    figures = {name: draw() for name, draw in DIAGRAMS.items()} | {name: draw(demo) for name, draw in PLOTS.items()}
    for name, figure in figures.items():
        save(figure, arguments.out / f"{name}.svg")
    for page in (DOCS / "results").glob("*.md"):
        if MARKS[0] in page.read_text():
            page.write_text(filled(page, MARKS, demo_table(demo)))


if __name__ == "__main__":
    entry_point(main)
