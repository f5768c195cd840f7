"""The interface of backends that answer a corpus's prompts: the built-in decoding, or a server."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import Answer

Prompt = tuple[int, list[int]]
"""Number of a prompt in the corpus's list of prompts, and its token ids."""
T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process's rank among the processes that share a corpus, their number, and their barrier."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None
    """Barrier: it returns when every process of the group has called it."""

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's part of ``items``; every item belongs to exactly one process."""
        return items[self.rank :: self.size]


class Backend(Protocol):
    """A source of the base's own answers to prompts."""

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the corpus's manifest that identify this backend.

        ``recorded`` is the manifest of a resumed corpus, or {}. A server is not asked again for what it records.
        """
        ...

    def at(self, temperature: float) -> "Backend":
        """Return this backend with another sampling temperature."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise a ``UserError`` if this backend cannot generate the corpus, after answering a few ``prompts``.

        One process calls this before all others generate.
        """
        ...

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: ProcessGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield this process's answers by shard, as (index of the shard in this call, from 0; answers).

        ``prompts`` are the same on all processes of ``group``, which share them. ``done`` has the numbers of prompts
        that are answered already. ``on_done`` is called after every answer. No two processes yield the same index.
        """
        ...

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Answer]:
        """Yield answers sampled by ``sampler``, in any order; used for prompts that the base writes itself."""
        ...
