"""Atomic writing of files, manifests of folders, and locks. This module imports no heavy library."""

import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from drafthead.errors import UserError, one_line

MANIFEST_NAME = "manifest.json"
MAX_HEADER = 8 << 20  # bytes of a safetensors header that is parsed; about 50,000 tensors
UMASK = os.umask(0o077)
os.umask(UMASK)  # it can only be read by setting it


def cache_dir() -> Path:
    if folder := os.environ.get("DRAFTHEAD_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafthead"


def make_folder(path: Path, setting: str) -> None:
    """Create ``path`` unless it exists, and check that it is writable; errors tell users to change ``setting``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
        raise UserError(f"{path} cannot be written ({reason}); choose another folder ({setting})") from None


@contextmanager
def new_file(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield the name of a temporary file to write; after the block it is flushed to disk and renamed to ``path``.
    Readers therefore see the whole file or none. ``writer`` must differ between processes that write the same file at
    the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp_path = path.with_name(f".{path.name}{writer}.tmp")
    try:
        yield tmp_path
        make_readable(tmp_path)
        fsync(tmp_path)
        tmp_path.replace(path)
        fsync(path.parent)
    except Exception:
        tmp_path.unlink(missing_ok=True)
        raise


def make_readable(path: Path) -> None:
    """Give a file, or all files of a folder, the usual mode: safetensors' files are readable by their owner only."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            file.chmod(0o666 & ~UMASK)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` atomically; several processes may write the same file at the same time."""
    with new_file(path, f".{os.getpid()}") as tmp_path:
        tmp_path.write_bytes(content.encode() if isinstance(content, str) else content)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(content: str, folder: Path) -> Iterator[None]:
    """Turn disk errors in the block, which writes ``content``, into a ``UserError``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        what = f"{content} could not be written to {folder} ({reason}); earlier files are intact"
        raise UserError(f"{what}. Free some space, and the same command resumes there") from None


def finite(value: Any) -> Any:
    """Replace NaN and infinite floats by None, also inside dicts and lists, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN is a ``ValueError``."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _read_bytes(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def read_json(path: Path) -> Any:
    content = _read_bytes(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, 10,000 brackets
        raise UserError(f"{path} is not valid JSON ({one_line(error)}); restore or remove it") from None


def write_checksummed_json(path: Path, content: Any) -> None:
    """Write ``content`` with its checksum, atomically; for files that people do not edit."""
    write_json(path, {"content": content, "sha256": digest(content)})


def read_checksummed_json(path: Path) -> Any:
    saved = read_json(path)
    complete = isinstance(saved, dict) and set(saved) == {"content", "sha256"}
    if not complete or saved["sha256"] != digest(saved["content"]):
        raise UserError(f"{path} is damaged: its checksum does not match; restore or remove the file")
    return saved["content"]


def digest(content: Any) -> str:
    read_back = json.loads(json.dumps(content))  # turns all keys into strings, which can be sorted
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_join(folder: Path, name: str) -> Path:
    """Return the path of ``name`` in ``folder``; reject ``..`` and links out of it, except to the Hub cache's blobs."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise UserError(f"{folder} names the file {name!r}, which is outside of it; do not use this folder")
    path, allowed = folder / name, [folder.resolve()]
    for snapshot in (folder, folder.parent):  # the parent if `folder` is inside one, such as an adapter
        if snapshot.parent.name == "snapshots":
            repository = snapshot.parent.parent.resolve()
            allowed += [repository / "blobs", repository.parent / "blobs"]
    try:
        real = path.resolve()
        is_special = real.exists() and not (real.is_file() or real.is_dir())
    except (OSError, RuntimeError) as error:  # circular links, names that are too long
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder} names a file that cannot be found ({why}); copy {folder} again") from None
    if not any(real.is_relative_to(parent) for parent in allowed):
        raise UserError(f"{path} is a link to {real}, outside its folder; copy the file there if you trust it")
    if is_special:
        raise UserError(f"{path} is a pipe or a device, expected a file; copy {folder} again")
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines log, or [] if it does not exist; an incomplete last line is left out."""
    lines = _read_bytes(path).decode(errors="replace").rstrip("\n").split("\n") if path.exists() else []
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
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        required, available = (f"{n / 1e9:,.2f} GB" if n >= 10**9 else f"{n / 1e6:,.1f} MB" for n in (needed, free))
        raise UserError(f"{purpose} needs about {required} in {path}, but {available} are free; free some space")


def check_header(path: Path) -> None:
    """Reject a safetensors file with a header above ``MAX_HEADER``, which would take minutes and GB to parse."""
    size = int.from_bytes(_read_bytes(path, 8), "little")
    if MAX_HEADER < size < path.stat().st_size:  # a larger one is damage, which safetensors reports
        raise UserError(f"{path} has a header of {size >> 20} MiB, at most {MAX_HEADER >> 20} are read; copy it again")


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    write_json(folder / MANIFEST_NAME, entries)


def read_manifest(folder: Path) -> dict[str, Any]:
    entries = read_json(safe_join(folder, MANIFEST_NAME))
    if not isinstance(entries, dict):
        raise UserError(f"{folder / MANIFEST_NAME} holds a {type(entries).__name__}, not an object; remove the folder")
    return entries


def folder_of_manifest(parent: Path, manifest: dict[str, Any], prefix: str = "") -> Path:
    return parent / f"{prefix}{digest(manifest)[:8]}"


def check_manifest(folder: Path, expected: dict[str, Any], remedy: str) -> bool:
    """Return True if ``folder`` has a manifest; reject one that differs from ``expected`` (JSON values)."""
    if not (folder / MANIFEST_NAME).exists():
        return False
    different = difference(read_manifest(folder), json.loads(json.dumps(expected)))
    if different:
        key, saved, expected_value = different
        what = f"{key} = {saved}, expected {expected_value}"
        what = f"another base or adapter ({what})" if key == "base.fingerprint" else what
        raise UserError(f"{folder} was made with {what}; {remedy}")
    return True


def same_base(one: str, other: str) -> bool:
    """Return True if two fingerprints are those of one base. A quantised base's fingerprint has 16 digits, the first
    half of other bases'. A base with an adapter has two fingerprints, joined by "=": of the adapter's files, and of the
    merged weights."""
    short, long = sorted((one, other), key=len)
    alike = not {*one.split("=")}.isdisjoint(other.split("="))
    return alike or (len(short) == 16 and long.startswith(short))


def difference(actual: Any, expected: Any, key: str = "") -> tuple[str, str, str] | None:
    """Return the first difference between two JSON values as (dotted key, actual, expected), or None if equal."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for name in [*expected, *(n for n in actual if n not in expected)]:
            path = f"{key}.{name}" if key else name
            if name not in actual:
                return path, "(absent)", json.dumps(expected[name])
            if name not in expected:
                return path, json.dumps(actual[name]), "(absent)"
            if inner := difference(actual[name], expected[name], path):
                return inner
        return None
    if key.endswith("base.fingerprint") and isinstance(actual, str) and isinstance(expected, str):
        return None if same_base(actual, expected) else (key, json.dumps(actual), json.dumps(expected))
    # `1 == True` in Python, but not in a recipe.
    if type(actual) is not type(expected) or actual != expected:
        return key, json.dumps(actual), json.dumps(expected)
    return None


@contextmanager
def exclusive(folder: Path, log: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Create ``folder`` unless it exists, and hold its lock during the block. A killed process releases the lock.
    ``log`` gets a line before waiting for another process. Code that only reads the folder takes no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        log(f"   waiting for another process that writes {folder}")
        held = lock.acquire()
    with held:
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the lock of the results' ``folder`` during the block; reject a folder that another process holds."""
    note = folder / ".lock-holder"

    def refuse(*_: object) -> None:
        holder = note.read_text(errors="replace") if note.exists() else "another process"
        raise UserError(f"{folder} is in use by {holder}; wait until it ends, or choose another folder (out=...)")

    with exclusive(folder, refuse):
        write_atomic(note, f"process {os.getpid()} on {socket.gethostname()}")
        yield
