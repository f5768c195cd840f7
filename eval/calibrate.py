"""Choose the token tree of a head from its measured accuracies and this machine's measured latencies."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from drafthead.data.contracts import Features, TokenTree, TrainBatch
from drafthead.data.errors import UserError
from drafthead.data.files import read_json, write_json
from drafthead.eval.latency import StepCosts
from drafthead.eval.speed import hardware, versions
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
        """Plain values, for ``eval.json`` and ``from_json``."""
        return {
            "nodes": len(self.tree),
            "order": {"paths": self.order.paths, "values": self.order.values},
            "expected_tokens": self.expected_tokens,
            "expected_tokens_largest": self.expected_tokens_largest,
            "largest_nodes": LARGEST_TREE,
            "expected_speedup": self.expected_speedup,
            "curve": self.curve,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """The calibration that ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: ``found`` is something else.
        """
        order = TreeOrder([tuple(p) for p in found["order"]["paths"]], [float(v) for v in found["order"]["values"]])
        return cls(
            tree=order.tree(found["nodes"] - 1),
            order=order,
            expected_tokens=found["expected_tokens"],
            expected_tokens_largest=found["expected_tokens_largest"],
            expected_speedup=found["expected_speedup"],
            curve=[(nodes, tokens, speedup) for nodes, tokens, speedup in found["curve"]],
        )


def measured_with(head: DraftHead) -> str:
    """Hash of the head's weights, its base and this machine: what times and accuracies were measured with."""
    base = head.base
    made_by = (base.identity(), str(base.dtype), str(base.device), base.prepacked, hardware(), versions())
    digest = hashlib.sha256(repr(made_by).encode())
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def save_calibration(path: Path, head: DraftHead, costs: StepCosts, calibration: Calibration) -> None:
    """Keep what was measured: measured again, times differ a little, and with them the tree."""
    found = {"measured_with": measured_with(head), "costs": costs.to_json(), "calibration": calibration.to_json()}
    write_json(path, found)


def load_calibration(path: Path, head: DraftHead) -> tuple[StepCosts, Calibration] | None:
    """What ``save_calibration`` kept; None when it kept nothing, or for other weights or another machine.

    Raises:
        UserError: the file holds something else.
    """
    if not path.exists():
        return None
    found = read_json(path)
    try:
        if found["measured_with"] != measured_with(head):
            return None
        return StepCosts.from_json(found["costs"]), Calibration.from_json(found["calibration"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no calibration ({error!r}); remove it to measure again") from None


def answer_ranks(head: DraftHead, batch: TrainBatch, features: Features) -> list[Ranks]:
    """Per document of the batch the ranks [T, K] of its answer, at every position where decoding may start a step.

    The prompt's last position is the first: reading it yields the first answer token, which no step commits.
    """
    ranks = head.candidate_ranks(batch, features, top=WIDTH).cpu()
    answers = []
    for row in range(ranks.shape[0]):
        documents, counts = torch.unique_consecutive(batch.document_ids[row].cpu(), return_counts=True)
        start = 0
        for document, length in zip(documents.tolist(), counts.tolist(), strict=True):
            inside = slice(start, start + length)
            start += length
            found = ranks[row, inside].numpy()
            drafted = np.flatnonzero(found[:, 0] >= 0)
            trained = np.flatnonzero(batch.loss_mask[row, inside].cpu().numpy())
            first = max(0, int(trained[0]) - 1) if len(trained) else length
            if document >= 0 and len(drafted) and first <= drafted[-1]:
                answers.append(found[first : drafted[-1] + 1])
    return answers


def calibrate(answers: list[Ranks], costs: StepCosts) -> Calibration:
    """The tree with the highest expected speedup among the best trees of every size.

    A step with a tree of n nodes takes v(n) + c + o seconds and commits a number of tokens that replay of the
    held-out answers gives exactly; plain decoding takes v(1) + o for one.

    Raises:
        UserError: no answer has a step.
    """
    if not answers:
        raise UserError(
            "the held-out answers have one token each, too few to choose a tree by; raise "
            "data.generations.sampler.max_new_tokens or data.generations.prompts"
        )
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
