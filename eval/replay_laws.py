"""Chances of acceptance along finished texts, from one pass over them: what ``eval/replay.py`` works on.

A text must be a sample of the target's own law (plain decoding's output, at the temperature in question). Then it is
also a sample of what an exact rule commits, and it is only left to say how likely each of its tokens was accepted
rather than drawn as a bonus. Only the text's own path is ever needed: drafts that leave it end a step.

Shape legend: n texts' positions at a time, K draft positions, S trials at a node, V vocabulary.
"""

import torch
from torch import Tensor

from drafthead.data.contracts import Siblings


def trial_chances(
    target: Tensor, draft: Tensor, tokens: Tensor, siblings: Siblings, width: int, generator: torch.Generator
) -> Tensor:
    """P(the committed ``tokens`` were accepted as trial s | they were committed): [n, V], [n, V], [n] -> [n, width].

    A trial of law q against a residual P accepts x with mass ``min(q(x), P(x))`` and leaves
    ``P' = norm(max(P - q, 0))``. What is committed at the node is x with mass P(x) all told, so given x the trial
    accepts with probability ``min(1, q(x) / P(x))``, and the next one against P' likewise: the masses telescope.
    For one trial it is ``min(1, q(x) / p(x))``, whose mean over x ~ p is ``sum(min(p, q))``.

    Without replacement the next law depends on the rejected token, which is drawn here from its own law
    ``norm(max(q - P, 0))``: the estimate is unbiased, and products over independently drawn positions stay so.

    Args:
        target: the target's laws after warping.
        draft: laws that the siblings are drawn from; the committed path's.
        tokens: the text's token at each node.
        siblings: how the siblings are drawn, not deterministic.
        width: trials.
        generator: for rejected tokens without replacement.
    """
    law, trial = target.double(), draft.double()
    at = tokens[:, None]
    left = torch.ones(len(tokens), dtype=torch.float64, device=tokens.device)
    chances = []
    for s in range(width):
        p, q = law.gather(1, at)[:, 0], trial.gather(1, at)[:, 0]
        # A token of probability 0 (rounding moved it across a warper's cut) counts as the law's only one.
        hazard = torch.where(p > 0, (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0), q)
        chances.append(left * hazard)
        left = left * (1.0 - hazard)
        if s + 1 < width:
            excess = (trial - law).clamp(min=0)
            law = _normalised((law - trial).clamp(min=0), law)
            if siblings is Siblings.WITHOUT_REPLACEMENT:
                possible = excess.sum(-1, keepdim=True) > 0
                rejected = torch.where(possible, excess, 1.0).multinomial(1, generator=generator)
                trial = trial.scatter(1, rejected, 0.0)
                trial = _normalised(trial, torch.zeros_like(trial))  # no token is left: a trial that accepts nothing
    return torch.stack(chances, -1)


def _normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    total = masses.sum(-1, keepdim=True)
    return torch.where(total > 0, masses / total.clamp(min=torch.finfo(masses.dtype).tiny), otherwise)


def block_chances(target: Tensor, draft: Tensor) -> Tensor:
    """Block verification (Sun et al., 2403.10444) of a chain: [n, K] p(x), [n, K] q(x) on the text -> [n, K].

    It accepts at least k drafts of a drafted prefix with probability ``a_k = min(1, a_{k-1} p(x_k) / q(x_k))``. Seen
    from the committed text the prefix was drafted with probability ``R_k = prod(q / p)`` of its own, and
    ``a_k R_k = min(a_{k-1} R_{k-1}, R_k)``: the running minimum of R, where token by token it is the product of
    ``min(1, q / p)``. Returned is each position's factor, so that a chain's products are these minima.
    """
    p, q = target.double(), draft.double()
    ratio = torch.where(p > 0, q / p.clamp(min=torch.finfo(p.dtype).tiny), q)
    reached = torch.cat([torch.ones_like(ratio[:, :1]), ratio.cumprod(1)], 1).cummin(1).values
    above = reached[:, :-1]
    return torch.where(above > 0, reached[:, 1:] / above.clamp(min=torch.finfo(p.dtype).tiny), 0.0)


def rank_chances(logits: Tensor, tokens: Tensor, d2t: Tensor, width: int) -> Tensor:
    """Deterministic siblings: 1 where the draft's candidate s is the text's token; [n, W] logits -> [n, width]."""
    found = logits.new_zeros(len(tokens), width, dtype=torch.float64)
    match = d2t[None, :] == tokens[:, None]
    true = torch.where(match, logits, -torch.inf).amax(-1, keepdim=True)
    rank = (logits > true).sum(-1)
    inside = match.any(-1) & (rank < width)
    found[inside, rank[inside]] = 1.0
    return found
