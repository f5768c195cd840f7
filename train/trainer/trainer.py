"""The training loop: phases in order, one console line a log step, checkpoints that resume exactly."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from drafthead.data.batch import Features, TrainBatch
from drafthead.data.text.packing import digest_rows
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.eval.trees.calibrate import WIDTH, answer_ranks
from drafthead.eval.trees.simulate import Ranks, chances_of, replay
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import check_common, main_process_first
from drafthead.train.distributed.processes import Processes
from drafthead.train.distributed.sharding import Sharding, load_optimizer
from drafthead.train.tracking.metrics_log import ConsoleLine, MetricsLog
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer.batches import (
    Batch,
    PhaseData,
    StreamedPhase,
    open_held_out,
    open_phase,
    rounds,
    rows_of_rank,
)
from drafthead.train.trainer.checkpoint import undisturbed_rng
from drafthead.train.trainer.checkpoint_manager import CheckpointManager
from drafthead.train.trainer.loss_spikes import LossSpikeFilter
from drafthead.train.trainer.optim import build_optimizer, lr_at
from drafthead.train.trainer.step import StepResult, evaluate_loss, train_step


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
        sharding: Sharding | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.run, self.head, self.corpora, self.folder = run, head, corpora, folder
        self.accelerator, self.display, self.tracker = accelerator, display, tracker
        self.processes = processes or Processes(run.heartbeat_timeout_s)
        self.sharding = sharding or Sharding(run.shard, head.base.device)
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.keeper = CheckpointManager(run, head, corpora, folder, self.processes, display)
        self.position = self.keeper.position

    def train(self) -> None:
        """Run every phase that is not done, from the newest checkpoint on.

        Raises:
            UserError: too many updates had to be skipped (the last good checkpoint stays), or there is something wrong
                with the checkpoints or the corpora.
            Stopped: a signal came; everything is saved.
        """
        self.head.train()
        if self.run.trains_base:
            self.head.train_base(now=False)  # before its weights are restored
        if self.processes.rank:
            set_seed(self.run.seed + self.processes.rank)  # the heads are alike by now; their dropout must not be
        names = list(self.run.phases)
        checkpoint = self.keeper.newest()
        if checkpoint is not None:
            self.keeper.restore(checkpoint)
        if self.accelerator.is_main_process:
            self.log.truncate(self.position.total)
            if self.tracker is not None:
                self.tracker.replay(self.log.rows())
        self._place(names[self.position.phase :])
        while self.position.phase < len(names):
            name = names[self.position.phase]
            phase = self.run.phases[name]
            resumed = checkpoint if self.position.step else None
            with self.display.stage(f"phase {name}: {phase.steps} steps on {phase.corpus}"):
                if self.run.trains_base:
                    self.head.train_base(now=phase.train_base)
                optimizer = build_optimizer(self.head.parameters(), phase.optim, self.head.lr_mult)
                self.keeper.guard = LossSpikeFilter(self.run.guard, resumed.state.losses if resumed else ())
                if resumed is not None:
                    load_optimizer(optimizer, resumed.optimizer)
                self._train_phase(name, phase, optimizer)
            checkpoint = None

    def _place(self, names: list[str]) -> None:
        """Spread the weights; caches of the phases ``names`` are filled before, while one process can run the base."""
        if self.sharding.places_base:
            with main_process_first(self.accelerator, self.run.per_node_data):
                for name in names:
                    open_phase(self.corpora, name, self.run.phases[name], self.head.spec)
                open_held_out(self.corpora, self.run.answer_row_length, self.head.spec, cached=True)
        self.sharding.place(self.head)

    def _train_phase(self, name: str, phase: PhaseConfig, optimizer: torch.optim.Optimizer) -> None:
        with undisturbed_rng(), main_process_first(self.accelerator, self.run.per_node_data):
            data = open_phase(self.corpora, name, phase, self.head.spec)
            cached = phase.cached or self.sharding.places_base
            held_out = open_held_out(self.corpora, self.run.answer_row_length, self.head.spec, cached)
        if self.run.per_node_data and not isinstance(data, StreamedPhase):  # whose nodes read one source
            check_common(self.accelerator, f"phase {name}", digest_rows(data.rows))
        self.keeper.check_corpora()
        with signals.held():
            self._train_steps(name, phase, optimizer, data, held_out)

    def _train_steps(
        self, name: str, phase: PhaseConfig, optimizer: torch.optim.Optimizer, data: PhaseData, held_out: PhaseData
    ) -> None:
        batches = data.stream(self._rows(data, phase))
        line = ConsoleLine(name, phase.steps)
        pending: StepResult | None = None
        started, first = perf_counter(), self.position.step
        while self.position.step < phase.steps:
            lr = lr_at(phase.optim, self.position.step, phase.steps)
            result = self._step(phase, batches, optimizer, lr)
            if result.skip_reason is None:
                pending = result if pending is None else pending + result
            else:
                self._skipped(name, result.skip_reason)
            told = self.processes.most(signals.pending())
            last = self.position.step == phase.steps
            if pending is not None and (last or told or self.position.step % self.run.log_every == 0):
                waited, data.waited_s = data.waited_s, 0.0
                self._record(name, pending, lr, started, waited, self.position.step - first, line)
                pending, started, first = None, perf_counter(), self.position.step
            paused = perf_counter()
            better = False
            if last or (not told and self.position.step % self.run.validate_every == 0):
                better = self._validate(name, phase, held_out)
            if last or told or better or self.position.step % self.run.checkpoint.every_steps == 0:
                self.keeper.save(optimizer, end_of_phase=last)
            if told:
                raise signals.Stopped(told, f"after step {self.position.total} (over all phases), which is saved")
            started += perf_counter() - paused  # the speed that is logged is that of training alone
        self.position.phase, self.position.step = self.position.phase + 1, 0

    def _step(
        self, phase: PhaseConfig, batches: Iterator[Batch], optimizer: torch.optim.Optimizer, lr: float
    ) -> StepResult:
        self.head.progress = (self.position.step + 1) / phase.steps
        result = train_step(
            self.head,
            optimizer,
            islice(batches, rounds(self._rows_a_step(phase), phase.micro_batch_size, self.processes.count)),
            phase.loss,
            lr=lr,
            clip_norm=phase.optim.clip_norm,
            reduce=self._reduce,
            judge=self.keeper.guard.skip_reason,
        )
        self.position.step += 1
        self.position.total += 1
        self.keeper.score = None
        return result

    def _rows_a_step(self, phase: PhaseConfig) -> int:
        return self.keeper.initial_world_size * phase.accumulate * phase.micro_batch_size

    def _rows(self, data: PhaseData, phase: PhaseConfig) -> Iterator[list[int]]:
        """This process's rows of every micro-batch that is left of the phase."""
        rows, seed = self._rows_a_step(phase), self.run.seed * 1000 + self.position.phase
        for step in range(self.position.step, phase.steps):
            numbers = data.numbers(seed, step * rows, rows)
            yield from rows_of_rank(numbers, phase.micro_batch_size, self.processes.count, self.processes.rank)

    def _skipped(self, name: str, skip_reason: str) -> None:
        config = self.run.guard
        self.display.line(
            f"warning: phase {name}, step {self.position.step}: {skip_reason}; the update is skipped, "
            f"{self.keeper.guard.skipped} of at most {config.limit} among the last {config.window}"
        )
        if self.keeper.guard.too_many:
            raise self.keeper.diverged(f"{skip_reason}, and {self.keeper.guard.skipped} updates were skipped")

    def _reduce(self, value: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return value
        reduced: torch.Tensor = self.accelerator.reduce(value, "sum")
        return reduced

    def _record(
        self, name: str, result: StepResult, lr: float, started: float, waited: float, steps: int, line: ConsoleLine
    ) -> None:
        metrics = result.metrics()  # waits for the device, so the time is that of finished steps
        seconds = perf_counter() - started
        if not int(result.tokens):
            raise UserError(
                f"phase {name}, step {self.position.step}: the last {steps} steps had no token to train on, because "
                "none of their documents goes on for two tokens behind one that was read; use longer texts or answers, "
                f"or raise phases.{name}.micro_batch_size"
            )
        row: dict[str, Any] = {"phase": name, "step": self.position.step, "total_step": self.position.total, "lr": lr}
        row |= metrics
        row["tokens_per_second"] = float(result.tokens) / seconds
        row["step_ms"] = 1e3 * seconds / steps
        row["skipped"] = self.keeper.guard.skipped
        row["data_wait"] = waited / seconds
        self._publish(row)
        self.display.line(line.render(row))

    def _validate(self, name: str, phase: PhaseConfig, held_out: PhaseData) -> bool:
        """Measure acceptance on the held-out answers; returns whether it was never better."""
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
        self.sharding.settle(self.head)
        different = 1 if self.head.config.trained_positions == 1 else self.head.depth
        shown = " ".join(f"{found[f'accept_{k}']:.3f}" for k in range(1, different + 1))
        self.display.line(
            f"   held out after {self.position.step} steps: top-1 acceptance by depth {shown}; {tokens:.2f} tokens a "
            "step with a chain of all"
        )
        return self.keeper.measured(tokens)

    def _replayed_tokens(self, answers: list[Ranks]) -> float:
        """Tokens a step that greedy decoding with a chain over all positions would have had on the held-out answers."""
        chain = TokenTree.chain(self.head.depth)
        return replay([chances_of(ranks, WIDTH) for ranks in answers], chain).mean_accepted_tokens

    def _publish(self, row: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.log.write(row)
            if self.tracker is not None:
                self.tracker.log(row, step=self.position.total)
