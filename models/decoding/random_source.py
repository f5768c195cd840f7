"""Random numbers of sampled drafting and sampled verification.

An acceptance rule only asks a ``RandomSource`` for Bernoulli decisions and samples. The same rule therefore runs with
random numbers (``PerRowRng``) and with enumeration of all outcomes (``eval/lossless/enumerate.py``).

Shape legend: B rows, V vocabulary, C samples per row.
"""

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafthead.models.decoding.coupling import Races
from drafthead.system.devices import wide_dtype

DRAFT, VERIFY = 0, 1  # separate streams of random numbers, so that drafting does not change the numbers of verification


class RandomSource(Protocol):
    """Random decisions and samples for a batch of rows."""

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        """Return one decision per row, [B] bool: True with probability min(1, p / q), False if not ``active`` [B]."""
        ...

    def categorical(self, probs: Tensor, offset: int | None = None) -> Tensor:
        """Return a sample of each unnormalised distribution: ``probs`` [B, C, V] -> [B, C] int64. A distribution of
        zeros gives an arbitrary token. With ``offset`` (0 or more), they are the answer's own tokens, those of a step
        that starts this many tokens later; these may be drawn by races."""
        ...


class PerRowRng:
    """The random numbers of one decode step, from separate generators for each row. They depend only on the row's seed,
    its position and the stream, so the same seed gives the same answer in any batch."""

    def __init__(
        self, seeds: list[int], positions: list[int], stream: int, device: torch.device, races: Races | None = None
    ) -> None:
        """``positions``: tokens in each row's answer before the step. ``stream``: ``DRAFT`` or ``VERIFY``. With
        ``races``, which keep the numbers, the answer's own tokens are drawn by them."""
        self._seeds, self._device, self._dtype, self._races = seeds, device, wide_dtype(device), races
        self._counters = [4 * position + 2 * stream for position in positions]
        # Decisions and samples use separate generators: a sample must not depend on the number of decisions before it.
        self._generators: dict[tuple[bool, int], list[np.random.Generator]] = {}
        self._decisions = torch.zeros(len(seeds), 0, dtype=self._dtype, device=device)
        self._used = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._calls = 0

    def uniform(self, samples: bool, count: int, offset: int) -> Tensor:
        """Return the next ``count`` numbers in [0, 1) of each row, of a step that starts ``offset`` tokens later.
        ``samples``: those of ``categorical``, which ``bernoulli`` does not use."""
        key = samples, offset
        if key not in self._generators:
            pairs = zip(self._seeds, self._counters, strict=True)
            self._generators[key] = [_generator(seed, counter + 4 * offset + samples) for seed, counter in pairs]
        numbers = torch.from_numpy(np.stack([g.random(count) for g in self._generators[key]])).to(self._dtype)
        # Rounded to float32, a number may become 1.
        return numbers.clamp_(max=1 - torch.finfo(self._dtype).eps / 2).to(self._device, non_blocking=True)

    def bernoulli(self, p: Tensor, q: Tensor, active: Tensor) -> Tensor:
        if self._calls >= self._decisions.shape[1]:  # some row may have used up its numbers
            self._decisions = torch.cat([self._decisions, self.uniform(False, _BLOCK, 0)], 1)
        u = self._decisions.gather(1, self._used[:, None])[:, 0]
        self._used = self._used + active
        self._calls += 1
        return active & (u * q < p)

    def exponentials(self, vocabulary: int, level: int) -> Tensor:
        """Return the numbers [B, V] of the races for each row's next token (``level`` 1), or a later one."""
        races = Races() if self._races is None else self._races
        rows = zip(self._seeds, self._counters, strict=True)
        keys = tuple(race_key(seed, counter + 4 * (level - 1) + 1) for seed, counter in rows)
        return races.numbers(keys, vocabulary, self._device)

    def categorical(self, probs: Tensor, offset: int | None = None) -> Tensor:
        """Sample each distribution [B, C, V] by inverting its cumulative sum in float64 (MPS: float32), or by a race. A
        token of probability 0 is never drawn, unless all have probability 0."""
        _, count, vocabulary = probs.shape
        if self._races is not None and offset is not None:
            return (probs / self.exponentials(vocabulary, offset + 1)[:, None]).argmax(-1)
        points = self.uniform(True, count, offset or 0)
        cumulative = probs.to(self._dtype).cumsum(-1)
        # u is at most 1 - 2**-53, so the product is below the total, and the token has a positive probability.
        drawn: Tensor = torch.searchsorted(cumulative, points[..., None] * cumulative[..., -1:], right=True)[..., 0]
        # If all probabilities are 0, searchsorted returns V, which is not a token.
        return drawn.clamp(max=vocabulary - 1)


def sampling_point(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that draws the token at ``position`` (from 0) of an answer, without drafts, or
    with top-k drafts and the exact rule (``acceptance.naive_sampling``)."""
    return float(_generator(seed, 4 * position + 2 * VERIFY + 1).random())


@lru_cache(maxsize=1024)
def race_key(seed: int, use: int) -> int:
    return int(_generator(seed, use).integers(-(1 << 63), (1 << 63) - 1))


def _generator(seed: int, use: int) -> np.random.Generator:
    # As a list, the key would be converted to floating point, where large (also negative) seeds become equal.
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, use & _MASK], dtype=np.uint64)))


_MASK = (1 << 64) - 1
_BLOCK = 64  # number of random numbers that are generated at once; a walk through a tree seldom needs more
