"""The answer store: token ids and hidden states of the base's own answers, in shards that are written atomically. A
shard is a table with a checksum; hidden states are in a second file. This module imports neither torch nor
transformers, because the client of a server needs neither."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from drafthead.errors import UserError, one_line
from drafthead.files import local
from drafthead.files.local import new_file

REMEDY = "choose another folder for these settings (data.folder=...), or remove this one"
_SHARD = re.compile(r"shard-(\d{5,9})\.parquet")
Prompt = tuple[int, list[int]]  # number in the corpus's list of prompts, token ids


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer, as the token ids of decoding, or of the answer's text if only this is known."""

    prompt_number: int  # in the list of prompts; unique in a store
    input_ids: npt.NDArray[np.int32]  # [n] tokens of the prompt and then of the answer
    boundary: int  # index of the first answer token; at least 1
    finished: bool  # False if a limit cut the answer, which then has no end-of-turn token
    hidden_states: npt.NDArray[np.float16] | None = None
    """[n - 1, D], for n tokens of prompt and answer: the base's final hidden state at each token but the last, NaN
    if it is missing. None if hidden states are not stored."""

    def __post_init__(self) -> None:
        n = len(self.input_ids)
        if not 1 <= self.boundary < n:
            raise ValueError(f"prompt {self.prompt_number}: boundary must be in [1, {n}), got {self.boundary}")
        if self.hidden_states is not None and len(self.hidden_states) != n - 1:
            rows = len(self.hidden_states)
            raise ValueError(f"prompt {self.prompt_number}: {n} tokens need {n - 1} hidden states, got {rows}")

    @classmethod
    def of(cls, ids: Sequence[int], boundary: int) -> "Answer":
        """Return a finished answer outside a store; ``ids`` are those of the prompt and the answer."""
        return cls(0, np.asarray(ids, dtype=np.int32), boundary, finished=True)

    @property
    def middle(self) -> int:
        """Number of tokens when half of the answer is there."""
        return (self.boundary + len(self.input_ids)) // 2

    @cached_property
    def ids(self) -> list[int]:
        ids: list[int] = self.input_ids.tolist()
        return ids

    @property
    def positions(self) -> int:
        """Number of positions where a step may start: one per answer token but the first, which the prefill yields."""
        return len(self.input_ids) - self.boundary - 1


@dataclass(frozen=True)
class ProcessGroup:
    """This process's rank among the processes that share a corpus, their number, and their barrier."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None  # returns when every process of the group has called it


@dataclass(frozen=True)
class AnswerStats:
    """Size of an answer store."""

    rows: int
    tokens: int  # of answers, without prompts
    finished: int  # answers that end with an end-of-turn token


ANSWERS = "answers"  # folder in the ``data.folder`` of a run


def open_answers(folder: Path) -> "AnswerStore":
    """Open the answer store in ``folder``, which is the store itself or the ``data.folder`` of a run."""
    store = inner if (inner := folder / ANSWERS).is_dir() else folder
    if not (store / local.MANIFEST_NAME).is_file():
        raise UserError(f"{folder} holds no answers; name the data.folder of a run, such as outputs/corpora/NAME")
    return AnswerStore(store)


class _Entry(NamedTuple):
    shard: int
    row: int
    first: int  # row of the answer's first hidden state in the shard's matrix


class AnswerStore:
    """A folder of answers for any number of readers. One or several processes write. If there are several, all open the
    store before the first of them writes, and no two use the same shard number. A shard is ``shard-00012.parquet`` and,
    with hidden states, ``shard-00012.safetensors``. The parquet file is renamed into place last, so a kill only loses
    answers that were not yet appended. Readers ignore incomplete files of a killed writer, and the next writer removes
    them. ``manifest`` names everything that determines the answers (base, tokenizer, sampler, prompts), as JSON values.
    The manifest of an existing store must equal it; None opens an existing store with any manifest."""

    def __init__(self, folder: Path, manifest: dict[str, Any] | None = None) -> None:
        self.folder = folder
        if manifest is None:
            local.read_manifest(folder)
        elif not local.check_manifest(folder, manifest, REMEDY):
            if any(folder.glob("shard-*.parquet")):
                raise UserError(f"{folder} holds answers but no manifest.json; restore this file or remove the folder")
            local.write_manifest(folder, manifest)
        self._tables: dict[int, pa.Table] = {}
        self._entries: dict[int, _Entry] = {}
        self._open_hidden_states = lru_cache(maxsize=1024)(self._map_hidden_states)
        self._checked: set[int] = set()
        for path in sorted(folder.glob("shard-*.parquet")):
            if (match := _SHARD.fullmatch(path.name)) is None:
                raise UserError(f"{path} is not named like a shard (shard-00012.parquet); rename or remove it")
            self._add(int(match[1]), read_table(local.safe_join(folder, path.name)))

    @property
    def done(self) -> set[int]:
        """Prompt numbers of the answers that were on disk when this store was opened, or that it has appended."""
        return set(self._entries)

    @property
    def has_hidden_states(self) -> bool:
        return bool(self._tables) and all(map(_width, self._tables.values()))

    @property
    def next_shard(self) -> int:  # highest number plus 1; 0 in an empty store
        return max(self._tables, default=-1) + 1

    def append_shard(self, answers: list[Answer], shard: int | None = None) -> None:
        """Write ``answers`` as one shard and flush it to disk; an empty list writes nothing. Either all ``answers`` or
        none must have hidden states. A second answer to a prompt raises a ``UserError``. ``shard`` is the shard's
        number; None takes ``next_shard`` and first calls ``remove_leftovers``. If several processes write, they pass
        numbers, and one of them calls ``remove_leftovers`` before the first write."""
        if not answers:
            return
        numbers = [answer.prompt_number for answer in answers]
        if twice := sorted((set(numbers) & self.done) | {n for n in numbers if numbers.count(n) > 1}):
            raise UserError(f"prompts {twice[:5]} have two answers in {self.folder}; write each prompt once")
        if shard is None:
            self.remove_leftovers()
            shard = self.next_shard
        path = self._path(shard, "parquet")
        if path.exists():
            raise UserError(f"{path} appeared while this run was writing; stop the other process that uses the folder")
        blocks = [answer.hidden_states for answer in answers if answer.hidden_states is not None]
        hidden_states = None
        if blocks:
            if len(blocks) < len(answers):
                what = f"{len(blocks)} of {len(answers)} answers have hidden states"
                raise ValueError(f"{what}; give all of them or none")
            # [sum of n, D]: one row per token; the last token of an answer has no hidden state (NaN).
            gap = np.full((1, blocks[0].shape[1]), np.nan, dtype=np.float16)
            hidden_states = np.concatenate([rows for block in blocks for rows in (block.astype(np.float16), gap)])
        size = sum(4 * len(answer.input_ids) for answer in answers) + getattr(hidden_states, "nbytes", 0)
        local.require_space(self.folder, 1_000_000 + size, "the next shard of answers")
        try:
            with local.disk_errors("the next shard of answers", self.folder):
                width, checksum = 0, ""
                if hidden_states is not None:
                    with new_file(self._path(shard, "safetensors")) as tmp_path:
                        save_file({"features": hidden_states}, tmp_path)
                        width, checksum = hidden_states.shape[1], local.file_digest(tmp_path)
                columns = {n: pa.array([getattr(g, n) for g in answers], type=kind) for n, kind in _COLUMNS.items()}
                metadata = {_WIDTH: str(width).encode(), _FEATURES: checksum.encode()}
                table = pa.table(columns).replace_schema_metadata(metadata)
                table = table.replace_schema_metadata({**metadata, _DIGEST: _digest(table)})
                with new_file(path) as tmp_path:  # last, because a table means a complete shard
                    pq.write_table(table, tmp_path, compression="zstd")
                self._add(shard, table)
        except UserError:
            self.remove_leftovers(shard)  # a partial shard would keep the disk full
            raise

    def read(self, with_hidden_states: bool = True) -> Iterator[Answer]:  # by ascending prompt number
        for number in sorted(self._entries):
            yield self._answer(number, with_hidden_states)

    def _answer(self, number: int, with_hidden_states: bool) -> Answer:
        entry = self._entries[number]
        ids, boundary, finished = (self._tables[entry.shard][name][entry.row] for name in _ROW)
        hidden_states = self.hidden_states(number) if with_hidden_states else None
        return Answer(number, ids.values.to_numpy(), boundary.as_py(), finished.as_py(), hidden_states)

    def answer(self, prompt_number: int) -> npt.NDArray[np.int32]:
        """Return the token ids of the answer to a prompt; raise a ``KeyError`` if there is no answer."""
        answer = self._answer(prompt_number, with_hidden_states=False)
        return answer.input_ids[answer.boundary :]

    def hidden_states(self, prompt_number: int) -> npt.NDArray[np.float16] | None:
        """Return the stored hidden states [n - 1, D] of a prompt and its answer (n tokens), or None if not stored."""
        entry = self._entries[prompt_number]
        table = self._tables[entry.shard]
        if not _width(table):
            return None
        last = entry.first + len(table["input_ids"][entry.row]) - 1
        return cast("npt.NDArray[np.float16]", self._open_hidden_states(entry.shard)[entry.first : last])

    def token_counts(
        self, vocab_size: int, leave_out: Callable[[int], bool] = lambda prompt_number: False
    ) -> npt.NDArray[np.int64]:
        """Return how often each token id occurs in the answers, [vocab_size], without prompts and without answers whose
        prompt numbers are in ``leave_out``."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for answer in (self.answer(number) for number in self._entries if not leave_out(number)):
            of_answer = np.bincount(answer, minlength=vocab_size)
            if len(of_answer) > vocab_size:
                what = f"{self.folder} has token id {len(of_answer) - 1}, but the vocabulary has {vocab_size}"
                raise UserError(f"{what}; {REMEDY}")
            counts += of_answer
        return counts

    def stats(self, leave_out: Callable[[int], bool] = lambda prompt_number: False) -> AnswerStats:
        answers = [a for a in self.read(with_hidden_states=False) if not leave_out(a.prompt_number)]
        tokens = sum(len(answer.input_ids) - answer.boundary for answer in answers)
        return AnswerStats(rows=len(answers), tokens=tokens, finished=sum(answer.finished for answer in answers))

    def _map_hidden_states(self, shard: int) -> Any:
        path = local.safe_join(self.folder, self._path(shard, "safetensors").name)
        try:
            expected = _metadata(self._tables[shard]).get(_FEATURES, b"").decode()
            if expected and shard not in self._checked and local.file_digest(path) != expected:
                raise SafetensorError("its checksum is not the one that its table states")
            file: Any = safe_open(path, framework="np")
            states = file.get_slice("features")
        except (OSError, SafetensorError) as error:
            remedy = "remove the file and its .parquet, and its prompts are answered again"
            raise UserError(f"{path} cannot be read ({one_line(error)}); {remedy}") from None
        self._checked.add(shard)
        return states

    def _add(self, shard: int, table: pa.Table) -> None:
        if _width(table) and not self._path(shard, "safetensors").exists():
            what = f"{self._path(shard, 'safetensors')} is missing"
            raise UserError(f"{what}; restore it, or remove the .parquet file of this name to answer its prompts again")
        first = 0
        for row, number in enumerate(table["prompt_number"].to_pylist()):
            if number in self._entries:
                both = " and ".join(self._path(s, "parquet").name for s in (self._entries[number].shard, shard))
                what = f"prompt {number} appears twice in {self.folder}, in {both}"
                raise UserError(f"{what}; remove one of the two files")
            self._entries[number] = _Entry(shard, row, first)
            first += len(table["input_ids"][row])
        self._tables[shard] = table

    def _path(self, shard: int, kind: str) -> Path:
        return self.folder / f"shard-{shard:05}.{kind}"

    def remove_leftovers(self, shard: int | None = None) -> None:
        """Remove the files of interrupted writes of shard number ``shard``, or with None of all shards. With None, no
        other process may be writing to the store."""
        name = "*" if shard is None else f"{shard:05}"
        orphans = [p for p in self.folder.glob(f"shard-{name}.safetensors") if not p.with_suffix(".parquet").exists()]
        for path in [*self.folder.glob(f".shard-{name}.*.tmp"), *orphans]:
            path.unlink()


_WIDTH, _FEATURES, _DIGEST = b"features_width", b"features_sha256", b"sha256"  # metadata keys of a table
_ROW = ("input_ids", "boundary", "finished")
_COLUMNS = {
    "prompt_number": pa.int64(),
    "input_ids": pa.list_(pa.int32()),
    "boundary": pa.int32(),
    "finished": pa.bool_(),
}


def read_table(path: Path) -> pa.Table:
    """Return a shard's table; raise a ``UserError`` if its columns or its checksum are wrong."""
    try:
        table = pq.read_table(path, columns=list(_COLUMNS), partitioning=None)
        if {n: table.schema.field(n).type for n in _COLUMNS} != _COLUMNS or any(table[n].null_count for n in _COLUMNS):
            raise pa.ArrowInvalid("its columns are not those of a shard")
        expected = _metadata(table).get(_DIGEST)  # shards of the first versions state none
        if expected is not None and expected != _digest(table):
            raise pa.ArrowInvalid("its content does not have the stated checksum")
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        what = f"{path} cannot be read ({one_line(error)})"
        raise UserError(f"{what}; remove the file, and its prompts are answered again") from None
    return table


def _metadata(table: pa.Table) -> dict[bytes, bytes]:
    return table.schema.metadata or {}


def _width(table: pa.Table) -> int:
    return int(_metadata(table).get(_WIDTH, b"0"))


def _digest(table: pa.Table) -> bytes:
    """Return a table's checksum, of its values and of the metadata of its hidden states."""
    metadata = _metadata(table)
    digest = hashlib.sha256(metadata.get(_WIDTH, b"?") + b"," + metadata.get(_FEATURES, b"?"))
    for name in _COLUMNS:
        column = table[name].combine_chunks()
        if name == "input_ids":
            digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
            column = column.flatten()
        digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest().encode()
