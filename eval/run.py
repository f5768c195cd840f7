"""Measure a saved head: ``drafthead eval head=outputs/medusa_smollm2/head suite=mt_bench``."""

import sys
from pathlib import Path

if not __package__:  # run as a file: look in the checkout, not in eval/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from omegaconf import DictConfig

from drafthead.data.config import one_line_errors, parse, run_main
from drafthead.data.display import Display
from drafthead.eval.config import EvalRunConfig
from drafthead.eval.evaluate import choose_tree, evaluate, read_training_log
from drafthead.eval.latency import measure_costs
from drafthead.eval.report import console_lines, console_table
from drafthead.eval.suites import load_suite
from drafthead.models.loading import load_base_and_head


@hydra.main(version_base="1.3", config_path="pkg://drafthead.recipes.evaluation", config_name="eval")
@one_line_errors
def _main(cfg: DictConfig) -> None:
    config = parse(cfg, EvalRunConfig)
    evaluation = config.evaluation()
    load_suite(evaluation.suite, evaluation.limit, evaluation.seed)  # a wrong name fails before the model loads
    display = Display()
    with display.stage(f"head {config.head}"):
        base, head = load_base_and_head(config.head, config.base)
    choose_tree(head, evaluation.tree)
    default = (
        Path(config.head).parent if Path(config.head).is_dir() else Path("outputs") / config.head.replace("/", "--")
    )
    folder = Path(config.out) if config.out else default / f"eval-{Path(evaluation.suite).stem}"
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        for path in folder.glob("eval-log-*.jsonl"):
            path.unlink()
    with display.stage("step costs on this machine"):
        costs = measure_costs(base, head)
    with display.stage(f"evaluation: {evaluation.suite}"):
        result = evaluate(
            base,
            head,
            evaluation,
            folder,
            display.progress,
            costs=costs,
            training_log=read_training_log(default),
        )
    display.console.print(console_table(result))
    for line in console_lines(result, read_training_log(default)):
        display.line(line)
    display.line(f"report: {folder / 'report.html'}")


def main() -> None:
    """Entry point."""
    run_main(_main)


if __name__ == "__main__":
    main()
