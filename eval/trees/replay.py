"""Rows of the table of ``drafthead replay``: simulated acceptance, and the speedup that it predicts."""

from collections.abc import Sequence
from typing import Any

from drafthead.data.answers.store import Answer
from drafthead.eval.trees.search import SearchMethod, cross_fitted
from drafthead.eval.trees.simulate import simulate_texts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.decoding.loop import default_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import AcceptProbs, SimulatedAcceptance, simulate_acceptance
from drafthead.models.token_tree import TokenTree


def row_of(name: str, nodes: int, simulated: SimulatedAcceptance, speedup: float | None = None) -> dict[str, Any]:
    """Return a row of the printed table, for the drafts called ``name``; ``speedup`` is predicted (None: unknown)."""
    numbers = {"mean accepted length": simulated.mean_accepted_length, "95 %": simulated.interval}
    return {"draft": name, "nodes": nodes} | numbers | {"predicted speedup": speedup}


def own_row(
    base: BaseModel, head: DraftHead, texts: Sequence[Answer], sampler: Sampler, seed: int = 0
) -> dict[str, Any]:
    """Return the table's row for the head's own tree, cut by its confidence threshold, which other rows ignore."""
    draft_config = default_draft_config(head)
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
    return row_of(f"by cost, mean {average:.1f} nodes", max(sizes), simulated)


def rows_of(
    answers: Sequence[AcceptProbs],
    costs: CostModel | None,
    lengths: Sequence[int],
    sizes: Sequence[int],
    draft_sampling: DraftSampling,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return rows for chains of ``lengths`` and the best trees of ``sizes`` nodes. A tree is simulated on answers that
    its search did not use."""
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
        table.append(row_of(name, nodes, simulated, speedup))
    return table
