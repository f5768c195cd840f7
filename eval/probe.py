"""Recomputations of the target at a place where two answers differ: rounding, or which fault?"""

import torch

from drafthead.data.contracts import DecodeResult
from drafthead.eval.session import Policy, Session
from drafthead.models.base import BaseModel
from drafthead.models.coins import VERIFY, RowCoins
from drafthead.models.drafter import Drafter


@torch.inference_mode()
def fresh_logits(base: BaseModel, ids: list[int]) -> torch.Tensor:
    """[V] the target's logits after ``ids`` in one forward over all of them."""
    tokens = torch.tensor([ids], device=base.device)
    hidden = base.read(tokens, base.new_cache(len(ids)))
    return base.logits(hidden[:, -1])[0]


def logit_margin(base: BaseModel, ids: list[int], plain: list[int], other: list[int], position: int) -> float:
    """Distance of the target's logits of the two answers' tokens at ``position``; infinite where one has ended."""
    if position >= min(len(plain), len(other)):
        return float("inf")
    logits = fresh_logits(base, ids + plain[:position])
    return abs(float(logits[plain[position]] - logits[other[position]]))


@torch.inference_mode()
def probe_tokens(
    base: BaseModel, drafter: Drafter, policy: Policy, ids: list[int], result: DecodeResult, position: int
) -> tuple[int | None, int | None]:
    """The target's choice at answer position ``position``, computed again in two ways.

    Returns:
        ``fresh_token``: in one forward over the whole prefix, without a cache; ``cached_token``: by verifying the same
        step's tree again on a cache freshly filled with the prefix. None where no step committed that position.
    """
    fresh = int(fresh_logits(base, ids + result.tokens[:position]).argmax())
    step = next((s for s in result.steps if s.position <= position < s.position + s.committed), None)
    if step is None or step.position < 1:
        return fresh, None
    before = ids + result.tokens[: step.position - 1]
    session = Session(base, drafter, policy, 1, len(before) + policy.plan.nodes + 1)
    session.read_prompts([before], RowCoins([0], [0], VERIFY, base.device))
    session.last = torch.tensor([result.tokens[step.position - 1]], device=base.device)
    outcome = session.step([0], [step.position])
    committed = outcome.tokens[0, : int(outcome.counts[0])].tolist()
    place = position - step.position
    return fresh, committed[place] if place < len(committed) else None
