"""One evaluation prompt, and the token ids of each of its turns."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafthead.data.text.chat import Message, Tokenizer, Variables, prompt_ids
from drafthead.errors import UserError


@dataclass(frozen=True)
class EvalPrompt:
    """A conversation to answer turn by turn, or token ids to use unchanged."""

    task: str
    number: int  # position in the whole suite, from 0, before `tasks` and `limit` select prompts
    messages: list[Message]  # up to the user's message that is answered first; empty if there are `input_ids`
    later_turns: tuple[str, ...] = ()  # the user's later messages, each sent after the answer to the previous one
    input_ids: tuple[int, ...] | None = None  # the whole prompt, to which no chat template is applied

    @property
    def turns(self) -> int:
        return 1 + len(self.later_turns)

    @property
    def user_turns(self) -> tuple[str, ...]:
        return *(m["content"] for m in self.messages if m["role"] == "user"), *self.later_turns

    def where(self, turn: int = 0) -> str:
        """Name a turn of this prompt (from 0) for error messages: ``prompt 6 (coding, turn 2 of 2)``."""
        of_many = f", turn {turn + 1} of {self.turns}" if self.turns > 1 else ""
        return f"prompt {self.number} ({self.task}{of_many})"


def conversation_ids(
    tokenizer: Tokenizer, prompt: EvalPrompt, answers: Sequence[Sequence[int]] = (), template_kwargs: Variables = None
) -> list[int]:
    """Return the token ids that a decoder reads for turn ``len(answers)`` (from 0), earlier turns included. ``answers``
    to the earlier turns must be the autoregressive ones for every decoder, because times can be compared only if all
    read the same context. Spec-Bench uses each method's own answers, which are equal under lossless greedy decoding. As
    in Spec-Bench, an answer enters as text without special tokens and outer spaces."""
    where = prompt.where(len(answers))
    if prompt.input_ids is not None:
        if not prompt.input_ids:
            raise UserError(f"{where} is empty; give it at least one token id, or leave it out")
        return list(prompt.input_ids)
    messages = list(prompt.messages)
    for words, answer in zip(prompt.later_turns, answers, strict=False):
        text = str(tokenizer.decode(list(answer), skip_special_tokens=True)).strip()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": words}]
    if not messages or not messages[-1]["content"].strip():
        raise UserError(f"{where} is empty; give it some words, or leave it out")
    try:
        return prompt_ids(tokenizer, messages, template_kwargs)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
