"""Measure a saved head: mean accepted length, speedup over autoregressive decoding, identical outputs.

usage: drafthead eval head=FOLDER_OR_REPO_OR_DRAFTER [suite=NAME] [key=value ...]

drafthead eval head=outputs/medusa_smollm2/head suite=mt_bench
drafthead eval head=outputs/medusa_smollm2/head suite=spec_bench_like 'tasks=[math,rag]' limit=40
drafthead eval head=outputs/medusa_smollm2/head suite=my.jsonl max_new_tokens=256 tree=chain
drafthead eval head=outputs/medusa_smollm2/head drafter=head+prompt_lookup:8 tree=cost
drafthead eval head=outputs/medusa_smollm2/head 'baselines=[prompt_lookup:3,head+prompt_lookup:8:2,hf_prompt_lookup:3]'
drafthead eval head=outputs/medusa_smollm2/head sampler.temperature=0.7 draft_sampling=without_replacement
drafthead eval head=outputs/medusa_smollm2/head sampler.temperature=0.7 rule.name=typical
drafthead eval head=outputs/eagle3_smollm2_served/head 'engines=[vllm,llamacpp]' suite=spec_bench_like limit=24
drafthead eval head=outputs/hydra_smollm2/head drafter=relay:head@2+prompt_lookup@4
drafthead eval head=prompt_lookup:3 base=embedded:smollm2
drafthead eval head=DIR 'grid.heads=[DIR,DIR]' 'grid.confidence_threshold=[0,0.4,0.8]' 'grid.drafts=[0,4]'
drafthead eval head=prompt_lookup:3 drafter=nested:early_exit:12@6+head base=embedded:smollm2

suites: smoke, mt_bench, mt_bench_turns, spec_bench_like, long_context, long_questions, code, builtin
drafters: prompt_lookup[:TOKENS], suffix_memory[:TOKENS[:MEMORY]], max_gram[:CORPUS], early_exit:LAYERS[:TOKENS],
          model:NAME[:TOKENS], head:FOLDER; combined: A+B in one tree, relay:A@2+B@4, nested:A@6+B
All settings and drafters are explained in docs/reference/settings.md.
"""

import json
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from drafthead.commands.command import command
from drafthead.data.prompts.suites import folder_beside, load_suite, suite_label
from drafthead.errors import UserError
from drafthead.eval.config import METHOD, EvalRunConfig
from drafthead.eval.engines.served import check_engines
from drafthead.eval.evaluate import development_prompts, evaluate
from drafthead.eval.grid import check_folders, grid_candidates, keep_fastest
from drafthead.eval.metrics.engine_comparison import engine_failures
from drafthead.eval.report.tables import console_lines, console_table, markdown_table
from drafthead.eval.timing.methods import check_methods
from drafthead.eval.trees.calibrate import load_costs, measured_with, save_costs
from drafthead.eval.trees.cost_model import batch_context, ensure_costs, measure_costs
from drafthead.files.local import claimed, read_json, read_json_lines, write_atomic, write_json
from drafthead.models.drafters.expression import is_drafter, load_base_and_drafter, parse_drafter
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.display import Display

TIMED_ON = 8  # prompts of the suite's dev half on which a combined drafter is timed, to predict its speed
COST_REPEATS = 5  # before and again after the answers
COSTS = "eval-costs.json"  # so that an evaluation that was stopped need not measure them again
SETTINGS = "eval-settings.json"  # settings of the results, and a hash of the base, the drafter and this machine
RESULTS = ("eval.json", "report.html", "results.md", "plots", SETTINGS)


@command("eval", EvalRunConfig, __doc__)
def main(config: EvalRunConfig) -> None:
    # Reject bad input before the model is loaded.
    load_suite(config.suite, config.limit, config.seed, config.tasks, config.split)
    check_methods(config.baselines)
    if config.grid:
        check_folders([config.head, *config.grid.heads])
    if is_drafter(config.head):
        parse_drafter(config.head)
    display = Display()
    with display.stage(f"head {config.head}"):
        base, head, _ = load_base_and_drafter(config.head, config.base)
        adapter = f" with the adapter {base.config.adapter}" if base.config.adapter else ""
        display.line(f"   base: {base.name}{adapter}")
    if config.by_cost(head):
        with display.stage("step costs on this machine, by which trees are chosen"):
            rows, new = config.batch_size, config.max_new_tokens
            asked = development_prompts(base, config, 4 * rows) if rows > 1 else []
            context = batch_context([len(ids) + new // 2 for ids in asked], rows)
            again = not config.grid  # which may save the head, with the costs of all its batch sizes
            ensure_costs(base, head, rows, again=again, context=context, progress=display.progress)
    drafter, draft_config = config.build(base, head, config.draft_config(head))
    config.rule.check(draft_config)
    assert isinstance(head, DraftHead) or not config.grid  # its folder was checked
    candidates = grid_candidates(base, head, config) if isinstance(head, DraftHead) and config.grid else []
    if config.engines:
        check_engines(drafter, config)
    default = folder_beside(config.head)
    folder = Path(config.out) if config.out else default / f"eval-{suite_label(config.suite)}"
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder):
        measured = measured_with(base, drafter.identity(), draft_config)
        settings = asdict(config) | {"measured_with": measured}
        if earlier := keep_earlier(folder, settings):
            display.line(
                f"earlier results in {folder} had other settings, weights or machine; they are now in {earlier}"
            )
        if not config.resume:
            for path in folder.glob("eval-log-*.jsonl"):
                path.unlink()
        costs = None
        measure = partial(measure_costs, base, drafter, repeats=COST_REPEATS, progress=display.progress)
        prompts = development_prompts(base, config, TIMED_ON) if config.costs else []
        if config.costs and config.resume and not (folder / "eval.json").exists():
            costs = load_costs(folder / COSTS, measured)
        if config.costs and costs is None:
            with display.stage("step costs on this machine"):
                costs = measure(prompts=prompts)
            save_costs(folder / COSTS, measured, costs)
        training_log = read_json_lines(default / "metrics.jsonl")
        with display.stage(f"evaluation: {config.suite}"):
            result = evaluate(
                base,
                drafter,
                config,
                folder,
                display,
                draft_config=draft_config,
                head=head,
                candidates={c.name: (c.head, c.draft_config) for c in candidates if c.name != METHOD},
                costs=costs,
                costs_after=partial(measure, prompts=prompts),
                training_log=training_log,
            )
        write_atomic(folder / "results.md", markdown_table(result))
        display.console.print(console_table(result))
        for line in console_lines(result, training_log):
            display.line(line)
        if candidates:
            display.line(keep_fastest(result, candidates, config, config.dry))
        if failures := engine_failures(result):
            hint = f"{folder}/eval.json has all numbers, docs/guides/not_faster.md what engines misread"
            raise UserError(f"an engine does not serve the head as trained: {'; '.join(failures)} ({hint})")
        display.line(f"report: {folder / 'report.html'}   for a model card: {folder / 'results.md'}")


def keep_earlier(folder: Path, settings: dict[str, Any]) -> Path | None:
    """Move results in ``folder`` that were measured with other ``settings`` to a new folder, and return it. Logs of
    single answers stay, because an evaluation with a larger ``limit`` continues them."""
    settings = {key: value for key, value in settings.items() if key not in ("out", "resume", "dry")}
    settings = json.loads(json.dumps(settings, default=str))  # as they are read
    path, earlier = folder / SETTINGS, None
    if (folder / "eval.json").exists() and not (path.exists() and read_json(path) == settings):
        earlier = next(new for n in count(1) if not (new := folder / f"earlier-{n}").exists())
        earlier.mkdir()
        for name in RESULTS:
            if (folder / name).exists():
                (folder / name).rename(earlier / name)
    write_json(path, settings)
    return earlier
