"""Cost of a decode step on one machine: verification of n tokens, drafting, and the loop around them."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Self, cast

import numpy as np
from pydantic import Field

from drafthead.settings.schema import NonNegativeFloat, Positive, PositiveFloat, settings


@settings(frozen=True)
class CostModel:
    """Seconds of each part of a step, by ``measure_costs``."""

    verify: Annotated[dict[Positive, PositiveFloat], Field(min_length=1)]
    """By number of tokens: seconds of one verification pass, logits and argmax included."""
    draft: NonNegativeFloat  # seconds to draft a tree over all draft positions
    overhead: NonNegativeFloat  # seconds of a step with drafts outside verification and drafting
    context: int  # number of tokens in the cache while verification and drafting were timed
    prefill: NonNegativeFloat = 0.0  # of the base's pass over a prompt of `context` tokens; 0: not measured
    draft_by_depth: list[NonNegativeFloat] | None = None  # of a chain of depth d, at index d; None: `draft`
    plain_overhead: NonNegativeFloat | None = None  # of a plain step outside verification; None: `overhead`
    draft_prefill: NonNegativeFloat = 0.0  # seconds that the drafter adds to the prefill of `context` tokens
    other_processes_cores: float | None = None  # during the measurement; None: unknown

    def verify_at(self, nodes: float) -> float:
        """Return the seconds of verifying ``nodes`` tokens: linear between sizes, proportional beyond the largest."""
        sizes = sorted(self.verify)
        seconds = float(np.interp(nodes, sizes, [self.verify[n] for n in sizes]))
        return seconds * max(1.0, nodes / sizes[-1])

    def draft_at(self, depth: int) -> float:
        """Return the seconds to draft a tree of ``depth``. Levels beyond the timed ones take as long as the last."""
        table = self.draft_by_depth
        if depth == 0:
            return 0.0
        if table is None:
            return self.draft
        last = len(table) - 1
        if depth <= last:
            return table[depth]
        return table[last] + (depth - last) * (table[last] - table[last - 1])

    def step(self, nodes: float, depth: int) -> float:
        """Return the seconds of a step with a tree of ``nodes`` (root included) and ``depth`` (0: without drafts)."""
        plain = depth == 0 and self.plain_overhead is not None
        overhead = self.plain_overhead if plain else self.overhead
        return self.verify_at(nodes) + cast(float, overhead) + self.draft_at(depth)

    def speedup(self, tokens: float, nodes: float, depth: int) -> float:
        """Return the speedup, without the prefill, if a step with this tree commits ``tokens`` on average."""
        return tokens * self.step(1, 0) / self.step(nodes, depth)

    def mean_step(self, nodes: Mapping[int, float], depth: int) -> float:
        """Return the mean seconds of steps with trees of ``depth``. ``nodes`` maps each tree size to its share of the
        steps, because verification time is not linear in the size."""
        return sum(share * self.step(n, depth) for n, share in nodes.items())

    def answer_speedup(self, tokens: float, step: float, length: float, prompt: float) -> float:
        """Return the speedup for answers of ``length`` tokens to prompts of ``prompt`` tokens, prefill included.
        A step takes ``step`` seconds and commits ``tokens`` on average."""
        autoregressive, speculative = (length * seconds for seconds in (self.step(1, 0), step / tokens))
        share = prompt / self.context
        prefill, drafter = self.prefill * share, self.draft_prefill * share
        return (prefill + autoregressive) / (prefill + drafter + speculative)

    def mean_with(self, other: Self) -> Self:
        """Return the means of both models' times, which must be of the same sizes and depths."""

        def mean(key: str, first: Any, second: Any) -> Any:
            if isinstance(first, Mapping):
                return {n: mean(key, first[n], second[n]) for n in first}
            if isinstance(first, list):
                return [mean(key, *pair) for pair in zip(first, second, strict=True)]
            return first if key == "context" or None in (first, second) else (first + second) / 2

        return type(self)(**{f.name: mean(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the cost model from the values of ``to_json``; JSON has turned the tree sizes into strings."""
        return cls(**{**content, "verify": {int(n): float(seconds) for n, seconds in content["verify"].items()}})
