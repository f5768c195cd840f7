"""Documents and prompts: hub datasets, local files, files inside packages, and a few that come with the code."""
# Values of a column as texts and as prompts.

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from glob import glob
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from drafthead.data.embedded import builtin_sets
from drafthead.data.embedded import training_sets as embedded_sets
from drafthead.data.embedded.training_sets import content_hash
from drafthead.data.text.chat import Message
from drafthead.data.text.hub_datasets import hub_errors, open_hub
from drafthead.data.utils.errors import UserError

_ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}


def column_value(row: dict[str, Any], column: str, where: str) -> Any:
    """The row's value in a column; None where it has none.

    Raises:
        UserError: there is no such column; the message lists those present, ``where`` says which row it is.
    """
    if column not in row:
        present = ", ".join(map(str, row)) or "none"
        raise UserError(f"{where} has no column {column!r}; present: {present}; set source.column")
    return row[column]


def as_text(value: Any, column: str, where: str) -> str:
    """A text.

    Raises:
        UserError: it is none; ``where`` says which row has it.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds a {type(value).__name__}, expected text; set source.column")
    return value


def as_prompt(value: Any, column: str, where: str) -> list[Message]:
    """The messages before the first answer, of a text or a conversation; empty where the assistant begins.

    Raises:
        UserError: it is neither; ``where`` says which row has it.
    """
    if isinstance(value, str):
        return user_turn(value)
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(
            f"{where}: column {column!r} holds a {type(value).__name__}, expected text or a list of "
            "{role, content} or {from, value}; set source.column"
        )
    messages: list[Message] = []
    for turn in value:
        role, content = (turn.get(a, turn.get(b)) for a, b in (("role", "from"), ("content", "value")))
        if role not in _ROLES or not isinstance(content, str):
            raise UserError(
                f"{where}: a turn has role {role!r} and a {type(content).__name__} as content, expected text and a "
                f"role among {', '.join(_ROLES)}; repair the row"
            )
        if _ROLES[role] == "assistant":
            break
        messages.append({"role": _ROLES[role], "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages


def user_turn(text: str) -> list[Message]:
    """A prompt of one turn."""
    return [{"role": "user", "content": text}]


KINDS = ("hf", "jsonl", "text", "embedded", "builtin")
_SETS = {"embedded": embedded_sets, "builtin": builtin_sets}
_DAMAGE = (OSError, EOFError, zlib.error)
"""What a file that is unreadable or damaged raises, compressed or not."""
T = TypeVar("T")


@dataclass(kw_only=True)
class SourceConfig:
    """Where text or prompts come from."""

    kind: str
    """``hf`` (hub dataset or a local dataset folder), ``jsonl``, ``text``, ``embedded`` or ``builtin``."""
    name: str = ""
    """Hub id; path or glob of files (``.gz`` is read too); or the name of an embedded or builtin set."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    revision: str | None = None
    """Commit or tag of a hub dataset."""
    column: str = "text"
    """Column of a hub or jsonl row: a text, or for prompts also a conversation."""
    limit: int | None = None
    """Read at most this many entries; a hub dataset is then streamed, not downloaded. None: all."""
    weight: float | None = None
    """Its part of the mixture (of the characters of text, of the number of prompts), relative to the other sources',
    which then have one too. A source that ends before gives what it has. None: everything it has."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"source.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.name:
            raise UserError(f"source.name must not be empty for kind {self.kind!r}; give a hub id, a path or a set")
        if self.kind in _SETS and self.name not in (known := _set_names(self.kind)):
            raise UserError(f"source.name must be one of {', '.join(known)} for kind {self.kind!r}, got {self.name!r}")
        for key in ("subset", "revision"):
            if self.kind != "hf" and getattr(self, key) is not None:
                raise UserError(f"source.{key} is for kind 'hf' only, got kind {self.kind!r}; remove it")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"source.limit must be >= 1 or null, got {self.limit}")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise UserError(f"source.weight must be positive or null, got {self.weight}")

    def manifest(self) -> dict[str, Any]:
        """What decides on the entries read."""
        return {key: value for key, value in asdict(self).items() if key != "weight" or value is not None}

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def iter_documents(source: SourceConfig, max_characters: int | None = None) -> Iterator[str]:
    """The texts of a source in its own order, empty ones left out. A file of kind ``text`` is one document.

    Args:
        source: where the texts are.
        max_characters: stop behind the document that reaches this many; a hub dataset is then streamed. Sets that
            come with a package are small and always whole.

    Raises:
        UserError: nothing there, a broken line, a missing column (the message lists those present), no network.
    """
    if source.kind in _SETS:
        texts = _SETS[source.kind].documents(_set_of(source, "DOCUMENT_SETS"))
    elif source.kind == "text":
        texts = (_read_text(path) for path in _files(source))
    else:
        values = _column(source, stream=max_characters is not None)
        texts = (as_text(value, source.column, where) for value, where in values)
    kept = islice((text for text in texts if text.strip()), source.limit)
    return kept if max_characters is None or source.kind in _SETS else _up_to(kept, max_characters)


def _up_to(texts: Iterator[str], max_characters: int) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= max_characters:
            return


def iter_prompts(source: SourceConfig) -> Iterator[list[Message]]:
    """Message lists that end with a user turn, in the source's own order.

    A column holds a text (one user turn) or a conversation, ``{role, content}`` or ShareGPT's ``{from, value}``;
    of a conversation, what stands before its first assistant turn is kept, and one that starts with the
    assistant is left out. A file of kind ``text`` has one prompt a line.

    Raises:
        UserError: as ``iter_documents``; or a column holds neither.
    """
    found: Iterator[list[Message]]
    if source.kind in _SETS:
        found = map(user_turn, _SETS[source.kind].prompts(_set_of(source, "PROMPT_SETS")))
    elif source.kind == "text":
        found = (user_turn(line) for path in _files(source) for line in _read_text(path).splitlines())
    else:
        found = (as_prompt(value, source.column, where) for value, where in _column(source))
    return islice((m for m in found if m and m[-1]["role"] == "user" and m[-1]["content"].strip()), source.limit)


def load_documents(sources: list[SourceConfig], seed: int, max_characters: int | None = None) -> list[str]:
    """All documents of all sources, without near copies (``content_hash``), in an order fixed by ``seed``.

    Args:
        sources: where the documents are.
        seed: of the shuffle.
        max_characters: of each source, read no more than about this many (``iter_documents``), or its share of them
            where sources have weights; None reads all.

    Raises:
        UserError: a source is broken or empty; no source is given, or only some have a weight.
    """

    def entries(source: SourceConfig, share: float | None) -> Iterator[str]:
        if share is None or max_characters is None:
            return iter_documents(source, max_characters)
        most = ceil(share * max_characters)
        return _up_to(iter_documents(source, most), most)  # sets that come with a package are whole otherwise

    return _load(sources, entries, content_hash, seed)


def load_prompts(sources: list[SourceConfig], seed: int, limit: int | None) -> list[list[Message]]:
    """All prompts of all sources, without near copies, in an order fixed by ``seed``, at most ``limit``.

    Raises:
        UserError: as ``load_documents``.
    """

    def entries(source: SourceConfig, share: float | None) -> Iterator[list[Message]]:
        most = limit if share is None or limit is None else ceil(share * limit)
        # Without a share, only where reading more costs something: which ones are kept is left to the shuffle.
        if source.kind == "hf" and source.limit is None:
            source = replace(source, limit=most)
        return islice(iter_prompts(source), None if share is None else most)

    return _load(sources, entries, _prompt_hash, seed)[:limit]


def shares(sources: Sequence[SourceConfig]) -> list[float] | None:
    """The sources' parts of the mixture, which add up to 1; None where no source has a weight.

    Raises:
        UserError: only some have one.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        bare = next(source for source in sources if source.weight is None)
        raise UserError(f"source {bare} has no weight, but others have; give every source of a list one, or none")
    return [weight / sum(weights) for weight in weights] or None


def _load(
    sources: list[SourceConfig],
    entries: Callable[[SourceConfig, float | None], Iterator[T]],
    key: Callable[[T], str],
    seed: int,
) -> list[T]:
    if not sources:
        raise UserError("no data source is given; list at least one")
    unique: dict[str, T] = {}
    parts: Sequence[float | None] = shares(sources) or [None] * len(sources)
    for source, share in zip(sources, parts, strict=True):
        empty = True
        for entry in entries(source, share):
            empty = False
            unique.setdefault(key(entry), entry)
        if empty:
            raise UserError(f"source {source} is empty; check source.name, source.split and source.column")
    # By hash first: the order of the sources and of their rows must not matter.
    order = sorted(unique)
    random.Random(seed).shuffle(order)
    return [unique[k] for k in order]


def _prompt_hash(messages: list[Message]) -> str:
    return content_hash("\n".join(f"{m['role']}: {m['content']}" for m in messages))


def _set_names(kind: str) -> list[str]:
    return [*_SETS[kind].DOCUMENT_SETS, *_SETS[kind].PROMPT_SETS]


def _set_of(source: SourceConfig, which: str) -> str:
    known: tuple[str, ...] = getattr(_SETS[source.kind], which)
    if source.name not in known:
        wanted = "documents" if which == "DOCUMENT_SETS" else "prompts"
        raise UserError(f"source {source} has no {wanted}; the {source.kind} sets that have are {', '.join(known)}")
    return source.name


def _files(source: SourceConfig) -> list[Path]:
    files = [Path(p) for p in sorted(glob(str(Path(source.name).expanduser()), recursive=True)) if Path(p).is_file()]
    if not files:
        raise UserError(f"source {source} matches no file; check source.name")
    return files


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (UnicodeDecodeError, *_DAMAGE) as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); convert it or leave it out") from None


def _column(source: SourceConfig, stream: bool = False) -> Iterator[tuple[Any, str]]:
    """Values of the source's column, each with where it stands; rows without a value are left out."""
    for row, where in _hub_rows(source, stream) if source.kind == "hf" else _jsonl_rows(source):
        value = column_value(row, source.column, where)
        if value is not None:
            yield value, where


def _jsonl_rows(source: SourceConfig) -> Iterator[tuple[dict[str, Any], str]]:
    for path in _files(source):
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not valid JSON ({error}); repair or remove the line") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} holds a {type(row).__name__}, expected an object; repair the line")
            yield row, where


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield from file
    except _DAMAGE as error:
        raise UserError(f"{path} cannot be read to its end ({error}); copy it again or leave it out") from None


def _hub_rows(source: SourceConfig, stream: bool) -> Iterator[tuple[dict[str, Any], str]]:
    with hub_errors(source):
        for number, row in enumerate(open_hub(source, stream or source.limit is not None)):
            yield row, f"{source} row {number}"
