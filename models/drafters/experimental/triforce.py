"""The target drafts for itself over selected positions of its cache (TriForce, 2404.11912).

A policy selects a fixed number (budget) of positions of the target's cache, and the target drafts with attention to
these alone. The drafts are verified with the whole cache. The prefill is shared, and tokens committed since the
selection are copied from the target's cache. With an inner drafter (prompt lookup, a draft model), drafting is itself
speculative decoding. This is TriForce's hierarchy, with an exact inner rule.

Differences from the reference code:

- Queries that share a key/value head are averaged, so grouped-query attention works.
- The latest chunk is always kept.
- The selection is renewed every ``refresh`` tokens, by a pass of the last token over the whole cache; the reference
  never renews it.
- After a rejection of an inner draft, the residual distribution is sampled. The reference samples the draft
  distribution of the middle model, which is biased.

Shape legend: L layers, H heads of keys and values, E head width, S kept positions, n positions in the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import BaseHidden
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import KeyValueShape
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.drafters.experimental.vertical_cascade import NestedSession, VerticalCascade
from drafthead.models.kernels.attention import captured_queries

POLICIES, DEFAULT_POLICY = "recent, sinks:TOKENS, retrieval:CHUNK", "retrieval:8"


@dataclass(frozen=True)
class Policy:
    """The rule by which positions of the target's cache are selected for drafting."""

    name: str
    """``recent``: the last positions. ``sinks``: the first ``size`` and the last ones (StreamingLLM, 2309.17453).
    ``retrieval``: per head, the first chunk of ``size`` positions, the latest positions, and of the chunks between
    them those whose mean key has the largest dot product with the last token's query."""
    size: int = 0
    """Number of first positions (``sinks``) or positions per chunk (``retrieval``), at least 1; 0 for ``recent``."""

    @classmethod
    def parse(cls, text: str) -> "Policy":
        name, _, size = text.partition(":")
        if (name == "recent" and not size) or (name in ("sinks", "retrieval") and size.isdigit() and int(size) > 0):
            return cls(name, int(size or 0))
        raise UserError(f"unknown policy {text!r} for budget:POSITIONS; give one of {POLICIES}")

    def select(self, budget: int, keys: Tensor, queries: list[Tensor] | None) -> Tensor:
        """Select ``budget`` = S positions of a cache (or all n) per layer and key head: [L, H, S] int64, ascending.
        ``keys`` [L, H, n, E] are the cache's. ``queries`` [1, heads, 1, E] of each layer, only for ``retrieval``, are
        those of the last token, which follows the cache's positions."""
        layers, heads, count, width = keys.shape
        if count <= budget:
            return torch.arange(count, device=keys.device).expand(layers, heads, -1)
        if self.name != "retrieval":
            first = min(self.size, budget - 1)
            last = torch.arange(count - (budget - first), count, device=keys.device)
            return torch.cat([torch.arange(first, device=keys.device), last]).expand(layers, heads, -1)
        assert queries is not None
        # Example: 29 positions, budget 16, size 4: the last 4 are kept, and 3 of the 6 whole chunks before are chosen.
        chunks = budget // self.size - 1
        tail = budget - chunks * self.size
        whole = (count - tail) // self.size
        means = keys[:, :, : whole * self.size].reshape(layers, heads, whole, self.size, width).mean(3)
        query = torch.cat(queries)[:, :, -1].reshape(layers, heads, -1, width).mean(2)  # [L, H, E]: a group's mean
        score = (means @ query[..., None])[..., 0].float()
        score[..., 0] = torch.inf  # the first chunk is an attention sink
        best = score.topk(chunks, dim=-1).indices.sort(-1).values
        within = torch.arange(self.size, device=keys.device)
        chosen = (best[..., None] * self.size + within).flatten(2)
        latest = torch.arange(count - tail, count, device=keys.device).expand(layers, heads, -1)
        return torch.cat([chosen, latest], -1)


class TriForce(VerticalCascade):
    """A drafter of chains for one row: the target itself, attending to selected positions of its cache only."""

    def __init__(
        self,
        base: BaseModel,
        budget: int,
        policy: str = DEFAULT_POLICY,
        *,
        num_tokens: int = 6,
        refresh: int = 64,
        drafter: Drafter | None = None,
        draft_config: DraftConfig | None = None,
    ) -> None:
        """``policy`` selects ``budget`` positions again every ``refresh`` tokens. ``drafter`` drafts for this reduced
        ``base``; None: tokens are drafted one by one."""
        super().__init__(base, drafter, num_tokens=num_tokens, draft_config=draft_config)
        shapes = set(base.cache_shape.layers)
        equal = len(shapes) == 1 and all(isinstance(s, KeyValueShape) and s.keys == s.values for s in shapes)
        if not equal or base.windows is not None or base.recurrent:
            what = f"budget:POSITIONS needs equal layers with full attention, which {base.name} lacks"
            raise UserError(f"{what}; choose another drafter")
        self.policy, self.budget, self.refresh = Policy.parse(policy), budget, refresh
        self.base_fingerprint = base.fingerprint
        if budget < max(2, 2 * self.policy.size):
            what = f"a budget of {budget} positions is too small for {policy}"
            raise UserError(f"{what}; give at least {max(2, 2 * self.policy.size)}")
        if refresh < 1:
            raise UserError(f"refresh must be at least 1 token, got {refresh}")

    def identity(self) -> tuple[object, ...]:
        return (*super().identity(), self.budget, self.policy, self.refresh)

    def cache_slots(self, draft_config: DraftConfig) -> int:
        return 1  # the pass that chooses positions writes the last token's states behind the committed ones

    def open(self, rows: int, cache: TreeCache | None = None) -> "TriForceSession":
        if rows != 1:
            raise UserError(f"budget:POSITIONS drafts for one prompt at a time, got {rows}; set batch_size=1")
        return TriForceSession(self, cache)


class TriForceSession(NestedSession):
    """A session with two caches, the target's and a copy of its selected positions, and the inner drafter's session."""

    drafter: TriForce

    def __init__(self, drafter: TriForce, target: TreeCache | None) -> None:
        """Without ``target``, the target's cache (in a combination), the session fills its own."""
        super().__init__(drafter, 1)
        self._target, self._length = target, 0
        self._budget: TreeCache | None = None
        self._copied = 0  # number of committed tokens when ``_budget`` was last updated
        self._selected_at = 0  # number of committed tokens when positions were last selected

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [self._length]

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        if self._target is None:
            self._context.append(tokens, counts)
        if self._inner is not None:
            self._inner.rollback(self.lengths)
            self._inner.commit(tokens, counts, None)
        self._length += counts[0]

    def rollback(self, lengths: list[int]) -> None:
        if self._target is None:
            self._context.rollback(lengths)
        if self._inner is not None:
            self._inner.rollback(lengths)
        (self._length,) = lengths
        if self._copied > self._length:
            self._budget = None

    def read(self, root: Tensor, depth: int) -> TreeCache:
        """Return the cache of selected positions, brought up to date with the committed tokens. New tokens are added,
        or after ``refresh`` tokens, positions are selected again. ``root`` [1] int64 is the last committed token; the
        policy ``retrieval`` runs the target over it, to get its queries. ``depth`` is not used."""
        drafter, count, source = self.drafter, self._length, self._target
        if source is None:
            source = self._context.shared_cache(1, 0)
        if self._budget is not None and count - self._selected_at < drafter.refresh:
            self._budget.crop([self._copied])
            self._budget.append(source)
            self._copied = count
            return self._budget
        queries = None
        if drafter.policy.name == "retrieval" and count > drafter.budget:
            with captured_queries() as queries:
                drafter.model.forward(root[:, None], source.first_layers(drafter.model.num_layers))
        positions = drafter.policy.select(drafter.budget, source.keys[:, 0, :, :count], queries)
        self._budget = source.selected(positions, drafter.refresh + drafter.room)
        self._copied = self._selected_at = count
        return self._budget
