"""A run is a list of stages over its folder: corpora, train, quality, tree, evaluate, card, push.

Each stage reads what it needs from the run folder and leaves its results there, so each can run alone
(``stages=[tree,evaluate]``). What is on disk already is not done again.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import set_seed

from drafthead.data.answers.backend import ProcessGroup
from drafthead.data.answers.draft_vocab import coverage
from drafthead.data.answers.store import AnswerStore
from drafthead.data.batch import TrainBatch
from drafthead.data.text.packing import collate
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json, read_json_lines, write_json
from drafthead.data.utils.hub import push as push_to_hub
from drafthead.data.utils.machine import other_processes_line
from drafthead.data.utils.renamed import update_names
from drafthead.data.utils.settings import flatten
from drafthead.eval.evaluate import development_answers
from drafthead.eval.evaluate import evaluate as evaluate_drafter
from drafthead.eval.metrics.base_quality import check_quality, compare_bases, quality_line
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.report.plots import save_training_plots
from drafthead.eval.report.side_by_side import side_by_side
from drafthead.eval.report.tables import console_lines, console_table, quality_table
from drafthead.eval.trees.answers import FinishedAnswer, text_ranks
from drafthead.eval.trees.calibrate import answer_ranks, calibrate, load_calibration, save_calibration
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.eval.trees.simulate import Ranks, accept_probs_of_ranks, simulate_acceptance
from drafthead.models.base.base_config import ADAPTER
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import RunConfig, preflight
from drafthead.train.corpora.corpora import Corpora, is_held_out
from drafthead.train.distributed.launcher import Launch, launched, rank_group
from drafthead.train.outlook import Outlook
from drafthead.train.publish.card import write_card
from drafthead.train.tracking.provenance import write_provenance
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer.batches import open_held_out, unseen_text
from drafthead.train.trainer.checkpoint import (
    checkpoints,
    load_best,
    load_latest,
    load_weights,
    saved_state,
    undisturbed_rng,
)
from drafthead.train.trainer.trainer import Trainer

SETTINGS = "training-settings.json"
QUALITY = "quality.json"
CONTINUED = "init_from.json"
MOST_TEXTS = 64
"""Held-out answers that a head which is trained on is measured on, at most."""
RESULTS = {
    "train": ("checkpoints", "head", "metrics.jsonl", CONTINUED),
    "quality": (QUALITY,),
    "tree": ("calibration.json",),
    "evaluate": ("eval.json", "eval-log-*.jsonl"),
}
"""What a stage leaves in the run folder and ``resume=false`` removes."""
SHOWN = 96
"""Tokens of the answer that is shown at the end."""


class RunContext:
    """What the stages of a run share: settings, run folder, processes, and the frozen bases."""

    def __init__(self, run: RunConfig, launch: Launch) -> None:
        self.run, self.launch, self.display = run, launch, launch.display
        self.folder = Path(run.out)
        self.head_folder, self.checkpoints = self.folder / "head", self.folder / "checkpoints"

    @cached_property
    def corpora(self) -> Corpora:
        """The corpora, with the original base, which is loaded."""
        run, launch = self.run, self.launch
        with self.display.stage(f"base model {run.base.name or 'random'}"):
            config = launch.sharding.base_config(run.base) if "train" in run.stages else run.base
            base = BaseModel.load(config, launch.accelerator.device, self.display.line)
            if base.kernels is not None:
                self.display.line(f"   fastest products here, by rows: {base.kernels}")
        run.head_config().check_layers(base.num_layers)  # before hours of generation
        together = any(stage in COLLECTIVE for stage in run.stages)
        group = rank_group(launch.accelerator, run.per_node_data) if together else ProcessGroup()
        states = run.stores_answer_states
        return Corpora(base, run.data, run.seed, self.display.progress, group, self.display.line, states)

    @cached_property
    def base(self) -> BaseModel:
        """The base that the trained head drafts for: the original one, or with the adapter of a run that trains it."""
        if not self.run.trains_base:
            return self.corpora.base
        config = replace(self.run.base, adapter=str(self.head_folder / ADAPTER))
        return BaseModel.load(config, self.corpora.base.device)

    @cached_property
    def tracker(self) -> Tracker:
        """The experiment tracker; on the main process only."""
        run = self.run
        settings = asdict(run) | {"head": {**run.head, **asdict(run.head_config())}}  # with the defaults of this head
        return Tracker(self.launch.accelerator, run.tracker, self.folder, run.name, settings, self.display.line)

    def load_head(self) -> DraftHead:
        """The trained head, attached to its base."""
        if not (self.head_folder / "config.json").exists():
            raise UserError(f"{self.head_folder} holds no head yet; run the stage train first")
        return DraftHead.from_pretrained(self.head_folder, self.base)

    @cached_property
    def development_answers(self) -> list[FinishedAnswer] | None:
        """The base's answers to the suite's dev half; None where the suite is evaluated whole."""
        run = self.run
        wanted = run.eval.split == "test" and run.tree_prompts > 0
        return development_answers(self.base, run.eval, run.tree_prompts, self.load_head().spec) if wanted else None

    def new_head(self) -> DraftHead:
        """The head to train: untrained, with adapters of its base if the run trains it; or that of ``init_from``."""
        config, base = self.run.head_config(), self.corpora.base
        if self.run.init_from is not None:
            head = DraftHead.from_pretrained(self.run.init_from, base)
            head.tree = None
            return head
        size = config.draft_vocab_size
        d2t = None if size is None or size >= base.vocab_size else self.corpora.draft_vocabulary(size)
        head = config.build(base, d2t)
        if self.run.trains_base:
            head.train_base(now=False)
        return head


def run_pipeline(run: RunConfig, resolved: str) -> None:
    """Run the stages of the recipe. ``resolved`` is the recipe as YAML, for the run folder."""
    with launched(run) as launch:
        work = RunContext(run, launch)
        if launch.is_main:
            preflight(run)
            _open_folder(work, resolved)
        launch.accelerator.wait_for_everyone()
        for name, stage in STAGES.items():
            if name in run.stages and (launch.is_main or name in COLLECTIVE):
                stage(work)
        launch.display.line(
            "time: " + ", ".join(f"{name.split(':')[0]} {seconds:.0f} s" for name, seconds in launch.display.stages)
        )


def corpora(work: RunContext) -> None:
    """Have the base answer the prompts, and pack the text; all processes share the work."""
    corpora, display, run = work.corpora, work.display, work.run
    if work.launch.is_main:
        display.console.print(Outlook(run, corpora.base, work.launch.accelerator.num_processes).table())
    with undisturbed_rng(), display.stage("corpus: the base's own answers"):
        stats = corpora.answers().stats
        display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} ended by the base itself")
    lengths = {phase.seq_len for phase in run.phases.values() if phase.corpus == "text" and not run.data.text.stream}
    for seq_len in sorted(lengths):
        with undisturbed_rng(), display.stage(f"corpus: text in rows of {seq_len}"):
            with work.launch.main_process_first(run.per_node_data):
                rows = corpora.text_rows(seq_len)
        display.line(f"   {len(rows)} rows of {seq_len} tokens")
    display.line(f"corpora: {run.data.folder}")


def train(work: RunContext) -> None:
    """Train the head through the phases and save it, on all processes."""
    run, launch = work.run, work.launch
    tracker = work.tracker if launch.is_main else None
    work.corpora.answers()
    set_seed(run.seed)
    head = work.new_head()
    if len(head.d2t) < head.vocab_size:
        counts = work.corpora.answers().token_counts(head.vocab_size)
        share = 100 * coverage(counts, head.d2t.cpu().numpy())
        work.display.line(
            f"   draft vocabulary: {len(head.d2t):,} of {head.vocab_size:,} ids, {share:.2f} % of the answers' tokens"
        )
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    work.display.line(f"   head: {type(head).__name__}, {head.depth} draft positions, {trained:,} trained parameters")
    if run.init_from is not None and launch.is_main:
        _measure_continued(work, head.eval(), "before")
    Trainer(run, head, work.corpora, work.folder, launch, tracker).train()
    del head
    launch.accelerator.wait_for_everyone()
    launch.sharding.close()
    if not launch.is_main:
        return
    work.corpora.group = ProcessGroup()  # the main process continues alone
    if launch.sharding.shards_base:
        work.corpora.base = BaseModel.load(run.base, work.corpora.base.device)
    save_training_plots(read_json_lines(work.folder / "metrics.jsonl"), work.folder / "plots")
    _save_trained_head(work)
    if run.init_from is not None:
        _measure_continued(work, work.load_head(), "after")


def _measure_continued(work: RunContext, head: DraftHead, when: str) -> None:
    """Mean accepted length of greedy chains on held-out answers, of the new data and of the old; kept in the folder."""
    path, run = work.folder / CONTINUED, work.run
    found = read_json(path) if path.exists() else {}
    if when not in found or when == "after":
        folders = {"new": Path(run.data.folder), **({"old": Path(run.init_data)} if run.init_data else {})}
        with undisturbed_rng(), work.display.stage(f"acceptance {when} training on: {', '.join(folders)} data"):
            found[when] = {name: _held_out_length(head, folder) for name, folder in folders.items()}
        write_json(path, found)
    if when == "after":
        for name, length in found[when].items():
            work.display.line(
                f"   {name} data, held out: mean accepted length {found['before'][name]:.2f} before, {length:.2f} after"
            )


def _held_out_length(head: DraftHead, folder: Path) -> float:
    """Simulated mean accepted length with a chain over all positions, on the held-out answers of a corpus."""
    answers = AnswerStore(folder / "answers").read(with_hidden_states=False)
    texts = [FinishedAnswer(g.input_ids.tolist(), g.boundary) for g in answers if is_held_out(g.prompt_number)][
        :MOST_TEXTS
    ]
    if not texts:
        raise UserError(f"{folder} has no held-out answers to measure acceptance on; name a larger corpus")
    probs = [accept_probs_of_ranks(ranks, 1) for ranks in text_ranks(head, texts)]
    return simulate_acceptance(probs, TokenTree.chain(head.depth)).mean_accepted_length


def _save_trained_head(work: RunContext) -> None:
    """Write the head of the last checkpoint, or of the best one, to the run folder."""
    last, best = load_latest(work.checkpoints), load_best(work.checkpoints)
    assert last is not None
    chosen = last
    if best is not None and best.state.global_step != last.state.global_step:
        step = f"step {best.state.global_step} (over all phases)"
        found = f"held-out mean accepted length {best.state.score:.3f}, after {step}"
        if work.run.checkpoint.final == "best":
            chosen = best
            work.display.line(f"   the weights are the best ones: {found}")
        else:
            work.display.line(f"   the best weights ({found}) are in {best.path}; checkpoint.final=best takes them")
    head = work.new_head()
    load_weights(head, chosen)
    head.save_pretrained(work.head_folder)


def quality(work: RunContext) -> None:
    """Compare a trained base with the original one on text and answers that training has not seen."""
    run = work.run
    if not run.trains_base:
        return

    def batches(name: str, part: datasets.Dataset) -> Iterator[TrainBatch]:
        for n in range(len(part)):
            work.display.progress(f"held-out {name}, read by both", n, len(part))
            yield collate(part, [n])

    with work.display.stage("the trained base beside the original one"):
        rows = {"answers": work.corpora.answer_rows(run.answer_row_length, held_out=True)[0]}
        text = unseen_text(work.corpora, run.phases)
        if text is not None:
            rows = {"text": text, **rows}
        found = {name: compare_bases(work.corpora.base, work.base, batches(name, part)) for name, part in rows.items()}
        result = check_quality(found, run.quality_limits)
        for folder in (work.folder, work.head_folder):
            write_json(folder / QUALITY, result)
        work.display.console.print(quality_table(result).console())
        work.display.line(quality_line(result))


def tree(work: RunContext) -> None:
    """Measure the costs of a step on this machine, and choose the tree with the highest expected speedup."""
    run, display, head = work.run, work.display, work.load_head()
    path = work.folder / "calibration.json"
    with display.stage("tree: step costs on this machine, accuracies on held-out answers"):
        found = load_calibration(path, head)
        if found is None:
            costs = measure_costs(head.base, head)
            found = costs, calibrate(_tree_answers(work, head), costs, run.tree_search)
            save_calibration(path, head, *found)
            head.batch_trees = {}
        calibration = found[1]
        head.tree = calibration.tree
        for rows in run.tree_batches:
            if rows not in head.batch_trees:
                costs = measure_costs(head.base, head, rows=rows)
                chosen = calibrate(_tree_answers(work, head), costs, run.tree_search)
                pays = chosen.expected_speedup > 1
                head.batch_trees = {**head.batch_trees, rows: chosen.tree if pays else TokenTree.chain(0)}
                expected = f"{len(chosen.tree)} nodes, expect speedup {chosen.expected_speedup:.2f}"
                display.line(f"   batches of {rows}: {expected if pays else 'no drafts, they would not pay'}")
        head.save_pretrained(work.head_folder)
        display.line(
            f"   {len(calibration.tree)} nodes: expect a mean accepted length of {calibration.expected_tokens:.2f}, "
            f"speedup {calibration.expected_speedup:.2f}; {calibration.expected_tokens_largest:.2f} with 64 nodes"
            + (f" (without its threshold of {head.confidence_threshold:g})" if head.confidence_threshold else "")
        )
        display.line(f"   {other_processes_line(found[0].other_processes_cores)}")


def _tree_answers(work: RunContext, head: DraftHead) -> list[Ranks]:
    """Ranks of the drafts along answers that training has not seen: to the suite's dev half, where there is."""
    run = work.run
    if work.development_answers is not None:
        return text_ranks(head, work.development_answers)
    cached = any(phase.store_hidden_states for phase in run.phases.values())  # then they are, since training
    held_out = open_held_out(work.corpora, run.answer_row_length, head.spec, cached, head.base)
    return [ranks for row in range(len(held_out)) for ranks in answer_ranks(head, *held_out.load([row]))]


def evaluate(work: RunContext) -> None:
    """Answer the suite with the head and its baselines; leaves ``eval.json`` and ``report.html``."""
    run, display, head = work.run, work.display, work.load_head()
    found = load_calibration(work.folder / "calibration.json", head)
    if found is None:
        raise UserError(
            f"{work.folder}/calibration.json is missing, or of another head or machine; run the stage tree first "
            "(stages=[tree,evaluate])"
        )
    costs, calibration = found
    head.tree = calibration.tree
    log = read_json_lines(work.folder / "metrics.jsonl")
    with display.stage(f"evaluation: {run.eval.suite}"):
        drafter, draft_config = run.eval.build(head.base, head, run.eval.draft_config(head))
        evaluation = evaluate_drafter(
            head.base,
            drafter,
            run.eval,
            work.folder,
            display.progress,
            draft_config=draft_config,
            head=head,
            calibration=calibration,
            costs=costs,
            training_log=log,
            development=work.development_answers,
        )
    display.console.print(console_table(evaluation))
    for line in console_lines(evaluation, log):
        display.line(line)
    work.tracker.finish(evaluation)
    if run.eval.sampler.greedy:
        prompt = load_suite(run.eval.suite, 1, run.eval.seed, run.eval.tasks, run.eval.split)[0]
        ids = conversation_ids(head.base.tokenizer, prompt, template_kwargs=run.base.chat_template_kwargs)
        display.console.print(side_by_side(head.base, drafter, draft_config, ids, min(SHOWN, run.eval.max_new_tokens)))


def card(work: RunContext) -> None:
    """Write the model card; end a run that took its base further from the original than the recipe allows."""
    folder, path = work.folder, work.folder / "eval.json"
    if not path.exists():
        raise UserError(f"{path} is missing; run the stage evaluate first")
    saved = checkpoints(work.checkpoints)
    processes = saved_state(saved[-1]).get("processes", 1) if saved else 1
    result = read_json(folder / QUALITY) if work.run.trains_base else None
    write_card(work.run, work.load_head(), work.corpora.answers().stats, read_json(path), result, folder, processes)
    for does, command in (
        ("try it", f'drafthead generate head={work.head_folder} "Why is the sky blue?"'),
        ("measure it on other prompts", f"drafthead eval head={work.head_folder} suite=spec_bench_like limit=18"),
        ("look at the report", f"{folder / 'report.html'}"),
    ):
        work.display.line(f"{does}:\n   {command}")
    if result is not None and not result["passed"]:
        raise UserError(
            f"the base changed more than quality_limits allow: {'; '.join(result['failures'])}. The head is saved in "
            f"{work.head_folder} and works, but its base is not what it was. Lower the learning rate or the steps of "
            "the phases with train_base, or head.heads_weight, and start over with resume=false; or raise the limits"
        )


def push(work: RunContext) -> None:
    """Upload the head to the Hub, where the recipe asks for it."""
    run = work.run
    if run.push:
        with work.display.stage("upload to the Hub"):
            address = push_to_hub(
                work.head_folder, run.hub.repo or run.name, private=run.hub.private, log=work.display.line
            )
        work.display.line(f"pushed: {address}")


STAGES: dict[str, Callable[[RunContext], None]] = {
    stage.__name__: stage for stage in (corpora, train, quality, tree, evaluate, card, push)
}
COLLECTIVE = ("corpora", "train")
"""Stages that all processes take part in; the others are the main process's."""


def _open_folder(work: RunContext, resolved: str) -> None:
    """Make the run folder, or check that what it holds came from the same settings."""
    run, settings = work.run, work.folder / SETTINGS
    wanted = json.loads(json.dumps(training_settings(run), default=str))
    if not run.resume:
        _clear(work)
    if settings.exists():
        check_settings(settings, wanted)
    write_json(settings, wanted)
    for warning in write_provenance(work.folder, resolved):
        work.display.line(f"warning: {warning}")


def check_settings(path: Path, wanted: dict[str, Any]) -> None:
    """Refuse to resume in the folder of ``path`` with settings that differ from those in it."""
    found, folder = read_json(path), path.parent
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, expected an object; restore it, or use resume=false")
    found = update_names(found)
    found.pop("head.draft_dtype", None)  # earlier versions kept it
    # A key that the earlier version did not have yet is equal where it is unset now.
    changed = sorted(k for k in {*found, *wanted} if (found.get(k) or None) != (wanted.get(k) or None))
    trained = any((folder / "checkpoints").glob("step-*")) or (folder / "head").exists()
    if changed and trained:
        key = changed[0]
        raise UserError(
            f"{folder} was trained with {' '.join(key.split())}={found.get(key)!r}, this recipe has "
            f"{wanted.get(key)!r}; give the run another name (name=...), or start over with resume=false"
        )


def training_settings(run: RunConfig) -> dict[str, Any]:
    """What may not change between a run's start and its continuation, by dotted key."""
    kept = {k: v for k, v in asdict(run).items() if k in ("seed", "base", "head", "init_from", "data", "phases")}
    del kept["data"]["folder"], kept["data"]["answers"]["batch_size"], kept["data"]["answers"]["server"]
    del kept["base"]["kernels"]
    kept["head"].pop("draft_dtype", None)
    if kept["head"].get("head_type") == "eagle3" and kept["head"].get("num_layers") == 1:
        del kept["head"]["num_layers"]
    for phase in kept["phases"].values():
        for group, name, default in (
            ("optim", "name", "adamw"),
            ("optim", "momentum", 0.95),
            ("loss", "confidence", 1.0),
            ("boost", "floor", 0.1),
        ):
            if phase[group][name] == default:
                del phase[group][name]  # nor these
    for source in (*kept["data"]["text"]["sources"], *kept["data"]["answers"]["sources"]):
        if source["turns"] == 1:
            del source["turns"]  # which runs of earlier versions do not have
    return flatten(kept)


def _clear(work: RunContext) -> None:
    """Remove what the run's stages left in its folder; the settings, which mark it as a run's, go last."""
    folder, settings = work.folder, work.folder / SETTINGS
    found = [path for stage in work.run.stages for name in RESULTS.get(stage, ()) for path in folder.glob(name)]
    if found and not settings.exists():
        raise UserError(
            f"resume=false would remove {found[0]}, but {folder} has no {SETTINGS}, so no run of this program made it; "
            "choose another folder (out=...), or remove it yourself"
        )
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if "train" in work.run.stages:
        settings.unlink(missing_ok=True)
