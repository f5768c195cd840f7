"""What one step costs on this machine: verification of n tokens, drafting, and the loop around them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Self

import torch

from drafthead.data.contracts import Features, TokenTree
from drafthead.eval.decode import decode
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead
from drafthead.models.kv_cache import KVCache

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Tree sizes measured, root included; others are interpolated."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds. Medians of interleaved repeats."""

    verify: dict[int, float]
    """v(n): one verification pass over n tokens, logits and argmax included."""
    draft: float
    """c: drafting one tree."""
    overhead: float
    """o: everything else in a step."""
    context: int
    """Tokens already in the cache."""

    def verify_at(self, nodes: int) -> float:
        """v(n), linearly interpolated between measured sizes."""
        sizes = sorted(self.verify)
        if nodes >= sizes[-1]:
            return self.verify[sizes[-1]] * nodes / sizes[-1]
        upper = next(n for n in sizes if n >= nodes)
        lower = max(n for n in sizes if n <= nodes)
        if upper == lower:
            return self.verify[upper]
        part = (nodes - lower) / (upper - lower)
        return self.verify[lower] * (1 - part) + self.verify[upper] * part

    def step(self, nodes: int) -> float:
        """A whole step with a tree of that size; a tree of 1 drafts nothing."""
        return self.verify_at(nodes) + self.overhead + (self.draft if nodes > 1 else 0.0)

    def to_json(self) -> dict[str, object]:
        """Plain values, for ``eval.json`` and ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """The costs that ``to_json`` wrote; JSON turned the sizes into text.

        Raises:
            KeyError, TypeError, ValueError: ``found`` is something else.
        """
        return cls(**{**found, "verify": {int(n): float(seconds) for n, seconds in found["verify"].items()}})


@torch.inference_mode()
def measure_costs(base: BaseModel, head: DraftHead, context: int = 200, repeats: int = 9) -> StepCosts:
    """Time every part of a step on random tokens after ``context`` tokens (timing does not depend on the ids).

    A base that reads less than twice ``context`` is timed after half of what it reads, and only trees that fit into
    the other half are: larger ones are extrapolated.
    """
    generator = torch.Generator().manual_seed(0)
    context = min(context, base.max_context // 2)
    sizes = [n for n in SIZES if n <= context]
    ids = torch.randint(0, base.vocab_size, (1, context), generator=generator).to(base.device)
    cache = base.new_cache(context + max(sizes))
    hidden = base.read(ids, cache)
    state = head.observe(head.init_state(1), ids, Features(final=hidden))
    times: dict[int, list[float]] = {n: [] for n in sizes}
    drafts: list[float] = []
    tree = TokenTree.from_paths([(r,) for r in range(4)] + [(0,) * d for d in range(2, head.depth + 1)])
    for repeat in range(repeats + 2):
        for n in sizes:
            seconds = _timed(base, partial(_verify, base, ids[:, :n], cache))
            if repeat >= 2:
                times[n].append(seconds)
        seconds = _timed(base, partial(head.draft, state, ids[:, -1], tree))
        if repeat >= 2:
            drafts.append(seconds)
    new = min(24, base.max_context - context)
    result = decode(base, head, ids[0].tolist(), max_new_tokens=new, tree=tree, ignore_eos=True)
    overhead = median(s.total_s - s.draft_s - s.verify_s for s in result.steps)
    verify = {n: median(values) for n, values in times.items()}
    return StepCosts(verify=verify, draft=median(drafts), overhead=overhead, context=context)


def _verify(base: BaseModel, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    # A star: every drafted token a child of the root. Cost depends on the number of nodes, not on the shape.
    tree = TokenTree.from_paths([(r,) for r in range(ids.shape[1] - 1)])
    tokens: torch.Tensor = base.logits(base.verify(ids, tree, cache)).argmax(-1)
    cache.roll_back(cache.length)
    return tokens


def _timed(base: BaseModel, work: Callable[[], object]) -> float:
    synchronise = base.synchronise
    synchronise()
    started = perf_counter()
    work()
    synchronise()
    return perf_counter() - started
