"""Random conversations through the chat templates of five families: trained as the base would see them, or rejected.

The files in ``templates/`` write what the families' own templates write; prompts and answers are put together here a
second time, from the messages alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import expand_sources
from drafthead.data.text.transcripts import TranscriptEncoder, iter_transcripts
from support import fuzz

Turn = dict[str, Any]
RESULT = 'he says "3"\n'  # of a tool; some templates write it as JSON


# What each base writes ----------------------------------------------------------------------------------------------


def llama3(turn: Turn) -> str | None:
    if turn["call"]:
        arguments = json.dumps(turn["call"]["arguments"], ensure_ascii=False)
        call = f'{{"name": "{turn["call"]["name"]}", "parameters": {arguments}}}<|eot_id|>'
        return None if turn["content"] or turn["thought"] else call
    return None if turn["thought"] else turn["content"].strip() + "<|eot_id|>"


def qwen3(turn: Turn) -> str | None:
    thought, content, call = turn["thought"].strip("\n"), turn["content"].lstrip("\n"), turn["call"]
    written = f"<think>\n{thought}\n</think>\n\n{content}" if turn["thought"] else None
    if call and written:
        written += "\n" * bool(turn["content"]) + f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return written and written + "<|im_end|>"


def qwen3_without_thinking(turn: Turn) -> str | None:
    if turn["thought"]:
        return None
    written = qwen3({**turn, "thought": "-"})
    return written and written.removeprefix("<think>\n-\n</think>\n\n")


def mistral(turn: Turn) -> str | None:
    if turn["call"]:
        call = json.dumps(turn["call"], ensure_ascii=False)[:-1] + f', "id": "{turn["id"]}"}}'
        return None if turn["content"] or turn["thought"] or len(turn["id"]) != 9 else f"[TOOL_CALLS] [{call}]</s>"
    return None if turn["thought"] else f" {turn['content']}</s>"


def deepseek(turn: Turn) -> str | None:
    end = "<｜end▁of▁sentence｜>"
    if turn["call"]:
        return None if turn["content"] or turn["thought"] else "call"  # depends on earlier calls: only decoded below
    return None if turn["thought"] else turn["content"] + end


def gpt_oss(turn: Turn) -> str | None:
    thought, call = turn["thought"], turn["call"]
    if not call:
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        return f"{before}<|channel|>final<|message|>{turn['content']}<|return|>"
    if thought and turn["content"]:
        return None
    before = f"<|channel|>analysis<|message|>{thought or turn['content']}<|end|><|start|>assistant"
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    called = f" to=functions.{call['name']}<|channel|>commentary json<|message|>{arguments}<|call|>"
    return (before if thought or turn["content"] else "") + called


@dataclass(frozen=True)
class Family:
    """A family's template and tokens, and the function that writes a turn; None: it cannot be written."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    writes: Callable[[Turn], str | None]
    kwargs: dict[str, Any] = field(default_factory=dict)
    added: tuple[str, ...] = ()  # tokens that are not special


HEADER = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
ROLES = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FAMILIES = {
    "llama3": Family("llama3", HEADER, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), llama3),
    "qwen3": Family("qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), qwen3, added=THINK),
    "qwen3, no thinking": Family(
        "qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), qwen3_without_thinking, {"enable_thinking": False}, THINK
    ),
    "mistral": Family("mistral", MISTRAL, ("</s>",), mistral),
    "deepseek": Family("deepseek", DEEPSEEK, DEEPSEEK[1:], deepseek, added=ROLES),
    "gpt-oss": Family("gpt_oss", HARMONY, ("<|return|>", "<|call|>"), gpt_oss),
}


@cache
def encoder(name: str) -> TranscriptEncoder:
    family, tokenizer = FAMILIES[name], tiny_tokenizer()
    tokenizer.chat_template = (Path(__file__).parent / "templates" / f"{family.template}.jinja").read_text()
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in family.special]
    )
    tokenizer.backend_tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.added])
    tokenizer.bos_token, tokenizer.eos_token = family.special[0], family.ends[0]
    ids = [tokenizer.convert_tokens_to_ids(text) for text in family.ends]
    return TranscriptEncoder(tokenizer, set(ids), len(tokenizer), family.kwargs)


# Conversations ------------------------------------------------------------------------------------------------------

PIECES = ("a", "Hello world", " ", "\n", "\t", "é", "日本", "😀", "e\u0301", "\u200b", "\u2028", "\x00", '"q\\', "{x}",
          "{{ 1 }}", "{% if %}", "<b>", "</b>", "'", "```json", "user\n", "assistant", "<think",
          "<tool_response>")  # fmt: skip
CONTROL = ("<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "[INST]", "</s>", "<｜User｜>", "<|channel|>", "<|call|>")
plain = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(lambda p: "".join(p)).filter(str.strip)
texts = st.one_of(plain, plain, plain, st.tuples(plain, st.sampled_from(CONTROL), plain).map("".join))
values = st.none() | st.integers() | texts | st.lists(texts, max_size=2)
arguments = st.dictionaries(st.sampled_from("xy"), values, max_size=2)
calls = st.fixed_dictionaries({"name": st.sampled_from(["sum", "find"]), "arguments": arguments})
answers = st.fixed_dictionaries(
    {
        "content": texts,
        "thought": st.just("") | texts,
        "call": st.none() | st.none() | calls,
        "id": st.sampled_from(["abcde1234", "call_1"]),
        "beside": st.booleans(),
        "key": st.sampled_from(["reasoning_content", "reasoning", "thinking"]),
        "trained": st.sampled_from([True, True, True, False]),
        "noise": st.sampled_from([{}, {}, {"uid": 7}, {"refusal": None}]),
    }
)
rounds = st.lists(st.tuples(texts, st.lists(answers, min_size=1, max_size=2)), min_size=1, max_size=3)
systems = st.none() | st.tuples(st.sampled_from(["message", "system", "system_prompt"]), texts)
TOOLS = [{"type": "function", "function": {"name": name, "description": "D.", "parameters": {
    "type": "object", "properties": {"x": {"type": "string"}}}}} for name in ("sum", "find")]  # fmt: skip
tools = st.sampled_from([None, None, TOOLS, json.dumps(TOOLS), [json.dumps(t) for t in TOOLS]])


def build(system: tuple[str, str] | None, talk: Any, tools: Any) -> tuple[dict[str, Any], list[Turn]]:
    """Return a row as strangers write it, and its plain turns."""
    turns: list[Turn] = []
    for question, replies in talk:
        turns.append({"role": "user", "content": question})
        for n, reply in enumerate(replies):
            last = n == len(replies) - 1
            chosen = reply["call"] or {"name": "sum", "arguments": {}}
            call = None if last else {"name": chosen["name"], "arguments": chosen["arguments"]}
            content = "" if call and not reply["beside"] else reply["content"]
            turns.append({**reply, "role": "assistant", "content": content, "call": call})
            turns += [] if last else [{"role": "tool", "content": RESULT, "id": reply["id"]}]
    messages = []
    for turn in turns:
        message = {"role": turn["role"], "content": turn["content"]}
        if turn["role"] == "tool":
            message["tool_call_id"] = turn["id"]
        if turn["role"] == "assistant":
            message |= turn["noise"] | ({} if turn["trained"] else {"weight": 0})
            message |= {turn["key"]: turn["thought"]} if turn["thought"] else {}
        if turn.get("call"):
            function = {**turn["call"], "arguments": json.dumps(turn["call"]["arguments"])}
            message |= {"content": turn["content"] or None}
            message["tool_calls"] = [{"id": turn["id"], "type": "function", "function": function}]
        messages.append(message)
    row: dict[str, Any] = {"messages": messages, "source": "stranger"} | ({"tools": tools} if tools else {})
    if system and system[0] == "message":
        messages.insert(0, {"role": "system", "content": system[1]})
    elif system:
        row[system[0]] = system[1]
    return row, turns


def as_served(turns: list[Turn], system: tuple[str, str] | None, family: str) -> list[Turn]:
    served = [{"role": "system", "content": system[1]}] if system else []
    for turn in turns:
        message = {"role": turn["role"], "content": turn["content"]}
        if turn["role"] == "tool":
            message["tool_call_id"] = turn["id"]
        if turn.get("thought"):
            message |= {"reasoning_content": turn["thought"], "thinking": turn["thought"]}
        if call := turn.get("call"):
            if family == "deepseek":
                call = {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            message["tool_calls"] = [{"id": turn["id"], "type": "function", "function": call}]
        served.append(message)
    return served


def render(name: str, messages: list[Turn], tools: Any) -> str:
    """The template's text by transformers, with null as the content of DeepSeek's calls, which transformers drops."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer, family = encoder(name).tokenizer, FAMILIES[name]
    if name == "deepseek":
        messages = [{**m, "content": m["content"] or None} if "tool_calls" in m else m for m in messages]
    given = {**tokenizer.special_tokens_map, **family.kwargs, **({"tools": tools} if tools else {})}
    template = tokenizer.chat_template
    return str(render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **given)[0][0])


def has_control(name: str, turn: Turn) -> bool:
    family = FAMILIES[name]
    tokens = (*family.special, *family.ends, *CHATML, *(ROLES[:2] if family.added == ROLES else ()))
    text = json.dumps([turn["content"], turn["thought"], turn["call"]], ensure_ascii=False)
    return any(token in text for token in tokens)


def check(folder: Path, system: Any, talk: Any, tools: Any) -> None:
    row, turns = build(system, talk, tools)
    path = folder / "chats.jsonl"
    path.write_text(json.dumps(row))
    for name, family in FAMILIES.items():
        enc, findings = encoder(name), Findings()
        found = list(iter_transcripts(expand_sources(str(path))[0], findings))
        trained = [answer for where, t in found for answer in enc.answers(t, findings, where, None)]
        due = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and turn["trained"]]
        assert bool(trained) != bool(findings.rejected)
        if not trained:
            assert findings.rejected[0].startswith(f"{path} line 1"), "named by its line"
        writable = [family.writes(turns[n]) is not None and not has_control(name, turns[n]) for n in due]
        if not all(writable):
            assert not trained, f"{name} trains what its base does not write"
        elif due and not any(turn.get("call") for turn in turns) and not tools:
            assert trained, f"{name}: {findings.rejected}"
        given = None if not tools else TOOLS
        encode = enc.tokenizer.encode
        for n, (ids, boundary) in zip(due, trained, strict=False):
            prompt = render(name, as_served(turns[:n], system, name), given)
            assert ids[:boundary] == encode(prompt, add_special_tokens=False), f"{name}: another prompt"
            expected, written = family.writes(turns[n]), enc.tokenizer.decode(ids[boundary:])
            if name == "deepseek" and turns[n]["call"]:
                arguments = json.dumps(turns[n]["call"]["arguments"], ensure_ascii=False)
                assert f"{turns[n]['call']['name']}\n```json\n{arguments}\n```" in written
            else:
                assert ids[boundary:] == encode(expected, add_special_tokens=False), (name, written, expected)
        assert len(trained) in (0, len(due))
        # Nothing is dropped without a word.
        lines = " ".join(findings.lines())
        assert "column 'source' (1)" in lines or not found
        assert ("key 'uid'" in lines) == any(turn.get("noise") == {"uid": 7} for turn in turns) or not found
        if trained and any(not turn.get("trained", True) for turn in turns):
            assert "marked as not to train" in lines


REPLY = {"content": "a", "thought": "", "call": None, "id": "abcde1234", "beside": False, "key": "reasoning",
         "trained": True, "noise": {}}  # fmt: skip
TALK = [("q", [REPLY]), ("r", [{**REPLY, "content": "b"}])]
CALLED = [("q", [REPLY, {**REPLY, "content": "b"}])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@example(("system", "Be brief."), TALK, None)
@example(None, [("q", [{**REPLY, "thought": "hm"}]), ("r", [{**REPLY, "thought": "so"}])], None)
@example(None, CALLED, json.dumps(TOOLS))
@example(("message", "s"), [("q", [{**REPLY, "thought": "hm"}, {**REPLY, "thought": "so"}])], TOOLS)
@example(None, [("q", [REPLY, {**REPLY, "thought": "hm"}])], None)  # a call with an empty thought
@example(None, [("q", [{**REPLY, "trained": False}, REPLY])], None)  # a call in the context
@given(systems, rounds, tools)
@fuzz(12)
def test_conversations(folder: Path, system: Any, talk: Any, tools: Any) -> None:
    check(folder, system, talk, tools)


@pytest.mark.slow
@given(systems, rounds, tools)
@fuzz(200)
def test_two_hundred_conversations(folder: Path, system: Any, talk: Any, tools: Any) -> None:
    check(folder, system, talk, tools)


@pytest.mark.parametrize("name", ["llama3", "mistral", "deepseek", "gpt-oss", "qwen3, no thinking"])
def test_tool_calls_are_trained(name: str, folder: Path) -> None:
    reply = {**REPLY, "thought": "hm" if name == "gpt-oss" else ""}
    row, _ = build(("message", "s"), [("q", [reply, reply])], None if name == "deepseek" else TOOLS)
    (folder / "calls.jsonl").write_text(json.dumps(row))
    findings = Findings()
    ((where, transcript),) = iter_transcripts(expand_sources(str(folder / "calls.jsonl"))[0], findings)
    assert len(encoder(name).answers(transcript, findings, where, None)) == 2, findings.rejected
