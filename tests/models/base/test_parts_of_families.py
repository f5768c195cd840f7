"""Parts of bases with recurrent layers: enough to train a head on states that an engine computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.embedded.packages import smollm2_folder
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
DELTA = {f"linear_{each}": size for each, size in (("num_value_heads", 2), ("num_key_heads", 2))}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "intermediate_size": 64, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": {"num_hidden_layers": 4, "intermediate_size": 64, "head_dim": 32, **DELTA},
    "falcon_h1": {"num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 32, "mamba_d_ssm": 64, **SSM},
    "nemotron_h": {"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_output_head_of_a_base_whose_layers_are_recurrent(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()
    stock.save_pretrained(tmp_path)
    for path in smollm2_folder().glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = BaseConfig(name=str(tmp_path), dtype="float32")
    parts = BaseParts.of_checkpoint(config)
    with torch.no_grad():
        result = stock.float()(torch.arange(3, 12)[None], output_hidden_states=True)
        torch.testing.assert_close(parts.lm_head.logits(result.hidden_states[-1]), result.logits, rtol=1e-4, atol=1e-4)
    assert parts.num_layers == stock.config.num_hidden_layers
    assert BaseModel.load(config).fingerprint == parts.fingerprint
