"""Fit of the probability that a draft is accepted (``AcceptanceModel``) on finished answers, and its error on others.

Along an answer, every draft's fate is known: it is accepted if it is the answer's next token. A draft counts only if
all drafts above it were accepted, so the drafter reads the answer's own tokens.

Shape legend: n draft positions of any answers, S candidates of a position, K depths.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from drafthead.data.answers.store import Answer
from drafthead.eval.trees.simulate import batches, forced_logits, matching_drafts, positions
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_tree import LEAST, MOST, WIDTH, AcceptanceModel, Floats, PooledAcceptance, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.growth import StepwiseDrafter
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree

ROWS = 16  # answers at a time
RIDGE = 1.0  # weight of a bias's square, in drafts: a candidate that is never accepted keeps a finite bias
BINS = 10  # of predicted probabilities, over which the calibration error is averaged


@dataclass(frozen=True)
class Fates:
    """Candidates whose parents were accepted, and which of them were."""

    likelihoods: Floats  # [n, S] the drafter's probabilities
    accepted: npt.NDArray[np.int64]  # [n] the accepted candidate; S: none
    depths: npt.NDArray[np.int64]  # [n] from 1
    starts: npt.NDArray[np.int64]  # [n, 2] answer (from 0, of those with steps) and position of the step that drafts
    tokens: npt.NDArray[np.int64]  # [n, S] the candidates

    @property
    def labels(self) -> Floats:  # [n, S]
        labels: Floats = (self.accepted[:, None] == np.arange(self.likelihoods.shape[1])).astype(np.float64)
        return labels

    @property
    def chains(self) -> dict[tuple[int, int], int]:
        """Number of accepted drafts by start, if a step drafted the likeliest chain."""
        lengths: dict[tuple[int, int], int] = {}
        for (answer, t), fate, depth in zip(self.starts.tolist(), self.accepted, self.depths, strict=True):
            lengths.setdefault((answer, t), 0)
            if fate == 0 and lengths[answer, t] == depth - 1:
                lengths[answer, t] = int(depth)
        return lengths

    def of_steps(self, others: "Fates | None") -> "Fates":
        """Return the fates that decoding would meet, if every step accepted the longest chain of this drafter and of
        ``others``. Inside a long copy, drafts are right at every position, but few steps start there."""
        chains = [each.chains for each in (self, others) if each is not None]
        met, ends = set[tuple[int, int]](), dict[int, int]()
        for answer, t in sorted({start for each in chains for start in each}):
            if t >= ends.get(answer, 0):
                met.add((answer, t))
                ends[answer] = t + 1 + max(each.get((answer, t), 0) for each in chains)
        kept = np.array([tuple(start) in met for start in self.starts.tolist()])
        return Fates(*(column[kept] for column in astuple(self)))


@torch.inference_mode()
def candidate_fates(
    base: BaseModel, drafter: Drafter, texts: Sequence[Answer], sampler: Sampler, width: int = WIDTH
) -> Fates | None:
    """Return the fates of a drafter's ``width`` likeliest candidates at all positions of ``texts``, the base's own
    answers under ``sampler``; None if it drafts nothing. Drafters without distributions, such as prompt lookup, have
    one candidate."""
    fates, starts, first = list[Fate](), list[tuple[int, int]](), 0
    follow = _candidates if isinstance(drafter, StepwiseDrafter) else _copies
    for batch, base_hidden in batches(base, drafter, texts, sampler, ROWS):
        for rows, session, last, t in positions(drafter, batch, base_hidden, base.device):
            here = follow(drafter, session, last, [batch[row] for row in rows], t, width)
            fates += here
            starts += [(first + rows[fate.row], t) for fate in here]
        first += len(batch)
    if not fates:
        return None
    _, likelihoods, tokens, accepted, depths = map(np.array, zip(*fates, strict=True))
    return Fates(likelihoods, accepted, depths, np.array(starts), tokens)


class Fate(NamedTuple):
    """The candidates of one draft position."""

    row: int
    likelihoods: list[float]  # [S]
    tokens: list[int]  # [S]
    accepted: int  # the accepted candidate; S: none
    depth: int


def _candidates(drafter: Drafter, session: Any, last: Any, texts: list[Answer], t: int, width: int) -> list[Fate]:
    assert isinstance(drafter, StepwiseDrafter)
    fates: list[Fate] = []
    for k, logits in enumerate(forced_logits(session, last, texts, t, drafter.depth)):
        values, candidates = logits.topk(width, dim=-1)
        chances = (values - logits.logsumexp(-1, keepdim=True)).exp().tolist()
        rows = zip(texts, chances, session.d2t.take(candidates).tolist(), strict=True)
        for n, (text, row, ids) in enumerate(rows):
            at = text.boundary + t + 1 + k
            if at < len(text.ids):
                accepted = ids.index(text.ids[at]) if text.ids[at] in ids else width
                fates.append(Fate(n, row, ids, accepted, k + 1))
    return fates


def _copies(drafter: Drafter, session: Any, last: Any, texts: list[Answer], t: int, width: int) -> list[Fate]:
    proposal = session.draft(last, DraftConfig(tree=TokenTree.chain(drafter.depth), likelihoods=True))
    if len(proposal.shape) == 1:
        return []
    counts, drafted = matching_drafts(proposal, texts, t).tolist(), (proposal.shape.parents >= 0).sum(1).tolist()
    fates: list[Fate] = []
    for n, text in enumerate(texts):
        ahead = len(text.ids) - text.boundary - t - 1  # drafts after the answer's end have no fate
        count = min(drafted[min(n, len(drafted) - 1)], ahead, counts[n] + 1)
        chances = proposal.likelihoods[n, 1 : count + 1].tolist()
        tokens = proposal.tokens[min(n, len(proposal.tokens) - 1), 1 : count + 1].tolist()
        fates += [
            Fate(n, [chance], [token], int(k >= counts[n]), k + 1)
            for k, (chance, token) in enumerate(zip(chances, tokens, strict=True))
        ]
    return fates


def fit_acceptance(fates: Fates) -> AcceptanceModel:
    """Return the model of the largest likelihood, with a small penalty of large biases."""
    depth, width = int(fates.depths.max()), fates.likelihoods.shape[1]
    q = torch.from_numpy(fates.likelihoods).clamp(LEAST, MOST)
    weights, bias = _logistic([torch.logit(q)], torch.from_numpy(fates.labels), fates.depths, (depth, width))
    means = [fates.labels[fates.depths == k].mean(0).tolist() for k in range(1, depth + 1)]
    return AcceptanceModel(weight=weights[0], bias=bias.tolist(), mean=means)


def _logistic(
    features: list[torch.Tensor], labels: torch.Tensor, depths: npt.NDArray[np.int64], shape: tuple[int, ...]
) -> tuple[list[float], torch.Tensor]:
    """Return the positive weights and the bias of ``shape``, by depth, of the likeliest logistic regression."""
    at = torch.from_numpy(depths) - 1
    logs = torch.zeros(len(features), dtype=torch.float64, requires_grad=True)  # logarithms of the weights
    bias = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logs, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        logits = sum((w * x for w, x in zip(logs.exp(), features, strict=True)), bias[at])
        total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") + RIDGE * bias.square().sum()
        total = total / len(labels)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.inference_mode(False), torch.enable_grad():
        optimiser.step(loss)  # type: ignore[no-untyped-call]
    return logs.detach().exp().tolist(), bias.detach()


def fit_pooled(
    copies: Fates, lookup: AcceptanceModel, own: Fates, acceptance: AcceptanceModel
) -> PooledAcceptance | None:
    """Return the model of drafts of prompt lookup at whose positions the head drafts, too; None if there are none."""
    own_rows = zip(own.starts.tolist(), own.depths.tolist(), own.likelihoods, own.tokens, strict=True)
    candidates = {(*start, depth): (acceptance.probs(q, depth), ids) for start, depth, q, ids in own_rows}
    columns = copies.starts.tolist(), copies.depths.tolist(), copies.likelihoods, copies.tokens, copies.accepted
    probs, labels, depths = list[list[float]](), list[float](), list[int]()
    for start, depth, q, (token, *_), accepted in zip(*columns, strict=True):
        if (*start, depth) in candidates:
            chances, ids = candidates[*start, depth]
            own_chance = chances[ids == token] if token in ids else chances.min(keepdims=True)
            probs.append([float(lookup.probs(q, depth)[0]), float(own_chance[0])])
            labels.append(float(accepted == 0))
            depths.append(depth)
    if not labels:
        return None
    features = torch.logit(torch.tensor(probs, dtype=torch.float64).clamp(LEAST, MOST))
    weights, bias = _logistic([*features.T], torch.tensor(labels).double(), np.array(depths), (max(depths),))
    return PooledAcceptance(copied=weights[0], drafted=weights[1], bias=bias.tolist())


def with_acceptance(
    base: BaseModel, head: Drafter, texts: Sequence[Answer], sampler: Sampler, costs: TreeCosts
) -> TreeCosts:
    """Return ``costs`` with the acceptance of drafts of ``head`` and of prompt lookup, fitted on ``texts``."""
    own, copies = (candidate_fates(base, drafter, texts, sampler) for drafter in (head, PromptLookup()))
    copies = copies and copies.of_steps(own)
    acceptance, lookup = (AcceptanceModel() if each is None else fit_acceptance(each) for each in (own, copies))
    pooled = fit_pooled(copies, lookup, own, acceptance) if copies and own else None
    return replace(costs, acceptance=acceptance, lookup=lookup, pooled=pooled or PooledAcceptance())


def calibration_rows(model: AcceptanceModel, fates: Fates) -> list[dict[str, Any]]:
    """Return rows of a table of predicted and real acceptance, by depth and rank."""
    rows = []
    for depth in range(1, int(fates.depths.max()) + 1):
        here = fates.depths == depth
        predicted, real = model.probs(fates.likelihoods[here], depth).mean(0), fates.labels[here].mean(0)
        for rank, (expected, share) in enumerate(zip(predicted.tolist(), real.tolist(), strict=True)):
            rows.append(
                {"depth": depth, "rank": rank, "positions": int(here.sum()), "predicted": expected, "accepted": share}
            )
    return rows


def calibration_error(model: AcceptanceModel, fates: Fates) -> float:
    """Return the expected calibration error: |predicted - real| share of acceptance, averaged over bins of drafts."""
    predicted = np.concatenate(
        [model.probs(fates.likelihoods[fates.depths == k], k).flatten() for k in np.unique(fates.depths)]
    )
    labels = np.concatenate([fates.labels[fates.depths == k].flatten() for k in np.unique(fates.depths)])
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    return sum(abs(float((predicted - labels)[bins == n].sum())) for n in range(BINS)) / len(labels)
