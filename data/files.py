"""Files that are either whole or absent, and space checked before it is needed."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from drafthead.data.errors import UserError


def make_folder(path: Path, setting: str) -> None:
    """Make a folder to write into, and try it.

    Args:
        path: may exist.
        setting: what the user sets it by, for the message: ``out=...``.

    Raises:
        UserError: it cannot be made, or nothing can be written there.
    """
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
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN is refused: JSON has none."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore or remove it") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines log; empty when there is none. A last line torn by a kill is left out.

    Raises:
        UserError: another line is not JSON.
    """
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not JSON ({error}); remove that line") from None
    return rows


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Refuse to start what cannot end.

    Raises:
        UserError: the disk of ``path`` has less than ``needed`` bytes free.
    """
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{purpose} needs about {needed / 1e9:.2f} GB in {path}, but {free / 1e9:.2f} GB are free; "
            "free some space or choose another folder"
        )
