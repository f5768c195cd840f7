"""A whole run: corpora -> phases -> tree -> evaluation -> head on disk (-> Hub)."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed

from drafthead.data.display import Display
from drafthead.data.errors import UserError
from drafthead.data.files import read_json, write_json
from drafthead.eval.calibrate import Calibration, answer_ranks, calibrate
from drafthead.eval.evaluate import evaluate, read_training_log
from drafthead.eval.latency import StepCosts, measure_costs
from drafthead.eval.report import console_table, markdown_table
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead
from drafthead.train.config import RunConfig
from drafthead.train.corpora import Corpora
from drafthead.train.loop import Trainer
from drafthead.train.phase_data import open_held_out
from drafthead.train.provenance import write_provenance
from drafthead.train.tracking import Tracker


def run_pipeline(run: RunConfig, resolved: str) -> None:
    """Do everything the recipe says that is not on disk yet; the run folder holds every result.

    Args:
        run: the checked recipe.
        resolved: the same as YAML, for the run folder.
    """
    accelerator = Accelerator()
    display = Display(accelerator.is_main_process)
    folder = Path(run.out)
    if accelerator.is_main_process:
        _open_folder(folder, run, resolved, display)
    accelerator.wait_for_everyone()
    set_seed(run.seed)
    tracker = Tracker(run.tracker, folder, run.name, resolved, display.line) if accelerator.is_main_process else None
    with display.stage(f"base model {run.base.name or 'random'}"):
        base = BaseModel.load(run.base, accelerator.device)
    corpora = Corpora(base, run.data, run.seed, display.progress)
    with display.stage("corpus: the base's own answers"):
        _prepare_generations(corpora, accelerator, display)
    head = _new_head(run, base, corpora, display)
    trainer = Trainer(run, head, corpora, folder, accelerator, display, tracker)
    trainer.train()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _finish(run, base, head, corpora, folder, display, tracker)


def _open_folder(folder: Path, run: RunConfig, resolved: str, display: Display) -> None:
    """Make the run folder, or check that what it holds came from the same settings.

    Raises:
        UserError: it holds checkpoints of other settings.
    """
    settings = folder / "training-settings.json"
    wanted = json.loads(json.dumps(_training_settings(run), default=str))
    if not run.resume and folder.exists():
        for name in ("checkpoints", "head"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("metrics.jsonl", "eval-log.jsonl", "eval.json", "calibration.json", settings.name):
            (folder / name).unlink(missing_ok=True)
    if settings.exists():
        found = read_json(settings)
        changed = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
        if changed:
            key = changed[0]
            raise UserError(
                f"{folder} was trained with {key}={found.get(key)!r}, this recipe has {wanted.get(key)!r}; give the "
                "run another name (name=...), or start over with resume=false"
            )
    write_json(settings, wanted)
    for warning in write_provenance(folder, resolved):
        display.line(f"warning: {warning}")


def _training_settings(run: RunConfig) -> dict[str, Any]:
    """What may not change between a run's start and its continuation, flattened to dotted keys."""
    kept = {k: v for k, v in asdict(run).items() if k in ("seed", "base", "head", "data", "phases")}
    del kept["data"]["folder"], kept["data"]["generations"]["slots"]
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", kept)
    return flat


def _prepare_generations(corpora: Corpora, accelerator: Accelerator, display: Display) -> None:
    # One process generates; the others wait and read what it wrote.
    with accelerator.main_process_first():
        stats = corpora.generations().stats
    display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} ended by the base itself")


def _new_head(run: RunConfig, base: BaseModel, corpora: Corpora, display: Display) -> DraftHead:
    config = run.head_config()
    size = config.draft_vocab_size
    d2t = None
    if size is not None and size < base.vocab_size:
        d2t = corpora.draft_vocabulary(size)
        counts = corpora.generations().token_counts(base.vocab_size)
        share = counts[d2t.numpy()].sum() / counts.sum()
        display.line(
            f"   draft vocabulary: {len(d2t):,} of {base.vocab_size:,} ids, {100 * share:.2f} % of the answers' tokens"
        )
    head = config.build(base, d2t)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    display.line(f"   head: {type(head).__name__}, {head.depth} draft positions, {trained:,} trained parameters")
    return head


def _finish(
    run: RunConfig,
    base: BaseModel,
    head: DraftHead,
    corpora: Corpora,
    folder: Path,
    display: Display,
    tracker: Tracker | None,
) -> None:
    head.eval()
    with display.stage("tree: step costs on this machine, accuracies on held-out answers"):
        costs, calibration = _calibrate(run, base, head, corpora, folder)
        head.tree = calibration.tree
        head.save_pretrained(folder / "head")
        display.line(
            f"   {len(calibration.tree)} nodes: expect {calibration.expected_tokens:.2f} tokens a step, speedup "
            f"{calibration.expected_speedup:.2f}; {calibration.expected_tokens_largest:.2f} tokens with 64 nodes"
        )
    with display.stage(f"evaluation: {run.eval.suite}"):
        evaluation = evaluate(
            base,
            head,
            run.eval,
            folder,
            display.progress,
            calibration=calibration,
            costs=costs,
            training_log=read_training_log(folder),
        )
    _write_card(run, head, evaluation, folder)
    display.console.print(console_table(evaluation))
    if tracker is not None:
        tracker.finish(evaluation)
    if run.push:
        display.line(f"pushed: {head.push_folder(folder / 'head', run.push)}")
    display.line("time: " + ", ".join(f"{name.split(':')[0]} {seconds:.0f} s" for name, seconds in display.stages))
    display.line(f"head: {folder / 'head'}   report: {folder / 'report.html'}")
    display.line(f'try it: drafthead generate --head {folder / "head"} "Why is the sky blue?"')


def _calibrate(
    run: RunConfig, base: BaseModel, head: DraftHead, corpora: Corpora, folder: Path
) -> tuple[StepCosts, Calibration]:
    costs = measure_costs(base, head)
    longest = max(p.row_length for p in run.phases.values() if p.corpus == "generations")
    held_out = open_held_out(corpora, longest, head.spec)
    answers = []
    for row in range(len(held_out.rows)):
        batch, features = held_out.load([row])
        answers += answer_ranks(head, batch, features)
    return costs, calibrate(answers, costs)


def _write_card(run: RunConfig, head: DraftHead, evaluation: dict[str, Any], folder: Path) -> None:
    """The head's README: what it is for, how to use it, what it measured."""
    base = head.base_identity["name"]
    card = f"""---
base_model: {base}
tags: [drafthead, speculative-decoding]
---
# {run.name}

A {type(head).__name__} with {head.depth} draft positions for `{base}`, trained with
[drafthead](https://github.com/drafthead/drafthead) from the recipe `{run.name}`.

```python
import drafthead

base = drafthead.load_base("{base}")
head = drafthead.load_head("<this repository or folder>", base)
print(drafthead.generate(base, head, "Why is the sky blue?").text)
```

{markdown_table(evaluation)}
"""
    (folder / "head" / "README.md").write_text(card)
