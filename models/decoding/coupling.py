"""Drafts that know the random numbers of the output (``sampler.coupled``).

Tokens are drawn by exponential races (the Gumbel-max trick). Every token v of the vocabulary gets a number ``e[v]`` of
the standard exponential distribution and arrives at time ``e[v] / p[v]``. The first to arrive is v with probability
``p[v]``. The numbers depend only on the seed and the position in the answer. A drafter can therefore run the same race
with its own probabilities q, and draft the tokens that arrive first. Where q equals p, these are the target's own
tokens, at any temperature. Drafts cannot change the answer, because every token is a function of p and e (Daliri et
al., 2408.07978; several candidates: Rowan et al., 2506.05632).

Shape legend: B rows, F frontier nodes, W draft vocabulary, V target vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from drafthead.system.devices import on_device

LEAST = 1e-6  # chance: a score of 0 could not be scaled
# The constants of SplitMix64, a counter-based generator, as signed numbers.
STRIDE, FIRST, SECOND = (
    int(np.uint64(n).astype(np.int64)) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


# Just below 2**-63: the largest number that float32 rounds to is then below 1, whose token would never arrive.
SCALE = 2.0**-63 * (1 - 2.0**-24)


def exponentials(keys: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """Return numbers of the standard exponential distribution, float32 [B, V], one row for each of the int64 ``keys``.
    They are equal on all devices up to rounding."""
    state = _counters(vocabulary, device) + on_device(keys, device)[:, None]
    shifted = torch.empty_like(state)
    # Without SplitMix64's last shift, which mixes the lower bits: they do not reach a float32. Its other shifts fill
    # with zeros, these with the sign, which saves an operation each and loses one of 64 bits.
    for shift, factor in ((30, FIRST), (27, SECOND)):
        state.bitwise_xor_(torch.bitwise_right_shift(state, shift, out=shifted)).mul_(factor)
    # A small number, which decides for an unlikely token, has as many digits as a large one.
    return state.bitwise_and_((1 << 63) - 1).float().mul_(-SCALE).log1p_().neg_()


@lru_cache(maxsize=4)
def _counters(vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(vocabulary, device=device) * STRIDE


class Races:
    """Store of the random numbers of races. A draft's numbers are used again when it is verified, and in a single row
    also in the next steps, which draft some of the same positions."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}

    def numbers(self, keys: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
        """Return ``exponentials``; do not write to them."""
        if keys not in self._known:
            self._known[keys] = exponentials(keys, vocabulary, device)
        return self._known[keys]

    def forget(self, kept: int) -> None:
        """Forget all but the ``kept`` latest calls."""
        for keys in list(self._known)[: len(self._known) - kept]:
            del self._known[keys]


@dataclass(frozen=True)
class Coupling:
    """Knowledge of a step's draws on which drafts may depend: the output's random numbers and sampling settings."""

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

    def at(self, tokens: Tensor, depths: Tensor, deepest: int) -> Tensor:
        """Return the numbers [B, N] of drafts ``tokens`` [B, N] of the levels ``depths`` [B, N]; 0 for roots."""
        numbers = torch.zeros(tokens.shape, device=tokens.device)
        for level in range(1, deepest + 1):
            numbers = torch.where(depths == level, self.exponentials(level).gather(1, tokens), numbers)
        return numbers


def chance_of(prob: float, number: float) -> float:
    """Return the probability that a token with the random number ``number`` arrives first, if it does so with ``prob``
    for an unknown number. The others' first arrival is exponential with rate 1 - ``prob``."""
    return max(LEAST, math.exp(-number * (1 - prob) / prob))
