"""Measure a saved head: ``drafthead eval head=outputs/medusa_smollm2/head suite=mt_bench``."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from drafthead.data.utils.config import one_line_errors, parse, run_main
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json_lines, write_atomic
from drafthead.eval.config import EvalRunConfig
from drafthead.eval.evaluate import evaluate
from drafthead.eval.prompts.suites import load_suite, suite_label
from drafthead.eval.report.tables import console_lines, console_table, markdown_table
from drafthead.eval.timing.methods import check_drafters, check_peers, is_drafter, make_drafter, merged
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, Drafter
from drafthead.models.heads.common.loading import default_device, load_base_and_head

if not __package__:  # run as a file: look in the checkout, not in eval/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes.evaluation", config_name="eval")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    config = parse(cfg, EvalRunConfig)
    load_suite(config.suite, config.limit, config.seed, config.tasks)  # a wrong name fails before the model loads
    check_peers(config.against)
    check_drafters([*config.merge, *([config.head] if is_drafter(config.head) else [])])
    display = Display()
    with display.stage(f"head {config.head}"):
        base, drafter, draft_config = _load(config)
        drafter, draft_config = merged(base, drafter, draft_config, config.merge, config.merge_nodes)
    config.rule.check(draft_config.draft_sampling, draft_config.tree)
    default = Path(config.head).parent if Path(config.head).is_dir() else Path("outputs") / suite_label(config.head)
    folder = Path(config.out) if config.out else default / f"eval-{suite_label(config.suite)}"
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        for path in folder.glob("eval-log-*.jsonl"):
            path.unlink()
    with display.stage("step costs on this machine"):
        costs = measure_costs(base, drafter)
    training_log = read_json_lines(default / "metrics.jsonl")
    with display.stage(f"evaluation: {config.suite}"):
        result = evaluate(
            base,
            drafter,
            config,
            folder,
            display.progress,
            draft_config=draft_config,
            costs=costs,
            training_log=training_log,
        )
    write_atomic(folder / "results.md", markdown_table(result))
    display.console.print(console_table(result))
    for line in console_lines(result, training_log):
        display.line(line)
    display.line(f"report: {folder / 'report.html'}   for a model card: {folder / 'results.md'}")


def _load(config: EvalRunConfig) -> tuple[BaseModel, Drafter, DraftConfig]:
    """The base, what drafts for it, and the plan."""
    if not is_drafter(config.head):
        base, head = load_base_and_head(config.head, config.base)
        return base, head, config.draft_config(head)
    if not config.base.name and not config.base.random:
        raise UserError(f"{config.head} names no base; give one: base.name=embedded:smollm2")
    base = BaseModel.load(config.base, default_device())
    drafter = make_drafter(config.head, base)
    return base, drafter, config.draft_config(drafter)


def main() -> None:
    """Entry point."""
    run_main(_main)


if __name__ == "__main__":
    main()
