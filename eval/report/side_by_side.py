"""Answers for the console with accepted drafts in colour: one answer, or next to the autoregressive answer."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.generate import Piece, stream

ACCEPTED = "bold green"


def side_by_side(
    base: BaseModel, drafter: Drafter, draft_config: DraftConfig, ids: list[int], max_new_tokens: int
) -> RenderableType:
    """Decode the prompt ``ids`` greedily with and without drafts, and return both answers next to each other."""
    plain = stream(base, None, ids, max_new_tokens=max_new_tokens)
    drafted = stream(base, drafter, ids, max_new_tokens=max_new_tokens, draft_config=draft_config)
    answers = [coloured(plain), coloured(drafted)]
    table = Table(show_lines=True, expand=True)
    for name, run in (("autoregressive", plain), ("speculative", drafted)):
        heading = f"{name}: {run.tokens_per_second:.1f} tokens/s, {1 + len(run.sequence.steps)} passes"
        table.add_column(heading, ratio=1)
    table.add_row(*answers)
    count = f"{drafted.accepted} of {len(drafted.sequence.answer)} tokens are accepted drafts"
    return Group(table, Text.assemble(("coloured", ACCEPTED), f": {count}"))


def coloured(pieces: Iterable[Piece]) -> Text:
    return Text().append_tokens((text, ACCEPTED if accepted else None) for text, accepted in pieces)
