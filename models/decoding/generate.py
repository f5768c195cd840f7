"""``drafthead.generate``, which answers a prompt, and ``drafthead.stream``, which yields the answer in pieces."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafthead.data.text.chat import user_turn
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.loop import EXACT, GREEDY, DecodingSequence, OnTokens, decode, prepare
from drafthead.models.decoding.sampling import TargetSampler
from drafthead.models.decoding.step import DecodeResult, mean_accepted_length
from drafthead.models.decoding.tree_names import named_tree


def generate(
    base: BaseModel,
    drafter: Drafter | None,
    prompt: str | list[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    draft_config: DraftConfig | None = None,
    tree: str | None = None,
    sampler: TargetSampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> DecodeResult:
    """Answer a prompt, by default greedily. With an exact rule, a drafter does not change the answer's distribution.

    ``decode_batch`` (``decoding/loop.py``) answers many prompts, some at a time, with or without a drafter.

    Args:
        base: the target model, from ``drafthead.load_base`` or ``BaseModel.wrap`` (for a model that is loaded already).
        drafter: a head that was loaded for ``base``, another drafter, or None for plain decoding.
        prompt: a user's message, to which the chat template is applied, or token ids, [T] or [1, T], used unchanged.
        max_new_tokens: largest number of tokens in the answer; EOS may end it earlier.
        draft_config: the tree to draft; by default trees by cost if the drafter prefers them, else its calibrated
            tree, or else a chain over all its positions.
        tree: the name of another tree, such as ``static``, ``cost``, ``chain:3`` or ``dynamic:16``.
        sampler: temperature, top-p and so on; by default greedy decoding.
        rule: the acceptance rule; by default the exact one.
        seed: seed of the random numbers, if the answer is sampled.
        on_tokens: function that is called with new tokens as soon as they are final.
    """
    result = decode(
        base,
        drafter,
        _ids(base, prompt),
        max_new_tokens=max_new_tokens,
        draft_config=_named(drafter, draft_config, tree),
        sampler=sampler,
        rule=rule,
        seed=seed,
        on_tokens=on_tokens,
    )
    return replace(result, text=base.tokenizer.decode(result.tokens, skip_special_tokens=True))


class Piece(NamedTuple):
    """A piece of an answer's text, which later tokens do not change."""

    text: str
    accepted: bool  # whether the last token of the piece is an accepted draft


@dataclass(frozen=True)
class TextStream:
    """An answer that is decoded while a caller iterates over its pieces, which works only once. The statistics count
    the tokens and steps so far."""

    base: BaseModel
    sequence: DecodingSequence
    _updates: Iterator[DecodingSequence]

    def __iter__(self) -> Iterator[Piece]:
        return text_pieces(self.base.tokenizer, self._tokens())

    def _tokens(self) -> Iterator[tuple[int, bool]]:
        for row in self._updates:  # one update after the prompt, and one after every step
            position, accepted = (row.steps[-1].position, row.steps[-1].accepted) if row.steps else (0, 0)
            yield from [(token, n < accepted) for n, token in enumerate(row.answer[position:])]

    @property
    def accepted(self) -> int:
        return sum(min(step.accepted, step.committed) for step in self.sequence.steps)

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.sequence.steps)

    @property
    def tokens_per_second(self) -> float:  # without the time that the caller spends between pieces
        seconds = self.sequence.prefill_s + sum(step.total_s for step in self.sequence.steps)
        return len(self.sequence.answer) / seconds if seconds else 0.0


def stream(
    base: BaseModel,
    drafter: Drafter | None,
    prompt: str | list[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    draft_config: DraftConfig | None = None,
    tree: str | None = None,
    sampler: TargetSampler = GREEDY,
    rule: AcceptanceRule = EXACT,
    seed: int = 0,
) -> TextStream:
    """Return an iterable that decodes and yields ``(text, accepted)`` pieces. Arguments are those of ``generate``.

    for text, accepted in drafthead.stream(base, head, "Why is the sky blue?"):
        print(text, end="", flush=True)
    """
    ids = _ids(base, prompt)
    loop = prepare(
        base,
        drafter,
        [ids],
        max_new_tokens=max_new_tokens,
        draft_config=_named(drafter, draft_config, tree),
        sampler=sampler,
        rule=rule,
        eos_ids=base.eos_ids,
    )
    sequence = DecodingSequence(number=0, prompt=ids, seed=seed)
    return TextStream(base, sequence, loop.run([sequence], every_step=True))


def text_pieces(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[tuple[int, bool]]) -> Iterator[Piece]:
    """Decode the pairs ``(token, accepted)`` to pieces of text, each as soon as later tokens cannot change it."""
    answer: list[int] = []
    # Each token is decoded together with the previous piece, on which a leading space depends.
    previous = shown = 0
    accepted = False
    for token, accepted in tokens:
        answer.append(token)
        before = tokenizer.decode(answer[previous:shown], skip_special_tokens=True)
        text = tokenizer.decode(answer[previous:], skip_special_tokens=True)
        if len(text) > len(before) and not text.endswith("\ufffd"):  # an unfinished multi-byte character
            yield Piece(text[len(before) :], accepted)
            previous, shown = shown, len(answer)
    before = tokenizer.decode(answer[previous:shown], skip_special_tokens=True)
    if rest := tokenizer.decode(answer[previous:], skip_special_tokens=True)[len(before) :]:
        yield Piece(rest, accepted)


def _named(drafter: Drafter | None, draft_config: DraftConfig | None, tree: str | None) -> DraftConfig | None:
    """Return ``draft_config``, or the config of ``drafter`` with the tree of this name."""
    if tree is None or drafter is None:
        return draft_config
    if tree == "head" and draft_config is None:
        return None  # the default
    if draft_config is not None:
        raise UserError(f"draft_config has a tree, and so has tree={tree!r}; give one of them")
    return DraftConfig(tree=named_tree(tree, drafter))


def _ids(base: BaseModel, prompt: str | list[int] | Tensor) -> list[int]:
    if isinstance(prompt, str):
        return base.prompt_ids(user_turn(prompt))
    if not isinstance(prompt, Tensor):
        return list(prompt)
    if prompt.shape[:-1].numel() != 1:
        what = f"the ids of the prompt have shape {list(prompt.shape)}, expected [T] or [1, T] for one prompt"
        raise UserError(f"{what}; use model.generate(..., custom_generate=drafthead.custom_generate(head)) for a batch")
    return [int(token) for token in prompt.flatten()]
