"""Hydra composes settings, dataclasses check them: unknown keys, wrong types and limits are errors, ``+key`` included.

Keys and values of earlier versions are read through one table, ``RENAMED_KEYS`` and ``RENAMED_VALUES``.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, TypeVar, cast, get_args, get_type_hints

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafthead.data.utils.errors import UserError

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells count."""

RENAMED_KEYS: dict[str, str | None] = {
    # Old key: new key, or None where the setting is gone; an ambiguous key has parents, by their new names. Where two
    # old keys have one new name, the first is the one of version 0.1.0.
    "row_length": "seq_len",
    "batch_rows": "micro_batch_size",
    "dead_after_s": "heartbeat_timeout_s",
    "node_data": "per_node_data",
    "synthesised": "self_prompted",
    "stop_below": "confidence_threshold",
    "siblings": "draft_sampling",
    "lanes": "stream_shards",
    "server.min_agreement": "min_greedy_match_rate",
    "head._target_": "head_type",
    "head.num_heads": "num_draft_tokens",
    "head.n_predict": "num_draft_tokens",
    "head.num_tokens": "num_draft_tokens",
    "head.own_projection": "own_lm_head",
    "head.threshold": "confidence_threshold",
    "head.heads_lr_factor": "heads_lr_mult",
    "phases.*.accumulate": "grad_accum_steps",
    "phases.*.features": "hidden_states",
    "answers.slots": "batch_size",
    "guard": "loss_spikes",
    "gate": "quality_limits",
    "quality_limits.min_agreement": "min_greedy_match_rate",
    "against": "baselines",
}
RENAMED_VALUES: dict[str, dict[str, str]] = {
    # New key, with as many parents as it needs: old value -> new value.
    "draft_sampling": {"deterministic": "top_k"},
    "mode": {"plan": "estimate"},
    "tree_search": {"search": "greedy"},
    "head_type": {
        f"drafthead.models.{module}.{name}Config": module
        for module, name in {
            "draft_lm": "DraftLM", "eagle3": "Eagle3", "hydra": "Hydra", "kangaroo": "Kangaroo", "medusa": "Medusa",
            "medusa2": "Medusa2", "mlp_speculator": "MLPSpeculator",
        }.items()
    },
}  # fmt: skip


def update_names(value: Any, path: str = "", renamed: Callable[[str, str], None] = lambda old, new: None) -> Any:
    """``value`` (of a recipe, a saved head, a run folder, a manifest) with today's keys and values.

    ``path`` is the dotted key of ``value`` itself in a run's settings, such as ``head``; ``renamed`` is called with
    every old key or value and its new one ("" for a setting that is gone).
    """
    if isinstance(value, list):
        return [update_names(item, path, renamed) for item in value]
    if not isinstance(value, dict):
        values = next((values for key, values in RENAMED_VALUES.items() if _ends(path, key)), {})
        new = values.get(value, _update_interpolations(value)) if isinstance(value, str) else value
        if new != value:
            renamed(str(value), str(new))
        return new
    if path.endswith("shape"):  # transformers' own keys
        return value
    found = {}
    for key, inner in value.items():
        new_key = update_key(f"{path}.{key}" if path else str(key))
        own = None if new_key is None else new_key.removeprefix(f"{path}." if path else "")
        if own != key and isinstance(key, str):
            renamed(key, own or "")
        if own is not None:
            found[own if isinstance(key, str) else key] = update_names(inner, new_key or "", renamed)
    return found


def update_key(key: str) -> str | None:
    """Today's name of the dotted ``key``; None where the setting is gone."""
    done: list[str] = []
    for part in key.split("."):
        path = ".".join([*done, part])
        new = next((new for old, new in RENAMED_KEYS.items() if _ends(path, old)), part)
        if new is None:
            return None
        done.append(new)
    return ".".join(done)


def _update_interpolations(value: str) -> str:
    return re.sub(r"(?<=\$\{)[\w.]+(?=\})", lambda found: update_key(found[0]) or found[0], value)


def _ends(path: str, pattern: str) -> bool:
    return fnmatchcase(f".{path}", f"*.{pattern}")


def flatten(nested: Mapping[Any, Any], separator: str = ".") -> dict[str, Any]:
    """Nested mappings as one with joined keys; empty ones stay."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}{separator}{inner}": v for inner, v in flatten(value, separator).items()}
        else:
            found[str(key)] = value
    return found


def original_names(value: Any) -> Any:
    """``value`` with the keys of version 0.1.0, whose folders are named by a digest of them."""
    old_of = {new: old.rpartition(".")[2] for old, new in reversed(RENAMED_KEYS.items())}
    if isinstance(value, dict):
        return {old_of.get(key, key): original_names(inner) for key, inner in value.items()}
    return [original_names(inner) for inner in value] if isinstance(value, list | tuple) else value


def update_overrides(arguments: list[str]) -> list[str]:
    """Command-line arguments with today's names; a line says the new name of every old one."""
    found = []
    for argument in arguments:
        if argument.startswith("="):
            raise SystemExit(f"error: {argument!r} names no setting; settings are key=value, see --help")
        match = re.fullmatch(r"(~|\+{0,2})([\w.]+)(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            found.append(argument)
            continue
        sign, key, value = match.groups()
        new_key = update_key(key)
        if new_key is None:
            say(f"{key} has no effect any more")
            continue
        found.append(f"{sign}{new_key}" + ("" if value is None else f"={_update_value(value, new_key)}"))
        if found[-1] != argument:
            say(f"{argument} is now called {found[-1]}")
    return found


def _update_value(value: str, key: str) -> str:
    """A value as it stands on the command line: choices of a sweep, or a mapping whose keys lie below ``key``."""

    def inner_key(found: re.Match[str]) -> str:
        return (update_key(f"{key}.{found[0]}") or found[0]).removeprefix(f"{key}.")

    value = ",".join(update_names(part, key) for part in value.split(","))
    return re.sub(r"(?<=[{,\s])\w+(?=\s*:)", inner_key, value)


def read_old_recipes() -> None:
    """Make Hydra read recipes of earlier versions, with a line that says the new name of every old key."""
    Plugins.instance()
    sources = SourcesRegistry.instance().types
    for scheme in ("file", "pkg"):
        if not hasattr(sources[scheme], "reads_old_names"):
            sources[scheme] = _reading_old_names(sources[scheme])


def _reading_old_names(source: Any) -> Any:
    class Source(source):  # type: ignore[misc]
        reads_old_names = True

        def load_config(self, config_path: str) -> ConfigResult:
            def renamed(old: str, new: str) -> None:
                say(f"{config_path}: {old} " + (f"is now called {new}" if new else "has no effect any more"))

            result: ConfigResult = super().load_config(config_path)
            content = OmegaConf.to_container(result.config, resolve=False)
            root = "head" if config_path.startswith("head/") else ""
            result.config = OmegaConf.create(update_names(content, root, renamed))
            return result

    return Source


def parse(cfg: DictConfig, wanted: type[T]) -> T:
    """Composed config -> checked dataclasses (runs every ``__post_init__``).

    Merged into a fresh schema because ``+key=value`` on the command line opens Hydra's own copy and would smuggle an
    unknown key past it.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        return cast(T, OmegaConf.to_object(OmegaConf.merge(schema(wanted), values)))
    except (OmegaConfBaseException, HydraException) as error:
        raise UserError(f"config: {_one_line(error)}{_near(error, wanted)}") from None
    except ValueError as error:
        raise UserError(f"config: {error}") from None


def schema(found: type[Any]) -> DictConfig:
    """A dataclass as Hydra's schema, with the nodes of frozen dataclasses open to overrides."""

    def open_node(cfg: DictConfig) -> DictConfig:
        OmegaConf.set_readonly(cfg, False)
        for key in cfg:
            child = cfg._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                open_node(child)
        return cfg

    return open_node(OmegaConf.structured(found))


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
            say("interrupted; what is done is kept, the same command resumes from there")
            raise SystemExit(INTERRUPTED) from None

    return guarded


def say(line: str) -> None:
    """A line for people beside the output; of several processes only the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")


def run_main(main: Callable[[], None], wanted: type[Any]) -> None:
    """Run a Hydra entry point; what Hydra itself refuses (an unknown group or key) becomes one line, too."""
    sys.argv[1:] = update_overrides(sys.argv[1:])
    read_old_recipes()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra ends the process itself, with its own traceback
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(f"error: {_one_line(error)}{_near(error, wanted)}") from None
    except OSError as error:  # Hydra makes the run folder before the task starts
        raise SystemExit(f"error: {error}; choose another run folder (out=...)") from None


_NOISE = ("reference_type", "object_type", "full_key", "See https", "To append to your", "Config search", "provider=")


def _one_line(error: BaseException) -> str:
    """Message and cause, without what only concerns Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read ({message}); quote the value"
    cause = error.__cause__
    return f"{message}: {_one_line(cause)}" if isinstance(cause, OmegaConfBaseException) else message


def _near(error: BaseException, wanted: type[Any]) -> str:
    """The settings whose names are close to an unknown one."""
    unknown = re.search(r"Key '(\w+)' (?:is )?not in", f"{error} {error.__cause__}")
    close = get_close_matches(unknown[1], _field_names(wanted)) if unknown else []
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _field_names(kind: Any) -> set[str]:
    """The fields of a dataclass and of the dataclasses in it."""
    if not is_dataclass(kind):
        return set().union(*map(_field_names, get_args(kind)))
    return {f.name for f in fields(kind)}.union(*map(_field_names, get_type_hints(kind).values()))
