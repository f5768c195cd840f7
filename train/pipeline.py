"""The stages of a run: corpora, train, quality, tree, evaluate, card, push. Each stage reads its input from the run
folder and writes its results there. Therefore stages can run alone (``stages=[tree,evaluate]``). Finished work found on
disk is skipped."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from shlex import quote

import torch
from accelerate.utils import set_seed

from drafthead.data.answers.store import Answer, AnswerStore, ProcessGroup, open_answers
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import OWN, load_suite, suite_label
from drafthead.data.text.packing import PackedRows
from drafthead.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.evaluate import development_answers
from drafthead.eval.evaluate import evaluate as evaluate_drafter
from drafthead.eval.metrics.base_quality import check_quality, compare_bases, quality_line
from drafthead.eval.report.plots import save_training_plots
from drafthead.eval.report.side_by_side import side_by_side
from drafthead.eval.report.tables import console_lines, console_table, quality_table
from drafthead.eval.trees.acceptance_fit import with_acceptance
from drafthead.eval.trees.calibrate import (
    LEAST_GAIN,
    Calibration,
    calibrate,
    load_calibration,
    save_calibration,
    speedup_by_cost,
)
from drafthead.eval.trees.cost_model import batch_context, measure_costs
from drafthead.eval.trees.search import greedy_tree
from drafthead.eval.trees.simulate import text_ranks
from drafthead.eval.trees.stored_answers import stored_accept_probs
from drafthead.eval.unloaded import ENGINE, evaluate_unloaded
from drafthead.files.hub import push as push_to_hub
from drafthead.files.local import claimed, read_json, read_json_lines, same_base, write_atomic, write_json
from drafthead.models.base.base_config import ADAPTER, BaseConfig
from drafthead.models.base.base_model import BaseModel, restore_kernels
from drafthead.models.base.layers import drop_views
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import TreeCosts
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.extended import with_more_ids, with_settings
from drafthead.models.heads.parts.head_folder import check_base, described, read_head_config, resolve_folder
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import WIDTH, Ranks, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.system.devices import unchanged_rng
from drafthead.system.machine import other_processes_line
from drafthead.train.config import RunConfig
from drafthead.train.corpora.answers import TURN_STRIDE
from drafthead.train.corpora.corpora import FEWEST_SUITE_PROMPTS, Corpora, is_held_out
from drafthead.train.corpora.served_base import ServedBase
from drafthead.train.corpora.transcripts import agreement_line
from drafthead.train.distributed.launcher import Launch, launched, rank_group
from drafthead.train.estimate.duration import StageDurations
from drafthead.train.original_base import OriginalBase
from drafthead.train.preflight import preflight
from drafthead.train.publish.card import contents, serving_lines, write_card
from drafthead.train.run_folder import CALIBRATION, CONTINUED, QUALITY, SUITE, TRANSCRIPTS, open_folder
from drafthead.train.tracking.provenance import write_provenance
from drafthead.train.tracking.tracker import Tracker
from drafthead.train.trainer import checkpoint
from drafthead.train.trainer.batches import open_held_out, open_phase_of, unseen_text
from drafthead.train.trainer.trainer import Trainer

MAX_HELD_OUT_ANSWERS = 64  # per corpus, to measure a head with continued training (``init_from``)
MOST_COPIES = 0.25  # share of held-out answers that may nearly repeat a trained answer without a warning
COMPARED_NODES = 8  # of a tree whose acceptance is compared with a chain's
SHOWN_TOKENS = 96  # of the answer that the stage evaluate shows at its end


class RunContext:
    """State that all stages of a run share: settings, run folder, processes, corpora, base models and tracker."""

    def __init__(self, run: RunConfig, launch: Launch) -> None:
        self.run, self.launch, self.display = run, launch, launch.display
        self.folder = Path(run.out)
        self.head_folder, self.checkpoints = self.folder / "head", self.folder / "checkpoints"
        self.is_trained = False  # the stage train has ended in this process

    @cached_property
    def corpora(self) -> Corpora:  # with the original base, which is loaded on first use
        run, launch = self.run, self.launch
        run.head_config().check_layers(self.original.parts.num_layers)  # before hours of generation
        if run.init_from is not None:
            folder = resolve_folder(run.init_from)
            check_base(folder, read_head_config(folder)["base"], self.original.parts, any_base=True)
        is_shared = any(stage in COLLECTIVE for stage in run.stages)
        group = rank_group(launch.accelerator, run.per_node_data) if is_shared else ProcessGroup()
        states = run.stores_answer_states
        longest = run.answer_row_length
        own = run.eval.suite.startswith(OWN)
        return Corpora(self.original, run.data, run.seed, self.display, group, states, longest, own)

    @cached_property
    def original(self) -> OriginalBase:
        data = self.run.data
        if data.states.is_used:
            layers = self.run.head_config().read_layers
            return ServedBase(self._read_parts, data.states, data.served_folder, layers, self.display)
        return OriginalBase(
            self._read_parts, self._load_base, shares=self.launch.sharding.shards_base and self.run.drops_layers
        )

    def _base_config(self, sharded: bool) -> BaseConfig:
        # A base that is or will be sharded has no packed weights, because they are not parameters.
        will_be = self.launch.sharding.shards_base and "train" in self.run.stages and not self.is_trained
        return replace(self.run.base, prepack=self.run.base.prepack and not (sharded or will_be))

    def _read_parts(self) -> BaseParts | BaseModel:
        config, device = self._base_config(sharded=False), self.launch.accelerator.device
        parts = BaseParts.of_checkpoint(config, device, self.display.line)
        # The first load on a machine times kernels, and hidden states depend on the choice.
        return parts if self.run.data.states.is_used or restore_kernels(parts) else self._load_base(sharded=False)

    def _load_base(self, sharded: bool) -> BaseModel:
        config, sharding, device = self._base_config(sharded), self.launch.sharding, self.launch.accelerator.device
        reads_shares = sharded and config.has_whole_tensors
        with self.display.stage(f"base model {config.name or 'random'}"):
            try:
                base = BaseModel.load(
                    config, device, self.display.line, sharding.shard_layers if reads_shares else None
                )
            except torch.OutOfMemoryError:
                if not self.is_trained:
                    raise
                what = f"the head is trained, but the whole base does not fit {device}"
                raise UserError(f"{what}; run later stages on a larger device") from None
            if sharded and not reads_shares:
                sharding.shard_layers(base.model.model)
                drop_views(base)
            if base.kernels is not None:
                self.display.line(f"   fastest matrix products here, by number of rows: {base.kernels}")
        return base

    @cached_property
    def base(self) -> BaseModel:
        """The base that the trained head drafts for: the original base, with the adapter if the run trained one."""
        if not self.run.trains_base:
            return self.original.whole()
        config = replace(self.run.base, adapter=str(self.head_folder / ADAPTER))
        return BaseModel.load(config, self.original.parts.device)

    @cached_property
    def tracker(self) -> Tracker:  # of the main process
        run = self.run
        settings = asdict(run) | {"head": {**run.head, **asdict(run.head_config())}}  # with the head's own defaults
        return Tracker(self.launch.accelerator, run.tracker, self.folder, run.name, settings, self.display.line)

    def close(self, error: type[BaseException] | None, *_: object) -> None:
        """Stop the run's own server, and close the tracker if a stage has opened it. After an ``error``, the tracker's
        run counts as failed."""
        if "original" in vars(self):
            self.original.close()
        if "tracker" in vars(self):
            self.tracker.finish(failed=error is not None)

    @cached_property
    def eval(self) -> EvalConfig:
        """Settings of the evaluation. A suite ``own:NAME`` is replaced by a file of held-out prompts, or by NAME."""
        run, path, fallback = self.run, self.folder / SUITE, self.run.eval.suite.removeprefix(OWN)
        if fallback == run.eval.suite:
            return run.eval
        if not (prompts := self.corpora.suite_prompts):
            count = len({number % TURN_STRIDE for number in self.corpora.answers().done})
            reason = f"{count} conversations are too few to hold {FEWEST_SUITE_PROMPTS} out; 40 are enough"
            self.display.line(f"   the tree and the report are measured on {fallback}: {reason}")
            return replace(run.eval, suite=fallback)
        write_atomic(path, "".join(json.dumps({"input_ids": ids, "task": "own prompts"}) + "\n" for ids in prompts))
        self.display.line(
            f"   the tree and the report are measured on {len(prompts)} of your prompts, which are not trained on "
            f"({path}); eval.suite={fallback} measures on that suite and trains on these too"
        )
        return replace(run.eval, suite=str(path))

    @cached_property
    def development_answers(self) -> list[Answer] | None:
        """The base's answers to the suite's dev half; None unless ``eval.split=test`` and ``tree_prompts`` > 0."""
        run = self.run
        if run.eval.split != "test" or not run.tree_prompts:
            return None
        return development_answers(self.base, self.eval, run.tree_prompts, self.load_head().spec)

    @property
    def agreement(self) -> str | None:  # None without transcripts
        path = self.folder / TRANSCRIPTS
        return agreement_line(read_json(path)) if path.exists() else None

    def new_head(self, start: bool = True) -> DraftHead:
        """Return the head to train, with the base's adapters if the run trains it: of ``init_from`` or new. With
        ``start`` false, no initial weights are computed, because the caller loads trained ones."""
        config, original = self.run.head_config(), self.original
        base = original.parts if self.run.drops_layers else original.whole()  # sharded when the training begins
        if self.run.init_from is not None:
            head = load_head(self.run.init_from, base, any_base=True)
            head.tree, head.tree_costs, head.prefers_cost = None, None, False
            if config != head.config:
                head = with_settings(head, config)
            return with_more_ids(head, self.corpora.repeated_ids()) if self.run.extend_vocabulary else head
        size = config.draft_vocab_size
        d2t = None if size is None or size >= base.vocab_size else self.corpora.draft_vocabulary(size)
        copies = start and config.starts_from_layers
        head = config.build(base, d2t, start=start and not copies)
        if copies:
            head.load_state_dict(config.build(original.whole(), d2t).state_dict())
        if self.run.trains_base:
            head.train_base(now=False)
        return head

    @property
    def is_served(self) -> bool:
        """True if a server runs the base, whose layers are never loaded here."""
        return isinstance(self.original, ServedBase)

    def load_head(self) -> DraftHead:
        if not (self.head_folder / "config.json").exists():
            raise UserError(f"{self.head_folder} holds no head yet; run the stage train first")
        return load_head(self.head_folder, self.original.parts if self.is_served else self.base)


def run_pipeline(run: RunConfig, resolved: str) -> None:
    """Run the stages ``run.stages`` of a run on this process. ``resolved`` is the recipe as YAML, to store."""
    with ExitStack() as at_end, launched(run) as launch:
        context = RunContext(run, launch)
        at_end.push(context.close)  # after ``launched`` has told the other processes of an error
        if launch.is_main:
            preflight(run, launch.accelerator.num_processes)
            at_end.enter_context(claimed(context.folder))
            open_folder(run)
            for warning in write_provenance(context.folder, resolved):
                launch.display.line(f"warning: {warning}")
        launch.accelerator.wait_for_everyone()
        for name, stage in STAGES.items():
            if name in run.stages and (launch.is_main or name in COLLECTIVE):
                if name not in COLLECTIVE and "corpora" in vars(context):
                    context.corpora.group = ProcessGroup()  # the other processes have ended
                stage(context)
        if launch.is_main and "card" not in run.stages and run.stages != ["corpora"]:
            _print_commands(context)
        launch.display.line(
            "time: " + ", ".join(f"{name.split(':')[0]} {seconds:.0f} s" for name, seconds in launch.display.stages)
        )


def corpora(context: RunContext) -> None:
    """Make the answers or transcripts, and pack text into rows unless it is streamed. All processes share the work."""
    corpora, display, run = context.corpora, context.display, context.run
    served = isinstance(context.original, ServedBase)
    if not (corpora.is_complete or served) and context.launch.is_main:
        durations = StageDurations(run, context.original.whole(), context.launch.accelerator.num_processes).table()
        display.console.print(durations)
    with unchanged_rng(), display.stage(f"corpus: {contents(run)}"):
        stats = corpora.answers().stats()
        display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} with an end of turn")
        if context.launch.is_main:
            _ = context.eval  # prints its prompts
            copies, compared = corpora.near_copies()
            if copies > compared * MOST_COPIES:
                display.line(
                    f"   warning: {copies} of {compared} held-out answers nearly repeat an answer that is trained on, "
                    "so held-out accuracy and tau hold only for prompts like these"
                )
    lengths = {phase.seq_len for phase in run.phases.values() if phase.corpus == "text" and not run.data.text.stream}
    for seq_len in sorted(lengths):
        with unchanged_rng(), display.stage(f"corpus: text in rows of {seq_len}"):
            rows = corpora.text_rows(seq_len)
        display.line(f"   {len(rows)} rows of {seq_len} tokens")
    if served and run.data.states.keep:
        spec = HiddenStatesSpec(layers=run.head_config().read_layers(context.original.parts.num_layers))
        with unchanged_rng(), display.stage("hidden states from the server"):
            for name in run.phases:
                open_phase_of(run, name, corpora, spec, context.launch.processes.count)
            open_held_out(corpora, run.answer_row_length, spec, stored=True)
        context.original.close()
    display.line(f"corpora: {run.data.folder}")


def train(context: RunContext) -> None:
    """Train the head through all phases, and save it in the run folder. All processes take part."""
    run, launch, corpora = context.run, context.launch, context.corpora
    tracker = context.tracker if launch.is_main else None
    corpora.answers()
    if launch.is_main and corpora.agreement is not None:
        write_json(context.folder / TRANSCRIPTS, corpora.agreement)
    set_seed(run.seed)
    head = context.new_head(start=checkpoint.load_latest(context.checkpoints) is None)
    if len(head.d2t) < head.vocab_size:
        counts = corpora.answers().token_counts(head.vocab_size, corpora.measures)
        share = 100 * counts[head.d2t.cpu().numpy()].sum() / counts.sum()
        ids = f"{len(head.d2t):,} of {head.vocab_size:,} ids, {share:.2f} % of the answers' tokens"
        more = "; ids of the context, too" if head.config.drafts_context else ""
        context.display.line(f"   draft vocabulary: {ids}{more}")
    asked = run.head_config().draft_vocab_size
    if run.init_from is None and asked is not None and len(head.d2t) < min(asked, head.vocab_size) / 2:
        context.display.line(
            f"   warning: head.draft_vocab_size={asked:,}, but the answers have only {len(head.d2t):,} different "
            "tokens, and the head can draft no others; more prompts give more tokens"
        )
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    context.display.line(
        f"   head: {type(head).__name__}, {head.depth} draft positions, {trained:,} trained parameters"
    )
    if run.init_from is not None and launch.is_main:
        trained_for = read_head_config(resolve_folder(run.init_from))["base"]
        if not same_base(str(trained_for.get("fingerprint")), head.base.fingerprint):
            context.display.line(f"   {run.init_from} was trained for another base: {described(trained_for)}")
        _measure_continued(context, load_head(run.init_from, head.base, any_base=True), "before")
    Trainer(run, head, corpora, context.folder, launch, tracker).train()
    del head
    launch.accelerator.wait_for_everyone()
    launch.sharding.close()
    if not launch.is_main:
        return
    corpora.group, context.is_trained = ProcessGroup(), True  # the main process continues alone
    save_training_plots(read_json_lines(context.folder / "metrics.jsonl"), context.folder / "plots")
    _save_trained_head(context)
    if run.init_from is not None:
        _measure_continued(context, context.load_head(), "after")


def _measure_continued(context: RunContext, head: DraftHead, when: str) -> None:
    """Measure acceptance of a head with continued training, on held-out answers of the new data and of ``init_data``.
    Lengths "before" training are stored in ``init_from.json``, and measured only once."""
    path, run, display = context.folder / CONTINUED, context.run, context.display
    lengths = read_json(path) if path.exists() else {}
    stores = {"new": context.corpora.answers()}
    if run.init_data:
        stores["old"] = open_answers(Path(run.init_data))
    if when == "after" or stores.keys() - lengths.get(when, {}).keys():  # a resumed run may add ``init_data``
        with unchanged_rng(), display.stage(f"acceptance {when} training on: {', '.join(stores)} data"):
            measured = {name: _held_out_length(context, head, store) for name, store in stores.items()}
        lengths[when] = {name: length for name, (length, _) in measured.items()}
        write_json(path, lengths)
        for name, (length, answers) in measured.items() if when == "after" else ():
            before = lengths["before"][name]
            what = f"{name} data, {answers} held-out answers"
            display.line(f"   {what}: mean accepted length {before:.2f} before, {length:.2f} after")


def _held_out_length(context: RunContext, head: DraftHead, store: AnswerStore) -> tuple[float, int]:
    """Return the mean accepted length of greedy chains, simulated on some of the held-out answers in ``store``, and the
    number of these. If a server has the base's layers, their states are stored."""
    if context.is_served and store.folder == context.corpora.answers().folder:
        probs = [accept_probs_of_ranks(ranks, 1) for ranks in _tree_ranks(context, head)]
    elif context.is_served:
        probs, _ = stored_accept_probs(store.folder.parent, head, MAX_HELD_OUT_ANSWERS, _is_held_out)
    else:
        stored = store.read(with_hidden_states=False)
        answers = [answer for answer in stored if _is_held_out(answer)]
        probs = [accept_probs_of_ranks(ranks, 1) for ranks in text_ranks(head, answers[:MAX_HELD_OUT_ANSWERS])]
    if not probs:
        raise UserError(f"{store.folder} has too few answers to hold some out; raise data.answers.prompts")
    return simulate_acceptance(probs, TokenTree.chain(head.depth)).mean_accepted_length, len(probs)


def _is_held_out(answer: Answer) -> bool:
    return is_held_out(answer.prompt_number)


def _save_trained_head(context: RunContext) -> None:
    """Write the head with the weights of the best or the last checkpoint (``checkpoint.final``) to the run folder."""
    last, best = checkpoint.load_latest(context.checkpoints), checkpoint.load_best(context.checkpoints)
    assert last is not None
    chosen = last
    if best is not None and best.path != last.path:
        step = f"step {best.state['global_step']} (over all phases)"
        score = f"held-out mean accepted length {best.state['score']:.3f}, after {step}"
        if context.run.checkpoint.final == "best":
            chosen = best
            context.display.line(f"   the weights are the best ones: {score}")
        else:
            context.display.line(f"   {best.path} has better weights ({score}); checkpoint.final=best takes them")
    head = context.new_head(start=False)
    checkpoint.load_weights(head, chosen)
    head.save_pretrained(context.head_folder)


def quality(context: RunContext) -> None:
    """Measure how much training changed the base, on held-out text and answers, into ``quality.json``. If it exceeds
    one of ``quality_limits``, the later stage card ends the run with an error."""
    run, display, corpora = context.run, context.display, context.corpora
    if not run.trains_base:
        return

    def batches(name: str, rows: PackedRows) -> Iterator[TrainBatch]:
        for n in range(len(rows)):
            display.progress(f"held-out {name}, read by both bases", n, len(rows))
            yield rows.batch([n])

    with display.stage("the trained base compared with the original one"):
        rows_by_name = {"answers": corpora.answer_rows(run.answer_row_length, held_out=True)}
        text = unseen_text(corpora, run.phases)
        if text is not None:
            rows_by_name = {"text": text, **rows_by_name}
        bases = context.original.whole(), context.base
        comparisons = {name: compare_bases(*bases, batches(name, rows)) for name, rows in rows_by_name.items()}
        result = check_quality(comparisons, run.quality_limits)
        for folder in (context.folder, context.head_folder):
            write_json(folder / QUALITY, result)
        display.console.print(quality_table(result).console())
        display.line(quality_line(result))


def tree(context: RunContext) -> None:
    """Choose the tree with the highest expected speedup on this machine, once, and save it with the head."""
    run, display, head = context.run, context.display, context.load_head()
    if context.is_served:
        _choose_chain(context, head)
        return
    path = context.folder / CALIBRATION
    source = "held-out answers of the training data"
    chosen_on: str = run.tree_search
    if (config := context.eval).split == "test" and run.tree_prompts:
        count = len(load_suite(config.suite, run.tree_prompts, config.seed, config.tasks, "dev"))
        source = f"answers to {count} prompts of {suite_label(config.suite)} (dev half)"
        chosen_on += repr((run.tree_prompts, config.suite, config.seed, config.tasks))
        chosen_on += repr((config.sampler, config.max_new_tokens))
    with display.stage(f"tree: step costs on this machine, acceptance on {source}"):
        calibrated = load_calibration(path, head, chosen_on)
        if calibrated is None:
            costs = measure_costs(head.base_model, head, progress=display.progress)
            calibrated = costs, calibrate(_tree_ranks(context, head), costs, run.tree_search)
            save_calibration(path, head, *calibrated, chosen_on)
            head.batch_trees, head.tree_costs = {}, None
        costs, calibration = calibrated
        head.tree = calibration.tree
        by_cost = f"{'' if head.prefers_cost else 'not '}the default, as chosen before"
        if head.tree_costs is None:
            head.tree_costs = _tree_costs(context, head, costs, calibration)
            by_cost = _choose_by_cost(context, head, calibration)
        for rows in run.tree_batches:
            if rows not in head.batch_trees:
                longest = batch_context([text.middle for text in context.development_answers or ()], rows)
                costs_of_batch = measure_costs(head.base_model, head, longest, rows=rows, progress=display.progress)
                batch = calibrate(_tree_ranks(context, head), costs_of_batch, run.tree_search)
                pays = batch.expected_speedup > 1
                head.tree_costs = head.tree_costs.with_rows(rows, costs_of_batch, batch.expected_speedup)
                head.batch_trees = {**head.batch_trees, rows: batch.tree if pays else TokenTree.chain(0)}
                expected = f"{len(batch.tree)} nodes, expect speedup {batch.expected_speedup:.2f}"
                display.line(f"   batches of {rows}: {expected if pays else 'no drafts, because they would not pay'}")
        head.save_pretrained(context.head_folder)
        display.line(
            f"   {len(calibration.tree)} nodes: expect a mean accepted length of {calibration.expected_tokens:.2f}, "
            f"speedup {calibration.expected_speedup:.2f}; with 64 nodes a length of "
            f"{calibration.expected_tokens_largest:.2f}"
            + (f" (without its threshold of {head.confidence_threshold:g})" if head.confidence_threshold else "")
        )
        display.line(f"   trees by cost: {by_cost}")
        display.line(f"   {other_processes_line(costs.other_processes_cores)}")


def _tree_costs(context: RunContext, head: DraftHead, costs: CostModel, calibration: Calibration) -> TreeCosts:
    """Return what trees by cost need: costs of a step, and how often drafts are accepted. The acceptance is fitted on
    the answers to the suite's dev half; without them, it is the drafter's own probability."""
    measured = TreeCosts(costs={1: costs}, speedup={1: calibration.expected_speedup})
    texts, sampler = context.development_answers, Sampler(temperature=context.eval.sampler.temperature)
    return with_acceptance(head.base_model, head, texts, sampler, measured) if texts else measured


def _choose_by_cost(context: RunContext, head: DraftHead, calibration: Calibration) -> str:
    """Make trees by cost the default of ``head`` if they are expected to be faster than its tree; return what to print
    about it."""
    head.prefers_cost = False
    if not context.development_answers:
        return "not the default, because their acceptance was not fitted to answers of a dev half"
    if head.confidence_threshold:
        return "not the default, because the head has a confidence threshold"
    speedup, nodes = speedup_by_cost(head, context.development_answers, context.eval.sampler.temperature)
    gain = speedup / calibration.expected_speedup
    head.prefers_cost = gain >= LEAST_GAIN
    return f"expect speedup {speedup:.2f} with {nodes:.1f} nodes on average, {gain - 1:+.1%}: " + (
        "now the default" if head.prefers_cost else f"not the default, which needs {LEAST_GAIN - 1:+.1%}"
    )


def _choose_chain(context: RunContext, head: DraftHead) -> None:
    """Give ``head`` a chain of all its draft positions, as engines draft. Without the base's layers, no step costs are
    known by which a tree could be chosen."""
    with context.display.stage("acceptance on held-out answers of the training data, without the base's layers"):
        tables = [accept_probs_of_ranks(ranks, WIDTH) for ranks in _tree_ranks(context, head)]
        head.tree = TokenTree.chain(head.depth)
        head.save_pretrained(context.head_folder)
        best = greedy_tree(tables, COMPARED_NODES - 1).tree(COMPARED_NODES - 1)
        chain, tree = (simulate_acceptance(tables, each).mean_accepted_length for each in (head.tree, best))
        context.display.line(
            f"   mean accepted length {chain:.2f} with a chain of {head.depth}, {tree:.2f} with a tree of "
            f"{COMPARED_NODES} nodes; the head has the chain"
        )


def _tree_ranks(context: RunContext, head: DraftHead) -> list[Ranks]:
    """Return the ranks of the true tokens among the head's candidates, for each answer on which the tree is chosen.
    Without a dev half, these are the held-out answers of the training data."""
    run = context.run
    if not context.is_served and context.development_answers is not None:
        return text_ranks(head, context.development_answers)
    is_cached = any(phase.store_hidden_states for phase in run.phases.values())  # then also the held-out answers
    trained = OriginalBase.of(head.base_model) if run.trains_base else None
    held_out = open_held_out(context.corpora, run.answer_row_length, head.spec, is_cached, trained)
    return [ranks for row in held_out.subset for ranks in answer_ranks(head, *held_out.load([int(row)]))]


def evaluate(context: RunContext) -> None:
    """Answer the suite's prompts with the head and the baselines; write ``eval.json`` and ``report.html``."""
    config, display, head = context.eval, context.display, context.load_head()
    if context.is_served:
        _evaluate_unloaded(context, head)
        return
    calibrated = load_calibration(context.folder / CALIBRATION, head)
    if calibrated is None:
        raise UserError(f"{context.folder / CALIBRATION} is missing or does not fit; run stages=[tree,evaluate]")
    costs, calibration = calibrated
    head.tree = calibration.tree
    log = read_json_lines(context.folder / "metrics.jsonl")
    with display.stage(f"evaluation: {suite_label(config.suite)}"):
        drafter, draft_config = config.build(head.base_model, head, config.draft_config(head))
        evaluation = evaluate_drafter(
            head.base_model,
            drafter,
            config,
            context.folder,
            display,
            draft_config=draft_config,
            head=head,
            calibration=calibration,
            costs=costs,
            training_log=log,
            development=context.development_answers,
            training_data=context.agreement,
        )
    display.console.print(console_table(evaluation))
    for line in console_lines(evaluation, log):
        display.line(line)
    context.tracker.finish(evaluation)
    if config.sampler.greedy:
        prompt = load_suite(config.suite, 1, config.seed, config.tasks, config.split)[0]
        ids = conversation_ids(head.base.tokenizer, prompt, template_kwargs=context.run.base.chat_template_kwargs)
        tokens = min(SHOWN_TOKENS, config.max_new_tokens)
        display.console.print(side_by_side(head.base_model, drafter, draft_config, ids, tokens))


def _evaluate_unloaded(context: RunContext, head: DraftHead) -> None:
    config, display = replace(context.eval, engines=[ENGINE]), context.display
    log = read_json_lines(context.folder / "metrics.jsonl")
    with display.stage(f"evaluation in vLLM: {suite_label(config.suite)}"):
        evaluation = evaluate_unloaded(head, config, context.folder, display, log, context.agreement)
    display.console.print(console_table(evaluation))
    for line in console_lines(evaluation, log):
        display.line(line)
    context.tracker.finish(evaluation)


def card(context: RunContext) -> None:
    """Write the model card and print commands for the head; reject a base that changed more than allowed."""
    run, folder, path = context.run, context.folder, context.folder / "eval.json"
    if not path.exists():
        raise UserError(f"{path} is missing; run the stage evaluate first")
    saved = checkpoint.checkpoints(context.checkpoints)
    processes = checkpoint.saved_state(saved[-1]).get("processes", 1) if saved else 1
    result = read_json(folder / QUALITY) if run.trains_base else None
    stats = context.corpora.answers().stats(leave_out=context.corpora.is_left_out)
    write_card(run, context.load_head(), stats, read_json(path), result, folder, processes, context.agreement)
    _print_commands(context)
    for line in serving_lines(context.load_head(), context.head_folder):
        context.display.line(line)
    if result is not None and not result["passed"]:
        raise UserError(
            f"the base changed more than quality_limits allow: {'; '.join(result['failures'])}. The head in "
            f"{context.head_folder} works with the changed base; to change it less, lower head.heads_weight or the "
            "steps of phases with train_base, and start over with resume=false"
        )


def _print_commands(context: RunContext) -> None:
    head, report = context.head_folder, context.folder / "report.html"
    commands = {
        "try it": f'drafthead generate {quote(f"head={head}")} "Why is the sky blue?"',
        "measure it on other prompts": f"drafthead eval {quote(f'head={head}')} suite=spec_bench_like limit=18",
        "look at the report": str(report) if report.exists() else "",
    }
    for purpose, command in commands.items():
        if command and (head / "config.json").exists():
            context.display.line(f"{purpose}:")
            context.display.line(f"   {command}")


def push(context: RunContext) -> None:
    run, display = context.run, context.display
    if run.push:
        with display.stage("upload to the Hub"):
            repository = run.hub.repo or run.name
            address = push_to_hub(context.head_folder, repository, private=run.hub.private, log=display.line)
        display.line(f"pushed: {address}")


STAGES: dict[str, Callable[[RunContext], None]] = {
    stage.__name__: stage for stage in (corpora, train, quality, tree, evaluate, card, push)
}
COLLECTIVE = ("corpora", "train")  # all processes take part; the other stages run on the main process only
