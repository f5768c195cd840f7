"""Checkpoints: whole or absent, checked before use, everything that is needed to go on bit for bit.

A checkpoint is the folder ``step-0000123``::

    head.safetensors        the head's tensors
    optimizer.safetensors   the tensors of the optimiser's state_dict
    rng.safetensors         those of the random generators' states, of every rank
    state.json              everything else (``TrainState``, manifests of the corpora, the plain parts of the two
                            states), and the sha256 of every other file and of itself

``best`` is a link to the checkpoint with most held-out tokens a step. Nothing is ever unpickled.
"""
# Nested state (an optimiser's, a random generator's) as plain JSON and named tensors, so that no file needs pickle.
# The random generators of a process: Python's, numpy's, torch's and every CUDA device's.

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import (
    disk_errors,
    file_digest,
    fsync,
    read_checksummed_json,
    require_space,
    safe_join,
    write_checksummed_json,
)

Plain = Any
"""What JSON can say."""


def split_tensors(value: Any, name: str = "") -> tuple[Plain, dict[str, Tensor]]:
    """Take the tensors out of nested dictionaries, lists and tuples.

    Returns:
        The rest as JSON values, each tensor replaced by its name; and the tensors by name, on the CPU and contiguous.

    Raises:
        TypeError: something else is in it.
    """
    tensors: dict[str, Tensor] = {}

    def walk(item: Any, path: str) -> Plain:
        if isinstance(item, Tensor):
            tensors[path] = item.detach().cpu().contiguous()
            return {"tensor": path}
        if isinstance(item, Mapping):
            pairs = []
            for key, inner in item.items():
                if not isinstance(key, str | int):
                    raise TypeError(f"a key of the state is a {type(key).__name__}: {key!r}")
                pairs.append([key, walk(inner, f"{path}.{key}" if path else str(key))])
            return {"map": pairs}
        if isinstance(item, list | tuple):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [walk(inner, f"{path}.{place}") for place, inner in enumerate(item)]}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise TypeError(f"the state has a {type(item).__name__} at {path!r}, which JSON cannot say")

    return walk(value, name), tensors


def join_tensors(plain: Plain, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``split_tensors`` took apart.

    Raises:
        KeyError, TypeError, ValueError: ``plain`` is something else, or names a tensor that is not there.
    """
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: join_tensors(inner, tensors) for key, inner in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is no kind of value")
    items = [join_tensors(inner, tensors) for inner in content]
    return items if kind == "list" else tuple(items)


def capture_rng() -> dict[str, Any]:
    """The states of this process's generators: tensors, and plain values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set what ``capture_rng`` returned. CUDA states are set only when this process sees as many devices."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def undisturbed_rng() -> Iterator[None]:
    """What happens inside leaves the generators as they were: work that a resumed run does again, or not at all."""
    kept = capture_rng()
    try:
        yield
    finally:
        restore_rng(kept)


NAME = re.compile(r"step-(\d{7,18})")
HEAD, OPTIMIZER, RNG, STATE = "head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"
BEST = "best"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands. Counters say what is finished, so they are also the index of what comes next."""

    phase: int
    """Index in the recipe's list of phases."""
    step: int
    """Optimiser steps finished in the phase: the position in its schedule, and in its data."""
    global_step: int
    """Optimiser steps finished over all phases; names the checkpoint."""
    processes: int = 1
    """Processes that the run began with: they set how many rows a step has, on however many it goes on."""
    score: float | None = None
    """Held-out tokens a step, where they were measured at this very step."""
    losses: list[float | None] = field(default_factory=list)
    """What the guard remembers of the phase's latest steps: losses, None for one whose update was skipped."""

    def __post_init__(self) -> None:
        for name, least in (("phase", 0), ("step", 0), ("global_step", 0), ("processes", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        for value in (self.score, *self.losses):
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"a score or loss must be a number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, on the CPU."""

    path: Path
    state: TrainState
    head: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: list[dict[str, Any]]
    """One per rank of the run that saved it; see ``restore_rng``."""
    manifests: dict[str, Any]
    """What made the corpora that it was trained on, by their name."""
    warnings: tuple[str, ...] = ()
    """One line for every newer checkpoint that was damaged and skipped; print them."""


def save_checkpoint(
    folder: Path,
    state: TrainState,
    head: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    *,
    rng: Sequence[Mapping[str, Any]],
    manifests: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write ``folder/step-<global_step>``, then remove all but the newest ``keep`` checkpoints and the best one.

    Call it on one process only. Checkpoints of later steps are removed as well: a run that reaches this step
    again did not resume from them (they were damaged, or belong to a run that was started anew).

    Args:
        folder: the run's ``checkpoints`` folder.
        state: counters; ``global_step`` names the checkpoint, an existing one of that name is replaced.
        head: the head's ``state_dict`` (full tensors when sharded).
        optimizer: the optimiser's ``state_dict`` (full tensors when sharded).
        rng: ``capture_rng()`` of every rank, in order.
        manifests: JSON values: what made the corpora that were trained on.
        keep: newest checkpoints to keep, this one included, at least 1.

    Raises:
        UserError: the disk has no room for it; the checkpoints before it are kept.
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    plain_optimizer, optimizer_tensors = split_tensors(optimizer)
    plain_rng, rng_tensors = split_tensors(list(rng), "rank")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}
    contents = {HEAD: weights, OPTIMIZER: optimizer_tensors, RNG: rng_tensors}
    size = sum(t.numel() * t.element_size() for tensors in contents.values() for t in tensors.values())
    require_space(folder, size + 2**20, "a checkpoint")
    record = {
        "format": FORMAT,
        "state": asdict(state),
        "optimizer": plain_optimizer,
        "rng": plain_rng,
        "manifests": dict(manifests or {}),
    }
    with disk_errors("a checkpoint", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        aside = folder / f".writing.{os.getpid()}"
        try:
            _write(aside, record, contents)
        except (OSError, SafetensorError):
            shutil.rmtree(aside, ignore_errors=True)  # it would keep the disk full
            raise
        path = folder / f"step-{state.global_step:07d}"
        if path.exists():  # a folder cannot be renamed onto another; leftovers go with the next save
            path.rename(folder / f".replaced.{os.getpid()}")
        aside.rename(path)
        fsync(folder)
        _prune(folder, path, keep)
    return path


def _write(aside: Path, record: dict[str, Any], contents: Mapping[str, dict[str, Tensor]]) -> None:
    aside.mkdir()
    for name, tensors in contents.items():
        save_file(tensors, aside / name)
        fsync(aside / name)
    write_checksummed_json(aside / STATE, {**record, "files": {name: file_digest(aside / name) for name in contents}})
    fsync(aside)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of ``folder`` that is whole; None when there is none at all.

    A damaged one (a missing file, another checksum) is skipped and named in ``Checkpoint.warnings``.

    Raises:
        UserError: there are checkpoints and all are damaged.
    """
    found = _checkpoints(folder)
    warnings: list[str] = []
    for path in reversed(found):
        try:
            return _load(path, tuple(warnings))
        except UserError as damage:
            warnings.append(f"checkpoint {path} is damaged ({damage}); falling back to the one before it")
    if found:
        raise UserError(
            f"every checkpoint in {folder} is damaged: {'; '.join(w.rpartition(';')[0] for w in warnings)}. "
            "Restore one from a backup, or remove the folder to train from the start"
        )
    return None


def load_best(folder: Path) -> Checkpoint | None:
    """The checkpoint with most held-out tokens a step (of equal ones the latest); None when none was measured.

    Raises:
        UserError: it is damaged.
    """
    best = _best(_checkpoints(folder))
    return None if best is None else _load(best, ())


def _load(path: Path, warnings: tuple[str, ...]) -> Checkpoint:
    """Raises UserError: what is wrong with it."""
    try:
        record = read_checksummed_json(safe_join(path, STATE))
        if record["format"] != FORMAT:
            raise UserError(f"{STATE} has format {record['format']!r}, this version reads {FORMAT}")
        if set(record["files"]) != {HEAD, OPTIMIZER, RNG}:
            raise UserError(f"{STATE} lists the files {sorted(record['files'])}")
        for name, expected in record["files"].items():
            if file_digest(safe_join(path, name)) != expected:
                raise UserError(f"{name} does not have the checksum that {STATE} states")
        tensors = {name: load_file(path / name) for name in record["files"]}
        return Checkpoint(
            path=path,
            state=_state_of(record),
            head=tensors[HEAD],
            optimizer=join_tensors(record["optimizer"], tensors[OPTIMIZER]),
            rng=join_tensors(record["rng"], tensors[RNG]),
            manifests=dict(record["manifests"]),
            warnings=warnings,
        )
    except OSError as error:
        raise UserError(f"{Path(error.filename or path).name}: {error.strerror}") from None
    except UserError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{STATE} is not a checkpoint's: {error!r}") from None


def _state_of(record: dict[str, Any]) -> TrainState:
    known = {f.name for f in fields(TrainState)}
    if set(record["state"]) != known:
        raise ValueError(f"its state has {sorted(record['state'])}, expected {sorted(known)}")
    return TrainState(**record["state"])


def _checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = {p: NAME.fullmatch(p.name) for p in folder.glob("step-*")}
    return [p for _, p in sorted((int(match[1]), path) for path, match in found.items() if match)]


def _best(found: list[Path]) -> Path | None:
    scores = {}
    for path in found:
        try:
            score = json.loads((path / STATE).read_bytes())["content"]["state"]["score"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # damaged: nothing to keep
        if isinstance(score, int | float):
            scores[path] = float(score)
    return max(reversed(found), key=lambda path: scores.get(path, float("-inf"))) if scores else None


def best_score(folder: Path) -> float | None:
    """Held-out tokens a step of the best checkpoint in ``folder``; None when none was measured."""
    best = _best(_checkpoints(folder))
    return None if best is None else float(json.loads((best / STATE).read_bytes())["content"]["state"]["score"])


def _prune(folder: Path, newest: Path, keep: int) -> None:
    found = _checkpoints(folder)
    index = found.index(newest)
    best = _best(found[: index + 1])
    for path in found[: max(0, index + 1 - keep)] + found[index + 1 :]:
        if path != best:
            # Renamed first: a kill in the middle of rmtree must not leave something that looks like a checkpoint.
            path.rename(folder / f".replaced.{path.name}")
    _mark(folder, best)
    _remove_leftovers(folder)


def _mark(folder: Path, best: Path | None) -> None:
    """Point the link ``best`` at ``best``, in one step."""
    link = folder / BEST
    if link.is_dir() and not link.is_symlink():  # a copy of the run, made by what follows links
        link.rename(folder / f".replaced.{BEST}.copy")
    if best is None:
        link.unlink(missing_ok=True)
        return
    aside = folder / f".replaced.{BEST}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(best.name)
    aside.replace(link)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; nothing of it was ever a checkpoint, or is one any more."""
    for path in (*folder.glob(".writing.*"), *folder.glob(".replaced.*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
