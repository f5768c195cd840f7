"""Conversations whose own assistant turns are trained on: reading, checks, and token ids with boundaries.

An assistant turn becomes a prompt and an answer. The prompt is the chat template's text for the earlier turns and the
generation prompt, which is what the base reads when it is served. The answer is the template's text for the turn. If
the template drops the reasoning of earlier turns, it is therefore dropped here too.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

from drafthead.data.text.chat import Tokenizer, encode, render, user_turn
from drafthead.data.text.sources import CONVERSATIONS, ROLES, SourceConfig, column_value, iter_messages, iter_rows
from drafthead.data.utils.errors import UserError

TRANSCRIPT_ROLES = {**ROLES, **dict.fromkeys(("tool", "observation", "function_response"), "tool")}
PASSED_ON = ("tool_calls", "reasoning_content", "tool_call_id", "name")
"""Keys of a message that a chat template may read, in addition to its role and content."""
EMPTY_REASONING = "<think></think>"
Answered = tuple[list[int], int]
"""Token ids of a prompt and its answer, and the index of the first answer token."""
MARK = "drafthead-probe"
MAX_LISTED = 5
SHOWN = 40
"""Number of characters of a text to show in an error message."""


@dataclass(frozen=True)
class Transcript:
    """A conversation, or the token ids of one prompt and answer."""

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[Any] | None = None
    """Tool definitions for the chat template."""
    token_ids: tuple[list[int], list[int]] | None = None
    """Token ids of prompt and answer from a server's log, used unchanged and instead of ``messages``."""


@dataclass
class Findings:
    """Errors of rows that cannot be trained on, and remarks about other rows, each with a count and its first row."""

    rejected: list[str] = field(default_factory=list)
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def reject(self, error: UserError) -> None:
        """Record the error of a row that cannot be trained on."""
        self.rejected.append(str(error))

    def remark(self, text: str, where: str) -> None:
        """Count the remark ``text`` about the row named ``where``."""
        count, first = self.remarks.get(text, (0, where))
        self.remarks[text] = count + 1, first

    def raise_rejected(self) -> None:
        """Raise a ``UserError`` that names the first rejected rows, if any were rejected."""
        if self.rejected:
            count = len(self.rejected)
            more = f"; and {count - MAX_LISTED} more" if count > MAX_LISTED else ""
            raise UserError(
                f"{count} transcripts cannot be trained on: {'; '.join(self.rejected[:MAX_LISTED])}{more}; repair or "
                "remove them, or set data.bad_transcripts=skip to train on the other transcripts"
            )

    def lines(self) -> list[str]:
        """Return the lines to print: one per remark, with its count, and one about the rejected rows."""
        found = [f"{count:,} {text} (first: {where})" for text, (count, where) in self.remarks.items()]
        if self.rejected:
            found.append(f"{len(self.rejected):,} transcripts skipped (first: {self.rejected[0]})")
        return found


# Reading -----------------------------------------------------------------------------------------------------------


def iter_transcripts(source: SourceConfig, findings: Findings) -> Iterator[tuple[str, Transcript]]:
    """Yield (row's name, transcript) of a source's first ``limit`` rows; unusable rows are added to ``findings``."""
    rows = iter_rows(source, stream=source.limit is not None, on_error=findings.reject)
    for row, where in islice(rows, source.limit):
        try:
            yield from ((where, transcript) for transcript in _of_row(row, source, where))
        except UserError as error:
            findings.reject(error)


def _of_row(row: Mapping[str, Any], source: SourceConfig, where: str) -> list[Transcript]:
    """Return the conversation in a row or, from a row with token ids (a logged response of vLLM), each answer."""
    listed: Any = row.get("choices") if isinstance(row.get("choices"), list) else []
    choices: list[Any] = [choice for choice in listed if isinstance(choice, dict)] or [row]
    pairs: list[Any] = [(c.get("prompt_token_ids") or row.get("prompt_token_ids"), c.get("token_ids")) for c in choices]
    if any(answer is not None for _, answer in pairs):
        for ids in (ids for pair in pairs for ids in pair):
            if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
                raise UserError(f"{where} must have whole numbers in prompt_token_ids and token_ids")
        return [Transcript(token_ids=pair) for pair in pairs]
    value, column = column_value(dict(row), source, where, CONVERSATIONS)
    try:
        messages, tools = _messages(value), row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except (UserError, ValueError) as error:
        raise UserError(f"{column} {error}") from None
    # Datasets in ShareGPT's form write the tools into the system message and repeat them in a column.
    in_text = messages[0]["role"] == "system" and "tools" in messages[0]["content"]
    return [Transcript(messages, None if in_text or not tools else tools)]


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a conversation's messages for the chat template; raise a ``UserError`` if they cannot be trained on."""
    messages: list[dict[str, Any]] = []
    for message, turn in zip(iter_messages(value, TRANSCRIPT_ROLES), value, strict=True):
        number, before = len(messages) + 1, messages[-1]["role"] if messages else "system"
        extra = {key: turn[key] for key in PASSED_ON if turn.get(key)}
        if not message["content"].strip() and "tool_calls" not in extra:
            raise UserError(f"has an empty turn {number} ({message['role']})")
        if message["role"] == "assistant" and before in ("system", "assistant"):
            raise UserError(f"has an assistant's turn {number} without a turn before it to answer")
        try:
            extra |= {"tool_calls": [_tool_call(call) for call in extra.get("tool_calls", ())]}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"has a tool call in turn {number} that cannot be read ({error!r})") from None
        messages.append({**message, **{key: entry for key, entry in extra.items() if entry}})
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("has no assistant's turn")
    return messages


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: chat templates expect an object, but logs have JSON text."""
    function = call.get("function") or call
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "type": "function", "function": {"name": str(function["name"]), "arguments": dict(arguments)}}


# Rendering ---------------------------------------------------------------------------------------------------------


class TranscriptEncoder:
    """Converter of transcripts to token ids, by the chat template of a base."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        vocab_size: int,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.template_kwargs = dict(template_kwargs or {})
        self.ends = [_squeezed(str(text)) for text in tokenizer.convert_ids_to_tokens(sorted(eos_ids))]
        self._writes_role = cache(self._role_is_written)

    def answers(self, transcript: Transcript, findings: Findings, where: str, limit: int | None) -> list[Answered]:
        """Return a transcript's assistant turns, each with everything before it, up to ``limit`` tokens (None: all).

        The turn that crosses the limit is cut there. If the transcript cannot be trained on, an error that names it
        ``where`` is added to ``findings``, and the result is [].
        """
        answers: list[Answered] = []
        try:
            for ids, boundary in self._turns(transcript, findings, where):
                if limit is not None and len(ids) > limit:
                    findings.remark(f"transcripts are longer than {limit} tokens; their ends are not trained on", where)
                    return answers + [(ids[:limit], boundary)] * (boundary < limit)
                answers.append((ids, boundary))
        except UserError as error:
            findings.reject(UserError(f"{where}: {error}"))
            return []
        return answers

    def _turns(self, transcript: Transcript, findings: Findings, where: str) -> Iterator[Answered]:
        messages, tools = transcript.messages, transcript.tools
        if transcript.token_ids is not None:
            prompt_ids, answer_ids = transcript.token_ids
            if (largest := max(*prompt_ids, *answer_ids)) >= self.vocab_size:
                raise UserError(f"token id {largest} is not below {self.vocab_size}, the base's number of ids")
            yield prompt_ids + answer_ids, len(prompt_ids)
            return
        for role in {m["role"] for m in messages} - {"user", "assistant"}:
            if not self._writes_role(role):
                raise UserError(f"the chat template leaves out messages of the role {role!r}; remove them")
        if tools and self._render(messages[:1], tools=tools) == self._render(messages[:1]):
            raise UserError("the chat template leaves out the definitions in tools; remove them")
        if messages[-1]["role"] != "assistant":
            findings.remark("transcripts do not end with the assistant; their last turns are not used", where)
        for number, message in enumerate(messages, start=1):
            if message["role"] == "assistant":
                try:
                    yield self._turn(messages[:number], tools)
                except UserError as error:
                    raise UserError(f"turn {number} {error}") from None

    def _turn(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> Answered:
        """Return the token ids of the last message, as the answer to the messages before it."""
        if special := [text for text in self.tokenizer.all_special_tokens if text in messages[-1]["content"]]:
            raise UserError(f"(assistant) holds the special token {special[0]!r} as text; remove it")
        prompt, whole = self._render(messages[:-1], tools=tools), self._render(messages, False, tools)
        # A generation prompt may end with an empty think block, which the template does not write for a past turn.
        answer = whole[len(os.path.commonprefix([prompt, whole])) :]
        self._check_answer(_squeezed(prompt), answer, messages[-1])
        prompt_ids, ids = encode(self.tokenizer, prompt), encode(self.tokenizer, prompt + answer)
        if ids[: len(prompt_ids)] != prompt_ids:  # a token would cross the boundary; when served it cannot
            ids = prompt_ids + encode(self.tokenizer, answer)
        end = next((n for n in range(len(prompt_ids), len(ids)) if ids[n] in self.eos_ids), len(ids))
        return ids[: end + 1], len(prompt_ids)

    def _check_answer(self, prompt: str, answer: str, message: Mapping[str, Any]) -> None:
        """Raise a ``UserError`` if ``answer``, the template's text for ``message``, changes more than white space.

        ``prompt`` is the template's text before ``answer``, without white space.
        """
        written, position = _squeezed(answer), 0
        content, reasoning = _squeezed(message["content"]), _squeezed(message.get("reasoning_content", ""))
        if content.startswith(EMPTY_REASONING):
            if not prompt.endswith(EMPTY_REASONING):
                raise UserError(
                    "(assistant) starts with an empty think block, which the base does not write in this mode; set "
                    "base.chat_template_kwargs={enable_thinking: false} if the template has it, or remove the block"
                )
            content = content.removeprefix(EMPTY_REASONING)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        names = [_squeezed(name) for call in calls for name in (call["name"], *call["arguments"])]
        for piece in filter(None, (reasoning, content, *(_squeezed(call["name"]) for call in calls))):
            start = written.find(piece, position)
            if start < 0:
                raise UserError(
                    f"(assistant) is changed by the chat template, which writes {_shown(answer)} for {_shown(piece)}"
                )
            if start > position and not reasoning and not calls:
                raise UserError(
                    f"(assistant) begins with {_shown(written[:start])} in the chat template, not in the transcript; "
                    "the template needs a generation prompt (add_generation_prompt) that writes this. If this is an "
                    "empty think block, set base.chat_template_kwargs={enable_thinking: false}"
                )
            position = start + len(piece)
        if missing := [name for name in names if name not in written]:
            raise UserError(f"(assistant) has a tool call of which the chat template leaves out {missing[0]!r}")
        rest = written[position:]
        if rest and not calls and not rest.startswith(tuple(self.ends)):
            raise UserError(f"(assistant) is followed by {_shown(rest)} in the chat template")

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


def _squeezed(text: str) -> str:
    """Return ``text`` without white space, because chat templates change the white space at the ends of messages."""
    return "".join(text.split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
