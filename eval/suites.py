"""Evaluation prompts: MT-Bench, a smoke selection of it, a few written ones, or the user's own file."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from drafthead.data.embedded import read_member
from drafthead.data.errors import UserError

MT_BENCH_FILE = "flexeval/core/chat_dataset/chatbot_bench_datasets/mt-en.jsonl"
SMOKE_PROMPTS = 12
SUITES = ("smoke", "mt_bench", "builtin")
# Closed tasks whose answers repeat the question stand beside open ones: acceptance depends on that most.
BUILTIN = (
    ("writing", "Write a short letter to a friend about a walk in the rain."),
    ("reasoning", "Anna is taller than Ben, and Ben is taller than Carl. Who is the shortest, and why?"),
    ("math", "A baker sells 12 rolls an hour for 5 hours. How many rolls is that? Show each step."),
    ("coding", "Write a Python function that returns the second largest number of a list."),
    ("extraction", "List the names and ages in this text: Mia is 31, her son Leo is 4 and her father Otto is 62."),
    ("explaining", "Explain to a child why the sky is blue."),
)


@dataclass(frozen=True)
class EvalPrompt:
    """One conversation to answer."""

    task: str
    number: int
    """Position in the whole suite, before ``limit``."""
    messages: list[dict[str, str]]
    """Role and content of each turn, ending with the user's."""


def load_suite(name: str, limit: int | None = None, seed: int = 0) -> list[EvalPrompt]:
    """Load the prompts of a suite, in the suite's own order.

    Args:
        name: "mt_bench" (80 first turns, task = category), "smoke" (12 of them, over all 8 categories), "builtin"
            (6 written prompts, needs no package), or the path of a .jsonl file whose lines hold "prompt" (text)
            or "messages" (a list of role and content), and optionally "task" (else the file's name).
        limit: keep this many, spread evenly over the tasks; None keeps all.
        seed: which prompts of a task a ``limit`` keeps.

    Raises:
        UserError: unknown name, missing or empty file, a line that is no prompt (with its number), limit < 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"suite.limit must be at least 1, got {limit}; leave it out to use the whole suite")
    if name == "mt_bench":
        prompts = _mt_bench()
    elif name == "smoke":
        # The selection is part of the suite's name, so it must not move with the seed.
        prompts = _spread(_mt_bench(), SMOKE_PROMPTS, seed=0)
    elif name == "builtin":
        prompts = [EvalPrompt(t, n, [{"role": "user", "content": text}]) for n, (t, text) in enumerate(BUILTIN)]
    elif name.endswith(".jsonl"):
        prompts = _from_file(Path(name))
    else:
        raise UserError(f"unknown suite {name!r}; choose one of {', '.join(SUITES)}, or the path of a .jsonl file")
    return prompts if limit is None else _spread(prompts, limit, seed)


def _mt_bench() -> list[EvalPrompt]:
    lines = read_member("flexeval", MT_BENCH_FILE).decode().split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        EvalPrompt(row["category"], number, [{"role": "user", "content": row["turns"][0]}])
        for number, row in enumerate(rows)
    ]


def _spread(prompts: Sequence[EvalPrompt], limit: int, seed: int) -> list[EvalPrompt]:
    """One prompt of every task, then a second of every task, and so on until there are ``limit``."""
    by_task: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    rng = random.Random(seed)
    shuffled = [rng.sample(group, k=len(group)) for group in by_task.values()]
    in_rounds = [p for turn in zip_longest(*shuffled) for p in turn if p is not None]
    return sorted(in_rounds[:limit], key=lambda p: p.number)


def _from_file(path: Path) -> list[EvalPrompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"suite {path} cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"suite {path} is not UTF-8 ({error}); save it as UTF-8") from None
    prompts: list[EvalPrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            task, messages = _parse(line, f"{path} line {number}", default_task=path.stem)
            prompts.append(EvalPrompt(task, len(prompts), messages))
    if not prompts:
        raise UserError(f'suite {path} is empty; write one {{"prompt": "..."}} a line')
    return prompts


def _parse(line: str, where: str, default_task: str) -> tuple[str, list[dict[str, str]]]:
    remedy = 'each line must be {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(f"{where} holds {found}; {remedy}")
    task = row.get("task", default_task)
    if not isinstance(task, str) or not task:
        raise UserError(f'{where}: "task" must be a text, got {task!r}; leave it out to use {default_task!r}')
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if not _are_messages(messages):
        raise UserError(f"{where} holds no conversation that ends with words of the user; {remedy}")
    return task, [{"role": m["role"], "content": m["content"]} for m in messages]


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(m, dict) and {str} == {type(m.get("role")), type(m.get("content"))} for m in value):
        return False
    return value[-1]["role"] == "user" and bool(value[-1]["content"].strip())
