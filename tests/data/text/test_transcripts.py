"""Conversations as they are: boundaries, what a template changes, presets, and messages about bad rows."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from drafthead.data.embedded.tiny import CHAT_TEMPLATE, tiny_tokenizer
from drafthead.data.text.chat import turns_of
from drafthead.data.text.sources import PRESETS, SourceConfig, expand_sources, iter_prompts
from drafthead.data.text.transcripts import Findings, Transcript, TranscriptEncoder, iter_transcripts
from drafthead.data.utils.errors import UserError
from drafthead.eval.prompts.suites import load_suite
from drafthead.train.corpora.corpus_config import DataConfig

END, END_ID = "<|im_end|>", 258
QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}
SHAREGPT = (("human", "q"), ("gpt", "a b"), ("human", "q"), ("gpt", "c"))
THINKING = (  # in the manner of Qwen3: reasoning stays in the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set c = c.split('</think>')[-1] | trim %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + r + '\n</think>\n\n' }}{% endif %}{{ c }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"x": [1, 2]}'}}


def encoder(template: str = CHAT_TEMPLATE, **kwargs: Any) -> TranscriptEncoder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return TranscriptEncoder(tokenizer, {END_ID}, 300, kwargs)


def rows(path: Path, *entries: Any) -> SourceConfig:
    path.write_text("".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in entries))
    (source,) = expand_sources(str(path))
    assert isinstance(source, SourceConfig)
    return source


def spans(entry: dict[str, Any], tmp_path: Path, enc: TranscriptEncoder | None = None) -> list[tuple[str, str]]:
    """The prompts and trained texts of one row, or the error that rejects it."""
    findings, enc = Findings(), enc or encoder()
    ((where, transcript),) = iter_transcripts(rows(tmp_path / "x.jsonl", entry), findings) or [("", Transcript())]
    turns = enc.answers(transcript, findings, where, None)
    findings.raise_rejected()
    decode = enc.tokenizer.decode
    return [(decode(ids[:boundary]), decode(ids[boundary:])) for ids, boundary in turns]


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "c"}]},
        {"conversations": [{"from": r, "value": v} for r, v in SHAREGPT]},
        {"messages": [{**QUESTION, "content": [{"type": "text", "text": "q"}]}, {**ANSWER, "tool_calls": None},
                      QUESTION, {**ANSWER, "content": "c"}], "choices": ["x"]},
    ],
)  # fmt: skip
def test_assistant_turns_are_unchanged_and_nothing_else_is_trained(entry: dict[str, Any], tmp_path: Path) -> None:
    (first, a), (second, c) = spans(entry, tmp_path)
    assert (a, c) == (f"a b{END}", f"c{END}")
    assert first.endswith(f"user\nq{END}\n<|im_start|>assistant\n")
    assert second == f"{first}{a}\n<|im_start|>user\nq{END}\n<|im_start|>assistant\n"


def test_token_ids_of_a_server(tmp_path: Path) -> None:
    logged = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3, END_ID]}, {"token_ids": [4]}]}
    plain = {"prompt_token_ids": [1, 2], "token_ids": [3, 299]}
    found = list(iter_transcripts(rows(tmp_path / "x.jsonl", logged, plain), findings := Findings()))
    turns = [encoder().answers(t, findings, where, None)[0] for where, t in found]
    assert turns == [([1, 2, 3, END_ID], 2), ([1, 2, 4], 2), ([1, 2, 3, 299], 2)]
    assert not encoder().answers(Transcript(token_ids=([1], [300])), findings, "line 3", None)
    with pytest.raises(UserError, match="line 3: token id 300 is not below 300"):
        findings.raise_rejected()


def test_reasoning(tmp_path: Path) -> None:
    """The template drops the reasoning of earlier turns: it is in the answer, and not in the next prompt."""
    thought = {**ANSWER, "content": "<think>\nhm\n</think>\n\na"}
    (_, first), (second, _) = spans({"messages": [QUESTION, thought, QUESTION, thought]}, tmp_path, encoder(THINKING))
    assert first == f"<think>\nhm\n</think>\n\na{END}" and "hm" not in second
    separate = {**ANSWER, "content": "a", "reasoning_content": "hm"}
    assert spans({"messages": [QUESTION, separate]}, tmp_path, encoder(THINKING))[0][1] == first
    off = encoder(THINKING, enable_thinking=False)
    for content in ("a", "<think>\n\n</think>\n\na"):  # the block is in the prompt, and so not trained
        ((prompt, answer),) = spans({"messages": [QUESTION, {**ANSWER, "content": content}]}, tmp_path, off)
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n") and answer == f"a{END}"


def test_tool_calls(tmp_path: Path) -> None:
    turns = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    turns += [{"role": "tool", "content": "3", "tool_call_id": "1"}, ANSWER]
    tools = [{"type": "function", "function": {"name": "sum"}}]
    (first, call), (second, answer) = spans({"messages": turns, "tools": tools}, tmp_path, encoder(TOOLS))
    assert call == '<tool_call>{"name": "sum", "arguments": {"x": [1, 2]}}</tool_call>' + END
    assert first.startswith('[{"type"') and f"tool\n3{END}" in second and answer == f"a b{END}"


@pytest.mark.parametrize(
    ("template", "entry", "says"),
    [
        (THINKING, [QUESTION, ANSWER], "turn 2 .* begins with '<think></think>' .*enable_think"),
        (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": "<think></think>a"}], "turn 2 .* empty think block"),
        (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "reasoning_content": "hm"}], "turn 2 .*changed by the chat template"),
        (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": "", "tool_calls": [CALL]}], "turn 2 .*changed .* for 'sum'"),
        (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": f"a{END}b"}], "turn 2 .*special token '<|im_end|>'"),
        (CHAT_TEMPLATE.replace("+ '\n' }}{%", "+ 'x' }}{%"), [QUESTION, {**ANSWER, "tool_calls": [{}]}], "tool call"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), [QUESTION, ANSWER], "'a'|'ab'"),
        (CHAT_TEMPLATE.replace("+ '<|im_end|>'", "+ ' Bye.<|im_end|>'"), [QUESTION, ANSWER], "followed by 'Bye."),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
         [QUESTION, ANSWER, {"role": "tool", "content": "3"}, ANSWER], "leaves out messages of the role 'tool'"),
        (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": " "}], "has an empty turn 2 .assistant"),
        (CHAT_TEMPLATE, [{**QUESTION, "role": "boss"}, ANSWER], "role 'boss'"),
        (CHAT_TEMPLATE, [ANSWER, QUESTION], "turn 1 without a turn before it"),
        (CHAT_TEMPLATE, [QUESTION], "has no assistant's turn"),
        (CHAT_TEMPLATE, [{**QUESTION, "content": [{"type": "image"}]}, ANSWER], "a list as content"),
        (CHAT_TEMPLATE, "text", "holds a str"),
    ],
)  # fmt: skip
def test_what_would_be_mistrained_is_rejected_by_line(template: str, entry: Any, says: str, tmp_path: Path) -> None:
    source = rows(tmp_path / "x.jsonl", "", {"messages": entry})
    findings = Findings()
    for where, transcript in iter_transcripts(source, findings):
        assert encoder(template).answers(transcript, findings, where, None) == []
    with pytest.raises(UserError, match=f"x.jsonl line 2.*{says}.*bad_transcripts=skip") as error:
        findings.raise_rejected()
    assert "\n" not in str(error.value)


def test_templates_with_and_without_generation_prompt(tmp_path: Path) -> None:
    llama2 = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}"
    entry = {"messages": [QUESTION, ANSWER]}
    assert spans(entry, tmp_path, encoder(llama2 + "{% endfor %}")) == [("[INST] q [/INST]", " a b")]
    without = encoder(CHAT_TEMPLATE.partition("{% if add_generation")[0])
    with pytest.raises(UserError, match="line 1: turn 2 .* begins with '<.im_start.>assistant' .* generation prompt"):
        spans(entry, tmp_path, without)


def test_long_and_unanswered_transcripts(tmp_path: Path) -> None:
    long = {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "word " * 20_000}]}
    source = rows(tmp_path / "x.jsonl", {"messages": [QUESTION, ANSWER, QUESTION]}, long, *[long] * 20, "{")
    findings = Findings()
    turns = [encoder().answers(t, findings, where, 200) for where, t in iter_transcripts(source, findings)]
    assert [len(turn) for turn in turns[:2]] == [1, 2]
    assert [(len(ids), ids[-1] == END_ID) for ids, _ in turns[1]] == [(62, True), (200, False)]
    unanswered, shortened, broken = findings.lines()
    assert unanswered.startswith("1 transcripts do not end with the assistant") and "line 1)" in unanswered
    assert shortened.startswith("21 transcripts are longer than 200 tokens") and "line 2)" in shortened
    assert "line 23 is not valid JSON" in broken


PRESET_ROWS: dict[str, dict[str, Any]] = {
    "ultrachat": {"prompt": "q", "prompt_id": "1", "messages": [QUESTION, ANSWER]},
    "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a b"}]},
    "open_perfectblend": {
        "source": "x", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a b"}]},
    "magpie": {
        "uuid": "1", "instruction": "q", "conversations": [
            {"from": "human", "value": "q"}, {"from": "gpt", "value": "a b"}]},
    "hermes_fc": {"id": "1", "tools": '[{"name": "sum"}]', "conversations": [
        {"from": "system", "value": "<tools>sum</tools>"}, {"from": "human", "value": "q"},
        {"from": "gpt", "value": "<tool_call>{}</tool_call>"}, {"from": "tool", "value": "3"},
        {"from": "gpt", "value": "a b"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_rows_of_their_schema(name: str, dataset_hub: Any) -> None:
    dataset_hub.rows = lambda revision: datasets.Dataset.from_list([PRESET_ROWS[name]] * 3)
    (source,) = expand_sources(f"{name}:2")
    findings = Findings()
    found = list(iter_transcripts(source, findings))
    assert [where for where, _ in found] == [f"hf:{source.name} row {n}" for n in (0, 1)]
    opened = {"name": source.name, "subset": source.subset, "split": source.split}
    assert opened.items() <= dataset_hub.opened.items() and not findings.rejected
    turns = encoder().answers(found[0][1], findings, "", None)
    ids, boundary = turns[-1]
    assert encoder().tokenizer.decode(ids[boundary:]) == f"a b{END}"
    assert not findings.lines() and len(turns) == (2 if name == "hermes_fc" else 1)


def test_short_forms() -> None:
    assert expand_sources(None) == [] and expand_sources([{"kind": "hf"}]) == [{"kind": "hf"}]
    jsonl, hub = expand_sources(["a/*.jsonl.gz:7", "hf:user/set:test"])
    assert (jsonl.kind, jsonl.name, jsonl.limit, jsonl.column) == ("jsonl", "a/*.jsonl.gz", 7, "auto")
    assert (hub.kind, hub.name, hub.split, hub.limit) == ("hf", "user/set", "test", None)
    with pytest.raises(UserError, match="'ultra' is not a source; expected a .jsonl file.* ultrachat, sharegpt"):
        expand_sources("ultra")


def test_own_prompts_have_the_format_of_a_suite(tmp_path: Path) -> None:
    """One file serves ``data.prompts`` and ``eval suite=``."""
    lines = [
        {"prompt": "q"},
        {"messages": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a b"}]},
        {"messages": [QUESTION, ANSWER, QUESTION]},
        {"turns": ["q", "r"]},
    ]
    source = rows(tmp_path / "x.jsonl", *lines)
    prompts = list(iter_prompts(source))
    assert prompts[:3] == [[QUESTION]] * 3 and prompts[3] == [QUESTION, ANSWER, QUESTION]
    assert prompts[4] == [QUESTION, {**ANSWER, "content": ""}, {**QUESTION, "content": "r"}]
    suite = load_suite(source.name)
    assert [p.messages for p in suite] == [*prompts[:4], [QUESTION]] and suite[4].later_turns == ("r",)
    assert [turns_of(p, []) for p in prompts] == [p.messages for p in suite]
    config = DataConfig(prompts=source.name)  # type: ignore[arg-type]
    answers = config.answers
    assert answers.sources == [source] and (answers.prompts, answers.fresh, answers.self_prompted) == (5, True, 0)
    with pytest.raises(UserError, match="x.jsonl line 1: column 'input_ids' holds a list: .1., expected text, a conv"):
        list(iter_prompts(rows(tmp_path / "x.jsonl", {"input_ids": [1]})))
