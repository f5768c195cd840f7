"""Settings: dataclasses whose fields hold default, limit and help text, checked by pydantic.

    @settings(kw_only=True)
    class OptimConfig:
        lr: Annotated[float, Field(gt=0, lt=1)] = 1e-3
        '''Peak learning rate.'''

``--help`` and ``docs/reference/settings.md`` are made from the same fields (``drafthead/settings/help.py``).
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from drafthead.errors import UserError

T = TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def settings(**options: Any) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a ``dataclass(**options)`` that raises ``UserError`` for bad values."""

    def decorate(cls: type[T]) -> type[T]:
        checked: Any = pydantic.dataclasses.dataclass(config=_CONFIG, **options)(cls)
        init = checked.__init__

        @wraps(init)
        def raising_user_errors(self: T, *args: Any, **values: Any) -> None:
            try:
                init(self, *args, **values)
            except ValidationError as error:
                raise UserError(message(error, type(self))) from None

        checked.__init__ = raising_user_errors
        return cast(type[T], checked)

    return decorate


_CONFIG = ConfigDict(
    use_attribute_docstrings=True,
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    arbitrary_types_allowed=True,
)

MIN_TEMPERATURE = 1e-5  # other than 0; logits divided by a much smaller one are infinite in float32


def check_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise UserError(f"a temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {value:g}; use 0")
    return value


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]  # NumPy takes seeds below 2 ** 32, and some seeds are sums
Temperature = Annotated[float, Field(ge=0), AfterValidator(check_temperature)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class SettingError(UserError):
    """Error for a value that the field's type allows, but that is wrong, for example because of another field. Its text
    is "``key`` must be ``limit``, got ``value``", where ``key`` is the field's name. When a settings class raises it,
    the user sees the dotted key of the class before the field's name."""

    def __init__(self, key: str, limit: str, value: Any) -> None:
        super().__init__(f"{key} must be {limit}, got {value!r}")


def require(holds: bool, key: str, limit: str, value: Any) -> None:
    """Raise a ``SettingError`` "``key`` must be ``limit``, got ``value``" unless ``holds``; for ``__post_init__``."""
    if not holds:
        raise SettingError(key, limit, value)


def check(values: Mapping[str, Any], cls: type[T], prefix: str = "") -> T:
    """Convert ``values`` from YAML or JSON to an instance of the settings class ``cls``. A wrong value is a
    ``UserError`` like "phases.distill.optim.lr must be above 0 and below 1, got 7"; ``prefix`` precedes the key."""
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        raise UserError(message(error, cls, prefix)) from None


def message(error: ValidationError, cls: type[Any], prefix: str = "") -> str:
    """Return one line about an unknown key, if there is one, else about pydantic's first error."""
    faults = error.errors()
    # A misspelt key is the cause when the key that it should be is missing too.
    fault = next((item for item in faults if item["type"] == "unexpected_keyword_argument"), faults[0])
    location, kind = locate(cls, fault["loc"])
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in [*filter(None, [prefix]), *location]]
    key = "".join(steps).removeprefix(".")
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):
        return f"{key}.{cause}" if key else str(cause)
    if cause is not None:
        return str(cause)
    if fault["type"] == "unexpected_keyword_argument":
        return unknown_key(key, location, cls)
    if fault["type"].startswith("missing") and get_origin(kind) is not tuple:
        return f"{key} is missing; set it ({key}=...)"
    limit = fault["msg"].removeprefix("Input should be ")
    if get_origin(kind) is tuple:
        limit = f"a list of {len(get_args(kind))} values"
    elif fault["type"] != "finite_number":
        limit = limit_of(kind) or limit
    return f"{key} must be {limit}{' or null' if is_optional(kind) else ''}, got {fault['input']!r}"


def unknown_key(key: str, location: Sequence[int | str], cls: Any, siblings: Sequence[str] = ()) -> str:
    """Return the message for an unknown dotted ``key``, with settings of similar names. ``location`` lists the keys
    that lead from ``cls`` to it, its own name last. ``siblings`` are the valid keys in its place if its parent is not a
    settings class: names of phases."""
    name, parent = str(location[-1]), without_none(locate(cls, location[:-1])[1])
    near = get_close_matches(name, [f.name for f in fields(parent)] if is_settings(parent) else siblings)
    near = [key.removesuffix(name) + other for other in near] or get_close_matches(name, sorted(_names(cls)))
    advice = "see --help"
    if near:
        advice = f"did you mean {' or '.join(near)}?"
    elif key.startswith("head."):
        advice = "a field of the head's class must also be in its recipes/head/*.yaml"
    return f"{key} is not a setting; {advice}"


def limit_of(kind: Any) -> str:
    """Return the limit of a field's type ``kind`` in words: its choices or its interval; "" if it has none."""
    kind = without_none(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(item.value) for item in kind)}"
    if get_origin(kind) in (list, tuple):
        inner = limit_of(get_args(kind)[0])
        return inner and f"a list, each {inner}"
    if get_origin(kind) is not Annotated:
        return ""
    metadata = [item for extra in get_args(kind)[1:] if isinstance(extra, FieldInfo) for item in extra.metadata]
    limits = [(words, getattr(item, name, None)) for item in metadata for name, words in _LIMITS.items()]
    shown = [(words, f"{limit:g}" if isinstance(limit, float) else limit) for words, limit in limits]
    bounds = " and ".join(f"{words} {limit}" for words, limit in shown if limit is not None)
    return ", ".join(filter(None, [limit_of(get_args(kind)[0]), bounds]))


_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "min_length": "of length at least"}


def is_settings(kind: Any) -> bool:
    return is_dataclass(kind)


def is_optional(kind: Any) -> bool:
    return get_origin(kind) in (typing.Union, UnionType) and type(None) in get_args(kind)


def without_none(kind: Any) -> Any:
    """Return ``X`` for a type ``X | None``; return other types unchanged."""
    members = [member for member in get_args(kind) if member is not type(None)]
    return members[0] if is_optional(kind) and len(members) == 1 else kind


def _container(kind: Any) -> Any:
    """Return a type without ``| None`` and without its limits."""
    kind = without_none(kind)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@cache
def types_of(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def default_of(f: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or ``dataclasses.MISSING`` if the setting is required."""
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def locate(cls: Any, location: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """Return the keys in ``location`` that users can type, and the type of the value to which they lead in ``cls``. The
    ``loc`` of a pydantic error also contains members of unions and tuples."""
    typed: list[int | str] = []
    kind = cls
    for step in location:
        container = _container(kind)
        if is_settings(container):
            kind = types_of(container).get(str(step), Any)
        elif get_origin(container) in (list, dict):
            kind = get_args(container)[-1]
        else:
            continue
        typed.append(step)
    return typed, kind


def takes_text(cls: Any, key: str, value: str) -> bool:
    """Return True if ``value`` is the text of the setting ``key`` as it is; False if it has the syntax of YAML. A path
    may hold any character. Where a list is expected, a text is its only item."""
    kind, ends = _container(locate(cls, key.split("."))[1]), value[:1] + value[-1:]
    if value in ("", "null") or ends in ("''", '""'):
        return False
    return kind in (str, Path) or (get_origin(kind) is list and ends not in ("[]", "{}", "$}"))


def _names(kind: Any) -> set[str]:
    """Return the names of all fields of a settings class and of the classes nested in it."""
    kind = _container(kind)
    if not is_settings(kind):
        return set().union(*map(_names, get_args(kind)))
    return {f.name for f in fields(kind)}.union(*map(_names, types_of(kind).values()))


def flatten(nested: Mapping[Any, Any], separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings to one mapping whose keys are joined by ``separator``; empty mappings stay values."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{inner}": v for inner, v in flatten(value, separator).items()}
        else:
            flat[str(key)] = value
    return flat
