"""EAGLE-3 heads that start as an induction head (``head.starts_copying``)."""

import pytest
import torch

from drafthead.data.batch import TrainBatch
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.simulation.ranks import answer_ranks
from support import random_base

SHAPE = {"model_type": "llama", "vocab_size": 400, "hidden_size": 128, "intermediate_size": 128}
SHAPE |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norms", [{"fc_norm": True}, {"norm_before_fc": True}, {}, {"qk_norm": True}])
def test_an_untrained_head_drafts_what_followed_a_token_before(norms: dict[str, bool], tied: bool) -> None:
    base = random_base(SHAPE | {"tie_word_embeddings": tied})
    prompt = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:60].tolist()
    batch = TrainBatch.of([[*prompt, *prompt]], len(prompt))
    first = {}
    for copies in (True, False):
        head = Eagle3Config(
            num_draft_tokens=3, ttt_steps=3, layers=[0, 2, 3], norm_before_residual=True, starts_copying=copies, **norms
        ).build(base)
        ranks = torch.as_tensor(answer_ranks(head.eval(), batch, base.hidden_states(batch, head.spec))[0])
        first[copies] = (ranks == 0).float().mean(0)
    assert min(first[True]) > 0.2 and max(first[False]) < 0.05, first  # chance is 1 in 400


def test_layer_0_is_read() -> None:
    assert Eagle3Config(starts_copying=True).build(random_base(SHAPE)).spec.layers == (0, 2, 1)
    assert Eagle3Config(starts_copying=True, layers=[1, 2, 3]).build(random_base(SHAPE)).spec.layers == (0, 2, 3)
    with pytest.raises(ValueError, match="fewer than two layers"):
        Eagle3Config(starts_copying=True, layers=[2])
    with pytest.raises(ValueError, match="parallel"):
        Eagle3Config(starts_copying=True, parallel=True)
