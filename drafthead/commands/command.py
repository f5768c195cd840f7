"""The parts that all commands share: arguments (``key=value``, ``--help``, ``--cfg job``), and output folders."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from drafthead.errors import UserError, one_line
from drafthead.files.local import make_folder
from drafthead.settings.compose import one_line_errors, parse, schema, take_device
from drafthead.settings.help import help_text
from drafthead.settings.schema import default_of, takes_text, types_of

T = TypeVar("T")
Task = Callable[[T], None]


REGISTERED: dict[str, tuple[type[Any], str]] = {}  # settings class and usage by command name, for the reference page


def command(name: str, cls: type[T], usage: str, *, words: str = "") -> Callable[[Task[T]], Callable[[], None]]:
    """Return a decorator that turns a function of checked settings into a command's entry point. ``base=NAME`` sets the
    field ``base.name``, and ``from`` the field ``from_``. ``usage`` is printed before the settings. ``words`` is the
    field that receives all arguments that are not settings, joined by spaces; "": they are errors."""
    REGISTERED[name] = cls, usage

    def decorate(task: Task[T]) -> Callable[[], None]:
        def main() -> None:
            take_device()
            arguments = sys.argv[1:]
            if {"--help", "-h"} & {*arguments} or (not arguments and required(cls)):
                sys.stdout.write(help_text(usage, cls))
                raise SystemExit(0)
            with one_line_errors(cls):
                only_prints = ("--cfg", "job") in pairwise(arguments)
                if only_prints:
                    at = arguments.index("--cfg")
                    del arguments[at : at + 2]
                cfg = _composed(arguments, cls, words)
                missing = [name for name in required(cls) if OmegaConf.is_missing(cfg, name)]
                if only_prints:
                    sys.stdout.write(OmegaConf.to_yaml(cfg))
                elif missing:
                    typed = " ".join(f"{key.rstrip('_')}=..." for key in missing)
                    raise UserError(f"missing: {typed}; see --help for their meaning")
                else:
                    task(parse(cfg, cls))

        return main

    return decorate


def required(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls) if default_of(f) is MISSING]


def _composed(arguments: list[str], cls: Any, words: str) -> DictConfig:
    """Return the defaults of ``cls``, changed by arguments as users type them; values are YAML."""
    given, text = OmegaConf.create(), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_setting = key.split(".")[0] in types_of(cls) or re.fullmatch(r"[a-z_.]+=\S*", argument)
        if words and not (equals and is_setting):
            text.append(argument)
        elif not equals or not key:
            raise UserError(f"{argument!r} is not a setting; settings are key=value, see --help")
        elif not value.strip():
            raise UserError(f"{argument} has no value; give one ({argument}VALUE), see --help")
        else:
            key = {"base": "base.name", "from": "from_"}.get(key, key)
            if takes_text(cls, key, value):
                OmegaConf.update(given, key, value.replace("${", r"\${"))  # not an interpolation
                continue
            value = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", value) if "{" in value else value  # {a:b} as {a: b}
            try:
                given.merge_with_dotlist([f"{key}={value}"])
            except YAMLError as error:
                raise UserError(f"{argument} cannot be read ({one_line(error)}); quote the value") from None
    if text:
        given[words] = " ".join(text).replace("${", r"\${")  # not an interpolation
    cfg = OmegaConf.merge(OmegaConf.structured(schema(cls)), given)
    assert isinstance(cfg, DictConfig)
    return cfg


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` if the block succeeds; reject an ``out`` with contents."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise UserError(f"{out} cannot be read ({error.strerror}); choose another folder (out=...)") from None
    if taken:
        raise UserError(f"{out} exists already; remove it or choose another folder (out=...)")
    out = out.resolve()
    new_parents = [parent for parent in out.parents if not parent.exists()]
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
        with suppress(OSError):  # not empty
            for parent in new_parents:
                parent.rmdir()
