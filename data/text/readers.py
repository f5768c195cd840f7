"""Readers of local files and datasets for training and evaluation. Formats that can run code are not read. JSON lines
and text are read here, because errors of ``datasets`` do not name the broken line, and ``datasets`` refuses columns
with texts in some rows and conversations in others. Since version 4 it runs no scripts and reads no pickles."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from drafthead.data.text.chat import require_whole_characters
from drafthead.errors import UserError, one_line

BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}  # of ``datasets``
SPLITS = ("test", "validation", "train")  # by preference: the base may have been trained on training data
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character, alone or as one of a pair
COMMIT = re.compile(r"[0-9a-f]{40}")

# Files -------------------------------------------------------------------------------------------------------------


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # damaged compression included
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise UserError(f"{path} cannot be read to its end ({reason}); check the file, or leave it out") from None


def read_text(path: Path) -> str:
    with _file_errors(path):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); convert it or leave it out") from None


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name ("line 3") and content of lines that are not blank, or of the entries of an array in JSON."""
    with _file_errors(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if number == 1 and ".json" in path.suffixes and line.startswith(b"["):
                try:
                    entries = json.loads(line + file.read())
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path} is not valid JSON ({one_line(error)}); repair it") from None
                yield from ((f"row {n}", json.dumps(entry).encode()) for n, entry in enumerate(entries, start=1))
            elif line.strip():
                yield f"line {number}", line


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON; callers put the line's name before error messages."""
    try:
        row = json.loads(line.decode())
        if SURROGATE.search(line):
            require_whole_characters(json.dumps(row, ensure_ascii=False))
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"holds a {type(row).__name__}, expected an object")
    return row


# Datasets ----------------------------------------------------------------------------------------------------------


def open_dataset(
    name: str, subset: str | None = None, split: str | None = None, revision: str | None = None, stream: bool = False
) -> Any:
    """Open a dataset with the library ``datasets``; call it inside ``dataset_errors``. ``name`` is an id on the Hub, a
    dataset folder (also one of ``save_to_disk``) or a data file (``BUILDERS``). The default ``split`` is the first of
    ``SPLITS`` that the dataset has, or else its first; for a data file "train"."""
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise UserError(f"dataset {name!r} is a file, but none of {', '.join(BUILDERS)}; convert the file")
        builder = BUILDERS[path.suffix]
        return datasets.load_dataset(builder, data_files=escape(str(path)), split=split or "train", streaming=stream)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, dict):
            return loaded
        chosen = split or next((s for s in SPLITS if s in loaded), next(iter(loaded)))
        if chosen not in loaded:
            raise UserError(f"dataset {name!r} has no split {chosen!r}; choose one of {', '.join(loaded)}")
        return loaded[chosen]
    if name.startswith(("/", ".", "~")) and not path.exists():
        raise UserError(f"dataset {name!r} names a path that does not exist; check the path")
    if path.is_dir():
        name = str(path)
        if escape(name) != name:
            raise UserError(f"folder {name} has one of *?[ in its path, which datasets takes for a pattern; rename it")
    if split is None:
        names = datasets.get_dataset_split_names(name, subset, revision=revision)
        split = next((s for s in SPLITS if s in names), names[0])
    rows = datasets.load_dataset(name, subset, split=split, revision=revision, streaming=stream)
    if stream and getattr(rows, "features", "known") is None:
        # An array of JSON objects is read whole even as a stream, which does not decode columns of mixed types.
        rows = datasets.load_dataset(name, subset, split=split, revision=revision).to_iterable_dataset()
    return rows


@contextmanager
def dataset_errors(name: str, settings: str) -> Iterator[None]:
    """Turn errors of ``datasets`` in the block (network, split, damaged file) into a ``UserError``."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        what = f"dataset {name!r} ({settings}) could not be read: {type(error).__name__}"
        raise UserError(f"{what}: {one_line(error.__cause__ or error)}; check the name and the network") from error


def latest_commit(name: str, revision: str | None) -> str | None:
    """Return the commit that a dataset's revision (None: main) points to now; None for a local dataset."""
    from huggingface_hub import HfApi

    if Path(name).expanduser().exists():
        return None
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    try:
        if commit := HfApi().dataset_info(name, revision=revision, timeout=30.0).sha:
            return commit
        reason = "the response names none"
    except Exception as error:  # the client also raises errors of its HTTP library
        reason = f"{type(error).__name__}: {one_line(error)}"
    where = f"dataset {name!r} (revision {revision or 'main'})"
    raise UserError(f"the Hub names no commit of {where}: {reason}; check the id, or set source.revision to a commit")
