"""Checkpoints: whole or absent, checked before use, enough to resume bit for bit.

A checkpoint is the folder ``step-0000123``::

    head.safetensors   the head's tensors
    optimizer.pt       the optimiser's state_dict
    rng.pt             random states of Python, numpy and torch, one entry per rank
    state.json         TrainState, and the sha256 of every other file and of itself

``.pt`` files are only ever loaded with ``weights_only=True``: tensors and plain containers, no code.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.errors import UserError
from drafthead.data.files import require_space, write_json

NAME = re.compile(r"step-(\d{7,})")
HEAD, OPTIMIZER, RNG, STATE = "head.safetensors", "optimizer.pt", "rng.pt", "state.json"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands. Counters say what is finished, so they are also the index of what comes next."""

    phase: int
    """Index in the recipe's list of phases."""
    step: int
    """Optimiser steps finished in the phase."""
    global_step: int
    """Optimiser steps finished over all phases; names the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, on the CPU."""

    path: Path
    state: TrainState
    head: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: list[dict[str, Any]]
    """One per rank of the run that saved it; see ``restore_rng``."""
    warnings: tuple[str, ...] = ()
    """One line for every newer checkpoint that was damaged and skipped; print them."""


def capture_rng() -> dict[str, Any]:
    """The random states of this process: Python, numpy (its global generator), torch and every CUDA device."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set what ``capture_rng`` returned. CUDA states are set only when this process sees as many devices."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_checkpoint(
    folder: Path,
    state: TrainState,
    head: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    *,
    rng: Sequence[Mapping[str, Any]] | None = None,
    keep: int = 2,
) -> Path:
    """Write ``folder/step-<global_step>``, then remove all but the newest ``keep`` checkpoints.

    Call it on one process only. Checkpoints of later steps are removed as well: a run that reaches this step
    again did not resume from them (they were damaged, or belong to a run that was started anew).

    Args:
        folder: the run's ``checkpoints`` folder.
        state: counters; ``global_step`` names the checkpoint, an existing one of that name is replaced.
        head: the head's ``state_dict`` (full tensors when sharded).
        optimizer: the optimiser's ``state_dict`` (full tensors when sharded).
        rng: ``capture_rng()`` of every rank, in order; None captures this process.
        keep: checkpoints to keep, this one included, at least 1.

    Raises:
        UserError: the disk has no room for it.
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    size = sum(t.numel() * t.element_size() for t in (*head.values(), *_tensors(optimizer)))
    require_space(folder, size + 2**20, "a checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    aside = folder / f".writing.{os.getpid()}"
    aside.mkdir()
    save_file({k: v.detach().cpu().contiguous() for k, v in head.items()}, aside / HEAD)
    torch.save(dict(optimizer), aside / OPTIMIZER)
    torch.save([dict(r) for r in rng] if rng is not None else [capture_rng()], aside / RNG)
    for name in (HEAD, OPTIMIZER, RNG):
        _fsync(aside / name)
    record = {"state": asdict(state), "files": {n: _sha256(aside / n) for n in (HEAD, OPTIMIZER, RNG)}}
    write_json(aside / STATE, {**record, "sha256": _digest(record)})
    _fsync(aside)
    path = folder / f"step-{state.global_step:07d}"
    if path.exists():  # a folder cannot be renamed onto another; leftovers go with the next save
        path.rename(folder / f".replaced.{os.getpid()}")
    aside.rename(path)
    _fsync(folder)
    _prune(folder, path, keep)
    return path


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of ``folder`` that is whole; None when there is none at all.

    A damaged one (a missing file, another checksum) is skipped and named in ``Checkpoint.warnings``.

    Raises:
        UserError: there are checkpoints and all are damaged.
    """
    found = _checkpoints(folder)
    warnings: list[str] = []
    for path in reversed(found):
        damage, state = _inspect(path)
        if state is None:
            warnings.append(f"checkpoint {path} is damaged ({damage}); falling back to the one before it")
            continue
        return Checkpoint(
            path=path,
            state=state,
            head=load_file(path / HEAD),
            optimizer=torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True),
            rng=torch.load(path / RNG, map_location="cpu", weights_only=True),
            warnings=tuple(warnings),
        )
    if found:
        raise UserError(
            f"every checkpoint in {folder} is damaged: {'; '.join(w.split(';')[0] for w in warnings)}. "
            "Restore one from a backup, or remove the folder to train from the start"
        )
    return None


def _inspect(path: Path) -> tuple[str, TrainState | None]:
    """What is wrong with a checkpoint, or its state when nothing is."""
    try:
        stored = json.loads((path / STATE).read_text())
        record = {"state": stored["state"], "files": stored["files"]}
        if stored["sha256"] != _digest(record):
            return f"{STATE} does not have the checksum it states", None
        for name, expected in record["files"].items():
            if _sha256(path / name) != expected:
                return f"{name} does not have the checksum that {STATE} states", None
        return "", TrainState(**record["state"])
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}", None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE} is not a checkpoint's: {error!r}", None


def _checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = {p: NAME.fullmatch(p.name) for p in folder.glob("step-*")}
    return [p for _, p in sorted((int(match[1]), path) for path, match in found.items() if match)]


def _prune(folder: Path, newest: Path, keep: int) -> None:
    found = _checkpoints(folder)
    index = found.index(newest)
    for path in found[: max(0, index + 1 - keep)] + found[index + 1 :]:
        # Renamed first: a kill in the middle of rmtree must not leave something that looks like a checkpoint.
        doomed = folder / f".replaced.{path.name}"
        path.rename(doomed)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; nothing of it was ever a checkpoint, or is one any more."""
    for path in (*folder.glob(".writing.*"), *folder.glob(".replaced.*")):
        shutil.rmtree(path)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in _tensors(item)]


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
