"""A whole run: corpora -> phases -> tree -> evaluation -> head on disk (-> Hub)."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed

from drafthead.data.answers.draft_vocab import coverage
from drafthead.data.utils.config import update_names
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_json
from drafthead.data.utils.hub import push
from drafthead.eval.evaluate import evaluate
from drafthead.eval.report.plots import save_training_plots
from drafthead.eval.report.tables import console_lines, console_table
from drafthead.eval.timing.methods import merged
from drafthead.eval.trees.calibrate import Calibration, answer_ranks, calibrate, load_calibration, save_calibration
from drafthead.eval.trees.cost_model import StepCosts, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.contract import DraftHead
from drafthead.train.config import RunConfig, preflight
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.sharding import Sharding, whole
from drafthead.train.joint import QUALITY, check_gate, measure_quality, with_tuned_base
from drafthead.train.publish.card import write_card
from drafthead.train.start import Launch, launched, open_corpora
from drafthead.train.tracking.provenance import write_provenance
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer.batches import open_held_out
from drafthead.train.trainer.trainer import Trainer


def run_pipeline(run: RunConfig, resolved: str) -> None:
    """Do everything the recipe says that is not on disk yet; the run folder holds every result.

    Args:
        run: the checked recipe.
        resolved: the same as YAML, for the run folder.
    """
    with launched(run) as launch:
        _run(run, resolved, launch)


def _run(run: RunConfig, resolved: str, launch: Launch) -> None:
    accelerator, display, sharding = launch.accelerator, launch.display, launch.sharding
    folder = Path(run.out)
    if launch.is_main:
        preflight(run)
        _open_folder(folder, run, resolved, display)
    accelerator.wait_for_everyone()
    set_seed(run.seed)
    tracker = _open_tracker(run, folder, launch) if launch.is_main else None
    corpora = open_corpora(run, launch)
    head = _new_head(run, corpora, display)
    trainer = Trainer(run, head, corpora, folder, accelerator, display, tracker, sharding, launch.processes)
    trainer.train()
    keeper = trainer.keeper
    del trainer
    accelerator.wait_for_everyone()
    if sharding.places_head:
        head = _whole_again(run, head, corpora, sharding, accelerator)
    if launch.is_main:
        keeper.choose_final(head)
        save_training_plots(read_json_lines(folder / "metrics.jsonl"), folder / "plots")
        quality = None
        if run.trains_base:
            with display.stage("the tuned base beside the untouched one"):
                head = with_tuned_base(run, head, folder / "head")
                quality = measure_quality(run, head.base, corpora, folder, display)
        _finish(run, head, corpora, folder, display, tracker, quality, keeper.initial_world_size)
        if quality is not None:
            check_gate(quality, folder)
        if run.push:
            with display.stage("upload to the Hub"):
                address = push(folder / "head", run.hub.repo or run.name, private=run.hub.private, log=display.line)
            display.line(f"pushed: {address}")


def _open_tracker(run: RunConfig, folder: Path, launch: Launch) -> Tracker:
    settings = asdict(run) | {"head": {**run.head, **asdict(run.head_config())}}  # with the defaults of this head
    return Tracker(launch.accelerator, run.tracker, folder, run.name, settings, launch.display.line)


def _open_folder(folder: Path, run: RunConfig, resolved: str, display: Display) -> None:
    """Make the run folder, or check that what it holds came from the same settings.

    Raises:
        UserError: it holds checkpoints of other settings, or ``resume=false`` would clear what is no run's folder.
    """
    settings = folder / "training-settings.json"
    wanted = json.loads(json.dumps(_training_settings(run), default=str))
    if not run.resume:
        _clear(folder, settings)
    if settings.exists():
        _check_settings(settings, wanted)
    write_json(settings, wanted)
    for warning in write_provenance(folder, resolved):
        display.line(f"warning: {warning}")


def _check_settings(path: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on in the folder of ``path``, what it was trained with, with settings that differ.

    Raises:
        UserError: it was trained with others, or the file is damaged.
    """
    found, folder = read_json(path), path.parent
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, expected an object; restore it, or use resume=false")
    found = update_names(found)
    changed = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
    trained = any((folder / "checkpoints").glob("step-*")) or (folder / "head").exists()
    if changed and trained:
        key = changed[0]
        raise UserError(
            f"{folder} was trained with {' '.join(key.split())}={found.get(key)!r}, this recipe has "
            f"{wanted.get(key)!r}; give the run another name (name=...), or start over with resume=false"
        )


def _clear(folder: Path, settings: Path) -> None:
    """Remove what a run left in its folder; ``settings``, which marks it as a run's, goes last."""
    names = ("checkpoints", "head", "metrics.jsonl", "eval.json", "calibration.json", QUALITY)
    found = [p for p in (*(folder / name for name in names), *folder.glob("eval-log-*.jsonl")) if p.exists()]
    if found and not settings.exists():
        raise UserError(
            f"resume=false would remove {found[0]}, but {folder} has no {settings.name}, so no run of this program "
            "made it; choose another folder (out=...), or remove it yourself"
        )
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    settings.unlink(missing_ok=True)


def _training_settings(run: RunConfig) -> dict[str, Any]:
    """What may not change between a run's start and its continuation, flattened to dotted keys."""
    kept = {k: v for k, v in asdict(run).items() if k in ("seed", "base", "head", "data", "phases")}
    del kept["data"]["folder"], kept["data"]["generations"]["slots"], kept["data"]["generations"]["server"]
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", kept)
    return flat


def _whole_again(
    run: RunConfig, head: DraftHead, corpora: Corpora, sharding: Sharding, accelerator: Accelerator
) -> DraftHead:
    """The trained head as it is without sharding, on the main process, which goes on alone; elsewhere ``head``."""
    weights = whole(head.state_dict(), keep=accelerator.is_main_process)
    sharding.leave()
    if not accelerator.is_main_process:
        return head
    if sharding.places_base:
        corpora.base = BaseModel.load(run.base, head.base.device)
    d2t = weights["d2t"] if len(head.d2t) < len(head.t2d) else None
    found = run.head_config().build(corpora.base, d2t)
    if run.trains_base:
        found.train_base(now=False)
    found.load_state_dict(weights)
    return found


def _new_head(run: RunConfig, corpora: Corpora, display: Display) -> DraftHead:
    config, base = run.head_config(), corpora.base
    size = config.draft_vocab_size
    d2t = None
    if size is not None and size < base.vocab_size:
        d2t = corpora.draft_vocabulary(size)
        counts = corpora.generations().token_counts(base.vocab_size)
        share = 100 * coverage(counts, d2t.numpy())
        display.line(
            f"   draft vocabulary: {len(d2t):,} of {base.vocab_size:,} ids, {share:.2f} % of the answers' tokens"
        )
    head = config.build(base, d2t)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    display.line(f"   head: {type(head).__name__}, {head.depth} draft positions, {trained:,} trained parameters")
    return head


def _finish(
    run: RunConfig,
    head: DraftHead,
    corpora: Corpora,
    folder: Path,
    display: Display,
    tracker: Tracker | None,
    quality: dict[str, Any] | None,
    initial_world_size: int,
) -> None:
    base = head.base
    head.eval()
    with display.stage("tree: step costs on this machine, accuracies on held-out answers"):
        costs, calibration = _calibrate(run, head, corpora, folder)
        head.tree = calibration.tree
        head.save_pretrained(folder / "head")
        display.line(
            f"   {len(calibration.tree)} nodes: expect {calibration.expected_tokens:.2f} tokens a step, speedup "
            f"{calibration.expected_speedup:.2f}; {calibration.expected_tokens_largest:.2f} tokens with 64 nodes"
            + (f" (without its threshold of {head.confidence_threshold:g})" if head.confidence_threshold else "")
        )
    with display.stage(f"evaluation: {run.eval.suite}"):
        drafter, draft_config = merged(base, head, run.eval.draft_config(head), run.eval.merge, run.eval.merge_nodes)
        evaluation = evaluate(
            base,
            drafter,
            run.eval,
            folder,
            display.progress,
            draft_config=draft_config,
            calibration=calibration,
            costs=costs,
            training_log=read_json_lines(folder / "metrics.jsonl"),
        )
    write_card(run, head, corpora.generations().stats, evaluation, quality, folder, initial_world_size)
    display.console.print(console_table(evaluation))
    for line in console_lines(evaluation, read_json_lines(folder / "metrics.jsonl")):
        display.line(line)
    if tracker is not None:
        tracker.finish(evaluation)
    display.line("time: " + ", ".join(f"{name.split(':')[0]} {seconds:.0f} s" for name, seconds in display.stages))
    display.line(f"head: {folder / 'head'}   report: {folder / 'report.html'}")
    display.line(f'try it: drafthead generate head={folder / "head"} "Why is the sky blue?"')


def _calibrate(run: RunConfig, head: DraftHead, corpora: Corpora, folder: Path) -> tuple[StepCosts, Calibration]:
    path = folder / "calibration.json"
    kept = load_calibration(path, head)
    if kept is not None:
        return kept
    costs = measure_costs(head.base, head)
    cached = any(phase.cached for phase in run.phases.values())  # then they are, since training
    held_out = open_held_out(corpora, run.answer_row_length, head.spec, cached, head.base)
    answers = []
    for row in range(len(held_out.rows)):
        batch, features = held_out.load([row])
        answers += answer_ranks(head, batch, features)
    calibration = calibrate(answers, costs, run.tree_search)
    save_calibration(path, head, costs, calibration)
    return costs, calibration
