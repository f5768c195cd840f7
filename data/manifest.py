"""What made a folder: written beside the data, compared before the data is reused."""

import json
from pathlib import Path
from typing import Any

from drafthead.data.errors import UserError
from drafthead.data.files import inside, read_json, write_json

NAME = "manifest.json"


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write ``entries`` (JSON values) as ``folder/manifest.json``, atomically."""
    write_json(folder / NAME, entries)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    entries = read_json(inside(folder, NAME))
    if not isinstance(entries, dict):
        raise UserError(f"{folder / NAME} holds a {type(entries).__name__}, expected an object; remove the folder")
    return entries


def check_manifest(folder: Path, expected: dict[str, Any], remedy: str) -> bool:
    """Whether ``folder`` holds data made by ``expected``.

    Args:
        folder: may be missing.
        expected: JSON values; tuples count as lists.
        remedy: what the user can do about a mismatch, a clause.

    Returns:
        False when the folder has no manifest, True when it is equal to ``expected``.

    Raises:
        UserError: the manifest differs; the message names the first differing key, dotted where nested.
    """
    if not (folder / NAME).exists():
        return False
    found = read_manifest(folder)
    different = difference(found, json.loads(json.dumps(expected)))
    if different is not None:
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
            inner = difference(found[name], expected[name], path)
            if inner is not None:
                return inner
        return None
    # `1 == True` in Python, but not in a recipe.
    if type(found) is not type(expected) or found != expected:
        return key, json.dumps(found), json.dumps(expected)
    return None
