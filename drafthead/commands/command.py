"""What commands share: one grammar (``key=value``, ``--help``, ``--cfg job``), and output folders.

Version 0.1.0 had ``--key value`` for some commands; these are still read, with a line that says the new spelling.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import make_folder
from drafthead.data.utils.settings import one_line_errors, parse, run_main, say, schema, update_key

T = TypeVar("T")
Task = Callable[[T], None]


_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd")
"""Hydra's options that take the next argument."""


def command(
    name: str, wanted: type[T], usage: str, *, spelled: dict[str, str] | None = None, words: str = ""
) -> Callable[[Task[T]], Callable[[], None]]:
    """Make a function of checked settings a command's entry point.

    Args:
        name: of the command, as in ``drafthead NAME``.
        wanted: dataclass of its settings; of a field ``base``, ``base=NAME`` sets the name.
        usage: what ``--help`` prints before the settings.
        spelled: typed key -> field, where the field cannot have the key's name.
        words: field that takes the arguments that are no settings, as one text.
    """
    usage = usage.replace("$", "$$")
    hidden = {"run": {"dir": "."}, "sweep": {"dir": f"outputs/{name}"}, "output_subdir": None}
    help_text = {"app_name": f"drafthead {name}", "template": usage + "\n== settings ==\n$CONFIG"}
    defaults = [f"{name}_schema", "_self_", {"override hydra/job_logging": "none"}]
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema(wanted))
    store.store(name=name, node={"defaults": defaults, "hydra": {**hidden, "help": help_text}})

    def decorate(task: Task[T]) -> Callable[[], None]:
        @one_line_errors
        def checked(cfg: DictConfig) -> None:
            task(parse(cfg, wanted))

        checked.__module__ = task.__module__
        composed = hydra.main(version_base="1.3", config_path=None, config_name=name)(checked)

        def main() -> None:
            """Entry point."""
            try:
                sys.argv[1:] = _settings(sys.argv[1:], wanted, spelled or {}, words)
            except UserError as error:
                raise SystemExit(f"error: {error}") from None
            run_main(composed, wanted)

        return main

    return decorate


def _settings(arguments: list[str], wanted: type[Any], spelled: dict[str, str], words: str) -> list[str]:
    """Arguments as typed -> Hydra's overrides and options."""
    types = {f.name: str(f.type) for f in fields(wanted)} | dict.fromkeys(spelled, "str")
    if not arguments and any(f.default is MISSING for f in fields(wanted)):
        return ["--help"]
    arguments, found, options, text = _without_options(arguments, types), [], [], []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, value = argument.partition("=")
        setting = key.split(".")[0] in types or re.fullmatch(r"[+~]*[a-z_.]+=\S*", argument)
        dash = argument.startswith("-") and not (words and re.match(r"-([^\w-]|$)", argument))
        if dash or before in _WITH_VALUE:
            options.append(argument)
        elif words and not (equals and setting):
            text.append(argument)
        elif not equals and not key.startswith("~"):
            raise UserError(f"{argument!r} is no setting; settings are key=value, see --help")
        elif equals and not value.strip():
            raise UserError(f"{argument} has no value; give one ({argument}VALUE), see --help")
        else:
            key = {"base": "base.name", **spelled}.get(key, key)
            if value.startswith("{") or types.get(key.split(".")[0], "").startswith("dict"):
                key = f"++{key}"  # free keys, which Hydra takes only as additions
            found.append(f"{key}{equals}{_quoted(value)}" if equals else argument)
    found += [f"{words}={_quoted(' '.join(text), always=True)}"] if text else []
    given = {setting.lstrip("+~").split("=")[0] for setting in found}
    typed = {field: name for name, field in (spelled or {}).items()}
    missing = [typed.get(f.name, f.name) for f in fields(wanted) if f.default is MISSING and f.name not in given]
    if missing and not options and all(key.split(".")[0] in types for key in given):
        raise UserError(f"missing: {' '.join(f'{name}=...' for name in missing)}; see --help for what to write there")
    return found + options


def _without_options(arguments: list[str], types: dict[str, str]) -> list[str]:
    """``--some-key a b`` of version 0.1.0 as ``some_key=[a,b]`` where that is a setting; the rest as it is."""
    found: list[str] = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        key, equals, value = option.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        negated, key = key.startswith("no_"), update_key(key.removeprefix("no_")) or key
        if not option.startswith("--") or key not in types:
            found.append(option)
            continue
        if "bool" in types[key]:
            new = f"{key}={str(not negated).lower()}"
        elif "list" in types[key]:
            values = [value] if equals else []
            while rest and not equals and not rest[0].startswith("--") and re.split("[.=]", rest[0])[0] not in types:
                values += rest.pop(0).split(",")
            new = f"{key}=[{','.join(map(_quoted, values))}]"
        else:
            new = f"{key}={value if equals else rest.pop(0) if rest else ''}"
        say(f"{option} is now spelled {new}")
        found.append(new)
    return found


def _quoted(value: str, always: bool = False) -> str:
    """A text for Hydra, which would read some of its signs as its own."""
    if not always and re.fullmatch(r"\[[^\[\]{}'\"]*=[^\[\]{}'\"]*\]", value):  # settings in a list: train=[a.b=1,c=2]
        return f"[{','.join(_quoted(item.strip(), always=True) for item in value[1:-1].split(','))}]"
    if not always and re.fullmatch(r"""['"\[{].*|[\w/\-+.:@,*?|% ]*""", value, re.DOTALL):
        return value
    value = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value.replace("${", r"\${"))
    return f"'{value}'"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into; it is renamed to ``out`` when the block ends without an error."""
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
