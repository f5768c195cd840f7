"""Choose the token tree of a head from its measured accuracies and this machine's measured latencies."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from drafthead.data.answers.store import Answer
from drafthead.errors import UserError
from drafthead.eval.trees.search import SearchMethod, TreeOrder, best_trees, greedy_tree
from drafthead.eval.trees.simulate import simulate_texts
from drafthead.files.local import read_checksummed_json, write_checksummed_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import WIDTH, Ranks
from drafthead.models.token_tree import TokenTree
from drafthead.system.machine import hardware, versions

LEAST_GAIN = 1.02
"""Expected speedup of trees by cost over that of the best static tree, from which they are the default: choosing nodes
takes time that the measured costs lack."""
LARGEST_TREE = 64  # nodes of a calibrated tree at most, root included: the size of Medusa's published trees
VERSION = 2  # of the measurement; raise it when the forward pass or the saved format changes, to discard older ones


@dataclass(frozen=True)
class Calibration:
    """A head's tree and its expected performance, which ignores the head's confidence threshold."""

    tree: TokenTree
    method: str  # search that found the tree: greedy or sequoia
    order: TreeOrder  # by greedy search, whatever `method` is
    expected_tokens: float  # mean accepted length of the tree, simulated on the held-out answers
    expected_tokens_largest: float  # of the largest tree compared; of equally large ones, of the fastest
    expected_speedup: float  # over autoregressive decoding, as predicted by `CostModel`

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("tree", "order")}
        values["order"] = {"paths": self.order.paths, "values": self.order.values}
        choices = [list(p) for p in self.tree.paths[1:]]
        return {"nodes": len(self.tree), "choices": choices, "largest_nodes": LARGEST_TREE, **values}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        values = {f.name: content[f.name] for f in fields(cls) if f.name != "tree"}
        order = content["order"]
        values["order"] = TreeOrder([tuple(p) for p in order["paths"]], [float(v) for v in order["values"]])
        return cls(tree=TokenTree.from_paths([tuple(p) for p in content["choices"]]), **values)


def measured_with(base: BaseModel, *measured: object) -> str:
    """Return a hash of everything that a saved measurement depends on: it is used again only if the hash is equal."""
    machine = (str(base.device), base.prepacked, str(base.kernels), hardware(), versions())
    return hashlib.sha256(repr((*measured, base.identity(), str(base.dtype), *machine)).encode()).hexdigest()


def save_calibration(
    path: Path, head: DraftHead, costs: CostModel, calibration: Calibration, chosen_on: str | None = None
) -> None:
    """Write costs and calibration with a hash of their head and machine: a new measurement could give another tree.
    ``chosen_on`` names the answers and the search that gave the tree."""
    measured = measured_with(head.base_model, VERSION, head.identity())
    save_costs(path, measured, costs, calibration=calibration.to_json(), chosen_on=chosen_on)


def load_calibration(path: Path, head: DraftHead, chosen_on: str | None = None) -> tuple[CostModel, Calibration] | None:
    """Read what ``save_calibration`` wrote. Return None without a file, or if head, base, machine or ``chosen_on``
    differ (with ``chosen_on`` None, it is not compared)."""
    content = _measured(path, measured_with(head.base_model, VERSION, head.identity()))
    with _readable(path):
        if content and chosen_on is not None and content.get("chosen_on") != chosen_on:
            return None
        return content and (CostModel.from_json(content["costs"]), Calibration.from_json(content["calibration"]))


def save_costs(path: Path, measured: str, costs: CostModel, **more: Any) -> None:
    """Write costs with what they were ``measured_with``."""
    write_checksummed_json(path, {"measured_with": measured, "costs": costs.to_json(), **more})


def load_costs(path: Path, measured: str) -> CostModel | None:
    """Read what ``save_costs`` wrote; return None without a file, or if it was measured with anything else."""
    content = _measured(path, measured)
    with _readable(path):
        return content and CostModel.from_json(content["costs"])


def _measured(path: Path, measured: str) -> Any:
    """Return the content of a file if it was measured with ``measured``, else None."""
    if not path.exists():
        return None
    content = read_checksummed_json(path)
    with _readable(path):
        return content if content["measured_with"] == measured else None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a calibration ({error!r}); remove it to measure again") from None


def speedup_by_cost(head: DraftHead, texts: Sequence[Answer], temperature: float) -> tuple[float, float]:
    """Return the expected speedup of ``head`` with trees by cost, without the prefill, and their mean nodes, simulated
    on the base's own answers ``texts``. Its ``tree_costs`` must be known."""
    assert head.tree_costs is not None
    draft_config = DraftConfig(tree=CostTree(costs=head.tree_costs, depth=head.depth))
    simulated = simulate_texts(head.base_model, head, texts, draft_config, Sampler(temperature=temperature))
    assert simulated.cost is not None and simulated.nodes is not None
    nodes = sum(n * share for n, share in simulated.nodes.items())
    return simulated.mean_accepted_length / simulated.cost, nodes


def calibrate(answers: Sequence[Ranks], costs: CostModel, method: SearchMethod = "greedy") -> Calibration:
    """Return the tree with the highest expected speedup among the best trees of every size and depth. The number of
    tokens that a step commits is simulated exactly on the held-out answers, of which ``answers`` has the ranks [T, K]
    of the true tokens among the head's candidates."""
    if not answers:
        raise UserError("the held-out answers have one token each; raise data.answers.sampler.max_new_tokens")
    probs = [accept_probs_of_ranks(ranks, WIDTH) for ranks in answers]
    depth = probs[0].shape[1]
    choices = []
    # Shallower trees are faster only if the time of drafting depends on the depth.
    for bound in [depth] if costs.draft_by_depth is None else range(1, depth + 1):
        shallow = [answer[:, :bound] for answer in probs]
        for nodes, tree in best_trees(shallow, LARGEST_TREE, method).items():
            tokens = simulate_acceptance(shallow, tree).mean_accepted_length
            choices.append((costs.speedup(tokens, nodes, tree.depth), -nodes, tokens, tree))
    speedup, _, tokens, chosen = max(choices, key=lambda choice: choice[:2])  # of equally fast trees the smallest
    return Calibration(
        tree=chosen,
        method=method,
        order=greedy_tree(probs, LARGEST_TREE - 1),
        expected_tokens=tokens,
        expected_tokens_largest=min(choices, key=lambda choice: (choice[1], -choice[0]))[2],
        expected_speedup=speedup,
    )
