"""The base of all commands: one grammar (``key=value``, ``--help``, ``--cfg job``), and output folders."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from drafthead.data.utils.compose import hydra_task, one_line_errors, parse, run_main, schema, take_device
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import make_folder
from drafthead.data.utils.help import help_text
from drafthead.data.utils.settings import default_of, types_of

T = TypeVar("T")
Task = Callable[[T], None]

_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd")
"""Hydra's options that take the next argument."""


class Registered(NamedTuple):
    """Settings of a command, for the reference page."""

    cls: type[Any]
    spelled: dict[str, str]
    """Field -> the key that users type, where the two differ."""


REGISTERED: dict[str, Registered] = {}
"""Settings of the commands that were imported, by name."""


def command(
    name: str, cls: type[T], usage: str, *, spelled: dict[str, str] | None = None, words: str = ""
) -> Callable[[Task[T]], Callable[[], None]]:
    """Make a function of checked settings a command's entry point.

    Args:
        name: name of the command, as in ``drafthead NAME``.
        cls: settings class of the command. If it has a field ``base``, ``base=NAME`` sets the base's name.
        usage: text that ``--help`` prints before the settings: description, usage line, examples.
        spelled: typed key -> field, for keys that cannot be the name of a field.
        words: field that takes all arguments that are not settings, joined by spaces.
    """
    keys = spelled or {}
    REGISTERED[name] = Registered(cls, {field: key for key, field in keys.items()})
    settings_class: Any = cls  # functools.cache takes hashable arguments, which type[T] is not to mypy
    hidden = {"run": {"dir": "."}, "sweep": {"dir": f"outputs/{name}"}, "output_subdir": None}
    defaults = [f"{name}_schema", "_self_", {"override hydra/job_logging": "none"}]
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema(settings_class))
    store.store(name=name, node={"defaults": defaults, "hydra": hidden})

    def decorate(task: Task[T]) -> Callable[[], None]:
        """Return the entry point that runs ``task``."""

        @hydra_task
        def checked(cfg: DictConfig) -> None:
            """Run ``task`` on checked settings."""
            task(parse(cfg, cls))

        checked.__module__ = task.__module__
        composed = hydra.main(version_base="1.3", config_path=None, config_name=name)(checked)

        def main() -> None:
            """Entry point."""
            take_device()
            arguments = sys.argv[1:]
            if {"--help", "-h"} & {*arguments} or (not arguments and required(cls)):
                sys.stdout.write(help_text(usage, cls, REGISTERED[name].spelled))
                raise SystemExit(0)
            with one_line_errors():
                sys.argv[1:] = _overrides(arguments, cls, keys, words)
            run_main(composed, cls)

        return main

    return decorate


def required(cls: type[Any]) -> list[str]:
    """Return the fields of a settings class that have no default."""
    return [f.name for f in fields(cls) if default_of(f) is MISSING]


def _overrides(arguments: list[str], cls: Any, spelled: dict[str, str], words: str) -> list[str]:
    """Return arguments as typed by users as Hydra's overrides and options."""
    types = {name: str(kind) for name, kind in types_of(cls).items()} | dict.fromkeys(spelled, "str")
    overrides, options, text = list[str](), list[str](), list[str]()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, value = argument.partition("=")
        is_setting = key.split(".")[0] in types or re.fullmatch(r"[+~]*[a-z_.]+=\S*", argument)
        is_option = argument.startswith("-") and not (words and re.match(r"-([^\w-]|$)", argument))
        if is_option or before in _WITH_VALUE:
            options.append(argument)
        elif words and not (equals and is_setting):
            text.append(argument)
        elif not equals and not key.startswith("~"):
            raise UserError(f"{argument!r} is not a setting; settings are key=value, see --help")
        elif equals and not value.strip():
            raise UserError(f"{argument} has no value; give one ({argument}VALUE), see --help")
        else:
            key = {"base": "base.name", **spelled}.get(key, key)
            if value.startswith("{") or types.get(key.split(".")[0], "").startswith("dict"):
                key = f"++{key}"  # free keys, which Hydra takes only as additions
            overrides.append(f"{key}{equals}{_quoted(value)}" if equals else argument)
    overrides += [f"{words}={_quoted(' '.join(text), always=True)}"] if text else []
    given = {override.lstrip("+~").split("=")[0] for override in overrides}
    typed = {field: key for key, field in spelled.items()}
    missing = [typed.get(name, name) for name in required(cls) if name not in given]
    if missing and not options and all(key.split(".")[0] in types for key in given):
        raise UserError(f"missing: {' '.join(f'{name}=...' for name in missing)}; see --help for their meaning")
    return overrides + options


def _quoted(value: str, always: bool = False) -> str:
    """Quote a text for Hydra, which would interpret some of its characters."""
    if not always and re.fullmatch(r"\[[^\[\]{}'\"]*=[^\[\]{}'\"]*\]", value):  # settings in a list: train=[a.b=1,c=2]
        return f"[{','.join(_quoted(item.strip(), always=True) for item in value[1:-1].split(','))}]"
    if not always and re.fullmatch(r"""['"\[{].*|[\w/\-+.:@,*?|% ]*""", value, re.DOTALL):
        return value
    value = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value.replace("${", r"\${"))
    return f"'{value}'"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder next to ``out`` to write into, and rename it to ``out`` if the block ends without an error."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise UserError(f"{out} cannot be read ({error.strerror}); choose another folder (out=...)") from None
    if taken:
        raise UserError(f"{out} exists; remove it or choose another folder (out=...)")
    out = out.resolve()
    make_folder(out.parent, "out=...")
    tmp_path = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(tmp_path, ignore_errors=True)
    make_folder(tmp_path, "out=...")
    try:
        yield tmp_path
        if out.exists():
            out.rmdir()
        tmp_path.replace(out)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
