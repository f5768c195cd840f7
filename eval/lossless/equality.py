"""Token-for-token comparison with autoregressive decoding, and the cause of a difference: rounding or a fault. Sums in
another order differ in the last bits, so two nearly equal logits may swap. This is a tie and not a fault. For other
differences, the target is computed again in two ways at the first differing position; the results tell the faults apart
(:func:`compare_outputs`)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.random_source import VERIFY, PerRowRng, sampling_point
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig, DecodeResult, DecodeState

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.75}
"""Logits closer than this may swap by rounding. On SmolLM2-135M, one forward pass over 40 tokens was compared with one
pass per token. The difference between two logits of the eight likeliest tokens (their logits are 24 to 28) changed by
up to 3e-5 in float32, 0.05 in float16 and 0.5 in bfloat16."""


@torch.inference_mode()
def fresh_logits(base: BaseModel, ids: list[int]) -> torch.Tensor:
    """Return the target's logits [V] after ``ids``, from one forward pass over all ids."""
    tokens = torch.tensor([ids], device=base.device)
    hidden = base.forward(tokens, base.new_cache(len(ids))).final
    return base.logits(hidden[:, -1])[0]


def logit_margin(base: BaseModel, ids: list[int], expected: list[int], other: list[int], position: int) -> float:
    """Return the distance between the target's logits of two answers' tokens; inf if one has ended."""
    if position >= min(len(expected), len(other)):
        return float("inf")
    logits = fresh_logits(base, ids + expected[:position])
    return abs(float(logits[expected[position]] - logits[other[position]]))


@torch.inference_mode()
def draw_margin(
    base: BaseModel, sampler: Sampler, seed: int, ids: list[int], expected: list[int], other: list[int], position: int
) -> float:
    """Return how far the random number at ``position`` is from choosing each of two answers' tokens. A token is chosen
    if the number falls into its interval of the cumulative distribution. The result is the larger of the number's
    distances from the intervals of both tokens. With ``sampler.coupled``, it is the difference between logits that
    would make both tokens arrive first at once."""
    before = ids + expected[:position]
    context = torch.tensor([before], device=base.device)
    probs = sampler.probs(fresh_logits(base, before)[None], context)
    if sampler.coupled:
        draws = PerRowRng([seed], [position], VERIFY, base.device)
        arrivals = (draws.exponentials(probs.shape[1], 1) / probs)[0].log() * sampler.temperature
        return float(max(arrivals[expected[position]], arrivals[other[position]]) - arrivals.min())
    probs = probs[0].cpu().double()
    ends = (probs / probs.sum()).cumsum(0)
    point = sampling_point(seed, position)
    return max(
        max(point - float(ends[token]), float(ends[token] - probs[token]) - point, 0.0)
        for token in (expected[position], other[position])
    )


@torch.inference_mode()
def recompute_tokens(
    base: BaseModel, drafter: Drafter, config: DecodeConfig, ids: list[int], result: DecodeResult, position: int
) -> tuple[int | None, int | None]:
    """Compute the target's greedy choice at ``position`` (from 0) of an answer again, in two ways. The first is one
    forward pass over the whole prefix, into an empty cache. The second repeats the decoding step on a cache freshly
    filled with the prefix; None if no step reaches the position."""
    fresh = int(fresh_logits(base, ids + result.tokens[:position]).argmax())
    step = next((s for s in result.steps if s.position <= position < s.position + s.committed), None)
    if step is None or step.position < 1:
        return fresh, None
    before = ids + result.tokens[: step.position - 1]
    state = DecodeState.empty(base, drafter, config, 1, len(before) + config.draft_config.nodes + 1)
    state.read_prompts([before], first=torch.tensor([result.tokens[step.position - 1]], device=base.device))
    (committed,) = state.step([0], [step.position]).tokens
    offset = position - step.position
    return fresh, committed[offset] if offset < len(committed) else None


class Diagnosis(StrEnum):
    """Cause of a difference from autoregressive decoding."""

    TIE = "tie"
    MASK = "mask or position fault in tree verification"
    CACHE = "cache fault"
    AUTOREGRESSIVE = "fault in autoregressive decoding"
    STOP = "one answer ends early"
    UNKNOWN = "unexplained"


@dataclass(frozen=True)
class Equality:
    """Result of comparing an answer with that of autoregressive decoding, token for token."""

    same: bool
    position: int | None = None  # first answer position, from 0, that differs
    tokens: tuple[int, int] | None = None  # the expected token and the answer's token there; None if one answer ended
    margin: float | None = None  # between the target's logits of the two tokens (sampled answers: `draw_margin`)
    near_tie: bool = False  # the margin is below the dtype's (or an engine's) tolerance
    diagnosis: Diagnosis | None = None


def compare_outputs(
    expected: list[int],
    tokens: list[int],
    margin: Callable[[int], float],
    recompute: Callable[[int], tuple[int | None, int | None]] | None = None,
    dtype: torch.dtype = torch.float32,
    tie: float | None = None,
) -> Equality:
    """Compare an answer with that of autoregressive decoding (``expected``), and explain the first difference.

    ===========================  ===================  ==========================================================
    fresh_token                  cached_token         diagnosis
    ===========================  ===================  ==========================================================
    any, margin below tolerance  any                  tie
    the answer's                 any                  fault in autoregressive decoding: its cache or its forward
    the expected one             the expected one     cache fault: with a fresh cache the step is right
    the expected one             anything else        mask or position fault: a fresh cache does not repair it
    another, or not recomputed   any                  unexplained
    the expected one             not recomputed       unexplained
    ===========================  ===================  ==========================================================

    ``margin`` takes the first differing position and returns the gap between the target's logits of the two tokens
    there. It is not called if only one answer has a token there (diagnosis ``STOP``). ``recompute`` returns both tokens
    of :func:`recompute_tokens`, and is called only if the margin is not a tie; without it such a difference stays
    unexplained. A margin below ``tie`` is a tie (default: the dtype's ``TOLERANCE``). Other engines need a larger
    limit, because they order more sums differently."""
    if expected == tokens:
        return Equality(same=True)
    shared = min(len(expected), len(tokens))
    position = next((i for i in range(shared) if expected[i] != tokens[i]), shared)
    if position == shared:
        return Equality(same=False, position=position, diagnosis=Diagnosis.STOP)
    distance = abs(margin(position))
    near = distance < (TOLERANCE[dtype] if tie is None else tie)
    fresh, cached = recompute(position) if recompute is not None and not near else (None, None)
    if near:
        diagnosis = Diagnosis.TIE
    elif fresh == tokens[position]:
        diagnosis = Diagnosis.AUTOREGRESSIVE
    elif fresh != expected[position] or cached is None:
        diagnosis = Diagnosis.UNKNOWN
    else:
        diagnosis = Diagnosis.CACHE if cached == expected[position] else Diagnosis.MASK
    pair = (expected[position], tokens[position])
    return Equality(False, position, pair, margin=distance, near_tie=near, diagnosis=diagnosis)


def equality_rate(equalities: Sequence[Equality], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Count equal answers ("same"), all ("of"), and others by diagnosis; in bfloat16 ties are common."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "same": sum(equality.same for equality in equalities),
        "of": len(equalities),
        "found": dict(Counter(equality.diagnosis for equality in equalities if equality.diagnosis)),
    }
