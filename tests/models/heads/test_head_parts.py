"""Parts of heads: losses in chunks against plain ones, and the induction head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.formats import all_formats
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.induction import InductionContext, InductionHead
from drafthead.models.heads.parts.losses import (
    FLOOR,
    STATS,
    Labels,
    LossChunk,
    LossConfig,
    TargetDistribution,
    heads_loss,
)
from drafthead.models.heads.parts.targets import DraftTargets
from support import TinyBase, cases, random_ids, randomised, row_of

K, N, D, W = 3, 37, 16, 50
EXACT = 1e-11
"""Relative in float64: sums of 37 terms in another order, and logarithms of a softmax."""
TOLERANCE = 2e-6
"""Relative in float32."""


def only(**weights: float | list[float]) -> LossConfig:
    return LossConfig(**{"ce": 0.0, **weights})


CASES = {
    "ce": LossConfig(),
    "kl": only(kl=1.0),
    "reverse_kl": only(reverse_kl=1.0),
    "jsd": only(jsd=1.0),
    "tv": only(tv=1.0),
    "lk": only(lk=1.0),
    "lk_adaptive": only(lk_adaptive=1.0),
    "ce and kl": LossConfig(ce=0.3, kl=0.7, decay=0.5),
    "all": LossConfig(ce=0.3, kl=0.7, reverse_kl=0.5, jsd=0.8, tv=0.4, lk=0.2, lk_adaptive=0.6),
    "depths": only(lk=1.0, depth_weights=[0.5, 0.0, 2.0]),
}


def make(
    shared: bool = False, softcap: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[LMHead], Labels]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = (normal(K, N, D) * 2).requires_grad_()
    weights = [normal(W, D).requires_grad_() for _ in range(1 if shared else K)]
    heads = [LMHead(weight=weights[0 if shared else k], scale=0.5, softcap=softcap) for k in range(K)]
    ids = torch.randint(-1, W, (N,), generator=generator)
    ids[::5] = -1
    valid = torch.rand(K, N, generator=generator) < 0.7
    target_lm_head = LMHead(weight=normal(W, D), scale=0.5, softcap=softcap)
    return hidden, heads, Labels(ids=ids, valid=valid, target_hidden=normal(N, D) * 2, target_lm_head=target_lm_head)


def plain(hidden: Tensor, heads: list[LMHead], targets: Labels, config: LossConfig) -> Tensor:
    """Independent few-line reference: whole matrices, torch's own losses, a loop over positions."""
    p = targets.target_lm_head.logits(targets.target_hidden).softmax(-1)
    total = hidden.new_zeros(())
    for k in range(K):
        weight = config.decay ** (k + 1) if config.depth_weights is None else config.depth_weights[k]
        for i in range(N):
            if not targets.valid[k, i]:
                continue
            log_q = heads[k].logits(hidden[k, i]).log_softmax(-1)
            kl = F.kl_div(log_q, p[i], reduction="sum")
            alpha = torch.minimum(p[i], log_q.exp()).sum()
            mix = torch.exp(-3 * alpha.detach())
            mean = (0.5 * (p[i] + log_q.exp())).log()
            to_q = F.kl_div(mean, log_q, reduction="sum", log_target=True)
            jsd = (F.kl_div(mean, p[i], reduction="sum") + to_q) / 2
            reverse = F.kl_div(p[i].log(), log_q, reduction="sum", log_target=True)
            loss = config.kl * kl + config.tv * (1 - alpha) - config.lk * alpha.log()
            loss = loss + config.reverse_kl * reverse + config.jsd * jsd
            loss = loss + config.lk_adaptive * (mix * kl + (1 - mix) * (1 - alpha))
            if targets.ids[i] >= 0:
                loss = loss + config.ce * F.nll_loss(log_q, targets.ids[i])
            target_weights = 1.0 if targets.weights is None else targets.weights[k, i]
            total = total + weight * target_weights * loss
    return total


def values_and_gradients(
    form: Callable[..., Tensor], hidden: Tensor, heads: list[LMHead], *others: object
) -> list[Tensor]:
    value = form(hidden, heads, *others)
    leaves = [hidden, *{id(h.weight): h.weight for h in heads}.values()]
    return [value.detach(), *torch.autograd.grad(2 * value, leaves)]


def chunked(hidden: Tensor, heads: list[LMHead], targets: Labels, config: LossConfig, rows: int) -> Tensor:
    return heads_loss(hidden, heads, targets, config, rows)[0]


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("rows", [8, 1000])
@pytest.mark.parametrize("name", CASES)
def test_chunked_equals_plain(name: str, rows: int, softcap: float | None) -> None:
    weights = torch.rand(K, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for shared, target_weights in ((True, None), (False, None), (False, weights)):
        hidden, lm_heads, targets = make(shared, softcap)
        setting = hidden, lm_heads, replace(targets, weights=target_weights)
        actual = values_and_gradients(chunked, *setting, CASES[name], rows)
        expected = values_and_gradients(plain, *setting, CASES[name])
        for value, other in zip(actual, expected, strict=True):
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_float64_rounded(name: str) -> None:
    actual = values_and_gradients(chunked, *make(dtype=torch.float32), CASES[name], 8)
    expected = values_and_gradients(plain, *make(), CASES[name])
    assert actual[0].dtype == torch.float32
    for value, other in zip(actual, expected, strict=True):
        # The reverse KL has log(q / p) as a factor, up to 60 here.
        rtol, atol = (1e-5, 5e-5) if CASES[name].reverse_kl else (TOLERANCE, 1e-5)
        torch.testing.assert_close(value.double(), other, rtol=rtol, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ce", "lk"])
def test_stats_by_hand(name: str) -> None:
    hidden, heads, targets = make(shared=True)
    hidden = hidden.detach()
    right = heads[0].logits(hidden[1]).argmax(-1)
    targets = replace(targets, ids=torch.where(targets.ids < 25, targets.ids, right))
    value, stats = heads_loss(hidden, heads, targets, CASES[name], 8)
    torch.testing.assert_close(value, plain(hidden, heads, targets, CASES[name]), rtol=EXACT, atol=0)
    logits, valid, known = heads[0].logits(hidden), targets.valid, targets.valid & (targets.ids >= 0)
    overlap = torch.minimum(targets.target_lm_head.logits(targets.target_hidden).softmax(-1), logits.softmax(-1))
    expected = {
        "accept": (logits.argmax(-1) == targets.ids) & known,
        "ce": -logits.log_softmax(-1).gather(-1, targets.ids.clamp(min=0).expand(K, N)[..., None])[..., 0] * known,
        "count": valid,
        "overlap": overlap.sum(-1) * valid,
        "known": known,
    }
    assert list(expected) == list(STATS) and int(expected["accept"].sum()) > 5
    torch.testing.assert_close(stats, torch.stack([values.sum(1).float() for values in expected.values()], 1))


def term(q_logits: Tensor, p_logits: Tensor, config: LossConfig) -> tuple[float, Tensor, float]:
    """Value, gradient and alpha of one target."""
    dist = TargetDistribution.of(LMHead(weight=torch.eye(5)), p_logits)
    chunk = LossChunk(LMHead(weight=torch.eye(5)), q_logits, torch.tensor([-1]), torch.tensor([True]))
    loss, gradient, _ = chunk.loss_and_gradient(dist, config)
    alpha = torch.minimum(q_logits.softmax(-1), p_logits.softmax(-1)).sum()
    return float(loss), gradient, float(alpha)


def test_lk_trains_where_total_variation_does_not() -> None:
    """A sure head that disagrees with a sure base: the gradient of tv is gone, that of lk is not."""
    q, p = torch.tensor([[20.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 20.0, 0.0, 0.0, 0.0]])
    assert float(term(q.clone(), p, only(tv=1.0))[1].abs().max()) < 1e-7
    assert float(term(q.clone(), p, only(lk=1.0))[1].abs().max()) > 0.1
    apart = torch.tensor([[400.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 400.0, 0.0, 0.0, 0.0]])
    value, gradient, alpha = term(apart[0].clone(), apart[1], only(lk=1.0))
    assert alpha == 0 and value == pytest.approx(-torch.tensor(FLOOR).log().item()) and torch.isfinite(gradient).all()


@cases(
    "weights, says",
    ({"ce": 0.0}, "loss.ce, .* loss.lk_adaptive"),
    *(({"depth_weights": weights}, "loss.depth_weights") for weights in ([1.0, -1.0], [0.0], [])),
    *(({"decay": decay}, "loss.decay .*dpace") for decay in (0.0, 1.5, "fast")),
)
def test_bad_settings(weights: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossConfig(**weights)


def test_bfloat16_sums_over_chunks_in_float32() -> None:
    """512 chunks of one target each: a sum kept in bfloat16 stops growing at 256 of its terms."""
    count = 512
    hidden = torch.ones(1, count, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = Labels(
        ids=torch.zeros(count, dtype=torch.int64),
        valid=torch.ones(1, count, dtype=torch.bool),
        target_hidden=None,
        target_lm_head=None,
    )
    loss, _ = heads_loss(hidden, [LMHead(weight=weight)], targets, LossConfig(decay=1.0), rows=1)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad.float(), torch.tensor([[-0.5], [0.5]]).expand(2, 4) * count)


# The induction head ---------------------------------------------------------------------------------------------------


WITH_INDUCTION = {
    "medusa": MedusaConfig(num_draft_tokens=3, own_lm_head=False, induction_rank=64),
    "hydra": HydraConfig(num_draft_tokens=3, own_lm_head=False, induction_rank=64),
    "eagle3": Eagle3Config(num_draft_tokens=3, ttt_steps=3, own_lm_head=False, induction_rank=64),
    "dspark": DSparkConfig(num_draft_tokens=3, induction_rank=64),
    "kangaroo": KangarooConfig(num_draft_tokens=3, exit_layer=2, induction_rank=64),
}


def copied(head: InductionHead, base: BaseModel, text: list[int], path: list[int], state: Tensor) -> Tensor:
    """Return the copied code [r] after ``text`` and the drafts ``path``, by a loop over the tokens."""

    def code(token: int, part: int) -> Tensor:
        embedded = F.normalize(base.embedding[token], dim=0) * base.hidden_size**0.5
        out = (head.codes_proj.weight @ embedded + head.codes_proj.bias).view(3, head.rank)[part]
        return F.normalize(out, dim=0) * head.rank**0.5

    (last, before), sharpness = ([*text, *path][-1], [*text, *path][-2]), head.sharpness / head.rank
    scores, values = [head.sink.weight[0] @ state + head.sink.bias[0]], [torch.zeros(head.rank)]
    for j in range(1, len(text)):
        score = sharpness[0] * code(last, 0) @ code(text[j - 1], 0)
        if j > 1:
            score = score + sharpness[1] * code(before, 1) @ code(text[j - 2], 1)
        scores.append(score)
        values.append(code(text[j], 2))
    return torch.stack(scores).softmax(0) @ torch.stack(values)


def test_parity_with_a_few_line_reference(tiny_base: TinyBase) -> None:
    base = tiny_base("qwen2")
    head = randomised(HydraConfig(num_draft_tokens=3, own_lm_head=False, induction_rank=5).build(base), 0.1).eval()
    texts = [random_ids(9), [7, 8, 9] * 4]
    batch = row_of(texts)
    final = base.hidden_states(batch, head.spec).final
    draft_targets = DraftTargets.of(batch, 3)
    actual = head.induction.at_anchors(batch, final[:, draft_targets.anchors], draft_targets)
    compared = 0
    for start, text in zip((0, 9), texts, strict=True):
        for k in range(3):
            for t in range(len(text) - 2 - k):
                (n,) = (draft_targets.anchors == start + t).nonzero()[:, 0]
                expected = copied(head.induction, base, text[: t + 1], text[t + 1 : t + 2 + k], final[0, start + t])
                torch.testing.assert_close(actual[k, n], expected, rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared == 7 + 6 + 5 + 10 + 9 + 8


@pytest.mark.parametrize("kind", WITH_INDUCTION)
def test_an_untrained_head_copies_what_stood_there_before(tiny_base: TinyBase, kind: str) -> None:
    base = tiny_base()
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:40].tolist()
    share = {}
    for rank in (64, 0):
        head = replace(WITH_INDUCTION[kind], induction_rank=rank).build(base).eval()
        batch = row_of([[*ids, *ids[:20]]])
        ranks = head.candidate_ranks(batch, base.hidden_states(batch, head.spec), 40)[0]
        again = ranks[41:56]  # from where two tokens have stood before
        share[rank] = float((again == 0).float().mean())
    assert share[64] > 0.8 > 0.2 > share[0], share


@pytest.mark.parametrize("kind", WITH_INDUCTION)
def test_no_format_has_one(tiny_base: TinyBase, kind: str) -> None:
    head = WITH_INDUCTION[kind].build(tiny_base())
    with pytest.raises(UserError, match="head.induction_rank=0"):
        all_formats()[kind].checkpoint(head, None, None)


@pytest.mark.parametrize("kind", ["hydra", "dspark"])
@pytest.mark.parametrize("settings", [{}, {"model_type": "granite", "logits_scaling": 8.0}], ids=["llama", "granite"])
def test_a_match_adds_the_same_for_any_base(tiny_base: TinyBase, kind: str, settings: dict[str, Any]) -> None:
    """Granite's base divides its logits."""
    head = WITH_INDUCTION[kind].build(tiny_base(**settings))
    with torch.no_grad():
        codes, out = head.induction.codes(torch.tensor([7]))[:, 2], head.output_head(0)
        added = (codes @ out.low_rank[:, -64:].T)[0] * out.scale
        assert float(added[7]) == pytest.approx(8.0, rel=1e-3)


@torch.inference_mode()
def test_only_new_tokens_are_looked_up(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step moves a short row's padding; the tokens that a long row already has are not read again."""
    head = randomised(WITH_INDUCTION["hydra"].build(tiny_base()), 0.1).eval().inference().induction
    counted: list[int] = []
    codes = InductionHead.codes
    monkeypatch.setattr(InductionHead, "codes", lambda h, tokens: counted.append(tokens.numel()) or codes(h, tokens))
    prompts = torch.tensor([random_ids(50), random_ids(50, 1)])
    context = InductionContext(head, 2)
    context.commit(prompts, [50, 9])
    counted.clear()
    for step in range(10):
        context.commit(torch.tensor([random_ids(2, step), random_ids(2, step + 20)]), [2, 1])
    assert max(counted) <= 8, counted


@torch.inference_mode()
def test_a_context_can_go_back(tiny_base: TinyBase) -> None:
    """After a rollback, a context copies as one that never read the later tokens."""
    head = randomised(WITH_INDUCTION["hydra"].build(tiny_base()), 0.1).eval().inference().induction
    ids, node, state = torch.tensor([random_ids(12)]), torch.tensor([[5]]), torch.randn(1, 1, head.sink.in_features)
    codes = []
    for read, kept in ((12, 7), (7, 7)):
        context = InductionContext(head, 1)
        context.commit(ids[:, :read], [read])
        context.rollback([kept])
        context.start(state)
        codes.append(context.read(node, torch.zeros_like(node)))
    torch.testing.assert_close(*codes)
