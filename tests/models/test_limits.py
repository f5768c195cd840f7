"""Settings outside of their limits are refused, each with its name."""

from typing import Any

import pytest

from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.medusa2 import Medusa2Config
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.losses import LossConfig

NAN = float("nan")
BAD: list[tuple[Any, dict[str, Any]]] = [
    (AcceptanceRule, {"name": "medusa", "epsilon": 0.0, "delta": 1.5, "lenience": 2.0}),
    (Sampler, {"temperature": -0.1, "top_k": -1, "top_p": 0.0, "min_p": 1.1, "typical_p": 1.5, "eta": 1.0}),
    (Sampler, {"temperature": NAN, "repetition_penalty": 0.0}),
    (LossConfig, {"ce": -1.0, "lk": NAN, "decay": 0.0}),
    (MedusaConfig, {"num_draft_tokens": 0, "draft_vocab_size": 3, "draft_dtype": "float16", "num_layers": 99}),
    (Medusa2Config, {"lora_rank": 0, "lora_alpha": 0.0, "lora_dropout": 1.0, "lora_targets": [], "base_loss": "mse"}),
    (Medusa2Config, {"heads_weight": -1.0, "heads_schedule": "cosine", "heads_lr_mult": 0.0}),
    (HydraConfig, {"num_draft_tokens": 17, "num_layers": 9, "dropout": 1.0}),
    (MLPSpeculatorConfig, {"num_draft_tokens": 9, "inner_dim": -1, "cell": "gru"}),
    (Eagle3Config, {"num_draft_tokens": 0, "num_layers": 17, "ttt_steps": 8, "intermediate_size": 0}),
    (KangarooConfig, {"exit_layer": 0, "confidence_threshold": 1.0}),
    (DSparkConfig, {"num_layers": 0, "markov_rank": -1, "places": 0}),
]


@pytest.mark.parametrize(("kind", "key", "value"), [(kind, *item) for kind, bad in BAD for item in bad.items()])
def test_what_lies_outside_is_refused(kind: Any, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"\b{key} must be"):
        kind(**{key: value})
