"""The interface of what answers the prompts of a corpus: the built-in decoding or a server."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import Answer

Prompt = tuple[int, list[int]]
"""Number of a prompt in its list, and its token ids."""
T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, and the rank of this one."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None
    """A barrier: returns when every process of the group has called it."""

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's items; every item belongs to exactly one process."""
        return items[self.rank :: self.size]


class Backend(Protocol):
    """A source of the base's own answers to prompts."""

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest entries that say who answers.

        ``recorded`` is the manifest of a resumed corpus, or empty. With it a finished corpus needs no server.
        """
        ...

    def at(self, temperature: float) -> "Backend":
        """Return this backend with another sampling temperature."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise a ``UserError`` for faults that would show later; called on one process with a few prompts to try."""
        ...

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: ProcessGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield this process's answers as (index, answers) of one shard each; no two processes share an index.

        ``prompts`` are all prompts of the corpus, ``done`` the numbers of the answered ones. ``on_done`` is called
        after every answer. If an error ends the stream, finished answers are yielded first.
        """
        ...

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Answer]:
        """Yield answers with another sampler, for prompts that the base writes itself."""
        ...
