"""Are finished answers samples of the base? Acceptance simulated along other answers would be wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStates
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.sampling import Sampler
from drafthead.system.devices import wide

NEAR_TIES, IMPOSSIBLE_SHARE, Z_LIMIT, NATS_LIMIT = 2, 0.02, 6.0, 0.1
"""Limits of ``check_likelihood``. Answers are rejected if more than NEAR_TIES + IMPOSSIBLE_SHARE * tokens have
probability 0, or if their mean surprisal deviates by more than Z_LIMIT standard errors and NATS_LIMIT nats. A few
impossible tokens are rounding: a pass of another shape may swap two nearly equal logits, above all in 16 bits."""
MAX_VALUES = 1 << 23  # probabilities in one tensor, to bound the memory (8 bytes each in float64)


def target_probs(base: BaseModel, hidden: Tensor, contexts: list[list[int]], sampler: Sampler) -> Tensor:
    """Return the base's next-token probabilities [positions, V]; ``contexts`` are the ids so far, for penalties."""
    logits = base.logits(hidden)
    if not sampler.reads_context:
        return sampler.probs(logits)
    rows = zip(logits, contexts, strict=True)
    return torch.cat([sampler.probs(row[None], torch.tensor([ids], device=row.device)) for row, ids in rows])


def surprisal_sums(
    base: BaseModel, texts: Sequence[Answer], base_hidden: list[HiddenStates], sampler: Sampler
) -> Tensor:
    """Return sums over the answers' tokens, [4] float64, by which :func:`check_likelihood` judges the answers. They are
    the tokens, the impossible ones (probability 0), and over the possible ones surprisal minus entropy, and the
    surprisal's variance."""
    size, sums = max(1, MAX_VALUES // base.vocab_size), torch.zeros(4, dtype=torch.float64)
    for text, states in zip(texts, base_hidden, strict=True):
        for start in range(text.boundary, len(text.ids), size):
            span = range(start, min(start + size, len(text.ids)))
            hidden = states.final[0, span.start - 1 : span.stop - 1]
            probs = wide(target_probs(base, hidden, [text.ids[:at] for at in span], sampler))
            tokens = torch.tensor([[text.ids[at]] for at in span], device=base.device)
            surprisal = -probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
            possible = probs.gather(1, tokens)[:, 0] > 0
            mean = (probs * surprisal).sum(-1)
            variance = (probs * (surprisal - mean[:, None]) ** 2).sum(-1)
            excess = surprisal.gather(1, tokens)[:, 0] - mean
            counted = [possible.new_ones(len(tokens)), ~possible, excess * possible, variance * possible]
            sums += torch.stack([wide(each).sum() for each in counted]).cpu()
    return sums


def check_likelihood(sums: Tensor, sampler: Sampler) -> None:
    """Reject answers that ``sampler`` is very unlikely to have drawn from the base, by their ``surprisal_sums``."""
    tokens, impossible, excess, variance = sums.tolist()
    off, z = excess / max(1, tokens), abs(excess) / max(variance, 1e-12) ** 0.5
    if impossible > NEAR_TIES + IMPOSSIBLE_SHARE * tokens or (z > Z_LIMIT and abs(off) > NATS_LIMIT):
        raise UserError(
            f"the answers are not samples of the target at {sampler}: {impossible:.0f} of {tokens:.0f} tokens have "
            f"probability 0, and the mean surprisal of the others is {off:+.2f} nats from the target's entropy; "
            "simulate with the sampler that made the answers"
        )
