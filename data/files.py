"""Files that are either whole or absent, and space checked before it is needed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from drafthead.data.errors import UserError


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
