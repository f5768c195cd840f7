"""Conversations whose own assistant turns are trained on: reading, checks, and token ids with boundaries. An assistant
turn becomes a prompt and an answer. The prompt is the chat template's text for the earlier turns and the generation
prompt, which is what the base reads when it is served. The answer is the template's text for the turn. If the template
drops the reasoning of earlier turns, it is therefore dropped here too."""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

from drafthead.data.text import sources
from drafthead.data.text.chat import MARK, Tokenizer, Variables, encode, encode_after, render, user_turn
from drafthead.data.text.findings import Findings
from drafthead.errors import UserError

TRANSCRIPT_ROLES = {**sources.ROLES, **dict.fromkeys(("tool", "observation", "function_response"), "tool")}
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of OpenAI-compatible servers, newer ones, gpt-oss
TRAINED = ("weight", "loss", "train")  # keys of a message that say if its turn is trained on
KEYS = ("role", "from", "content", "value", "tool_calls", "tool_call_id", "name", *REASONING, *TRAINED)
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""Texts that open and close a thought: Qwen3, DeepSeek and others; Magistral; Gemma 4."""
OPENED = tuple(opening for opening, _ in THOUGHTS)
CLOSING = re.compile("|".join(re.escape(closing) for _, closing in THOUGHTS))
EMPTY_THOUGHT = re.compile("|".join(rf"{re.escape(opening)}\s*{re.escape(closing)}" for opening, closing in THOUGHTS))
CLOSED_THOUGHT = re.compile(rf"({EMPTY_THOUGHT.pattern})\s*$")  # at a prompt's end; switches thinking off
CHANNEL = r"(?:<\|channel\|>\w+<\|message\|>)?"  # gpt-oss's text before an answer, by the base; no white space
MARKUP = r"(?:<[^<>]*>|\[[^\[\]]*\]|\w+(?=<\|message\|>)|assistant(?=<))*"  # around reasoning; no white space
NO_THINKING = "base.chat_template_kwargs={enable_thinking: false}"
Answered = tuple[list[int], int]  # ids of a prompt and its answer, and the index of the first answer token
SHOWN = 40  # characters of a text in an error message


@dataclass(frozen=True)
class Transcript:
    """A conversation, or the token ids of one prompt and answer."""

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[Any] | None = None  # definitions for the chat template
    trained: Sequence[int] = (0,)  # indices of the assistant's messages to train on; its other turns are context
    token_ids: tuple[list[int], list[int]] | None = None  # prompt and answer of a server's log, not ``messages``


# Reading -----------------------------------------------------------------------------------------------------------


def iter_transcripts(source: sources.SourceConfig, findings: Findings) -> Iterator[tuple[str, Transcript]]:
    """Yield (row's name, transcript) of a source's first ``limit`` rows; unusable rows are added to ``findings``."""
    rows = sources.iter_rows(source, stream=source.limit is not None, on_error=findings.reject)
    for row, where in islice(rows, source.limit):
        try:
            yield from ((where, transcript) for transcript in _of_row(row, source, where, findings))
        except UserError as error:
            findings.reject(error)


def _of_row(row: Mapping[str, Any], source: sources.SourceConfig, where: str, findings: Findings) -> list[Transcript]:
    """Return the conversation in a row or, from a row with token ids (a logged response of vLLM), each answer."""
    listed: Any = row.get("choices") if isinstance(row.get("choices"), list) else []
    choices: list[Any] = [choice for choice in listed if isinstance(choice, dict)] or [row]
    pairs: list[Any] = [(c.get("prompt_token_ids") or row.get("prompt_token_ids"), c.get("token_ids")) for c in choices]
    if any(answer is not None for _, answer in pairs):
        for ids in (ids for pair in pairs for ids in pair):
            if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
                raise UserError(f"{where} must have whole numbers in prompt_token_ids and token_ids")
        findings.ignore("column", row, ("choices", "prompt_token_ids", "token_ids"))
        return [Transcript(token_ids=pair) for pair in pairs]
    value, column = sources.column_value(dict(row), source, where, sources.CONVERSATIONS)
    try:
        plain = sources.with_system([*sources.iter_messages(value, TRANSCRIPT_ROLES)], row, "the row")
        turns = [{}] * (len(plain) - len(value)) + value
        messages = [_message(m, turn, n) for n, (m, turn) in enumerate(zip(plain, turns, strict=True), start=1)]
        _check_order(messages)
        trained = [n for n, turn in enumerate(turns) if messages[n]["role"] == "assistant" and _is_trained(turn)]
        if not trained:
            raise UserError("has no assistant's turn to train on")
        tools = _tools(row.get("tools"))
    except (UserError, RecursionError) as error:
        raise UserError(f"{column} {error}") from None
    findings.ignore("column", {n: v for n, v in row.items() if v is not value}, ("tools", *sources.SYSTEM_COLUMNS))
    for turn in turns:
        findings.ignore("key", turn, KEYS)
    # Datasets in ShareGPT's form write the tools into the system message and repeat them in a column.
    if tools and messages[0]["role"] == "system" and _are_defined(tools, messages[0]["content"]):
        findings.remark("transcripts name their tools in the system message; their column 'tools' is not read", where)
        tools = []
    return [Transcript(messages, tools or None, trained)]


def _message(message: Mapping[str, str], turn: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return turn ``number`` as a message for chat templates: ``message`` and what else they may read in ``turn``."""
    extra = {key: turn[key] for key in ("tool_calls", "tool_call_id", "name") if turn.get(key)}
    if not message["content"].strip() and "tool_calls" not in extra:
        raise UserError(f"has an empty turn {number} ({message['role']})")
    try:
        extra |= {"tool_calls": [_tool_call(call) for call in extra["tool_calls"]]} if "tool_calls" in extra else {}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"has a tool call in turn {number} that cannot be read ({error!r})") from None
    thoughts = [turn[key] for key in REASONING if turn.get(key)]
    if any(thought != thoughts[0] or not isinstance(thought, str) for thought in thoughts):
        raise UserError(f"has reasoning in turn {number} that is not one text: {sources.shown(thoughts)}")
    if thoughts:
        extra |= {"reasoning_content": thoughts[0], "thinking": thoughts[0]}
    return {**message, **extra}


def _is_trained(turn: Mapping[str, Any]) -> bool:
    marks = {key: turn[key] for key in TRAINED if turn.get(key) is not None}
    for key, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise UserError(f"has {key} {sources.shown(mark)} in a turn, expected 0, 1, false or true")
    return all(marks.values())


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    before = "system"
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and before in ("system", "assistant"):
            raise UserError(f"has an assistant's turn {number} without a turn before it to answer")
        before = message["role"]


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which logs write as JSON text, or as null if it is empty."""
    function = call.get("function") or call
    arguments = function["arguments"]
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    return {**call, "type": "function", "function": {"name": str(function["name"]), "arguments": dict(arguments)}}


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return tool definitions as OpenAI's API has them, from one or a list of them, as objects or JSON texts."""
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value or []
        listed = [json.loads(t) if isinstance(t, str) else t for t in (value if isinstance(value, list) else [value])]
        functions = [tool.get("function", tool) for tool in listed]
        if not all(isinstance(function["name"], str) for function in functions):
            raise TypeError("a name that is no text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"has tools that cannot be read ({error!r}): {sources.shown(value)}") from None
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]


def _are_defined(tools: Sequence[dict[str, Any]], text: str) -> bool:
    """Return True if ``text`` names all ``tools``, as system prompts do that define them."""
    return all(re.search(rf"(?<!\w){re.escape(tool['function']['name'])}(?!\w)", text) for tool in tools)


# Rendering ---------------------------------------------------------------------------------------------------------


class TranscriptEncoder:
    """Converter of transcripts to token ids, by the chat template of a base. A turn is trained on only if the
    template writes it as the base would after a served prompt, with equal content and without control tokens in it.
    Otherwise the transcript is rejected."""

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int, template_kwargs: Variables = None
    ) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.template_kwargs = dict(template_kwargs or {})
        self._writes_role = cache(self._role_is_written)

    @cached_property
    def ends(self) -> re.Pattern[str]:  # texts of tokens that end an answer
        return _any_of(self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids)))

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Texts of special tokens, ends of answers, and what the template puts around; not ``<tool_call>``."""
        try:
            around = _squeezed(EMPTY_THOUGHT.sub("", self._render(user_turn(MARK))))
        except UserError:
            around = ""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = [str(token) for token in added if token.special or str(token).strip() and str(token) in around]
        ends = self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids))
        return _any_of([*texts, *self.tokenizer.all_special_tokens, *ends])

    def answers(self, transcript: Transcript, findings: Findings, where: str, limit: int | None) -> list[Answered]:
        """Return the assistant's turns, each with everything before it, cut at ``limit`` tokens (None: all)."""
        errors: list[Exception] = []
        for messages in _forms(transcript.messages):
            turns: list[Answered] = []
            beyond = 0
            try:
                for number, (ids, boundary) in enumerate(self._turns(messages, transcript), start=1):
                    turns += [(ids[:limit], boundary)] if limit is None or boundary < limit else []
                    if limit is not None and len(ids) > limit:
                        if number < len(transcript.trained):
                            ids = encode(self.tokenizer, self._render(messages, False, transcript.tools))
                        beyond = len(ids) - limit
                        break
            except (UserError, RecursionError) as error:
                errors.append(error)
                continue
            findings.leave_out(f"beyond {limit} tokens", where, turn=len(transcript.trained) - len(turns), token=beyond)
            self._note(transcript, findings, where)
            return turns
        findings.reject(UserError(f"{where}: {errors[0]}"))
        return []

    def _note(self, transcript: Transcript, findings: Findings, where: str) -> None:
        messages, trained = transcript.messages, transcript.trained
        if not messages:
            return
        answers = sum(m["role"] == "assistant" for m in messages)
        findings.leave_out("marked as not to train (weight, loss, train)", where, turn=answers - len(trained))
        findings.leave_out("without an answer", where, turn=int(messages[-1]["role"] != "assistant"))
        context = [m for n, m in enumerate(messages) if n not in trained]
        if self.control.search(json.dumps([context, transcript.tools], ensure_ascii=False, default=str)):
            findings.remark("transcripts have the text of control tokens in a prompt; the base reads the tokens", where)

    def _turns(self, messages: Sequence[dict[str, Any]], transcript: Transcript) -> Iterator[Answered]:
        """Yield the trained turns; ``messages`` are those of ``transcript`` in a form for the chat template."""
        if transcript.token_ids is not None:
            prompt_ids, answer_ids = transcript.token_ids
            if (largest := max(*prompt_ids, *answer_ids)) >= self.vocab_size:
                raise UserError(f"token id {largest} is not below {self.vocab_size}, the base's number of ids")
            yield prompt_ids + answer_ids, len(prompt_ids)
            return
        for role in {m["role"] for m in messages} - {"user", "assistant"}:
            if not self._writes_role(role):
                raise UserError(f"the chat template leaves out messages of the role {role!r}; remove them")
        first = messages[: transcript.trained[0]]
        if transcript.tools and self._render(first, tools=transcript.tools) == self._render(first):
            raise UserError("the chat template leaves out the definitions in tools; remove them")
        for index in transcript.trained:
            try:
                yield self._turn(messages[: index + 1], transcript.messages[index], transcript.tools)
            except UserError as error:
                raise UserError(f"turn {index + 1} {error}") from None

    def _turn(
        self, messages: Sequence[dict[str, Any]], message: Mapping[str, Any], tools: Sequence[Any] | None
    ) -> Answered:
        """Return the ids of the last of ``messages``, read as ``message``, as the answer to those before it."""
        if found := self.control.search(json.dumps(message, ensure_ascii=False, default=str)):
            raise UserError(f"(assistant) holds the text of the control token {found[0]!r}; remove it")
        prompt, whole = self._render(messages[:-1], tools=tools), self._render(messages, False, tools)
        for earlier in messages[:-1]:
            _check_calls(_squeezed(prompt), earlier, 0)
        answer = _after(prompt, whole, messages[-2]["content"])
        end = self.ends.search(answer)
        _check_answer(_squeezed(prompt), _squeezed(answer[: end.start()] if end else answer), message)
        prompt_ids = encode(self.tokenizer, prompt)
        answer_ids = encode_after(self.tokenizer, prompt, prompt_ids, answer[: end.end()] if end else answer)
        return prompt_ids + answer_ids, len(prompt_ids)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        kwargs = self.template_kwargs | ({"tools": list(tools)} if tools else {})
        return render(self.tokenizer, messages, kwargs, generation_prompt)

    def _role_is_written(self, role: str) -> bool:
        turn = {"role": role, "content": MARK}
        turns = [turn, *user_turn("q")] if role == "system" else [*user_turn("q"), {**turn, "role": "assistant"}, turn]
        try:
            return self._render(turns).count(MARK) == len(turns) - 1
        except UserError:
            return True  # the transcript's own turns decide


def _forms(messages: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Yield ``messages`` with tool calls as templates expect them: objects or JSON, with content "" or null."""
    yield messages
    if any("tool_calls" in message for message in messages):
        for as_text, content in ((False, None), (True, ""), (True, None)):
            yield [_formed(m, as_text, content) if "tool_calls" in m else m for m in messages]


def _formed(message: dict[str, Any], as_text: bool, content: str | None) -> dict[str, Any]:
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls if as_text else ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False, default=str)
        call["function"] = call["function"] | {"arguments": arguments}
    return message | {"tool_calls": calls, "content": message["content"] or content}


def _after(prompt: str, whole: str, asked: str) -> str:
    """Return the end of ``whole``, all turns, that answers ``prompt``, whose last message has the content ``asked``."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    # Templates may write a closed, empty thought only into prompts, or rewrite earlier turns when a turn follows: move
    # the system prompt to the last user's turn, drop reasoning. The answer then follows the longest common end.
    prompt = CLOSED_THOUGHT.sub("", prompt)
    length = bisect_left(range(1, len(prompt) + 1), True, key=lambda n: prompt[-n:] not in whole)
    common = prompt[len(prompt) - length :]
    if not any(_squeezed(text) in _squeezed(common) for text in (asked, _escaped(asked))):
        what = f"would follow {_shown(prompt[-SHOWN:])} when it is served, which the chat template leaves out"
        raise UserError(f"(assistant) {what} of an answered turn; use the base's own answers (data.prompts=FILE)")
    return whole[whole.rfind(common) + length :]


def _check_answer(prompt: str, written: str, message: Mapping[str, Any]) -> None:
    """Reject an answer if ``written``, the template's text for ``message``, changes more than white space. ``prompt``
    is the template's text before it. Both are given without white space."""
    content, reasoning = _squeezed(message["content"]), _squeezed(message.get("reasoning_content", ""))
    empty = EMPTY_THOUGHT.match(content)
    if CLOSED_THOUGHT.search(prompt):
        content = content[empty.end() :] if empty else content
        if reasoning or content.startswith(OPENED):
            raise UserError("(assistant) has reasoning, but the prompt switches thinking off; remove one of them")
    elif empty:
        what = "starts with an empty think block, which the base does not write in this mode"
        raise UserError(f"(assistant) {what}; remove the block, or set {NO_THINKING}")
    lead = MARKUP + re.escape(reasoning) + MARKUP if reasoning else CHANNEL
    found = re.match(lead + re.escape(content), written)
    if found is None:
        _find(written, reasoning, 0)
        _find(written, content, 0)
    if not found or EMPTY_THOUGHT.match(written) or prompt.endswith(OPENED) and not CLOSING.search(written):
        what = f"begins with {_shown(written[: written.find(content)])} in the chat template, not in the transcript"
        raise UserError(f"(assistant) {what}; if this is an empty think block, set {NO_THINKING}")
    if "tool_calls" in message:
        _check_calls(written, message, found.end())
    elif after := written[found.end() :]:
        raise UserError(f"(assistant) is followed by {_shown(after)} in the chat template")


def _check_calls(written: str, message: Mapping[str, Any], position: int) -> None:
    """Reject ``message`` unless ``written`` has its tool calls after ``position``."""
    for call in (call["function"] for call in message.get("tool_calls", ())):
        position = _find(written, call["name"], position)
        given = call["arguments"] if isinstance(call["arguments"], dict) else json.loads(call["arguments"])
        position = max([_find(written, text, position) for text in _texts(given)], default=position)
        if given and _squeezed(str(given)) in written:
            raise UserError("(assistant) has a tool call that the chat template writes as Python, not as JSON")


def _find(written: str, text: str, start: int) -> int:
    """Return where ``text``, as it is or escaped as in JSON, ends in ``written`` after ``start``."""
    pieces = [piece for piece in map(_squeezed, (text, _escaped(text))) if piece in written[start:]]
    if not pieces:
        raise UserError(f"(assistant) is changed by the chat template: {_shown(text)} becomes {_shown(written)}")
    return written.index(pieces[0], start) + len(pieces[0])


def _texts(value: Any) -> Iterator[str]:
    entries = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in entries:
        yield from (entry,) if isinstance(entry, str) else _texts(entry)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # the last matches nothing


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _squeezed(text: str) -> str:
    """Return ``text`` without white space, because chat templates change the white space at the ends of messages."""
    return "".join(text.split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
