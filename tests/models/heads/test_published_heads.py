"""The published heads against the equations of their papers in plain torch, and what is particular to one of them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from drafthead.data.batch import HiddenStates, HiddenStatesSpec
from drafthead.models.base.base_model import meta_base
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from plain_heads import eagle_chain, mlp_chain, of_head, states, unit
from support import Context, TinyBase, assert_parity, noisy_head, random_ids, row_of

Logits = dict[tuple[int, int], Tensor]
Reference = Callable[[list[int], Tensor], Logits]
"""A document's ids and final states [T, D] -> logits of draft k (from 1) at position t."""
EVEN = torch.arange(0, 300, 2)


def medusa(head: Any) -> Reference:
    config, base = head.config, head.base

    def logits(k: int, x: Tensor, token: int) -> Tensor:
        for j in range(config.num_layers):
            linear, inputs = head.blocks[k - 1][j].linear, x
            if config.reads_last_token and j == 0:
                inputs = torch.cat([x, unit(base.embedding[token])])
            x = x + F.silu(inputs @ linear.weight.t() + linear.bias)
        return (head.projections.weights[k - 1] if config.own_lm_head else base.lm_head.weight[EVEN]) @ x

    def reference(ids: list[int], hidden: Tensor) -> Logits:
        return {(k, t): logits(k, hidden[t], ids[t + 1]) for k, t in product((1, 2, 3), range(len(ids) - 1))}

    return reference


def hydra(head: Any) -> Reference:
    config, layer, weights = head.config, of_head(head), dict(head.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def logits(k: int, h: Tensor, tokens: list[int]) -> Tensor:
        embedded = [head.base.embedding[token] for token in tokens[:k]]
        x = torch.cat([h, *map(unit, embedded)] if config.unit_embeddings else [h, *embedded])
        name = f"blocks.{k - 1}.0"
        x = linear(f"{name}.residual", x) + F.silu(linear(f"{name}.linear", x))
        for j in range(1, config.num_layers):
            x = x + F.silu(linear(f"blocks.{k - 1}.{1 if config.tie_blocks else j}.linear", x))
        if not config.own_lm_head:
            return head.base.lm_head.weight[head.d2t] @ x
        weight = weights[f"projections.weights.{k - 1}"]
        return weight[:, :-1] @ x + weight[:, -1] if config.projection_bias else weight @ x

    def reference(ids: list[int], hidden: Tensor) -> Logits:
        if config.prefix_layer:
            hidden = layer.norm(layer.decoder(hidden, "prefix."), "prefix.norm")
        keys = product((1, 2, 3), range(len(ids)))
        return {(k, t): logits(k, hidden[t], ids[t + 1 :]) for k, t in keys if t + k < len(ids)}

    return reference


def mlp_speculator(head: Any) -> Reference:
    layer = of_head(head)

    def reference(ids: list[int], hidden: Tensor) -> Logits:
        chains = [mlp_chain(layer, head.config, head.base, h, ids[t + 1 :] + [0] * 5) for t, h in enumerate(hidden)]
        return {(k, t): logits for t, row in enumerate(chains) for k, logits in enumerate(row, start=1)}

    return reference


def eagle3(head: Any) -> Reference:
    """A chain of drafts after every position."""

    def reference(ids: list[int], _: Tensor) -> Logits:
        layer_states, logits = states(head.base, ids), {}
        sources = [layer_states[n][0] for n in head.spec.layers] or [layer_states[-1][0]]
        for t in range(len(ids) - 2):
            taps, drafts = [state[: t + 1] for state in sources], ids[t + 1 : min(t + 5, len(ids) - 1)]
            chain = eagle_chain(of_head(head), head.base, taps, vars(head.config), ids[: t + 1], drafts)
            logits |= {(i, t): row for i, row in enumerate(chain, start=1)}
        return logits

    return reference


def p_eagle(head: Any) -> Reference:
    """P-EAGLE from its definition: all elements (anchor a, depth d) at once, under one mask."""
    base = head.base

    def fuse(layer: Any, parts: Sequence[Tensor]) -> Tensor:
        normed = [layer.norm(source, f"fc_norm.{n}") for n, source in enumerate(parts)]
        return F.linear(torch.cat(normed, -1), layer.get("fc.weight"))

    def reference(ids: list[int], _: Tensor) -> Logits:
        layer, layer_states = of_head(head), states(base, ids)
        elements = [(a, d) for a in range(len(ids) - 1) for d in range(4)]
        masked = fuse(layer, layer.get("mask_hidden")[0, 0].chunk(3))
        real = fuse(layer, [layer_states[n][0] for n in head.spec.layers])
        x = torch.stack([masked if d else real[a] for a, d in elements])
        tokens = base.embedding[torch.tensor([head.config.mask_token if d else ids[a + 1] for a, d in elements])]
        seen = torch.tensor([[(e == 0 and b <= a) or (b == a and e <= d) for b, e in elements] for a, d in elements])
        at, anchors = torch.tensor([a + d for a, d in elements]), torch.tensor([a for a, _ in elements])
        for n, window in enumerate(head.config.windows):
            near = (at > at[:, None] - (window or len(ids) + 4)) | (anchors == anchors[:, None])
            name = f"layers.{n}" if n else "midlayer"
            normed = layer.norm(x, f"{name}.input_layernorm" if n else f"{name}.hidden_norm")
            normed = normed if n else torch.cat([layer.norm(tokens, f"{name}.input_layernorm"), normed], -1)
            q, k, v = (layer.heads(normed, f"{name}.self_attn.{p}") for p in "qkv")
            x = x + layer.attend(layer.rotated(q, at), layer.rotated(k, at), v, seen & near, f"{name}.self_attn.")
            x = x + layer.mlp(layer.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.")
        logits = F.linear(layer.norm(x, "norm"), layer.get("lm_head.weight"))
        return {(d + 1, a): logits[n] for n, (a, d) in enumerate(elements)}

    return reference


def kangaroo(head: Any) -> Reference:
    """Logits that draft x_{t+2} once x_{t+1} is known."""

    def reference(ids: list[int], _: Tensor) -> Logits:
        layer, x = of_head(head), states(head.base, ids)[head.config.exit_layer][0]
        x = x + layer.attention(layer.norm(x, "input_layernorm"), "self_attn.")
        logits = head.target_lm_head.logits(layer.norm(x, "norm"))
        return {(1, t - 1): logits[t] for t in range(1, len(ids))}

    return reference


def draft_lm(head: Any) -> Reference:
    """Against transformers' own model of the first and the last layer."""
    stock = head.base.stock().model
    stock.layers = stock.layers[::2]

    @torch.no_grad()
    def reference(ids: list[int], _: Tensor) -> Logits:
        hidden = stock(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return {(1, t): head.target_lm_head.logits(hidden[t + 1]) for t in range(len(ids) - 2)}

    return reference


TIED = {"inner_dim": 24, "tie_weights": True, "scale_input": True}
LSTM = {"tie_weights": True, "cell": "lstm"}
ON_BASE = {"own_embedding": False, "own_lm_head": False}
VARIANTS: dict[Callable[..., Reference], list[dict[str, Any]]] = {
    medusa: [{"own_lm_head": own, "reads_last_token": last} for own, last in product((True, False), repeat=2)],
    hydra: [
        {"num_layers": 1},
        {"num_layers": 3},
        {"num_layers": 3, "tie_blocks": True},
        {"num_layers": 1, "own_lm_head": False, "unit_embeddings": True},
        {"num_layers": 1, "projection_bias": True},
        {"num_layers": 2, "prefix_layer": True},
    ],
    mlp_speculator: [
        {"inner_dim": 24},
        {"scale_input": True},
        TIED,
        TIED | LSTM,
        LSTM | {"tie_lstm_embs": True},
        ON_BASE | {"inner_dim": 24},
        ON_BASE | LSTM,
    ],
    eagle3: [
        {},
        {"own_lm_head": False},
        {"norm_before_fc": True, "norm_output": True},
        {"layers": [], "intermediate_size": 40},
        {"fc_norm": True, "norm_output": True},
        {"qk_norm": True, "norm_before_residual": True},
        {"window": 5},
    ],
    p_eagle: [
        {"parallel": True, "num_layers": 2, "qk_norm": True, "fc_norm": True},
        {"parallel": True, "num_layers": 2, "fc_norm": True, "window": 6, "full_layers": [0]},
    ],
    kangaroo: [{"exit_layer": 2}],
    draft_lm: [{"num_layers": 2}],
}
CASES: dict[Callable[..., Reference], tuple[Callable[..., DraftHeadConfig], float]] = {
    medusa: (partial(MedusaConfig, num_draft_tokens=3, num_layers=2), 0.2),
    hydra: (partial(HydraConfig, num_draft_tokens=3), 0.2),
    mlp_speculator: (partial(MLPSpeculatorConfig, num_draft_tokens=4), 0.1),
    eagle3: (partial(Eagle3Config, num_draft_tokens=4, ttt_steps=4), 0.03),
    p_eagle: (partial(Eagle3Config, num_draft_tokens=4, ttt_steps=4), 0.03),
    kangaroo: (partial(KangarooConfig, num_draft_tokens=4), 0.1),
    draft_lm: (partial(DraftLMConfig, num_draft_tokens=3), 0.0),
}
"""Settings, and the size of the noise in the weights."""
ROTATED = (eagle3, p_eagle, kangaroo)
"""Heads with positions. Their references round differently."""


@pytest.mark.parametrize(
    ("reference", "variant"), [(each, number) for each, variants in VARIANTS.items() for number in range(len(variants))]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_parity_with_papers(
    tiny_base: TinyBase, reference: Callable[..., Reference], architecture: str, variant: int
) -> None:
    """Copied weights; every token read is the true one, of the same document."""
    (config, noise), settings = CASES[reference], VARIANTS[reference][variant]
    head = noisy_head(config(**settings), tiny_base(architecture), noise, EVEN)
    assert_parity(head, reference(head), rel=1e-4 if reference in ROTATED else 1e-5)


def test_loss_of_a_position_is_a_mean_over_what_it_can_draft(tiny_base: TinyBase) -> None:
    """However many targets lie outside the draft vocabulary: an untrained head's loss is the next token's."""
    base, batch = tiny_base(), row_of([list(range(20, 40))])
    base_hidden = base.hidden_states(batch, HiddenStatesSpec())
    ratios = MedusaConfig(num_draft_tokens=1).build(base, EVEN).loss(batch, base_hidden, LossConfig()).ratios()
    even = [t for t in range(18) if batch.input_ids[0, t + 2] % 2 == 0]
    logits = base_hidden.final[0, even] @ base.lm_head.weight[EVEN].t()
    expected = F.cross_entropy(logits, batch.input_ids[0, [t + 2 for t in even]] // 2)
    assert ratios["loss_1"].value == pytest.approx(expected.item(), rel=1e-5)
    assert ratios["accept_1"].den == 18


def test_dropout_only_in_training(tiny_base: TinyBase) -> None:
    base, batch = tiny_base(), row_of([list(range(20, 32))])
    head = noisy_head(HydraConfig(num_draft_tokens=2, num_layers=2, dropout=0.5), base, 0.2).train()
    base_hidden = base.hidden_states(batch, head.spec)

    def losses() -> set[float]:
        return {float(head.loss(batch, base_hidden, LossConfig()).loss_sum.detach()) for _ in range(3)}

    assert len(losses()) == 3
    context = Context.of(head).read(batch.input_ids[:, :3], HiddenStates(final=base_hidden.final[:, :3]))
    drafts = [context.draft(torch.tensor([7]), DraftConfig(tree=TokenTree.expansion([8, 4]))) for _ in range(2)]
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    head.eval()
    assert len(losses()) == 1


def test_published_sizes() -> None:
    """Llama-3-8B's speculator has 3.2 B parameters, Llama-3-70B's 961 M (ibm-ai-platform)."""
    sizes = ((4096, 32), (8192, 64))
    shapes = [LlamaConfig(hidden_size=w, vocab_size=128256, num_attention_heads=heads) for w, heads in sizes]
    settings = [{"inner_dim": 3072}, {"inner_dim": 3584, "tie_weights": True, "scale_input": True}]
    configs = [MLPSpeculatorConfig(num_draft_tokens=4, **values) for values in settings]
    heads = [config.without_weights(meta_base(shape)) for config, shape in zip(configs, shapes, strict=True)]
    assert [round(head.num_parameters() / 1e6) for head in heads] == [3193, 962]


@pytest.mark.parametrize(("cell", "tied"), [("rnn", True), ("rnn", False), ("lstm", True)])
def test_start_of_an_mlp_speculator(tiny_base: TinyBase, cell: str, tied: bool) -> None:
    """Weights from N(0, 1 / width) as published (LSTM: 1 / the smaller side), norms as ones and zeros."""
    head = MLPSpeculatorConfig(num_draft_tokens=2, inner_dim=256, tie_weights=tied, cell=cell).build(tiny_base())
    for name, parameter in head.named_parameters():
        if "ln" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        else:
            expected = 256 if cell == "rnn" else min(parameter.shape)
            assert float(parameter.detach().std()) == pytest.approx(expected**-0.5, rel=0.1), name
            assert abs(float(parameter.detach().mean())) < 0.1 * expected**-0.5
    first = [float(p.detach().flatten()[0]) for p in head.parameters() if p.ndim == 2]
    assert len(set(first)) == len(first) > 3, "starts are independent"


def test_fewer_steps_are_trained_than_drafted(tiny_base: TinyBase) -> None:
    base, batch, loss = tiny_base(), row_of([random_ids(12)]), LossConfig(decay=0.5)
    settings = ({"num_draft_tokens": 4, "ttt_steps": 2}, {"num_draft_tokens": 2, "ttt_steps": 2})
    head, short = (noisy_head(Eagle3Config(**each), base, 0.03) for each in settings)
    base_hidden = base.hidden_states(batch, head.spec)
    out, expected = (each.loss(batch, base_hidden, loss) for each in (head, short))
    assert out.loss_sum.item() == expected.loss_sum.item() and out.names == expected.names
    with torch.no_grad():
        measured = head.loss(batch, base_hidden, loss)
    assert measured.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-6)
    assert measured.ratios()["accept_4"].den == 12 - 5
