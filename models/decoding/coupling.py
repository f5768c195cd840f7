"""Drafts that know the random numbers of the output (``sampler.coupled``).

A token is drawn by an exponential race (the Gumbel-max trick): token v arrives at time ``e[v] / p[v]``, with a number
``e[v]`` of the standard exponential distribution for every token of the vocabulary, and the first one is taken. It is v
with probability ``p[v]``. The numbers depend only on the seed and the position in the answer, so a drafter may run the
same race with its own probabilities q, and draft the first arrivals ``e[v] / q[v]``. Where q equals p, they are the
target's own tokens, at any temperature. Drafts cannot change the answer: every token is a function of p and e, with any
drafter and without one (Daliri et al., 2408.07978; several candidates: Rowan et al., 2506.05632).

Shape legend: B rows, F frontier nodes, W draft vocabulary, V target vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# The constants of SplitMix64, a counter-based generator, as signed numbers.
STRIDE, FIRST, SECOND = (
    int(np.uint64(n).astype(np.int64)) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def exponentials(keys: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """Return numbers of the standard exponential distribution, float32 [B, V], one row for each of the int64 ``keys``.
    They are equal on all devices up to rounding. Do not write to the result: it is kept for a while, because those of a
    draft are used again when it is verified, and in one row also in the next steps."""
    return (_of_row if len(keys) == 1 else _of_batch)(keys, vocabulary, device)


def _exponentials(keys: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    state = _counters(vocabulary, device) + torch.tensor(keys, device=device)[:, None]
    shifted = torch.empty_like(state)
    # Without SplitMix64's last shift, which mixes the lower bits: they do not reach a float32. Its other shifts fill
    # with zeros, these with the sign, which saves an operation each and loses one of 64 bits.
    for shift, factor in ((30, FIRST), (27, SECOND)):
        state.bitwise_xor_(torch.bitwise_right_shift(state, shift, out=shifted)).mul_(factor)
    # A small number, which decides for an unlikely token, has as many digits as a large one.
    return state.bitwise_and_((1 << 63) - 1).float().mul_(-(2.0**-63)).log1p_().neg_()


_of_row, _of_batch = lru_cache(maxsize=32)(_exponentials), lru_cache(maxsize=8)(_exponentials)


@lru_cache(maxsize=4)
def _counters(vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(vocabulary, device=device) * STRIDE


@dataclass(frozen=True)
class Coupling:
    """What a drafter knows of the draws of a step."""

    exponentials: Callable[[int], Tensor]  # the numbers [B, V] of the draws of a tree's level, from 1
    warp: Callable[[Tensor], Tensor]  # the output's temperature, top-p and so on, of logits [N, W]
    temperature: float

    def logits(self, logits: Tensor, d2t: Tensor, level: int) -> Tensor:
        """Return T log(q / e) [B, F, W] up to a constant, of which the largest arrives first, for the draft ``logits``
        [B, F, W] of the nodes of a level. ``d2t`` [W] are the target ids of the draft ids.

        With the factor T, the temperature, they are ``logits - T log e``, whose softmax says how likely a token arrives
        first about as well as that of ``logits`` does at temperature 0. One calibration therefore serves both: fitted
        to a DSpark head at temperatures 0.2, 0.5, 0.7 and 1, the weight of ``AcceptanceModel`` is 0.79, 0.78, 0.82 and
        0.76."""
        warped = self.warp(logits.float().flatten(0, 1)).view(logits.shape)
        return (warped - self.exponentials(level)[:, None, d2t].log()).mul_(self.temperature)

    def chance(self, prob: float, row: int, token: int, level: int) -> float:
        """Return the probability that a token of a level arrives first, if it was expected with ``prob`` without the
        numbers. The others' first arrival is exponential with rate 1 - ``prob``."""
        return math.exp(-float(self.exponentials(level)[row, token]) * (1 - prob) / prob)
