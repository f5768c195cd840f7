"""Prompts from files and datasets, messages about broken ones, and the ids that a turn is asked with."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.data.prompts.prompt_files import read_dataset, read_jsonl
from drafthead.data.text.readers import open_dataset
from drafthead.errors import UserError
from drafthead.models.decoding.loop import check_ids
from support import cases, refuses

pytestmark = pytest.mark.usefixtures("offline")
USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_of_a_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "One"},
        {"messages": [SYSTEM, USER], "task": "chat"},
        {"messages": [USER, REPLY, USER | {"content": "And?"}]},
        {"messages": [SYSTEM, USER, USER | {"content": "And?"}]},
        {"turns": ["Hi", "And?", "So?"]},
        {"input_ids": [5, 0, 5]},
        {"messages": [USER], "system": SYSTEM["content"]},
        {"prompt": "Hi", "system_prompt": SYSTEM["content"]},
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert read_jsonl(path) == [
        EvalPrompt("mine", 0, [{"role": "user", "content": "One"}]),
        EvalPrompt("chat", 1, [SYSTEM, USER]),
        EvalPrompt("mine", 2, [USER, REPLY, {"role": "user", "content": "And?"}]),
        EvalPrompt("mine", 3, [SYSTEM, USER], ("And?",)),
        EvalPrompt("mine", 4, [USER], ("And?", "So?")),
        EvalPrompt("mine", 5, [], input_ids=(5, 0, 5)),
        EvalPrompt("mine", 6, [SYSTEM, USER]),
        EvalPrompt("mine", 7, [SYSTEM, USER]),
    ]


BROKEN = [
    ("{", "line 2 is not valid JSON"),
    ('{"text": "x"}', r"line 2 holds the keys \['text'\]"),
    ('{"input_ids": [4, -1]}', "line 2 has the negative token id -1"),
    ('{"messages": [{"role": "user"}]}', "line 2 holds a turn of role 'user' with a NoneType as content"),
    ('{"messages": [{"role": "assistant", "content": "y"}]}', "line 2 holds a conversation without a user's turn"),
    ('{"prompt": "x", "task": 3}', "line 2 has a task .*a int: 3"),
    ('{"prompt": "q", "tools": [{"name": "f"}]}', "line 2 has tools, which suites do not read"),
    (b'{"prompt": "caf\xe9"}', "line 2 is not UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[str(b[0])[:30] for b in BROKEN])
def test_a_broken_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    refuses(message, read_jsonl, path)


def test_all_broken_lines_are_listed_up_to_five(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("3\n" * 12)
    with pytest.raises(UserError, match=r"line 5 holds a int, [^;]*; and 7 more; each line must be") as error:
        read_jsonl(path)
    assert "line 6" not in str(error.value)


def test_no_file_and_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    for name, message in {
        "absent.jsonl": r"cannot be read to its end \(No such file",
        "": r"cannot be read to its end \(Is a directory",
        "empty.jsonl": r'empty.jsonl is empty; each line must be \{"prompt"',
    }.items():
        refuses(message, read_jsonl, tmp_path / name)


def save(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(str(path))
    return path


def test_a_dataset_folder_prefers_its_test_split(tmp_path: Path) -> None:
    save(tmp_path / "set" / "train.parquet", category=["math"] * 9, prompt=["a"] * 9)
    save(tmp_path / "set" / "test.parquet", category=["math", "chat"], prompt=["b", "c"])
    assert read_dataset(str(tmp_path / "set")) == [
        EvalPrompt("math", 0, [{"role": "user", "content": "b"}]),
        EvalPrompt("chat", 1, [{"role": "user", "content": "c"}]),
    ]
    assert len(read_dataset(f"{tmp_path / 'set'}:train")) == 9
    assert len(read_dataset(f"{tmp_path / 'set'}:train[2:4]:prompt")) == 2


@cases(
    "value, expected",
    ("x", EvalPrompt("d", 0, [{"role": "user", "content": "x"}])),
    (["x", "y"], EvalPrompt("d", 0, [{"role": "user", "content": "x"}], ("y",))),
    ([3, 4], EvalPrompt("d", 0, [], input_ids=(3, 4))),
    ([SYSTEM, USER, REPLY], EvalPrompt("d", 0, [SYSTEM, USER])),
    ([USER, REPLY, USER], EvalPrompt("d", 0, [USER, REPLY, USER])),
    ids=["text", "turns", "ids", "answered", "history"],
)
def test_a_column_is_read_by_what_it_holds(tmp_path: Path, value: Any, expected: EvalPrompt) -> None:
    path = save(tmp_path / "d.parquet", number=[1], anything=[value])
    assert read_dataset(f"{path}:train:anything") == [expected]


def test_a_data_file_of_any_name(tmp_path: Path) -> None:
    path = save(tmp_path / "a [1]:*, b" / "d [x].parquet", prompt=["y"])
    assert [prompt.task for prompt in read_dataset(str(path))] == ["d [x]"]
    refuses(r"datasets takes for a pattern; rename it", open_dataset, str(path.parent))


def test_a_saved_dataset(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"question": ["x"]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": one, "validation": one}).save_to_disk(str(tmp_path / "two"))
    for spec in ("one", "two", "two:dev"):
        assert [p.messages[0]["content"] for p in read_dataset(f"{tmp_path}/{spec}")] == ["x"]
    refuses("'test'.*dev, validation", read_dataset, f"{tmp_path}/two:test")


@cases(
    "spec, opened, task",
    ("user/name-v1.5:test", ("user/name-v1.5", None, "test"), "name-v1.5"),
    ("user/name/main:dev", ("user/name", "main", "dev"), "main"),
    ("gsm8k:test", ("gsm8k", None, "test"), "gsm8k"),
)
def test_a_hub_dataset_with_a_configuration(
    dataset_hub: Any, spec: str, opened: tuple[str, str | None, str], task: str
) -> None:
    dataset_hub.rows = lambda revision: datasets.Dataset.from_dict({"prompt": ["x"]})
    assert [prompt.task for prompt in read_dataset(spec)] == [task]
    assert tuple(dataset_hub.opened[key] for key in ("name", "subset", "split")) == opened
    dataset_hub.rows = lambda revision: datasets.Dataset.from_dict({"prompt": []})
    refuses("has no rows in split", read_dataset, spec)


def test_bad_datasets_say_what_to_do(tmp_path: Path) -> None:
    path = save(tmp_path / "d.parquet", answer=["x", "y"], number=[1, 2])
    save(tmp_path / "mixed" / "train.parquet", prompt=["x"])
    save(tmp_path / "mixed" / "test.parquet", prompt=["x"], task=["y"])
    (tmp_path / "notes.txt").write_text("x")
    for spec, message in {
        f"{path}:train:question": "column 'question'.*answer, number",
        str(path): "column among prompt, messages",
        f"{path}:train:number": "row 0 .*row 1 .*column 'number'",
        f"{path}:nowhere:answer": "split nowhere",
        f"{tmp_path / 'mixed'}:test": "DatasetGenerationError",
        str(tmp_path / "notes.txt"): "is a file, but none of .parquet, .arrow",
        "": r"is not hf:NAME\[:SPLIT",
        "user/name:test": "'user/name' .*ConnectionError",
    }.items():
        refuses(message, read_dataset, spec)


# Ids of a turn --------------------------------------------------------------------------------------------------------


TOKENIZER = tiny_tokenizer()
BRIEF = {"role": "system", "content": "S"}
TWO = EvalPrompt("chat", 4, [BRIEF, {"role": "user", "content": "A"}], ("B", "C"))


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
        asked(EvalPrompt("qa", 3, [BRIEF, {"role": "user", "content": " \n"}]))
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
