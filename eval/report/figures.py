"""Which figures a report shows, and how to read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from drafthead.eval.metrics.summary import fastest_baseline, speedup_of
from drafthead.eval.report import plots
from drafthead.eval.report import plots as run_plots
from drafthead.models.token_tree import TokenTree

MOST_BINS = 8
"""More bars than this do not read on a phone: neighbouring bins of positions are put together."""
FIGURES = {
    "speedup": (
        "Speedup by task",
        "Bars right of the dashed line are faster than plain decoding; the thin lines are 95 % intervals.",
    ),
    "methods": (
        "Speedup by method",
        "All methods in one interleaved run; the thin lines are 95 % intervals.",
    ),
    "waterfall": (
        "The speedup explained",
        "Every token of a step would be gain if a step cost what a plain one does; each cost takes its part.",
    ),
    "cost": (
        "Cost of verifying n tokens",
        "A tree pays where the tokens it yields (dashed) exceed what verifying it costs (marker), drafting aside.",
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
    "by_position": (
        "Acceptance by place in the answer",
        "Tokens per step by how many answer tokens came before the step.",
    ),
    "by_entropy": (
        "Acceptance by entropy",
        "Tokens per step by how unsure the base was of the step's first token: left, it hardly had a choice.",
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
    yield from _speeds(evaluation)
    overall = evaluation["overall"]
    if latency:
        nodes = None if tree is None else len(tree)
        yield "cost", plots.cost(latency, nodes, overall["mean_accepted_tokens"])
    if overall["acceptance_per_depth"]:
        yield "acceptance", plots.acceptance(overall["acceptance_per_depth"])
    if overall["mean_accepted_tokens"] is not None:
        yield "ctar", plots.ctar(overall["ctar"])
    if positions := evaluation.get("by_position"):
        yield "by_position", plots.bins(_fewer(positions), "answer tokens before the step", "{:.0f}")
    if entropies := evaluation.get("by_entropy"):
        yield "by_entropy", plots.bins(entropies, "entropy in nats", "{:.1f}")
    for name, prefix in run_plots.TRAINING.items():
        curve = run_plots.training(training_log or [], prefix)
        if curve is not None:
            yield name, curve
    if tree is not None and tree.depth:
        yield "tree", run_plots.tree(tree)


def explained_of(evaluation: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The faster baseline's name, and the explanation of the speedup over it; None where there is none."""
    name, _ = fastest_baseline(evaluation["overall"])
    found: dict[str, Any] | None = evaluation.get("explained", {}).get(name)
    return name, found


def _speeds(evaluation: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    overall = evaluation["overall"]
    rows = [
        (name, value, *group["speedup"]["interval_95"])
        for name, group in [*evaluation["tasks"].items(), ("overall", overall)]
        if (value := speedup_of(group)) is not None
    ]
    if rows:
        yield "speedup", plots.speedup(rows)
    # The headline's method comes last: the bar in full colour.
    methods = [
        (name, value, *numbers["speedup"]["interval_95"])
        for name, numbers in reversed(overall.get("methods", {}).items())
        if (value := speedup_of(overall, name)) is not None
    ]
    if len(methods) > 1:
        yield "methods", plots.speedup(methods)
    _, explained = explained_of(evaluation)
    if explained is not None:
        yield "waterfall", plots.waterfall(explained)


def _fewer(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours put together until there are at most ``MOST_BINS``."""
    together = -(-len(found) // MOST_BINS)
    return [_merged(found[at : at + together]) for at in range(0, len(found), together)]


def _merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = sum(row["steps"] for row in found)
    tokens = sum(row["steps"] * row["mean_accepted_tokens"] for row in found)
    return {
        "low": found[0]["low"],
        "high": found[-1]["high"],
        "steps": steps,
        "mean_accepted_tokens": tokens / steps,
    }
