"""The induction head: parity with a reference, copying before training, and documents that do not see each other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.induction import InductionContext, InductionHead
from drafthead.models.heads.parts.targets import DraftTargets
from support import TinyBase, random_ids, randomised, row_of

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
