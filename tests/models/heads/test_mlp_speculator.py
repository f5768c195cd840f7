"""MLP speculators against a transcription of the published equations, their start and their settings."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from drafthead.models.heads.mlp_speculator import (
    MLPSpeculatorConfig,
    MLPSpeculatorHead,
)
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


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight + bias


def reference_logits(head: MLPSpeculatorHead, h: Tensor, tokens: list[int]) -> list[Tensor]:
    """The published forward pass at one place, over the weights by their names; ``tokens`` start with x_{t+1}."""
    config, weights = head.config, dict(head.named_parameters())
    table, n = head.base.embedding, config.num_draft_tokens
    d = config.inner_dim or len(h)
    s = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - s**2) * (d / 2)) / s

    def embedding(name: str, token: int) -> Tensor:
        if config.own_embedding:
            return weights[f"{name}.weight"][token]
        return weights[f"{name}.linear.weight"] @ (table[token] / table[token].norm())

    def gate(name: str, i: int, state: Tensor, token: int) -> Tensor:
        source = "forget" if config.tie_lstm_embs else name
        projected = weights[f"cells.proj.{name}.{min(i, 1)}.weight"] @ state
        return projected + alpha * embedding(f"cells.emb.{source}", token)

    state, cell, logits = h, torch.zeros(d), []
    if config.scale_input:
        state = h * (h.pow(2).mean() + 1e-6).rsqrt() / math.sqrt(2)
    for i in range(n):
        stage = 0 if config.tie_weights else i
        if config.cell == "rnn":
            row = min(i, 1) if config.tie_weights else i
            z = embedding(f"cells.emb.{stage}", tokens[i])
            state = weights[f"cells.proj.{row}.weight"] @ state + alpha * z
            state = F.gelu(norm(state, weights[f"cells.ln.{stage}.weight"], weights[f"cells.ln.{stage}.bias"]))
        else:
            f, u, o = (torch.sigmoid(gate(g, i, state, tokens[i])) for g in ("forget", "input", "output"))
            c = gate("cell", i, state, tokens[i])
            g = F.gelu(norm(c, weights["cells.cell_ln.weight"], weights["cells.cell_ln.bias"])) * u
            cell = cell * f + g
            state = F.gelu(norm(cell, weights["cells.state_ln.weight"], weights["cells.state_ln.bias"])) * o
        if config.own_lm_head:
            logits.append(weights[f"projections.weights.{stage}"] @ state)
        else:
            logits.append(head.base.lm_head.weight[head.d2t] @ (h + weights[f"outputs.{stage}.weight"] @ state))
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_the_published_equations(tiny_base: TinyBase, variant: str) -> None:
    """Copied weights; every token read is the text's own."""
    config = MLPSpeculatorConfig(num_draft_tokens=4, **VARIANTS[variant])  # type: ignore[arg-type]
    head = randomised(config.build(tiny_base(), torch.arange(0, 300, 2)), 0.1)

    def reference(ids: list[int], states: Tensor) -> dict[tuple[int, int], Tensor]:
        found = [reference_logits(head, h, ids[t + 1 :] + [0] * 5) for t, h in enumerate(states)]
        return {(k, t): logits for t, row in enumerate(found) for k, logits in enumerate(row, start=1)}

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
            wanted = 256 if cell == "rnn" else min(parameter.shape)
            assert float(parameter.detach().std()) == pytest.approx(wanted**-0.5, rel=0.1), name
            assert abs(float(parameter.detach().mean())) < 0.1 * wanted**-0.5
    first = [float(p.detach().flatten()[0]) for p in head.parameters() if p.ndim == 2]
    assert len(set(first)) == len(first) > 3, "starts are independent"
