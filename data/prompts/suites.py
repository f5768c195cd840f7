"""Evaluation suites by name: packaged prompts, those under ``builtin`` in ``prompts.yaml``, or the user's own data."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from drafthead.data.embedded import eval_sets
from drafthead.data.embedded.eval_sets import EvalItem
from drafthead.data.embedded.training_sets import content_hash, templates
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.data.prompts.prompt_files import read_dataset, read_jsonl
from drafthead.data.text.chat import user_turn
from drafthead.errors import UserError

SMOKE_PROMPTS = 12
OWN = "own:"  # prefix of a run's suite: the user's held-out prompts, or the suite after it if these are too few


def load_suite(
    name: str, limit: int | None = None, seed: int = 0, tasks: Sequence[str] | None = None, split: str = "all"
) -> list[EvalPrompt]:
    """Return the prompts of a suite, in the suite's own order. ``name`` is a packaged suite, the path of a .jsonl file,
    or "hf:NAME[:SPLIT[:COLUMN]]"; a prefix ``OWN`` is ignored. ``limit`` prompts are spread evenly over the tasks,
    selected by ``seed``. ``split`` is "all", or "dev" or "test", the halves of every task's prompts."""
    name = name.removeprefix(OWN)
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}; leave it out to use the whole suite")
    if name in _SUITES:
        prompts = _SUITES[name]()
    elif name.startswith("hf:"):
        prompts = read_dataset(name.removeprefix("hf:"))
    elif name.endswith(".jsonl"):
        prompts = read_jsonl(Path(name).expanduser())
    else:
        known = f"{', '.join(SUITES)}, the path of a .jsonl file, or hf:NAME[:SPLIT[:COLUMN]]"
        raise UserError(f"unknown suite {name!r}; choose one of {known}")
    if split != "all":
        prompts = _half(prompts, split)
    if tasks:
        present = list(dict.fromkeys(p.task for p in prompts))
        if unknown := [task for task in tasks if task not in present]:
            raise UserError(f"suite {name!r} has no task {', '.join(unknown)}; its tasks are {', '.join(present)}")
        prompts = [p for p in prompts if p.task in tasks]
        if limit is not None and limit < len(set(tasks)):
            raise UserError(f"limit={limit} leaves no prompt of some of the {len(set(tasks))} tasks; raise limit")
    return prompts if limit is None else _spread(prompts, limit, seed)


def suite_label(name: str) -> str:
    """Return ``name`` in a form for file names: "hf:user/set:test" -> "hf-user-set-test", "data/own.jsonl" -> "own"."""
    label = Path(name).stem if name.endswith(".jsonl") else name
    return re.sub(r"[^\w.-]+", "-", label).strip("-.") or "suite"


def folder_beside(head: str) -> Path:
    return Path(head).parent if Path(head).is_dir() else Path("outputs") / suite_label(head)


def _prompts(items: Sequence[EvalItem], only_first_turn: bool = False) -> list[EvalPrompt]:
    later = slice(1, 1 if only_first_turn else None)
    return [EvalPrompt(i.task, n, user_turn(i.turns[0]), i.turns[later]) for n, i in enumerate(items)]


_SUITES: dict[str, Callable[[], list[EvalPrompt]]] = {
    # The selection is part of the suite's name, so it must not move with the seed.
    "smoke": lambda: _spread(load_suite("mt_bench"), SMOKE_PROMPTS, seed=0),
    "mt_bench": lambda: _prompts(eval_sets.mt_bench(), only_first_turn=True),
    "mt_bench_turns": lambda: _prompts(eval_sets.mt_bench()),
    "spec_bench_like": lambda: _prompts(eval_sets.spec_bench_like()),
    "long_context": lambda: _prompts(eval_sets.long_context()),
    "long_questions": lambda: _prompts(eval_sets.long_questions()),
    "code": lambda: _prompts(eval_sets.human_eval()),
    "builtin": lambda: _prompts([EvalItem(task, (text,)) for task, text in templates()["builtin"].items()]),
}
SUITES = tuple(_SUITES)


def _half(prompts: Sequence[EvalPrompt], split: str) -> list[EvalPrompt]:
    """Return every second prompt of each task, in the order of content hashes."""
    ordered = sorted(prompts, key=lambda p: (p.task, content_hash("\n".join(p.user_turns) or repr(p.input_ids))))
    half = ordered[("dev", "test").index(split) :: 2]
    if not half:
        raise UserError(f"a suite of one prompt has no {split} half; use split=all")
    return sorted(half, key=lambda p: p.number)


def _spread(prompts: Sequence[EvalPrompt], limit: int, seed: int) -> list[EvalPrompt]:
    """Return ``limit`` random prompts, in the suite's order, with equally many of every task as far as possible."""
    by_task: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    rng = random.Random(seed)
    shuffled = [rng.sample(group, k=len(group)) for group in by_task.values()]
    in_rounds = [p for turn in zip_longest(*shuffled) for p in turn if p is not None]
    return sorted(in_rounds[:limit], key=lambda p: p.number)
