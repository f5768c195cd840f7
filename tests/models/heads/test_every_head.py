"""The checks of every head: output equals the base's, sizes are known in advance, saved heads draft the same."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import HEADS, MAIN, cases_of, every_case, every_head
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel, meta_base
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.formats import all_formats
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels import packed
from drafthead.models.kernels.linear import DRAFT_DTYPES, KernelTable
from drafthead.models.token_tree import TokenTree
from support import (
    TINY,
    Context,
    TinyBase,
    assert_distributed,
    assert_rows_are_independent,
    assert_same_in_any_batch,
    cases,
    chain_levels,
    fitted,
    probs_of_answers,
    random_base,
    random_ids,
    randomised,
    refuses,
    row_of,
    rows_of,
    small_base,
)

SAMPLED = ("hydra_pp", "mlp", "lstm", "medusa", "eagle3", "draft_lm", "dspark", "dspark_context")
UNTRAINED_AS_BASE = ("hydra", "hydra_pp", "mlp_on_base", "medusa", "medusa_last", "medusa_tied", "dspark_state")
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
COSTS = CostModel(verify={1: 1.0, 8: 1.1, 64: 9.0}, draft=0.01, overhead=0.0, context=8)
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(3)),
    "tree": DraftConfig(tree=TokenTree.expansion([3, 2, 1])),
    "dynamic": DraftConfig(tree=DynamicTree(width=3, depth=3, nodes=9)),
    "by cost": DraftConfig(tree=CostTree(costs=TreeCosts(costs={1: COSTS}), width=3, depth=3)),
    "stops": DraftConfig(tree=TokenTree.expansion([2, 2, 1]), confidence_threshold=0.3),
}


# Sizes and settings ------------------------------------------------------------------------------------------

SHAPE = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 300}
GROUPED = {
    "one key head": {"num_key_value_heads": 1, "intermediate_size": 80},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 48},
}


@pytest.mark.parametrize(("grouping", "vocabulary"), [("one key head", None), ("wide heads", 100)])
@every_case
def test_a_head_without_weights_is_as_large(grouping: str, kind: str, vocabulary: int | None) -> None:
    base = random_base(SHAPE | GROUPED[grouping], prepack=False)
    config = replace(HEADS[kind], draft_vocab_size=vocabulary)
    head = config.build(base, vocabulary and torch.arange(vocabulary))
    counted = config.without_weights(meta_base(base.model.config))
    assert counted.num_parameters() == sum(parameter.numel() for parameter in head.parameters())
    assert {name: p.shape for name, p in counted.named_parameters()} == {n: p.shape for n, p in head.named_parameters()}
    assert len(counted.d2t) == len(head.d2t)


@cases(
    "kind, settings, says",
    ("hydra", {"own_lm_head": False}, "head.projection_bias .*head.own_lm_head"),
    ("eagle3", {"ttt_steps": 8}, "head.ttt_steps .*head.num_draft_tokens"),
    ("mlp", {"cell": "lstm"}, "head.cell.* head.tie_weights"),
    ("lstm", {"num_draft_tokens": 1}, "head.tie_weights .*head.num_draft_tokens"),
    ("draft_lm", {"from_layers": [0]}, "head.from_layers .*head.num_layers"),
    ("dspark", {"reads_state": True}, "head.copy_layers .*head.reads_state"),
    ("dspark", {"intermediate_size": 8}, "head.copy_layers .*head.intermediate_size"),
    ("dspark", {"window": 3}, "head.window must be above head.num_draft_tokens=3"),
    ("dspark", {"window": 8, "full_layers": [2]}, r"head.full_layers must be in \[0, 1\], got \[2\]"),
    ("dspark", {"causal": "sliding"}, "head.causal=sliding needs head.window"),
    ("eagle3", {"full_layers": [0]}, "head.full_layers needs head.window"),
)
def test_settings_that_exclude_each_other(kind: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(HEADS[kind], **settings)  # type: ignore[arg-type]


# Drafting ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def text_logits(head: DraftHead, base: BaseModel, ids: list[int]) -> Tensor:
    """Return draft logits of training, [K, T, W], every position at its anchor."""
    batch = rows_of([ids])
    draft_targets = DraftTargets.of(batch, head.depth)
    hidden = head.projection_inputs(batch, base.hidden_states(batch, head.spec), draft_targets)
    actual = torch.full((head.depth, len(ids), len(head.d2t)), torch.nan)
    for k in range(head.depth):
        valid = draft_targets.valid[k]
        anchors = draft_targets.anchor_idx[k, valid]
        actual[k, draft_targets.anchors[anchors]] = head.output_head(k).logits(hidden[k, anchors])
    return actual


@cases(
    "architecture, graphs, kind",
    *(("qwen2", "auto", kind) for kind in HEADS),
    *cases_of(("gemma", "auto"), HEADS, fast=()),
    *cases_of(("llama", "always"), HEADS, fast=("medusa", "hydra", "mlp")),
)
def test_drafting_is_the_training_path(
    tiny_base: TinyBase, small_caches: None, kind: str, architecture: str, graphs: str
) -> None:
    """Rows of different lengths are read in pieces, with drafts in between: drafting logits equal those of training.

    On each level the true token is the second of two nodes, so parents matter. Caches grow meanwhile.
    """
    base = BaseModel.load(replace(tiny_base(architecture).config, graphs=graphs))
    config = replace(HEADS[kind], num_draft_tokens=4)
    head = randomised(config.build(base, torch.arange(0, 300, 2)), 0.05).eval()
    texts = [random_ids(60), random_ids(25, seed=1), random_ids(30, seed=2)]
    expected = [text_logits(head, base, ids) for ids in texts]
    for rows in ([0], [0, 1, 2], [1, 2]):
        starts, context = torch.zeros(len(rows), dtype=torch.int64), Context.of(head, len(rows))
        cache = base.new_cache(128, rows=len(rows))
        chosen = [texts[row] for row in rows], [expected[row] for row in rows]
        for counts in ([40, 1, 3], [1, 4, 2], [3, 1, 5], [1, 1, 1]):
            count = torch.tensor([counts[row] for row in rows])
            most = int(count.max())
            taken = [text[s : s + c] for text, s, c in zip(chosen[0], starts.tolist(), count.tolist(), strict=True)]
            tokens = torch.tensor([row_texts + [7] * (most - len(row_texts)) for row_texts in taken])
            earlier, before = context, starts
            context = context.read(tokens, base.forward(tokens, cache, count.tolist(), head.spec), count)
            starts = starts + count
            for _ in range(2):  # a context can be drafted after twice
                follow(context, *chosen, starts)
            if int(before.min()):  # so does the one before it, and some of its rows
                follow(earlier, *chosen, before)
                last = len(rows) - 1
                follow(context.select([last]), *([row_texts[last]] for row_texts in chosen), starts[last:])  # type: ignore[arg-type]
    assert ("graphs" in head.packed._copies) == (graphs == "always" and not head.attends and not config.one_prediction)


def follow(context: Context, texts: list[list[int]], expected: list[Tensor], starts: Tensor) -> None:
    """Expand nodes of the true tokens after the context; their logits must be those of training."""

    def tokens(ahead: int) -> Tensor:
        return torch.tensor([text[start + ahead] for text, start in zip(texts, starts.tolist(), strict=True)])

    levels = [(tokens(0)[:, None], torch.zeros(len(texts), 1, dtype=torch.int64))]
    for k in range(1, context.drafter.depth):
        parents = torch.tensor([[0, min(k - 1, 1)]] * len(texts))
        levels.append((torch.stack([tokens(k + 1), tokens(k)], 1), parents))
    for k, actual in enumerate(context.logits(levels)):
        steps = torch.stack([w[k, start - 1] for w, start in zip(expected, starts.tolist(), strict=True)])
        size = steps.shape[-1]  # without ids of the context
        torch.testing.assert_close(actual[:, -1, :size], steps, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind, config in HEADS.items() if config.confidence and config.markov_rank])
def test_any_head_can_have_a_markov_correction_and_a_confidence(tiny_base: TinyBase, kind: str) -> None:
    """A training step reaches both, and drafting says the confidence that training computes."""
    base, ids, anchor = tiny_base(), random_ids(12), 6
    head = randomised(HEADS[kind].build(base, torch.arange(0, 300, 2)), 0.05)
    batch = rows_of([ids])
    base_hidden = base.hidden_states(batch, head.spec)
    torch.autograd.backward(head.loss(batch, base_hidden, LossConfig(kl=0.5)).loss_sum)
    for name in ("markov_in.weight", "confidence.weight", f"{head.low_rank_name}.weight"):
        gradient = head.get_parameter(name).grad
        assert gradient is not None and bool(gradient.any()), name
    head.eval()
    draft_targets = DraftTargets.of(batch, head.depth)
    with torch.inference_mode():
        hidden = head.projection_inputs(batch, base_hidden, draft_targets)
        expected = head.confidence_logits(hidden)
        context = Context.of(head).read(
            torch.tensor([ids[: anchor + 1]]), base_hidden.map(lambda h: h[:, : anchor + 1])
        )
        levels = chain_levels(ids[anchor + 1 : anchor + 1 + head.depth])
        for k in range(head.depth):
            context.logits(levels[: k + 1])
            (n,) = (draft_targets.anchors == anchor).nonzero()[:, 0]
            torch.testing.assert_close(context.session.confidence()[0, 0], expected[k, n].sigmoid())


@every_head
def test_ranks_are_those_of_drafting(tiny_base: TinyBase, kind: str) -> None:
    """The rank of each token of a text among a draft position's candidates is its rank in drafting."""
    base, ids = tiny_base(), [*random_ids(9), *random_ids(7)]
    head = randomised(HEADS[kind].build(base, torch.arange(0, 300, 2))).eval()
    batch = rows_of([random_ids(5, seed=1), ids])
    base_hidden = base.hidden_states(batch, head.spec)
    ranks = head.candidate_ranks(batch, base_hidden, top=40)[1]
    for t in range(len(ids) - 2):
        so_far = base_hidden.map(lambda states, t=t: states[1:, : t + 1])  # type: ignore[misc]
        context = Context.of(head).read(torch.tensor([ids[: t + 1]]), so_far)
        drafted = torch.cat(context.logits(chain_levels([*ids[t + 1 : t + 4], 7, 7][:3])), 1)[0]
        for k, logits in enumerate(drafted):
            listed = context.session.d2t[logits.topk(40).indices].tolist()
            target = ids[t + 2 + k] if t + 2 + k < len(ids) else None
            assert ranks[t, k] == (-1 if target is None else listed.index(target) if target in listed else 40), (t, k)


@cases(
    "architecture, kind",
    *(("llama", kind) for kind in UNTRAINED_AS_BASE),
    *cases_of(("gemma",), UNTRAINED_AS_BASE, fast=("hydra_pp",)),
)
def test_an_untrained_head_is_the_bases_next_token_head(tiny_base: TinyBase, architecture: str, kind: str) -> None:
    base, ids = tiny_base(architecture), list(range(20, 40))
    final = base.hidden_states(rows_of([ids]), HiddenStatesSpec()).final[0, : len(ids)]
    for actual in text_logits(HEADS[kind].build(base).eval(), base, ids):
        valid = actual.isfinite().all(-1)
        logits, expected = actual[valid], base.lm_head.logits(final)[valid]
        if kind in ("hydra_pp", "dspark_state"):
            # The final norm of the base leaves an RMS that varies a little; the prefix layer's does not.
            assert valid.sum() > 10 and (logits.argmax(-1) == expected.argmax(-1)).all()
            assert float(logits.norm() / expected.norm()) == pytest.approx(1.0, abs=0.1)
        else:
            torch.testing.assert_close(logits, expected)


@cases(
    "architecture, kind",
    *cases_of(("llama",), HEADS, fast=MAIN),
    *cases_of(("qwen2",), HEADS, fast=("eagle3",)),
    *cases_of(("gemma",), HEADS, fast=("dspark_state",)),
    *cases_of(("gpt_bigcode",), ("medusa", "hydra", "mlp"), fast=("medusa",)),
)
def test_greedy_text(tiny_base: TinyBase, architecture: str, kind: str) -> None:
    """Alone and in a batch, with every kind of tree; the head is fitted, so that drafts are accepted."""
    base = tiny_base(architecture)
    plain = [decode(base, None, p, max_new_tokens=16, ignore_eos=True).tokens for p in PROMPTS]
    d2t = torch.tensor(sorted({t for text in plain for t in text} | set(range(0, 300, 2))))
    # One text is left out: drafts must be rejected too.
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)][:2]
    head = fitted(HEADS[kind].build(base, d2t), rows_of(texts), 15, lr=5e-3 if "eagle" in kind else 0.02)
    for name in PLANS if architecture == "llama" else ["chain", "tree"]:
        draft_config = PLANS[name]
        both = decode_batch(base, head, PROMPTS, max_new_tokens=16, draft_config=draft_config, ignore_eos=True)
        alone = decode(base, head, PROMPTS[0], max_new_tokens=16, draft_config=draft_config, ignore_eos=True)
        assert [r.tokens for r in both] == plain and alone.tokens == plain[0], name
        options: dict[str, Any] = {"max_new_tokens": 16, "draft_config": draft_config, "ignore_eos": True}
        refilled = decode_batch(base, head, PROMPTS, batch_size=2, **options)
        counts = [[[step.accepted for step in r.steps[:-1]] for r in rs] for rs in (both, refilled)]
        shared = name == "by cost"  # the rows of a batch share the price of time
        assert [r.tokens for r in refilled] == plain and (shared or counts[0] == counts[1]), name
        accepted = [(step.accepted, step.depth) for r in both for step in r.steps]
        assert sum(a for a, _ in accepted) > 3 and any(a < depth for a, depth in accepted), name
        # The last step drafts no more than remains; in a batch, the row with the most remaining tokens decides.
        assert shared or [s.accepted for s in alone.steps][:-1] == [s.accepted for s in both[0].steps][:-1], name


def part_for_context(kind: str) -> Tensor | None:
    """Return a draft vocabulary that leaves ids to the context; None for heads that draft no others."""
    return torch.arange(0, 300, 2) if HEADS[kind].context_vocabulary else None


@every_case
def test_rows_are_independent(tiny_base: TinyBase, small_caches: None, kind: str) -> None:
    base = tiny_base()
    head = randomised(HEADS[kind].build(base, part_for_context(kind)), 0.05).eval()
    assert_rows_are_independent(base, head, PLANS["tree"])
    drawn = DraftConfig(tree=TokenTree.expansion([2, 1, 1]), draft_sampling=DraftSampling.WITH_REPLACEMENT)
    for draft_config in (PLANS["tree"], drawn):
        settings: dict[str, Any] = {"sampler": Sampler(temperature=0.8), "draft_config": draft_config}
        assert_same_in_any_batch(base, head, PROMPTS, sizes=[2], max_new_tokens=10, **settings)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.02), ("int8", 0.1)])
@every_head
def test_low_precision_of_drafts(tiny_base: TinyBase, tmp_path: Path, kind: str, dtype: str, error: float) -> None:
    """Drafts are rounded, the output and the trained weights are not, and the setting is saved."""
    base = tiny_base()
    full = randomised(HEADS[kind].build(base)).eval()
    rounded = replace(HEADS[kind], draft_dtype=dtype).build(base).eval()
    rounded.load_state_dict(full.state_dict())
    expected, actual = first_logits(full), first_logits(rounded)
    assert all(p.dtype == torch.float32 for p in rounded.parameters()) and actual.dtype == torch.float32
    assert "medusa_last" == kind or not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=error, atol=error * float(expected.abs().max()))
    plain = decode(base, None, PROMPTS[0], max_new_tokens=20).tokens
    rounded.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, base)
    assert decode(base, loaded, PROMPTS[0], max_new_tokens=20, draft_config=PLANS["tree"]).tokens == plain
    assert loaded.config.inference_dtype(base) == DRAFT_DTYPES[dtype]


def test_the_default_draft_dtype_is_the_one_measured_to_be_faster(tiny_base: TinyBase) -> None:
    base, config = copy(tiny_base()), HEADS["medusa"]
    assert config.draft_dtype == "auto" and config.inference_dtype(base) is None
    base.kernels = KernelTable()
    assert config.inference_dtype(base) is None
    base.kernels.draft_dtype = torch.int8
    assert config.inference_dtype(base) == torch.int8
    assert replace(config, draft_dtype=None).inference_dtype(base) is None


@torch.inference_mode()
def first_logits(head: DraftHead, ids: list[int] | None = None) -> Tensor:
    """Return the logits of the first two draft positions after a short text."""
    base, tokens = head.base, torch.tensor([ids or random_ids(7)])
    base_hidden = base.forward(tokens, base.new_cache(64), spec=head.spec)
    return torch.cat(Context.of(head).read(tokens, base_hidden).logits(chain_levels([int(tokens[0, -1]), 5])), 1)


@every_head
def test_save_and_load(tiny_base: TinyBase, tmp_path: Path, kind: str) -> None:
    base = tiny_base()
    config = replace(HEADS[kind], draft_vocab_size=100)
    head = randomised(config.build(base, torch.arange(100, 200))).eval()
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, base)
    batch = rows_of([list(range(90, 120))])
    base_hidden = base.hidden_states(batch, head.spec)
    assert loaded.config == head.config and loaded.spec == head.spec
    assert torch.equal(loaded.candidate_ranks(batch, base_hidden, 9), head.candidate_ranks(batch, base_hidden, 9))
    assert torch.equal(first_logits(loaded), first_logits(head))
    # What the base has is not saved again.
    assert not any("base" in name or "rotary" in name or "embed" in name for name in head.state_dict())


@every_head
def test_training_renews_what_drafting_packed(tiny_base: TinyBase, kind: str) -> None:
    """After a training step, drafts are those of a new head with the same weights; moving a head repacks it too."""
    base, text = tiny_base(), list(range(30, 60))
    head, fresh = HEADS[kind].build(base).eval(), HEADS[kind].build(base).eval()
    before = first_logits(head, text[:5])
    randomised(fitted(head, rows_of([text]), 1).train()).eval()
    fresh.load_state_dict(head.state_dict())
    assert not torch.allclose(first_logits(head, text[:5]), before, atol=1e-3)
    assert torch.equal(first_logits(head, text[:5]), first_logits(fresh, text[:5]))
    packed = head.inference()
    assert head.inference() is packed and head.to("cpu").inference() is not packed


@pytest.mark.parametrize("kind", cases_of((), SAMPLED, fast=("mlp", "dspark_context")))
def test_sampled_text_is_distributed_as_without_a_head(kind: str) -> None:
    """Trees of nodes sampled without replacement, in a batch of two prompts: chi-square over all answers."""
    base, sampler, length = small_base(), Sampler(temperature=1.0, top_k=3), 3
    prompts = [[9, 10, 11, 12, 13, 14, 15], [250]]
    answers = {tuple(prompt): probs_of_answers(base, prompt, sampler, length) for prompt in prompts}
    texts = [[*prompt, *answer] for prompt, actual in answers.items() for answer in actual]
    config = replace(HEADS[kind], num_layers=1) if kind.startswith(("draft_lm", "dspark")) else HEADS[kind]
    head = fitted(config.build(base, part_for_context(kind)), rows_of(texts), 12)
    draft_config = DraftConfig(tree=TokenTree.expansion([2, 2]), draft_sampling=DraftSampling.WITHOUT_REPLACEMENT)
    assert_distributed(base, head, prompts, 150, length, draft_config=draft_config, sampler=sampler)


# Training ----------------------------------------------------------------------------------------------------


@every_head
def test_unread_features_carry_nothing(tiny_base: TinyBase, kind: str) -> None:
    """NaN in states that are never read (the last token of a document, padding) reaches neither loss nor gradients."""
    base = tiny_base()
    head = randomised(HEADS[kind].build(base))
    batch = rows_of([list(range(20, 30)), list(range(50, 58))])
    base_hidden = base.hidden_states(batch, head.spec)
    clean = head.loss(batch, base_hidden, LossConfig(kl=1.0))
    for values in (base_hidden.final, base_hidden.layers):
        if values is not None:
            values[0, 9:], values[1, 7:] = torch.nan, torch.nan
    out = head.loss(batch, base_hidden, LossConfig(kl=1.0))
    torch.autograd.backward(out.loss_sum)
    assert float(out.loss_sum.detach()) == pytest.approx(float(clean.loss_sum.detach()), rel=1e-6)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


@every_head
def test_all_weights_learn_and_the_base_does_not(tiny_base: TinyBase, kind: str) -> None:
    base, batch = tiny_base(), rows_of([list(range(20, 32))])
    head = randomised(HEADS[kind].build(base), 0.1)
    torch.autograd.backward(head.loss(batch, base.hidden_states(batch, head.spec), LossConfig(kl=1.0)).loss_sum)
    still = {name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == ({"cells.proj.forget.0.weight"} if kind == "lstm" else set()), "an LSTM starts from a cell of zeros"
    assert not base.embedding.requires_grad and not base.lm_head.weight.requires_grad


@every_head
def test_packed_documents_train_like_documents_alone(
    tiny_base: TinyBase, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients, also if documents share a span, and if long spans are cut."""
    base, texts = tiny_base(), [random_ids(14), random_ids(5, seed=1), random_ids(23, seed=2)]
    head = randomised(HEADS[kind].build(base), 0.1).eval()
    losses, gradients = [], []
    for batch, joined, scores in ((rows_of(texts), 0, 2**26), (row_of(texts), 0, 64), (row_of(texts), 20, 2**26)):
        monkeypatch.setitem(packed.JOINED, "cpu", joined)
        monkeypatch.setattr(packed, "MAX_SCORES", scores)
        head.zero_grad()
        out = head.loss(batch, base.hidden_states(batch, head.spec), LossConfig(kl=0.5, decay="dpace"))
        torch.autograd.backward(out.loss_sum)
        losses.append(float(out.loss_sum.detach()))
        gradients.append({name: p.grad for name, p in head.named_parameters()})
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for actual in gradients[1:]:
        torch.testing.assert_close(actual, gradients[0], rtol=1e-4, atol=3e-5)


@every_head
def test_nothing_to_train_on(tiny_base: TinyBase, kind: str) -> None:
    base, batch = tiny_base(), rows_of([[5], [7]])
    head = HEADS[kind].build(base)
    out = head.loss(batch, base.hidden_states(batch, head.spec), LossConfig())
    assert int(out.tokens) == 0 and float(out.loss_sum.detach()) == 0.0


# Parts of a base ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_base(tmp_path_factory: pytest.TempPathFactory) -> BaseConfig:
    folder = tmp_path_factory.mktemp("base")
    random_base(TINY, prepack=False).model.save_pretrained(folder)
    return BaseConfig(name=str(folder), tokenizer="builtin:tiny", dtype="float32", prepack=False)


@every_head
def test_a_saved_head_needs_only_parts_of_its_base(kind: str, stored_base: BaseConfig, tmp_path: Path) -> None:
    """Loss, gradients, drafts and exports are those of the head on the loaded base; others are refused by name."""
    base, parts = BaseModel.load(stored_base), BaseParts.of_checkpoint(stored_base)
    head = randomised(HEADS[kind].build(base))
    head.save_pretrained(tmp_path / "head")
    if head.config.needs_layers:
        refuses(f"{head.config.head_type} runs layers .* load_base", load_head, tmp_path / "head", parts)
        return
    heads = load_head(tmp_path / "head", base), load_head(tmp_path / "head", parts)
    batch = row_of([random_ids(20), random_ids(9)])
    hidden, losses, drafts = base.hidden_states(batch, head.spec), [], []
    for number, each in enumerate(heads):
        loss = each.loss(batch, hidden, LossConfig()).loss_sum
        torch.autograd.backward(loss)
        losses.append([loss, *(parameter.grad for parameter in each.parameters())])
        context = Context.of(each).read(batch.input_ids[:, :12], hidden.map(lambda states: states[:, :12]))
        drafts.append(context.draft(batch.input_ids[:, 12], PLANS["tree"]).tokens)
        for file_format in all_formats().values():
            if type(each.config) is file_format.head_config and not [*file_format.unsupported(each)]:
                (folder := tmp_path / f"{number}" / file_format.name).mkdir(parents=True)
                file_format.export(each, folder)
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert torch.equal(*drafts)
    folders = [tmp_path / "0", tmp_path / "1"]
    exports = [{path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")} for folder in folders]
    assert exports[0] == exports[1] and (exports[0] or kind not in ("medusa", "dspark", "hydra", "mlp"))
    if head.config.starts_from_layers:
        refuses("starts as a copy of layers", head.config.build, parts)
    with pytest.raises(UserError, match="loaded without layers"):
        _ = heads[1].base_model
