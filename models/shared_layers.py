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
        places = self._match(proposal)
        while bool((places == UNREAD).any()):
            self._read_missing(proposal, places)
        self._cache.keep(places, torch.full((len(places),), places.shape[1], device=places.device))
        hidden = torch.cat(self._hidden, 1)
        return BegunPass(
            layers=self._model.num_layers,
            hidden=hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])),
        )

    def _match(self, proposal: Proposal) -> Tensor:
        """Where each node was read, [B, N] int64; ``UNREAD`` where it was not.

        A node is known by the tokens of its path: with the same ones, two nodes have the same state.
        """
        tokens, above = torch.cat(self._tokens, 1).tolist(), torch.cat(self._parents, 1).tolist()
        wanted = proposal.tokens.tolist()
        parents = proposal.shape.parents.expand_as(proposal.tokens).tolist()
        places = []
        for row in range(len(wanted)):
            twin: list[int] = []  # the first node read with the same path
            known: dict[tuple[int, int], int] = {}
            for node, (a, t) in enumerate(zip(above[row], tokens[row], strict=True)):
                twin.append(known.setdefault((a if a == UNREAD else twin[a], t), node))
            found = [0]
            for node in range(1, len(wanted[row])):
                parent = parents[row][node]
                if parent < 0:
                    found.append(0)  # padding, which nothing looks at
                elif found[parent] == UNREAD:
                    found.append(UNREAD)
                else:
                    found.append(known.get((found[parent], wanted[row][node]), UNREAD))
            places.append(found)
        return torch.tensor(places, device=proposal.tokens.device)

    def _read_missing(self, proposal: Proposal, places: Tensor) -> None:
        """Read in one pass the unread nodes of all rows whose parents are read; sets their ``places``."""
        parents = proposal.shape.parents.expand_as(proposal.tokens).clamp(min=0)
        ready = (places == UNREAD) & (places.gather(1, parents) != UNREAD)
        width = int(ready.sum(1).max())
        # A row with fewer reads others again, which nothing looks at.
        nodes = ready.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
        chosen = ready.gather(1, nodes)
        above = places.gather(1, parents.gather(1, nodes)).clamp(min=0)
        count = sum(t.shape[1] for t in self._tokens)
        self._read(proposal.tokens.gather(1, nodes), above)
        read = torch.arange(count, count + width, device=places.device).expand_as(nodes)
        places.scatter_(1, nodes, torch.where(chosen, read, places.gather(1, nodes)))
