"""Hydra heads against an independent reference, the prefix layer of Hydra++, their start and their settings."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.heads.hydra import HydraConfig, HydraHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from plain_heads import of_head
from support import Context, TinyBase, assert_parity, randomised, row_of

VARIANTS = {
    "plain": {},
    "deep": {"num_layers": 3},
    "tied": {"num_layers": 3, "tie_blocks": True},
    "shared": {"own_lm_head": False, "unit_embeddings": True},
    "bias": {"projection_bias": True},
    "pp": {"num_layers": 2, "prefix_layer": True},
}


def reference_logits(head: HydraHead, k: int, h: Tensor, tokens: list[int]) -> Tensor:
    """Head k (1-based) by the paper's equations, over the weights by their names; ``tokens`` start with x_{t+1}."""
    config, weights = head.config, dict(head.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    embedded = [head.base.embedding[token] for token in tokens[:k]]
    if config.unit_embeddings:
        embedded = [e / (e.square().mean() + torch.finfo(e.dtype).eps).sqrt() for e in embedded]
    x = torch.cat([h, *embedded])
    name = f"blocks.{k - 1}.0"
    x = linear(f"{name}.residual", x) + F.silu(linear(f"{name}.linear", x))
    for j in range(1, config.num_layers):
        x = x + F.silu(linear(f"blocks.{k - 1}.{1 if config.tie_blocks else j}.linear", x))
    if not config.own_lm_head:
        return head.base.lm_head.weight[head.d2t] @ x
    weight = weights[f"projections.weights.{k - 1}"]
    return weight[:, :-1] @ x + weight[:, -1] if config.projection_bias else weight @ x


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_the_papers_equations(tiny_base: TinyBase, variant: str) -> None:
    """Copied weights; every token read is the true one, of the same document."""
    d2t = torch.arange(0, 300, 2)
    head = randomised(HydraConfig(num_draft_tokens=3, **VARIANTS[variant]).build(tiny_base(), d2t))  # type: ignore[arg-type]

    layer = of_head(head)

    def reference(ids: list[int], states: Tensor) -> dict[tuple[int, int], Tensor]:
        if head.config.prefix_layer:
            states = layer.norm(layer.decoder(states, "prefix."), "prefix.norm")
        keys = product((1, 2, 3), range(len(ids)))
        return {(k, t): reference_logits(head, k, states[t], ids[t + 1 :]) for k, t in keys if t + k < len(ids)}

    assert_parity(head, reference)


def test_dropout_only_in_training(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = randomised(HydraConfig(num_draft_tokens=2, num_layers=2, dropout=0.5).build(base))
    batch = row_of([list(range(20, 32))])
    base_hidden = base.hidden_states(batch, head.spec)

    def loss() -> float:
        return float(head.loss(batch, base_hidden, LossConfig()).loss_sum.detach())

    assert len({loss() for _ in range(3)}) == 3
    context = Context.of(head).read(batch.input_ids[:, :3], HiddenStates(final=base_hidden.final[:, :3]))
    drafts = [context.draft(torch.tensor([7]), DraftConfig(tree=TokenTree.expansion([8, 4]))) for _ in range(2)]
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    head.eval()
    assert len({loss() for _ in range(3)}) == 1
