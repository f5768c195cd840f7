"""Published formats of draft heads, by the name that ``drafthead export to=NAME`` takes.

Formats are discovered: every class in a module of this package that derives from ``Format`` and sets ``name`` is one.
The modules are imported at the first look-up, so that importing the package stays cheap.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.format import Format
from drafthead.models.heads.parts.draft_head import DraftHeadConfig


class _Formats(Mapping[str, Format]):
    """All formats by name, read-only and imported at the first look-up."""

    @cached_property
    def _by_name(self) -> dict[str, Format]:
        modules = [import_module(module.name) for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
        return {
            entry.name: entry()
            for module in modules
            for entry in vars(module).values()
            # Formats that a module imports from another one belong to the other one.
            if isinstance(entry, type) and issubclass(entry, Format) and entry.__module__ == module.__name__
            if "name" in vars(entry)
        }

    def __getitem__(self, name: str) -> Format:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


FORMATS = _Formats()


def format_named(name: str) -> Format:
    """Return the format called ``name``."""
    if name not in FORMATS:
        raise UserError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_for(name: str, head_config: type[DraftHeadConfig]) -> Format:
    """Return the format called ``name`` if it holds heads of this type; the error names the formats that do."""
    chosen = format_named(name)
    if not issubclass(head_config, chosen.head_config):
        fitting = " or ".join(f"to={f.name}" for f in FORMATS.values() if issubclass(head_config, f.head_config))
        advice = f"export it {fitting}" if fitting else "no published format holds it; use the head folder itself"
        raise UserError(f"{chosen.wrong_type(head_config)}: {advice}")
    return chosen


def recognise(config: dict[str, Any], source: str) -> Format:
    """Return the format whose ``config.json`` this is; ``source`` names the folder in errors."""
    for candidate in FORMATS.values():
        if candidate.matches(config):
            return candidate
    raise UserError(
        f"{source}/config.json matches none of the formats {', '.join(FORMATS)} (model_type "
        f"{config.get('model_type')!r}, architectures {config.get('architectures')!r}); name one with format=NAME"
    )
