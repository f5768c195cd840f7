"""Kinds of drafters in expressions, and expressions as parsed. ``expression.py`` has the grammar."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter

Parts = list[tuple[Drafter, DraftConfig]]  # the drafters of a combination, with their configs


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Syntax of one kind of drafter in expressions: ``kind[:NAME][:NUMBER[:NUMBER]]``."""

    form: str  # the syntax as messages show it, such as ``model:NAME[:TOKENS]``
    build: Callable[["Expression", BaseModel, Parts], Drafter]  # for the target; ``Parts`` of a combination
    tokens: int = 0  # number of tokens to draft by default; 0 for kinds that have no number of tokens
    numbers: tuple[int, int] = (0, 0)  # NUMBERs required and allowed: (1, 2) for ``early_exit:LAYERS[:TOKENS]``
    tokens_at: int = 0  # index, from 0, of the NUMBER that replaces ``tokens``
    takes_name: bool = False
    needs_name: bool = False
    name_last: bool = False  # the NAME follows one NUMBER
    check_name: Callable[[str], object] = lambda name: None  # reject a NAME, before any model is loaded
    combines: bool = False  # ``kind:`` is followed by several drafters, joined by ``+``
    nests: bool = False  # ``kind:A+B+C`` stands for ``kind:A+(kind:B+C)``


@dataclass(frozen=True)
class Expression:
    """A drafter as parsed from its text, such as ``head+prompt_lookup:8``."""

    text: str
    kind: str  # a word of the grammar, or ``combine`` for ``A+B``
    name: str = ""  # the NAME (a folder, model, corpus or policy), or ""
    numbers: tuple[int, ...] = ()
    default_tokens: int = 0
    most_tokens: int | None = None  # the N of ``@N``: largest number of drafts on a path; None without ``@N``
    parts: tuple["Expression", ...] = ()  # the drafters of a combination, in order
    window: int | None = None  # the N of ``head:window=N``: tokens that a head trained without a window sees

    @property
    def tokens(self) -> int:
        return self.most_tokens or self.default_tokens

    def walk(self) -> Iterator["Expression"]:
        yield self
        for part in self.parts:
            yield from part.walk()
