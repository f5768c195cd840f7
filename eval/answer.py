"""``drafthead.generate``: one call from a prompt to a text."""

from dataclasses import dataclass

from torch import Tensor

from drafthead.data.chat import prompt_ids
from drafthead.data.contracts import DecodeResult, TokenTree
from drafthead.eval.decode import OnTokens, decode
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead


@dataclass(frozen=True)
class Answer:
    """What was generated."""

    text: str
    tokens: list[int]
    mean_accepted_tokens: float
    """Tokens committed a step, bonus included; 1 for plain decoding."""
    tokens_per_second: float
    log: DecodeResult
    """Every step."""


def generate(
    base: BaseModel,
    head: DraftHead | None,
    prompt: str | list[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    tree: TokenTree | None = None,
    on_tokens: OnTokens | None = None,
) -> Answer:
    """Answer greedily; with a head faster, and the same.

    Args:
        base: the target (``drafthead.load_base``, or ``BaseModel.wrap`` around a loaded model).
        head: a head attached to it, or None for plain decoding.
        prompt: a user's message (put into the chat template), or token ids ([T] or [1, T]) taken as they are.
        max_new_tokens: at most so many.
        tree: what to draft; by default the head's own calibrated tree.
        on_tokens: called with tokens as soon as they are final.

    Raises:
        UserError: an empty prompt, one beyond the context, or no chat template.
    """
    if isinstance(prompt, str):
        ids = prompt_ids(base.tokenizer, [{"role": "user", "content": prompt}])
    else:
        ids = prompt.flatten().tolist() if isinstance(prompt, Tensor) else list(prompt)
    log = decode(base, head, ids, max_new_tokens=max_new_tokens, tree=tree, on_tokens=on_tokens)
    steps = len(log.steps)
    return Answer(
        text=base.tokenizer.decode(log.tokens, skip_special_tokens=True),
        tokens=log.tokens,
        mean_accepted_tokens=sum(s.committed for s in log.steps) / steps if steps else 1.0,
        tokens_per_second=len(log.tokens) / log.total_s,
        log=log,
    )
