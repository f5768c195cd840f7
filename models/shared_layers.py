"""Early exit inside the target's own pass: its first layers draft, and verification goes on from what they put out.

The drafter reads its nodes with the first layers of the target, straight into the target's cache behind what is
committed there. Once the tree is known, the states it keeps are put in the order of its nodes, and the target's pass
over them only needs the remaining layers.

Shape legend: B rows, F frontier nodes, N nodes of the proposal, M nodes read while drafting, D width.
"""

import torch
from torch import Tensor

from drafthead.data.contracts import BegunPass, Proposal
from drafthead.models.base import BaseModel
from drafthead.models.draft_cache import Forest
from drafthead.models.kv_cache import KVCache, RaggedCache

UNREAD = -1


class SharedPass:
    """One step's nodes in the first layers of the target."""

    def __init__(self, first: BaseModel, cache: KVCache | RaggedCache) -> None:
        """Begin behind what is committed in the target's ``cache``; ``first`` is the target cut to its first layers."""
        self._model, self._cache = first, cache.first_layers(first.num_layers)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._forest: Forest | None = None
        self._level = 0  # node where the level before starts

    def root(self, last: Tensor) -> Tensor:
        """Read the root ([B]): its exit state, [B, 1, D]."""
        return self._read(last[:, None], None)

    def grow(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read one more level ([B, F]); ``parents`` are places on the level before. Exit states [B, F, D]."""
        level, self._level = self._level, sum(t.shape[1] for t in self._tokens)
        return self._read(tokens, parents + level)

    def _read(self, tokens: Tensor, above: Tensor | None) -> Tensor:
        rows, new = tokens.shape
        forest = self._forest or Forest.none(rows, tokens.device)
        self._forest = forest.grown(rows, new, above)
        self._tokens.append(tokens)
        self._parents.append(torch.full_like(tokens, UNREAD) if above is None else above)
        self._hidden.append(self._model.verify(tokens, self._forest.shape(), self._cache))
        return self._hidden[-1]

    def finish(self, proposal: Proposal) -> BegunPass:
        """Read the nodes of ``proposal`` that drafting has not read (its leaves), and put all in its order."""
        places, missing = self._match(proposal)
        if missing:
            self._read_missing(proposal, places, missing)
        self._cache.keep(places, torch.full((len(places),), places.shape[1], device=places.device))
        hidden = torch.cat(self._hidden, 1)
        return BegunPass(
            layers=self._model.num_layers,
            hidden=hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])),
        )

    def _match(self, proposal: Proposal) -> tuple[Tensor, list[list[int]]]:
        """Where each node was read ([B, N], ``UNREAD`` where it was not), and the unread nodes of every row."""
        tokens = torch.cat(self._tokens, 1).tolist()
        above = torch.cat(self._parents, 1).tolist()
        wanted = proposal.tokens.tolist()
        parents = proposal.shape.parents.expand_as(proposal.tokens).tolist()
        places, missing = [], []
        for row in range(len(wanted)):
            known = {(a, t): m for m, (a, t) in reversed(list(enumerate(zip(above[row], tokens[row], strict=True))))}
            found = [0]
            for node in range(1, len(wanted[row])):
                parent = parents[row][node]
                # Padding is never looked at: the root stands in for it.
                found.append(0 if parent < 0 else known.get((found[parent], wanted[row][node]), UNREAD))
            places.append(found)
            missing.append([node for node, place in enumerate(found) if place == UNREAD])
        return torch.tensor(places, device=proposal.tokens.device), missing if any(missing) else []

    def _read_missing(self, proposal: Proposal, places: Tensor, missing: list[list[int]]) -> None:
        """Read the unread nodes of all rows in one pass; sets their ``places``."""
        count = sum(t.shape[1] for t in self._tokens)
        width = max(map(len, missing))
        # A row with fewer reads its root again, which nothing looks at.
        nodes = torch.tensor([m + [0] * (width - len(m)) for m in missing], device=places.device)
        parents = proposal.shape.parents.expand_as(proposal.tokens).gather(1, nodes).clamp(min=0)
        self._read(proposal.tokens.gather(1, nodes), places.gather(1, parents))
        for row, unread in enumerate(missing):
            places[row, unread] = torch.arange(count, count + len(unread), device=places.device)
