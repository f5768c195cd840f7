"""Checkpoints: written atomically, verified before use, sufficient to resume bit for bit.

A checkpoint is the folder ``step-0000123``::

    head.safetensors        the head's tensors
    optimizer.safetensors   the optimisers' moments, named ``state.<parameter>.<moment>``
    rng.safetensors         random states of torch and its accelerators on every rank, such as ``rank.0.torch``
    state.json              progress, manifests of the corpora, and the sha256 of every other file and of itself

``best`` is a link to the checkpoint with the largest ``score`` in its progress. Nothing is ever unpickled.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError, one_line
from drafthead.files.local import (
    disk_errors,
    file_digest,
    fsync,
    read_checksummed_json,
    require_space,
    safe_join,
    write_checksummed_json,
)
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.devices import rng_states, set_rng_states

HEAD, OPTIMIZER, RNG, STATE = "head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"
BEST = "best"
FORMAT, READ_FORMATS = 3, (2, 3)  # 2 (drafthead 0.3.0) has more in ``state.json``, which is not read


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, on the CPU."""

    path: Path
    state: dict[str, Any]
    head: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: list[dict[str, Tensor]]  # by rank, for ``restore_rng``
    manifests: dict[str, Any]
    warnings: tuple[str, ...] = ()  # a line for every newer checkpoint, which is damaged


def capture_rng() -> dict[str, Tensor]:
    """Return the random states of torch on the host and on accelerators. Training draws from no other library."""
    return {"torch": torch.get_rng_state(), **{f"cuda.{n}": state for n, state in enumerate(rng_states())}}


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set random generators to a result of ``capture_rng``, except accelerators' if their number has changed."""
    torch.set_rng_state(state["torch"])
    set_rng_states([state[f"cuda.{n}"] for n in range(sum(name.startswith("cuda.") for name in state))])


def save_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    head: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    *,
    rng: Sequence[Mapping[str, Tensor]],
    manifests: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write the checkpoint ``folder/step-<step>`` and return its path. Call this on one process only. ``state`` is the
    progress in JSON values; its ``score``, if any, decides which checkpoint is the best. ``head`` and ``optimizer`` are
    what ``full_state_dict`` returns, ``rng`` has the ``capture_rng`` of each process by rank. All but the newest
    ``keep`` checkpoints and the best one are removed, and the link ``best`` is updated. Checkpoints of later steps are
    also removed: since the run did not resume from them, they are damaged or belong to an earlier run."""
    by_rank = {f"rank.{rank}.{name}": t for rank, states in enumerate(rng) for name, t in states.items()}
    contents = {HEAD: dict(head), OPTIMIZER: dict(optimizer), RNG: by_rank}
    size = sum(tensor.nbytes for tensors in contents.values() for tensor in tensors.values())
    require_space(folder, size + 2**20, "a checkpoint")
    with disk_errors("a checkpoint", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        tmp_path = folder / f".writing.{os.getpid()}"
        try:
            tmp_path.mkdir()
            for name, tensors in contents.items():
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name)
                fsync(tmp_path / name)
            files = {name: file_digest(tmp_path / name) for name in contents}
            record = {"format": FORMAT, "state": dict(state), "manifests": dict(manifests or {}), "files": files}
            write_checksummed_json(tmp_path / STATE, record)
            fsync(tmp_path)
        except (OSError, SafetensorError):
            shutil.rmtree(tmp_path, ignore_errors=True)  # the unfinished files would keep the disk full
            raise
        path = folder / f"step-{step:07d}"
        if path.exists():  # a folder cannot be renamed onto another one
            path.rename(folder / f".replaced.{os.getpid()}")
        tmp_path.rename(path)
        fsync(folder)
        _prune(folder, path, keep)
    return path


def load_latest(folder: Path) -> Checkpoint | None:
    """Load the newest undamaged checkpoint of ``folder``; None if there is none at all. Damaged ones are listed in
    ``warnings``. If all are damaged, raise a ``UserError``."""
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
    """Load the checkpoint with the largest score, of equal ones the latest; None if none has a score."""
    best = best_of(checkpoints(folder))
    return None if best is None else _load(best, ())


def load_weights(head: DraftHead, checkpoint: Checkpoint) -> None:
    """Load the checkpoint's weights into ``head``; raise a UserError if they belong to another head."""
    try:
        head.load_state_dict(checkpoint.head)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.path} is of another head ({reason}); start over with resume=false") from None


def _load(path: Path, warnings: tuple[str, ...]) -> Checkpoint:
    try:
        record = read_checksummed_json(safe_join(path, STATE))
        if record["format"] not in READ_FORMATS:
            raise UserError(f"{STATE} has format {record['format']!r}, this version reads {READ_FORMATS}")
        if set(record["files"]) != {HEAD, OPTIMIZER, RNG}:
            raise UserError(f"{STATE} lists the files {sorted(record['files'])}, not {HEAD}, {OPTIMIZER}, {RNG}")
        for name, expected in record["files"].items():
            if file_digest(safe_join(path, name)) != expected:
                raise UserError(f"{name} does not have the checksum that {STATE} records")
        head, optimizer, by_rank = (load_file(path / name) for name in (HEAD, OPTIMIZER, RNG))
        rng: list[dict[str, Tensor]] = [{} for name in by_rank if name.endswith(".torch")]
        for name, tensor in by_rank.items():
            _, rank, generator = name.split(".", 2)
            rng[int(rank)][generator] = tensor
        state, manifests = dict(record["state"]), dict(record["manifests"])
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{Path(error.filename or path).name}: {error.strerror}") from None
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{STATE} does not describe a checkpoint: {type(error).__name__}: {one_line(error)}") from None
    return Checkpoint(
        path=path, state=state, head=head, optimizer=optimizer, rng=rng, manifests=manifests, warnings=warnings
    )


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of the completely written checkpoints in ``folder``, by ascending step."""
    numbers = {path: path.name.removeprefix("step-") for path in folder.glob("step-*")}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))


def best_of(paths: list[Path]) -> Path | None:  # of equal scores the last; None without a score
    scores = {path: saved_state(path).get("score") for path in paths}
    measured = [path for path in reversed(paths) if isinstance(scores[path], int | float)]
    return max(measured, key=lambda path: float(scores[path] or 0), default=None)


def saved_state(path: Path) -> dict[str, Any]:
    """Return the progress in a checkpoint folder, unverified; empty if it cannot be read."""
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
    for path in (*folder.glob(".writing.*"), *folder.glob(".replaced.*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
