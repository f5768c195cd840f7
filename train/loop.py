"""The training loop: phases in order, one console line a log step, checkpoints that resume exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator

from drafthead.data.contracts import Features, TrainBatch
from drafthead.data.display import Display
from drafthead.data.errors import UserError
from drafthead.data.token_tree import TokenTree
from drafthead.eval.calibrate import WIDTH, answer_ranks
from drafthead.eval.replay import Ranks, chances_of, replay
from drafthead.models.draft_head import DraftHead
from drafthead.train.checkpoint import Checkpoint, TrainState, capture_rng, load_latest, restore_rng, save_checkpoint
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora import Corpora
from drafthead.train.optim import build_optimizer, lr_at
from drafthead.train.phase_data import PhaseData, open_held_out, open_phase
from drafthead.train.step import StepResult, evaluate_loss, train_step
from drafthead.train.tracking import ConsoleLine, MetricsLog, Tracker


@dataclass
class Position:
    """Where training stands: the next step to do."""

    phase: int = 0
    step: int = 0
    total: int = 0
    """Optimiser steps done over all phases."""


class Trainer:
    """Trains one head through the phases of a run."""

    def __init__(
        self,
        run: RunConfig,
        head: DraftHead,
        corpora: Corpora,
        folder: Path,
        accelerator: Accelerator,
        display: Display,
        tracker: Tracker | None,
    ) -> None:
        self.run, self.head, self.corpora, self.folder = run, head, corpora, folder
        self.accelerator, self.display, self.tracker = accelerator, display, tracker
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.position = Position()

    def train(self) -> None:
        """Run every phase that is not done, from the newest checkpoint on.

        Raises:
            UserError: the loss is not finite (the last good checkpoint stays).
        """
        self.head.train()
        if self.run.tunes_base:
            self.head.tune_base(now=False)  # before its weights are restored
        names = list(self.run.phases)
        checkpoint = load_latest(self.folder / "checkpoints")
        if checkpoint is not None:
            for warning in checkpoint.warnings:
                self.display.line(f"warning: {warning}")
            self._restore(checkpoint)
        if self.accelerator.is_main_process:
            self.log.truncate(self.position.total)
        while self.position.phase < len(names):
            name = names[self.position.phase]
            phase = self.run.phases[name]
            with self.display.stage(f"phase {name}: {phase.steps} steps on {phase.corpus}"):
                if self.run.tunes_base:
                    self.head.tune_base(now=phase.train_base)
                optimizer = build_optimizer(self.head.parameters(), phase.optim, self.head.lr_factor)
                if checkpoint is not None and self.position.step:
                    optimizer.load_state_dict(checkpoint.optimizer)
                self._train_phase(name, phase, optimizer)
            checkpoint = None

    def _train_phase(self, name: str, phase: PhaseConfig, optimizer: torch.optim.Optimizer) -> None:
        with self.accelerator.main_process_first():  # which fills the caches that the others then find full
            data = open_phase(self.corpora, name, phase, self.head.spec)
            held_out = open_held_out(self.corpora, self.run.answer_row_length, self.head.spec, phase.cached)
        line = ConsoleLine(name, phase.steps)
        pending: StepResult | None = None
        started, first = perf_counter(), self.position.step
        while self.position.step < phase.steps:
            lr = lr_at(phase.optim, self.position.step, phase.steps)
            self.head.progress = (self.position.step + 1) / phase.steps
            micro_batches = (data.load(self._rows(data, phase, i)) for i in range(phase.accumulate))
            result = train_step(
                self.head,
                optimizer,
                micro_batches,
                phase.loss,
                lr=lr,
                clip_norm=phase.optim.clip_norm,
                reduce=self._reduce,
            )
            pending = result if pending is None else pending + result
            self.position.step += 1
            self.position.total += 1
            last = self.position.step == phase.steps
            if last or self.position.step % self.run.log_every == 0:
                self._record(name, pending, lr, started, self.position.step - first, line)
                pending, started, first = None, perf_counter(), self.position.step
            paused = perf_counter()
            if last or self.position.step % self.run.validate_every == 0:
                self._validate(name, phase, held_out)
            if last or self.position.step % self.run.checkpoint.every_steps == 0:
                self._save(optimizer, end_of_phase=last)
            started += perf_counter() - paused  # the speed that is logged is that of training alone
        self.position.phase, self.position.step = self.position.phase + 1, 0

    def _rows(self, data: PhaseData, phase: PhaseConfig, micro: int) -> list[int]:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        block = (self.position.step * phase.accumulate + micro) * world + rank
        seed = self.run.seed * 1000 + self.position.phase
        return data.numbers(seed, block * phase.batch_rows, phase.batch_rows)

    def _reduce(self, value: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return value
        reduced: torch.Tensor = self.accelerator.reduce(value, "sum")
        return reduced

    def _record(self, name: str, result: StepResult, lr: float, started: float, steps: int, line: ConsoleLine) -> None:
        metrics = result.metrics()  # waits for the device, so the time is that of finished steps
        seconds = perf_counter() - started
        if not int(result.tokens):
            raise UserError(
                f"phase {name}, step {self.position.step}: the last {steps} steps had no token to train on, because "
                "none of their documents goes on for two tokens behind one that was read; use longer texts or answers, "
                f"or raise phases.{name}.batch_rows"
            )
        if not all(map(torch.isfinite, torch.tensor([metrics["loss"], metrics["grad_norm"]]))):
            raise self._not_finite(f"the loss is {metrics['loss']} and the gradient norm {metrics['grad_norm']}")
        row: dict[str, Any] = {"phase": name, "step": self.position.step, "total_step": self.position.total, "lr": lr}
        row |= metrics
        row["tokens_per_second"] = float(result.tokens) / seconds
        row["step_ms"] = 1e3 * seconds / steps
        self._publish(row)
        self.display.line(line.render(row))

    def _validate(self, name: str, phase: PhaseConfig, held_out: PhaseData) -> None:
        self.head.eval()
        answers: list[Ranks] = []

        def batches() -> Iterator[tuple[TrainBatch, Features]]:
            for number in range(len(held_out.rows)):
                batch, features = held_out.load([number])
                answers.extend(answer_ranks(self.head, batch, features))
                yield batch, features

        found = evaluate_loss(self.head, batches(), phase.loss)
        self.head.train()
        row: dict[str, Any] = {"phase": name, "step": self.position.step, "total_step": self.position.total}
        row |= {f"held_out_{key}": value for key, value in found.items()}
        tokens = self._replayed_tokens(answers)
        row["held_out_tokens_a_step"] = tokens
        self._publish(row)
        different = 1 if self.head.config.trained_positions == 1 else self.head.depth
        shown = " ".join(f"{found[f'accept_{k}']:.3f}" for k in range(1, different + 1))
        self.display.line(
            f"   held out after {self.position.step} steps: top-1 acceptance by depth {shown}; {tokens:.2f} tokens a "
            "step with a chain of all"
        )

    def _replayed_tokens(self, answers: list[Ranks]) -> float:
        """Tokens a step that greedy decoding with a chain over all positions would have had on the held-out answers."""
        chain = TokenTree.chain(self.head.depth)
        return replay([chances_of(ranks, WIDTH) for ranks in answers], chain).mean_accepted_tokens

    def _publish(self, row: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.log.write(row)
            if self.tracker is not None:
                self.tracker.log(row, step=self.position.total)

    def _save(self, optimizer: torch.optim.Optimizer, end_of_phase: bool) -> None:
        if not self.accelerator.is_main_process:
            return
        phase, step = self.position.phase, self.position.step
        state = TrainState(
            phase=phase + 1 if end_of_phase else phase,
            step=0 if end_of_phase else step,
            global_step=self.position.total,
        )
        weights = self.head.state_dict()
        broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
        if broken:
            raise self._not_finite(f"{broken[0]} is not finite")
        save_checkpoint(
            self.folder / "checkpoints",
            state,
            weights,
            optimizer.state_dict(),
            rng=[capture_rng()],
            keep=self.run.checkpoint.keep,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.position = Position(phase=state.phase, step=state.step, total=state.global_step)
        try:
            self.head.load_state_dict(checkpoint.head)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise UserError(f"{checkpoint.path} holds another head ({first}); start over with resume=false") from None
        restore_rng(checkpoint.rng[0])
        self.display.line(f"   resuming after step {state.global_step} (over all phases) of {self.folder}")

    def _not_finite(self, found: str) -> UserError:
        name = list(self.run.phases)[self.position.phase]
        return UserError(
            f"phase {name}, step {self.position.step}: {found}; stopped, and the checkpoint before it in "
            f"{self.folder / 'checkpoints'} is kept. Lower phases.{name}.optim.lr (now "
            f"{self.run.phases[name].optim.lr}) and start over with resume=false"
        )
