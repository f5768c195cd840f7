"""Help texts, generated from settings classes: keys, defaults, limits, field docstrings."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin

from drafthead.settings.schema import default_of, is_settings, limit_of, types_of, without_none

COLUMN = 40  # at which explanations start
WIDTH = 120  # in columns


@dataclass(frozen=True)
class Setting:
    """A key of a settings class, described for ``--help`` and the reference pages."""

    key: str
    default: str | None  # as users would type it; None for a required setting
    limit: str  # choices or interval; "" if there is neither
    help: str  # the docstring below the field, in one line


def describe(cls: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of ``cls`` and of nested settings classes, in order of definition."""
    for f in fields(cls):
        kind, key = types_of(cls)[f.name], f"{prefix}{f.name.rstrip('_')}"  # the field `from_` is the key `from`
        inner = without_none(kind)
        if get_origin(inner) is dict and is_settings(get_args(inner)[1]):
            inner, key = get_args(inner)[1], f"{key}.NAME"
        if is_settings(inner):
            yield from describe(inner, f"{key}.")
        else:
            default = default_of(f)
            typed = None if default is NO_DEFAULT else _typed(default)
            yield Setting(key, typed, limit_of(kind), docstrings(cls).get(f.name, ""))


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)


@cache
def docstrings(cls: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, each in one line."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        known = vars(base).get("__pydantic_fields__", {})
        described |= {name: " ".join(f.description.split()) for name, f in known.items() if f.description}
    return described


def help_text(usage: str, cls: Any) -> str:
    """Return a command's help: ``usage``, then all settings of ``cls`` with explanations, grouped by settings class."""
    lines = [usage.rstrip("\n"), "", "settings (key=default):"]
    for section, group in sections(describe(cls)).items():
        lines += ["", f"{section}:"] if section else []
        for setting in group:
            typed = f"  {setting.key}={'...' if setting.default is None else setting.default}"
            text = first_sentence(setting.help) + (f" ({setting.limit})" if setting.limit else "")
            indent = " " * COLUMN
            explanation = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
            if explanation and len(typed) < COLUMN:
                explanation[0] = typed + explanation[0][len(typed) :]
            else:
                lines.append(typed)
            lines += explanation
    return "\n".join(lines) + "\n"


def sections(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Group settings by the key of their class; top-level settings come first, the required ones before the others."""
    sections: dict[str, list[Setting]] = {"": []}
    for setting in sorted(settings, key=lambda setting: "." in setting.key or setting.default is not None):
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return sections


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, without its full stop and double backquotes."""
    return re.split(r"(?<=\.)\s(?=[A-Z`\d])", text)[0].replace("``", "").rstrip(".")
