"""The base class of composite drafters: one state per drafter, and the same context for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, HiddenStatesSpec
from drafthead.data.utils.errors import UserError
from drafthead.models.decoding.drafter import Drafter, DraftState


@dataclass
class CompositeState(DraftState):
    """The drafters' states after the committed text, in their order."""

    parts: tuple[DraftState, ...]

    def select(self, rows: list[int]) -> "CompositeState":
        return CompositeState(parts=tuple(state.select(rows) for state in self.parts))


class CompositeDrafter(Drafter[CompositeState]):
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

    def init_state(self, batch: int) -> CompositeState:
        return CompositeState(parts=tuple(drafter.init_state(batch) for drafter in self.drafters))

    def update(
        self, state: CompositeState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> CompositeState:
        pairs = zip(self.drafters, state.parts, strict=True)
        return CompositeState(
            parts=tuple(
                drafter.update(drafter_state, tokens, self._own(drafter, base_hidden), counts)
                for drafter, drafter_state in pairs
            )
        )

    def _own(self, drafter: Drafter, base_hidden: HiddenStates | None) -> HiddenStates | None:
        """Return the layers that ``drafter`` reads, out of those that any drafter reads."""
        if base_hidden is None or drafter.spec == self.spec:
            return base_hidden
        indices = [self.spec.layers.index(number) for number in drafter.spec.layers]
        layers = torch.cat([base_hidden.layer(index) for index in indices], -1) if indices else None
        return HiddenStates(final=base_hidden.final, layers=layers)
