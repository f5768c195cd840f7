"""The base classes of composite drafters: one session per drafter, and the same context for all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, HiddenStatesSpec
from drafthead.data.utils.errors import UserError
from drafthead.models.decoding.drafter import Drafter, Session


class CompositeDrafter(Drafter):
    """Several drafters of the same context; a subclass combines their drafts."""

    def __init__(self, drafters: Sequence[Drafter], kind: str) -> None:
        """Check and store ``drafters``; messages call the composite ``kind``."""
        if len(drafters) < 2:
            raise UserError(f"{kind} needs at least two drafters, got {len(drafters)}")
        if len({d.base_fingerprint for d in drafters if d.base_fingerprint is not None}) > 1:
            raise UserError(f"the drafters of {kind} were loaded for different bases; attach them to one")
        self.drafters = tuple(drafters)
        self.spec = HiddenStatesSpec(layers=tuple(dict.fromkeys(n for d in drafters for n in d.spec.layers)))
        self.reads_base = any(drafter.reads_base for drafter in drafters)

    @property
    def vocab_size(self) -> int | None:
        return max((d.vocab_size for d in self.drafters if d.vocab_size is not None), default=None)

    @property
    def base_fingerprint(self) -> str | None:
        return next((d.base_fingerprint for d in self.drafters if d.base_fingerprint is not None), None)

    def identity(self) -> tuple[object, ...]:
        return (type(self).__name__, *(drafter.identity() for drafter in self.drafters))

    def remember(self, tokens: list[int]) -> None:
        for drafter in self.drafters:
            drafter.remember(tokens)


class CompositeSession(Session):
    """One session per drafter, over the same committed tokens; none of them uses the target's cache."""

    def __init__(self, drafter: CompositeDrafter, rows: int) -> None:
        self.drafter = drafter
        self.lengths = [0] * rows
        self.sessions = [part.open(rows) for part in drafter.drafters]

    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        spec = self.drafter.spec
        for part, session in zip(self.drafter.drafters, self.sessions, strict=True):
            hidden = base_hidden
            if base_hidden is not None and part.spec != spec:
                # The layers that this drafter reads, out of those that any drafter reads.
                read = [base_hidden.layer(spec.layers.index(number)) for number in part.spec.layers]
                hidden = HiddenStates(final=base_hidden.final, layers=torch.cat(read, -1) if read else None)
            session.commit(tokens, counts, hidden, self.nodes_of(session, nodes))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def nodes_of(self, session: Session, nodes: Tensor | None) -> Tensor | None:
        """Return a session's own numbers of committed ``nodes`` [B, T], -1 for others; None: its nodes are dropped."""
        return None

    def select(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        for session in self.sessions:
            session.select(rows)

    def rollback(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for session in self.sessions:
            session.rollback(lengths)
