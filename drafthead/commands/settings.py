"""What commands share: settings from the command line, and an output folder that appears when it is complete."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafthead.data.utils.config import parse
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import make_folder

T = TypeVar("T")


def read_settings(arguments: list[str], wanted: type[T], usage: str) -> T:
    """``key=value`` arguments as a checked dataclass; ``base=NAME`` is short for ``base.name=NAME``.

    Raises:
        SystemExit: 0 after ``--help``, with ``usage`` printed.
        UserError: something else than key=value, an unknown key, a wrong, empty or missing value.
    """
    if not arguments or {"--help", "-h"} & set(arguments):
        sys.stdout.write(usage)
        raise SystemExit(0)
    if wrong := [a for a in arguments if "=" not in a]:
        raise UserError(f"{wrong[0]!r} is no setting; settings are key=value, see --help")
    if empty := [a for a in arguments if not a.partition("=")[2].strip()]:
        raise UserError(f"{empty[0]} has no value; give one ({empty[0]}VALUE), see --help")
    named = ["base.name=" + a.removeprefix("base=") if a.startswith("base=") else a for a in arguments]
    try:
        given = OmegaConf.from_dotlist(named)
    except Exception as error:  # of the YAML library, whose values these are
        raise UserError(f"a value is not closed ({' '.join(str(error).split())}); quote it, see --help") from None
    try:
        return parse(OmegaConf.merge(OmegaConf.structured(wanted), given), wanted)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"config: {where}{str(error).splitlines()[0]}; see --help") from None


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into; it is renamed to ``out`` when the block ends without an error.

    Raises:
        UserError: ``out`` exists and is not empty, or cannot be made.
    """
    try:
        taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
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
