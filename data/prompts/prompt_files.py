"""Evaluation prompts from the user's JSONL files and from Hugging Face datasets."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.data.text.readers import dataset_errors, json_object, open_dataset, read_lines
from drafthead.data.text.sources import PROMPT_COLUMNS, SYSTEM_COLUMNS, shown, suite_prompt, with_system
from drafthead.errors import UserError, listed

MORE_COLUMNS = ("question", "instruction", "text")
TASK_COLUMNS = ("task", "category")
_SPEC = re.compile(r"(?P<name>[^:]+)(:(?P<split>[^:\[]+(\[[^\]]*\])?)(:(?P<column>[^:]+))?)?")
_LINE = (
    'each line must be {"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}]}, {"turns": ["...", '
    '"..."]} or {"input_ids": [1, 2, 3]}, with an optional "task"'
)
T = TypeVar("T")


def read_jsonl(path: Path) -> list[EvalPrompt]:
    """Read the prompts of a JSONL file, one per line; blank lines are skipped. A line is a JSON object with exactly one
    of the keys "prompt", "messages", "turns" and "input_ids", and optionally "task" (by default the file's name without
    suffix)."""

    def convert(line: bytes, number: int) -> EvalPrompt:  # ``number`` in the suite, from 0
        row = json_object(line)
        keys = [key for key in PROMPT_COLUMNS if key in row]
        if len(keys) != 1:
            raise UserError(f"holds the keys {sorted(row)}")
        return to_prompt(row[keys[0]], number, row.get("task", path.stem), row)

    prompts = _convert_all(read_lines(path), convert, f"suite {path}", _LINE)
    if not prompts:
        raise UserError(f"suite {path} is empty; {_LINE}")
    return prompts


def read_dataset(spec: str) -> list[EvalPrompt]:
    """Read the prompts of a Hugging Face dataset, one per row. ``spec`` is ``NAME[:SPLIT[:COLUMN]]``. NAME is a Hub id
    (``user/name`` or ``user/name/config``), a dataset folder or a data file. SPLIT may be a slice such as
    ``train[:200]``; the default is the first of test, validation and train. COLUMN is by default the first of
    ``PROMPT_COLUMNS`` and ``MORE_COLUMNS`` that exists. Tasks come from a column "task" or "category"; otherwise NAME's
    last part is the only task."""
    is_file = Path(spec).expanduser().is_file()  # whose name may contain colons
    match = None if is_file else _SPEC.fullmatch(spec)
    if match is None and not is_file:
        raise UserError(f"suite 'hf:{spec}' is not hf:NAME[:SPLIT[:COLUMN]]; write it as hf:user/name:test:prompt")
    name, split, wanted = match.group("name", "split", "column") if match else (spec, None, None)
    repo, subset = name, None
    if name.count("/") == 2 and name[0] not in "/.~" and not Path(name).exists():  # a hub id has one slash
        repo, subset = name.rsplit("/", 1)
    with dataset_errors(name, f"split {split or 'by default'}"):
        rows = open_dataset(repo, subset, split)
        column = _column(wanted, rows.column_names, name)
        label = next((c for c in TASK_COLUMNS if c in rows.column_names and c != column), None)
        # Of these columns only: others may hold images, which cost time to decode.
        others = {*SYSTEM_COLUMNS, "tools", label or column}.intersection(rows.column_names) - {column}
        chosen = rows.select_columns([column, *sorted(others)])
        path = Path(name).expanduser()
        task = path.stem if path.is_file() else path.name  # "user/data-v1.5" has no suffix
        prompts = _convert_all(
            ((f"row {n}", row) for n, row in enumerate(chosen)),
            lambda row, number: to_prompt(row[column], number, row[label] if label else task, row),
            f"dataset {name!r}",
            f"column {column!r} must hold texts, conversations that have a user's turn, lists of texts, or token ids",
        )
    if not prompts:
        raise UserError(f"dataset {name!r} has no rows in split {split or 'by default'}; name another split")
    return prompts


def to_prompt(value: Any, number: int, task: Any, row: Mapping[str, Any]) -> EvalPrompt:
    """Return a prompt from a text, a conversation, a list of the user's turns, or token ids."""
    if not isinstance(task, str) or not task:
        raise UserError(f"has a task that is not a text: {shown(task)}")
    if row.get("tools"):
        raise UserError("has tools, which suites do not read; give base.chat_template_kwargs={tools: FILE} instead")
    if isinstance(value, list) and all(type(token) is int for token in value):
        if min(value, default=0) < 0:
            raise UserError(f"has the negative token id {min(value)}")
        return EvalPrompt(task, number, [], input_ids=tuple(value))
    messages, later = suite_prompt(value)
    return EvalPrompt(task, number, with_system(messages, row, "the row"), later)


def _convert_all(
    entries: Iterable[tuple[str, T]], convert: Callable[[T, int], EvalPrompt], source: str, expected: str
) -> list[EvalPrompt]:
    """Convert all (label, entry) pairs; report all faults in one error, so that a file can be repaired at once."""
    prompts: list[EvalPrompt] = []
    broken: list[str] = []
    for number, (label, entry) in enumerate(entries):
        try:
            prompts.append(convert(entry, number))
        except UserError as error:
            broken.append(f"{label} {error}")
    if broken:
        raise UserError(f"{source}: {listed(broken)}; {expected}")
    return prompts


def _column(wanted: str | None, present: list[str], name: str) -> str:
    choices = (wanted,) if wanted else PROMPT_COLUMNS + MORE_COLUMNS
    for column in choices:
        if column in present:
            return column
    missing = repr(wanted) if wanted else f"among {', '.join(choices)}"
    raise UserError(f"dataset {name!r} has no column {missing}; present: {', '.join(present)}; name one in the suite")
