"""Renamed keys and values in files that earlier versions wrote. Imports only the standard library."""

import re
from fnmatch import fnmatchcase
from typing import Any

RENAMED_KEYS: dict[str, str | None] = {
    # Old key: new key, or None for a setting that was removed. Parents, by their new names, make a key unambiguous.
    "data.generations": "answers",
    "keep_hidden_states": None,  # since 0.3.0: `phases.*.store_hidden_states`
    "phases.*.hidden_states": "store_hidden_states",
}
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    # New key: old value -> new value.
    "phases.*.corpus": {"generations": "answers"},
    "phases.*.store_hidden_states": {"cached": True, "computed": False},
}


def update_names(saved: Any, path: str = "") -> Any:
    """Return the content of a saved file with today's keys and values, without settings that were removed.

    Keys may be nested or joined by dots. ``path`` is the dotted key of ``saved`` in a run's settings, such as ``head``.
    """
    if isinstance(saved, list):
        return [update_names(item, path) for item in saved]
    if not isinstance(saved, dict):
        renamed = next((values for key, values in RENAMED_VALUES.items() if fnmatchcase(f".{path}", f"*.{key}")), {})
        if not isinstance(saved, str):
            return saved
        interpolated = re.sub(r"(?<=\$\{)[\w.]+(?=\})", lambda key: _update_key(key[0]) or key[0], saved)
        return renamed.get(saved, interpolated)
    updated = {}
    for key, value in saved.items():
        full_key = f"{path}.{key}" if path else str(key)
        new_key = _update_key(full_key)
        if new_key is not None:
            updated[new_key.removeprefix(f"{path}." if path else "")] = update_names(value, new_key)
    return updated


def _update_key(key: str) -> str | None:
    """Return today's name of the dotted ``key``, or None if the setting was removed."""
    names: list[str] = []
    for name in key.split("."):
        path = ".".join([*names, name])
        new_name = next((new for old, new in RENAMED_KEYS.items() if fnmatchcase(f".{path}", f"*.{old}")), name)
        if new_name is None:
            return None
        names.append(new_name)
    return ".".join(names)
