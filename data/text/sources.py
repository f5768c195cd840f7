"""Sources of training documents and prompts, read one by one or joined without near-duplicates."""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from glob import glob
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from drafthead.data.embedded import training_sets
from drafthead.data.embedded.tasks import PROMPT_SETS
from drafthead.data.embedded.training_sets import DOCUMENT_SETS, content_hash
from drafthead.data.text import readers
from drafthead.data.text.chat import Message, conversation, user_turn
from drafthead.data.text.findings import Findings
from drafthead.errors import UserError
from drafthead.files.local import read_checksummed_json, write_checksummed_json
from drafthead.settings.schema import Positive, PositiveFloat, require, settings

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}  # names of roles in datasets
CONVERSATIONS = ("messages", "conversations", "conversation")
AUTO = "auto"
SYSTEM_COLUMNS = ("system", "system_prompt")
PROMPT_COLUMNS = ("prompt", *CONVERSATIONS, "turns", "input_ids")  # keys of the prompt, in the order of search
T = TypeVar("T", str, list[Message])


@settings(kw_only=True)
class SourceConfig:
    """Settings of a source of text or prompts."""

    kind: Literal["hf", "jsonl", "text", "embedded", "builtin"]
    """Kind of source. ``hf`` is a dataset of the Hub or on disk, ``jsonl`` and ``text`` are files, ``embedded`` is a
    set from pinned packages, ``builtin`` a tiny set for tests."""
    name: Annotated[str, Field(min_length=1)]
    """Hub id, path or glob of files (also ``.gz``), or the name of an embedded or builtin set."""
    subset: str | None = None
    """Configuration (subset) of a dataset."""
    split: str = "train"
    """Split of a dataset."""
    revision: str | None = None
    """Commit, branch or tag of a dataset on the Hub. With null, its main branch."""
    column: str = "text"
    """Column of a dataset or key of JSON lines that holds the text. For prompts it may also hold a conversation.
    ``auto`` takes the first of ``prompt``, ``messages``, ``conversations``, ``conversation`` and ``turns``."""
    turns: Positive = 1
    """Number of user turns to keep of a conversation. The base answers each of them itself. For datasets and JSON
    lines. Column ``auto`` ignores it, and keeps the conversation and its own answers up to the last user turn."""
    limit: Positive | None = None
    """Number of entries to read. A dataset is then streamed, not downloaded. With null, all entries are read."""
    weight: PositiveFloat | None = None
    """Weight of the source in the mixture, relative to the other sources. Shares are counted in characters of
    text, or in prompts. Either all sources have a weight or none. A source with too little data is used completely; a
    stream repeats it. With null, no source is cut to a share; in a stream all shares are equal."""

    def __post_init__(self) -> None:
        sets = (*DOCUMENT_SETS.get(self.kind, ()), *PROMPT_SETS.get(self.kind, ()))
        of_kind = f"for kind {self.kind!r}"
        require(not sets or self.name in sets, "name", f"one of {', '.join(sets)} {of_kind}", self.name)
        require(self.kind == "hf" or self.subset is None, "subset", f"null {of_kind}", self.subset)
        require(self.kind == "hf" or self.revision is None, "revision", f"null {of_kind}", self.revision)
        require(self.kind in ("hf", "jsonl") or self.turns == 1, "turns", f"1 {of_kind}", self.turns)

    def manifest(self) -> dict[str, Any]:  # for a manifest: what determines the entries
        # Manifests of older corpora lack these keys, so they are left out at their defaults.
        unset = {"weight": None, "turns": 1}
        return {key: value for key, value in asdict(self).items() if key not in unset or value != unset[key]}

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def _preset(name: str, column: str, split: str = "train", subset: str | None = None) -> SourceConfig:
    return SourceConfig(kind="hf", name=name, subset=subset, split=split, column=column)


PRESETS = {
    "ultrachat": _preset("HuggingFaceH4/ultrachat_200k", "messages", "train_sft"),
    "sharegpt": _preset("Aeala/ShareGPT_Vicuna_unfiltered", "conversations"),
    "open_perfectblend": _preset("mlabonne/open-perfectblend", "conversations"),
    "magpie": _preset("Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered", "conversations"),
    "hermes_fc": _preset("NousResearch/hermes-function-calling-v1", "conversations", subset="func_calling"),
}


def expand_sources(value: Any) -> Any:
    """Convert short forms: a preset, a path or glob, or ``hf:NAME[:SPLIT]``, each with an optional ``:LIMIT``."""
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [_expand(item) if isinstance(item, str) else item for item in items]


def _expand(text: str) -> SourceConfig:
    counted = re.fullmatch(r"(.+):(\d+)", text)
    name, limit = (counted[1], int(counted[2])) if counted else (text, None)
    path = Path(name).expanduser()
    if name in PRESETS:
        return replace(PRESETS[name], limit=limit)
    if name.startswith("hf:"):
        repository, _, split = name.removeprefix("hf:").partition(":")
        return SourceConfig(kind="hf", name=repository, split=split or "train", column=AUTO, limit=limit)
    if not {".json", ".jsonl"}.isdisjoint(path.suffixes):
        return SourceConfig(kind="jsonl", name=name, column=AUTO, limit=limit)
    if path.suffix in readers.BUILDERS or path.is_dir():
        return SourceConfig(kind="hf", name=name, column=AUTO, limit=limit)
    expected = "a .jsonl or .json file, a dataset's file or folder, hf:NAME[:SPLIT]"
    raise UserError(f"{text!r} is not a source; expected {expected}, or one of {', '.join(PRESETS)}")


def num_entries(source: SourceConfig) -> int | None:
    """Return an upper bound on a source's entries, if it has a ``limit`` or local files of lines."""
    if source.limit is not None or source.kind not in ("jsonl", "text"):
        return source.limit
    return sum(1 for path in files_of(source) for _ in readers.read_lines(path))


def resolve_revision(sources: Sequence[SourceConfig], path: Path) -> list[SourceConfig]:
    """Pin each Hub dataset to a commit, which is stored in ``path`` so that later changes have no effect."""
    if not path.exists():
        latest = [readers.latest_commit(s.name, s.revision) if s.kind == "hf" else None for s in sources]
        write_checksummed_json(path, latest)
    commits = read_checksummed_json(path)
    if not isinstance(commits, list) or len(commits) != len(sources):
        raise UserError(f"{path} must list a commit or null for each of {len(sources)} sources; remove {path.parent}")
    return [s if commit is None else replace(s, revision=commit) for s, commit in zip(sources, commits, strict=True)]


# Entries of one source ---------------------------------------------------------------------------------------------


def iter_documents(source: SourceConfig, max_characters: int | None = None) -> Iterator[str]:
    """Yield the non-empty texts of a source in order, up to the one that reaches ``max_characters``."""
    if source.kind in DOCUMENT_SETS:
        texts = training_sets.documents(_set_of(source, DOCUMENT_SETS[source.kind], "documents"))
    elif source.kind == "text":
        texts = (readers.read_text(path) for path in files_of(source))
    else:
        rows = iter_rows(source, stream=max_characters is not None)
        texts = (as_text(*column_value(row, source, where)) for row, where in rows)
    texts = islice((text for text in texts if text.strip()), source.limit)
    return texts if max_characters is None or source.kind in DOCUMENT_SETS else _up_to(texts, max_characters)


def iter_prompts(source: SourceConfig, findings: Findings | None = None) -> Iterator[list[Message]]:
    """Yield conversations that end with a user's turn, in the source's order. A column holds a text (one user turn) or
    a conversation (see ``as_prompt``; for column ``auto`` ``as_suite_prompt``). Prompts without messages or with an
    empty last message are left out. A file of kind ``text`` has one prompt per line."""
    prompts: Iterator[list[Message]]
    if source.kind in PROMPT_SETS:
        sets = PROMPT_SETS[source.kind]
        prompts = map(conversation, sets[_set_of(source, tuple(sets), "prompts")]())
    elif source.kind == "text":
        prompts = (user_turn(line) for path in files_of(source) for line in readers.read_text(path).splitlines())
    else:
        prompts = _prompts_of_rows(source, Findings() if findings is None else findings)
    return islice((m for m in prompts if m and m[-1]["content"].strip()), source.limit)


def _prompts_of_rows(source: SourceConfig, findings: Findings) -> Iterator[list[Message]]:
    convert = as_suite_prompt if source.column == AUTO else partial(as_prompt, turns=source.turns)
    for row, where in iter_rows(source):
        value, name = column_value(row, source, where)
        messages = with_system(convert(value, name), row, where)
        findings.ignore("column", {n: v for n, v in row.items() if v is not value}, SYSTEM_COLUMNS)
        for turn in value if isinstance(value, list) else ():
            findings.ignore("key", turn if isinstance(turn, dict) else {}, ("role", "from", "content", "value"))
        if not messages or not messages[-1]["content"].strip():
            findings.leave_out("without a user's text", where, row=1)
        yield messages


def with_system(messages: list[Message], row: Mapping[str, Any], where: str) -> list[Message]:
    """Put the system prompt in the row's own column, if any, before ``messages``."""
    text = next((row[name] for name in SYSTEM_COLUMNS if row.get(name)), "")
    if not isinstance(text, str):
        raise UserError(f"{where} has a {type(text).__name__} as system prompt, expected text")
    first = messages[0] if messages else {"role": "system", "content": text}
    if first["role"] != "system" and text.strip():
        return [{"role": "system", "content": text}, *messages]
    if text.strip() and first["content"].strip() != text.strip():
        raise UserError(f"{where} has two system prompts, in its messages and in a column of its own; remove one")
    return messages


def column_value(
    row: dict[str, Any], source: SourceConfig, where: str, searched: Sequence[str] = PROMPT_COLUMNS
) -> tuple[Any, str]:
    """Return the row's value in the source's column (``auto``: the first of ``searched``), and its name."""
    columns = searched if source.column == AUTO else (source.column,)
    column = next((name for name in columns if row.get(name) is not None), None) or columns[0]
    if column not in row:
        expected, present = " or ".join(map(repr, columns)), ", ".join(map(str, row)) or "none"
        named = f"{{kind: {source.kind}, name: {source.name}, column: NAME}}"
        raise UserError(f"{where} has no column {expected}; present: {present}; name one: {named}")
    return row[column], f"{where}: column {column!r}"


def as_text(value: Any, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where} holds a {type(value).__name__}, expected text; set source.column")
    return value or ""


def iter_messages(value: Any, roles: Mapping[str, str] = ROLES) -> Iterator[Message]:
    """Yield the messages of a conversation in any common form; callers put the row's name before error messages."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(f"holds a {type(value).__name__}, expected text or a list of {{role, content}}")
    for turn in value:
        role, content = (turn.get(a, turn.get(b)) for a, b in (("role", "from"), ("content", "value")))
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if content is None and turn.get("tool_calls"):
            content = ""
        if not isinstance(role, str) or role not in roles or not isinstance(content, str):
            given, known = f"{role!r} with a {type(content).__name__} as content", ", ".join(roles)
            raise UserError(f"holds a turn of role {given}, expected text and a role among {known}")
        yield {"role": roles[role], "content": content}


def as_prompt(value: Any, where: str, turns: int = 1) -> list[Message]:
    """Return the prompt in a text or a conversation; an empty list if the conversation starts with the assistant. It
    ends before answer number ``turns`` (from 1). Earlier answers become empty, because the base gives its own."""
    if value is None or isinstance(value, str):
        return user_turn(value or "")
    messages: list[Message] = []
    answers = 0
    try:
        for message in iter_messages(value):
            if message["role"] == "assistant":
                answers += 1
                if answers == turns or not messages:
                    break
                message = {**message, "content": ""}
            messages.append(message)
    except UserError as error:
        raise UserError(f"{where} {error}; repair the row, or set source.column") from None
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages


def shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}: {text if len(text) <= 60 else text[:57] + '...'}"


def suite_prompt(value: Any) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages up to the first one to answer, and the texts of the user's later messages. ``value`` is a
    text, a conversation, or a list of the user's texts. Answers in a conversation are kept; only the user's messages
    after the last one are to be answered. Callers put the line's name before error messages."""
    if isinstance(value, str):
        messages = user_turn(value)
    elif value and isinstance(value, list) and all(isinstance(text, str) for text in value):
        messages = [message for text in value for message in user_turn(text)]
    elif value and isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        messages = list(iter_messages(value))
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise UserError("holds a conversation without a user's turn")
    else:
        raise UserError(f"holds {shown(value)}")
    # Of the user's unanswered messages at the end, all but the first wait for an answer.
    first = max((i for i, m in enumerate(messages[:-1]) if m["role"] != "user"), default=-1) + 1
    return messages[: first + 1], tuple(m["content"] for m in messages[first + 1 :])


def as_suite_prompt(value: Any, where: str) -> list[Message]:
    """Return the conversation to answer in a line of ``data.prompts``, with empty answers between its turns."""
    try:
        messages, later = suite_prompt(value)
    except UserError as error:
        raise UserError(f"{where} {error}, expected text, a conversation or a list of texts") from None
    return [*messages[:-1], *conversation([messages[-1]["content"], *later])]


def iter_rows(
    source: SourceConfig, stream: bool = False, on_error: Callable[[UserError], None] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (row, name) of a dataset, which is not downloaded with ``stream`` or ``limit``, or of JSON lines."""
    if source.kind == "hf" and not source.name.endswith(".json"):  # tables would give all objects the same keys
        with open_source(source, stream or source.limit is not None) as rows:
            for number, row in enumerate(rows):
                yield {name: _without_nulls(value) for name, value in row.items()}, f"{source} row {number}"
        return
    for path in files_of(source):
        for line, content in readers.read_lines(path):
            try:
                row = readers.json_object(content)
            except UserError as error:
                if on_error is None:
                    raise UserError(f"{path} {line} {error}; repair or remove the line") from None
                on_error(UserError(f"{path} {line} {error}"))
                continue
            yield row, f"{path} {line}"


def _without_nulls(value: Any) -> Any:
    """Drop the keys of objects that hold null, with which tables fill what an object lacks."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _up_to(texts: Iterator[str], max_characters: int) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= max_characters:
            return


def _set_of(source: SourceConfig, known: tuple[str, ...], kind: str) -> str:
    if source.name not in known:
        raise UserError(f"source {source} has no {kind}; {source.kind} sets with {kind} are {', '.join(known)}")
    return source.name


def files_of(source: SourceConfig) -> list[Path]:
    path = Path(source.name).expanduser()
    names = [str(path)] if path.is_file() else glob(str(path), recursive=True)  # a file's name may contain [1]
    files = [Path(name) for name in sorted(names) if Path(name).is_file()]
    if not files:
        raise UserError(f"source {source} matches no file; check the path")
    return files


@contextmanager
def open_source(source: SourceConfig, stream: bool) -> Iterator[Any]:
    """Open the dataset of a source of kind ``hf``; errors in the block name the source."""
    with readers.dataset_errors(source.name, f"subset {source.subset}, split {source.split!r}"):
        yield readers.open_dataset(source.name, source.subset, source.split, source.revision, stream)


# Entries of all sources --------------------------------------------------------------------------------------------


def load_documents(sources: list[SourceConfig], seed: int, max_characters: int | None = None) -> list[str]:
    """Return all sources' documents without near-duplicates (``content_hash``), shuffled by ``seed``."""

    def read(source: SourceConfig, most: int | None, _: Findings | None) -> Iterator[str]:
        texts = iter_documents(source, most)
        # Embedded and builtin sets are complete, unless weights limit them.
        return texts if source.weight is None or most is None else _up_to(texts, most)

    return _load(sources, read, max_characters, content_hash, seed)


def load_prompts(
    sources: list[SourceConfig], seed: int, limit: int | None, findings: Findings | None = None
) -> list[list[Message]]:
    """Return up to ``limit`` prompts (None: all) of all sources without near-duplicates, shuffled by ``seed``."""

    def read(source: SourceConfig, most: int | None, findings: Findings | None) -> Iterator[list[Message]]:
        """Yield prompts of ``source``; only ``most`` (None: all) if it has a weight or is a dataset without limit."""
        # Datasets may be large, so no more than needed is read. Other sources are read whole and cut after the shuffle.
        if source.kind == "hf" and source.limit is None:
            source = replace(source, limit=most)
        return islice(iter_prompts(source, findings), None if source.weight is None else most)

    def key(messages: list[Message]) -> str:
        return content_hash("\n".join(f"{m['role']}: {m['content']}" for m in messages))

    return _load(sources, read, limit, key, seed, limit, findings)


def shares(sources: Sequence[SourceConfig]) -> list[float] | None:
    """Return the sources' shares of the mixture, which add up to 1; None without weights."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        unweighted = next(source for source in sources if source.weight is None)
        raise UserError(f"source {unweighted} has no weight, but others have; give every source of a list one, or none")
    return [weight / sum(weights) for weight in weights] or None


def _load(
    sources: list[SourceConfig],
    read: Callable[[SourceConfig, int | None, Findings | None], Iterator[T]],
    total: int | None,
    key: Callable[[T], str],
    seed: int,
    limit: int | None = None,
    findings: Findings | None = None,
) -> list[T]:
    """Return up to ``limit`` entries of all sources, without duplicates (of equal ``key``), shuffled by ``seed``.
    ``read(source, most, findings)`` yields a source's entries; ``most`` is its share of ``total``. With ``limit`` the
    sources are read twice, so that a few entries of large files take little memory."""
    unique: dict[bytes, T | None] = {}
    parts = [total and ceil(share * total) for share in shares(sources) or [1.0] * len(sources)]
    for source, part in zip(sources, parts, strict=True):
        before, count = len(unique), 0
        for entry in read(source, part, findings):
            unique.setdefault(bytes.fromhex(key(entry)), entry if limit is None else None)
            count += 1
        if findings is not None:
            findings.leave_out("repeat an earlier one", str(source), row=count - len(unique) + before)
        if not count:
            raise UserError(f"source {source} is empty; check its name, split and column")
    # Sorted by hash first, so that the order of sources and rows does not matter.
    order = sorted(unique)
    random.Random(seed).shuffle(order)
    missing = set() if limit is None else set(order[:limit])
    for source, part in zip(sources, parts, strict=True) if missing else ():
        for entry in read(source, part, None):
            if (k := bytes.fromhex(key(entry))) in missing:
                unique[k] = entry
                missing.remove(k)
    if missing:
        raise UserError("a source changed while it was read; start the same command again")
    return [cast(T, unique[k]) for k in order[:limit]]
