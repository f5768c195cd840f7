"""The run folder: the settings that a run started with, and the results of its stages. ``training-settings.json`` holds
the settings that decide what is trained, by dotted key. Resuming with other values is an error. A setting that is
absent on one side takes its default, so settings added later do not stop a run."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from drafthead.data.prompts.suites import OWN
from drafthead.errors import UserError
from drafthead.files.local import read_json, write_json
from drafthead.settings.schema import default_of, flatten
from drafthead.train.config import CHANGEABLE, RunConfig

SETTINGS = "training-settings.json"
HOLDS = "hold_out_own_prompts"  # true if ``eval.suite`` keeps some of the user's prompts out of training
QUALITY = "quality.json"
CONTINUED = "init_from.json"
SUITE = "held_out_prompts.jsonl"
TRANSCRIPTS = "transcripts.json"
CALIBRATION = "calibration.json"
RESULTS = {  # of each stage in the run folder, as file patterns; ``resume=false`` removes them
    "train": ("checkpoints", "head", "metrics.jsonl", CONTINUED, TRANSCRIPTS),
    "quality": (QUALITY,),
    "tree": (CALIBRATION,),
    "evaluate": ("eval.json", "eval-log-*.jsonl"),
}
_ABSENT = object()


def open_folder(run: RunConfig) -> None:
    """Write ``training-settings.json``; reject a folder that was trained with other, or with unknown, settings."""
    path = Path(run.out) / SETTINGS
    if not run.resume:
        _clear(run)
    if path.exists():
        check_settings(path, run)
    elif "train" in run.stages and _is_trained(path.parent):
        raise UserError(f"{path} is missing; restore it, or choose another name=... for a new run")
    write_json(path, training_settings(run))


def training_settings(run: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what is trained, by dotted key. They may not change when a run is resumed."""
    settings = asdict(run)
    for setting in ("folder", "states"):
        settings["data"].pop(setting)
    for setting in ("batch_size", "server"):
        settings["data"]["answers"].pop(setting)
    settings["base"].pop("kernels")
    settings["head"].pop("draft_dtype", None)
    kept = {key: settings[key] for key in ("seed", "base", "head", "init_from", "extend_vocabulary", "data", "phases")}
    return _plain(kept | {HOLDS: run.eval.suite.startswith(OWN)})


def check_settings(path: Path, run: RunConfig) -> None:
    """Raise a ``UserError`` if settings of ``run`` differ from those in ``path``, and training has begun there."""
    saved, folder = read_json(path), path.parent
    if not isinstance(saved, dict):
        raise UserError(f"{path} holds a {type(saved).__name__}, expected an object; restore it, or use resume=false")
    saved, current = _plain(saved), training_settings(run)
    defaults = _plain(_defaults(run) | {"head": _defaults(run.head_config()), HOLDS: False})
    is_trained = _is_trained(folder)
    for key in sorted({*saved, *current}):
        if run.init_from is not None and key.startswith("head.") and key[5:] not in CHANGEABLE:
            continue  # these are settings of that head
        old, new = (settings.get(key, defaults.get(key, _ABSENT)) for settings in (saved, current))
        # Python's 0 equals False, but as settings they differ.
        if is_trained and (old != new or isinstance(old, bool) != isinstance(new, bool)):
            old_value, new_value = ("no value" if value is _ABSENT else repr(value) for value in (old, new))
            raise UserError(
                f"{folder} was trained with {' '.join(key.split())}={old_value}, this command has {new_value}; set it "
                "as it was to continue, give the run another name (name=...), or start over with resume=false"
            )


def _is_trained(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*")) or (folder / "head").exists()


def _defaults(settings: Any) -> dict[str, Any]:
    """Return the default of every field that has one, with nested settings as nested mappings."""
    defaults: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        items = dict(enumerate(value)) if isinstance(value, list) else value
        if is_dataclass(value):
            defaults[field.name] = _defaults(value)
        elif isinstance(items, Mapping) and items and all(map(is_dataclass, items.values())):  # phases and sources
            defaults[field.name] = {key: _defaults(item) for key, item in items.items()}
        elif (default := default_of(field)) is not MISSING:
            defaults[field.name] = default
    return defaults


def _plain(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to JSON values by dotted key, with list indices as keys: ``data.text.sources.0.name``."""

    def indexed(value: Any) -> Any:  # lists of mappings become mappings from index to item
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        return {str(key): indexed(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    return flatten(indexed(json.loads(json.dumps(nested, default=str))))


def _clear(run: RunConfig) -> None:
    """Remove the results of the stages to run; reject a folder without the settings file of a run."""
    folder = Path(run.out)
    settings = folder / SETTINGS
    results = [path for stage in run.stages for name in RESULTS.get(stage, ()) for path in folder.glob(name)]
    if results and not settings.exists():
        raise UserError(f"resume=false would remove {results[0]}, but {folder} has no {SETTINGS}; set another out=...")
    for path in results:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if "train" in run.stages:
        settings.unlink(missing_ok=True)
