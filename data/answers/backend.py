"""What answers the prompts of the phase-2 corpus: one interface for the built-in decoding and for servers."""

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
    """The processes that share a run, and which of them this is."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None
    """Returns when every process of the group has called it."""

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part: every item belongs to exactly one, whatever the number of processes."""
        return items[self.rank :: self.size]


class Backend(Protocol):
    """Answers prompts with the base's own tokens."""

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Entries of the corpus's manifest that say who answers.

        ``recorded`` is the manifest of a corpus that is resumed, else empty: a finished corpus needs no server.
        """
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise a ``UserError`` for what would fail later; called on one process, with a few prompts to try."""
        ...

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: ProcessGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """This process's answers as (index, answers) of one shard each; indices differ over all processes.

        ``prompts`` are those of the whole corpus, ``done`` the numbers that are answered already; ``on_done`` is called
        after every answer. Answers that came before an error are yielded first.
        """
        ...

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Answer]:
        """Answers with another sampler, for prompts that the base writes itself."""
        ...
