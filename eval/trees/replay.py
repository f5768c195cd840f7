"""Rows of the table of ``drafthead replay``: simulated acceptance, and the speedup that it predicts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafthead.data.answers.store import Answer
from drafthead.data.intervals import Floats, bootstrap_interval
from drafthead.eval.config import CONTEXTS
from drafthead.eval.trees.search import SearchMethod, cross_fitted
from drafthead.eval.trees.simulate import simulate_texts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.decoding.loop import static_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import AcceptProbs, SimulatedAcceptance, simulate_acceptance
from drafthead.models.token_tree import TokenTree


def row_of(
    name: str,
    nodes: int,
    simulated: SimulatedAcceptance,
    speedup: float | None = None,
    boundaries: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return a row of the printed table, for the drafts called ``name``; ``speedup`` is predicted (None: unknown). With
    ``boundaries``, the lengths of the simulated answers' prompts, it also has the acceptance ``by context``."""
    numbers = {"mean accepted length": simulated.mean_accepted_length, "95 %": simulated.interval}
    contexts = {} if boundaries is None else {"by context": by_context(simulated, boundaries)}
    return {"draft": name, "nodes": nodes} | numbers | {"predicted speedup": speedup} | contexts


def by_context(simulated: SimulatedAcceptance, boundaries: Sequence[int]) -> list[dict[str, Any]]:
    """Return expected steps and mean accepted length by the number of tokens before the step, as the ``by_context`` of
    an evaluation."""
    totals = np.zeros((len(CONTEXTS) - 1, 2))
    for (started, committed), boundary in zip(simulated.by_position, boundaries, strict=True):
        # A step from position t has t + 1 tokens of the answer before it.
        bins = np.searchsorted(CONTEXTS, boundary + 1 + np.arange(len(started)), side="right") - 1
        np.add.at(totals, bins.clip(max=len(totals) - 1), np.stack([started, started * committed], 1))
    return [
        {"low": low, "high": high, "steps": steps, "mean_accepted_length": tokens / steps}
        for low, high, (steps, tokens) in zip(CONTEXTS[:-1], CONTEXTS[1:], totals.tolist(), strict=True)
        if steps
    ]


def length_ratio(
    first: SimulatedAcceptance, second: SimulatedAcceptance, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """Return the ratio of two mean accepted lengths, and its 95 % interval over pairs of answers."""

    def sums(simulated: SimulatedAcceptance) -> Floats:  # tokens and steps of each answer, [answers, 2]
        return np.array([[len(started), started.sum()] for started, _ in simulated.by_position])

    def ratio(totals: Floats) -> Floats:
        tokens, steps, other_tokens, other_steps = totals.T
        result: Floats = (tokens / steps) / (other_tokens / other_steps)
        return result

    rows = np.concatenate([sums(first), sums(second)], 1)
    return float(ratio(rows.sum(0)[None])[0]), bootstrap_interval(rows, ratio, seed)


def own_row(
    base: BaseModel, head: DraftHead, texts: Sequence[Answer], sampler: Sampler, seed: int = 0
) -> dict[str, Any]:
    """Return the table's row for the head's own tree, cut by its confidence threshold, which other rows ignore."""
    draft_config = static_draft_config(head)
    simulated = simulate_texts(base, head, texts, draft_config, sampler, seed=seed)
    return row_of(f"own, threshold {draft_config.confidence_threshold:g}", draft_config.nodes, simulated)


def cost_row(
    base: BaseModel, head: DraftHead, texts: Sequence[Answer], sampler: Sampler, seed: int = 0
) -> dict[str, Any]:
    """Return the table's row for trees by cost, whose nodes are those of the largest one."""
    assert head.tree_costs is not None
    draft_config = DraftConfig(tree=CostTree(costs=head.tree_costs, depth=head.depth))
    simulated = simulate_texts(base, head, texts, draft_config, sampler, seed=seed)
    sizes = simulated.nodes or {1: 1.0}
    average = sum(size * share for size, share in sizes.items())
    speedup = None if simulated.cost is None else simulated.mean_accepted_length / simulated.cost
    return row_of(f"by cost, mean {average:.1f} nodes", max(sizes), simulated, speedup)


def rows_of(
    answers: Sequence[AcceptProbs],
    costs: CostModel | None,
    lengths: Sequence[int],
    sizes: Sequence[int],
    draft_sampling: DraftSampling,
    seed: int = 0,
    boundaries: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Return rows for chains of ``lengths`` and the best trees of ``sizes`` nodes. A tree is simulated on answers that
    its search did not use. The longest chain's row also has the acceptance ``by depth`` and, with ``boundaries``, ``by
    context``."""
    depth = answers[0].shape[1]
    chains = {length: simulate_acceptance(answers, TokenTree.chain(length), seed) for length in lengths}
    trees: dict[int, SimulatedAcceptance] = {}
    if sizes:
        # Sampled candidates are tried in order, which only Sequoia's program respects.
        method: SearchMethod = "greedy" if draft_sampling is DraftSampling.TOP_K else "sequoia"
        trees = dict(zip(sizes, cross_fitted(answers, sizes, method, seed), strict=True))
    drafts = [(f"chain of {length}", length + 1, length, simulated) for length, simulated in chains.items()]
    drafts += [(f"best tree of {size}", size, depth, simulated) for size, simulated in trees.items()]
    table = []
    for name, nodes, deepest, simulated in drafts:
        speedup = None if costs is None else costs.speedup(simulated.mean_accepted_length, nodes, deepest)
        is_longest = name == f"chain of {max(lengths)}"
        row = row_of(name, nodes, simulated, speedup, boundaries if is_longest else None)
        table.append(row | ({"by depth": simulated.by_depth} if is_longest else {}))
    return table
