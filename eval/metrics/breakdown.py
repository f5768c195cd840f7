"""Acceptance where it differs: by place in the answer, by how sure the target is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafthead.data.batch import Ratio
from drafthead.eval.metrics.acceptance import steps_of
from drafthead.models.decoding.step_log import DecodeResult, StepRecord


@dataclass(frozen=True)
class Bin:
    """Steps whose key lies in [low, high); the last bin takes its high too."""

    low: float
    high: float
    mean_accepted_tokens: Ratio
    """Tokens committed / steps; ``den`` is the number of steps."""
    first_accepted: Ratio
    """Steps with an accepted draft / steps that drafted."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; None where nothing was counted."""
        return {
            "low": self.low,
            "high": self.high,
            "steps": int(self.mean_accepted_tokens.den),
            "mean_accepted_tokens": self.mean_accepted_tokens.value,
            "first_accepted": self.first_accepted.value if self.first_accepted.den else None,
        }


def by_position(results: Sequence[DecodeResult], width: int = 32) -> list[Bin]:
    """Acceptance by the answer tokens before the step, in bins of ``width``; empty bins are left out."""
    steps = steps_of(results)
    last = max((step.position for step in steps), default=-1)
    edges = [float(edge) for edge in range(0, last + 1 + width, width)]
    return _binned(steps, lambda step: float(step.position), edges)


def by_entropy(results: Sequence[DecodeResult], bins: int = 5) -> list[Bin]:
    """Acceptance by the target's entropy in nats, in bins of equally many steps.

    Steps without an entropy (nan) are left out; equal quantiles make fewer bins.
    """
    steps = [step for step in steps_of(results) if math.isfinite(step.entropy)]
    if not steps:
        return []
    edges = np.unique(np.quantile([step.entropy for step in steps], np.linspace(0, 1, bins + 1))).tolist()
    return _binned(steps, lambda step: step.entropy, edges if len(edges) > 1 else edges * 2)


def _binned(steps: Sequence[StepRecord], key: Callable[[StepRecord], float], edges: list[float]) -> list[Bin]:
    members: list[list[StepRecord]] = [[] for _ in edges[1:]]
    for step in steps:
        place = int(np.searchsorted(edges, key(step), side="right")) - 1
        members[min(place, len(members) - 1)].append(step)
    return [_bin(low, high, group) for low, high, group in zip(edges, edges[1:], members, strict=False) if group]


def _bin(low: float, high: float, steps: Sequence[StepRecord]) -> Bin:
    drafting = [step for step in steps if step.depth > 0]
    return Bin(
        low,
        high,
        Ratio(sum(step.committed for step in steps), len(steps)),
        Ratio(sum(step.accepted > 0 for step in drafting), len(drafting)),
    )
