"""``mode=plan``: what a recipe will cost, printed. Needs the base's shape, and no weights."""

import os
from dataclasses import replace
from typing import Protocol, runtime_checkable

from rich.console import Console

from drafthead.models.base_config import check_architecture
from drafthead.models.model_shape import ModelShape
from drafthead.models.tuned_base import LoraSettings
from drafthead.train.config import RunConfig
from drafthead.train.launcher import asked_for
from drafthead.train.plan import GenerationPlan, PhasePlan, Plan, plan, render
from drafthead.train.plan_sharded import Spread
from drafthead.train.sharding import PRECISIONS


@runtime_checkable
class TunesBase(Protocol):
    """Settings of a head that can train the base along."""

    def lora(self) -> LoraSettings:
        """The base's adapters."""


def print_plan(run: RunConfig) -> None:
    """Parameters, trained tokens, memory per GPU and disk of a run on as many processes as the launcher started.

    Raises:
        UserError: the base's shape is not in the recipe and cannot be fetched, or its architecture is refused.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console(highlight=False)
    console.print(f"[bold]{run.name}[/bold]: {run.base.name or run.base.transformers_config().model_type}")
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    run = replace(run, shard=asked_for(os.environ, run.shard))
    console.print(render(plan_of(run, devices, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))))


def plan_of(run: RunConfig, devices: int, per_node: int | None = None, device: str = "cuda") -> Plan:
    """What a run will cost on so many processes, of which ``per_node`` (or all) are on one node; ``cuda`` or ``cpu``.

    Raises:
        UserError: as ``print_plan``.
    """
    shard = run.shard
    config = run.base.transformers_config()
    check_architecture(config, run.base.max_context)
    shape = ModelShape.from_config(config)
    corpus = run.data.generations
    prompts = corpus.prompts + corpus.synthesised
    generations = GenerationPlan(
        prompts=prompts,
        max_prompt_tokens=corpus.max_prompt_tokens,
        max_new_tokens=corpus.sampler.max_new_tokens,
        keep_features=corpus.keep_features,
    )
    answers = corpus.sampler.max_new_tokens / (corpus.sampler.max_new_tokens + corpus.max_prompt_tokens)
    phases = [
        PhasePlan(
            name=name,
            row_length=phase.row_length,
            batch_rows=phase.batch_rows,
            accumulate=phase.accumulate,
            steps=phase.steps,
            trained_share=1.0 if phase.corpus == "text" else answers,
            corpus_tokens=run.data.text.max_tokens if phase.corpus == "text" else generations.tokens(),
            cached_features=phase.cached,
            train_base=phase.train_base,
        )
        for name, phase in run.phases.items()
    ]
    head = run.head_config()
    return plan(
        shape,
        head.size(shape),
        phases,
        generations,
        lora=head.lora() if run.tunes_base and isinstance(head, TunesBase) else None,
        spread=Spread(
            mode=shard.mode,
            shards=(per_node or devices) if shard.hybrid else devices,
            compute_bytes=PRECISIONS[shard.precision].itemsize,
            offload_base=shard.offload_base,
            checkpointing=shard.checkpointing,
        ),
        devices=devices,
        base_bytes=4 if run.base.dtype == "float32" or (run.base.dtype == "auto" and device == "cpu") else 2,
        device=device,
    )
