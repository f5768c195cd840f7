"""Which figures a report shows, and how to read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from drafthead.data.contracts import TokenTree
from drafthead.eval import plots
from drafthead.eval.speed import speedup_of

FIGURES = {
    "speedup": (
        "Speedup by task",
        "Bars right of the dashed line are faster than plain decoding; the thin lines are 95 % intervals.",
    ),
    "acceptance": (
        "Acceptance by depth",
        "A bar is the chance that a draft is accepted once the one before it was; the line is the share of steps that "
        "get that far.",
    ),
    "ctar": (
        "Tokens per verification (CTAR)",
        "The share of verifications that commit more than w tokens; plain decoding has 0 % from w = 1 on.",
    ),
    "cost": (
        "Cost of verifying n tokens",
        "A tree pays where the tokens it yields (dashed) exceed what verifying it costs (marker), drafting aside.",
    ),
    "training_loss": (
        "Training loss",
        "One line per draft position, darkest for the first, dots on held-out rows; lower is better.",
    ),
    "training_acceptance": (
        "Training acceptance",
        "How often each position's first candidate is the right token, on training rows (lines) and held-out rows "
        "(dots).",
    ),
    "tree": (
        "The token tree",
        "Every path from the left is one guess at the next tokens; a number is the candidate's rank, 1 the likeliest.",
    ),
}
"""Heading, and one sentence that says how to read the figure."""


def draw_figures(
    evaluation: dict[str, Any],
    latency: Sequence[tuple[int, float]] | None,
    tree: TokenTree | None,
    training_log: Sequence[dict[str, Any]] | None,
) -> Iterator[tuple[str, Figure]]:
    """File name and figure; what was not measured is left out."""
    overall = evaluation["overall"]
    speeds = [
        (name, value, *group["speedup"]["interval_95"])
        for name, group in [*evaluation["tasks"].items(), ("overall", overall)]
        if (value := speedup_of(group)) is not None
    ]
    if speeds:
        yield "speedup", plots.speedup(speeds)
    if overall["acceptance_per_depth"]:
        yield "acceptance", plots.acceptance(overall["acceptance_per_depth"])
    if overall["mean_accepted_tokens"] is not None:
        yield "ctar", plots.ctar(overall["ctar"])
    if latency:
        nodes = None if tree is None else len(tree)
        yield "cost", plots.cost(latency, nodes, overall["mean_accepted_tokens"])
    for name, prefix in (("training_loss", "loss_"), ("training_acceptance", "accept_")):
        curve = plots.training(training_log or [], prefix)
        if curve is not None:
            yield name, curve
    if tree is not None and tree.depth:
        yield "tree", plots.tree(tree)
