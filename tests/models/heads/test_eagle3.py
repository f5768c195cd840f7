"""EAGLE-3's training against an independent reference, and its settings."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.eagle3 import Eagle3Head, published_layers
from drafthead.models.heads.parts.losses import LossConfig
from plain_heads import eagle_chain, of_head, states
from support import EAGLE3_VARIANTS, TinyBase, assert_parity, eagle3_head, random_ids, row_of


def reference(head: Eagle3Head, base: BaseModel, ids: list[int], steps: int) -> dict[tuple[int, int], Tensor]:
    """Logits of step i (from 1) at place t of one document: a chain of drafts after every place."""
    layer_states, logits = states(base, ids), {}
    sources = [layer_states[n][0] for n in head.spec.layers] or [layer_states[-1][0]]
    for t in range(len(ids) - 2):
        text, drafts = ids[: t + 1], ids[t + 1 : min(t + 1 + steps, len(ids) - 1)]
        chain = eagle_chain(of_head(head), base, [state[: t + 1] for state in sources], vars(head.config), text, drafts)
        logits |= {(i, t): row for i, row in enumerate(chain, start=1)}
    return logits


def parallel_reference(head: Eagle3Head, base: BaseModel, ids: list[int], steps: int) -> dict[tuple[int, int], Tensor]:
    """P-EAGLE's logits from its definition: all elements (place a, depth d) at once, under one mask."""
    layer, layer_states = of_head(head), states(base, ids)
    elements = [(a, d) for a in range(len(ids) - 1) for d in range(steps)]

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        normed = [layer.norm(source, f"fc_norm.{n}") for n, source in enumerate(parts)]
        return F.linear(torch.cat(normed, -1), layer.get("fc.weight"))

    masked = fuse(layer.get("mask_hidden")[0, 0].chunk(3))
    real = fuse([layer_states[n][0] for n in head.spec.layers])
    x = torch.stack([masked if d else real[a] for a, d in elements])
    tokens = base.embedding[torch.tensor([head.config.mask_token if d else ids[a + 1] for a, d in elements])]
    seen = torch.tensor([[(e == 0 and b <= a) or (b == a and e <= d) for b, e in elements] for a, d in elements])
    at = torch.tensor([a + d for a, d in elements])
    for n in range(head.config.num_layers):
        name = f"layers.{n}" if n else "midlayer"
        normed = layer.norm(x, f"{name}.input_layernorm" if n else f"{name}.hidden_norm")
        normed = normed if n else torch.cat([layer.norm(tokens, f"{name}.input_layernorm"), normed], -1)
        q, k, v = (layer.heads(normed, f"{name}.self_attn.{p}") for p in "qkv")
        x = x + layer.attend(layer.rotated(q, at), layer.rotated(k, at), v, seen, f"{name}.self_attn.")
        x = x + layer.mlp(layer.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.")
    logits = F.linear(layer.norm(x, "norm"), layer.get("lm_head.weight"))
    return {(d + 1, a): logits[n] for n, (a, d) in enumerate(elements)}


def test_published_layers_are_hidden_states(tiny_base: TinyBase) -> None:
    """The reference code keeps what goes into its layers 2, L // 2 and L - 3, counted from 0."""
    assert published_layers(32) == (2, 16, 29)
    base = tiny_base()
    head, data = eagle3_head(base, layers=[2, 1, 0]), row_of([random_ids(9)])
    assert head.spec.layers == published_layers(3) == (2, 1, 0)
    inputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]}))
        for n, layer in enumerate(base.model.model.layers)
    ]
    base_hidden = base.hidden_states(data, head.spec)
    for hook in hooks:
        hook.remove()
    assert torch.equal(base_hidden.layers, torch.cat([inputs[n] for n in (2, 1, 0)], -1))


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    """The whole training-time test on copied weights."""
    base = tiny_base(architecture)
    head = eagle3_head(base, torch.arange(0, 300, 2), **EAGLE3_VARIANTS[variant])
    find = parallel_reference if head.config.parallel else reference
    assert_parity(head, lambda ids, _: find(head, base, ids, 4), rel=1e-4)


def test_fewer_steps_are_trained_than_drafted(tiny_base: TinyBase) -> None:
    base, batch = tiny_base(), row_of([random_ids(12)])
    base_hidden = base.hidden_states(batch, eagle3_head(base).spec)
    head, short = eagle3_head(base, ttt_steps=2), eagle3_head(base, num_draft_tokens=2, ttt_steps=2)
    out, expected = (h.loss(batch, base_hidden, LossConfig(decay=0.5)) for h in (head, short))
    assert out.loss_sum.item() == expected.loss_sum.item() and out.names == expected.names
    with torch.no_grad():
        measured = head.loss(batch, base_hidden, LossConfig(decay=0.5))
    assert measured.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-6)
    assert measured.ratios()["accept_4"].den == 12 - 5
