"""Published formats of draft heads, by the name that ``drafthead export to=NAME`` takes."""

from textwrap import wrap
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.dspark import DFlashFormat, DSparkFormat
from drafthead.models.formats.eagle3 import Eagle3Format
from drafthead.models.formats.format import Format
from drafthead.models.formats.gguf.dspark_gguf import DSparkGgufFormat
from drafthead.models.formats.gguf.eagle3_gguf import GgufFormat
from drafthead.models.formats.hydra import HydraFormat
from drafthead.models.formats.kangaroo import KangarooFormat
from drafthead.models.formats.medusa import MedusaFormat, TgiMedusaFormat, VllmMedusaFormat
from drafthead.models.formats.mlp_speculator import MLPSpeculatorFormat
from drafthead.models.formats.speculators import SpeculatorsFormat

_ALL = (
    *(MedusaFormat, TgiMedusaFormat, VllmMedusaFormat, HydraFormat, MLPSpeculatorFormat, KangarooFormat),
    *(Eagle3Format, GgufFormat, SpeculatorsFormat),
    *(DSparkFormat, DFlashFormat, DSparkGgufFormat),
)
FORMATS: dict[str, Format] = {found.name: found() for found in _ALL}


def listed(indent: int) -> str:
    """All names, wrapped for a usage text whose further lines are indented."""
    return f"\n{' ' * indent}".join(wrap(", ".join(FORMATS), 100))


def format_named(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise UserError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def recognise(config: dict[str, Any], source: str) -> Format:
    """The format whose ``config.json`` this is."""
    for found in FORMATS.values():
        if found.matches(config):
            return found
    raise UserError(
        f"{source}/config.json looks like none of the formats {', '.join(FORMATS)} (model_type "
        f"{config.get('model_type')!r}, architectures {config.get('architectures')!r}); say which with format=NAME"
    )
