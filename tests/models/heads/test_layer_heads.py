"""Heads with layers like the base's: DSpark, a draft model, and Kangaroo."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, default_draft_config
from drafthead.models.decoding.random_source import DRAFT, PerRowRng
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead, spread_layers
from drafthead.models.heads.eagle3 import published_layers
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels.fused import copy_weights, fresh_copy, fuse_modules
from drafthead.models.token_tree import TokenTree
from plain_heads import drafted_block, of_head, unit
from support import Context, TinyBase, assert_parity, noisy_head, random_ids, randomised, row_of

VARIANTS = {
    "dspark": {},
    "table of its own": {"tied_markov": False},
    "dflash": {"markov_rank": 0, "anchor_predicts": False, "confidence": False},
    "jetspec": {"causal": True, "anchor_predicts": False, "markov_rank": 0},
    "reads the state": {"copy_layers": False, "reads_state": True, "layers": [2], "intermediate_size": None},
    "one layer": {"num_layers": 1, "copy_layers": False, "intermediate_size": 40},
    "window": {"window": 5},
    "mixed layers": {"window": 6, "full_layers": [0], "causal": "sliding", "anchor_predicts": False},
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
    block |= {"num_layers": config.num_layers, "windows": config.windows}
    logits = {}
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


def test_auf_trains_up_to_the_first_wrong_draft(tiny_base: TinyBase) -> None:
    """AUF by a loop over anchors; the head is fitted to some tokens first, so that some drafts are right."""
    base, ids = tiny_base(), [i - i % 2 for i in [7] * 9 + random_ids(9)]  # in the draft vocabulary
    head, batch = new_head(base, torch.arange(0, 300, 2), confidence=False), row_of([ids], trained_from=3)
    base_hidden = base.hidden_states(batch, head.spec)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        torch.autograd.backward(head.loss(batch, base_hidden, LossConfig()).loss_sum)
        optimizer.step()
    logits, total, counts = reference(head, base, ids), 0.0, [0] * 4
    for t in range(len(ids) - 2):
        for k in range(1, 5):
            target = t + 1 + k
            if not 3 <= target < len(ids):
                break
            total += F.cross_entropy(logits[k, t], torch.tensor(ids[target] // 2)).item()
            counts[k - 1] += 1
            if int(logits[k, t].argmax()) != ids[target] // 2:
                break
    assert counts[0] > counts[1] > counts[2] > 0, "some chains must be right for a while"
    out = head.loss(batch, base_hidden, LossConfig(decay="auf"))
    assert float(out.loss_sum.detach()) == pytest.approx(total, rel=1e-4)


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


# A draft model of the base's layers -----------------------------------------------------------------------------------


PROMPT = [5, 6, 7] * 4
DOCUMENTS = row_of([random_ids(10), random_ids(11, seed=1)])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_all_layers_make_the_base(tiny_base: TinyBase, architecture: str) -> None:
    """Weights read back from packed layers, masks and positions: any fault shows."""
    base = tiny_base(architecture)
    head = DraftLMConfig(num_layers=3).build(base).eval()
    hidden = base.hidden_states(DOCUMENTS, HiddenStatesSpec())
    targets = DraftTargets.of(DOCUMENTS, 1)
    actual = head.hidden_at_positions(DOCUMENTS, hidden, targets)[0]
    torch.testing.assert_close(actual, hidden.final[0, targets.last_read[0]], rtol=1e-4, atol=1e-4)
    result = decode(base, head, PROMPT, max_new_tokens=31, ignore_eos=True)
    assert [step.accepted for step in result.steps] == [5] * 5


def test_packed_weights_are_read_back_exactly(tiny_base: TinyBase) -> None:
    settings = tiny_base("qwen2").model.config
    stock = fresh_copy(tiny_base("qwen2").model.model.layers[1], settings, 0)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_()  # norms and biases too, which start as ones and zeros
    expected = {name: parameter.detach().clone() for name, parameter in stock.named_parameters()}
    fused = nn.ModuleList([stock])
    assert fuse_modules(fused) == 7
    again = fresh_copy(tiny_base("qwen2").model.model.layers[0], settings, 0)
    copy_weights(fused[0], again)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6 if "norm" in name else 0.0, atol=0.0)


def test_width_of_the_mlp(tiny_base: TinyBase) -> None:
    """More channels change nothing at first, and fewer keep the largest. Both draft exactly and train."""
    base = tiny_base()
    hidden = base.hidden_states(DOCUMENTS, HiddenStatesSpec())
    whole = DraftLMConfig(num_layers=2).build(base).eval()
    wider = DraftLMConfig(num_layers=2, intermediate_size=96).build(base).eval()
    targets = DraftTargets.of(DOCUMENTS, 1)
    actual, expected = (head.hidden_at_positions(DOCUMENTS, hidden, targets) for head in (wider, whole))
    torch.testing.assert_close(actual, expected)
    narrow = DraftLMConfig(num_layers=2, intermediate_size=48).build(base).eval()
    every, narrowed = (
        mlp.down_proj.weight.norm(dim=0) * mlp.up_proj.weight.norm(dim=1) * mlp.gate_proj.weight.norm(dim=1)
        for mlp in (whole.layers[0].mlp, narrow.layers[0].mlp)
    )
    torch.testing.assert_close(narrowed.sort().values, every.sort().values[-48:])
    plain = decode(base, None, PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    for head in (wider, narrow):
        assert decode(base, head, PROMPT, max_new_tokens=20, ignore_eos=True).tokens == plain
        out = head.loss(DOCUMENTS, hidden, LossConfig())
        torch.autograd.backward(out.loss_sum)
        assert all(parameter.grad is not None for parameter in head.layers.parameters())
    with pytest.raises(UserError, match="gated MLPs without biases"):
        DraftLMConfig(intermediate_size=48).build(tiny_base("mixtral"))


# Kangaroo -------------------------------------------------------------------------------------------------------------


PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(4)),
    "tree": DraftConfig(tree=TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])),
    "wide": DraftConfig(tree=TokenTree.expansion([8, 4])),
    "stops": DraftConfig(tree=TokenTree.expansion([4, 2, 1]), confidence_threshold=0.05),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=9, width=4, depth=3)),
}
SAMPLED = {
    kind: DraftConfig(tree=TokenTree.expansion([3, 2, 1]), draft_sampling=kind, sampler=Sampler(temperature=0.3))
    for kind in (DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT)
}


def adapter(base: BaseModel, confidence_threshold: float = 0.0) -> KangarooHead:
    config = KangarooConfig(exit_layer=2, num_draft_tokens=4, confidence_threshold=confidence_threshold)
    return randomised(config.build(base), 0.1).eval()


@pytest.mark.parametrize("name", [*PLANS, *SAMPLED])
@pytest.mark.parametrize("rows", [1, 3])
def test_verification_goes_on_from_the_exit_states(tiny_base: TinyBase, name: str, rows: int) -> None:
    """The begun pass, finished, is the whole pass: hidden states of all nodes, and what is left in the cache.

    A sample drawn twice is two nodes of the tree, and what follows the second was drafted after it.
    """
    base, draft_config = tiny_base(), (PLANS | SAMPLED)[name]
    head, prompts = adapter(base), torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [1, 2, 1, 2]])[:rows]
    equal = 0
    for seed in range(10 if name in SAMPLED else 1):
        shared = []
        for begun in (True, False):
            cache = base.new_cache(64, rows=rows)
            context = Context.of(head, rows, cache)
            context = context.read(prompts, base.forward(prompts, cache, spec=head.spec))
            rng = PerRowRng([seed + n for n in range(rows)], [4] * rows, DRAFT, base.device)
            proposal = context.draft(torch.arange(30, 30 + rows), draft_config, rng)
            assert proposal.partial_forward is not None and proposal.partial_forward.layers == 2
            partial_forward = proposal.partial_forward if begun else None
            actual = base.verify(proposal.tokens, proposal.shape, cache, partial_forward).final
            real = (proposal.shape.parents.expand(rows, -1) >= 0) | (torch.arange(actual.shape[1]) == 0)
            cache.crop()
            shared.append((actual[real], cache.keys[:, :, :, 4 : 4 + actual.shape[1]].clone(), proposal.tokens))
        (a, keys_a, tokens_a), (b, keys_b, tokens_b) = shared
        assert torch.equal(tokens_a, tokens_b)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        if real.all():  # padding holds anything
            torch.testing.assert_close(keys_a, keys_b, rtol=1e-4, atol=1e-4)
        equal += int((tokens_a[:, 1:2] == tokens_a[:, 2:4]).any())
    assert equal > 0 or name != DraftSampling.WITH_REPLACEMENT


def test_only_the_remaining_layers_run(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head, runs = adapter(base), Counter[int]()
    layers = enumerate(base.model.model.layers)
    hooks = [layer.register_forward_hook(lambda *_, n=n: runs.update([n])) for n, layer in layers]
    result = decode(base, head, PROMPTS[0], max_new_tokens=12, draft_config=PLANS["chain"], ignore_eos=True)
    for hook in hooks:
        hook.remove()
    steps = len(result.steps)
    # The deep layer: the prompt and one pass per step. The shallow ones: the prompt, and per step every draft (one of
    # them the root's) and the last draft, after which nothing was drafted.
    assert runs[2] == 1 + steps
    assert runs[0] == runs[1] == 1 + sum(s.depth + 1 for s in result.steps)


@pytest.mark.parametrize("rows", [1, 2])
def test_led_along_a_text_it_drafts_the_same(tiny_base: TinyBase, rows: int) -> None:
    """Without a target's cache (replay, calibration) the shallow states are its own; an older state drafts the same."""
    base = tiny_base()
    head = adapter(base)
    ids, last = torch.arange(3, 3 + 6 * rows).view(rows, 6), torch.tensor([9, 2])[:rows]
    cache = base.new_cache(64, rows=rows)
    hidden = base.forward(ids, cache, spec=head.spec)
    led, shared = (Context.of(head, rows, target).read(ids, hidden) for target in (None, cache))
    for draft_config in PLANS.values():
        later = led.read(ids + 30, hidden)
        actual = [context.draft(last, draft_config).tokens for context in (led, shared, later, led)]
        assert torch.equal(actual[0], actual[1]) and torch.equal(actual[0], actual[3])
        assert torch.equal(led.select([rows - 1]).draft(last[-1:], draft_config).tokens, actual[0][-1:])


def test_threshold_is_the_default_and_stops_drafting(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = adapter(base, confidence_threshold=0.3)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, base)
    assert default_draft_config(loaded).confidence_threshold == 0.3
    depths, full = (
        [s.depth for s in decode(base, loaded, PROMPTS[2], max_new_tokens=30, ignore_eos=True, **never).steps]
        for never in ({}, {"draft_config": DraftConfig(tree=TokenTree.chain(4))})
    )
    assert min(depths[:-1]) >= 1 and sum(depths) / len(depths) < sum(full) / len(full)
