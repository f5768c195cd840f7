"""Settings of a training run: every key that a recipe may set, with type, default and limits."""

import re
from collections.abc import Sequence
from dataclasses import asdict, field
from typing import Annotated, Any, Literal, get_args

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from drafthead.data.prompts.suites import OWN
from drafthead.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.metrics.base_quality import QualityLimits
from drafthead.files.hub import HubConfig
from drafthead.models.base.base_config import ADAPTER, EMBEDDED, BaseConfig
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.heads.parts.head_folder import adapter_of, read_head_config, resolve_folder
from drafthead.models.heads.parts.loading import parse_head, saved_head_config
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.heads.parts.windows import WindowConfig
from drafthead.settings.compose import override, parse, schema
from drafthead.settings.schema import NonNegative, Positive, PositiveFloat, Seed, Share, require, settings
from drafthead.train.corpora.corpus_config import DataConfig
from drafthead.train.distributed.sharding import ShardConfig
from drafthead.train.tracking.tracker import TrackerConfig
from drafthead.train.trainer.loss_spikes import LossSpikeConfig
from drafthead.train.trainer.optim import OptimConfig

CHANGEABLE = frozenset({"num_draft_tokens", "ttt_steps", "context_vocabulary", "draft_dtype", "places"})
"""Settings of a head that a continued training may change; draft positions may only be added."""

Stage = Literal["corpora", "train", "quality", "tree", "evaluate", "card", "push"]  # in order; functions of pipeline.py


@settings(kw_only=True)
class BoostConfig:
    """Settings of boosting (SpecInfer): train a head on what another head misses, to combine both in one tree."""

    head: str = ""
    """Folder or repository of the first head, whose misses the new head learns. Empty turns boosting off."""
    floor: Share = 0.1
    """Weight of targets that the first head already drafts; others have weight 1. It drafts a target whose rank among
    its candidates is below its tree's width at that depth."""


@settings(kw_only=True)
class PhaseConfig:
    """Settings of one training phase."""

    corpus: Literal["text", "answers"]
    """Training data of the phase. ``text`` is causal-LM pretraining, ``answers`` is distillation on the base's own
    answers or on ``data.transcripts``."""
    seq_len: Annotated[int, Field(ge=16)] = 512
    """Tokens per packed row."""
    rows_per_step: Positive | None = None
    """Rows per optimiser step, summed over all processes. They are divided into micro-batches, so the global batch does
    not depend on the number of processes. Null: ``grad_accum_steps`` determines the rows."""
    micro_batch_size: Positive = 8
    """Largest number of rows that a process trains at once. It determines memory and speed."""
    grad_accum_steps: Positive | None = None
    """Micro-batches per process and optimiser step. If it is set, ``rows_per_step`` is ignored, and a step has
    ``micro_batch_size`` x ``grad_accum_steps`` rows per process. With both null, ``grad_accum_steps`` is 1."""
    steps: Positive = 100
    """Optimiser steps. The corpus is reshuffled and repeated as needed."""
    max_tokens: Positive | None = None
    """Train on a random subset of the corpus with about this many trained tokens. A larger subset contains every
    smaller one. Null trains on the whole corpus."""
    store_hidden_states: bool = False
    """Store the base's hidden states on disk instead of computing them in every step. The built-in decoding stores an
    answer's final states with it; the base computes all other states once per document. Held-out answers are
    included."""
    position_span: Positive | None = None
    """Train the head's attention as in documents of up to this many tokens. A document's positions skip a random
    distance at a random token (PoSE). For heads whose layers attend (eagle3, dspark) without ``head.window``. Null: no
    skips."""
    train_base: bool = False
    """Also train the base through LoRA adapters (``head=medusa2``). Stored hidden states stay those of the original
    base."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    boost: BoostConfig = field(default_factory=BoostConfig)

    def __post_init__(self) -> None:
        if self.grad_accum_steps is not None:
            self.rows_per_step = None

    def rows(self, processes: int) -> int:  # per optimiser step, over all processes
        return self.rows_per_step or self.micro_batch_size * (self.grad_accum_steps or 1) * processes

    def micro_batches(self, processes: int, rows: int) -> int:  # per process in a step of ``rows`` rows
        return -(-rows // (self.micro_batch_size * processes))

    def batch_line(self, processes: int, rows: int) -> str:
        """Return a line about a step of ``rows`` rows: "64 rows per step (8 per process x 4 x 2 accumulated)"."""
        count = self.micro_batches(processes, rows)
        largest = -(-rows // (processes * count))
        each = f"{largest} per process" if rows == largest * processes * count else f"up to {largest} per process"
        return f"{rows:,} rows per step ({each} x {processes} x {count} accumulated)"


@settings(kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints. They are also saved at the end of a phase, at every new best and on a stop signal."""

    every_steps: Positive = 200
    """Optimiser steps between two checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints to keep. The one with the largest held-out mean accepted length is also kept."""
    final: Literal["last", "best"] = "best"
    """Weights that the run ends with: the ``best`` by held-out mean accepted length, or the ``last``."""


@settings(kw_only=True)
class RunConfig:
    """Settings of one run: corpora, phases, evaluation."""

    name: str
    """Name of the run. Its folder ``out`` is by default ``outputs/NAME``."""
    about: dict[str, str] = field(default_factory=dict)
    """Facts about the recipe: its ``head``, the ``machine`` and time that it needs, and the ``expected`` result."""
    seed: Seed = 0
    """Seed of the head's initial weights, the order of the data and sampling."""
    mode: Literal["train", "estimate"] = "train"
    """``train`` trains a head. ``estimate`` only prints memory, disk and hours; it runs a few steps if the base is on
    this machine."""
    hours: PositiveFloat | None = None
    """With ``mode=estimate``, also print how many steps of the last phase fit this many hours."""
    stages: Annotated[list[Stage], Field(min_length=1)] = field(default_factory=lambda: list(get_args(Stage)))
    """Stages to run; their order in this list has no effect. Each stage reads what it needs from the run folder."""
    out: str
    """Folder of the run."""
    resume: bool = True
    """Resume from the newest checkpoint of the run folder. With false, the results of ``stages`` are removed and made
    again; corpora are kept."""
    base: BaseConfig = field(default_factory=BaseConfig)
    head: dict[str, Any] = field(default_factory=dict)
    """Head to train: ``head=NAME`` chooses a type, ``head.KEY=VALUE`` sets its settings. The keys of each type are in
    docs/reference/settings.md."""
    max_draft_vocab_size: Positive | None = None
    """Upper limit of ``head.draft_vocab_size``, for ``debug=tiny``. A head over the whole vocabulary is not reduced,
    because some export formats need the whole vocabulary."""
    init_from: str | None = None
    """Continue training from this head instead of an untrained one. It is a folder (also of an imported head) or a Hub
    repository. Settings and draft vocabulary are those of that head. A larger ``head.num_draft_tokens`` adds draft
    positions, and ``head.context_vocabulary``, ``head.ttt_steps``, ``head.places`` and ``head.draft_dtype`` may be set.
    Its base may be another one of equal sizes, such as the model that ``base`` was fine-tuned from."""
    extend_vocabulary: bool = False
    """Add tokens that repeat in the answers to the draft vocabulary of the ``init_from`` head. Their rows of trained
    weights start as in a new head."""
    init_data: str | None = None
    """Folder (``data.folder``) of the corpus that the ``init_from`` head was trained on. Acceptance on its held-out
    answers is measured before and after training, because a head can forget when the new data are narrow."""
    data: DataConfig = field(default_factory=DataConfig)
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """Phases in order, each with a name, so that one value can be overridden: ``phases.distill.steps=500``."""
    shard: ShardConfig = field(default_factory=ShardConfig)
    """How weights are divided among devices: ``shard=none``, ``head``, ``full`` or ``hybrid``
    (docs/guides/several_gpus.md)."""
    per_node_data: bool = False
    """Let every node make and keep its own corpora and caches, for nodes without a shared ``data.folder``. The run
    folder must be shared in any case."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss_spikes: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    """Conditions for skipping an update, and the number of skipped updates that ends the run."""
    heartbeat_timeout_s: Annotated[float, Field(ge=1)] = 120.0
    """Seconds without a heartbeat after which a process counts as failed, and the other processes of the run end."""
    log_every: Positive = 20
    """Optimiser steps between two console lines."""
    validate_every: Positive = 200
    """Optimiser steps between two measurements of acceptance on held-out answers. A phase's end is also measured."""
    tree_search: Literal["greedy", "sequoia"] = "greedy"
    """Search for the head's tree. ``greedy`` adds the likeliest node next, by counts of whole accepted paths;
    ``sequoia`` is Sequoia's dynamic program."""
    tree_batches: list[Annotated[int, Field(ge=2)]] = field(default_factory=list)
    """Batch sizes that also get a tree, such as ``[2, 4, 8]``."""
    tree_prompts: NonNegative = 36
    """Number of prompts of ``eval.suite``'s dev half on whose answers the tree is chosen. This needs
    ``eval.split=test``. Otherwise, or with 0, the tree is chosen on held-out training answers."""
    quality_limits: QualityLimits = field(default_factory=QualityLimits)
    """Limits on the change of the base by phases with ``train_base``. A run that exceeds a limit ends as failed."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    push: bool = False
    """Upload the finished head to the Hub. Needs ``HF_TOKEN`` or ``hf auth login``."""
    hub: HubConfig = field(default_factory=HubConfig)
    """Repository to upload to. By default it has the run's name and belongs to the token's account."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("the recipe has no phases; choose one, e.g. recipe=medusa_smollm2")
        if self.init_from == "":
            raise ValueError("init_from is missing, the head to adapt; set init_from=HEAD, a folder or Hub repository")
        if not any(p.corpus == "answers" for p in self.phases.values()):
            raise ValueError("no phase has corpus=answers, but acceptance and the tree need answers; add such a phase")
        name = re.fullmatch(r"[A-Za-z0-9._-]+", self.name) is not None
        require(name, "name", "letters, digits, '.', '_' and '-' only", self.name)
        require(bool(self.out.strip()), "out", "the name of a folder", self.out)
        require(self.push or self.stages != ["push"], "push", "true for stages=[push]", self.push)

    @property
    def trains_base(self) -> bool:
        return any(p.train_base for p in self.phases.values())

    @property
    def drops_layers(self) -> bool:
        """True if the head can be trained without the base's layers, once hidden states are stored."""
        return not self.head_config().needs_layers and (self.init_from is None or self.data.states.is_used)

    @property
    def stores_answer_states(self) -> bool:
        """Return True if the built-in decoding stores final hidden states with the answers, for a phase to read."""
        stored = any(p.corpus == "answers" and p.store_hidden_states for p in self.phases.values())
        return stored and self.data.answers.decoded_here and not self.data.has_given_answers

    @property
    def answer_row_length(self) -> int:  # largest ``seq_len`` of phases on answers, in tokens
        return max(p.seq_len for p in self.phases.values() if p.corpus == "answers")

    def head_config(self) -> DraftHeadConfig:
        return parse_head(self.head)


ConfigStore.instance().store(name="train_schema", node=schema(RunConfig))


def composed(overrides: Sequence[str]) -> RunConfig:
    """Return the checked settings of ``drafthead train OVERRIDES``. Hydra's global state is cleared."""
    GlobalHydra.instance().clear()  # inside a command, it holds the command's own settings
    try:
        with initialize_config_module("drafthead.recipes", version_base="1.3"):
            overrides = [override(item, RunConfig) for item in overrides]
            return parse_run(compose("train", overrides=overrides), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{overrides[0]}: {str(error).splitlines()[0]}") from None


def parse_run(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Convert a composed recipe to checked settings; reject settings that exclude each other. A null
    ``data.answers.fresh`` becomes true if packaged answers are of another base than this one. ``overrides`` are those
    of the command line, which a continued head must not contradict."""
    run = parse(cfg, RunConfig)
    answers = run.data.answers
    if answers.fresh is None:  # packaged answers are those of the embedded base
        is_packaged = (answers.precomputed or "").startswith(f"{EMBEDDED.partition(':')[0]}:")
        answers.fresh = is_packaged and (run.base.name != EMBEDDED or run.base.adapter is not None)
    if run.hours is not None and run.mode != "estimate":
        raise UserError("hours needs mode=estimate; to limit training, set phases.NAME.steps")
    if run.data.offline.folder:
        for phase in run.phases.values():
            phase.store_hidden_states = phase.store_hidden_states or phase.corpus == "answers"
    if not run.data.has_own_prompts or run.eval.tasks:
        run.eval.suite = run.eval.suite.removeprefix(OWN)
    limit, size = run.max_draft_vocab_size, run.head.get("draft_vocab_size")
    if limit is not None and isinstance(size, int):
        run.head["draft_vocab_size"] = min(size, limit)
    if run.init_from is not None and not run.trains_base:
        _take_settings(run, run.init_from, overrides)
    if run.init_data is not None and run.init_from is None:
        raise UserError("init_data needs init_from, which is not set; set init_from to a head, or leave init_data out")
    if run.extend_vocabulary and run.init_from is None:
        raise UserError("extend_vocabulary needs init_from; a new head has head.draft_vocab_size")
    if run.init_from is not None and run.trains_base:
        raise UserError("init_from continues heads of the original base, but a phase has train_base; leave one out")
    if run.per_node_data and run.shard.mode == "full" and not run.shard.hybrid:
        raise UserError("per_node_data=true with shard=full shards the base over nodes; use shard=hybrid")
    _check_base_training(run)
    _check_spans(run)
    _check_served(run)
    _check_stream(run)
    if "num_hidden_layers" in run.base.shape:
        run.head_config().check_layers(run.base.shape["num_hidden_layers"])
    for name, phase in run.phases.items():
        try:
            phase.loss.weights_of(run.head_config().trained_positions)
        except UserError as error:
            raise UserError(f"phases.{name}: {error}") from None
    if run.data.uses_answers and not answers.prompts + answers.self_prompted:
        raise UserError("data.answers has no prompts; set data.answers.prompts or data.answers.self_prompted above 0")
    answer = answers.max_prompt_tokens + answers.sampler.max_new_tokens
    if answer > run.answer_row_length and run.data.uses_answers:
        raise UserError(
            f"data.answers makes rows of up to {answer} tokens, above {run.answer_row_length}; raise phases.*.seq_len"
        )
    context = run.base.max_context or run.base.shape.get("max_position_embeddings")
    longest = max(answer, *(p.seq_len for p in run.phases.values()))
    if context is not None and longest > context:
        raise UserError(f"rows of {longest} tokens exceed the base's context of {context}; lower phases.*.seq_len")
    return run


def _take_settings(run: RunConfig, saved: str, overrides: Sequence[str]) -> None:
    """Set ``run.head`` to the settings of the head that the run continues, and ``CHANGEABLE`` ones to what
    ``overrides`` give. Reject another type of head, overrides of other settings, and fewer draft positions."""
    folder = resolve_folder(saved)
    content = read_head_config(folder)
    head_type, named = content["head_type"], run.head.get("head_type")
    if named is not None and named != head_type:
        raise UserError(f"init_from={saved} is of the type {head_type}, not {named}; set head={head_type}")
    trained = content["base"]
    if adapter_of(trained) and run.base.adapter is None and run.base.name == trained.get("name"):
        what = f"init_from={saved} belongs to {trained['name']} with an adapter, but base has none"
        raise UserError(f"{what}; add base.adapter={folder / ADAPTER}, or name the merged model as base.name")
    kept = asdict(saved_head_config(folder, content))
    given = _head_keys(overrides)
    chosen = {key: value for key, value in run.head.items() if key in given and value != kept.get(key)}
    for key in (chosen.keys() & kept.keys()) - CHANGEABLE:
        what = f"head.{key}={chosen[key]}, but init_from={saved} was trained with {kept[key]}"
        raise UserError(f"{what} and keeps it; leave head.{key} out")
    run.head = {"head_type": head_type, **kept, **chosen}
    config, fewest = run.head_config(), kept["num_draft_tokens"]
    if config.num_draft_tokens < fewest or (config.num_draft_tokens > fewest and not config.can_have_more_positions):
        limit = f"at least {fewest}" if config.can_have_more_positions else f"{fewest}: its weights are scaled for them"
        what = f"head.num_draft_tokens={config.num_draft_tokens}, but init_from={saved} can have {limit}"
        raise UserError(f"{what}; leave head.num_draft_tokens out, or train a new head")


def _head_keys(overrides: Sequence[str]) -> set[str]:
    """Return the settings of the head that ``overrides`` name: ``head.KEY=VALUE`` or ``head={KEY: VALUE}``."""
    keys = set[str]()
    for item in OverridesParser.create().parse_overrides(list(overrides)):
        name, value = item.key_or_group, item.value()
        keys |= {name.removeprefix("head.")} if name.startswith("head.") else set()
        keys |= {str(key) for key in value} if name == "head" and isinstance(value, dict) else set()
    return keys


def _check_base_training(run: RunConfig) -> None:
    head = run.head_config()
    names = list(run.phases)
    tuning = [name for name in names if run.phases[name].train_base]
    if not tuning:
        if run.quality_limits != QualityLimits():
            raise UserError("quality_limits need a phase that trains the base; set phases.*.train_base or drop them")
        return
    if not head.trains_base:
        raise UserError(f"phases.{tuning[0]}.train_base needs head=medusa2; {type(head).__name__} keeps its base")
    if tuning != names[-len(tuning) :]:
        raise UserError(f"phases.{names[-1]} follows phases.{tuning[0]}, which changes the base; put train_base last")
    lengths = {run.phases[name].seq_len for name in tuning if run.phases[name].corpus == "text"}
    if len(lengths) > 1:
        raise UserError(f"phases with train_base on text have rows of {sorted(lengths)} tokens; set the same seq_len")
    if run.base.adapter is not None:
        raise UserError(
            f"base.adapter={run.base.adapter} excludes phases.{tuning[0]}.train_base; merge the adapter into the base"
        )


def _check_spans(run: RunConfig) -> None:
    head = run.head_config()
    for name, phase in run.phases.items():
        key, span = f"phases.{name}.position_span", phase.position_span
        if span is None:
            continue
        if not isinstance(head, WindowConfig):
            raise UserError(f"{key} is for heads whose layers attend (eagle3, dspark), not {head.head_type}; drop it")
        if head.window is not None and not head.full_layers:
            raise UserError(f"{key} has no effect with head.window, which keeps distances short; leave one out")
        if span <= phase.seq_len:
            raise UserError(f"{key}={span} must be above phases.{name}.seq_len={phase.seq_len}; raise it")


def _check_served(run: RunConfig) -> None:
    """Store the hidden states of every phase if a server computes them; reject what needs the base's layers here."""
    if not run.data.states.is_used:
        return
    config, remedy = run.head_config(), "leave data.states out"
    if config.needs_layers or run.trains_base:
        what = f"a head of type {config.head_type} runs or trains layers of its base, which a server has"
        raise UserError(f"{what} (data.states.url); {remedy}")
    if config.starts_from_layers:
        raise UserError(
            "head.copy_layers=true copies layers of the base, which a server has (data.states.url); set it to false"
        )
    for phase in run.phases.values():
        if phase.corpus != "text" or not run.data.text.stream:
            phase.store_hidden_states = True


def _check_stream(run: RunConfig) -> None:
    if not run.data.text.stream:
        return
    if run.trains_base:
        raise UserError("data.text.stream keeps no text on which to check quality_limits; leave stream out")
    for name, phase in run.phases.items():
        for key in ("max_tokens", "store_hidden_states"):
            if phase.corpus == "text" and getattr(phase, key):
                raise UserError(f"phases.{name}.{key} needs text on disk, which data.text.stream lacks; drop one")
