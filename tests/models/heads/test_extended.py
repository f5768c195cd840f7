"""Extending the draft vocabulary and the draft positions of a trained head."""

from dataclasses import replace

import pytest
import torch

from drafthead.data.batch import TrainBatch
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.heads.parts.extended import with_more_ids, with_settings
from support import TinyBase, drafted_logits, random_ids, randomised

CONFIGS = [
    MedusaConfig(num_draft_tokens=2, induction_rank=8),
    MedusaConfig(num_draft_tokens=2, own_lm_head=True),
    HydraConfig(num_draft_tokens=2, markov_rank=4),
    Eagle3Config(num_draft_tokens=2, ttt_steps=2, own_lm_head=True),
    DSparkConfig(num_draft_tokens=2, copy_layers=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.head_type}")
def test_former_ids_keep_their_logits(config: DraftHeadConfig, tiny_base: TinyBase) -> None:
    base = tiny_base()
    known = torch.tensor([7, 3, 50, 120, 121, *range(200, 230)])  # published vocabularies are not always sorted
    head = randomised(config.build(base, known)).eval()
    wide = with_more_ids(head, torch.tensor([3, 9, 122, 250]))
    assert sorted(wide.d2t.tolist()) == wide.d2t.tolist() == sorted([*known.tolist(), 9, 122, 250])
    ids, drafts = random_ids(12), [7]
    hidden = base.hidden_states(TrainBatch.of([ids], 1), head.spec)
    before, after = (drafted_logits(each, ids, hidden, drafts) for each in (head, wide))
    same = torch.searchsorted(wide.d2t, known)
    assert torch.allclose(after[..., same], before, atol=1e-5)
    assert not torch.allclose(after[..., torch.searchsorted(wide.d2t, torch.tensor([9, 122]))], torch.zeros(2))


def test_more_ids_can_be_copied(tiny_base: TinyBase) -> None:
    """A new id gets the code that the trained induction head copies."""
    config = MedusaConfig(num_draft_tokens=2, own_lm_head=False, induction_rank=8)
    wide = with_more_ids(config.build(tiny_base(), torch.arange(100)).eval(), torch.tensor([122]))
    ids = [7, 122, *range(30, 40)]  # 122 followed the last committed token, 7
    hidden = wide.base_model.hidden_states(TrainBatch.of([ids], 1), wide.spec)
    logits = drafted_logits(wide, ids, hidden, [7])[0]
    with torch.no_grad():
        wide.low_rank.weight[-1] = 0.0
    wide.train().eval()  # packs the weights again
    assert float(logits[-1] - drafted_logits(wide, ids, hidden, [7])[0][-1]) > 4.0


def test_a_head_without_missing_ids_is_kept(tiny_base: TinyBase) -> None:
    whole = MedusaConfig(num_draft_tokens=2).build(tiny_base())
    part = MedusaConfig(num_draft_tokens=2).build(tiny_base(), torch.arange(100))
    assert with_more_ids(whole, torch.arange(9)) is whole and with_more_ids(part, torch.arange(9)) is part


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.head_type}")
def test_former_positions_keep_their_logits(config: DraftHeadConfig, tiny_base: TinyBase) -> None:
    if isinstance(config, DSparkConfig):
        config = replace(config, causal=True, reads_state=True)
    head = randomised(config.build(tiny_base())).eval()
    deep = with_settings(head, replace(config, num_draft_tokens=5))
    ids, drafts = random_ids(12), [7, 9, 11, 13, 15]
    hidden = head.base_model.hidden_states(TrainBatch.of([ids], 1), head.spec)
    before, after = (drafted_logits(each, ids, hidden, drafts[: each.depth]) for each in (head, deep))
    assert torch.allclose(after[:2], before, atol=1e-5) and torch.isfinite(after).all() and len(after) == 5
