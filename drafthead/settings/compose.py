"""Checked settings of commands and recipes (the hydra library composes recipes); errors in one line."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field, fields, make_dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafthead.errors import UserError, visible
from drafthead.settings.help import help_text
from drafthead.settings.schema import check, default_of, is_settings, takes_text, types_of, unknown_key, without_none

T = TypeVar("T")
INTERRUPTED = 130  # exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT


def parse(cfg: DictConfig, cls: type[T]) -> T:
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"a ${{...}} in the settings cannot be resolved: {_one_line(error)}; correct it") from None
    assert isinstance(values, dict)
    return check(_without_missing(values), cls)


def _without_missing(value: Any) -> Any:
    """Return nested settings without required settings that are not set ("???")."""
    if isinstance(value, dict):
        return {key: _without_missing(inner) for key, inner in value.items() if inner != MISSING}
    return value


@cache
def schema(cls: Any) -> type[Any]:
    """Return a plain dataclass with the keys and defaults of a settings class, so that Hydra knows every key. All
    values have type ``Any``, because the settings class checks them with better messages."""
    plain: list[tuple[str, Any, Any]] = []
    for f in fields(cls):
        kind = without_none(types_of(cls)[f.name])
        inner = get_args(kind)[-1] if get_origin(kind) is dict else None
        if is_settings(kind):
            kind = schema(kind)
        elif inner is not None:
            kind = dict.__class_getitem__((str, schema(inner) if is_settings(inner) else Any))
        else:
            kind = Any
        plain.append((f.name, kind, field(default_factory=partial(_plain, default_of(f)))))
    return make_dataclass(cls.__name__, plain)


def _plain(value: Any) -> Any:
    """Convert a default for OmegaConf: settings to their schema, tuples to lists, a required setting to "???"."""
    if value is NO_DEFAULT:
        return MISSING
    if is_settings(value):
        cls: Any = type(value)
        return schema(cls)(**{f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init})
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def say(line: str) -> None:
    """Write a line for the user to standard error, on the first process only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")


@contextmanager
def one_line_errors(cls: type[Any] | None = None) -> Iterator[None]:
    """End the process with one line if the block raises an expected error: code 1, or 130 for Ctrl-C."""
    try:
        yield
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    except (HydraException, OmegaConfBaseException) as error:
        text = f"{error} {error.__cause__ or ''}"
        unknown = re.search(r"Key '([^']+)' (?:is )?not in", text)
        path = re.search(r"full_key: (\S+)", text)
        reason = _one_line(error)
        if unknown and path and cls is not None:
            siblings = list(getattr(error.__cause__, "parent_node", None) or ())  # also the names of the phases
            reason = unknown_key(path[1], [*path[1].split(".")[:-1], unknown[1]], cls, siblings)
        elif isinstance(error, MissingConfigException) and error.options:
            group, _, name = str(error.missing_cfg_file).partition("/")
            reason = _unknown_choice(group, name, error.options)
        raise SystemExit(f"error: {visible(reason)}") from None
    except OSError as error:  # a folder that cannot be made, a full disk: the message names the path
        raise SystemExit(f"error: {visible(str(error))}; choose another folder (out=..., data.folder=...)") from None
    except KeyboardInterrupt:
        say("interrupted; finished work is kept, and runs resume if you give the same command again")
        raise SystemExit(INTERRUPTED) from None


def _unknown_choice(group: str, name: str, choices: Sequence[str]) -> str:
    near = get_close_matches(name, choices)
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(choices)}"
    if group == "base" and not near:
        advice = f"for a model of your own: base=custom base.name={name}"
    return f"{group}={name} is not a file of the group {group}; {advice}"


def take_device() -> None:
    """Remove ``device=NAME``, which every command accepts, from the arguments, and choose that device."""
    for argument in [argument for argument in sys.argv[1:] if argument.startswith("device=")]:
        from drafthead.system.devices import choose_device  # imports torch, which --help does not need

        sys.argv.remove(argument)
        with one_line_errors():
            choose_device(argument.removeprefix("device="))


def override(argument: str, cls: type[Any], sweeps: bool = False) -> str:
    """Return ``key=value`` in Hydra's syntax, in which many characters of a path have a meaning. If it ``sweeps``
    (``-m``), a text is left as it is, because ``a,b`` are two values."""
    key, _, value = argument.partition("=")
    if takes_text(cls, key.lstrip("+"), value) and not sweeps:
        doubled = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), value)
        return f"{key}='{doubled}'"
    # Free keys, which Hydra takes only as additions: base.chat_template_kwargs={enable_thinking: true}
    return f"++{argument}" if re.match(r"[\w.]+=\{", argument) else argument


def run_recipe(task: Callable[[DictConfig], None], cls: type[Any], usage: str) -> None:
    """Run ``task`` on the recipe that Hydra composes; ``--help`` prints ``usage`` and the settings of ``cls``."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        sys.stdout.write(help_text(usage, cls))
        raise SystemExit(0)
    for argument in sys.argv[1:]:
        if argument.startswith("="):
            raise SystemExit(f"error: {argument!r} names no setting; settings are key=value, see --help")
    sweeps = bool({"-m", "--multirun"} & {*sys.argv[1:]})
    sys.argv[1:] = [override(argument, cls, sweeps) for argument in sys.argv[1:]]
    take_device()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra ends the process itself, with its own traceback

    def guarded(cfg: DictConfig) -> None:
        """Run the task. Its errors are handled here, because Hydra reports every exception that leaves a task."""
        for name in ("httpx2", "openai"):  # at INFO, which Hydra sets, they log a line for every request
            logging.getLogger(name).setLevel(logging.WARNING)
        with one_line_errors():
            task(cfg)

    guarded.__module__ = task.__module__
    with one_line_errors(cls):
        hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes", config_name="train")(guarded)()


_NOISE = ("reference_type", "object_type", "full_key", "See https", "To append to your", "Config search", "provider=")


def _one_line(error: BaseException) -> str:
    """Return message and cause of an error of Hydra or OmegaConf in one line, without lines that do not help users."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read ({message}); quote the value"
    if isinstance(error, OmegaConfBaseException) or not isinstance(error.__cause__, OmegaConfBaseException):
        return message  # under a debugger, an error of OmegaConf is its own cause
    return f"{message}: {_one_line(error.__cause__)}"
