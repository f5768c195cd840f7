"""Hydra composes, dataclasses check: unknown keys, wrong types and limits are errors, ``+key`` included."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafthead.data.utils.errors import UserError

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells count."""


def parse(cfg: DictConfig, wanted: type[T]) -> T:
    """Composed config -> checked dataclasses (runs every ``__post_init__``).

    Merged into a fresh schema because ``+key=value`` on the command line opens Hydra's own copy and would smuggle an
    unknown key past it.

    Raises:
        UserError: an unknown key, a wrong type, a missing value, a limit exceeded.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        return cast(T, OmegaConf.to_object(OmegaConf.merge(schema(wanted), plain)))
    except (OmegaConfBaseException, HydraException) as error:
        raise UserError(f"config: {_one_line(error)}") from None
    except ValueError as error:
        raise UserError(f"config: {error}") from None


def schema(found: type[Any]) -> DictConfig:
    """A dataclass as Hydra's schema, with the nodes of frozen dataclasses open to overrides."""
    return _writable(OmegaConf.structured(found))


def _writable(cfg: DictConfig) -> DictConfig:
    """Open the nodes of frozen dataclasses, which OmegaConf makes read-only, so that values can be merged in."""
    OmegaConf.set_readonly(cfg, False)
    for key in cfg:
        child = cfg._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            _writable(child)
    return cfg


def parse_component(node: dict[str, Any], base: Any, key: str, package: str) -> Any:
    """``{_target_: package.module.SomeConfig, ...}`` -> ``SomeConfig(...)``, with types and names checked.

    Args:
        node: the config node.
        base: class that the target must be a subclass of.
        key: name of the node, for messages.
        package: prefix that the target must have, so that a config cannot name foreign code.

    Raises:
        UserError: another target, an unknown key, a wrong type, a limit exceeded.
    """
    target = str(node.get("_target_", ""))
    try:
        found = get_class(target) if target.startswith(package) else None
    except Exception:
        found = None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key}._target_ must name a {base.__name__} under {package}*, got {target!r}")
    settings = {k: v for k, v in node.items() if k != "_target_"}
    known = [field.name for field in fields(found)]
    if unknown := [name for name in settings if name not in known]:
        # Recipes set the keys of the head that they are for, whichever one the command line puts in its place.
        raise UserError(
            f"{key}: {found.__name__} has no {', '.join(unknown)}; the recipe sets them for another {key}, or they are "
            f"misspelt (it has {', '.join(known)}). Choose a recipe of this {key}, or leave them out: "
            f"{' '.join(f'~{key}.{name}' for name in unknown)}"
        )
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema(found), settings))
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{key}: {_one_line(error)}") from None


def one_line_errors(task: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Decorate a Hydra task: our own errors become one line and exit code 1, without a traceback.

    Inside ``hydra.main``, because Hydra announces every exception that passes it with a line of its own.
    """

    @wraps(task)
    def guarded(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        except OSError as error:  # a path that cannot be made, a full disk: the message names it
            raise SystemExit(f"error: {error}; choose another folder (out=..., data.folder=...)") from None
        except KeyboardInterrupt:
            say("interrupted; what is done is kept, the same command goes on from there")
            raise SystemExit(INTERRUPTED) from None

    return guarded


def say(line: str) -> None:
    """A line for people beside the output; of several processes only the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")


def run_main(main: Callable[[], None]) -> None:
    """Run a Hydra entry point; what Hydra itself refuses (an unknown group or key) becomes one line, too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra ends the process itself, with its own traceback
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(f"error: {_one_line(error)}") from None
    except OSError as error:  # Hydra makes the run folder before the task starts
        raise SystemExit(f"error: {error}; choose another run folder (out=...)") from None


_NOISE = (
    "reference_type",
    "object_type",
    "full_key",
    "See https",
    "To append to your",
    "Config search path",
    "provider=",
)


def _one_line(error: BaseException) -> str:
    """Message and cause, without what only concerns Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    cause = error.__cause__
    return f"{message}: {_one_line(cause)}" if isinstance(cause, OmegaConfBaseException) else message
