"""Checkpoints: written atomically, verified before use, sufficient to resume bit for bit.

A checkpoint is the folder ``step-0000123``::

    head.safetensors        the head's tensors
    optimizer.safetensors   the tensors of the optimiser's state_dict
    rng.safetensors         the tensors of the random generators' states, of every rank
    state.json              ``TrainState``, manifests of the corpora, all values other than tensors of the states of
                            optimiser and random generators, and the sha256 of every other file and of itself

``best`` is a link to the checkpoint with the largest held-out mean accepted length. Nothing is ever unpickled.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError
from drafthead.files.local import (
    difference,
    disk_errors,
    file_digest,
    fsync,
    read_checksummed_json,
    require_space,
    safe_join,
    write_checksummed_json,
)
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.settings.schema import NonNegative, Positive
from drafthead.system.devices import rng_states, set_rng_states
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.launcher import Launch
from drafthead.train.distributed.sharding import full_state_dict


def split_tensors(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split nested dictionaries, lists and tuples into values for a JSON file and tensors for a safetensors file.

    Return ``value`` with every tensor replaced by its name, and the tensors on the CPU by name. All names start with
    ``name``. Example: ``{"a": (1, t)}`` becomes ``{"map": [["a", {"tuple": [1, {"tensor": "a.1"}]}]]}`` and
    ``{"a.1": t}``. Values of other types are a ``TypeError``.
    """
    tensors: dict[str, Tensor] = {}

    def walk(item: Any, path: str) -> Any:
        """Return ``item`` as JSON and collect its tensors under names that start with ``path``."""
        if isinstance(item, Tensor):
            tensors[path] = item.detach().cpu().contiguous()
            return {"tensor": path}
        if isinstance(item, Mapping):
            return {"map": [[key, walk(inner, f"{path}.{key}" if path else str(key))] for key, inner in item.items()]}
        if isinstance(item, list | tuple):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [walk(inner, f"{path}.{index}") for index, inner in enumerate(item)]}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise TypeError(f"the state has a {type(item).__name__} at {path!r}, which JSON cannot represent")

    return walk(value, name), tensors


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverse ``split_tensors``: return ``plain`` as nested dictionaries, lists and tuples, with its ``tensors``."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: join_tensors(inner, tensors) for key, inner in content}
    items = [join_tensors(inner, tensors) for inner in content]
    return items if kind == "list" else tuple(items)


def capture_rng() -> dict[str, Any]:
    """Return the states of this process's random generators (Python, NumPy, torch, accelerators) by library."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": rng_states(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set this process's random generators to a result of ``capture_rng``.

    Accelerators' generators are left alone if ``state`` comes from another number of accelerators.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    set_rng_states(state["cuda"])


@contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Undo the block's effect on random generators. Use it for work that a resumed run may repeat or skip."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


HEAD, OPTIMIZER, RNG, STATE = "head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"
BEST = "best"
FORMAT = 2


@pydantic_dataclass(kw_only=True, config=ConfigDict(strict=True))
class TrainState:
    """The progress of a run between two steps."""

    phase: NonNegative = 0
    """Index (from 0) of the phase that continues; the number of phases if all are finished."""
    step: NonNegative = 0
    """Optimiser steps finished in the phase: the position in its schedule and data. The command ``adapt`` counts its
    finished updates instead."""
    global_step: NonNegative = 0
    """Optimiser steps finished over all phases, as in the checkpoint's name. The command ``adapt`` counts finished
    answers instead."""
    processes: Positive = 1
    """Number of processes with which the run started. Resuming with another number keeps the rows of a step."""
    score: float | None = None
    """Held-out mean accepted length after the latest step; None if it was not measured there."""
    losses: list[float | None] = field(default_factory=list)
    """Losses of the phase's latest ``loss_spikes.window`` steps, oldest first; None for a skipped update."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, on the CPU."""

    path: Path
    state: TrainState
    head: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: list[dict[str, Any]]
    """One state per rank of the run that saved the checkpoint, for ``restore_rng``."""
    manifests: dict[str, Any]
    """Manifests of the corpora on which the head was trained, by their name."""
    warnings: tuple[str, ...] = ()
    """A line for every newer checkpoint that was skipped because it is damaged."""


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
    """Write the checkpoint ``folder/step-<global_step>`` and return its path. Call this on one process only.

    All but the newest ``keep`` checkpoints and the best one are removed, and the link ``best`` is updated. Checkpoints
    of later steps are also removed: since the run did not resume from them, they are damaged or belong to an earlier
    run.

    Args:
        folder: Folder of all checkpoints of the run.
        state: Progress of the run.
        head: State dict of the head, with full tensors instead of shards.
        optimizer: State dict of the optimiser, with full tensors instead of shards.
        rng: Results of ``capture_rng``, one per process, by rank.
        manifests: Manifests of the corpora on which the head was trained, by their name.
        keep: Number of newest checkpoints to keep.
    """
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
        tmp_path = folder / f".writing.{os.getpid()}"
        try:
            tmp_path.mkdir()
            for name, tensors in contents.items():
                save_file(tensors, tmp_path / name)
                fsync(tmp_path / name)
            files = {name: file_digest(tmp_path / name) for name in contents}
            write_checksummed_json(tmp_path / STATE, {**record, "files": files})
            fsync(tmp_path)
        except (OSError, SafetensorError):
            shutil.rmtree(tmp_path, ignore_errors=True)  # the unfinished files would keep the disk full
            raise
        path = folder / f"step-{state.global_step:07d}"
        if path.exists():  # a folder cannot be renamed onto another one
            path.rename(folder / f".replaced.{os.getpid()}")
        tmp_path.rename(path)
        fsync(folder)
        _prune(folder, path, keep)
    return path


def load_latest(folder: Path) -> Checkpoint | None:
    """Load the newest intact checkpoint of ``folder``; return None if the folder has no checkpoint.

    Damaged checkpoints (a missing file, a wrong checksum) are skipped and listed in ``Checkpoint.warnings``. If all are
    damaged, raise a ``UserError``.
    """
    paths = checkpoints(folder)
    warnings: list[str] = []
    for path in reversed(paths):
        try:
            return _load(path, tuple(warnings))
        except UserError as damage:
            warnings.append(f"checkpoint {path} is damaged ({damage}); falling back to the one before")
    if paths:
        raise UserError(
            f"every checkpoint in {folder} is damaged: {'; '.join(w.rpartition(';')[0] for w in warnings)}. "
            "Restore one from a backup, or remove the folder to train from the start"
        )
    return None


def load_best(folder: Path) -> Checkpoint | None:
    """Load the checkpoint with the largest held-out mean accepted length, of equal ones the latest.

    Return None if no checkpoint has a measured length. Raise a ``UserError`` if the best checkpoint is damaged.
    """
    best = best_of(checkpoints(folder))
    return None if best is None else _load(best, ())


def _load(path: Path, warnings: tuple[str, ...]) -> Checkpoint:
    """Load the checkpoint ``path``; raise a UserError that describes any damage."""
    try:
        record = read_checksummed_json(safe_join(path, STATE))
        if record["format"] != FORMAT:
            raise UserError(f"{STATE} has format {record['format']!r}, this version reads {FORMAT}")
        if set(record["files"]) != {HEAD, OPTIMIZER, RNG}:
            raise UserError(f"{STATE} lists the files {sorted(record['files'])}, not {HEAD}, {OPTIMIZER}, {RNG}")
        for name, expected in record["files"].items():
            if file_digest(safe_join(path, name)) != expected:
                raise UserError(f"{name} does not have the checksum that {STATE} records")
        tensors = {name: load_file(path / name) for name in record["files"]}
        return Checkpoint(
            path=path,
            state=TrainState(**record["state"]),
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
        reason = " ".join(str(error).split())  # pydantic's messages have several lines
        raise UserError(f"{STATE} does not describe a checkpoint: {type(error).__name__}: {reason}") from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of the completely written checkpoints in ``folder``, by ascending step."""
    numbers = {path: path.name.removeprefix("step-") for path in folder.glob("step-*")}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))


def best_of(paths: list[Path]) -> Path | None:
    """Return the checkpoint with the largest ``score``, of equal ones the last; None if none has a score."""
    scores = {path: saved_state(path).get("score") for path in paths}
    measured = [path for path in reversed(paths) if isinstance(scores[path], int | float)]
    return max(measured, key=lambda path: float(scores[path] or 0), default=None)


def saved_state(path: Path) -> dict[str, Any]:
    """Return the fields of the ``TrainState`` in a checkpoint folder, unverified; empty if they cannot be read."""
    try:
        state = json.loads((path / STATE).read_bytes())["content"]["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints but ``newest``, the ``keep`` - 1 before it and the best; update the link ``best``."""
    paths = checkpoints(folder)
    index = paths.index(newest)
    best = best_of(paths[: index + 1])
    for path in paths[: max(0, index + 1 - keep)] + paths[index + 1 :]:
        if path != best:
            # Rename first: a kill in the middle of rmtree must not leave a folder that looks like a checkpoint.
            path.rename(folder / f".replaced.{path.name}")
    link = folder / BEST
    if link.is_dir() and not link.is_symlink():  # the run was copied by a program that follows links
        link.rename(folder / f".replaced.{BEST}.copy")
    if best is None:
        link.unlink(missing_ok=True)
    else:  # replaced atomically
        tmp_path = folder / f".replaced.{BEST}"
        tmp_path.unlink(missing_ok=True)
        tmp_path.symlink_to(best.name)
        tmp_path.replace(link)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove files of interrupted saves and replaced checkpoints."""
    for path in (*folder.glob(".writing.*"), *folder.glob(".replaced.*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


class CheckpointManager:
    """Saving and restoring of one run's checkpoints. Create the manager on all processes at the same time."""

    def __init__(self, run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path, launch: Launch) -> None:
        self.run, self.head, self.corpora, self.folder = run, head, corpora, folder
        self.processes, self.display = launch.processes, launch.display
        self.checkpoints = folder / "checkpoints"
        self.state = TrainState(processes=self.processes.count)
        """Progress of the run, which the trainer counts and ``restore`` replaces."""
        best = best_of(checkpoints(self.checkpoints))
        self.best_score: float | None = self.processes.gather(saved_state(best)["score"] if best else None)[0]
        self._trained_on: dict[str, Any] = {}
        """Manifests of the corpora in the checkpoint from which the run resumed; empty if it did not resume."""

    def record_score(self, score: float) -> bool:
        """Record a held-out mean accepted length; return True if it is the largest of the run so far.

        All processes must call this at the same time. The score of rank 0 counts.
        """
        self.state.score = score = self.processes.gather(score)[0]  # either all processes save or none
        is_best = self.best_score is None or score > self.best_score
        self.best_score = score if is_best else self.best_score
        return is_best

    def save(self, optimizer: torch.optim.Optimizer, end_of_phase: bool) -> None:
        """Save a checkpoint on the main process; all processes must call this. Reject weights that are not finite.

        ``end_of_phase``: the phase is finished, so that a resumed run starts with the next one.
        """
        weights, optimizer_state = full_state_dict(self.head, optimizer)
        rng = self.processes.gather(capture_rng())
        if self.processes.rank:
            return
        broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
        if broken:
            raise self.diverged(f"{broken[0]} is not finite")
        state = self.state
        save_checkpoint(
            self.checkpoints,
            replace(state, phase=state.phase + 1, step=0, losses=[]) if end_of_phase else state,
            weights,
            optimizer_state,
            rng=rng,
            manifests=self.corpora.manifests,
            keep=self.run.checkpoint.keep,
        )

    def restore(self) -> Checkpoint | None:
        """Restore head, ``state`` and random generators from the newest intact checkpoint, on every process.

        Return the checkpoint, whose optimiser state the caller must load; None if there is no checkpoint.
        """
        checkpoint, processes = load_latest(self.checkpoints), self.processes
        names = processes.gather(None if checkpoint is None else checkpoint.path.name)
        odd = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if odd is not None:
            raise UserError(
                f"process 0 resumes from {names[0]}, but process {odd} from {names[odd]}: {self.checkpoints} must be "
                "one folder that all processes see; put out=... on a shared file system"
            )
        if checkpoint is None:
            return None
        for warning in checkpoint.warnings:
            self.display.line(f"warning: {warning}")
        state, saved_count = checkpoint.state, len(checkpoint.rng)
        if state.phase > len(self.run.phases):
            raise UserError(
                f"{checkpoint.path} is of a run with more phases than the {len(self.run.phases)} of this recipe; start "
                "over with resume=false"
            )
        self.state, self._trained_on = state, checkpoint.manifests
        load_weights(self.head, checkpoint)
        if processes.rank < saved_count:
            restore_rng(checkpoint.rng[processes.rank])
        else:
            set_seed(self.run.seed + state.global_step * processes.count + processes.rank)
        self.display.line(f"   resuming after step {state.global_step} (over all phases) of {self.folder}")
        if saved_count != processes.count:
            self.display.line(
                f"   on {processes.count} processes instead of {saved_count}: each step keeps its rows, divided among "
                "the new processes; sums round differently, and dropout draws other random numbers"
            )
        return checkpoint

    def check_corpora(self) -> None:
        """Raise a ``UserError`` if a corpus has changed since the checkpoint from which the run resumed."""
        for name, manifest in self.corpora.manifests.items():
            changed = difference(self._trained_on[name], manifest) if name in self._trained_on else None
            if changed is not None:
                key, saved_value, value = changed
                raise UserError(
                    f"the run in {self.folder} was trained on {name} with {key} = {saved_value}, but the corpus now "
                    f"has {value}; restore that corpus, or start over with resume=false"
                )

    def diverged(self, reason: str) -> UserError:
        """Return the error that ends a diverged run. ``reason`` says how it diverged, for the error's message."""
        name = list(self.run.phases)[self.state.phase]
        return UserError(
            f"phase {name}, step {self.state.step}: {reason}; training stopped, and {self.checkpoints} has the last "
            f"good weights. Lower phases.{name}.optim.lr (now {self.run.phases[name].optim.lr}) and start over with "
            "resume=false, or change the limits in loss_spikes"
        )


def load_weights(head: DraftHead, checkpoint: Checkpoint) -> None:
    """Load the checkpoint's weights into ``head``; raise a UserError if they belong to another head."""
    try:
        head.load_state_dict(checkpoint.head)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.path} is of another head ({reason}); start over with resume=false") from None
