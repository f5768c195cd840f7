"""DSpark's training against an independent reference, its block's attention, and its initial weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead, spread_layers
from drafthead.models.heads.eagle3 import published_layers
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.heads.parts.targets import DraftTargets
from plain_heads import drafted_block, of_head, unit
from support import TinyBase, assert_parity, noisy_head, random_ids, row_of

VARIANTS = {
    "dspark": {},
    "table of its own": {"tied_markov": False},
    "dflash": {"markov_rank": 0, "anchor_predicts": False, "confidence": False},
    "jetspec": {"causal": True, "anchor_predicts": False, "markov_rank": 0},
    "reads the state": {"copy_layers": False, "reads_state": True, "layers": [2], "intermediate_size": None},
    "one layer": {"num_layers": 1, "copy_layers": False, "intermediate_size": 40},
}


def new_head(base: BaseModel, d2t: Tensor | None = None, **settings: object) -> DSparkHead:
    config = DSparkConfig(**{"num_draft_tokens": 4, "markov_rank": 8, **settings})  # type: ignore[arg-type]
    return noisy_head(config, base, 0.03, d2t)


def reference(head: DSparkHead, base: BaseModel, ids: list[int]) -> dict[tuple[int, int], Tensor]:
    """Logits of draft k at place t of one document: a block after every place."""
    config, layer = head.config, of_head(head)
    if config.markov_rank:
        table = layer.w.pop("markov_in.weight")
        table = F.linear(unit(base.embedding), table) if config.tied_markov else table
        markov = {"markov_w1.weight": table, "markov_w2.weight": layer.w.pop("markov_out.weight")}
        layer.w |= {f"markov_head.{name}": weight for name, weight in markov.items()}
        layer.unread = set(layer.w)
    block = {"layers": head.spec.layers, "mask": config.mask_token, "causal": config.causal, "size": config.slots}
    block["num_layers"], logits = config.num_layers, {}
    for t in range(len(ids) - 2):
        drafts = [*ids, *[0] * 4][t + 1 : t + 5]  # what is drafted after the end is not compared
        actual = drafted_block(layer, base, block, ids[: t + 1], drafts)
        logits |= {(k, t): row for k, row in enumerate(actual, start=1)}
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, variant: str) -> None:
    base = tiny_base("qwen2" if variant == "dspark" else "llama")
    head = new_head(base, torch.arange(0, 300, 2), **{**VARIANTS[variant], "confidence": False})
    assert_parity(head, lambda ids, _: reference(head, base, ids), rel=1e-4)


def test_confidence_learns_alpha(tiny_base: TinyBase) -> None:
    """Its loss is the cross-entropy against sum_v min(p, q), and it leaves everything else as it is."""
    base, batch = tiny_base(), row_of([random_ids(20)])
    head = new_head(base, confidence=True)
    base_hidden = base.hidden_states(batch, head.spec)
    gradients = []
    for weight in (0.0, 2.0):
        head.zero_grad()
        out = head.loss(batch, base_hidden, LossConfig(ce=0.0, kl=1.0, decay=0.5, confidence=weight))
        torch.autograd.backward(out.loss_sum)
        gradients.append({n: p.grad for n, p in head.named_parameters() if p.grad is not None})
        if weight == 0.0:
            without = out.loss_sum.item()
    assert {n for n in gradients[1] if "confidence" in n} == {"confidence.weight", "confidence.bias"}
    torch.testing.assert_close(*({n: g for n, g in actual.items() if "confidence" not in n} for actual in gradients))
    targets = DraftTargets.of(batch, 4)
    with torch.no_grad():
        hidden = head.projection_inputs(batch, base_hidden, targets)
        p = base.lm_head.logits(base_hidden.final[0])[targets.target_idx - 1].softmax(-1)
        expected = 0.0
        for k, anchors in enumerate(targets.anchor_idx):
            alpha = torch.minimum(p, head.output_head(k).logits(hidden[k, anchors]).softmax(-1)).sum(-1)
            said = head.confidence_logits(hidden)[k, anchors].sigmoid()  # type: ignore[index]
            entropy = F.binary_cross_entropy(said, alpha, reduction="none")
            expected += 2.0 * 0.5 ** (k + 1) * float((entropy * targets.valid[k]).sum())
    assert out.loss_sum.item() - without == pytest.approx(expected, rel=1e-4)


def test_only_the_markov_columns_of_the_projection_are_trained(tiny_base: TinyBase) -> None:
    """By finite differences: the gradient of the low-rank part and of what the projection reads."""
    base, batch = tiny_base(), row_of([random_ids(12)])
    head = new_head(base).double()
    double = replace(head.target_lm_head, weight=head.target_lm_head.weight.double())
    head.target_lm_head = head.projections._target_lm_head = double
    base_hidden = base.hidden_states(batch, head.spec).map(lambda part: part.double())
    loss = LossConfig(ce=0.3, kl=0.5, tv=0.2, confidence=0.0)
    torch.autograd.backward(head.loss(batch, base_hidden, loss).loss_sum)
    for name in ("markov_out.weight", "markov_in.weight", "norm.weight", "fc.weight"):
        parameter = head.get_parameter(name)
        index, step = (3, 1)[: parameter.ndim], 1e-5
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                parameter[index] += sign * step
                values.append(head.loss(batch, base_hidden, loss).loss_sum.item())
                parameter[index] -= sign * step
        assert float(parameter.grad[index]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-7)


def test_a_few_places_are_trained(tiny_base: TinyBase) -> None:
    base, batch = tiny_base(), row_of([random_ids(30), random_ids(20, 1)])
    head = new_head(base, places=6)
    base_hidden = base.hidden_states(batch, head.spec)
    assert int(head.loss(batch, base_hidden, LossConfig()).tokens) == 30 + 20 - 4
    torch.manual_seed(0)
    drawn = [int(head.train().loss(batch, base_hidden, LossConfig()).tokens) for _ in range(4)]
    assert drawn == [6] * 4


def test_taps_and_mask_token() -> None:
    """DeepSpec's formula and that of EAGLE-3's authors, in our count (1 is the first layer's output)."""
    assert published_layers(32) == (2, 16, 29) and published_layers(3) == (2, 1, 0)
    assert spread_layers(36, 5) == (2, 10, 18, 26, 34) and spread_layers(30, 1) == (16,)
    assert spread_layers(1, 2) == (1, 1) and spread_layers(3, 2) == (1, 2)  # smaller than any published base


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_layers_unlike_llamas_are_not_copied(tiny_base: TinyBase, family: str) -> None:
    base = tiny_base(family)
    with pytest.raises(UserError, match="set head.copy_layers=false"):
        DSparkConfig().build(base)
    assert new_head(base, copy_layers=False).decoder_layers


def test_the_mask_token_is_spoken_by_nobody(tiny_base: TinyBase) -> None:
    base = tiny_base()
    assert base.unused_token == len(base.tokenizer) < base.vocab_size
    assert new_head(base).config.mask_token == len(base.tokenizer)
    assert new_head(base, mask_token=7).config.mask_token == 7


def test_layers_start_as_the_bases_last(tiny_base: TinyBase) -> None:
    """The context's values are those that the base's own layer has; norms that it lacks begin at its size."""
    base, batch = tiny_base("llama"), row_of([random_ids(12)], padding=0)
    head = DSparkConfig(num_draft_tokens=3, num_layers=1, layers=[2]).build(base)
    stock, (attention,) = base.stock().model.layers[-1], [layer.self_attn for layer in head.layers]
    hidden = base.hidden_states(batch, head.spec)
    _, values = attention.keys_values(head.fuse(hidden.layers), batch.position_ids)  # type: ignore[arg-type]
    expected = stock.self_attn.v_proj(stock.input_layernorm(hidden.layers))
    torch.testing.assert_close(values.transpose(1, 2).flatten(2), expected)
    keys, _ = attention.keys_values(head.fuse(hidden.layers), batch.position_ids)  # type: ignore[arg-type]
    expected = stock.self_attn.k_proj(stock.input_layernorm(hidden.layers))
    assert float((keys.norm() / expected.norm()).detach()) == pytest.approx(1.0, abs=0.2)


def test_dpace_weighs_by_how_far_drafts_get(tiny_base: TinyBase) -> None:
    """D-PACE by a loop over anchors: w_j = sum of q_1 .. q_m over m >= j, by 4; each q_i is at least 1/2."""
    base, documents = tiny_base(), [random_ids(9), random_ids(6, 1)]
    head, batch = new_head(base, torch.arange(0, 300, 2), confidence=False), row_of(documents, trained_from=3)
    base_hidden = base.hidden_states(batch, head.spec)
    total, unweighted = 0.0, 0.0
    for ids in documents:
        logits = reference(head, base, ids)
        for t in range(len(ids) - 2):
            floored, losses = [], []
            for k in range(1, 5):
                target = t + 1 + k
                if not 3 <= target < len(ids):
                    floored.append(0.0)  # nothing is trained there, and nothing is reached behind it
                    losses.append(0.0)
                    continue
                known = ids[target] % 2 == 0
                loss = F.cross_entropy(logits[k, t], torch.tensor(ids[target] // 2)).item() if known else 0.0
                floored.append(0.5 + 0.5 * (torch.tensor(-loss).exp().item() if known else 0.0))
                losses.append(loss)
            for j in range(4):
                reached = [torch.tensor(floored[: m + 1]).prod().item() for m in range(j, 4)]
                total += losses[j] * sum(reached) / 4
                unweighted += losses[j]
    out = head.loss(batch, base_hidden, LossConfig(decay="dpace"))
    assert float(out.loss_sum.detach()) == pytest.approx(total, rel=1e-4)
    assert total < 0.7 * unweighted
    head.zero_grad()
    torch.autograd.backward(out.loss_sum)
    expected = head.loss(batch, base_hidden, LossConfig(depth_weights=[1.0] * 4))
    assert float(expected.loss_sum.detach()) == pytest.approx(unweighted, rel=1e-4)
    assert torch.equal(out.sums, expected.sums), "metrics are not weighted"
