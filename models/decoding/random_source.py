"""Random numbers of sampled drafting and sampled verification.

A rule needs Bernoulli decisions and samples of a distribution only, so the same rule runs with random numbers
(``PerRowRng``) and under exact enumeration (``eval/lossless/enumerate.py``).

Shape legend: B rows, V vocabulary, C samples per row.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafthead.data.utils.devices import wide_dtype

DRAFT, VERIFY = 0, 1
"""Streams of random numbers. They are separate, so that drafting does not change what verification draws."""


class RandomSource(Protocol):
    """Decisions and samples for a batch of rows."""

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """Return True with probability min(1, p / q) in active rows: p, q [B] float, active [B] bool -> [B] bool."""
        ...

    def categorical(self, probs: Tensor, offset: int | None = None) -> Tensor:
        """Return one sample of each of [B, C, V] unnormalised distributions, [B, C] int64; of zeros any token.

        ``offset``: sample like a step that starts this many tokens later.
        """
        ...


class PerRowRng:
    """The random numbers of one step, with generators per row.

    A row's numbers depend on its seed, its position and the stream only: not on its neighbours, and not on how many
    numbers other steps have used. The same seed therefore gives the same answer in any batch.
    """

    def __init__(self, seeds: list[int], positions: list[int], stream: int, device: torch.device) -> None:
        """Start from ``seeds`` and ``positions`` (tokens before the step), one per row."""
        self._seeds, self._device, self._dtype = seeds, device, wide_dtype(device)
        self._counters = [4 * position + 2 * stream for position in positions]
        # Decisions and samples use separate generators: a sample must not depend on the number of decisions before it.
        self._generators: dict[tuple[int, int], list[np.random.Generator]] = {}
        self._decisions = torch.zeros(len(seeds), 0, dtype=self._dtype, device=device)
        self._used = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._calls = 0

    def uniform(self, part: int, count: int, offset: int) -> Tensor:
        """Return [B, count] numbers in [0, 1): of decisions (``part`` 0) or samples (1), ``offset`` tokens later."""
        if (part, offset) not in self._generators:
            pairs = zip(self._seeds, self._counters, strict=True)
            self._generators[part, offset] = [_generator(seed, counter + 4 * offset + part) for seed, counter in pairs]
        numbers = torch.from_numpy(np.stack([g.random(count) for g in self._generators[part, offset]])).to(self._dtype)
        # Rounded to float32, a number may become 1.
        return numbers.clamp_(max=1 - torch.finfo(self._dtype).eps / 2).to(self._device, non_blocking=True)

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """Return ``u * q < p`` with the row's next u in [0, 1): never a division, and p = 0 is never accepted."""
        if self._calls >= self._decisions.shape[1]:  # some row may have used up its numbers
            self._decisions = torch.cat([self._decisions, self.uniform(0, _BLOCK, 0)], 1)
        u = self._decisions.gather(1, self._used[:, None])[:, 0]
        self._used = self._used + active
        self._calls += 1
        return active & (u * q < p)

    def categorical(self, probs: Tensor, offset: int | None = None) -> Tensor:
        """Invert the cumulative distribution in float64 (float32 on MPS); a token of probability 0 is never drawn."""
        _, count, vocabulary = probs.shape
        points = self.uniform(1, count, offset or 0)
        cumulative = probs.to(self._dtype).cumsum(-1)
        # u is at most 1 - 2**-53, so the product is below the total, and the token found has a probability.
        drawn: Tensor = torch.searchsorted(cumulative, points[..., None] * cumulative[..., -1:], right=True)[..., 0]
        # Without any mass the last token comes: what is drawn must still be a token.
        return drawn.clamp(max=vocabulary - 1)


def sampling_point(seed: int, position: int) -> float:
    """Return the number in [0, 1) that chooses an answer's token ``position`` from the cumulative distribution."""
    return float(_generator(seed, 4 * position + 2 * VERIFY + 1).random())


def _generator(seed: int, use: int) -> np.random.Generator:
    # As a list the key would pass through floating point, where large (and so negative) seeds become equal.
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, use & _MASK], dtype=np.uint64)))


_MASK = (1 << 64) - 1
_BLOCK = 64
"""Random numbers made at a time: a walk through a tree seldom needs more."""
