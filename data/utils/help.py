"""Help texts and the reference page, made from settings classes: keys, defaults, limits and docstrings of fields."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields
from enum import Enum
from functools import cache
from itertools import groupby
from typing import Any, cast, get_args, get_origin

from drafthead.data.utils.settings import is_settings, limit_of, types_of, without_none

COLUMN = 40
"""Column of a help text at which explanations start."""


@dataclass(frozen=True)
class Setting:
    """A key of a settings class, described for ``--help`` and the reference page."""

    key: str
    kind: Any
    default: Any
    help: str
    """The docstring below the field, in one line."""

    @property
    def section(self) -> str:
        """The key of the settings class that holds it; "" for the command's own settings."""
        return self.key.rpartition(".")[0]

    @property
    def required(self) -> bool:
        """True if the setting has no default."""
        return self.default is NO_DEFAULT

    @property
    def limit(self) -> str:
        """The choices or the interval; "" if there is neither."""
        return limit_of(self.kind)

    @property
    def default_text(self) -> str:
        """The default as it would be typed; "" for a required setting."""
        return "" if self.default is NO_DEFAULT else _typed(self.default)


def describe(cls: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of ``cls`` and of the classes below it, in the order of their definition."""
    for f in fields(cls):
        kind, key = types_of(cls)[f.name], f"{prefix}{f.name}"
        inner = without_none(kind)
        if get_origin(inner) is dict and is_settings(get_args(inner)[1]):
            inner, key = get_args(inner)[1], f"{key}.NAME"
        if is_settings(inner):
            yield from describe(inner, f"{key}.")
        else:
            yield Setting(key, kind, _default(f), docstrings(cls).get(f.name, ""))


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is NO_DEFAULT else f.default_factory()


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_typed, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)


@cache
def docstrings(cls: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, each in one line."""
    inherited: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        if is_settings(base):
            inherited |= docstrings(base)
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                inherited[statement.target.id] = " ".join(text.value.split())
    return inherited


def help_text(usage: str, cls: Any, spelled: Mapping[str, str] | None = None) -> str:
    """Return a command's help: ``usage``, then one line for every setting, grouped by the class that holds it.

    ``spelled`` maps the name of a field to the key that users type, where the two differ.
    """
    lines = [usage.rstrip("\n"), "", "settings (key=default):"]
    settings = sorted(describe(cls), key=lambda setting: setting.section != "")  # stable: the command's own come first
    for section, group in groupby(settings, key=lambda setting: setting.section):
        lines += ["", f"{section}:"] if section else []
        for setting in group:
            key = (spelled or {}).get(setting.key, setting.key)
            typed = f"  {key}={setting.default_text or ('...' if setting.required else '')}"
            text = first_sentence(setting.help) + (f" ({setting.limit})" if setting.limit else "")
            lines.append(f"{typed:<{COLUMN - 1}} {text}".rstrip())
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring without its markup."""
    return re.split(r"(?<=\.)\s(?=[A-Z`])", text.replace("``", ""))[0].rstrip(".")


def settings_table(cls: Any, prefix: str = "") -> str:
    """Return the settings of a class as Markdown tables, one per section, with their whole docstrings."""
    lines: list[str] = []
    settings = sorted(describe(cls, prefix), key=lambda setting: setting.section != "")
    for section, group in groupby(settings, key=lambda setting: setting.section):
        lines += [f"\n**{section}**\n"] if section else [""]
        lines += ["| setting | default | limit | meaning |", "|---|---|---|---|"]
        for setting in group:
            default = "required" if setting.required else f"`{setting.default_text}`" if setting.default_text else ""
            cells = (f"`{setting.key}`", default, setting.limit, setting.help.replace("``", "`"))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
