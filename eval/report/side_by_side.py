"""One answer, decoded autoregressively and speculatively, for the console: accepted drafts are coloured."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step_log import DecodeResult

ACCEPTED = "bold green"


def side_by_side(
    base: BaseModel, drafter: Drafter, draft_config: DraftConfig, ids: list[int], max_new_tokens: int
) -> RenderableType:
    """Decode the prompt ``ids`` greedily in both ways, and return both answers next to each other."""
    plain = decode(base, None, ids, max_new_tokens=max_new_tokens)
    drafted = decode(base, drafter, ids, max_new_tokens=max_new_tokens, draft_config=draft_config)
    speeds = [len(result.tokens) / result.total_s for result in (plain, drafted)]
    table = Table(show_lines=True, expand=True)
    table.add_column(f"autoregressive: {speeds[0]:.1f} tokens/s, {1 + len(plain.steps)} passes", ratio=1)
    table.add_column(f"speculative: {speeds[1]:.1f} tokens/s, {1 + len(drafted.steps)} passes", ratio=1)
    table.add_row(Text(_decoded(base, plain.tokens)), coloured(base, drafted))
    from_drafts = sum(step.committed - 1 for step in drafted.steps)
    caption = Text.assemble(
        ("coloured", ACCEPTED), f": {from_drafts} of {len(drafted.tokens)} tokens are accepted drafts of the head"
    )
    return Group(table, caption)


def coloured(base: BaseModel, result: DecodeResult) -> Text:
    """Return the answer with accepted drafts in colour: all tokens of a step except the last."""
    drafted = {step.position + n for step in result.steps for n in range(step.committed - 1)}
    text, shown = Text(), ""
    for index in range(len(result.tokens)):
        whole = _decoded(base, result.tokens[: index + 1])
        if not whole.endswith("\ufffd"):  # half of a multi-byte character: wait for the rest
            text.append(whole[len(shown) :], style=ACCEPTED if index in drafted else None)
            shown = whole
    return text


def _decoded(base: BaseModel, tokens: list[int]) -> str:
    return str(base.tokenizer.decode(tokens, skip_special_tokens=True))
