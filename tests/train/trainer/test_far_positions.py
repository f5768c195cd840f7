"""Rows whose positions skip ahead."""

from dataclasses import replace
from typing import Any

import torch

from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.config import composed
from drafthead.train.trainer.far_positions import check_span, with_skips
from support import TINY, TinyBase, cases, random_base, random_ids, randomised, refuses, row_of


def test_one_skip_per_document_within_the_span() -> None:
    batch = row_of([random_ids(20), random_ids(9, 1), [5]])
    starts = set()
    for seed in range(40):
        torch.manual_seed(seed)
        skipped = with_skips(batch, 100)
        assert torch.equal(replace(skipped, position_ids=batch.position_ids).input_ids, batch.input_ids)
        for document, length in ((0, 20), (1, 9), (2, 1)):
            positions = skipped.position_ids[batch.document_ids == document]
            steps = positions.diff()
            assert positions[0] == 0 and int(positions[-1]) < 100 and len(positions) == length
            assert int((steps > 1).sum()) <= 1 and bool((steps >= 1).all())
            starts.add(int(positions[-1]))
        padding = batch.document_ids < 0
        assert torch.equal(skipped.position_ids[padding], batch.position_ids[padding])
    assert len(starts) > 20 and max(starts) > 80


def test_skips_train_what_an_offset_does_not(tiny_base: TinyBase) -> None:
    """Rotary attention reads distances: a constant offset leaves the loss as it is, a skip does not."""
    base, batch = tiny_base(), row_of([random_ids(30)])
    head = randomised(Eagle3Config(num_draft_tokens=2, ttt_steps=2).build(base), 0.3)
    hidden = base.hidden_states(batch, head.spec)
    torch.manual_seed(1)

    def loss(positions: torch.Tensor) -> float:
        return float(head.loss(replace(batch, position_ids=positions), hidden, LossConfig()).loss_sum)

    plain, offset = loss(batch.position_ids), loss(batch.position_ids + 300)
    torch.testing.assert_close(offset, plain, rtol=1e-4, atol=0)
    assert abs(loss(with_skips(batch, 400).position_ids) - plain) > 1e-3 * plain


@cases(
    "rope, span, says",
    ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 256, "dynamic.* depend on the longest position"),
    ({"rope_type": "default", "rope_theta": 1e4}, 4096, "position_span=4096 exceeds the context of .* up to 512"),
)
def test_rotations_by_distance_alone(rope: dict[str, Any], span: int, says: str) -> None:
    base = random_base(TINY | {"rope_parameters": rope})
    head = Eagle3Config(num_draft_tokens=2, ttt_steps=2).build(base)
    refuses(says, check_span, "distill", head, span)


@cases(
    "recipe, settings, says",
    ("eagle3_smollm2", ["phases.distill.position_span=4096", "head.window=64"], "no effect with head.window"),
    ("eagle3_smollm2", ["phases.distill.position_span=512"], "must be above phases.distill.seq_len="),
    ("medusa_smollm2", ["phases.distill.position_span=4096"], r"\(eagle3, dspark\), not medusa"),
)
def test_settings_that_train_nothing_more(recipe: str, settings: list[str], says: str) -> None:
    refuses(says, composed, [f"recipe={recipe}", *settings])
