"""Evaluation prompts out of the user's own JSONL files and out of Hugging Face datasets."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drafthead.data.text.chat import Message
from drafthead.data.utils.errors import UserError
from drafthead.eval.prompts.prompt import EvalPrompt

if TYPE_CHECKING:
    import datasets

COLUMNS = ("prompt", "messages", "turns", "input_ids")
"""Keys of a JSONL line, one of them each; and the columns of a dataset that are looked for, in this order."""
_MORE_COLUMNS = ("question", "instruction", "text")
_TASK_COLUMNS = ("task", "category")
_ROLES = ("system", "user", "assistant")
# Test data first: what was made for training may have trained the base.
_SPLITS = ("test", "validation", "train")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}
_LISTED = 5
_DATASET = re.compile(r"(?P<name>[^:]+)(:(?P<split>[^:\[]+(\[[^\]]*\])?)(:(?P<column>[^:]+))?)?")
_LINE = (
    'each line must be {"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}]}, {"turns": ["...", '
    '"..."]} or {"input_ids": [1, 2, 3]}, with an optional "task"'
)
T = TypeVar("T")


class _BrokenEntryError(Exception):
    """What is wrong with an entry, as words that follow its place."""


def read_jsonl(path: Path) -> list[EvalPrompt]:
    """Prompts of a JSONL file, one a line; blank lines are skipped.

    A line holds one of "prompt" (a text), "messages" (the user's last: several at the end are asked one after the
    other), "turns" (texts, asked one after the other) or "input_ids"; and optionally "task" (else the file's name).
    Whether a prompt is empty or too long for the base is not asked here: it costs that prompt only.

    Raises:
        UserError: the file is missing or empty, or has broken lines (the message lists up to five).
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"suite {path} cannot be read ({error.strerror}); check the path") from None
    entries = ((f"line {n}", line) for n, line in enumerate(lines, start=1) if line.strip())
    prompts = _collect(entries, lambda number, line: _from_line(line, number, path.stem), str(path), _LINE)
    if not prompts:
        raise UserError(f"suite {path} is empty; {_LINE}")
    return prompts


def read_dataset(spec: str) -> list[EvalPrompt]:
    """Prompts of a Hugging Face dataset, one a row.

    Args:
        spec: ``NAME[:SPLIT[:COLUMN]]``. NAME is a hub id (``user/name``, with a configuration ``user/name/config``), a
            dataset folder or a data file; SPLIT may be a slice such as ``train[:200]`` (by default test, validation or
            train, the first there is); COLUMN holds texts, conversations (answers at their end are cut off), lists
            of user turns, or token ids (by default the first there is of prompt, messages, turns, input_ids,
            question, instruction, text). A column "task" or "category" names the tasks, else NAME does.

    Raises:
        UserError: no such dataset, split or column (listing those there are), no network, no rows, or rows of another
            type (the message lists up to five).
    """
    match = _DATASET.fullmatch(spec)
    if match is None:
        raise UserError(f"suite 'hf:{spec}' is not hf:NAME[:SPLIT[:COLUMN]]; write it as hf:user/name:test:prompt")
    from datasets.exceptions import DatasetGenerationError

    name, where = match["name"], f"dataset {match['name']!r}"
    try:
        rows = _open(name, match["split"])
        column = _column(match["column"], rows.column_names, where)
        label = next((c for c in _TASK_COLUMNS if c in rows.column_names and c != column), None)
        prompts = _collect(
            # Of these columns only: others may hold images, which cost time to decode.
            ((f"row {n}", row) for n, row in enumerate(rows.select_columns([column, *([label] if label else [])]))),
            lambda number, row: _prompt(_by_type(row[column]), number, row[label] if label else Path(name).stem),
            where,
            f"column {column!r} must hold texts, conversations that have a user's turn, lists of texts, or token ids",
        )
    except UserError:
        raise
    # What the library raises for: no network, no such dataset; no such split or configuration; a loading script; files
    # that do not fit together.
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        what = " ".join(str(error.__cause__ or error).split())[:400]
        raise UserError(
            f"{where} (split {match['split'] or 'by default'}) could not be read: {type(error).__name__}: {what}; "
            "check the name, the split, the network and access, or use a .jsonl file"
        ) from error
    if not prompts:
        raise UserError(f"{where} has no rows in split {match['split'] or 'by default'}; name another split")
    return prompts


def _collect(
    entries: Iterable[tuple[str, T]], convert: Callable[[int, T], EvalPrompt], source: str, remedy: str
) -> list[EvalPrompt]:
    """Convert all entries before complaining, so that one look at the message is enough to repair a file."""
    prompts: list[EvalPrompt] = []
    broken: list[str] = []
    for place, entry in entries:
        try:
            prompts.append(convert(len(prompts), entry))
        except _BrokenEntryError as problem:
            broken.append(f"{place} {problem}")
    if broken:
        more = f"; and {len(broken) - _LISTED} more" if len(broken) > _LISTED else ""
        raise UserError(f"{source}: {'; '.join(broken[:_LISTED])}{more}; {remedy}")
    return prompts


def _from_line(line: bytes, number: int, default_task: str) -> EvalPrompt:
    try:
        row: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BrokenEntryError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _BrokenEntryError(f"is not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise _BrokenEntryError(f"holds a {type(row).__name__}")
    found = [key for key in COLUMNS if key in row]
    if len(found) != 1:
        raise _BrokenEntryError(f"holds the keys {sorted(row)}")
    key, value = found[0], row[found[0]]
    expected = {"prompt": "a text", "messages": "messages", "turns": "a list of texts", "input_ids": "a list of ids"}
    if not _IS[key](value):
        raise _BrokenEntryError(f"holds no {expected[key].removeprefix('a ')} under {key!r} but {_shown(value)}")
    return _prompt((key, value), number, row.get("task", default_task))


def _prompt(content: tuple[str, Any], number: int, task: Any) -> EvalPrompt:
    if not isinstance(task, str) or not task:
        raise _BrokenEntryError(f"has a task that is no text: {_shown(task)}")
    key, value = content
    if key == "input_ids":
        return EvalPrompt(task, number, [], input_ids=tuple(value))
    messages = _messages(value) if key == "messages" else _user_turns([value] if key == "prompt" else value)
    try:
        "".join(m["content"] for m in messages).encode()
    except UnicodeEncodeError as error:
        raise _BrokenEntryError(f"holds half a character ({error.reason}), which no tokenizer reads") from None
    # The user's words at the end that nobody has answered: all but the first wait for an answer.
    first = max((i for i, m in enumerate(messages[:-1]) if m["role"] != "user"), default=-1) + 1
    return EvalPrompt(task, number, messages[: first + 1], tuple(m["content"] for m in messages[first + 1 :]))


def _messages(value: list[dict[str, str]]) -> list[Message]:
    strange = sorted({m["role"] for m in value} - {*_ROLES})
    if strange:
        raise _BrokenEntryError(f"has the roles {strange}, expected {', '.join(_ROLES)}")
    if value[-1]["role"] != "user":
        raise _BrokenEntryError("holds no conversation that ends with words of the user")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _user_turns(texts: list[str]) -> list[Message]:
    return [{"role": "user", "content": text} for text in texts]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and _is_text(m.get("role")) and _is_text(m.get("content")) for m in value)
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


_IS: dict[str, Callable[[Any], bool]] = {
    "prompt": _is_text,
    "messages": _are_messages,
    "turns": _are_texts,
    "input_ids": _are_ids,
}


def _by_type(value: Any) -> tuple[str, Any]:
    """The key under which a JSONL line would hold a dataset's ``value``; its column may have any name."""
    key = next((key for key, fits in _IS.items() if fits(value)), None)
    if key is None:
        raise _BrokenEntryError(f"holds {_shown(value)}")
    if key == "messages":
        users = [n for n, message in enumerate(value, start=1) if message["role"] == "user"]
        value = value[: users[-1]] if users else value
    return key, value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}: {text if len(text) <= 60 else text[:57] + '...'}"


def _column(wanted: str | None, present: list[str], where: str) -> str:
    found = [c for c in ((wanted,) if wanted else COLUMNS + _MORE_COLUMNS) if c in present]
    if not found:
        missing = f"column {wanted!r}" if wanted else f"column among {', '.join(COLUMNS + _MORE_COLUMNS)}"
        raise UserError(f"{where} has no {missing}; present: {', '.join(present)}; name one as hf:NAME:SPLIT:COLUMN")
    return found[0]


def _open(name: str, split: str | None) -> "datasets.Dataset":
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise UserError(f"suite 'hf:{name}' is a file, but none of {', '.join(_BUILDERS)}; convert it")
        return datasets.load_dataset(builder, data_files=str(path), split=split or "train")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(datasets.load_from_disk(str(path)), split, name)
    if name.startswith(("/", ".", "~")) and not path.exists():
        raise UserError(f"suite 'hf:{name}' names a path where nothing is; check it")
    # A hub id has one slash; what follows a second one is the configuration.
    parts = [str(path)] if path.is_dir() else name.rsplit("/", name.count("/") - 1) if name.count("/") == 2 else [name]
    if split is None:
        split = _first_split(datasets.get_dataset_split_names(*parts))
    return datasets.load_dataset(*parts, split=split)


def _saved(loaded: Any, split: str | None, name: str) -> "datasets.Dataset":
    if not isinstance(loaded, dict):
        return loaded
    chosen = split or _first_split(list(loaded))
    if chosen not in loaded:
        raise UserError(f"dataset {name!r} has no split {chosen!r}; present: {', '.join(loaded)}")
    return loaded[chosen]


def _first_split(names: list[str]) -> str:
    return next((s for s in _SPLITS if s in names), names[0])
