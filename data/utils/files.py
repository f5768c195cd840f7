"""Files that are whole or absent, manifests that say what made a folder, and locks. Imports nothing heavy."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.renamed import update_names


def make_folder(path: Path, setting: str) -> None:
    """Make a folder, if need be, and check that it can be written; ``setting`` is what the user sets it by."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise UserError(f"{path} cannot be written ({why}); choose another folder ({setting})") from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file, fsync and rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tmp_path.write_bytes(content.encode() if isinstance(content, str) else content)
        atomic_rename(tmp_path, path)
    finally:
        tmp_path.unlink(missing_ok=True)


def atomic_rename(tmp_path: Path, path: Path) -> None:
    """Rename a complete file into place: on disk before anyone can see it, and its name on disk when this returns."""
    fsync(tmp_path)
    tmp_path.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Around the writing of ``what`` into ``folder``: a full disk, a limit or a read-only file system in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise UserError(
            f"{what} could not be written to {folder} ({reason}); what was there before is kept. Free some space or "
            "restore access, and the same command resumes there"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN is refused: JSON has none."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, 10,000 brackets
        raise UserError(f"{path} is not valid JSON ({one_line(error)}); restore or remove it") from None


def write_checksummed_json(path: Path, content: Any) -> None:
    """Write ``content`` with its checksum, atomically: for files that nobody edits and that must not be misread."""
    write_json(path, {"content": content, "sha256": _digest(content)})


def read_checksummed_json(path: Path) -> Any:
    """The content that ``write_checksummed_json`` wrote."""
    found = read_json(path)
    intact = isinstance(found, dict) and set(found) == {"content", "sha256"}
    if not intact or found["sha256"] != _digest(found["content"]):
        raise UserError(f"{path} is damaged: it does not have the checksum that it states; restore or remove it")
    return found["content"]


def _digest(content: Any) -> str:
    read_back = json.loads(json.dumps(content))  # whose keys are all texts, and sort as such
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_join(folder: Path, name: str) -> Path:
    """The path of ``name`` in ``folder``: no absolute path, no ``..``, no link that leads out of the folder.

    A folder of a snapshot in the Hub's cache may link to the blobs of its repository and to those that the repositories
    of the cache share. The file need not exist.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise UserError(f"{folder} names the file {name!r}, which does not lie in it; do not use what it comes from")
    path, allowed = folder / name, [folder.resolve()]
    for snapshot in (folder, folder.parent):  # or a folder in one, such as that of an adapter
        if snapshot.parent.name == "snapshots":
            repository = snapshot.parent.parent.resolve()
            allowed += [repository / "blobs", repository.parent / "blobs"]
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UserError(f"{path} cannot be followed ({error}); copy {folder} again") from None
    if not any(real.is_relative_to(place) for place in allowed):
        raise UserError(f"{path} is a link to {real}, outside its folder; put the file itself there if you trust it")
    if real.exists() and not (real.is_file() or real.is_dir()):
        raise UserError(f"{path} is a pipe or a device, expected a file; copy {folder} again")
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines log; empty when there is none. A last line torn by a kill is left out."""
    try:
        lines = path.read_text(errors="replace").rstrip("\n").split("\n") if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"it is a {type(row).__name__}")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not a JSON object ({error}); remove that line") from None
    return rows


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Refuse to start where less than ``needed`` bytes are free."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        want, have = (f"{n / 1e9:,.2f} GB" if n >= 10**9 else f"{n / 1e6:,.1f} MB" for n in (needed, free))
        raise UserError(
            f"{purpose} needs about {want} in {path}, but {have} are free; free some space or choose another folder"
        )


MANIFEST_NAME = "manifest.json"


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write ``entries`` (JSON values) as ``folder/manifest.json``, atomically."""
    write_json(folder / MANIFEST_NAME, entries)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, with today's names."""
    entries = read_json(safe_join(folder, MANIFEST_NAME))
    if not isinstance(entries, dict):
        raise UserError(
            f"{folder / MANIFEST_NAME} holds a {type(entries).__name__}, expected an object; remove the folder"
        )
    return cast(dict[str, Any], update_names(entries))


def folder_of_manifest(parent: Path, manifest: dict[str, Any], prefix: str = "") -> Path:
    """Return the folder in ``parent`` that has ``manifest``, or else the one to create, named ``prefix`` and a digest.

    Folders are found by content, because earlier versions named them by other digests. An entry ``cache`` is ignored.
    """
    wanted = json.loads(json.dumps(manifest))
    named = parent / f"{prefix}{_digest(wanted)[:8]}"
    others = (path.parent for path in sorted(parent.glob(f"{prefix}*/{MANIFEST_NAME}")))
    for folder in [named] if named.exists() else others:
        try:
            entries = read_manifest(folder)
        except UserError:  # a damaged manifest in another folder is no obstacle here
            continue
        if {key: value for key, value in entries.items() if key != "cache"} == wanted:
            return folder
    return named


def check_manifest(folder: Path, expected: dict[str, Any], remedy: str) -> bool:
    """Whether ``folder`` has a manifest; it must be equal to ``expected`` (JSON values; tuples count as lists).

    The message names the first key that differs, and ``remedy``: what the user can do, a clause.
    """
    if not (folder / MANIFEST_NAME).exists():
        return False
    found = read_manifest(folder)
    different = difference(found, json.loads(json.dumps(expected)))
    if different:
        key, was, want = different
        raise UserError(f"{folder} was made with {key} = {was}, expected {want}; {remedy}")
    return True


def difference(found: Any, expected: Any, key: str = "") -> tuple[str, str, str] | None:
    """First difference as (key, found, expected), in the order of the expected keys; None when equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in [*expected, *(n for n in found if n not in expected)]:
            path = f"{key}.{name}" if key else name
            if name not in found:
                return path, "(absent)", json.dumps(expected[name])
            if name not in expected:
                return path, json.dumps(found[name]), "(absent)"
            if inner := difference(found[name], expected[name], path):
                return inner
        return None
    # `1 == True` in Python, but not in a recipe.
    if type(found) is not type(expected) or found != expected:
        return key, json.dumps(found), json.dumps(expected)
    return None


@contextmanager
def exclusive(folder: Path, progress: Callable[[str, int, int], None] = lambda *_: None) -> Iterator[None]:
    """Lock ``folder``, made if need be, against other takers of this lock; it is released when the process dies.

    ``progress`` hears of it if another process holds it. Readers are not kept out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that writes this corpus", 0, 1)
        held = lock.acquire()
    with held:
        yield
