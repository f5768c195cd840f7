"""The schema of a run: every key a recipe may set, its type, its default and its limits."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, field
from typing import Annotated, Any, Literal

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from pydantic import Field

from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.text.sources import SourceConfig
from drafthead.data.utils.compose import parse, schema
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.hub import HubConfig
from drafthead.data.utils.settings import BelowOne, NonNegative, NonNegativeFloat, Positive, Share, require, settings
from drafthead.eval.config import EvalConfig
from drafthead.eval.metrics.base_quality import QualityLimits
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.heads.parts.draft_head import DraftHeadConfig, parse_head
from drafthead.models.heads.parts.losses import LossConfig

STAGES = ("corpora", "train", "quality", "tree", "evaluate", "card", "push")
"""Stages of a run, in order; ``train/pipeline.py`` has a function of each name."""
COMPLETE = "complete.json"
"""File that is written when every prompt is answered. The server is then not needed any more."""
SHARD_MODES = ("none", "head", "full")
AUTO = "auto"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HISTORY = 16
"""Losses needed before the median is used. Until then only steps that are not finite are skipped."""
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
"""Maps of decay progress (0 to 1) to the remaining decay factor (1 to 0)."""
WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "parabolic": lambda done: 1 - (1 - done) ** 2,
}
"""Maps of warm-up progress (0 to 1) to the fraction of the peak (0 to 1)."""


@settings(kw_only=True)
class OptimConfig:
    """Optimiser and learning-rate schedule of a phase."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimiser of the trained weights. ``muon`` uses torch's Muon for the matrices of layers and AdamW for the rest
    (vectors, tables, projections to the vocabulary). Its updates have the size of AdamW's, so one learning rate serves
    both."""
    momentum: BelowOne = 0.95
    """Momentum of Muon; AdamW ignores it."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moment estimates, each in [0, 1)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices. Vectors (biases, norms) never decay."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises to its peak. 0 starts at the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate's decay from the peak to the last step."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Start of the decay: at the end of the warm-up, or at step 0. With ``start``, the lower of warm-up and decay
    applies during the warm-up (IBM's MLPSpeculator recipe)."""
    final_lr_ratio: Share = 0.1
    """Learning rate of the last step, as a fraction of the peak. ``schedule=constant`` ignores it."""
    warmup: Literal["linear", "parabolic"] = "linear"
    """Shape of the warm-up. ``parabolic`` follows 1 - (1 - x)^2, steep at first (IBM's MLPSpeculator recipe)."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down. 0 turns clipping off."""

    def __post_init__(self) -> None:
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(betas, "betas", "two numbers in [0, 1)", self.betas)


@settings(kw_only=True)
class LossSpikeConfig:
    """Limits on the updates that a phase may skip."""

    spike: float = 5.0
    """Skip an update if its loss exceeds this multiple of the recent median. 0 skips only updates whose loss or
    gradient is not finite."""
    window: Annotated[int, Field(ge=HISTORY)] = 100
    """Latest steps of the phase over which the median and the skipped updates are counted."""
    limit: int = 10
    """Updates that may be skipped within the window. One more ends the run, with the weights of the last good
    update."""

    def __post_init__(self) -> None:
        require(self.spike == 0 or 1 < self.spike < math.inf, "spike", "> 1, or 0 to skip nothing finite", self.spike)
        require(0 <= self.limit < self.window, "limit", "in [0, loss_spikes.window)", self.limit)


@settings(kw_only=True)
class ShardConfig:
    """Distribution of training over devices, and its precision."""

    mode: Literal["none", "head", "full"] = "none"
    """Weights that are sharded over the processes. ``head`` shards the head's weights, gradients and moments; ``full``
    shards the base's layers too."""
    hybrid: bool = False
    """Shard within each node and replicate over nodes. This needs less traffic between nodes and more memory."""
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision in which the head computes. With ``bfloat16``, weights and sums of gradients stay in float32. ``auto``
    is bfloat16 on a CPU that multiplies faster in bfloat16, as measured when the base is loaded."""
    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them. It applies to heads with attention over their
    own states."""
    offload_base: bool = False
    """Keep the base's shards in host memory and move them to the device layer by layer. Needs ``shard.mode=full``."""

    def __post_init__(self) -> None:
        require(
            not self.hybrid or self.mode != "none", "hybrid", "false unless shard.mode is head or full", self.hybrid
        )
        require(
            not self.offload_base or self.mode == "full",
            "offload_base",
            "false unless shard.mode is full",
            self.offload_base,
        )


@settings(kw_only=True)
class TrackerConfig:
    """Experiment tracker that receives the metrics in addition to ``metrics.jsonl``."""

    kind: Literal["none", "wandb", "tensorboard"] = "none"
    """Experiment tracker that also receives the metrics. Its package must be installed."""
    project: str = "drafthead"
    """Project of the tracker."""
    entity: str | None = None
    """User or team on wandb. With null, the account's default."""
    run_name: str | None = None
    """Name of the run in the tracker. With null, the run's own name."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of wandb. ``auto`` obeys WANDB_MODE; without it, wandb is online if a login is found and offline
    otherwise."""


@settings(kw_only=True)
class TextConfig:
    """Text of the pretraining phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources of text: a list of ``{kind, name, ...}``. Keys of a source: see SourceConfig in docs/settings.md."""
    max_tokens: Annotated[int, Field(ge=64)] = 100_000
    """Tokens of packed text on disk. A stream ignores it."""
    stream: bool = False
    """Read and pack text during training instead of storing rows on disk. Use it for text larger than the disk. The
    sources are repeated as needed, and near-duplicates are not removed."""
    stream_shards: Positive = 8
    """Shards of a stream's sources. Use a multiple of the process count so that each process reads its own shards."""
    workers: Positive = 2
    """Threads per process that pack a stream's rows ahead of their use."""

    def manifest(self) -> dict[str, Any]:
        """Return the settings that determine the rows."""
        sources = {"sources": [source.manifest() for source in self.sources]}
        return sources | ({"stream_shards": self.stream_shards} if self.stream else {"max_tokens": self.max_tokens})


@settings(kw_only=True)
class AnswersConfig:
    """The base's own answers, for the distillation phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources of prompts: a list of ``{kind, name, ...}``. Keys of a source: see SourceConfig in docs/settings.md."""
    prompts: NonNegative = 1000
    """Prompts taken from the sources."""
    self_prompted: NonNegative = 0
    """Additional prompts that the base writes itself. It continues its chat template up to the user's turn."""
    exclude_suites: list[str] = field(default_factory=list)
    """Evaluation suites to keep out: prompts that nearly repeat one of theirs are removed."""
    max_prompt_tokens: Annotated[int, Field(ge=8)] = 128
    """Longest prompt, in tokens; longer ones are removed."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    precomputed: str | None = None
    """Existing answers to use instead of generating them. ``embedded:smollm2``, ``embedded:smollm2_large``, or the
    folder ``answers`` of another corpus. The base first repeats some of them as a check; then as many are taken as
    prompts are requested."""
    fresh: bool = False
    """Generate the answers even if ``precomputed`` names existing ones."""
    batch_size: Positive = 64
    """Answers that each process generates at a time with the built-in decoding."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """A server that generates the answers instead (vLLM, SGLang)."""

    @property
    def copied(self) -> bool:
        """Return True if the answers are precomputed ones."""
        return self.precomputed is not None and not self.fresh

    @property
    def decoded_here(self) -> bool:
        """Return True if the built-in decoding generates the answers, which then has their final hidden states."""
        return not self.copied and self.server.url is None

    def manifest(self) -> dict[str, Any]:
        """Return the settings that determine the answers, without those of speed and location."""
        without = ("batch_size", "server", "precomputed", "fresh")
        manifest = {key: value for key, value in asdict(self).items() if key not in without}
        if not self.exclude_suites:
            del manifest["exclude_suites"]  # manifests of older corpora lack it
        return manifest | {"sources": [source.manifest() for source in self.sources]}


@settings(kw_only=True)
class DataConfig:
    """Corpora of a run."""

    folder: str = "outputs/corpora"
    """Folder of the corpora. Runs with equal data settings share them."""
    text: TextConfig = field(default_factory=TextConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)

    def __post_init__(self) -> None:
        require(bool(self.folder.strip()), "folder", "the name of a folder", self.folder)


@settings(kw_only=True)
class BoostConfig:
    """Training on what another head misses (SpecInfer's boosting), to combine the two heads in one tree."""

    head: str = ""
    """Folder or repository of the first head, whose misses this head learns. Empty turns boosting off."""
    floor: Share = 0.1
    """Weight of the targets that the first head's tree already contains. Targets that it misses have weight 1."""


@settings(kw_only=True)
class PhaseConfig:
    """One training phase."""

    corpus: Literal["text", "answers"]
    """Training data of the phase. ``text`` is causal-LM pretraining, ``answers`` is distillation on the base's own
    answers."""
    seq_len: Annotated[int, Field(ge=16)] = 512
    """Tokens per packed row."""
    micro_batch_size: Positive = 8
    """Rows per process and micro-batch."""
    grad_accum_steps: Positive = 1
    """Micro-batches per optimiser step."""
    steps: Positive = 100
    """Optimiser steps. The corpus is reshuffled and repeated as needed."""
    max_tokens: Positive | None = None
    """Train on a random subset of the corpus with about this many trained tokens. A larger subset contains every
    smaller one. Null trains on the whole corpus."""
    store_hidden_states: bool = False
    """Store the base's hidden states on disk instead of computing them in every step. Answers are stored with their
    final states during generation; the base computes all other states once per row. Held-out answers are included."""
    train_base: bool = False
    """Also train the base, through the head's LoRA adapters (``head=medusa2``). Hidden states are those of the original
    base."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    boost: BoostConfig = field(default_factory=BoostConfig)


@settings(kw_only=True)
class CheckpointConfig:
    """Checkpoints. The end of a phase and every new best are saved too."""

    every_steps: Positive = 200
    """Optimiser steps between two checkpoints."""
    keep: Positive = 2
    """Newest checkpoints to keep. The one with the largest held-out mean accepted length is kept too."""
    final: Literal["last", "best"] = "best"
    """Weights that the run ends with: the ``best`` by held-out mean accepted length, or the ``last``."""


@settings(kw_only=True)
class RunConfig:
    """One run: corpora, phases, evaluation."""

    name: str
    """Name of the run; its folder is ``outputs/NAME``."""
    seed: NonNegative = 0
    """Seed of the head's initial weights, the order of the data and sampling."""
    mode: Literal["train", "estimate"] = "train"
    """Run mode. ``estimate`` prints what the run will cost, without loading weights."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Stages to run, in order. Each stage reads what it needs from the run folder. Choices: ``corpora``, ``train``,
    ``quality``, ``tree``, ``evaluate``, ``card``, ``push``."""
    out: str
    """Folder of the run."""
    resume: bool = True
    """Resume from the newest checkpoint of the run folder. With false, the run starts over; corpora are kept."""
    base: BaseConfig = field(default_factory=BaseConfig)
    head: dict[str, Any] = field(default_factory=dict)
    """Head to train: ``head=NAME`` chooses a type, ``head.KEY=VALUE`` sets its settings. The keys of each type are in
    docs/settings.md."""
    init_from: str | None = None
    """Continue training from this head instead of an untrained one. It is a folder (also of an imported head) or a Hub
    repository. Settings and draft vocabulary are those of that head, and ``head`` must name its type."""
    init_data: str | None = None
    """Folder (``data.folder``) of the corpus that the ``init_from`` head was trained on. Acceptance on its held-out
    answers is measured before and after training, because a head can forget when the new data are narrow."""
    data: DataConfig = field(default_factory=DataConfig)
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """In order. Named, so that one value can be overridden: ``phases.distill.steps=500``."""
    shard: ShardConfig = field(default_factory=ShardConfig)
    """What is spread over several devices: ``shard=none``, ``head``, ``full`` or ``hybrid`` (docs/scale.md)."""
    per_node_data: bool = False
    """Let every node make and keep its own corpora and caches. Use it for nodes without a shared ``data.folder``; the
    run folder must be shared in any case."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss_spikes: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    """Which updates are skipped, and how many of them end the run."""
    heartbeat_timeout_s: Annotated[float, Field(ge=1)] = 120.0
    """Seconds without a heartbeat after which a process counts as dead and the others end."""
    log_every: Positive = 20
    """Optimiser steps between two console lines."""
    validate_every: Positive = 200
    """Optimiser steps between two measurements of acceptance on held-out answers."""
    tree_search: Literal["greedy", "sequoia"] = "greedy"
    """Search for the head's tree. ``greedy`` uses joint counts of whole paths; ``sequoia`` is Sequoia's dynamic
    program."""
    tree_batches: list[int] = field(default_factory=list)
    """Batch sizes that also get a tree, such as ``[2, 4, 8]``."""
    tree_prompts: NonNegative = 36
    """Prompts of the dev half of ``eval.suite`` on whose answers the tree is chosen. This needs ``eval.split=test``.
    Otherwise, or with 0, held-out training answers choose it."""
    quality_limits: QualityLimits = field(default_factory=QualityLimits)
    """How far phases with ``train_base`` may take the base from what it was; a run that goes too far ends as failed."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    push: bool = False
    """Upload the finished head to the Hub. Needs ``HF_TOKEN`` or ``hf auth login``."""
    hub: HubConfig = field(default_factory=HubConfig)
    """Where to: by default a repository of the run's name under the token's own account."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("the recipe has no phases; choose one, e.g. recipe=medusa_smollm2")
        if not any(p.corpus == "answers" for p in self.phases.values()):
            raise ValueError("no phase trains on answers, which acceptance and the tree are measured on; add one")
        name = re.fullmatch(r"[A-Za-z0-9._-]+", self.name) is not None
        unknown = [stage for stage in self.stages if stage not in STAGES]
        require(name, "name", "letters, digits, '.', '_' and '-' only", self.name)
        require(bool(self.out.strip()), "out", "the name of a folder", self.out)
        require(bool(self.stages) and not unknown, "stages", f"a list of {', '.join(STAGES)}", self.stages)
        require(self.push or self.stages != ["push"], "push", "true for stages=[push]", self.push)
        require(
            all(rows > 1 for rows in self.tree_batches),
            "tree_batches",
            "numbers of rows, each above 1",
            self.tree_batches,
        )

    @property
    def trains_base(self) -> bool:
        """Return True if a phase also trains the base."""
        return any(p.train_base for p in self.phases.values())

    @property
    def stores_answer_states(self) -> bool:
        """Return True if answers are stored with their final hidden states while they are generated."""
        stored = any(p.corpus == "answers" and p.store_hidden_states for p in self.phases.values())
        return stored and self.data.answers.decoded_here

    @property
    def answer_row_length(self) -> int:
        """Return the length of the longest rows of answers, in tokens."""
        return max(p.seq_len for p in self.phases.values() if p.corpus == "answers")

    def head_config(self) -> DraftHeadConfig:
        """Return the checked settings of the head that the recipe names."""
        return parse_head(self.head)


ConfigStore.instance().store(name="train_schema", node=schema(RunConfig))


def parse_run(cfg: DictConfig) -> RunConfig:
    """Return the checked settings of a run, as far as they can be checked without its model and data."""
    run = parse(cfg, RunConfig)
    _check_base_training(run)
    _check_init_from(run)
    _check_stream(run)
    if "num_hidden_layers" in run.base.shape:
        run.head_config().check_layers(run.base.shape["num_hidden_layers"])
    for name, phase in run.phases.items():
        if phase.optim.name == "muon" and run.shard.mode != "none":
            raise UserError(
                f"phases.{name}.optim.name=muon needs whole matrices, and shard.mode={run.shard.mode} splits them; use "
                "shard=none, or adamw"
            )
        try:
            phase.loss.weights_of(run.head_config().trained_positions)
        except UserError as error:
            raise UserError(f"phases.{name}: {error}") from None
    answer = run.data.answers.max_prompt_tokens + run.data.answers.sampler.max_new_tokens
    if answer > run.answer_row_length:
        raise UserError(
            f"data.answers makes rows of up to {answer} tokens (max_prompt_tokens + max_new_tokens), but phase "
            f"rows hold {run.answer_row_length}; raise phases.*.seq_len or lower them"
        )
    context = run.base.max_context or run.base.shape.get("max_position_embeddings")
    longest = max(answer, *(p.seq_len for p in run.phases.values()))
    if context is not None and longest > context:
        raise UserError(f"rows of {longest} tokens exceed the base's context of {context}; lower phases.*.seq_len")
    return run


def _check_init_from(run: RunConfig) -> None:
    """Reject ``init_from`` settings that would have no effect."""
    if run.init_data is not None and run.init_from is None:
        raise UserError("init_data is measured with init_from, which is not set; name a head, or leave it out")
    if run.init_from is not None and run.trains_base:
        raise UserError(
            "init_from starts heads on the original base, and a phase has train_base; leave one of them out"
        )


def _check_base_training(run: RunConfig) -> None:
    """Reject phases that train the base but cannot, and quality limits without such a phase."""
    head = run.head_config()
    names = list(run.phases)
    tuning = [name for name in names if run.phases[name].train_base]
    if not tuning:
        if run.quality_limits != QualityLimits():
            raise UserError(
                "quality_limits has limits, but no phase trains the base; set phases.*.train_base or leave them out"
            )
        return
    if head.lora() is None:
        raise UserError(
            f"phases.{tuning[0]}.train_base needs a head that trains its base, such as head=medusa2; "
            f"{type(head).__name__} cannot"
        )
    if tuning != names[-len(tuning) :]:
        raise UserError(
            f"phases.{names[-1]} trains heads for the original base after phases.{tuning[0]} has changed it; put "
            "phases with train_base last"
        )
    lengths = {run.phases[name].seq_len for name in tuning if run.phases[name].corpus == "text"}
    if len(lengths) > 1:
        raise UserError(
            f"phases with train_base on text have rows of {sorted(lengths)} tokens: the text kept for quality_limits "
            "would not be the same; give them one seq_len"
        )
    if run.base.adapter is not None:
        raise UserError(
            f"base.adapter={run.base.adapter} and phases.{tuning[0]}.train_base exclude each other: a head keeps one "
            "adapter; save the base with it as a whole model (peft's merge_and_unload) and name that as base.name"
        )


def _check_stream(run: RunConfig) -> None:
    """Reject settings that need rows of text on disk if the text is streamed."""
    if not run.data.text.stream:
        return
    if run.trains_base:
        raise UserError("data.text.stream keeps no text for quality_limits of a trained base; leave it out")
    for name, phase in run.phases.items():
        if phase.corpus == "text" and phase.max_tokens is not None:
            raise UserError(
                f"phases.{name}.max_tokens takes a part of rows on disk, and data.text.stream keeps none; leave one out"
            )
        if phase.corpus == "text" and phase.store_hidden_states:
            raise UserError(
                f"phases.{name}.store_hidden_states stores hidden states of text that data.text.stream reads once; set "
                "it to false"
            )
