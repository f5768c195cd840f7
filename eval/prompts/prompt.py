"""One evaluation prompt, and the token ids of each of its turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafthead.data.text.chat import Message, prompt_ids
from drafthead.data.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvalPrompt:
    """One conversation to answer, turn by turn; or token ids, taken as they are."""

    task: str
    number: int
    """Position in the whole suite, before ``tasks`` and ``limit``."""
    messages: list[Message]
    """What comes before the first answer, a user's turn last. Empty with ``input_ids``."""
    later_turns: tuple[str, ...] = ()
    """The user's later messages, each sent after the answer to the one before it."""
    input_ids: tuple[int, ...] | None = None
    """A prompt that comes tokenised; no chat template touches it."""

    @property
    def turns(self) -> int:
        """Number of answers."""
        return 1 + len(self.later_turns)

    @property
    def user_turns(self) -> tuple[str, ...]:
        """What the user says, turn by turn; empty for token ids."""
        return *(m["content"] for m in self.messages if m["role"] == "user"), *self.later_turns

    def where(self, turn: int = 0) -> str:
        """What messages call the prompt, or its turn ``turn`` (from 0)."""
        of_many = f", turn {turn + 1} of {self.turns}" if self.turns > 1 else ""
        return f"prompt {self.number} ({self.task}{of_many})"


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: EvalPrompt,
    answers: Sequence[Sequence[int]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of turn ``len(answers)`` of ``prompt``.

    All decoders must read the same context, or their times could not be compared: pass the answers of autoregressive
    greedy decoding to the turns before, whichever decoder is timed. (In Spec-Bench the context holds the method's own
    answer; under lossless greedy decoding the two are equal.) As there, an answer enters as text, without special
    tokens and outer spacing, and is rendered with the rest of the conversation.
    """
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
