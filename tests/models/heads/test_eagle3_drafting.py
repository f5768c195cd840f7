"""EAGLE-3's drafting against its training, its decoding against plain text, and what is saved."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, DynamicTree
from drafthead.models.heads.common.targets import DraftTargets
from drafthead.models.heads.eagle3 import Eagle3Head
from drafthead.models.token_tree import TokenTree
from support import (
    EAGLE3_VARIANTS,
    eagle3_head,
    random_ids,
    row_of,
)

TinyBase = Callable[..., BaseModel]
ARCHITECTURES = ["llama", "mistral", "qwen2", "gemma"]
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(4)),
    "tree": DraftConfig(tree=TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=9, width=4, depth=3)),
}


def text_logits(head: Eagle3Head, base: BaseModel, ids: list[int]) -> Tensor:
    """[K, T, W] draft logits of the training path, every position at the place it drafts from."""
    batch = row_of([ids])
    draft_targets = DraftTargets.of(batch, head.depth)
    hidden = head.position_hidden(batch, base.hidden_states(batch, head.spec), draft_targets)
    found = torch.full((head.depth, len(ids), len(head.d2t)), torch.nan)
    for k in range(head.depth):
        valid = draft_targets.valid[k]
        found[k, draft_targets.source_idx[k, valid]] = head.output_head(k).logits(hidden[k, valid]).detach()
    return found


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafting_along_a_text_is_the_training_path(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    """Rows of lengths of their own, read in pieces, with drafts in between: every level's logits are a step's.

    On each level the text's token is the second of two nodes, so parents matter.
    """
    base = tiny_base(architecture)
    head = eagle3_head(base, torch.arange(0, 300, 2), **EAGLE3_VARIANTS[variant])
    texts = [random_ids(60), random_ids(25, seed=1), random_ids(30, seed=2)]
    wanted = [text_logits(head, base, ids) for ids in texts]
    for rows in ([0], [1], [0, 1, 2], [1, 2]):
        starts, state = torch.zeros(len(rows), dtype=torch.int64), head.init_state(len(rows))
        cache = base.new_slots(len(rows), 128) if len(rows) > 1 else base.new_cache(128)
        for counts in ([[40, 1, 3], [1, 4, 2], [3, 1, 5], [1, 1, 1]][n] for n in range(4)):
            count = torch.tensor([counts[row] for row in rows])
            most = int(count.max())
            taken = [texts[row][s : s + c] for row, s, c in zip(rows, starts.tolist(), count.tolist(), strict=True)]
            tokens = torch.tensor([part + [7] * (most - len(part)) for part in taken])
            read = base.forward(tokens, cache, count, head.spec)
            state = head.update(state, tokens, read, count)
            starts = starts + count
            for _ in range(2):  # the same state drafts the same again
                follow(head, state, [texts[row] for row in rows], [wanted[row] for row in rows], starts)


def follow(head: Eagle3Head, state: object, texts: list[list[int]], wanted: list[Tensor], starts: Tensor) -> None:
    """Expand nodes of the texts' tokens after what is read; their logits must be those of the training path."""

    def tokens(ahead: int) -> Tensor:
        return torch.tensor([text[start + ahead] for text, start in zip(texts, starts.tolist(), strict=True)])

    with torch.inference_mode():
        draft_pass = head.start(state, tokens(0), PLANS["chain"])  # type: ignore[arg-type]
        found = draft_pass.root()[:, 0]
        for k in range(head.depth):
            steps = torch.stack([w[k, start - 1] for w, start in zip(wanted, starts.tolist(), strict=True)])
            torch.testing.assert_close(found, steps, rtol=1e-3, atol=1e-3)
            if k + 1 < head.depth:
                nodes = torch.stack([tokens(k + 2), tokens(k + 1)], 1)
                parents = torch.full_like(nodes, min(k, 1))
                parents[:, 0] = 0
                found = draft_pass.step(nodes, parents)[:, 1]


def test_ranks_are_those_of_drafting(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = eagle3_head(base, torch.arange(0, 300, 2))
    ids = random_ids(20)
    batch, logits = row_of([ids]), text_logits(head, base, ids)
    ranks = head.candidate_ranks(batch, base.hidden_states(batch, head.spec), top=40)
    for t, k in product(range(22), range(4)):
        target = t + 2 + k
        if target >= 20:
            assert ranks[0, t, k] == -1
            continue
        listed = head.d2t[logits[k, t].topk(40).indices].tolist()
        assert ranks[0, t, k] == (listed.index(ids[target]) if ids[target] in listed else 40)
