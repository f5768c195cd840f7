"""Hours of a run (``mode=estimate``): calculated for known GPUs, and from a few real steps on this machine."""

import os
import random
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from rich.console import Group
from rich.table import Table

from drafthead.data.embedded.packages import smollm2_path
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import one_row
from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.base.base_model import BaseModel, restore_kernels
from drafthead.models.base.layers import reading_copy
from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.devices import chosen_device, device_of, memory, peak_memory, synchronise
from drafthead.system.display import Display, duration
from drafthead.train.config import RunConfig
from drafthead.train.corpora.states import PASS_TOKENS
from drafthead.train.distributed.launcher import with_launcher_settings
from drafthead.train.distributed.sharding import Sharding
from drafthead.train.estimate.duration import StageDurations
from drafthead.train.estimate.fake_step import micro_batches
from drafthead.train.estimate.memory import Estimate, render, size
from drafthead.train.estimate.server import server_table
from drafthead.train.preflight import check_sources
from drafthead.train.trainer.optim import head_optimizers
from drafthead.train.trainer.step import train_step


class Gpu(NamedTuple):
    """Specifications of a GPU, as its vendor states them."""

    tera_operations: float  # dense bfloat16 operations per second, in units of 10**12
    bandwidth: float  # bytes per second, in units of 10**9
    gigabytes: int  # of 10**9 bytes


GPUS = {
    "A10": Gpu(125, 600, 24),
    "L4": Gpu(121, 300, 24),
    "RTX 4090": Gpu(165, 1008, 24),
    "L40S": Gpu(362, 864, 48),
    "A100": Gpu(312, 2039, 80),
    "H100 PCIe": Gpu(756, 2000, 80),
    "H100": Gpu(989, 3350, 80),
    "H200": Gpu(989, 4800, 141),
    "B200": Gpu(2250, 8000, 180),
}
SHARE = 0.4  # assumed share of a GPU's peak that training reaches
MOST_OPERATIONS = 5e12  # of a micro-batch whose steps are measured on a CPU; others would take minutes
TOO_SHORT = 60.0  # seconds on an A10, below which set-up on a GPU takes longer than the run
STEPS = 3  # to measure; the fastest counts
STEPS_TO_FILL_HEAP = 24  # after which the memory of a training on a CPU hardly grows
PASSES_TO_FILL_HEAP = 6  # of computing hidden states, likewise


def gpu_seconds(plan: Estimate, gpu: Gpu) -> dict[str, float]:
    """Return the least seconds of each phase, and of "answers" if the built-in decoding makes them, on such GPUs. The
    time of training is that of its matrix products. The time of a decoding step is that of its matrix products or of
    reading all weights once, if that is longer."""
    speed, seconds = gpu.tera_operations * 1e12 * SHARE * plan.devices, {}
    config = plan.data.answers
    if config.decoded_here and plan.data.uses_answers:
        answers = config.prompts + config.self_prompted
        steps = answers * config.sampler.max_new_tokens / config.batch_size / plan.devices
        products = 2 * plan.base.model.num_parameters() * config.batch_size / speed * plan.devices
        seconds["answers"] = steps * max(products, plan.base_bytes / (gpu.bandwidth * 1e9))
    return seconds | {name: plan.operations(name) / speed for name in plan.phases}


def steps_that_fit(hours: float, seconds: dict[str, float], plan: Estimate) -> int:
    """Return the steps of the last phase with which a run of stages ``seconds`` takes ``hours``, at least 0."""
    name, phase = list(plan.phases.items())[-1]
    left = hours * 3600 - sum(seconds.values()) + seconds[name]
    return max(0, int(left * phase.steps / seconds[name]))


def no_step_fits(hours: float, plan: Estimate) -> str:
    rest = f"0 steps: the rest of the run leaves no time for {list(plan.phases)[-1]} in {hours:g} h"
    return f"{rest}; lower data.answers.prompts or the steps of other phases"


def gpu_table(plan: Estimate, hours: float | None) -> Group:
    """Return a table of a run's least time on each of ``GPUS``, and the steps with which it takes ``hours``."""
    title = f"time on {plan.devices} of these GPUs, by arithmetic ({SHARE:.0%} of the peak): at least"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    reason: list[str] = []
    rows = {name: gpu_seconds(plan, gpu) for name, gpu in GPUS.items()}
    table.add_column("h:mm:ss", min_width=18)
    for column in [*rows["A10"], "all", *([f"steps in {hours:g} h"] if hours else [])]:
        table.add_column(column, justify="right", min_width=10)
    needed = max(plan.total(name) for name in plan.phases)
    for name, seconds in rows.items():
        title = f"{name}, {GPUS[name].gigabytes} GB"
        if needed >= 0.9 * GPUS[name].gigabytes * 10**9 - 2**30:  # 10 % and 1 GiB stay free
            table.add_row(title, "too small")
            continue
        cells = [duration(value) for value in (*seconds.values(), sum(seconds.values()))]
        if hours:
            cells.append(f"{steps_that_fit(hours, seconds, plan):,}")
            reason = [no_step_fits(hours, plan)] if cells[-1] == "0" else reason
        table.add_row(title, *cells)
    return Group(table, *reason)


def base_for_times(run: RunConfig, **changes: Any) -> BaseModel:
    """Load the run's base; instead of downloading a base of known shape, make one with random weights."""
    config = replace(run.base, **changes)
    if config.shape and not _is_at_hand(config):
        config = replace(config, random=True, tokenizer="builtin:tiny")
    return BaseModel.load(config)


def untrained_head(run: RunConfig, base: BaseParts) -> DraftHead:
    """Return a new head of a run. No corpus tells the frequent ids, so the first ids are its draft vocabulary."""
    config = run.head_config()
    drafted = torch.arange(config.drafted_ids(base.vocab_size)) if config.draft_vocab_size else None
    return config.build(base, drafted, start=isinstance(base, BaseModel))


def measured_step(run: RunConfig, base: BaseParts, plan: Estimate, display: Display) -> dict[str, float]:
    """Train a new head on random tokens; return the seconds of a step of one full micro-batch, by phase. The trained
    share varies, as in a run, because the heap of a CPU grows with the number of different sizes."""
    draw = random.Random(0)
    sharding = Sharding(run.shard, base.device)
    head = untrained_head(run, base)
    if run.trains_base:
        head.train_base(now=False)
    sharding.shard(head.train())
    fastest = {}
    for name, phase in run.phases.items():
        if run.trains_base:
            head.train_base(now=phase.train_base)
        optimizers, seconds = head_optimizers(head, phase.optim), []
        count = STEPS_TO_FILL_HEAP if plan.device == "cpu" else STEPS
        for step in range(count):
            display.progress(f"measuring steps of {name} on this machine", step, count)
            synchronise(base.device)
            started = perf_counter()
            share = plan.trained_share(name)
            share = share if step < STEPS else draw.uniform(share, 1)  # prompts are often shorter than their limit
            batches, clip = micro_batches(head, phase, share), phase.optim.clip_norm
            train_step(head, optimizers, batches, phase.loss, lr=1e-5, clip_norm=clip)
            synchronise(base.device)
            seconds.append(perf_counter() - started)
        fastest[name] = min(seconds[:STEPS])
    sharding.close()
    return fastest


def read_documents(base: BaseModel, plan: Estimate, display: Display) -> None:
    """Compute hidden states as before a training, in passes of different sizes, for each of which the heap grows."""
    draw, reader = random.Random(0), reading_copy(base)
    longest = min(max(phase.seq_len for phase in plan.phases.values()), base.max_context)
    for number in range(PASSES_TO_FILL_HEAP):
        display.progress("measuring the memory of computing hidden states", number, PASSES_TO_FILL_HEAP)
        lengths = list[int]()
        while not lengths or sum(lengths) + longest <= PASS_TOKENS:
            lengths.append(draw.randint(1 + longest // 8, longest))
        documents = Documents.of([np.zeros(length, np.int32) for length in lengths])
        reader.hidden_states(one_row(documents, [*range(len(lengths))]), plan.head.spec)


def why_not_measured(run: RunConfig, plan: Estimate) -> str:  # empty if they can be measured
    free, _ = memory()
    needed = max(plan.total(name) for name in plan.phases)
    if plan.devices > 1:
        return "it needs several devices; start one process to measure its share"
    if not _is_at_hand(run.base):
        return f"{run.base.name} is not on this machine (sizes are the recipe's; base.random=true takes random weights)"
    if needed > free:
        return f"a step needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    if plan.device == "cpu" and any(step.operations > MOST_OPERATIONS for step in plan.steps().values()):
        return "a step would take minutes on this CPU"
    return ""


def _is_at_hand(base: BaseConfig) -> bool:
    if base.random or base.name == EMBEDDED:
        return base.random or smollm2_path().exists()
    files = ("model.safetensors", "model.safetensors.index.json")
    if Path(base.name).is_dir():
        return True
    try:
        cached = [try_to_load_from_cache(base.name, name, revision=base.revision or "main") for name in files]
    except HFValidationError:  # the path of a folder that does not exist
        return False
    return any(isinstance(path, str) for path in cached)


def print_estimate(run: RunConfig) -> None:
    """Print memory, disk and hours of a run on as many processes as the launcher started. Only rank 0 prints."""
    if os.environ.get("RANK", "0") != "0":
        return
    check_sources(run)
    display = Display()
    console = display.console
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    run = replace(run, shard=with_launcher_settings(os.environ, run.shard))
    chosen, per_node = chosen_device(), int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    plan = local = Estimate(run, devices, per_node, device_of(None).type)
    reason = why_not_measured(run, local)
    # A run that this CPU cannot train is for a GPU elsewhere, unless the user chose the CPU.
    if chosen is None and local.device == "cpu" and reason:
        plan = Estimate(run, devices, per_node, "cuda")
    device = plan.device
    base = run.base.name or run.base.transformers_config().model_type
    dtype = str(plan.base.dtype).removeprefix("torch.") if run.base.dtype == "auto" else run.base.dtype
    where = "a CPU" if device == "cpu" else device if plan is local else "GPUs (for a CPU add device=cpu)"
    console.print(f"{run.name}: {base} in {dtype} on {where}", style="bold")
    for name, phase in run.phases.items():
        rows = plan.rows_per_step(name)
        console.print(f"{name}: {phase.batch_line(devices, rows)}, {rows * phase.seq_len:,} tokens")
    console.print(render(plan))
    if device == "cpu":
        console.print(f"free memory on this machine: {size(memory()[0])}")
    elif sum(gpu_seconds(plan, GPUS["A10"]).values()) > TOO_SHORT:
        console.print(gpu_table(plan, run.hours))
    if run.data.states.url or run.data.answers.server.url:
        console.print(server_table(plan, GPUS, SHARE))
    if reason:
        console.print(f"time on this machine: not measured, because {reason}")
        return
    for line in machine_lines(run, local, display):
        console.print(line)


def machine_lines(run: RunConfig, plan: Estimate, display: Display) -> list[Table | str]:
    display.line(f"   loading {run.base.name or 'the base'} to measure its steps")
    if not (on_parts := plan.without_layers == {*plan.phases}):
        base = BaseModel.load(run.base)
        seconds = measured_step(run, base, plan, display)
        training = peak_memory()
    else:
        parts = BaseParts.of_checkpoint(run.base)
        seconds = measured_step(
            run, parts if restore_kernels(parts) else BaseModel.load(run.base).parts(), plan, display
        )
        training = peak_memory()
        base = BaseModel.load(run.base)
    stages = StageDurations(run, base, 1, seconds)
    lines: list[Table | str] = [stages.table(f"time on this machine, from {STEPS} real steps of each phase")]
    # The tables above are computed; a CPU has packed copies of its weights.
    if not on_parts:
        weights = f"{size(plan.base_bytes)} of base weights in {str(base.dtype).removeprefix('torch.')}"
        lines.append(f"memory on this machine: {size(training)} at the peak of these steps, with {weights}")
    else:
        read_documents(base, plan, display)
        more = f"at most {size(peak_memory())} while the base computes them"
        lines.append(f"memory on this machine: {size(training)} while training on stored hidden states, {more}")
    if run.hours:
        seconds = {stage.removeprefix("phase "): value for stage, _, value in stages.rows() if value == value}
        name = list(plan.phases)[-1]
        steps = steps_that_fit(run.hours, seconds, plan)
        fitting = f"phases.{name}.steps={steps}" if steps else no_step_fits(run.hours, plan)
        lines.append(f"in {run.hours:g} h here: {fitting}")
    return lines
