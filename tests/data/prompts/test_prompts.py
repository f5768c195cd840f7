"""The ids a turn is asked with: templates, later turns, and prompts that cannot be asked."""

from types import SimpleNamespace
from typing import Any

import pytest

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.errors import UserError
from drafthead.models.decoding.loop import check_ids
from support import refuses

TOKENIZER = tiny_tokenizer()
SYSTEM = {"role": "system", "content": "S"}
TWO = EvalPrompt("chat", 4, [SYSTEM, {"role": "user", "content": "A"}], ("B", "C"))


def asked(prompt: EvalPrompt, *answers: str) -> str:
    ids = [TOKENIZER(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    return str(TOKENIZER.decode(conversation_ids(TOKENIZER, prompt, ids)))


def test_each_turn_follows_the_answers_before_it() -> None:
    opened = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    assert asked(TWO) == opened
    second = opened + "one<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    assert asked(TWO, " one\n<|im_end|>") == second, "without spacing and end of turn, as text is sent"
    third = second + "<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    assert asked(TWO, "one", "") == third, "an answer may be nothing"
    assert len(TWO.messages) == 2, "the prompt is left as it was"


def test_ids_are_taken_as_they_are() -> None:
    assert conversation_ids(TOKENIZER, EvalPrompt("ids", 0, [], input_ids=(7, 7, 300))) == [7, 7, 300]


def test_an_empty_turn_fails_where_it_is_asked() -> None:
    with pytest.raises(UserError, match=r"prompt 3 \(qa\) is empty; give it some words"):
        asked(EvalPrompt("qa", 3, [SYSTEM, {"role": "user", "content": " \n"}]))
    refuses(r"prompt 3 \(qa\) is empty", asked, EvalPrompt("qa", 3, [], input_ids=()))
    late = EvalPrompt("qa", 3, [{"role": "user", "content": "A"}], ("",))
    asked(late)
    refuses(r"prompt 3 \(qa, turn 2 of 2\) is empty", asked, late, "one")


def test_a_refusing_template_names_the_prompt() -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    refuses(r"prompt 4 \(chat, turn 1 of 3\).*chat template", conversation_ids, bare, TWO)


def test_ids_the_base_cannot_read() -> None:
    base: Any = SimpleNamespace(vocab_size=300, max_context=20)

    def check(tokens: list[int]) -> None:
        check_ids(base, tokens, 5, TWO.where(1))

    check([0, 299] + [1] * 13)
    for tokens, says in (
        ([1] * 16, r"prompt 4 \(chat, turn 2 of 3\) has 16 tokens, .*max_new_tokens=5 .*of 20; shor"),
        ([1, 1, 300], "token id 300 at position 2, but the base's ids go from 0 to 299"),
    ):
        refuses(says, check, tokens)
