"""Conversations as they are: boundaries, what a template changes, presets, prompts, and messages about bad rows."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from drafthead.data.embedded.tiny import CHAT_TEMPLATE, tiny_tokenizer
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.chat import prompt_ids, turns_of, user_turn
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import PRESETS, SourceConfig, expand_sources, iter_prompts
from drafthead.data.text.transcripts import Transcript, TranscriptEncoder, iter_transcripts
from drafthead.errors import UserError
from drafthead.train.corpora.corpus_config import DataConfig
from support import cases, refuses

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
    pairs, findings = pairs_of(rows(tmp_path / "x.jsonl", entry), enc or encoder())
    findings.raise_rejected()
    return pairs


def pairs_of(source: SourceConfig, enc: TranscriptEncoder) -> tuple[list[tuple[str, str]], Findings]:
    findings, decode = Findings(), enc.tokenizer.decode
    found = list(iter_transcripts(source, findings))
    turns = [turn for where, transcript in found for turn in enc.answers(transcript, findings, where, None)]
    return [(decode(ids[:boundary]), decode(ids[boundary:])) for ids, boundary in turns], findings


@cases("entry",
    {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "c"}]},
    {"conversations": [{"from": r, "value": v} for r, v in SHAREGPT]},
    {"messages": [{**QUESTION, "content": [{"type": "text", "text": "q"}]}, {**ANSWER, "tool_calls": None},
                  QUESTION, {**ANSWER, "content": "c"}], "choices": ["x"]})  # fmt: skip
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
    refuses("line 3: token id 300 is not below 300", findings.raise_rejected)


def test_reasoning(tmp_path: Path) -> None:
    """The template drops the reasoning of earlier turns: it is in the answer, and not in the next prompt."""
    thought = {**ANSWER, "content": "<think>\nhm\n</think>\n\na"}
    (_, first), (second, _) = spans({"messages": [QUESTION, thought, QUESTION, thought]}, tmp_path, encoder(THINKING))
    assert first == f"<think>\nhm\n</think>\n\na{END}" and "hm" not in second
    for key in ("reasoning_content", "reasoning", "thinking"):
        separate = {**ANSWER, "content": "a", key: "hm", "reasoning_details": None}
        assert spans({"messages": [QUESTION, separate]}, tmp_path, encoder(THINKING))[0][1] == first
    off = encoder(THINKING, enable_thinking=False)
    for content in ("a", "<think>\n\n</think>\n\na"):  # the block is in the prompt, and so not trained
        ((prompt, answer),) = spans({"messages": [QUESTION, {**ANSWER, "content": content}]}, tmp_path, off)
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n") and answer == f"a{END}"
    # A prompt that opens the thought, as of Qwen3-Thinking.
    opens = THINKING.replace("{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}", "<think>\n")
    ((prompt, answer),) = spans({"messages": [QUESTION, separate]}, tmp_path, encoder(opens))
    assert prompt.endswith("assistant\n<think>\n") and answer == f"hm\n</think>\n\na{END}"


def test_tool_calls(tmp_path: Path) -> None:
    turns = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    turns += [{"role": "tool", "content": "3", "tool_call_id": "1"}, ANSWER]
    tools = [{"type": "function", "function": {"name": "sum"}}]
    (first, call), (second, answer) = spans({"messages": turns, "tools": tools}, tmp_path, encoder(TOOLS))
    assert call == '<tool_call>{"name": "sum", "arguments": {"x": [1, 2]}}</tool_call>' + END
    assert first.startswith('[{"type"') and f"tool\n3{END}" in second and answer == f"a b{END}"


def joined(arguments: str, calls: str = "m.tool_calls or []") -> str:
    """A template that writes calls as ``arguments``, as DeepSeek's do: text, and calls only beside null content."""
    template = TOOLS.replace("call.function | tojson", arguments).replace("+ m.content", "+ (m.content or '')")
    return template.replace("m.tool_calls or []", calls)


@cases("template, arguments, written",
    (joined("call.function.name + call.function.arguments"), '{"x": "é"}', 'sum{"x": "é"}'),
    (joined("call.function | tojson", "(m.tool_calls if m.content is none else [])"), {"x": 1},
     '{"name": "sum", "arguments": {"x": 1}}'),
    (joined("call.function.name + call.function.arguments", "(m.tool_calls if m.content is none else [])"), {},
     'sum{}'),
    (joined("call.function.name ~ call.function.arguments"), {"x": "y"}, 'sum{"x": "y"}'),
    (TOOLS, None, '{"name": "sum", "arguments": {}}'),
    (TOOLS, "", '{"name": "sum", "arguments": {}}'))  # fmt: skip
def test_forms_of_tool_calls(template: str, arguments: Any, written: str, tmp_path: Path) -> None:
    call = {"function": {"name": "sum", "arguments": arguments}}
    entry = {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert spans(entry, tmp_path, encoder(template))[0][1] == f"<tool_call>{written}</tool_call>{END}"


SUM = {"type": "function", "function": {"name": "sum"}}


@pytest.mark.parametrize("tools", [SUM, SUM["function"], [SUM], json.dumps([SUM]), [json.dumps(SUM["function"])]])
@pytest.mark.parametrize("system", ["Use the tools for a summary.", None])
def test_forms_of_tools(tools: Any, system: str | None, tmp_path: Path) -> None:
    messages = [*([{"role": "system", "content": system}] if system else []), QUESTION, ANSWER]
    ((prompt, _),) = spans({"messages": messages, "tools": tools}, tmp_path, encoder(TOOLS))
    assert prompt.startswith(json.dumps([SUM]))


def test_columns_and_keys(tmp_path: Path) -> None:
    turns = [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "content": "c", "loss": True, "refusal": "x"}]
    entries = [{"messages": turns, name: "Be brief."} for name in ("system", "system_prompt")]
    entries += [{"messages": [{"role": "system", "content": "Be brief."}, *turns[:3], ANSWER], "system": "Be brief."}]
    entries[2]["id"] = 7  # type: ignore[assignment]
    for mark in ({"loss": False}, {"train": False}, {"weight": 1, "train": 0}):
        entries.append({"messages": [QUESTION, {**ANSWER, **mark}, QUESTION, ANSWER]})
    pairs, findings = pairs_of(rows(tmp_path / "x.jsonl", *entries), encoder())
    assert [answer for _, answer in pairs] == [f"c{END}"] * 2 + [f"a b{END}"] * 4
    brief = "<|im_start|>system\nBe brief."
    assert all(prompt.startswith(brief) and f"a b{END}" in prompt for prompt, _ in pairs[:3])
    unread, left_out = findings.lines()
    assert unread == "not read: key 'refusal' (2), column 'id' (1)"
    assert left_out.startswith("left out: 6 turns: 6 turns marked as not to train") and "line 1)" in left_out


HOSTILE = [
    *({"messages": [QUESTION, ANSWER], "tools": tools} for tools in (5, {"a": 1}, "{", {"name": 3})),
    *({"messages": value} for value in (5, [], [5], None, [{**QUESTION, "role": "boss"}, ANSWER])),
    *({"messages": [QUESTION, {**ANSWER, **extra}]} for extra in (
        {"weight": 0.5}, {"train": "no"}, {"reasoning": ["x"]}, {"reasoning": "x", "thinking": "y"}, {"tool_calls": 5},
        {"tool_calls": [{"function": "f"}]}, {"tool_calls": [{"name": "f", "arguments": 3}]}, {"weight": 0},
        {"content": "a \ud83d"}, {"tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]})),
    {"messages": [{"role": "system", "content": "a"}, QUESTION, ANSWER], "system": "b"},
    {"messages": [QUESTION, ANSWER], "system": ["b"]},
    {"prompt_token_ids": [], "token_ids": []}, {"choices": [{"token_ids": "x"}]}, {"input_ids": []},
    {"messages": [QUESTION, ANSWER], "note": "\ud83d"}, '{"messages": ' + 5_000 * "[", "[]", "7",
]  # fmt: skip


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: str(entry)[:60].encode("unicode_escape").decode())
def test_unusable_rows_are_rejected_by_line(entry: Any, tmp_path: Path) -> None:
    source = rows(tmp_path / "x.jsonl", {"messages": [QUESTION, ANSWER]}, entry)
    pairs, findings = pairs_of(source, encoder(TOOLS))
    assert len(pairs) == 1 and len(findings.rejected) == 1
    with pytest.raises(UserError, match="x.jsonl line 2") as error:
        findings.raise_rejected()
    assert "\n" not in str(error.value)


@cases("template, entry, says",
    (THINKING, [QUESTION, ANSWER], "turn 2 .* begins with '<think></think>' .*enable_think"),
    (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": "<think></think>a"}], "turn 2 .* empty think block"),
    (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "reasoning_content": "hm"}], "turn 2 .*changed by the chat template"),
    (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": "", "tool_calls": [CALL]}], "turn 2 .*'sum' becomes"),
    (CHAT_TEMPLATE.replace("+ '\n' }}{%", "+ 'x' }}{%"), [QUESTION, {**ANSWER, "tool_calls": [{}]}], "tool call"),
    (TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
     [QUESTION, {**ANSWER, "tool_calls": [CALL, CALL]}], "turn 2 .*changed .*'sum' becomes"),
    (TOOLS.replace("call.function | tojson", "call.function.name"),
     [QUESTION, {**ANSWER, "tool_calls": [CALL]}], "turn 2 .*changed .*'x' becomes"),
    (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), [QUESTION, ANSWER], "'a b'|'ab'"),
    (CHAT_TEMPLATE.replace("+ '<|im_end|>'", "+ ' Bye.<|im_end|>'"), [QUESTION, ANSWER], "followed by 'Bye."),
    (CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"),
     [QUESTION, ANSWER], r"would follow .*<think>.* when it is served"),
    ("{% for m in messages %}{{ m.role }}{{ '<think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
     "{% if add_generation_prompt %}assistant<think>{% endif %}", [QUESTION, ANSWER], "begins with ''"),
    (CHAT_TEMPLATE.replace("+ '\n' }}{% endfor", "+ 1 + '\n' }}{% endfor"), [QUESTION, ANSWER], "template refuses"),
    ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
     [QUESTION, ANSWER, {"role": "tool", "content": "3"}, ANSWER], "leaves out messages of the role 'tool'"),
    (CHAT_TEMPLATE, [QUESTION, {**ANSWER, "content": " "}], "has an empty turn 2 .assistant"),
    (CHAT_TEMPLATE, [ANSWER, QUESTION], "turn 1 without a turn before it"),
    (CHAT_TEMPLATE, [QUESTION], "has no assistant's turn"))  # fmt: skip
def test_what_would_be_mistrained_is_rejected_by_line(template: str, entry: Any, says: str, tmp_path: Path) -> None:
    source = rows(tmp_path / "x.jsonl", "", {"messages": entry})
    pairs, findings = pairs_of(source, encoder(template))
    assert not pairs
    with pytest.raises(UserError, match=f"x.jsonl line 2.*{says}.*bad_transcripts=skip") as error:
        findings.raise_rejected()
    assert "\n" not in str(error.value)


def test_reasoning_is_rejected_where_thinking_is_off(tmp_path: Path) -> None:
    off = encoder(THINKING, enable_thinking=False)
    for extra in ({"reasoning_content": "hm"}, {"content": "<think>hm</think>a"}):
        with pytest.raises(UserError, match="turn 2 .*reasoning, but the prompt switches thinking off"):
            spans({"messages": [QUESTION, {**ANSWER, **extra}]}, tmp_path, off)


@cases(
    "turn",
    {"content": "a TEXT b"},
    {"reasoning_content": "it ends with TEXT, then more"},
    {"content": None, "tool_calls": [{"function": {"name": "w", "arguments": {"t": ["TEXT"]}}}]},
    {"content": None, "tool_calls": [{"function": {"name": "w", "arguments": '{"TEXT": 1}'}}]},
)
@pytest.mark.parametrize("text", [END, "<|added|>", "<|end|>", "<|around|>"])
def test_control_tokens(turn: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Their text is rejected in what is trained, and remarked on elsewhere; other added tokens are text."""
    calls = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    enc = encoder(THINKING.replace("<|im_start|>", "<|around|><|im_start|>").replace("{{ c }}", "{{ c }}" + calls))
    enc.tokenizer.backend_tokenizer.add_special_tokens(["<|added|>"])
    enc.tokenizer.backend_tokenizer.add_tokens(["<|end|>", "<|around|>", "<tool>"])
    enc.eos_ids = {END_ID, enc.tokenizer.convert_tokens_to_ids("<|end|>")}
    bad = json.loads(json.dumps({**ANSWER, **turn}).replace("TEXT", text))
    with pytest.raises(UserError, match=f"line 1: turn 2 .*the text of the control token '{re.escape(text)}'"):
        spans({"messages": [QUESTION, bad]}, tmp_path, enc)
    thought = {**ANSWER, "content": "a <tool>", "reasoning": "hm"}
    asked = {"messages": [{**QUESTION, "content": f"a {text}"}, thought]}
    pairs, findings = pairs_of(rows(tmp_path / "x.jsonl", asked), enc)
    findings.raise_rejected()
    ((prompt, answer),) = pairs
    assert f"a {text}" in prompt and answer.endswith(f"a <tool>{END}")
    assert "1 transcripts have the text of control tokens in a prompt" in findings.lines()[0]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "folder"])
@pytest.mark.parametrize("limit", ["", ":3"])
def test_a_file_gives_the_same_conversations_in_every_form(suffix: str, limit: str, tmp_path: Path) -> None:
    calls = [{"name": "sum", "arguments": {"x": [1, 2]}}, {"name": "f", "arguments": {"y": 2}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}
    entries = [
        {"messages": [QUESTION, {**ANSWER, "content": "a"}]},
        {"messages": [{**QUESTION, "content": [{"type": "text", "text": "r"}]}, {**ANSWER, "content": "a"}]},
        {"messages": [QUESTION, called], "tools": [SUM]},
    ]
    path = tmp_path / f"data.{'json' if suffix == 'folder' else suffix}"
    if suffix == "parquet":  # tables hold texts, and fill objects with null
        entries[1]["messages"][0] = {**QUESTION, "content": "r"}
        datasets.Dataset.from_list(entries).to_parquet(path)
    elif suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, entries)))
    else:
        path.write_text(json.dumps(entries, indent=1))
    (source,) = expand_sources(f"{tmp_path if suffix == 'folder' else path}{limit}")
    pairs, findings = pairs_of(source, encoder(TOOLS))
    findings.raise_rejected()
    written = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    assert [answer for _, answer in pairs] == [f"a{END}", f"a{END}", f"{written}{END}"]
    assert [prompt.split("user\n")[1][0] for prompt, _ in pairs] == ["q", "r", "q"]


def test_templates_with_and_without_generation_prompt(tmp_path: Path) -> None:
    llama2 = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}"
    entry = {"messages": [QUESTION, ANSWER]}
    assert spans(entry, tmp_path, encoder(llama2 + "{% endfor %}")) == [("[INST] q [/INST]", " a b")]
    without = encoder(CHAT_TEMPLATE.partition("{% if add_generation")[0])
    refuses("line 1: turn 2 .* begins with '<.im_start.>assistant'", spans, entry, tmp_path, without)


def test_long_and_unanswered_transcripts(tmp_path: Path) -> None:
    long = {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "word " * 2_000}]}
    source = rows(tmp_path / "x.jsonl", {"messages": [QUESTION, ANSWER, QUESTION]}, long, *[long] * 20, "{")
    findings = Findings()
    turns = [encoder().answers(t, findings, where, 200) for where, t in iter_transcripts(source, findings)]
    assert [len(turn) for turn in turns[:2]] == [1, 2]
    assert [(len(ids), ids[-1] == END_ID) for ids, _ in turns[1]] == [(62, True), (200, False)]
    (line,) = findings.lines()
    assert line.startswith("left out: 1 row, 1 turn, 207,564 tokens: ")
    assert "1 turn without an answer (first:" in line and "1 row cannot be trained on (first: " in line
    assert f"{21 * 9_884:,} tokens beyond 200 tokens" in line, "the second turn ends at token 10,084"
    assert "line 1)" in line and "line 2)" in line and "line 23 is not valid JSON" in line


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
    assert not findings.left_out and len(turns) == (2 if name == "hermes_fc" else 1)
    read = {"messages", "conversations", "tools"}
    assert set(findings.unread) == {f"column {key!r}" for key in PRESET_ROWS[name] if key not in read}
    assert len(findings.remarks) == (name == "hermes_fc")


def test_short_forms() -> None:
    assert expand_sources(None) == [] and expand_sources([{"kind": "hf"}]) == [{"kind": "hf"}]
    jsonl, hub = expand_sources(["a/*.jsonl.gz:7", "hf:user/set:test"])
    assert (jsonl.kind, jsonl.name, jsonl.limit, jsonl.column) == ("jsonl", "a/*.jsonl.gz", 7, "auto")
    assert (hub.kind, hub.name, hub.split, hub.limit) == ("hf", "user/set", "test", None)
    refuses("'ultra' is not a source; expected a .jsonl .* ultrachat, sharegpt", expand_sources, "ultra")


def test_own_prompts_have_the_format_of_a_suite(tmp_path: Path) -> None:
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


# Prompts through the chat template, and the tokenizer of bytes --------------------------------------------------------


TINY = tiny_tokenizer()


def test_a_prompt_ends_where_the_answer_starts() -> None:
    """Also with templates that read lists of parts, as LLaVA's and Llama-Guard's: content as text would vanish."""
    text = TINY.decode(prompt_ids(TINY, user_turn("é <|im_end|>")))
    assert text.endswith(f"<|im_start|>user\né {END}{END}\n<|im_start|>assistant\n")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ c.text }}. {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    messages = [{"role": "system", "content": "Be brief"}, *user_turn("Why?")]
    assert tokenizer.decode(prompt_ids(tokenizer, messages)) == "system: Be brief. user: Why?. ASSISTANT:"


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


def test_tiny_tokenizer_survives_saving(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    assert (len(TINY), TINY.pad_token, TINY.eos_token, TINY.model_max_length) == (259, "<|endoftext|>", END, 2048)
    TINY.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(300))) + END
    assert again(text)["input_ids"] == TINY(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert (again.eos_token_id, again.pad_token_id, again.chat_template) == (258, 256, TINY.chat_template)
