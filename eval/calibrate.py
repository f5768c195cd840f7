"""Choose the token tree of a head from its measured accuracies and this machine's measured latencies."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafthead.data.contracts import Features, TokenTree, TrainBatch
from drafthead.eval.latency import StepCosts
from drafthead.eval.tree import Ranks, TreeOrder, replay, search_visited
from drafthead.models.draft_head import DraftHead

LARGEST_TREE = 64
"""Nodes, root included: the size of Medusa's published trees."""
WIDTH = 10
"""Candidates per draft position that a tree may use, as in Medusa."""


@dataclass(frozen=True)
class Calibration:
    """The chosen tree and what it is expected to do."""

    tree: TokenTree
    order: TreeOrder
    expected_tokens: float
    """Mean accepted tokens of the chosen tree by replay of the held-out answers."""
    expected_tokens_largest: float
    """The same for the tree of ``LARGEST_TREE`` nodes."""
    expected_speedup: float
    """Against plain decoding with v(1), by the measured step costs."""
    curve: list[tuple[int, float, float]]
    """(nodes, mean accepted tokens by replay, expected speedup) over tree sizes."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``eval.json``."""
        return {
            "nodes": len(self.tree),
            "expected_tokens": self.expected_tokens,
            "expected_tokens_largest": self.expected_tokens_largest,
            "largest_nodes": LARGEST_TREE,
            "expected_speedup": self.expected_speedup,
            "curve": self.curve,
        }


def answer_ranks(head: DraftHead, batch: TrainBatch, features: Features) -> list[Ranks]:
    """Per document of the batch the ranks [T, K] of its answer: from the position before its first drafted token."""
    ranks = head.candidate_ranks(batch, features, top=WIDTH).cpu()
    answers = []
    for row in range(ranks.shape[0]):
        documents, counts = torch.unique_consecutive(batch.document_ids[row].cpu(), return_counts=True)
        start = 0
        for document, length in zip(documents.tolist(), counts.tolist(), strict=True):
            found = ranks[row, start : start + length].numpy()
            start += length
            drafted = np.flatnonzero(found[:, 0] >= 0)
            if document >= 0 and len(drafted):
                answers.append(found[drafted[0] : drafted[-1] + 1])
    return answers


def calibrate(answers: list[Ranks], costs: StepCosts) -> Calibration:
    """The tree with the highest expected speedup among the best trees of every size.

    A step with a tree of n nodes takes v(n) + c + o seconds and commits a number of tokens that replay of the
    held-out answers gives exactly; plain decoding takes v(1) + o for one.
    """
    order = search_visited(answers, LARGEST_TREE - 1)
    sizes = [n for n in range(2, LARGEST_TREE + 1) if n - 1 <= len(order.paths)]
    plain = costs.step(1)
    curve = []
    for nodes in sizes:
        tokens = replay(answers, order.tree(nodes - 1))
        curve.append((nodes, tokens, tokens * plain / costs.step(nodes)))
    nodes, tokens, speedup = max(curve, key=lambda point: point[2])
    return Calibration(
        tree=order.tree(nodes - 1),
        order=order,
        expected_tokens=tokens,
        expected_tokens_largest=curve[-1][1],
        expected_speedup=speedup,
        curve=curve,
    )
