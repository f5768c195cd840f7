"""The frozen base of a run: its parts, and its layers while something needs them."""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.system.devices import unchanged_rng


@dataclass(eq=False)
class OriginalBase:
    """A base that loads its layers when something runs it. A run whose answers and hidden states are stored never loads
    them. Answers need whole layers on every process. For hidden states, processes may share the layers."""

    read_parts: Callable[[], BaseParts | BaseModel]
    load: Callable[[bool], BaseModel]
    """Loads the base: whole on this process (False), or sharded over all processes, which must call it together."""
    shares: bool = False  # hidden states are computed with layers that are sharded over all processes
    _parts: BaseParts | None = field(default=None, init=False)
    _loaded: BaseModel | None = field(default=None, init=False)

    @classmethod
    def of(cls, base: BaseModel) -> "OriginalBase":
        """Return a base that is loaded, and stays so until its layers are dropped; afterwards it has only parts."""
        return cls(lambda: base, lambda sharded: base)

    @property
    def parts(self) -> BaseParts:
        """The base without layers."""
        if self._parts is None:
            base = self.read_parts() if self._loaded is None else self._loaded
            if isinstance(base, BaseModel):
                self._loaded = base
                base = base.parts()
            self._parts = base
        return self._parts

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self._loaded)

    @property
    def longest(self) -> int:
        """Largest number of tokens that the base reads at once."""
        return self.parts.max_context

    def whole(self) -> BaseModel:
        if self._loaded is None or self.is_sharded:
            self._load(sharded=False)
        assert self._loaded is not None
        return self._loaded

    def for_states(self) -> BaseModel:
        """Return the base to compute hidden states with; if the processes share it, all of them must do so together."""
        if self._loaded is None or (self.shares and not self.is_sharded):
            self._load(sharded=self.shares)
        assert self._loaded is not None
        return self._loaded

    @torch.inference_mode()
    def read_answers(self, answers: Iterable[Answer]) -> Iterator[tuple[Answer, Tensor]]:
        """Yield every answer with its final states [n - 1, D], for n tokens of prompt and answer, in any order. The
        last token is not read."""
        base = self.whole()
        for answer in answers:
            ids = torch.tensor(answer.ids[:-1], device=base.device)
            yield answer, base.forward(ids[None], base.new_cache(len(ids))).final[0]

    def read_rows(self, batch: TrainBatch, spec: HiddenStatesSpec) -> Tensor | None:
        """Return the states [B, T, D (1 + L)] at the rows of ``batch``, in host memory, if another process computes
        them. None: the base computes them in the step."""
        return None

    def start(self) -> None:
        """Start what runs the base for this run, if it is another process; on one process of the run."""

    def close(self) -> None:
        """Stop what runs the base for this run, if it is another process."""

    def drop_layers(self) -> None:
        _ = self.parts
        self._loaded = None
        gc.collect()

    def _load(self, sharded: bool) -> None:
        self._loaded = None  # its memory is free before the next one is loaded
        gc.collect()
        with unchanged_rng():
            self._loaded = self.load(sharded)


def is_sharded(base: BaseModel | None) -> bool:
    return base is not None and isinstance(base.model.model, FSDPModule)
