"""MLP speculators against a transcription of the published equations, their start and their settings."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from plain_heads import mlp_chain, of_head
from support import TinyBase, assert_parity, randomised

VARIANTS = {
    "untied": {"inner_dim": 24},
    "base_width": {"scale_input": True},
    "tied": {"inner_dim": 24, "tie_weights": True, "scale_input": True},
    "lstm": {"inner_dim": 24, "tie_weights": True, "scale_input": True, "cell": "lstm"},
    "lstm_one_embedding": {"tie_weights": True, "cell": "lstm", "tie_lstm_embs": True},
    "on_base": {"inner_dim": 24, "own_embedding": False, "own_lm_head": False},
    "lstm_on_base": {"tie_weights": True, "cell": "lstm", "own_embedding": False, "own_lm_head": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_the_published_equations(tiny_base: TinyBase, variant: str) -> None:
    """Copied weights; every token read is the true one."""
    config = MLPSpeculatorConfig(num_draft_tokens=4, **VARIANTS[variant])  # type: ignore[arg-type]
    head = randomised(config.build(tiny_base(), torch.arange(0, 300, 2)), 0.1)
    layer = of_head(head)

    def reference(ids: list[int], states: Tensor) -> dict[tuple[int, int], Tensor]:
        chains = [mlp_chain(layer, head.config, head.base, h, ids[t + 1 :] + [0] * 5) for t, h in enumerate(states)]
        return {(k, t): logits for t, row in enumerate(chains) for k, logits in enumerate(row, start=1)}

    assert_parity(head, reference)


def test_published_sizes() -> None:
    """Llama-3-8B's speculator has 3.2 B parameters, Llama-3-70B's 961 M (ibm-ai-platform)."""
    shapes = [
        LlamaConfig(hidden_size=width, vocab_size=128256, num_attention_heads=heads)
        for width, heads in ((4096, 32), (8192, 64))
    ]
    llama8b = MLPSpeculatorConfig(num_draft_tokens=4, inner_dim=3072).size(shapes[0])
    llama70b = MLPSpeculatorConfig(num_draft_tokens=4, inner_dim=3584, tie_weights=True, scale_input=True).size(
        shapes[1]
    )
    assert (round(llama8b.parameters / 1e6), round(llama70b.parameters / 1e6)) == (3193, 962)


@pytest.mark.parametrize(("cell", "tied"), [("rnn", True), ("rnn", False), ("lstm", True)])
def test_start(tiny_base: TinyBase, cell: str, tied: bool) -> None:
    """Weights from N(0, 1 / width) as published (LSTM: 1 / the smaller side), norms as ones and zeros."""
    base = tiny_base()
    head = MLPSpeculatorConfig(num_draft_tokens=2, inner_dim=256, tie_weights=tied, cell=cell).build(base)
    for name, parameter in head.named_parameters():
        if "ln" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        else:
            expected = 256 if cell == "rnn" else min(parameter.shape)
            assert float(parameter.detach().std()) == pytest.approx(expected**-0.5, rel=0.1), name
            assert abs(float(parameter.detach().mean())) < 0.1 * expected**-0.5
    first = [float(p.detach().flatten()[0]) for p in head.parameters() if p.ndim == 2]
    assert len(set(first)) == len(first) > 3, "starts are independent"
