"""Published formats of draft heads, by the name that ``drafthead export to=NAME`` takes. Every class in a module of
this package that derives from ``Format`` and sets ``name`` is one."""

import pkgutil
import re
from functools import cache
from importlib import import_module
from typing import Any

from drafthead.errors import UserError
from drafthead.models.formats.format import Format, unsupported_values
from drafthead.models.heads.parts.draft_head import DraftHeadConfig

OTHER_KINDS = {
    "p-?eagle": "a P-EAGLE head",
    "domino": "a Domino head",
    "dspark": "a DSpark head in another layout than DeepSpec's",
    "dflash": "a DFlash head in another layout than z-lab's",
    "mtp|nextn": "a head for multi-token prediction (MTP)",
    "eagle-?3": "an EAGLE-3 head with other layers than Llama's",
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "llama.* of one layer": "an EAGLE-1 or EAGLE-2 head (or a Kangaroo adapter, which needs config.exit_layer=N)",
}
"""Names in the ``config.json`` of heads that no format holds -> the kind, for messages."""


@cache
def all_formats() -> dict[str, Format]:
    """Return all formats by name; the first call imports their modules."""
    modules = [import_module(module.name) for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    return {
        entry.name: entry()
        for module in modules
        for entry in vars(module).values()
        # Formats that a module imports from another one belong to the other one.
        if isinstance(entry, type) and issubclass(entry, Format) and entry.__module__ == module.__name__
        if "name" in vars(entry)
    }


def format_named(name: str) -> Format:
    if name not in all_formats():
        raise UserError(f"unknown format {name!r}; choose one of {', '.join(all_formats())}")
    return all_formats()[name]


def format_for(name: str, head_config: type[DraftHeadConfig]) -> Format:
    """Return the format called ``name``; reject it if it cannot hold heads of this type."""
    chosen = format_named(name)
    if not issubclass(head_config, chosen.head_config):
        fitting = " or ".join(f"to={f.name}" for f in all_formats().values() if issubclass(head_config, f.head_config))
        advice = f"export it {fitting}" if fitting else "no published format holds it; use the head folder itself"
        raise UserError(f"{chosen.wrong_type(head_config)}: {advice}")
    return chosen


def recognise(config: dict[str, Any], source: str) -> Format:
    with unsupported_values(source):
        for candidate in all_formats().values():
            if candidate.matches(config):
                return candidate
        names = [*(config.get("architectures") or []), config.get("model_type"), config.get("speculators_model_type")]
        said = " ".join(name for name in names if isinstance(name, str))
        if config.get("num_hidden_layers") == 1:
            said += " of one layer"
    for pattern, kind in OTHER_KINDS.items():
        if re.search(pattern, said, re.IGNORECASE):
            what = f"{source}/config.json ({said}) is {kind}"
            raise UserError(f"{what}, which drafthead cannot import; choose another head")
    given = f"model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r}"
    what = f"{source}/config.json ({given}) matches none of {', '.join(all_formats())}"
    raise UserError(f"{what}; name one with format=NAME")
