"""Medusa heads against an independent reference, and their labels by construction."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.losses import LossConfig
from support import TinyBase, assert_parity, randomised, row_of


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, own: bool, last: bool) -> None:
    """Copied weights; the paper's equations."""
    base, d2t = tiny_base(), torch.arange(0, 300, 2)
    config = MedusaConfig(num_draft_tokens=3, num_layers=2, own_lm_head=own, reads_last_token=last)
    head = randomised(config.build(base, d2t))

    def logits(k: int, x: Tensor, token: int) -> Tensor:
        for j in range(2):
            linear, inputs = head.blocks[k - 1][j].linear, x
            if last and j == 0:
                e = base.embedding[token]
                inputs = torch.cat([x, e / (e.square().mean() + torch.finfo(e.dtype).eps).sqrt()])
            x = x + F.silu(inputs @ linear.weight.t() + linear.bias)
        weight = head.projections.weights[k - 1] if own else base.lm_head.weight[d2t]
        return weight @ x

    def reference(ids: list[int], states: Tensor) -> dict[tuple[int, int], Tensor]:
        keys = product((1, 2, 3), range(len(ids) - 1))
        return {(k, t): logits(k, states[t], ids[t + 1]) for k, t in keys}

    assert_parity(head, reference)


def test_loss_of_a_position_is_a_mean_over_what_it_can_draft(tiny_base: TinyBase) -> None:
    """However many targets lie outside the draft vocabulary: an untrained head's loss is the next token's."""
    base = tiny_base()
    batch = row_of([list(range(20, 40))])
    base_hidden = base.hidden_states(batch, HiddenStatesSpec())
    d2t = torch.arange(0, 300, 2)
    ratios = MedusaConfig(num_draft_tokens=1).build(base, d2t).loss(batch, base_hidden, LossConfig()).ratios()
    even = [t for t in range(18) if batch.input_ids[0, t + 2] % 2 == 0]
    logits = base_hidden.final[0, even] @ base.lm_head.weight[d2t].t()
    expected = F.cross_entropy(logits, batch.input_ids[0, [t + 2 for t in even]] // 2)
    assert ratios["loss_1"].value == pytest.approx(expected.item(), rel=1e-5)
    assert ratios["accept_1"].den == 18
