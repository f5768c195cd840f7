"""Hydra heads against an independent reference, the prefix layer of Hydra++, their start and their settings."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig
from drafthead.models.heads.common.losses import LossConfig
from drafthead.models.heads.common.targets import DraftTargets
from drafthead.models.heads.hydra import HydraConfig, HydraHead
from drafthead.models.token_tree import TokenTree
from support import randomised, row_of

TinyBase = Callable[..., BaseModel]
VARIANTS = {
    "plain": {},
    "deep": {"num_layers": 3},
    "tied": {"num_layers": 3, "tie_blocks": True},
    "shared": {"own_lm_head": False, "unit_embeddings": True},
    "bias": {"projection_bias": True},
    "pp": {"num_layers": 2, "prefix_layer": True},
}


def prefix_of(head: HydraHead, hidden: Tensor) -> Tensor:
    """What transformers' own model of one layer makes of a document's states [T, D]: the reference's prefix layer."""
    settings = head.base.model.config
    layer = LlamaModel(type(settings)(**{**settings.to_dict(), "num_hidden_layers": 1}))
    layer.set_attn_implementation("eager")
    weights = {n.removeprefix("prefix."): p for n, p in head.named_parameters() if n.startswith("prefix.")}
    named = {n if n.startswith("norm") else f"layers.0.{n}": p for n, p in weights.items()}
    missing, unknown = layer.load_state_dict(named, strict=False)
    assert missing == ["embed_tokens.weight"] and not unknown
    with torch.no_grad():
        found: Tensor = layer(inputs_embeds=hidden[None]).last_hidden_state[0]
    return found


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
    """Copied weights; labels by explicit indices; every token read is the text's own, of the same document."""
    base = tiny_base()
    d2t = torch.arange(0, 300, 2)
    head = randomised(HydraConfig(num_draft_tokens=3, **VARIANTS[variant]).build(base, d2t))  # type: ignore[arg-type]
    batch = row_of([list(range(20, 32)), list(range(100, 109))], trained_from=4)
    base_hidden = base.hidden_states(batch, head.spec)
    out = head.loss(batch, base_hidden, LossConfig(decay=0.8))
    total, trained = 0.0, 0
    for start, length in ((0, 12), (12, 9)):
        states = base_hidden.final[0, start : start + length]
        if head.config.prefix_layer:
            states = prefix_of(head, states)
        text = batch.input_ids[0, start : start + length].tolist()
        for t in range(length):
            for k in range(1, 4):
                if t + 1 + k >= length or t + 1 + k < 4:
                    continue
                trained += k == 1
                token = text[t + 1 + k]
                if token % 2 == 0:
                    logits = reference_logits(head, k, states[t], text[t + 1 :])
                    total += 0.8**k * F.cross_entropy(logits, torch.tensor(token // 2)).item()
    assert int(out.tokens) == trained
    assert float(out.loss_sum.detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_untrained_head_is_the_base_next_token_head(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    base = tiny_base(architecture)
    head = HydraConfig(num_draft_tokens=3, **VARIANTS[variant]).build(base).eval()  # type: ignore[arg-type]
    batch = row_of([list(range(20, 40))])
    base_hidden = base.hidden_states(batch, head.spec)
    draft_targets = DraftTargets.of(batch, 3)
    hidden = head.position_hidden(batch, base_hidden, draft_targets)
    for k in range(3):
        there = draft_targets.valid[k]
        found = head.output_head(k).logits(hidden[k])[there]
        wanted = base.lm_head.logits(base_hidden.final[0][draft_targets.source_idx[k][there]])
        if head.config.prefix_layer:
            # The final norm of the base leaves an RMS that varies a little; the prefix layer's does not.
            assert (found.argmax(-1) == wanted.argmax(-1)).all()
            assert float((found.norm() / wanted.norm()).detach()) == pytest.approx(1.0, abs=0.1)
        else:
            torch.testing.assert_close(found, wanted)


def test_blocks_of_a_head_are_separate_modules(tiny_base: TinyBase) -> None:
    head = HydraConfig(num_draft_tokens=2, num_layers=4).build(tiny_base())
    assert len({id(m.weight) for m in head.blocks.modules() if isinstance(m, nn.Linear)}) == 2 * 5


def test_nothing_wraps_around_and_nothing_leaks(tiny_base: TinyBase) -> None:
    """A prediction depends on its own document's tokens up to the one before its target, and on no other."""
    base = tiny_base()
    head = randomised(HydraConfig(num_draft_tokens=2, prefix_layer=True).build(base)).eval()
    documents = [list(range(20, 30)), list(range(50, 60))]
    batch = row_of(documents)
    final = base.hidden_states(batch, head.spec).final
    draft_targets = DraftTargets.of(batch, 2)
    plain = head.position_hidden(batch, HiddenStates(final=final), draft_targets)
    for place in range(20):
        ids, states = batch.input_ids.clone(), final.clone()
        ids[0, place] = 250
        states[0, place] += 1.0
        changed = head.position_hidden(
            TrainBatch(**{**vars(batch), "input_ids": ids}), HiddenStates(final=states), draft_targets
        )
        for k in range(2):
            target = draft_targets.target_idx
            start = torch.where(target < 10, 0, 10)
            # Head k reads the tokens up to the one before its target, of its document; and the states up to its source.
            tokens = (place > draft_targets.source_idx[k]) & (place < target)
            seen = tokens | ((place <= draft_targets.source_idx[k]) & (place >= start))
            moved = (changed[k] != plain[k]).any(-1)
            assert torch.equal(moved[draft_targets.valid[k]], seen[draft_targets.valid[k]]), (place, k)


def test_dropout_only_in_training(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = randomised(HydraConfig(num_draft_tokens=2, num_layers=2, dropout=0.5).build(base))
    batch = row_of([list(range(20, 32))])
    base_hidden = base.hidden_states(batch, head.spec)

    def loss() -> float:
        return float(head.loss(batch, base_hidden, LossConfig()).loss_sum.detach())

    assert len({loss() for _ in range(3)}) == 3
    state = head.update(head.init_state(1), batch.input_ids[:, :3], HiddenStates(final=base_hidden.final[:, :3]))
    drafts = [head.draft(state, torch.tensor([7]), DraftConfig(tree=TokenTree.expansion([8, 4]))) for _ in range(2)]
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    head.eval()
    assert len({loss() for _ in range(3)}) == 1
