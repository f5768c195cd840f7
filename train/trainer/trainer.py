"""The training loop: phases in order, a console line every ``log_every`` steps, checkpoints that resume exactly."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import set_seed

from drafthead.data.batch import LossOutput
from drafthead.data.text.packing import PackedRows
from drafthead.errors import UserError
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import WIDTH, Ranks, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import Launch
from drafthead.train.distributed.sharding import load_optimizer
from drafthead.train.tracking.metrics_log import MetricsLog, console_line
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer.batches import Batch, PhaseData, open_held_out, open_phase, split_rows
from drafthead.train.trainer.boost import boosted, load_first
from drafthead.train.trainer.checkpoint import CheckpointManager, undisturbed_rng
from drafthead.train.trainer.loss_spikes import skip_reason
from drafthead.train.trainer.optim import head_optimizer, lr_at
from drafthead.train.trainer.step import StepResult, evaluate_loss, mean_metrics, train_step


class Trainer:
    """Training of one head in all phases of a run. Every process has one; only the main process has a ``tracker``."""

    def __init__(
        self, run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path, launch: Launch, tracker: Tracker | None
    ) -> None:
        self.run, self.head, self.corpora, self.launch, self.tracker = run, head, corpora, launch, tracker
        self.processes, self.sharding, self.display = launch.processes, launch.sharding, launch.display
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.checkpoints = CheckpointManager(run, head, corpora, folder, launch)

    def train(self) -> None:
        """Train through every unfinished phase, from the newest checkpoint on. Divergence is a ``UserError``."""
        self.head.train()
        if self.processes.rank:
            set_seed(self.run.seed + self.processes.rank)  # heads are equal by now, but dropout must differ
        checkpoint = self.checkpoints.restore()
        state = self.state = self.checkpoints.state
        if self.launch.is_main:
            self.log.truncate(state.global_step)
            if self.tracker is not None:
                self.tracker.replay(self.log.rows())
        names = list(self.run.phases)
        if self.sharding.shards_base:  # store hidden states while a process can still run the base
            for name in names[state.phase :]:
                self._open(name)
            open_held_out(self.corpora, self.run.answer_row_length, self.head.spec, stored=True)
        self.sharding.shard(self.head)
        while state.phase < len(names):
            name = names[state.phase]
            phase = self.run.phases[name]
            batch = phase.batch_line(self.processes.count, phase.rows(self.state.processes))
            with self.display.stage(f"phase {name}: {phase.steps} steps on {phase.corpus}, {batch}"):
                if self.run.trains_base:
                    self.head.train_base(now=phase.train_base)
                optimizer = head_optimizer(self.head, phase.optim)
                if checkpoint is not None and state.step:
                    load_optimizer(self.head, optimizer, checkpoint.optimizer)
                self._train_phase(name, phase, optimizer)
            checkpoint = None
            state.phase, state.step, state.losses = state.phase + 1, 0, []

    def _train_phase(self, name: str, phase: PhaseConfig, optimizer: torch.optim.Optimizer) -> None:
        """Take the remaining steps of a phase, and log, validate, save and stop between them."""
        with undisturbed_rng():
            data = self._open(name)
            stored = phase.store_hidden_states or self.sharding.shards_base
            held_out = open_held_out(self.corpora, self.run.answer_row_length, self.head.spec, stored)
        if self.run.per_node_data and isinstance(data.rows, PackedRows):  # all nodes stream the same sources
            self._check_common(name, data.rows.digest)
        self.checkpoints.check_corpora()
        if phase.corpus == "answers":
            reads = phase.steps * phase.rows(self.state.processes) / len(data.subset)
            self.display.line(f"   each answer is read {reads:,.1f} times in this phase")
        with signals.defer_signals():
            # This iterator also computes the base's hidden states, or reads them from disk.
            state, batches = self.state, data.stream(self._rows(data, phase))
            if phase.boost.head:
                first_head = load_first(phase.boost.head, self.head)
                batches = boosted(batches, first_head, self.head.depth, phase.boost.floor)
            unlogged: StepResult | None = None
            started, first = perf_counter(), state.step
            while state.step < phase.steps:
                lr = lr_at(phase.optim, state.step, phase.steps)
                result = self._step(phase, batches, optimizer, lr)
                if result.skip_reason is None:
                    unlogged = result if unlogged is None else unlogged + result
                else:
                    config, skipped = self.run.loss_spikes, state.losses.count(None)
                    self.display.line(
                        f"warning: phase {name}, step {state.step}: {result.skip_reason}; the update is skipped, "
                        f"{skipped} of at most {config.limit} among the last {config.window}"
                    )
                    if skipped > config.limit:
                        raise self.checkpoints.diverged(f"{result.skip_reason}, and {skipped} updates were skipped")
                stop = self.processes.all_reduce_max(signals.stop_signal())
                is_last = state.step == phase.steps
                if unlogged is not None and (is_last or stop or state.step % self.run.log_every == 0):
                    waited, data.waited_s = data.waited_s, 0.0
                    self._record(name, unlogged, lr, started, waited, state.step - first)
                    unlogged, started, first = None, perf_counter(), state.step
                paused = perf_counter()
                is_best = False
                if is_last or (not stop and state.step % self.run.validate_every == 0):
                    is_best = self._validate(name, phase, held_out)
                if is_last or stop or is_best or state.step % self.run.checkpoint.every_steps == 0:
                    self.checkpoints.save(optimizer, end_of_phase=is_last)
                if stop:
                    raise signals.Stopped(stop, f"after step {state.global_step} (over all phases), which is saved")
                started += perf_counter() - paused  # logged speed leaves out validation and saving

    def _check_common(self, name: str, digest: str) -> None:
        """Raise a ``UserError`` if the packed rows of phase ``name`` differ between processes, by their ``digest``."""
        digests = self.processes.gather(digest)
        if len(set(digests)) > 1:
            raise UserError(
                f"the rows of phase {name} differ between processes ({', '.join(digests)}): per_node_data=true "
                "made different corpora. Copy data.folder from one node to the others, or share one folder "
                "with per_node_data=false"
            )

    def _step(
        self, phase: PhaseConfig, batches: Iterator[Batch], optimizer: torch.optim.Optimizer, lr: float
    ) -> StepResult:
        state = self.state
        count = phase.micro_batches(self.processes.count, phase.rows(self.state.processes))
        result = train_step(
            self.head,
            optimizer,
            islice(batches, count),
            phase.loss,
            lr=lr,
            clip_norm=phase.optim.clip_norm,
            share_done=(state.step + 1) / phase.steps,
            reduce=self._reduce,
            should_skip=partial(skip_reason, self.run.loss_spikes, state.losses),
        )
        # The score belongs to the step before.
        state.step, state.global_step, state.score = state.step + 1, state.global_step + 1, None
        return result

    def _open(self, name: str) -> PhaseData:
        """Open the rows of the phase ``name``. Hidden states are stored only for rows that the phase's steps use."""
        phase = self.run.phases[name]
        seed = self.run.seed * 1000 + list(self.run.phases).index(name)
        return open_phase(
            self.corpora, phase, self.head.spec, seed, num_rows=phase.steps * phase.rows(self.state.processes)
        )

    def _rows(self, data: PhaseData, phase: PhaseConfig) -> Iterator[list[int]]:
        """Yield this process's row numbers for each remaining micro-batch of the phase."""
        rows = phase.rows(self.state.processes)
        for step in range(self.state.step, phase.steps):
            numbers = data.numbers(step * rows, rows)
            yield from split_rows(numbers, phase.micro_batch_size, self.processes.count, self.processes.rank)

    def _reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes."""
        if self.processes.count == 1:
            return value
        reduced: torch.Tensor = self.launch.accelerator.reduce(value, "sum")
        return reduced

    def _record(self, name: str, result: StepResult, lr: float, started: float, waited: float, steps: int) -> None:
        """Log ``result``, the sum of the latest ``steps`` steps, and their speed; reject steps without trained tokens.

        The steps began at the time ``started`` and waited ``waited`` seconds for data.
        """
        metrics = result.metrics()  # waits for the device, so the time below covers finished steps
        seconds, state = perf_counter() - started, self.state
        if not int(result.total.tokens):
            raise UserError(
                f"phase {name}, step {state.step}: the last {steps} steps had no token to train on. A target is at "
                "least two tokens after its anchor, and no document is long enough; use longer texts or answers, or "
                f"raise the rows of a step (phases.{name}.rows_per_step or micro_batch_size)"
            )
        values: dict[str, Any] = {
            "lr": lr,
            **metrics,
            "tokens_per_second": float(result.total.tokens) / seconds,
            "step_ms": 1e3 * seconds / steps,
            "skipped": state.losses.count(None),
            "data_wait": waited / seconds,
        }
        row = self._publish(name, values)
        self.display.line(console_line(row, self.run.phases[name].steps))

    def _validate(self, name: str, phase: PhaseConfig, held_out: PhaseData) -> bool:
        """Measure and log loss and acceptance on held-out answers; return True if the accepted length is a new best."""
        # Passes and the order of sums do not depend on the number of processes, so neither does the score.
        rows = max(1, phase.micro_batch_size * phase.seq_len // self.run.answer_row_length)
        passes = [list(range(start, min(start + rows, len(held_out)))) for start in range(0, len(held_out), rows)]
        count, results = self.processes.count, list[tuple[list[Ranks], LossOutput]]()
        self.head.eval()
        for first in range(0, len(passes), count):  # all processes make as many passes, because the head may be sharded
            label = f"held-out answers after {self.state.step} steps"
            self.display.progress(label, first, len(passes), after=10.0)
            batch, base_hidden = held_out.load(passes[(first + self.processes.rank) % len(passes)])
            ranks = answer_ranks(self.head, batch, base_hidden)
            results.append((ranks, evaluate_loss(self.head, batch, base_hidden, phase.loss)))
        self.head.train()
        in_order = [result for round_ in zip(*self.processes.gather(results), strict=True) for result in round_]
        answers = [ranks for each, _ in in_order[: len(passes)] for ranks in each]
        metrics = mean_metrics([output for _, output in in_order[: len(passes)]])
        # The score is the mean accepted length of greedy decoding with a chain over all draft positions.
        probs = [accept_probs_of_ranks(ranks, WIDTH) for ranks in answers]
        length = simulate_acceptance(probs, TokenTree.chain(self.head.depth)).mean_accepted_length
        self._publish(name, {f"held_out_{k}": v for k, v in {**metrics, "mean_accepted_length": length}.items()})
        self.sharding.reshard(self.head)
        depth = 1 if self.head.config.trained_positions == 1 else self.head.depth
        acceptance = " ".join(f"{metrics[f'accept_{k}']:.3f}" for k in range(1, depth + 1))
        self.display.line(
            f"   held out after {self.state.step} steps: top-1 acceptance by depth {acceptance}; mean accepted length "
            f"{length:.2f} with a chain of {self.head.depth}, on {len(answers)} answers"
        )
        return self.checkpoints.record_score(length)

    def _publish(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Add phase and step to ``values``, write them to ``metrics.jsonl`` and the tracker, and return the row."""
        state = self.state
        row = {"phase": name, "step": state.step, "total_step": state.global_step, **values}
        if self.launch.is_main:
            self.log.write(row)
            if self.tracker is not None:
                self.tracker.log(row, step=state.global_step)
        return row
