"""Where sampled drafting and sampled verification get their chance from.

A rule asks for an accept/reject decision or for a sample of a law, and nothing else, so the same rule runs with
random numbers (``PerRowRng``) and under exact enumeration (``eval/certify.py``).

Shape legend: B rows, V vocabulary, C samples per row.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

DRAFT, VERIFY = 0, 1
"""Streams of random numbers: drafting must not move what verification draws."""


class RandomSource(Protocol):
    """Decisions and samples for a batch of rows."""

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """Accept with probability min(1, p / q); p, q [B] float, active [B] bool. [B] bool, false where inactive."""
        ...

    def categorical(self, probs: Tensor) -> Tensor:
        """One sample of each of [B, C, V] laws, which need not be normalised: [B, C] int64. Of a law of zeros any."""
        ...


class PerRowRng:
    """Random numbers of one step, from a generator per row.

    A row's numbers depend on its seed, its position and the stream only: not on its neighbours, and not on how many
    numbers other steps have used. So the same seed gives the same text whatever the batch.
    """

    def __init__(self, seeds: list[int], positions: list[int], stream: int, device: torch.device) -> None:
        """``seeds`` and ``positions`` (tokens before the step), one per row."""
        # Decisions and samples from generators of their own: a sample must not depend on how many trials came before.
        self._generators, self._samplers = (
            [
                _generator(seed, 4 * position + 2 * stream + part)
                for seed, position in zip(seeds, positions, strict=True)
            ]
            for part in (0, 1)
        )
        self._device = device
        self._decisions: Tensor | None = None
        self._used = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._asked = 0

    def _uniform(self, generators: list[np.random.Generator], count: int) -> Tensor:
        return torch.from_numpy(np.stack([g.random(count) for g in generators])).to(self._device)

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """``u * q < p`` with the row's next u in [0, 1): never a division, and p = 0 is never accepted."""
        if self._decisions is None:
            self._decisions = self._uniform(self._generators, _BLOCK)
        elif self._asked >= self._decisions.shape[1]:  # some row may have used up its numbers
            self._decisions = torch.cat([self._decisions, self._uniform(self._generators, _BLOCK)], 1)
        u = self._decisions.gather(1, self._used[:, None])[:, 0]
        self._used = self._used + active
        self._asked += 1
        return active & (u * q < p)

    def categorical(self, probs: Tensor) -> Tensor:
        """Inverse of the cumulative law, in float64; a token of probability 0 is never drawn, but from an empty law."""
        _, count, vocabulary = probs.shape
        points = self._uniform(self._samplers, count)
        cumulative = probs.double().cumsum(-1)
        total = cumulative[..., -1:]
        # u is at most 1 - 2**-53, so the product is below the total, and the token found has a probability.
        drawn: Tensor = torch.searchsorted(cumulative, points[..., None] * total, right=True)[..., 0]
        # From a law without any mass the last token comes: what is drawn must still be a token.
        return drawn.clamp(max=vocabulary - 1)


def _generator(seed: int, use: int) -> np.random.Generator:
    # As a list the key would pass through floating point, where large (and so negative) seeds become equal.
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, use & _MASK], dtype=np.uint64)))


_MASK = (1 << 64) - 1
_BLOCK = 64
"""Random numbers made at a time: a walk through a tree seldom needs more."""
