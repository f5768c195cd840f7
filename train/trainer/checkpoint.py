"""Checkpoints: complete or absent, checked before use, all that is needed to resume bit for bit.

A checkpoint is the folder ``step-0000123``::

    head.safetensors        the head's tensors
    optimizer.safetensors   the tensors of the optimiser's state_dict
    rng.safetensors         those of the random generators' states, of every rank
    state.json              everything else (``TrainState``, manifests of the corpora, the plain parts of the two
                            states), and the sha256 of every other file and of itself

``best`` is a link to the checkpoint with the largest held-out mean accepted length. Nothing is ever unpickled.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import (
    difference,
    disk_errors,
    file_digest,
    fsync,
    read_checksummed_json,
    require_space,
    safe_join,
    write_checksummed_json,
)
from drafthead.data.utils.renamed import update_names
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.processes import Processes
from drafthead.train.distributed.sharding import full_state_dict
from drafthead.train.trainer.step import LossSpikeFilter


def split_tensors(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Nested dictionaries, lists and tuples as JSON with each tensor replaced by its name; and the tensors by name."""
    tensors: dict[str, Tensor] = {}

    def walk(item: Any, path: str) -> Any:
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


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``split_tensors``."""
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
    """Leaves the random generators as they were: for work that a resumed run does again, or not at all."""
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
    """Processes that the run started with, which set the rows of a step; other numbers may resume it."""
    score: float | None = None
    """Held-out mean accepted length, where it was measured at this very step."""
    losses: list[float | None] = field(default_factory=list)
    """Losses of the phase's latest steps, None for one whose update was skipped."""

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
    again did not resume from them (they were damaged, or belong to a run that was started anew). ``head`` and
    ``optimizer`` are full tensors; the other arguments are those of ``Checkpoint``.
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
            _write(tmp_path, record, contents)
        except (OSError, SafetensorError):
            shutil.rmtree(tmp_path, ignore_errors=True)  # it would keep the disk full
            raise
        path = folder / f"step-{state.global_step:07d}"
        if path.exists():  # a folder cannot be renamed onto another; leftovers go with the next save
            path.rename(folder / f".replaced.{os.getpid()}")
        tmp_path.rename(path)
        fsync(folder)
        _prune(folder, path, keep)
    return path


def _write(tmp_path: Path, record: dict[str, Any], contents: Mapping[str, dict[str, Tensor]]) -> None:
    tmp_path.mkdir()
    for name, tensors in contents.items():
        save_file(tensors, tmp_path / name)
        fsync(tmp_path / name)
    write_checksummed_json(
        tmp_path / STATE, {**record, "files": {name: file_digest(tmp_path / name) for name in contents}}
    )
    fsync(tmp_path)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint of ``folder``; None when there is none at all.

    A damaged one (a missing file, another checksum) is skipped and named in ``Checkpoint.warnings``.
    """
    found = checkpoints(folder)
    warnings: list[str] = []
    for path in reversed(found):
        try:
            return _load(path, tuple(warnings))
        except UserError as damage:
            warnings.append(f"checkpoint {path} is damaged ({damage}); falling back to the one before")
    if found:
        raise UserError(
            f"every checkpoint in {folder} is damaged: {'; '.join(w.rpartition(';')[0] for w in warnings)}. "
            "Restore one from a backup, or remove the folder to train from the start"
        )
    return None


def load_best(folder: Path) -> Checkpoint | None:
    """The checkpoint with the largest held-out mean accepted length (the latest of equals); None without any."""
    best = best_of(checkpoints(folder))
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
        raise UserError(f"{STATE} is not a checkpoint's: {error!r}") from None


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = {p: NAME.fullmatch(p.name) for p in folder.glob("step-*")}
    return [p for _, p in sorted((int(match[1]), path) for path, match in found.items() if match)]


def best_of(found: list[Path]) -> Path | None:
    """The best of some checkpoints, oldest first; None when none was measured."""
    scores = {path: saved_state(path).get("score") for path in found}
    measured = [path for path in reversed(found) if isinstance(scores[path], int | float)]
    return max(measured, key=lambda path: float(scores[path] or 0), default=None)


def saved_state(path: Path) -> dict[str, Any]:
    """The counters and the score of the checkpoint ``path``, unchecked; empty where it is damaged."""
    try:
        found = json.loads((path / STATE).read_bytes())["content"]["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _prune(folder: Path, newest: Path, keep: int) -> None:
    found = checkpoints(folder)
    index = found.index(newest)
    best = best_of(found[: index + 1])
    for path in found[: max(0, index + 1 - keep)] + found[index + 1 :]:
        if path != best:
            # Renamed first: a kill in the middle of rmtree must not leave something that looks like a checkpoint.
            path.rename(folder / f".replaced.{path.name}")
    _link_best(folder, best)
    _remove_leftovers(folder)


def _link_best(folder: Path, best: Path | None) -> None:
    """Point the link ``best`` at ``best``, in one step."""
    link = folder / BEST
    if link.is_dir() and not link.is_symlink():  # a copy of the run, made by what follows links
        link.rename(folder / f".replaced.{BEST}.copy")
    if best is None:
        link.unlink(missing_ok=True)
        return
    tmp_path = folder / f".replaced.{BEST}"
    tmp_path.unlink(missing_ok=True)
    tmp_path.symlink_to(best.name)
    tmp_path.replace(link)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; nothing of it was ever a checkpoint, or is one any more."""
    for path in (*folder.glob(".writing.*"), *folder.glob(".replaced.*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


@dataclass
class TrainProgress:
    """Where training is: the next step to do."""

    phase: int = 0
    step: int = 0
    total_steps: int = 0
    """Optimiser steps done over all phases."""


class CheckpointManager:
    """Saves and restores one run. Made on every process at once."""

    def __init__(
        self, run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path, processes: Processes, display: Display
    ) -> None:
        self.run, self.head, self.corpora, self.folder = run, head, corpora, folder
        self.processes, self.display = processes, display
        self.checkpoints = folder / "checkpoints"
        self.progress = TrainProgress()
        self.loss_spikes = LossSpikeFilter(run.loss_spikes)
        """Of the phase that is trained."""
        self.initial_world_size = processes.count
        """Processes that the run started with, which set the rows of a step."""
        self.score: float | None = None
        """Held-out mean accepted length, where it was measured after the latest step."""
        best = best_of(checkpoints(self.checkpoints))
        self.best_score: float | None = processes.gather(saved_state(best)["score"] if best else None)[0]
        self._trained_on: dict[str, Any] = {}
        """Manifests of the corpora in the checkpoint that the run resumed from."""

    def record_score(self, score: float) -> bool:
        """Remember a measurement after the latest step; returns whether it was never better."""
        self.score = self.processes.gather(score)[0]  # all processes must save, or none
        better = self.best_score is None or self.score > self.best_score
        self.best_score = self.score if better else self.best_score
        return better

    def save(self, optimizer: torch.optim.Optimizer, end_of_phase: bool) -> None:
        """Save all that is needed to resume from here. Every process takes part, the main one writes."""
        weights, optimizer_state = full_state_dict(self.head, optimizer)
        rng = self.processes.gather(capture_rng())
        if self.processes.rank:
            return
        broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
        if broken:
            raise self.diverged(f"{broken[0]} is not finite")
        progress = self.progress
        state = TrainState(
            phase=progress.phase + end_of_phase,
            step=0 if end_of_phase else progress.step,
            global_step=progress.total_steps,
            processes=self.initial_world_size,
            score=self.score,
            losses=[] if end_of_phase else self.loss_spikes.losses,
        )
        save_checkpoint(
            self.checkpoints,
            state,
            weights,
            optimizer_state,
            rng=rng,
            manifests=self.corpora.manifests,
            keep=self.run.checkpoint.keep,
        )

    def restore(self) -> Checkpoint | None:
        """Put head, progress and random generators back to the newest intact checkpoint, the same on every process."""
        found, processes = load_latest(self.checkpoints), self.processes
        seen = processes.gather(None if found is None else found.path.name)
        odd = next((rank for rank, name in enumerate(seen) if name != seen[0]), None)
        if odd is not None:
            raise UserError(
                f"process 0 resumes from {seen[0]}, but process {odd} from {seen[odd]}: {self.checkpoints} must be one "
                "folder that all of them see; put out=... on a shared file system"
            )
        if found is None:
            return None
        for warning in found.warnings:
            self.display.line(f"warning: {warning}")
        state = found.state
        if state.phase > len(self.run.phases):
            raise UserError(f"{found.path} is in phase {state.phase + 1} of another run; use resume=false")
        self.progress = TrainProgress(state.phase, state.step, state.global_step)
        self.initial_world_size, self._trained_on = state.processes, found.manifests
        load_weights(self.head, found)
        if processes.rank < len(found.rng):
            restore_rng(found.rng[processes.rank])
        else:
            set_seed(self.run.seed + state.global_step * processes.count + processes.rank)
        self.display.line(f"   resuming after step {state.global_step} (over all phases) of {self.folder}")
        if len(found.rng) != processes.count:
            self.display.line(
                f"   on {processes.count} processes instead of {len(found.rng)}: the same rows a step, split anew; "
                "sums round differently, and dropout draws other numbers"
            )
        return found

    def check_corpora(self) -> None:
        """Refuse to resume with other data than the checkpoint was trained on."""
        for name, manifest in self.corpora.manifests.items():
            different = difference(update_names(self._trained_on[name]), manifest) if name in self._trained_on else None
            if different is not None:
                key, was, found = different
                raise UserError(
                    f"the run in {self.folder} was trained on {name} with {key} = {was}, which now has {found}; "
                    "restore that corpus, or start over with resume=false"
                )

    def diverged(self, found: str) -> UserError:
        """The error that ends a run which does not learn any more."""
        name = list(self.run.phases)[self.progress.phase]
        return UserError(
            f"phase {name}, step {self.progress.step}: {found}; stopped, and the last good weights are kept in "
            f"{self.checkpoints}. Lower phases.{name}.optim.lr (now {self.run.phases[name].optim.lr}) and start over "
            "with resume=false, or move the limits in loss_spikes"
        )


def load_weights(head: DraftHead, checkpoint: Checkpoint) -> None:
    """Load the head's weights; one line says so when it is another head."""
    try:
        head.load_state_dict(checkpoint.head)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.path} holds another head ({first}); start over with resume=false") from None
