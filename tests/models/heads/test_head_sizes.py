"""What ``mode=estimate`` says of a head is what the built one has, on bases with few key and value heads."""

import pytest
import torch

from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.heads.common.contract import DraftHeadConfig
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 300}
GROUPED = {
    "one key head": {"num_key_value_heads": 1, "intermediate_size": 80},
    "two of four": {"num_key_value_heads": 2, "intermediate_size": 112},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 48},
}
CONFIGS: dict[str, DraftHeadConfig] = {
    "draft_lm": DraftLMConfig(num_layers=2, draft_vocab_size=100),
    "eagle3": Eagle3Config(draft_vocab_size=100),
    "eagle3, as later checkpoints": Eagle3Config(
        draft_vocab_size=100, layers=[1, 2], intermediate_size=40, norm_before_fc=True, own_lm_head=False
    ),
    "eagle3 on the final state": Eagle3Config(layers=[]),
    "hydra_pp": HydraConfig(prefix_layer=True, num_layers=2, draft_vocab_size=100),
    "kangaroo": KangarooConfig(exit_layer=1),
    "medusa": MedusaConfig(num_draft_tokens=3, num_layers=2, draft_vocab_size=100),
    "medusa on the base's projection": MedusaConfig(own_lm_head=False, reads_last_token=True),
    "medusa with tied blocks": MedusaConfig(num_layers=3, tie_blocks=True),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("grouping", GROUPED)
def test_size_is_the_built_head(grouping: str, name: str) -> None:
    shape = {"model_type": "llama", **SHAPE, **GROUPED[grouping]}
    base = BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", prepack=False))
    config = CONFIGS[name]
    head = config.build(base, None if config.draft_vocab_size is None else torch.arange(100))
    size = config.size(base.model.config)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert size.parameters == size.trainable == trained
    assert (size.positions, size.draft_vocab_size) == (config.depth, len(head.d2t))
    assert size.feature_layers == len(head.spec.layers)
