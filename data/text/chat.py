"""Conversations to token ids and an exact loss mask, through the tokenizer's chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drafthead.data.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": ...}``."""


@dataclass(frozen=True)
class Document:
    """Tokens that belong together; drafts never look across its ends."""

    input_ids: npt.NDArray[np.int32]
    """[n]."""
    loss_mask: npt.NDArray[np.bool_]
    """[n]: this token is trained (may be a target)."""

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            raise ValueError(f"ids {self.input_ids.shape} and mask {self.loss_mask.shape} must be one equal length")

    def __len__(self) -> int:
        return len(self.input_ids)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Ids of ``messages`` and the opening of the assistant's turn: what the base reads before it answers.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, opened=True))


def conversation(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> Document:
    """A whole conversation; trained are exactly the assistant's words and the token that ends each of its turns.

    A turn's start is where the rendered conversation before it ends, its generation prompt included, so equal
    turns cannot be confused. The ids before the first answer equal ``prompt_ids`` of the messages before it.

    Raises:
        UserError: no chat template; the template refuses the messages, or rewrites earlier turns (some drop
            past reasoning) or the assistant's words, so that a turn cannot be found in the text; there is no
            assistant turn; the tokenizer cannot be cut where a turn begins.
    """
    text = _render(tokenizer, messages, opened=False)
    spans = [_span(tokenizer, messages, text, i) for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not spans:
        raise UserError(f"a conversation of {len(messages)} messages has no assistant turn; nothing in it is trained")
    cuts = [cut for span in spans for cut in span]
    ids, counts = _encode_at(tokenizer, text, cuts)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in zip(counts[::2], counts[1::2], strict=True):
        mask[start:end] = True
    return Document(np.asarray(ids, dtype=np.int32), mask)


def _render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], opened: bool) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'the base'} has no chat template, so conversations cannot "
            "be rendered; use an instruction-tuned base or give the base a chat template"
        )
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened))
    except TemplateError as error:
        roles = [m["role"] for m in messages]
        raise UserError(f"the chat template refuses messages with roles {roles}: {error}; change the data") from error


def _span(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], text: str, turn: int) -> tuple[int, int]:
    """Characters [start, end) of ``text`` that turn ``turn`` trains: its words and its end-of-turn token."""
    before = _render(tokenizer, messages[:turn], opened=True)
    if not text.startswith(before):
        raise UserError(
            f"the chat template renders message {turn} of {len(messages)} differently once the conversation goes on, "
            "so its tokens cannot be told apart; train on single-turn conversations or use another chat template"
        )
    through = _render(tokenizer, messages[: turn + 1], opened=False)
    specials = _special_tokens(tokenizer)
    # Some templates close a finished conversation with an extra token, which a longer one does not have here.
    limit = len(through) if text.startswith(through) else _whole_tokens(text, _common(text, through), specials)
    start = len(before)
    words = start + _end_of_words(text[start:limit], messages[turn]["content"].strip())
    ends = [(at, at + len(s)) for s in specials if (at := text.find(s, words, limit)) >= 0]
    return start, min(ends)[1] if ends else limit


def _end_of_words(turn: str, content: str) -> int:
    """Where ``content`` ends in the text of its turn, up to spacing."""
    lead = len(turn) - len(turn.lstrip())
    if turn.startswith(content, lead):
        return lead + len(content)
    # The template puts something before the words (a reasoning block, say), which the base has to say as well.
    at = turn.rfind(content)
    if at < 0:
        raise UserError(
            f"the chat template changes the assistant's words {content[:40]!r}, so their end cannot be found; "
            "use another chat template or change the data"
        )
    return at + len(content)


def _whole_tokens(text: str, end: int, specials: list[str]) -> int:
    """``end``, moved back to the start of a special token that it would cut in two."""
    cut = [at for s in specials if 0 <= (at := text.find(s, max(0, end - len(s) + 1))) < end]
    return min(cut, default=end)


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    return sorted({*tokenizer.all_special_tokens, *added})


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # The template has written every special token already; `verbose` would warn about long rows that packing cuts.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _encode_at(tokenizer: "PreTrainedTokenizerBase", text: str, cuts: list[int]) -> tuple[list[int], list[int]]:
    """Ids of ``text`` and, per cut (ascending character positions), the number of ids before it."""
    ids = _encode(tokenizer, text)
    prefixes = [_encode(tokenizer, text[:cut]) for cut in cuts]
    if all(ids[: len(prefix)] == prefix for prefix in prefixes):
        return ids, [len(prefix) for prefix in prefixes]
    # A token straddles a cut (a newline of the template merges with one of the answer). The base generates after
    # the prompt's own ids, so the pieces are encoded apart, as they arise when decoding.
    pieces = [_encode(tokenizer, text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
    apart = [token for piece in pieces for token in piece]
    if tokenizer.decode(apart) != tokenizer.decode(ids):
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} cannot be cut where a turn begins, near "
            f"{text[max(0, cuts[0] - 20) : cuts[0] + 20]!r}; strip the assistant's words or use another chat template"
        )
    return apart, np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
