"""What a run will cost, from shapes alone: parameters, trained tokens, memory per GPU, disk. No weights are loaded.

Memory is a sum of the tensors that the code keeps at the peak of a training step. Allocator fragmentation, the CUDA
context and workspaces of matrix products come on top: keep about 10 % and 1 GiB free.
"""
# What sharding makes of a device's memory, part by part.
# ``mode=estimate``: what a recipe will cost, printed. Needs the base's shape, and no weights.

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from rich.console import Console, Group
from rich.table import Table

from drafthead.models.base.config import check_architecture
from drafthead.models.base.lora import LM_HEAD, LoraSettings
from drafthead.models.base.shape import FLOAT32, ModelShape
from drafthead.models.heads.common.losses import chunk_rows
from drafthead.models.heads.common.size import HeadSize
from drafthead.train.config import PRECISIONS, SHARD_MODES, RunConfig
from drafthead.train.distributed.launcher import with_launcher_settings

GATHERED_LAYERS = 2
"""Layers of a sharded base that are whole at a time: the one that computes, and the one that is on its way."""
BFLOAT16 = 2


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """How a run's weights lie on its devices (``train/sharding.py``)."""

    mode: str = "none"
    """``none``, ``head`` or ``full``."""
    shards: int = 1
    """Devices that share one copy of what is sharded; ``none`` shards nothing."""
    compute_bytes: int = FLOAT32
    """Bytes of a value that the head computes with: 4, or 2 in bfloat16."""
    offload_base: bool = False
    """The base's shards lie in host memory."""
    checkpointing: bool = False
    """What attends in a head is computed again in the backward pass."""

    @property
    def wraps_head(self) -> bool:
        """Whether the head is under ``fully_shard``."""
        return self.mode != "none" or self.compute_bytes < FLOAT32


def sharded_memory(
    memory: dict[str, int],
    shape: ModelShape,
    head: HeadSize,
    tokens: int,
    spread: ShardLayout,
    *,
    base_bytes: int,
    twin: bool,
) -> dict[str, int]:
    """``memory`` of a whole base and head, on a device of ``spread``; N shards, c bytes the head computes with.

    - base weights, ``full``: the tables and the final norm, and 1/N of the layers (none of them when offloaded);
      gathered layers: ``GATHERED_LAYERS`` of them. A base that is trained along has a twin with layers of its own.
    - head weights, gradients, optimiser: 1/N of what is trained. Gathered head: ``c`` bytes a trained parameter.
    - gradients in flight: while they are reduced, whole in ``c`` bytes and once more in float32.
    - head activations: ``c`` bytes a value, without those computed again.

    Args:
        memory: bytes by part, as ``plan`` has them without adapters.
        shape: the base.
        head: the head.
        tokens: of a micro-batch.
        spread: how the weights lie.
        base_bytes: bytes a parameter of the base.
        twin: the run trains the base along in some phase.
    """
    found = dict(memory)
    kept = head.activations_per_token - (head.recomputable_per_token if spread.checkpointing else 0)
    found["head activations"] = tokens * kept * spread.compute_bytes
    shards = 1 if spread.mode == "none" else spread.shards
    if spread.wraps_head:
        shared = -(-head.trainable // shards)
        found["head weights"] = memory["head weights"] - (head.trainable - shared) * FLOAT32
        found["gradients"] = shared * FLOAT32
        found["optimiser"] = shared * 2 * FLOAT32
        found["gathered head"] = head.trainable * spread.compute_bytes
        found["gradients in flight"] = head.trainable * (spread.compute_bytes + FLOAT32)
    if spread.mode == "full":
        copies = 2 if twin else 1
        layers = shape.layer_parameters * shape.num_layers * base_bytes
        found["base weights"] = memory["base weights"] - layers
        found["base weights"] += 0 if spread.offload_base else copies * layers // shards
        found["gathered layers"] = GATHERED_LAYERS * shape.layer_parameters * base_bytes
    return found


TOKEN_ID = 4
"""Bytes of a token id on disk (int32)."""
CACHED = 2
"""Bytes of a value of a cached hidden state (float16)."""
CHUNK_COPIES = 4
"""Matrices of a loss chunk's size alive at its peak: logits, their exponentials, the gradient, the teacher's."""


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """One phase of the recipe."""

    name: str
    seq_len: int
    micro_batch_size: int
    """Rows a process and micro-batch."""
    grad_accum_steps: int
    steps: int
    trained_share: float = 1.0
    """Part of the positions that is trained: 1 on text, answers / (prompts + answers) on generations."""
    corpus_tokens: int = 0
    """Tokens of the phase's corpus: the size of its feature cache."""
    cached_features: bool = False
    train_base: bool = False
    """The base is trained along, through adapters."""

    def tokens(self, devices: int) -> int:
        """Positions read over the phase: steps x grad_accum_steps x rows x row length x devices."""
        return self.steps * self.grad_accum_steps * self.micro_batch_size * self.seq_len * devices

    def trained_tokens(self, devices: int) -> int:
        """Positions trained over the phase, an upper bound when rows are padded."""
        return round(self.tokens(devices) * self.trained_share)


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The corpus that the base writes itself."""

    prompts: int
    max_prompt_tokens: int
    max_new_tokens: int
    keep_hidden_states: bool = False

    def tokens(self) -> int:
        """Prompt and answer tokens, an upper bound: every prompt and answer as long as allowed."""
        return self.prompts * (self.max_prompt_tokens + self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will cost. Sizes in bytes."""

    base_parameters: int
    head_parameters: int
    head_trainable: int
    head_parameters_per_position: int
    adapter_parameters: int
    """Of the base's adapters, all trained; 0 where no phase trains the base."""
    tokens: dict[str, int]
    """Per phase, positions read over all devices."""
    trained_tokens: dict[str, int]
    memory: dict[str, dict[str, int]]
    """Per phase and part, on each device."""
    totals: dict[str, dict[str, int]]
    """The sum of a device's memory, for every way to shard and phase."""
    disk: dict[str, int]
    devices: int

    @property
    def trained(self) -> int:
        """Parameters that a phase trains: of the head, and of the base's adapters."""
        return self.head_trainable + self.adapter_parameters

    def memory_total(self, phase: str) -> int:
        """Bytes a device needs in ``phase``."""
        return sum(self.memory[phase].values())


def plan(
    shape: ModelShape,
    head: HeadSize,
    phases: Sequence[PhaseEstimate],
    generations: GenerationPlan | None = None,
    *,
    lora: LoraSettings | None = None,
    spread: ShardLayout | None = None,
    devices: int = 1,
    base_bytes: int = 2,
    device: str = "cuda",
) -> Plan:
    """Add it up.

    Args:
        shape: the base.
        head: the head.
        phases: in order, at least one.
        generations: None when no phase trains on the base's own answers.
        lora: adapters of the base; None when no phase trains it.
        spread: how the weights lie on the devices; None: whole on each.
        devices: processes that train.
        base_bytes: bytes a parameter of the base: 2 in bfloat16, 4 in float32.
        device: ``cuda`` or ``cpu``: decides the size of a loss chunk.

    Raises:
        UserError: an adapter for a layer that the base does not have.
        ValueError: a phase trains the base, and ``lora`` is None.
    """
    if lora is None and any(phase.train_base for phase in phases):
        raise ValueError("a phase trains the base, but there are no adapters to train")
    adapters = 0 if lora is None else shape.adapter_parameters(lora)
    spread = spread or ShardLayout()

    def memory(spread: ShardLayout) -> dict[str, dict[str, int]]:
        found = {}
        for p in phases:
            whole = _memory(shape, head, p, base_bytes, device)
            tokens = p.micro_batch_size * p.seq_len
            parts = sharded_memory(whole, shape, head, tokens, spread, base_bytes=base_bytes, twin=lora is not None)
            found[p.name] = _with_adapters(parts, shape, p, lora, base_bytes, device)
        return found

    ways = {
        mode: replace(spread, mode=mode, offload_base=spread.offload_base and mode == "full") for mode in SHARD_MODES
    }
    return Plan(
        base_parameters=shape.base_parameters,
        head_parameters=head.parameters,
        head_trainable=head.trainable,
        head_parameters_per_position=head.parameters // head.positions,
        adapter_parameters=adapters,
        tokens={p.name: p.tokens(devices) for p in phases},
        trained_tokens={p.name: p.trained_tokens(devices) for p in phases},
        memory=memory(spread),
        totals={mode: {name: sum(parts.values()) for name, parts in memory(way).items()} for mode, way in ways.items()},
        disk=_disk(shape, head, phases, generations, adapters),
        devices=devices,
    )


def _memory(shape: ModelShape, head: HeadSize, phase: PhaseEstimate, base_bytes: int, device: str) -> dict[str, int]:
    """Bytes by part at the peak of a step of ``phase``, all whole and float32; M is the tokens of a micro-batch.

    - base activations: ``M x layer_width + M D`` values (a layer's peak and the features), and the mask of the packed
      documents, ``rows T^2`` in the base's dtype and once more as bools. A cached phase keeps the ``M D`` alone.
    - optimiser: two float32 moments, 8 bytes a trained parameter.
    - loss chunk: ``CHUNK_COPIES x rows x W`` float32, never ``M x W``.
    - gradients in flight: those of the projections, which the loss makes in its forward pass: one set beside
      ``.grad``, two when micro-batches accumulate.
    """
    tokens = phase.micro_batch_size * phase.seq_len
    features = tokens * shape.hidden_size * (1 + head.feature_layers) * base_bytes
    mask = phase.micro_batch_size * phase.seq_len**2 * (base_bytes + 1)
    rows = min(tokens, chunk_rows(head.draft_vocab_size, device))
    sets = 2 if phase.grad_accum_steps > 1 else 1
    return {
        "base weights": shape.base_parameters * base_bytes,
        "head weights": head.parameters * FLOAT32,
        "gradients": head.trainable * FLOAT32,
        "optimiser": head.trainable * 2 * FLOAT32,
        "base activations": features
        + (0 if phase.cached_features else tokens * shape.layer_width() * base_bytes + mask),
        "head activations": tokens * head.activations_per_token * FLOAT32,
        "loss chunk": CHUNK_COPIES * rows * head.draft_vocab_size * FLOAT32,
        "gradients in flight": sets * head.projections * FLOAT32,
    }


def _with_adapters(
    memory: dict[str, int],
    shape: ModelShape,
    phase: PhaseEstimate,
    lora: LoraSettings | None,
    base_bytes: int,
    device: str,
) -> dict[str, int]:
    """``memory`` with the adapters of a run that trains the base in some phase, all float32; M as in :func:`_memory`.

    All phases hold the weights. Those that train the base also have:

    - gradients and optimiser: 4 and 8 bytes a parameter of the adapters.
    - base activations: the features and the mask; what every layer keeps, ``M L kept_bytes``, or with checkpointing
      every layer's input, ``M L D`` values, and what one layer keeps; the gradients in one layer, ``M layer_width``
      values; and four copies of ``M D`` values around the base's own loss (the tuned features, those of trained tokens
      with their gradient, and the untouched ones).
    - an adapter on the output head: the sum of both for the base's loss and its gradient, and the same sum for the
      heads to compare with, ``3 V D`` values, and ``V D`` in float32 on the way.
    - loss chunk: the base's loss is over the whole vocabulary.

    Left out: on a CPU a prepacked base's layers are unpacked once more (``models/tuned_base.py``).
    """
    if lora is None:
        return memory
    adapters = shape.adapter_parameters(lora)
    added = {"adapter weights": adapters * FLOAT32}
    if phase.train_base:
        tokens, layers, wide = phase.micro_batch_size * phase.seq_len, shape.num_layers, shape.hidden_size * base_bytes
        layer = shape.kept_bytes(lora, base_bytes)
        kept = layers * wide + layer if lora.checkpointing else layers * layer
        mask = phase.micro_batch_size * phase.seq_len**2 * (base_bytes + 1)
        head = shape.vocab_size * shape.hidden_size * (3 * base_bytes + FLOAT32) if LM_HEAD in lora.targets else 0
        rows = min(tokens, chunk_rows(shape.vocab_size, device))
        added |= {
            "gradients": memory["gradients"] + adapters * FLOAT32,
            "optimiser": memory["optimiser"] + adapters * 2 * FLOAT32,
            "base activations": tokens * (kept + shape.layer_width() * base_bytes + 5 * wide) + mask + head,
            "loss chunk": max(memory["loss chunk"], CHUNK_COPIES * rows * shape.vocab_size * FLOAT32),
        }
    return {**memory, **added}


def _disk(
    shape: ModelShape,
    head: HeadSize,
    phases: Sequence[PhaseEstimate],
    generations: GenerationPlan | None,
    adapters: int,
) -> dict[str, int]:
    """Bytes on disk by purpose: ids 4 a token, features 2 D a token and state, a checkpoint its weights and moments."""
    found: dict[str, int] = {}
    if generations is not None:
        found["generations"] = generations.tokens() * TOKEN_ID
        if generations.keep_hidden_states:
            found["features of generations"] = generations.tokens() * shape.hidden_size * CACHED
    for phase in phases:
        if phase.cached_features:
            width = shape.hidden_size * (1 + head.feature_layers)
            found[f"feature cache of {phase.name}"] = phase.corpus_tokens * width * CACHED
    found["one checkpoint"] = (head.parameters + adapters) * FLOAT32 + (head.trainable + adapters) * 2 * FLOAT32
    return found


def render(plan: Plan) -> Group:
    """The plan as tables for a console."""
    parameters = _table("parameters", "count")
    parameters.add_row("base" if plan.adapter_parameters else "base, frozen", f"{plan.base_parameters:,}")
    parameters.add_row("head", f"{plan.head_parameters:,}")
    parameters.add_row("head per drafted position", f"{plan.head_parameters_per_position:,}")
    if plan.adapter_parameters:
        parameters.add_row("adapters of the base", f"{plan.adapter_parameters:,}")
    parameters.add_row("trained", f"{plan.trained:,}")
    tokens = _table(f"tokens on {plan.devices} device{'s' if plan.devices > 1 else ''}", "read", "trained, at most")
    for name in plan.tokens:
        tokens.add_row(name, f"{plan.tokens[name]:,}", f"{plan.trained_tokens[name]:,}")
    memory = _table("memory per device", *plan.memory)
    for part in next(iter(plan.memory.values())):
        memory.add_row(part, *(size(parts[part]) for parts in plan.memory.values()))
    memory.add_section()
    memory.add_row("total", *(size(plan.memory_total(name)) for name in plan.memory))
    ways = _table("total, by what is sharded", *plan.memory)
    for mode, totals in plan.totals.items():
        ways.add_row(f"shard={mode}", *(size(total) for total in totals.values()))
    disk = _table("disk, at most", "size")
    for purpose, count in plan.disk.items():
        disk.add_row(purpose, size(count))
    return Group(parameters, tokens, memory, *([ways] if plan.devices > 1 else []), disk)


def size(count: int) -> str:
    """Bytes as a person reads them, in binary units."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", min_width=26 if number == 0 else 12)
    return table


@runtime_checkable
class TrainsBase(Protocol):
    """Settings of a head that can train the base along."""

    def lora(self) -> LoraSettings:
        """The base's adapters."""


def print_estimate(run: RunConfig) -> None:
    """Parameters, trained tokens, memory per GPU and disk of a run on as many processes as the launcher started.

    Raises:
        UserError: the base's shape is not in the recipe and cannot be fetched, or its architecture is refused.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console(highlight=False)
    console.print(f"[bold]{run.name}[/bold]: {run.base.name or run.base.transformers_config().model_type}")
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    run = replace(run, shard=with_launcher_settings(os.environ, run.shard))
    console.print(render(estimate_of(run, devices, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))))


def estimate_of(run: RunConfig, devices: int, per_node: int | None = None, device: str = "cuda") -> Plan:
    """What a run will cost on so many processes, of which ``per_node`` (or all) are on one node; ``cuda`` or ``cpu``.

    Raises:
        UserError: as ``print_estimate``.
    """
    shard = run.shard
    config = run.base.transformers_config()
    check_architecture(config, run.base.max_context)
    shape = ModelShape.from_config(config)
    corpus = run.data.generations
    prompts = corpus.prompts + corpus.self_prompted
    generations = GenerationPlan(
        prompts=prompts,
        max_prompt_tokens=corpus.max_prompt_tokens,
        max_new_tokens=corpus.sampler.max_new_tokens,
        keep_hidden_states=corpus.keep_hidden_states,
    )
    answers = corpus.sampler.max_new_tokens / (corpus.sampler.max_new_tokens + corpus.max_prompt_tokens)
    phases = [
        PhaseEstimate(
            name=name,
            seq_len=phase.seq_len,
            micro_batch_size=phase.micro_batch_size,
            grad_accum_steps=phase.grad_accum_steps,
            steps=phase.steps,
            trained_share=1.0 if phase.corpus == "text" else answers,
            corpus_tokens=run.data.text.max_tokens if phase.corpus == "text" else generations.tokens(),
            cached_features=phase.cached,
            train_base=phase.train_base,
        )
        for name, phase in run.phases.items()
    ]
    head = run.head_config()
    return plan(
        shape,
        head.size(config),
        phases,
        generations,
        lora=head.lora() if run.trains_base and isinstance(head, TrainsBase) else None,
        spread=ShardLayout(
            mode=shard.mode,
            shards=(per_node or devices) if shard.hybrid else devices,
            compute_bytes=PRECISIONS[shard.precision].itemsize,
            offload_base=shard.offload_base,
            checkpointing=shard.checkpointing,
        ),
        devices=devices,
        base_bytes=4 if run.base.dtype == "float32" or (run.base.dtype == "auto" and device == "cpu") else 2,
        device=device,
    )
