"""Datasets of the Hub and dataset folders: opened at one commit, and only where their files are data."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import read_sealed_json, write_sealed_json

if TYPE_CHECKING:
    from drafthead.data.text.sources import SourceConfig

PROGRAMS = {".bin", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".py"}
"""Suffixes of files that can run code when they are read."""
_ABOUT = re.compile(r"\..*|(readme|licen[cs]e|notice|citation|changelog)\b.*|dataset_infos\.json", re.IGNORECASE)
"""Files beside the data."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def open_hub(source: "SourceConfig", stream: bool) -> Any:
    """The dataset of a source of kind ``hf``: whole and on disk, or streamed. Use within ``hub_errors``.

    Raises:
        UserError: it has nothing but files that can run code.
    """
    import datasets

    _check_files(source)
    return datasets.load_dataset(
        source.name, source.subset, split=source.split, revision=source.revision, streaming=stream
    )


def resolve_revision(sources: Sequence["SourceConfig"], path: Path) -> list["SourceConfig"]:
    """The sources with each dataset of the Hub at one commit, so that a change there does not change a stream's rows.

    Args:
        sources: of any kind.
        path: keeps the commits; those it has are used, and nobody is asked.

    Raises:
        UserError: the Hub cannot be asked, or the file is damaged.
    """
    if not path.exists():
        write_sealed_json(path, [_commit(source) for source in sources])
    commits = read_sealed_json(path)
    if (
        not isinstance(commits, list)
        or len(commits) != len(sources)
        or not all(c is None or isinstance(c, str) and _COMMIT.fullmatch(c) for c in commits)
    ):
        raise UserError(f"{path} holds no commits of {len(sources)} sources; remove the folder {path.parent}")
    return [s if commit is None else replace(s, revision=commit) for s, commit in zip(sources, commits, strict=True)]


def _commit(source: "SourceConfig") -> str | None:
    """What the revision means now; None for what is not on the Hub."""
    if source.kind != "hf" or Path(source.name).exists():
        return None
    if source.revision is not None and _COMMIT.fullmatch(source.revision):
        return source.revision
    try:
        return _asked(source.name, source.revision)[0]
    except Exception as error:  # the client also raises errors of its HTTP library
        raise UserError(
            f"the Hub does not say which commit of dataset {source.name!r} (revision {source.revision or 'main'}) is "
            f"the latest: {type(error).__name__}: {one_line(error)}; check the id, the network and access, or set "
            "source.revision to a commit of 40 digits"
        ) from None


def _check_files(source: "SourceConfig") -> None:
    """Refuse a dataset of pickles, array files that may hold some, and scripts, by their names.

    Raises:
        UserError: it has such files and no others.
    """
    folder = Path(source.name)
    try:
        if folder.is_dir():
            names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        else:
            names = _asked(source.name, source.revision)[1]
    except Exception:  # what cannot be listed cannot be loaded, either, and that is reported better
        return
    files = [PurePosixPath(name) for name in names if not _ABOUT.fullmatch(PurePosixPath(name).name)]
    if files and all(file.suffix.lower() in PROGRAMS for file in files):
        shown = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        raise UserError(
            f"dataset {source.name!r} has only files that can run code when they are read ({shown}); convert it to "
            "Parquet or JSON Lines, or use another one"
        )


@cache
def _asked(name: str, revision: str | None) -> tuple[str, list[str]]:
    """Commit and files of a dataset on the Hub, now; asked for once."""
    from huggingface_hub import HfApi

    found = HfApi().dataset_info(name, revision=revision, timeout=30.0)
    if not found.sha:
        raise ValueError("its answer names no commit")
    return found.sha, [file.rfilename for file in found.siblings or []]


@contextmanager
def hub_errors(source: "SourceConfig") -> Iterator[None]:
    """Says in one line what a dataset's library raises: no network, no such dataset, split or subset, a script,
    a damaged file.

    Raises:
        UserError: instead of it.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        what = " ".join(str(error.__cause__ or error).split())[:400]
        raise UserError(
            f"dataset {source.name!r} (subset {source.subset}, split {source.split!r}) could not be read: "
            f"{type(error).__name__}: {what}; check the id, the network and access, or use local files (kind jsonl)"
        ) from error
