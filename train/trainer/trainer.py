"""The training loop: phases in order, a console line every ``log_every`` steps, checkpoints that resume exactly."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import set_seed
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from drafthead.data.batch import LossOutput
from drafthead.data.text.packing import PackedRows
from drafthead.errors import UserError, one_line
from drafthead.files.local import difference
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import WIDTH, Ranks, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import NonNegative, Positive
from drafthead.system.devices import unchanged_rng
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed import signals
from drafthead.train.distributed.launcher import Launch
from drafthead.train.distributed.sharding import full_state_dict, load_optimizers
from drafthead.train.tracking.metrics_log import MetricsLog, console_line
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer import checkpoint, far_positions
from drafthead.train.trainer.batches import Batch, PhaseData, open_held_out, open_phase_of, split_rows
from drafthead.train.trainer.boost import boosted, load_first
from drafthead.train.trainer.checkpoint import Checkpoint
from drafthead.train.trainer.loss_spikes import skip_reason
from drafthead.train.trainer.optim import head_optimizers, lr_at
from drafthead.train.trainer.step import StepResult, evaluate_loss, mean_metrics, train_step

VALIDATED_ROWS = 64  # of held-out answers; more would take longer than the steps between two validations
MANY_READS = 3  # of each answer; a head that is adapted to few answers learns them by heart


@pydantic_dataclass(kw_only=True, config=ConfigDict(strict=True))
class TrainState:
    """The progress of a run between two steps."""

    phase: NonNegative = 0  # index of the phase that continues; the number of phases if all are finished
    step: NonNegative = 0  # finished in the phase: the position in its schedule and data
    global_step: NonNegative = 0  # finished over all phases, as in the checkpoint's name
    processes: Positive = 1  # with which the run started; resuming with another number keeps the rows of a step
    score: float | None = None  # held-out mean accepted length after the latest step; None if not measured there
    losses: list[float | None] = field(default_factory=list)  # of the latest steps, oldest first; None: skipped


class Trainer:
    """Training of one head in all phases of a run. Every process has one; only the main process has a ``tracker``."""

    def __init__(
        self, run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path, launch: Launch, tracker: Tracker | None
    ) -> None:
        self.run, self.head, self.corpora, self.launch, self.tracker = run, head, corpora, launch, tracker
        self.processes, self.sharding, self.display = launch.processes, launch.sharding, launch.display
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.state = TrainState(processes=self.processes.count)
        best = checkpoint.best_of(checkpoint.checkpoints(self.checkpoints))
        score = checkpoint.saved_state(best)["score"] if best else None
        self.best_score: float | None = self.processes.gather(score)[0]
        self._trained_on: dict[str, Any] = {}  # manifests in the checkpoint from which the run resumed

    def train(self) -> None:
        """Train through every unfinished phase, from the newest checkpoint on. Divergence is a ``UserError``."""
        self.head.train()
        if self.processes.rank:
            set_seed(self.run.seed + self.processes.rank)  # heads are equal by now, but dropout must differ
        resumed = self._restore()
        state = self.state
        if self.launch.is_main:
            self.log.truncate(state.global_step)
            if self.tracker is not None:
                self.tracker.replay(self.log.rows())
        names = list(self.run.phases)
        self.sharding.shard(self.head)
        while state.phase < len(names):
            name = names[state.phase]
            phase = self.run.phases[name]
            batch = phase.batch_line(self.processes.count, phase.rows(self.state.processes))
            with self.display.stage(f"phase {name}: {phase.steps} steps on {phase.corpus}, {batch}"):
                if self.run.trains_base:
                    self.head.train_base(now=phase.train_base)
                optimizers = head_optimizers(self.head, phase.optim)
                if resumed is not None and state.step:
                    load_optimizers(self.head, optimizers, resumed.optimizer)
                self._train_phase(name, phase, optimizers)
            resumed = None
            state.phase, state.step, state.losses = state.phase + 1, 0, []

    def _train_phase(self, name: str, phase: PhaseConfig, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take the remaining steps of a phase, and log, validate, save and stop between them."""
        with unchanged_rng():
            data = open_phase_of(self.run, name, self.corpora, self.head.spec, self.state.processes)
            spec, stored = self.head.spec, phase.store_hidden_states
            keeps = stored or self.run.data.states.is_used
            held_out = open_held_out(self.corpora, self.run.answer_row_length, spec, keeps, most=VALIDATED_ROWS)
        if stored and not isinstance(self.head.base, BaseModel):
            self.corpora.base.drop_layers()
        if self.run.per_node_data and isinstance(data.rows, PackedRows):  # all nodes stream the same sources
            self._check_common(name, data.rows.digest)
        self._check_corpora()
        if phase.position_span is not None:
            far_positions.check_span(name, self.head, phase.position_span)
        if phase.corpus == "answers":
            reads = phase.steps * phase.rows(self.state.processes) / len(data.subset)
            twice = max(1, round(2 * phase.steps / reads))
            remark = f"; twice takes phases.{name}.steps={twice}" if self.run.init_from and reads > MANY_READS else ""
            self.display.line(f"   each answer is read {reads:,.1f} times in this phase{remark}")
        with signals.defer_signals():
            # This iterator also computes the base's hidden states, or reads them from disk.
            state, batches = self.state, data.stream(self._rows(data, phase))
            if phase.boost.head:
                first_head = load_first(phase.boost.head, self.head)
                batches = boosted(batches, first_head, self.head.depth, phase.boost.floor)
            if phase.position_span is not None:
                batches = far_positions.spread(batches, phase.position_span)
            unlogged: StepResult | None = None
            if self._is_validated(phase) and state.score is None:
                self._end_step(name, phase, held_out, optimizers)  # a signal stopped the run before its validation
            started, first = perf_counter(), state.step
            while state.step < phase.steps:
                lr = lr_at(phase.optim, state.step, phase.steps)
                result = self._step(phase, batches, optimizers, lr)
                if result.skip_reason is None:
                    unlogged = result if unlogged is None else unlogged + result
                else:
                    config, skipped = self.run.loss_spikes, state.losses.count(None)
                    self.display.line(
                        f"warning: phase {name}, step {state.step}: {result.skip_reason}; the update is skipped, "
                        f"{skipped} of at most {config.limit} among the last {config.window}"
                    )
                    if skipped > config.limit:
                        raise self._diverged(f"{result.skip_reason}, and {skipped} updates were skipped")
                stop = self._stop_signal()
                is_last = state.step == phase.steps
                if unlogged is not None and (is_last or stop or state.step % self.run.log_every == 0):
                    waited, data.waited_s = data.waited_s, 0.0
                    self._record(name, unlogged, lr, started, waited, state.step - first)
                    unlogged, started, first = None, perf_counter(), state.step
                paused = perf_counter()
                self._end_step(name, phase, held_out, optimizers, stop)
                started += perf_counter() - paused  # logged speed leaves out validation and saving

    def _is_validated(self, phase: PhaseConfig) -> bool:
        """Return True if heads are measured after the latest step."""
        step = self.state.step
        return step == phase.steps or (step > 0 and step % self.run.validate_every == 0)

    def _end_step(
        self,
        name: str,
        phase: PhaseConfig,
        held_out: PhaseData,
        optimizers: Sequence[torch.optim.Optimizer],
        stop: int = 0,
    ) -> None:
        """Validate and save after a step if it is time to; raise ``Stopped`` if a ``stop`` signal came."""
        state, is_best = self.state, False
        if not stop and self._is_validated(phase):
            is_best = self._validate(name, phase, held_out)
            stop = self._stop_signal()
        if stop or is_best or state.step == phase.steps or state.step % self.run.checkpoint.every_steps == 0:
            self._save(optimizers, end_of_phase=state.step == phase.steps and state.score is not None)
        if stop:
            raise signals.Stopped(stop, f"after step {state.global_step} (over all phases), which is saved")

    def _stop_signal(self) -> int:
        """Return the signal for which all processes are to stop, because one of them received it; 0 for none."""
        return self.processes.all_reduce_max(signals.stop_signal())

    def _check_common(self, name: str, digest: str) -> None:
        digests = self.processes.gather(digest)
        if len(set(digests)) > 1:
            raise UserError(
                f"the rows of phase {name} differ between nodes; copy data.folder, or set per_node_data=false"
            )

    def _step(
        self, phase: PhaseConfig, batches: Iterator[Batch], optimizers: Sequence[torch.optim.Optimizer], lr: float
    ) -> StepResult:
        state = self.state
        count = phase.micro_batches(self.processes.count, phase.rows(self.state.processes))
        result = train_step(
            self.head,
            optimizers,
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

    def _rows(self, data: PhaseData, phase: PhaseConfig) -> Iterator[list[int]]:
        """Yield this process's row numbers for each remaining micro-batch of the phase."""
        rows = phase.rows(self.state.processes)
        for step in range(self.state.step, phase.steps):
            numbers = data.numbers(step * rows, rows)
            yield from split_rows(numbers, phase.micro_batch_size, self.processes.count, self.processes.rank)

    def _reduce(self, value: torch.Tensor) -> torch.Tensor:
        if self.processes.count == 1:
            return value
        reduced: torch.Tensor = self.launch.accelerator.reduce(value, "sum")
        return reduced

    def _record(self, name: str, result: StepResult, lr: float, started: float, waited: float, steps: int) -> None:
        """Log ``result``, the sum of the latest ``steps`` steps, and their speed; reject steps without trained tokens.
        The steps began at the time ``started`` and waited ``waited`` seconds for data."""
        metrics = result.metrics()  # waits for the device, so the time below covers finished steps
        seconds, state = perf_counter() - started, self.state
        if not int(result.total.tokens):
            raise UserError(
                f"phase {name}, step {state.step}: short documents leave no token to train on; use longer ones"
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
        """Measure and log loss and acceptance on held-out answers; return True if the accepted length is a new best. A
        signal ends this early, without a score."""
        # Passes and the order of sums do not depend on the number of processes, so neither does the score.
        rows = max(1, phase.micro_batch_size * phase.seq_len // self.run.answer_row_length)
        passes = [held_out.subset[start : start + rows].tolist() for start in range(0, len(held_out.subset), rows)]
        count, results = self.processes.count, list[tuple[list[Ranks], LossOutput]]()
        self.head.eval()
        for first in range(0, len(passes), count):  # all processes make as many passes, because the head may be sharded
            label = f"held-out answers after {self.state.step} steps"
            if self._stop_signal():
                self.head.train()
                self.sharding.reshard(self.head)
                return False
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
        return self._record_score(length)

    def _publish(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Add phase and step to ``values``, write them to ``metrics.jsonl`` and the tracker, and return the row."""
        state = self.state
        row = {"phase": name, "step": state.step, "total_step": state.global_step, **values}
        if self.launch.is_main:
            self.log.write(row)
            if self.tracker is not None:
                self.tracker.log(row, step=state.global_step)
        return row

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def _record_score(self, score: float) -> bool:
        """Record a held-out mean accepted length; return True if it is the largest of the run so far."""
        self.state.score = score = self.processes.gather(score)[0]  # either all processes save or none
        is_best = self.best_score is None or score > self.best_score
        self.best_score = score if is_best else self.best_score
        return is_best

    def _save(self, optimizers: Sequence[torch.optim.Optimizer], end_of_phase: bool) -> None:
        """Save a checkpoint, from which a run resumes with the next phase at the ``end_of_phase``. Weights that are not
        finite are an error."""
        weights, moments = full_state_dict(self.head, optimizers)
        rng, state = self.processes.gather(checkpoint.capture_rng()), self.state
        if self.processes.rank:
            return
        broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
        if broken:
            raise self._diverged(f"{broken[0]} is not finite")
        if end_of_phase:
            state = replace(state, phase=state.phase + 1, step=0, losses=[])
        step, manifests, keep = state.global_step, self.corpora.manifests, self.run.checkpoint.keep
        checkpoint.save_checkpoint(
            self.checkpoints, step, asdict(state), weights, moments, rng=rng, manifests=manifests, keep=keep
        )

    def _restore(self) -> Checkpoint | None:
        """Restore head, ``state`` and random generators from the newest checkpoint; return it for its moments."""
        newest, processes = checkpoint.load_latest(self.checkpoints), self.processes
        names = processes.gather(None if newest is None else newest.path.name)
        odd = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if odd is not None:
            raise UserError(
                f"process 0 resumes from {names[0]}, process {odd} from {names[odd]}; put out=... on a shared disk"
            )
        if newest is None:
            return None
        for warning in newest.warnings:
            self.display.line(f"warning: {warning}")
        try:
            state = self.state = TrainState(**newest.state)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{newest.path} is not of a training run ({one_line(error)}); start over with resume=false"
            ) from None
        if state.phase > len(self.run.phases):
            raise UserError(
                f"{newest.path} is of a run with more than {len(self.run.phases)} phases; start over with resume=false"
            )
        self._trained_on, saved_count = newest.manifests, len(newest.rng)
        checkpoint.load_weights(self.head, newest)
        if processes.rank < saved_count:
            checkpoint.restore_rng(newest.rng[processes.rank])
        else:
            set_seed(self.run.seed + state.global_step * processes.count + processes.rank)
        self.display.line(f"   resuming after step {state.global_step} (over all phases) of {self.folder}")
        if saved_count != processes.count:
            self.display.line(
                f"   on {processes.count} processes instead of {saved_count}: each step keeps its rows, divided among "
                "the new processes; sums round differently, and dropout draws other random numbers"
            )
        return newest

    def _check_corpora(self) -> None:
        for name, manifest in self.corpora.manifests.items():
            changed = difference(self._trained_on[name], manifest) if name in self._trained_on else None
            if changed is not None:
                key, saved_value, value = changed
                raise UserError(
                    f"{self.folder} was trained on {name} with {key} = {saved_value}, now {value}; restore that corpus"
                )

    def _diverged(self, reason: str) -> UserError:
        name = list(self.run.phases)[self.state.phase]
        return UserError(
            f"phase {name}, step {self.state.step}: {reason}; training stopped, and {self.checkpoints} has the last "
            f"good weights. Lower phases.{name}.optim.lr (now {self.run.phases[name].optim.lr}) and start over with "
            "resume=false, or change the limits in loss_spikes"
        )
