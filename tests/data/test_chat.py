"""Exact loss masks: the trained tokens, decoded, are the assistant's words and its ends of turn."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drafthead.data.embedded import packages as embedded
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.chat import Document, Message, conversation, prompt_ids
from drafthead.data.utils.errors import UserError

TINY = tiny_tokenizer()
END = "<|im_end|>"
# Few words, so that turns repeat, contain each other and look like the template itself.
WORDS = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "yes", "yes yes", "assistant\n", "é 漢字 🙂", "<|im_end|>", "<|im_start|>user\nyes", "a\r\n"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


def messages(roles: list[str]) -> st.SearchStrategy[list[Message]]:
    return st.tuples(*[WORDS] * len(roles)).map(
        lambda words: [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]
    )


CONVERSATIONS = st.tuples(st.booleans(), st.integers(1, 3), st.booleans()).flatmap(
    lambda c: messages(["system"] * c[0] + ["user", "assistant"] * c[1] + ["user"] * c[2])
)


def words_of(conv: list[Message]) -> str:
    return "".join(m["content"] + END for m in conv if m["role"] == "assistant")


@given(CONVERSATIONS)
def test_trained_tokens_are_the_assistants_words(conv: list[Message]) -> None:
    document = conversation(TINY, conv)
    assert TINY.decode(document.input_ids[document.loss_mask]) == words_of(conv)
    assert TINY.decode(document.input_ids) == TINY.apply_chat_template(conv, tokenize=False)
    first = next(i for i, m in enumerate(conv) if m["role"] == "assistant")
    prompt = prompt_ids(TINY, conv[:first])
    assert document.input_ids[: len(prompt)].tolist() == prompt
    assert np.flatnonzero(document.loss_mask)[0] == len(prompt)


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "same"},
    {"role": "user", "content": "same"},
    {"role": "assistant", "content": "same"},
]
TEMPLATES = {
    # words trimmed, a space before them
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content|trim }} [/INST]{% else %}"
    " {{ m.content|trim }} <|im_end|>{% endif %}{% endfor %}",
    # a finished conversation gets one more token
    "phi3": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}",
    # something stands between the generation prompt and the words
    "reasoning": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # no end-of-turn token at all
    "bare": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    # an end only after the last turn
    "closed": "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% else %}<|endoftext|>{% endif %}",
}
TRAINED = {
    "llama2": " same <|im_end|>" * 2,
    "phi3": "same<|im_end|>" * 2,
    "reasoning": "<think></think>same<|im_end|>" * 2,
    "bare": "same\n" * 2,
    "closed": "same\nsame\n<|endoftext|>",
}


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_templates(name: str) -> None:
    document = conversation(with_template(TEMPLATES[name]), TURNS)
    assert TINY.decode(document.input_ids[document.loss_mask]) == TRAINED[name]


def test_a_token_across_the_start_of_the_answer() -> None:
    """BPE that merges two newlines: the template's and the answer's must stay two, as they are when decoding."""
    from tokenizers import Tokenizer

    merged = tiny_tokenizer()
    state = json.loads(merged.backend_tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = 300
    state["model"]["merges"] = [["Ċ", "Ċ"]]
    merged._tokenizer = Tokenizer.from_str(json.dumps(state))
    assert merged("\n\n")["input_ids"] == [300]
    conv = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\nyes"}]
    document = conversation(merged, conv)
    assert merged.decode(document.input_ids[document.loss_mask]) == "\nyes<|im_end|>"
    prompt = prompt_ids(merged, conv[:1])
    assert document.input_ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(
    ("template", "conv", "says"),
    [
        (None, TURNS, "has no chat template.*give the base a chat template"),
        ("{{ raise_exception('roles must alternate') }}", TURNS, "refuses messages with roles.*roles must alternate"),
        ("{{ messages|length }}{{ messages[-1].content }}", TURNS, "renders message 1 of 4 differently"),
        (TEMPLATES["bare"].replace("m.content", "m.content|upper"), TURNS, "changes the assistant's words 'same'"),
        (TEMPLATES["bare"], TURNS[:1], "has no assistant turn"),
    ],
)
def test_bad_input(template: str | None, conv: list[Message], says: str) -> None:
    with pytest.raises(UserError, match=says):
        conversation(with_template(template), conv)


def test_prompt_without_template() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        prompt_ids(with_template(None), TURNS[:1])


def test_document_checks_its_shape() -> None:
    with pytest.raises(ValueError, match="one equal length"):
        Document(np.zeros(3, np.int32), np.zeros(2, np.bool_))


def test_tiny_tokenizer_survives_saving(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    assert (len(TINY), TINY.pad_token, TINY.eos_token, TINY.model_max_length) == (259, "<|endoftext|>", END, 2048)
    TINY.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(300))) + END
    assert again(text)["input_ids"] == TINY(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert (again.eos_token_id, again.pad_token_id, again.chat_template) == (258, 256, TINY.chat_template)


@pytest.mark.slow
def test_trained_tokens_on_smollm2() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded.smollm2_folder())

    @settings(max_examples=200, deadline=None)
    @given(CONVERSATIONS)
    def check(conv: list[Message]) -> None:
        words = words_of(conv)
        # Its vocabulary lacks some bytes, which no mask can bring back.
        assume(tokenizer.decode(tokenizer(words)["input_ids"]) == words)
        document = conversation(tokenizer, conv)
        assert tokenizer.decode(document.input_ids[document.loss_mask]) == words

    check()
