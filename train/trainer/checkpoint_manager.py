"""What must outlive a process of a run: where it stands is saved, found again, and checked before it goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor

from drafthead.data.utils.config import update_names
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import difference
from drafthead.models.heads.common.contract import DraftHead
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.processes import Processes
from drafthead.train.distributed.sharding import whole
from drafthead.train.trainer.checkpoint import (
    Checkpoint,
    TrainState,
    best_score,
    capture_rng,
    load_best,
    load_latest,
    restore_rng,
    save_checkpoint,
)
from drafthead.train.trainer.loss_spikes import LossSpikeFilter


@dataclass
class TrainProgress:
    """Where training stands: the next step to do."""

    phase: int = 0
    step: int = 0
    total: int = 0
    """Optimiser steps done over all phases."""


class CheckpointManager:
    """Saves and restores one run. Made on every process at once."""

    def __init__(
        self, run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path, processes: Processes, display: Display
    ) -> None:
        self.run, self.head, self.corpora, self.folder = run, head, corpora, folder
        self.processes, self.display = processes, display
        self.checkpoints = folder / "checkpoints"
        self.position = TrainProgress()
        self.guard = LossSpikeFilter(run.guard)
        """Of the phase that is trained."""
        self.initial_world_size = processes.count
        """Processes that the run began with, which set the rows of a step."""
        self.score: float | None = None
        """Held-out tokens a step, where the latest step was measured."""
        self.best: float | None = processes.gather(best_score(self.checkpoints))[0]
        self._trained_on: dict[str, Any] = {}
        """Manifests of the corpora in the checkpoint that the run goes on from."""

    def measured(self, tokens_a_step: float) -> bool:
        """Take note of a measurement after the latest step; returns whether it was never better."""
        self.score = self.processes.gather(tokens_a_step)[0]  # one opinion, so that all save or none
        better = self.best is None or self.score > self.best
        self.best = self.score if better else self.best
        return better

    def save(self, optimizer: torch.optim.Optimizer, end_of_phase: bool) -> None:
        """Save everything that is needed to go on from here. Every process takes part, the main one writes.

        Raises:
            UserError: the disk is full, or a weight is not finite; what was saved before is kept.
        """
        weights, optimizer_state = self._full_state(optimizer)
        rng = self.processes.gather(capture_rng())
        if self.processes.rank:
            return
        broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
        if broken:
            raise self.diverged(f"{broken[0]} is not finite")
        phase, step = self.position.phase, self.position.step
        state = TrainState(
            phase=phase + 1 if end_of_phase else phase,
            step=0 if end_of_phase else step,
            global_step=self.position.total,
            processes=self.initial_world_size,
            score=self.score,
            losses=[] if end_of_phase else self.guard.losses,
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

    def _full_state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All weights and optimiser state of the head; every process calls it, the main one uses the result."""
        keep = not self.processes.rank
        return whole(self.head.state_dict(), keep), whole(optimizer.state_dict(), keep)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same one on every process.

        Raises:
            UserError: the processes see different ones.
        """
        checkpoint = load_latest(self.checkpoints)
        seen = self.processes.gather(None if checkpoint is None else checkpoint.path.name)
        odd = next((rank for rank, name in enumerate(seen) if name != seen[0]), None)
        if odd is not None:
            raise UserError(
                f"process 0 goes on from {seen[0]}, but process {odd} from {seen[odd]}: {self.checkpoints} must be one "
                "folder that all of them see; put out=... on a shared file system"
            )
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put head, position and random generators back to where ``checkpoint`` was saved.

        Raises:
            UserError: it is another run's.
        """
        for warning in checkpoint.warnings:
            self.display.line(f"warning: {warning}")
        state, now = checkpoint.state, self.processes
        if state.phase > len(self.run.phases):
            raise UserError(f"{checkpoint.path} is in phase {state.phase + 1} of another run; use resume=false")
        here = self.position
        here.phase, here.step, here.total = state.phase, state.step, state.global_step
        self.initial_world_size, self._trained_on = state.processes, checkpoint.manifests
        _load_weights(self.head, checkpoint)
        if now.rank < len(checkpoint.rng):
            restore_rng(checkpoint.rng[now.rank])
        else:
            set_seed(self.run.seed + state.global_step * now.count + now.rank)
        self.display.line(f"   resuming after step {state.global_step} (over all phases) of {self.folder}")
        if len(checkpoint.rng) != now.count:
            self.display.line(
                f"   on {now.count} processes instead of {len(checkpoint.rng)}: the same rows a step, dealt anew; sums "
                "round differently, and dropout draws other numbers"
            )

    def choose_final(self, head: DraftHead) -> None:
        """Load the best weights into the trained ``head`` where the recipe wants them, or say where they are."""
        best = load_best(self.checkpoints)
        if best is None or best.state.global_step == self.position.total:
            return
        found = f"{best.state.score:.3f} held-out tokens a step, after step {best.state.global_step} (over all phases)"
        if self.run.checkpoint.final == "best":
            _load_weights(head, best)
            self.display.line(f"   the weights are now the best ones: {found}")
        else:
            self.display.line(
                f"   the best weights ({found}) are in {best.path}; checkpoint.final=best would take them"
            )

    def check_corpora(self) -> None:
        """Refuse to go on with other data than the checkpoint was trained on.

        Raises:
            UserError: a corpus is another one; the message names what differs.
        """
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
        name = list(self.run.phases)[self.position.phase]
        return UserError(
            f"phase {name}, step {self.position.step}: {found}; stopped, and the last good weights are kept in "
            f"{self.checkpoints}. Lower phases.{name}.optim.lr (now {self.run.phases[name].optim.lr}) and start over "
            "with resume=false, or move the limits of guard"
        )


def _load_weights(head: DraftHead, checkpoint: Checkpoint) -> None:
    try:
        head.load_state_dict(checkpoint.head)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.path} holds another head ({first}); start over with resume=false") from None
