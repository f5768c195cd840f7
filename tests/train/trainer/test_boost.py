"""A second head learns the targets that the first head's tree misses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.errors import UserError
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from drafthead.train.trainer.boost import boosted, load_first, target_weights
from support import TinyBase, fitted, random_ids, rows_of

TREE = TokenTree.from_paths([(0,), (1,), (0, 0)])


def test_weights_by_hand() -> None:
    ranks = torch.tensor([[[0, 0], [2, 5], [1, 0], [-1, -1], [-1, -1]]])  # from place t, of t + 1 + k
    weights = target_weights(ranks, TREE, 3, 0.25)
    assert weights[0, :, 0].tolist() == [1, 1, 0.25, 1, 0.25], "ranks 0 and 1 are in the tree at depth 1"
    assert weights[0, :, 1].tolist() == [1, 1, 1, 0.25, 1]
    assert weights[0, :, 2].tolist() == [1] * 5, "the first head does not draft so deep"


def test_only_what_is_missed_has_a_gradient(tiny_base: TinyBase) -> None:
    """With floor 0 the loss is that of the target_weights targets alone; a first head that knows all leaves nothing."""
    base, batch = tiny_base(), rows_of([random_ids(16, seed=1), random_ids(16, seed=2)])
    known = rows_of([random_ids(16, seed=1)])
    first = fitted(HydraConfig(num_draft_tokens=2).build(base), known, 60, 0.01)  # the first row alone
    second = HydraConfig(num_draft_tokens=2).build(base)
    hidden = base.hidden_states(batch, second.spec)
    whole = second.loss(batch, hidden, LossConfig())
    (boosted_batch, _), *_ = boosted(iter([(batch, hidden)]), first, 2, 0.0)
    (rest, _), *_ = boosted(iter([(batch, hidden)]), first, 2, 1.0)
    torch.testing.assert_close(second.loss(rest, hidden, LossConfig()).loss_sum, whole.loss_sum)
    some = second.loss(boosted_batch, hidden, LossConfig())
    assert 0 < float(some.loss_sum.detach()) < float(whole.loss_sum.detach()) and 0 < int(some.tokens) < int(
        whole.tokens
    )
    (nothing, _), *_ = boosted(iter([(batch, hidden)]), fitted(first, batch, 120, 0.01), 2, 0.0)
    assert int(second.loss(nothing, hidden, LossConfig()).tokens) < int(some.tokens)


def test_weights_of_untrained_positions_are_ignored(tiny_base: TinyBase) -> None:
    """A head that trains one of its two positions does not take the larger weight of both."""
    base, batch = tiny_base(), rows_of([random_ids(16)])
    head = Eagle3Config(num_draft_tokens=2, ttt_steps=1).build(base)
    weights = torch.zeros(*batch.input_ids.shape, 2)
    weights[..., 1] = 1.0
    output = head.loss(replace(batch, weights=weights), base.hidden_states(batch, head.spec), LossConfig())
    assert int(output.tokens) == 0


def test_a_first_head_that_reads_other_layers_is_rejected(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KangarooConfig(num_draft_tokens=2, exit_layer=1).build(base).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"reads the base's layers \(1,\).* reads \(\)"):
        load_first(str(tmp_path), HydraConfig(num_draft_tokens=2).build(base))
