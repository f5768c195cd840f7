"""Teacher-forced replay: what drafting would have been accepted along finished texts, for any plan, without decoding.

One pass of the base over the texts gives its laws; the drafter is led along them position by position. See
``eval/replay.py`` for why that predicts decoding, and ``eval/replay_laws.py`` for the chances.

Shape legend: B texts at a time, T tokens, K draft positions, S trials, W draft vocabulary, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.eval.trees.simulate import (
    Chances,
    Ends,
    Replay,
    block_chances,
    by_trial,
    candidate_accept_probs,
    ends_of,
    rank_chances,
    replay,
    replay_ends,
)
from drafthead.eval.trees.texts import BUDGET, LikelihoodCheck, Text, batches, positions, read_features, target_probs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, Drafter, DraftSampling, DraftState, Proposal
from drafthead.models.decoding.growth import StepwiseDrafter
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree

EXACT = AcceptanceRule()


@dataclass(frozen=True, kw_only=True)
class ChancePlan:
    """What the chances of a whole family of trees depend on."""

    draft_sampling: DraftSampling = DraftSampling.TOP_K
    sampler: Sampler = Sampler(temperature=1.0)
    """How the drafter's law is warped; deterministic siblings do not depend on it."""
    depth: int | None = None
    """Draft positions; None: all that the drafter has."""
    width: int = 10
    """Trials at a node."""
    rule: AcceptanceRule = EXACT
    """A lossless one."""
    seed: int = 0


def replay_texts(
    base: BaseModel,
    drafter: Drafter,
    texts: Sequence[Text],
    plan: DraftConfig,
    sampler: Sampler,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
) -> Replay:
    """What decoding with ``plan`` is expected to do on these texts.

    Deterministic plans (static or dynamic trees, of any drafter) are drafted for real at every position; sampled ones
    need a drafter that grows trees level by level.

    Args:
        base: the target.
        drafter: attached to it.
        texts: plain answers of the target under ``sampler``.
        plan: what to draft.
        sampler: the target's.
        rule: a lossless one.
        seed: of the bootstrap, and of trials without replacement.

    Raises:
        UserError: a lossy rule, a plan that cannot be replayed, texts that are no samples of the target's law.
    """
    plan = plan.at_most(drafter.depth)
    rule.check(plan.draft_sampling, plan.tree)
    _check_lossless(rule)
    if plan.draft_sampling is DraftSampling.TOP_K:
        return replay_ends(drafted_ends(base, drafter, texts, plan, sampler), seed)
    assert isinstance(plan.tree, TokenTree)  # a plan has no other tree of samples
    wanted = ChancePlan(
        draft_sampling=plan.draft_sampling,
        sampler=plan.sampler,
        depth=plan.depth,
        width=_width(plan),
        rule=rule,
        seed=seed,
    )
    return replay(text_chances(base, drafter, texts, sampler, wanted), by_trial(plan.tree), seed)


@torch.inference_mode()
def text_chances(
    base: BaseModel, drafter: Drafter, texts: Sequence[Text], sampler: Sampler, plan: ChancePlan
) -> list[Chances]:
    """Per text with a step [T, K, S]: chances of every draft position and trial, good for any static tree.

    For sampled siblings give trees through ``by_trial``. Memory is bounded by ``BUDGET``, whatever the texts' length.

    Raises:
        UserError: as :func:`replay_texts`; or a drafter without laws of its own.
    """
    _check_lossless(plan.rule)
    if plan.rule.name == "block" and plan.width > 1:
        raise UserError("block verification is for chains; set width to 1, or replay trees with the exact rule")
    if not isinstance(drafter, StepwiseDrafter):
        raise UserError(
            f"{type(drafter).__name__} has no laws of its own, so chances of whole families of trees are unknown; "
            "replay one plan at a time"
        )
    depth = min(plan.depth or drafter.depth, drafter.depth)
    reader = _ChanceReader(base, drafter, sampler, plan, torch.Generator(base.device).manual_seed(plan.seed))
    found: list[Chances] = []
    surprise = LikelihoodCheck(sampler)
    for batch in batches(texts, BUDGET // (depth * base.vocab_size)):
        tables = [np.full((text.positions, depth, plan.width), np.nan) for text in batch]
        features = read_features(base, drafter, batch)
        surprise.read(base, batch, features)
        for rows, state, last, t in positions(drafter, batch, features, base.device):
            alive = [batch[row] for row in rows]
            logits = _forced_logits(drafter, state, last, alive, t, depth)
            chances = reader.at(alive, [features[row].final[0] for row in rows], t, logits)
            for row, values in zip(rows, chances, strict=True):
                tables[row][t, : len(values)] = values
        found += tables
    surprise.check()
    return found


@torch.inference_mode()
def drafted_ends(
    base: BaseModel, drafter: Drafter, texts: Sequence[Text], plan: DraftConfig, sampler: Sampler
) -> list[Ends]:
    """Per text with a step [T, D+1]: how many drafts of a deterministic ``plan`` agree with the text.

    Deterministic drafts are accepted exactly when the target's own sample is among them, and the text is that sample.
    """
    found, surprise = [], LikelihoodCheck(sampler)
    for batch in batches(texts, BUDGET // (plan.depth * base.vocab_size + 1)):
        accepted = [np.zeros(text.positions, dtype=np.int64) for text in batch]
        features = read_features(base, drafter, batch)
        surprise.read(base, batch, features)
        for rows, state, last, t in positions(drafter, batch, features, base.device):
            counts = _agreement(drafter.draft(state, last, plan), [batch[row] for row in rows], t)
            for row, count in zip(rows, counts.tolist(), strict=True):
                accepted[row][t] = count
        found += [ends_of(a) for a in accepted]
    surprise.check()
    return found


def _agreement(proposal: Proposal, texts: list[Text], t: int) -> Tensor:
    """[B] drafts on the longest proposed path that the texts follow after their t-th position."""
    tokens, depths = proposal.tokens, proposal.shape.depths.expand_as(proposal.tokens)
    ahead = int(depths.max()) + 1
    wanted = torch.full((len(texts), ahead), -1, device=tokens.device)
    for row, text in enumerate(texts):
        part = text.ids[text.boundary + t : text.boundary + t + ahead]
        wanted[row, : len(part)] = torch.tensor(part, device=tokens.device)
    wrong = tokens != wanted.gather(1, depths)
    wrong[:, 1:] |= proposal.shape.parents.expand_as(tokens)[:, 1:] < 0  # padding
    failed = (proposal.shape.ancestors.expand(len(texts), -1, -1) & wrong[:, None, :]).any(-1)
    return torch.where(failed, 0, depths).amax(1)


@dataclass(frozen=True)
class _ChanceReader:
    """Turns logits along the texts into chances."""

    base: BaseModel
    drafter: StepwiseDrafter
    sampler: Sampler
    plan: ChancePlan
    generator: torch.Generator

    def at(self, texts: list[Text], hidden: list[Tensor], t: int, logits: list[Tensor]) -> list[Chances]:
        """Per text the chances [K, S] of the draft positions that it has at its t-th position.

        Args:
            texts: all have that position.
            hidden: [T, D] of each.
            t: position.
            logits: [B, W] of each draft position.
        """
        # Draft position k (0-based) stands at this index of the text; behind the text's end there is none.
        places = [(i, k, text.boundary + t + 1 + k) for i, text in enumerate(texts) for k in range(len(logits))]
        places = [(i, k, at) for i, k, at in places if at < len(texts[i].ids)]
        tokens = torch.tensor([texts[i].ids[at] for i, _, at in places], device=self.base.device)
        draft = torch.stack([logits[k][i] for i, k, _ in places])
        if self.plan.draft_sampling is DraftSampling.TOP_K:
            found = rank_chances(draft, tokens, self.drafter.d2t, self.plan.width)
        else:
            states = torch.stack([hidden[i][at - 1] for i, _, at in places])
            p = target_probs(self.base, states, [texts[i].ids[:at] for i, _, at in places], self.sampler)
            q = _over_vocabulary(self.plan.sampler.probs(draft), self.drafter.d2t, self.base.vocab_size)
            found = self._sampled(p, q, tokens, [i for i, _, _ in places])
        lengths = [min(len(logits), text.positions - t) for text in texts]
        return [part.cpu().numpy() for part in found.split(lengths)]  # type: ignore[no-untyped-call]

    def _sampled(self, p: Tensor, q: Tensor, tokens: Tensor, rows: list[int]) -> Tensor:
        if self.plan.rule.name != "block":
            return candidate_accept_probs(p, q, tokens, self.plan.draft_sampling, self.plan.width, self.generator)
        at_p, at_q = p.gather(1, tokens[:, None])[:, 0], q.gather(1, tokens[:, None])[:, 0]
        of = torch.tensor(rows, device=p.device)
        parts = [block_chances(at_p[of == row][None], at_q[of == row][None])[0] for row in sorted(set(rows))]
        return torch.cat(parts)[:, None]


def _over_vocabulary(dist: Tensor, d2t: Tensor, vocabulary: int) -> Tensor:
    if dist.shape[1] == vocabulary:
        return dist
    return dist.new_zeros(len(dist), vocabulary).index_copy_(1, d2t, dist)


def _forced_logits(
    drafter: StepwiseDrafter, state: DraftState, last_token: Tensor, texts: list[Text], t: int, depth: int
) -> list[Tensor]:
    """Per draft position the drafter's logits [B, W] after the text's own tokens."""
    draft_pass = drafter.start(state, last_token, DraftConfig(tree=TokenTree.chain(depth)))
    logits = [draft_pass.root()[:, 0].float()]
    for k in range(1, depth):
        # Behind a text's end its last token stands in: nothing reads what follows.
        ids = [text.ids[min(text.boundary + t + k, len(text.ids) - 1)] for text in texts]
        tokens = torch.tensor(ids, device=last_token.device)[:, None]
        logits.append(draft_pass.step(tokens, torch.zeros_like(tokens))[:, 0].float())
    return logits


def _width(plan: DraftConfig) -> int:
    tree = plan.tree
    return max((tree.parents.count(n) for n in range(len(tree))), default=0) if isinstance(tree, TokenTree) else 1


def _check_lossless(rule: AcceptanceRule) -> None:
    if not rule.lossless:
        raise UserError(
            f"the rule {rule.name!r} cannot be replayed: it is lossy, so the text depends on what was drafted; decode "
            "instead, or replay the exact rule"
        )
