"""Division of an answer into thinking, tool calls and plain answer, by tags such as ``<think>`` in the text."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

MARKS = (  # name of a span, opening tag, closing tag ("": the span ends with the answer)
    ("thinking", "<think>", "</think>"),  # Qwen3, SmolLM3, DeepSeek-R1
    ("thinking", "[THINK]", "[/THINK]"),  # Magistral
    ("thinking", "<|channel|>analysis", "<|end|>"),  # gpt-oss
    ("tool call", "<tool_call>", "</tool_call>"),  # Qwen, Hermes
    ("tool call", "<|channel|>commentary to=", "<|call|>"),  # gpt-oss
    ("tool call", "[TOOL_CALLS]", ""),  # Mistral
    ("tool call", "<|python_tag|>", ""),  # Llama 3.1
)
PROMPT_TAIL = 16  # last prompt tokens to search for an opening tag, because a chat template may add `<think>`


def answer_spans(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the span of every answer token: ``thinking``, ``tool call`` or ``answer``. Tags belong to their span."""
    tail = prompt[-PROMPT_TAIL:]
    pieces = [tokenizer.decode([token]) for token in (*tail, *tokens)]
    starts, text = [*accumulate(map(len, pieces), initial=0)][:-1], "".join(pieces)
    spans = ["answer"] * len(pieces)
    end = 0
    while opened := [(at, *mark) for mark in MARKS if (at := text.find(mark[1], end)) >= 0]:
        begin, name, first, last = min(opened)
        closed = text.find(last, begin + len(first)) if last else -1
        end = len(text) if closed < 0 else closed + len(last)
        for number in range(max(0, bisect_right(starts, begin) - 1), len(pieces)):
            if starts[number] < end:
                spans[number] = name
    return spans[len(tail) :]
