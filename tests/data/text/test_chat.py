"""Prompts through the chat template, and the tokenizer of bytes."""

from typing import Any

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.chat import prompt_ids, user_turn
from support import cases, refuses

TINY = tiny_tokenizer()
END = "<|im_end|>"


def test_a_prompt_ends_where_the_answer_starts() -> None:
    text = TINY.decode(prompt_ids(TINY, user_turn("é <|im_end|>")))
    assert text.endswith(f"<|im_start|>user\né {END}{END}\n<|im_start|>assistant\n")


@cases(
    "template, says",
    (None, "has no chat template; use an instruction-tuned base"),
    ("{{ raise_exception('roles must alternate') }}", "refuses messages with roles.*roles must alternate"),
    ("{{ 1 + messages[0].content }}", "refuses messages with roles.*unsupported operand"),
    ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out the text of the user's messages"),
)
def test_bad_templates(template: str | None, says: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    refuses(says, prompt_ids, tokenizer, user_turn("a"))


def test_templates_that_read_lists_of_parts() -> None:
    """As LLaVA's and Llama-Guard's: content as text would vanish."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ c.text }}. {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    messages = [{"role": "system", "content": "Be brief"}, *user_turn("Why?")]
    assert tokenizer.decode(prompt_ids(tokenizer, messages)) == "system: Be brief. user: Why?. ASSISTANT:"


def test_tiny_tokenizer_survives_saving(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    assert (len(TINY), TINY.pad_token, TINY.eos_token, TINY.model_max_length) == (259, "<|endoftext|>", END, 2048)
    TINY.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(300))) + END
    assert again(text)["input_ids"] == TINY(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert (again.eos_token_id, again.pad_token_id, again.chat_template) == (258, 256, TINY.chat_template)
