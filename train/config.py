"""The run schema: every key a recipe may set, its type, its default and its limits."""
# Settings of a run's corpora.

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from drafthead.data.answers.config import SamplerConfig, ServerConfig
from drafthead.data.text.sources import SourceConfig, iter_documents, iter_prompts
from drafthead.data.utils.config import parse, schema
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.hub import HubConfig, require_login
from drafthead.eval.config import EvalConfig
from drafthead.eval.metrics.base_quality import GateConfig
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.timing.methods import check_drafters, check_peers
from drafthead.eval.trees.choice import METHODS
from drafthead.models.base.config import BaseConfig
from drafthead.models.heads.common.contract import DraftHeadConfig, parse_head
from drafthead.models.heads.common.losses import LossConfig

COMPLETE = "complete.json"
"""Written when every prompt is answered: the server is not needed any more."""
SHARD_MODES = ("none", "head", "full")
TRACKER_MODES = ("auto", "online", "offline", "disabled")
HISTORY = 16
"""Losses before the median says anything: until then only what is not finite is skipped."""
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
"""Remaining part of the decay, 1 -> 0, over the part of its steps that is done, 0 -> 1."""
WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "parabolic": lambda done: 1 - (1 - done) ** 2,
}
"""Part of the peak reached over the part of the warm-up that is done, both 0 -> 1."""
STARTS = ("warmup", "start")


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule, one per phase."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (biases, norms) never decay."""
    warmup_steps: int = 0
    """Steps that rise to the peak; 0 starts at the peak."""
    schedule: str = "cosine"
    """How the learning rate falls until the last step: ``cosine``, ``linear`` or ``constant``."""
    decay_from: str = "warmup"
    """Where the fall begins: ``warmup``, at its end; or ``start``, at step 0, and while the warm-up lasts the lower of
    the two counts (IBM's MLPSpeculator recipe)."""
    final_lr_ratio: float = 0.1
    """Learning rate of the last step as a fraction of the peak; ``constant`` ignores it."""
    warmup: str = "linear"
    """``linear``, or ``parabolic``: 1 - (1 - x)^2, steep first (IBM's MLPSpeculator recipe)."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        limits = (
            ("lr", 0 < self.lr < 1, "in (0, 1)", self.lr),
            (
                "betas",
                len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
                "two numbers in [0, 1)",
                self.betas,
            ),
            ("weight_decay", self.weight_decay >= 0, ">= 0", self.weight_decay),
            ("warmup_steps", self.warmup_steps >= 0, ">= 0", self.warmup_steps),
            ("schedule", self.schedule in SCHEDULES, f"one of {list(SCHEDULES)}", self.schedule),
            ("decay_from", self.decay_from in STARTS, f"one of {list(STARTS)}", self.decay_from),
            ("final_lr_ratio", 0 <= self.final_lr_ratio <= 1, "in [0, 1]", self.final_lr_ratio),
            ("warmup", self.warmup in WARMUPS, f"one of {list(WARMUPS)}", self.warmup),
            ("clip_norm", self.clip_norm >= 0, ">= 0 (0 is off)", self.clip_norm),
        )
        for key, holds, limit, value in limits:
            if not holds:
                raise UserError(f"optim.{key} must be {limit}, got {value}")


@dataclass(kw_only=True)
class LossSpikeConfig:
    """Which updates are skipped, and how many may be."""

    spike: float = 5.0
    """An update is skipped when its loss exceeds this many times the median of the latest ones; 0: only when the loss
    or its gradient is not finite."""
    window: int = 100
    """Latest steps of the phase that the median and the count are taken over."""
    limit: int = 10
    """Updates that may be skipped among them; one more ends the run, with the weights of the last good update."""

    def __post_init__(self) -> None:
        if self.spike != 0 and not 1 < self.spike < math.inf:
            raise UserError(f"guard.spike must be > 1, or 0 to skip nothing finite, got {self.spike}")
        if self.window < HISTORY:
            raise UserError(f"guard.window must be at least {HISTORY}, got {self.window}")
        if not 0 <= self.limit < self.window:
            raise UserError(f"guard.limit must be in [0, guard.window), got {self.limit}")


PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True)
class ShardConfig:
    """How training is spread over devices, and what it computes in."""

    mode: str = "none"
    """What is sharded: ``none``, ``head`` (its weights, gradients and moments) or ``full`` (the base's layers, too)."""
    hybrid: bool = False
    """Shard within every node, and replicate over nodes: less traffic between them, more memory."""
    precision: str = "float32"
    """What the head computes in: ``float32``, or ``bfloat16`` with weights and sums of gradients in float32."""
    checkpointing: bool = False
    """Compute the activations of heads that attend again in the backward pass instead of keeping them."""
    offload_base: bool = False
    """The base's shards wait in host memory and come to the device layer by layer; needs ``mode: full``."""

    def __post_init__(self) -> None:
        if self.mode not in SHARD_MODES:
            raise ValueError(f"shard.mode must be one of {list(SHARD_MODES)}, got {self.mode!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"shard.precision must be one of {list(PRECISIONS)}, got {self.precision!r}")
        if self.hybrid and self.mode == "none":
            raise ValueError("shard.hybrid=true has nothing to shard within a node; set shard.mode to head or full")
        if self.offload_base and self.mode != "full":
            raise ValueError(f"shard.offload_base=true needs shard.mode=full, got {self.mode}")


THROUGH_ACCELERATE = (
    "tensorboard", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio",
)  # fmt: skip
KINDS = ("none", "wandb", *THROUGH_ACCELERATE)


@dataclass(kw_only=True)
class TrackerConfig:
    """An experiment tracker besides ``metrics.jsonl``."""

    kind: str = "none"
    """``none``, ``wandb``, or one that accelerate knows (each needs its package): ``tensorboard``, ``mlflow``, ...
    Besides tensorboard, none of those was tried."""
    project: str = "drafthead"
    entity: str | None = None
    """wandb user or team; None is the account's default."""
    run_name: str | None = None
    """None takes the run's own name."""
    mode: str = "auto"
    """wandb's. ``auto`` obeys WANDB_MODE, else is online when a login is found and offline when none is."""

    def __post_init__(self) -> None:
        for key, allowed in (("kind", KINDS), ("mode", TRACKER_MODES)):
            if getattr(self, key) not in allowed:
                raise UserError(f"tracker.{key} must be one of {list(allowed)}, got {getattr(self, key)!r}")


@dataclass(kw_only=True)
class TextConfig:
    """Text of the pretraining phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    max_tokens: int = 100_000
    """Tokens packed on disk; a stream has no limit."""
    stream: bool = False
    """Read and pack the text while training, over and over, instead of keeping rows on disk: for what is larger than
    the disk. Near-duplicates are not left out."""
    stream_shards: int = 8
    """Parts of a stream's sources; with a multiple of the processes each process reads parts of its own."""
    workers: int = 2
    """Threads of a process that pack a stream's rows ahead of their use."""

    def __post_init__(self) -> None:
        for key, least in (("max_tokens", 64), ("stream_shards", 1), ("workers", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.text.{key} must be at least {least}, got {getattr(self, key)}")

    def manifest(self) -> dict[str, Any]:
        """What decides on the rows."""
        sources = {"sources": [source.manifest() for source in self.sources]}
        return sources | ({"stream_shards": self.stream_shards} if self.stream else {"max_tokens": self.max_tokens})


@dataclass(kw_only=True)
class GenerationsConfig:
    """The base's own answers, for the distillation phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Prompts."""
    prompts: int = 1000
    """Prompts taken from the sources."""
    self_prompted: int = 0
    """Prompts that the base writes itself, besides (it continues its chat template up to the user's turn)."""
    max_prompt_tokens: int = 128
    """Longer prompts are left out."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    slots: int = 64
    """Answers generated at a time by the built-in decoding, on each process."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """A server that generates the answers instead (vLLM, SGLang, TGI)."""
    keep_hidden_states: bool = True
    """Keep the hidden states that generation computes anyway; the distillation phase then needs no pass of the base.
    A server gives none."""

    def __post_init__(self) -> None:
        for key, least in (("prompts", 0), ("self_prompted", 0), ("max_prompt_tokens", 8), ("slots", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.generations.{key} must be at least {least}, got {getattr(self, key)}")
        if self.server.url is not None and self.keep_hidden_states:
            raise ValueError(
                "data.generations.keep_hidden_states must be false with a server, which gives no hidden states; the "
                "distillation phase then computes them"
            )

    def manifest(self) -> dict[str, Any]:
        """What decides on the answers; not how many are made at a time, and where."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("slots", "server")}
        return kept | {"sources": [source.manifest() for source in self.sources]}


@dataclass(kw_only=True)
class DataConfig:
    """Corpora of a run."""

    folder: str = "outputs/corpora"
    """Where corpora are kept; runs with equal settings share them."""
    text: TextConfig = field(default_factory=TextConfig)
    generations: GenerationsConfig = field(default_factory=GenerationsConfig)


RUN_MODES = ("train", "plan")
CORPORA = ("text", "generations")
FEATURES = ("computed", "cached")
FINAL = ("last", "best")
FILES = ("jsonl", "text")
"""Kinds of sources that are read to their end before a run starts, so that a broken line is found then; not those
that are streamed, which may be large."""


@dataclass(kw_only=True)
class PhaseConfig:
    """One training phase."""

    corpus: str = MISSING
    """``text`` (causal-LM pretraining) or ``generations`` (distillation on the base's own answers)."""
    seq_len: int = 512
    """Tokens a packed row."""
    micro_batch_size: int = 8
    """Rows a process and micro-batch."""
    accumulate: int = 1
    """Micro-batches an optimiser step."""
    steps: int = 100
    """Optimiser steps; the corpus is reshuffled and repeated as needed."""
    features: str = "computed"
    """``cached``: the base's hidden states are computed once per row and kept on disk, those of the held-out answers
    too. ``computed``: anew each time."""
    train_base: bool = False
    """Train the base along, through the head's adapters (head=medusa2). ``features`` are the untouched base's."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def cached(self) -> bool:
        """Whether hidden states are kept on disk."""
        return self.features == "cached"

    def __post_init__(self) -> None:
        if self.corpus not in CORPORA:
            raise ValueError(f"phases.*.corpus must be one of {list(CORPORA)}, got {self.corpus!r}")
        if self.features not in FEATURES:
            raise ValueError(f"phases.*.features must be one of {list(FEATURES)}, got {self.features!r}")
        for key, least in (("seq_len", 16), ("micro_batch_size", 1), ("accumulate", 1), ("steps", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"phases.*.{key} must be at least {least}, got {getattr(self, key)}")


@dataclass(kw_only=True)
class CheckpointConfig:
    """When to save, and how much to keep. The end of a phase is saved, too, and every new best."""

    every_steps: int = 200
    keep: int = 2
    """Newest checkpoints; the one with most held-out tokens a step is kept besides."""
    final: str = "last"
    """Which weights the run ends with: the ``last``, or the ``best`` by held-out tokens a step."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep < 1:
            raise ValueError(f"checkpoint.every_steps and .keep must be >= 1, got {self.every_steps} and {self.keep}")
        if self.final not in FINAL:
            raise ValueError(f"checkpoint.final must be one of {list(FINAL)}, got {self.final!r}")


@dataclass(kw_only=True)
class RunConfig:
    """One run: corpora, phases, evaluation."""

    name: str = MISSING
    """Names the run folder, ``outputs/<name>``."""
    seed: int = 0
    mode: str = "train"
    """``plan`` prints what the run will cost, without loading weights."""
    out: str = MISSING
    """The run folder."""
    resume: bool = True
    """Go on from the run folder's newest checkpoint; false starts the run over (corpora are kept)."""
    base: BaseConfig = field(default_factory=BaseConfig)
    head: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """In order. Named, so that one value can be overridden: ``phases.distill.steps=500``."""
    shard: ShardConfig = field(default_factory=ShardConfig)
    """What is spread over several devices: ``shard=none``, ``head``, ``full`` or ``hybrid`` (docs/scale.md)."""
    per_node_data: bool = False
    """Every node makes and keeps corpora and caches of its own under ``data.folder``: for nodes without a common one.
    The run folder must be common in any case."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    """Which updates are skipped, and how many of them end the run."""
    heartbeat_timeout_s: float = 120.0
    """Of several processes, one without a sign of life for this long counts as dead, and the others end."""
    log_every: int = 20
    """Optimiser steps between two console lines."""
    validate_every: int = 200
    """Optimiser steps between two measurements of acceptance on held-out answers."""
    tree_search: str = "search"
    """How the tree is chosen: ``search`` (joint counts of whole paths) or ``sequoia`` (its dynamic program)."""
    gate: GateConfig = field(default_factory=GateConfig)
    """How far phases with ``train_base`` may take the base from what it was; a run that goes too far ends as failed."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    push: bool = False
    """Upload the finished head to the Hub; needs ``HF_TOKEN`` or ``hf auth login``."""
    hub: HubConfig = field(default_factory=HubConfig)
    """Where to: by default a repository of the run's name under the token's own account."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name):
            raise ValueError(f"name must consist of letters, digits, '.', '_' and '-', got {self.name!r}")
        if self.mode not in RUN_MODES:
            raise ValueError(f"mode must be one of {list(RUN_MODES)}, got {self.mode!r}")
        if not self.phases:
            raise ValueError("the recipe has no phases; choose one, e.g. recipe=medusa_smollm2")
        if not any(p.corpus == "generations" for p in self.phases.values()):
            raise ValueError("no phase trains on generations, which acceptance and the tree are measured on; add one")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not 1 <= self.heartbeat_timeout_s < float("inf"):
            raise ValueError(f"heartbeat_timeout_s must be at least 1, got {self.heartbeat_timeout_s}")
        if self.tree_search not in METHODS:
            raise ValueError(f"tree_search must be one of {', '.join(METHODS)}, got {self.tree_search!r}")
        if self.log_every < 1 or self.validate_every < 1:
            raise ValueError("log_every and validate_every must be at least 1")

    @property
    def trains_base(self) -> bool:
        """Whether a phase trains the base along."""
        return any(p.train_base for p in self.phases.values())

    @property
    def answer_row_length(self) -> int:
        """Tokens of the longest rows that answers are packed into."""
        return max(p.seq_len for p in self.phases.values() if p.corpus == "generations")

    def head_config(self) -> DraftHeadConfig:
        """The checked settings of the head that the recipe names."""
        return parse_head(self.head)


ConfigStore.instance().store(name="train_schema", node=schema(RunConfig))


def parse_run(cfg: DictConfig) -> RunConfig:
    """Everything about a run that can be checked without its model and data.

    Raises:
        UserError: with the offending key.
    """
    run = parse(cfg, RunConfig)
    _check_tuning(run)
    _check_stream(run)
    if "num_hidden_layers" in run.base.shape:
        run.head_config().check_layers(run.base.shape["num_hidden_layers"])
    for name, phase in run.phases.items():
        try:
            phase.loss.weights_of(run.head_config().trained_positions)
        except UserError as error:
            raise UserError(f"phases.{name}: {error}") from None
    answer = run.data.generations.max_prompt_tokens + run.data.generations.sampler.max_new_tokens
    if answer > run.answer_row_length:
        raise UserError(
            f"data.generations makes rows of up to {answer} tokens (max_prompt_tokens + max_new_tokens), but phase "
            f"rows hold {run.answer_row_length}; raise phases.*.seq_len or lower them"
        )
    context = run.base.max_context or run.base.shape.get("max_position_embeddings")
    longest = max(answer, *(p.seq_len for p in run.phases.values()))
    if context is not None and longest > context:
        raise UserError(f"rows of {longest} tokens exceed the base's context of {context}; lower phases.*.seq_len")
    return run


def _check_tuning(run: RunConfig) -> None:
    """Refuse phases that train the base where that cannot work, and a gate without one."""
    head = run.head_config()
    names = list(run.phases)
    tuning = [name for name in names if run.phases[name].train_base]
    if not tuning:
        if run.gate != GateConfig():
            raise UserError("gate has limits, but no phase trains the base; set phases.*.train_base or leave gate out")
        return
    if not head.trains_base:
        raise UserError(
            f"phases.{tuning[0]}.train_base needs a head that trains its base, such as head=medusa2; "
            f"{type(head).__name__} cannot"
        )
    if tuning != names[-len(tuning) :]:
        raise UserError(
            f"phases.{names[-1]} leaves the base as it is after phases.{tuning[0]} has changed it, so its heads would "
            "read another base than they are for; put phases with train_base last"
        )
    lengths = {run.phases[name].seq_len for name in tuning if run.phases[name].corpus == "text"}
    if len(lengths) > 1:
        raise UserError(
            f"phases with train_base on text have rows of {sorted(lengths)} tokens: what is kept aside for the gate "
            "would not be the same text; give them one seq_len"
        )
    if run.base.adapter is not None:
        raise UserError(
            f"base.adapter={run.base.adapter} and phases.{tuning[0]}.train_base exclude each other: a head keeps one "
            "adapter; save the base with it as a whole model (peft's merge_and_unload) and name that as base.name"
        )


def _check_stream(run: RunConfig) -> None:
    """Refuse what needs the rows of text on disk where they are streamed."""
    if not run.data.text.stream:
        return
    if run.trains_base:
        raise UserError("data.text.stream keeps no text aside for the gate of a trained base; leave it out")
    for name, phase in run.phases.items():
        if phase.corpus == "text" and phase.features == "cached":
            raise UserError(
                f"phases.{name}.features=cached keeps features of text that data.text.stream reads once; set it to "
                "computed"
            )


def preflight(run: RunConfig) -> None:
    """Everything about a run's inputs that can be checked before its model is loaded.

    Raises:
        UserError: an unknown suite or tree; a source that is empty, misses its column or cannot be reached; a server
            that cannot, or has another model or too short a context.
    """
    if run.push:
        require_login("push=true")
    load_suite(run.eval.suite, run.eval.limit, run.eval.seed, run.eval.tasks)
    check_peers(run.eval.against)
    check_drafters(run.eval.merge)
    answers = run.data.generations
    if answers.server.url is not None and not (Path(run.data.folder) / "generations" / COMPLETE).exists():
        from drafthead.data.answers.server import check_server

        check_server(answers.server, run.base.name, answers.max_prompt_tokens + answers.sampler.max_new_tokens)
    for source in run.data.text.sources:
        whole = source.kind in FILES and not run.data.text.stream
        if _is_empty(iter_documents(source, max_characters=None if whole else 1), whole):
            raise UserError(f"text source {source} is empty; name another one in data.text.sources")
    for source in run.data.generations.sources:
        if _is_empty(iter_prompts(source), source.kind in FILES):
            raise UserError(f"prompt source {source} is empty; name another one in data.generations.sources")


def _is_empty(entries: Iterable[object], whole: bool) -> bool:
    """Whether there are no entries; ``whole`` reads all of them, which finds every broken one."""
    return sum(1 for _ in entries) == 0 if whole else next(iter(entries), None) is None
