"""``mode=plan``: what a recipe will cost, printed. Needs the base's shape, and no weights."""

import os

from rich.console import Console

from drafthead.models.base_config import check_architecture
from drafthead.train.config import RunConfig
from drafthead.train.plan import GenerationPlan, ModelShape, PhasePlan, Plan, plan, render


def print_plan(run: RunConfig) -> None:
    """Parameters, trained tokens, memory per GPU and disk of a run on as many processes as the launcher started.

    Raises:
        UserError: the base's shape is not in the recipe and cannot be fetched, or its architecture is refused.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console(highlight=False)
    console.print(f"[bold]{run.name}[/bold]: {run.base.name or run.base.transformers_config().model_type}")
    console.print(render(plan_of(run, int(os.environ.get("WORLD_SIZE", "1")))))


def plan_of(run: RunConfig, devices: int) -> Plan:
    """What a run will cost on so many processes.

    Raises:
        UserError: as ``print_plan``.
    """
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
            cached_features=phase.features == "cached",
        )
        for name, phase in run.phases.items()
    ]
    return plan(
        shape,
        run.head_config().size(shape.hidden_size, shape.vocab_size),
        phases,
        generations,
        devices=devices,
        base_bytes=4 if run.base.dtype == "float32" else 2,
    )
