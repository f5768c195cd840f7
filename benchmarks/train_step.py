"""Measure a training step: tokens per second, its parts, memory, and the ratio to the base's bare forward pass.

    python benchmarks/train_step.py recipe=medusa_vicuna_7b head.own_lm_head=false shard.precision=bfloat16
    accelerate launch benchmarks/train_step.py recipe=medusa_llama3 shard=full --json step.json
    python benchmarks/train_step.py --steps 2 --warm 1 recipe=medusa_smollm2 debug=tiny        a quick test

A phase of the recipe (--phase, by default the first) runs on rows of random tokens. The base has the recipe's shape and
random weights, which do not change the times; a base without a shape is loaded. Results per device:

  tokens/s     positions read, over --steps steps after --warm uncounted ones, without synchronising inside a step
  floor        tokens/s of the base alone, an upper bound for steps that compute hidden states
  parts        seconds per step for data (waiting for rows), base (hidden states), head (loss, forward and backward) and
               optimiser (reduction, clipping, update), from other steps, synchronised after every part
  MFU          share of the device's bfloat16 peak, if known, counting only matrix products and attention
  memory       the peak of these steps, and the estimate of `mode=estimate`: allocated bytes on a GPU; on a CPU the rise
               of resident memory since the interpreter started
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from common import at_least, entry_point, parser, print_table, save_record
from loss_memory import PeakMemory

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import PackedRows, pack
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.devices import accelerator_name, device_of, peak_allocated
from drafthead.train.config import PhaseConfig, RunConfig, composed
from drafthead.train.distributed.launcher import follow_launcher
from drafthead.train.distributed.sharding import Sharding
from drafthead.train.estimate.hours import GPUS, untrained_head
from drafthead.train.estimate.memory import Estimate, size
from drafthead.train.original_base import OriginalBase
from drafthead.train.trainer.batches import PhaseData
from drafthead.train.trainer.optim import head_optimizers
from drafthead.train.trainer.step import StepResult, train_step

PARTS = ("data", "base", "head", "optimiser")
ROWS = 32
"""Least number of different rows; steps repeat them."""


class Clock:
    """Timer of the parts of a step; every mark synchronises the device."""

    def __init__(self, base: BaseModel) -> None:
        self.base, self.seconds = base, dict.fromkeys(PARTS, 0.0)

    def start(self) -> None:
        """Start a part."""
        self.base.synchronise()
        self._last = perf_counter()

    def mark(self, part: str, waited: float = 0.0) -> None:
        """End ``part``, which began at the last mark and waited ``waited`` seconds for data; start the next part."""
        self.base.synchronise()
        self.seconds[part] += perf_counter() - self._last - waited
        self.seconds["data"] += waited
        self.start()


def random_rows(phase: PhaseConfig, vocabulary: int) -> PackedRows:
    """Return full rows of random tokens, one document each, all trained."""
    random, length = np.random.default_rng(0), phase.seq_len
    count = max(ROWS, phase.rows(1))
    documents = [random.integers(0, vocabulary, length, dtype=np.int32) for _ in range(count)]
    return pack(Documents.of(documents), length, split=False)


class RandomStates(StoredStates):
    """Random hidden states on disk, for ``documents`` that the head reads."""

    ahead = 1

    def __init__(self, folder: Path, documents: Documents, head: DraftHead) -> None:
        width = head.base.hidden_size * (1 + len(head.spec.layers))
        dtype = "bfloat16" if head.base.dtype == torch.bfloat16 else "float16"
        super().__init__(folder, documents.lengths, width, dtype, {"benchmark": "train_step"})
        self._lengths = documents.lengths

    def prepare(self, documents: Sequence[int]) -> None:
        """Store random values."""
        for document in documents:
            self.write([document], [torch.randn(int(self._lengths[document]), self.width)])


class Bench:
    """One phase of a recipe, ready to train."""

    def __init__(self, run: RunConfig, phase: str, accelerator: Accelerator, sharding: Sharding, folder: Path) -> None:
        self.phase, self.accelerator, self.sharding = run.phases[phase], accelerator, sharding
        processes = accelerator.num_processes
        self.micro_batches = self.phase.micro_batches(processes, self.phase.rows(processes))
        torch.manual_seed(run.seed)
        config = replace(run.base, prepack=False) if sharding.shards_base else run.base
        self.base = BaseModel.load(config, accelerator.device)
        rows = random_rows(self.phase, self.base.vocab_size)
        self.head = untrained_head(run, self.base)
        if run.trains_base:
            self.head.train_base(now=self.phase.train_base)
        self.data = PhaseData(rows, OriginalBase.of(self.base), self.head.spec)
        if self.phase.store_hidden_states:
            self.data.store(RandomStates(folder, rows.documents, self.head), range(len(rows)))
        sharding.shard(self.head.train())
        self.optimizers = head_optimizers(self.head, self.phase.optim)

    def rows(self) -> Iterator[list[int]]:
        """Yield the row numbers of micro-batches without end."""
        numbers = cycle(range(len(self.data)))
        while True:
            yield list(islice(numbers, self.phase.micro_batch_size))

    def step(self, batches: Iterator[tuple[TrainBatch, HiddenStates]], clock: Clock | None = None) -> StepResult:
        """Run one optimiser step over the next micro-batches; ``clock`` is called at the end of each part."""
        return train_step(
            self.head,
            self.optimizers,
            islice(batches, self.micro_batches),
            self.phase.loss,
            lr=self.phase.optim.lr,
            clip_norm=self.phase.optim.clip_norm,
            reduce=lambda value: self.accelerator.reduce(value, "sum"),
            profile_hook=(lambda name: None) if clock is None else clock.mark,
        )

    def whole_steps(self, steps: int, warm: int) -> float:
        """Return seconds per step."""
        batches = self.data.stream(self.rows())
        for _ in range(warm):
            self.step(batches)
        self.base.synchronise()
        self.data.waited_s, started = 0.0, perf_counter()
        for _ in range(steps):
            self.step(batches)
        self.base.synchronise()
        return (perf_counter() - started) / steps

    def parted_steps(self, steps: int, clock: Clock) -> None:
        """Run steps that are synchronised after every part."""

        def marked() -> Iterator[tuple[TrainBatch, HiddenStates]]:
            batches = self.data.stream(self.rows())
            while True:
                before = self.data.waited_s
                batch = next(batches)
                clock.mark("base", self.data.waited_s - before)
                yield batch

        batches = marked()
        clock.start()
        for _ in range(steps):
            self.step(batches, clock)

    def bare_forward(self, steps: int, warm: int) -> float:
        """Return seconds per pass of the base over the rows of a step."""
        batches = [self.data.read(numbers)[0] for numbers in islice(self.rows(), self.micro_batches)]
        for number in range(warm + steps):
            if number == warm:
                self.base.synchronise()
                started = perf_counter()
            for batch in batches:
                self.base.hidden_states(batch, HiddenStatesSpec())
        self.base.synchronise()
        return (perf_counter() - started) / steps


def peak_operations(name: str) -> float | None:
    """Return a GPU's bfloat16 peak in operations per second, or None if its name is unknown."""
    words = name.replace("-", " ").split()
    known = [gpu for gpu in GPUS if all(word in words for word in gpu.split())]
    return 1e12 * GPUS[max(known, key=len)].tera_operations if known else None  # the longest match counts


def measure(run: RunConfig, phase: str, accelerator: Accelerator, steps: int, warm: int) -> dict[str, Any]:
    """Return the results of this process."""
    sharding = Sharding(run.shard, accelerator.device)
    before = PeakMemory.resident()
    with TemporaryDirectory(prefix="drafthead-step-") as folder:
        bench = Bench(run, phase, accelerator, sharding, Path(folder))
        step_s = bench.whole_steps(steps, warm)
        waited = bench.data.waited_s / steps
        clock = Clock(bench.base)
        if peak_allocated() is not None:
            torch.accelerator.reset_peak_memory_stats(accelerator.device)
        with PeakMemory() as memory:
            bench.parted_steps(steps, clock)
        allocated = peak_allocated()
        peak = memory.peak - before if allocated is None else allocated
        floor_s = bench.bare_forward(steps, warm)
        sharding.close()
    settings = run.phases[phase]
    tokens = settings.micro_batch_size * settings.seq_len * bench.micro_batches
    devices = accelerator.num_processes
    plan = Estimate(run, devices, int(os.environ.get("LOCAL_WORLD_SIZE", devices)), accelerator.device.type)
    operations = plan.steps()[phase].operations / (settings.micro_batch_size * settings.seq_len)  # per position
    top = peak_operations(accelerator_name() or "")
    planned = plan.total(phase)
    return {
        "phase": phase,
        "processes": devices,
        "tokens_a_step": tokens,
        "step_s": step_s,
        "tokens_per_second": tokens / step_s,
        "floor": {"forward_s": floor_s, "tokens_per_second": tokens / floor_s},
        "ratio_to_floor": floor_s / step_s,
        "data_wait": waited / step_s,
        "parts_s": {name: clock.seconds[name] / steps for name in PARTS},
        "mfu": None if top is None else tokens / step_s * operations / top,
        "memory": {"peak_bytes": peak, "planned": planned, "peak_to_plan": peak / planned},
    }


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__)
    add = options.add_argument
    add("--phase", metavar="NAME", help="a phase of the recipe; default: the first")
    add("--steps", type=int, default=10, metavar="N", help="measured steps of each kind (default 10)")
    add("--warm", type=int, default=3, metavar="N", help="uncounted steps before them (default 3)")
    add("overrides", nargs="+", metavar="key=value", help="recipe=NAME and settings, as for `drafthead train`")
    arguments = options.parse_intermixed_args(given)
    at_least(arguments, 1, "steps")
    at_least(arguments, 0, "warm")
    run = composed(arguments.overrides)
    phase = arguments.phase or next(iter(run.phases))
    if phase not in run.phases:
        raise UserError(f"the recipe has no phase {phase!r}; it has {', '.join(run.phases)}")
    if run.base.shape:
        run = replace(run, base=replace(run.base, random=True, tokenizer="builtin:tiny"))
    run = replace(run, shard=follow_launcher(run.shard))
    accelerator = Accelerator(cpu=device_of(None).type == "cpu")
    results = measure(run, phase, accelerator, arguments.steps, arguments.warm)
    if not accelerator.is_main_process:
        return
    seconds = {**results["parts_s"], "step, whole": results["step_s"], "base alone": results["floor"]["forward_s"]}
    rows = [{"part": name, "ms": 1e3 * s, "of the step": f"{s / results['step_s']:.1%}"} for name, s in seconds.items()]
    print_table(f"a training step of phase {phase}, per device of {results['processes']}", rows)
    mfu = "unknown here" if results["mfu"] is None else f"{results['mfu']:.1%}"
    print(
        f"{results['tokens_per_second']:,.0f} tokens/s, {results['ratio_to_floor']:.2f} of the base's bare forward "
        f"pass; waiting for data {results['data_wait']:.1%}; MFU {mfu}; peak memory "
        f"{results['memory']['peak_to_plan']:.2f} of the estimated {size(results['memory']['planned'])}"
    )
    save_record(arguments, "train_step", results)


if __name__ == "__main__":
    entry_point(main)
