"""Medusa heads against an independent reference, and their labels by construction."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from drafthead.data.batch import HiddenStatesSpec
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.losses import LossConfig
from drafthead.models.heads.medusa import MedusaConfig
from support import randomised, row_of

TinyBase = Callable[..., BaseModel]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_untrained_head_is_the_base_next_token_head(tiny_base: TinyBase, own: bool, last: bool, layers: int) -> None:
    base = tiny_base()
    config = MedusaConfig(num_draft_tokens=2, num_layers=layers, own_lm_head=own, reads_last_token=last)
    head = config.build(base).eval()
    hidden = torch.randn(3, base.hidden_size)
    candidates = head.d2t[head.draft_logits(hidden, torch.tensor([7, 8, 9]), 2).topk(4).indices]
    wanted = base.lm_head.logits(hidden).topk(4).indices
    assert torch.equal(candidates[:, 0], wanted) and torch.equal(candidates[:, 1], wanted)


def test_blocks_of_a_head_are_separate_modules(tiny_base: TinyBase) -> None:
    head = MedusaConfig(num_draft_tokens=2, num_layers=3).build(tiny_base())
    linears = [m for m in head.modules() if isinstance(m, torch.nn.Linear)]
    assert len({id(m.weight) for m in linears}) == 6


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, own: bool, last: bool) -> None:
    """Copied weights; the paper's equations; labels by explicit indices."""
    base = tiny_base()
    d2t = torch.arange(0, 300, 2)
    head = randomised(
        MedusaConfig(num_draft_tokens=3, num_layers=2, own_lm_head=own, reads_last_token=last).build(base, d2t)
    )
    batch = row_of([list(range(20, 32)), list(range(100, 109))], trained_from=4)
    base_hidden = base.hidden_states(batch, head.spec)
    out = head.loss(batch, base_hidden, LossConfig(decay=0.8))

    total, trained = 0.0, 0
    for k in range(1, 4):
        for start, length in ((0, 12), (12, 9)):
            for t in range(start, start + length):
                target = t + 1 + k
                if target >= start + length or target - start < 4:
                    continue
                trained += k == 1
                x = base_hidden.final[0, t]
                for j in range(2):
                    linear = head.blocks[k - 1][j].linear
                    read = x
                    if last and j == 0:
                        e = base.embedding[batch.input_ids[0, t + 1]]
                        read = torch.cat([x, e / (e.square().mean() + torch.finfo(e.dtype).eps).sqrt()])
                    x = x + F.silu(read @ linear.weight.t() + linear.bias)
                weight = head.projections.weights[k - 1] if own else base.lm_head.weight[d2t]
                token = int(batch.input_ids[0, target])
                if token % 2 == 0:
                    total += 0.8**k * F.cross_entropy(weight @ x, torch.tensor(token // 2)).item()
    assert int(out.tokens) == trained
    assert out.loss_sum.item() == pytest.approx(total, rel=1e-5)


def test_loss_of_a_position_is_a_mean_over_what_it_can_draft(tiny_base: TinyBase) -> None:
    """However many targets lie outside the draft vocabulary: an untrained head's loss is the next token's."""
    base = tiny_base()
    batch = row_of([list(range(20, 40))])
    base_hidden = base.hidden_states(batch, HiddenStatesSpec())
    d2t = torch.arange(0, 300, 2)
    ratios = MedusaConfig(num_draft_tokens=1).build(base, d2t).loss(batch, base_hidden, LossConfig()).ratios()
    even = [t for t in range(18) if batch.input_ids[0, t + 2] % 2 == 0]
    logits = base_hidden.final[0, even] @ base.lm_head.weight[d2t].t()
    wanted = F.cross_entropy(logits, batch.input_ids[0, [t + 2 for t in even]] // 2)
    assert ratios["loss_1"].value == pytest.approx(wanted.item(), rel=1e-5)
    assert ratios["accept_1"].den == 18


def test_candidate_ranks(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = randomised(MedusaConfig(num_draft_tokens=2, reads_last_token=True).build(base)).eval()
    batch = row_of([list(range(20, 30))])
    base_hidden = base.hidden_states(batch, head.spec)
    ranks = head.candidate_ranks(batch, base_hidden, top=5)
    last = batch.input_ids[0].roll(-1)
    candidates = head.d2t[head.draft_logits(base_hidden.final[0], last, 2).topk(5).indices]
    for t in range(12):
        for k in range(2):
            target = t + 2 + k
            if target >= 10:
                assert ranks[0, t, k] == -1
                continue
            listed = candidates[t, k].tolist()
            token = int(batch.input_ids[0, target])
            assert ranks[0, t, k] == (listed.index(token) if token in listed else 5)
