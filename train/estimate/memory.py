"""Costs of a run (``mode=estimate``): parameters, trained tokens, memory per GPU, disk. No weights are loaded.

The memory estimate adds up the tensors that the code holds at the peak of a training step. Allocator fragmentation, the
CUDA context and workspaces of matrix products come on top: keep about 10 % and 1 GiB free.
"""

import os
from dataclasses import replace

from rich.console import Console, Group
from rich.table import Table

from drafthead.models.base.base_config import check_architecture
from drafthead.models.base.lora import LM_HEAD, LoraSettings
from drafthead.models.base.shape import FLOAT32, ModelShape
from drafthead.models.heads.parts.losses import chunk_rows
from drafthead.train.config import AUTO, PRECISIONS, SHARD_MODES, PhaseConfig, RunConfig
from drafthead.train.distributed.launcher import with_launcher_settings

GATHERED_LAYERS = 2
"""Layers of a sharded base that are gathered at a time: the current one and the next one."""
TOKEN_ID = 4
"""Bytes of a token id on disk (int32)."""
CACHED = 2
"""Bytes of one value of a cached hidden state (float16)."""
CHUNK_COPIES = 4
"""Matrices of a loss chunk's size alive at its peak: logits, their exponentials, the gradient, the target's."""


class Estimate:
    """The costs of a run on ``devices`` processes of type ``device``, with ``per_node`` (default: all) on each node.

    Sizes are in bytes.
    """

    def __init__(self, run: RunConfig, devices: int = 1, per_node: int | None = None, device: str = "cuda") -> None:
        config, head = run.base.transformers_config(), run.head_config()
        check_architecture(config, run.base.max_context)
        self.shape, self.head = ModelShape.from_config(config), head.size(config)
        self.lora = head.lora() if run.trains_base else None
        self.phases, self.data, self.shard = run.phases, run.data, run.shard
        self.devices, self.device = devices, device
        self.shards = (per_node or devices) if run.shard.hybrid else devices
        """Devices that share one copy of the sharded tensors."""
        self.base_bytes = 4 if run.base.dtype == "float32" or (run.base.dtype == "auto" and device == "cpu") else 2
        """Bytes per parameter of the base."""

    @property
    def adapters(self) -> int:
        """Parameters in the base's adapters."""
        return 0 if self.lora is None else self.shape.adapter_parameters(self.lora)

    @property
    def trained(self) -> int:
        """Trained parameters of the head and of the base's adapters."""
        return self.head.trainable + self.adapters

    @property
    def answer_tokens(self) -> int:
        """Upper bound on the tokens of prompts and answers: each as long as allowed."""
        corpus = self.data.answers
        prompts = corpus.prompts + corpus.self_prompted
        return prompts * (corpus.max_prompt_tokens + corpus.sampler.max_new_tokens)

    def rows_per_step(self, name: str) -> int:
        """Return the rows of one optimiser step of a phase, on all devices."""
        phase = self.phases[name]
        return phase.micro_batch_size * phase.grad_accum_steps * self.devices

    def tokens(self, name: str) -> int:
        """Return the positions that a phase reads, on all devices."""
        phase = self.phases[name]
        return phase.steps * self.rows_per_step(name) * phase.seq_len

    def trained_tokens(self, name: str) -> int:
        """Return an upper bound on the positions that a phase trains: all of text, only the answers of answers."""
        answer, prompt = self.data.answers.sampler.max_new_tokens, self.data.answers.max_prompt_tokens
        share = 1.0 if self.phases[name].corpus == "text" else answer / (answer + prompt)
        return round(self.tokens(name) * share)

    def total(self, name: str, mode: str | None = None) -> int:
        """Return the bytes that a device needs in a phase, the sum of ``memory``."""
        return sum(self.memory(name, mode).values())

    def memory(self, name: str, mode: str | None = None) -> dict[str, int]:
        """Return a device's bytes by purpose at the peak of a step, for ``shard.mode`` or another ``mode``."""
        phase, mode = self.phases[name], mode or self.shard.mode
        memory = self._sharded(self._unsharded(phase), phase, mode)
        return memory if self.lora is None else {**memory, **self._adapted(memory, phase, self.lora)}

    def _unsharded(self, phase: PhaseConfig) -> dict[str, int]:
        """Return memory in float32 and without sharding, for M tokens in a micro-batch.

        - base activations: ``M x layer_width + M D`` values (a layer's peak and the hidden states), and the mask of the
          packed documents. A cached phase only holds the ``M D`` values.
        - optimiser: two float32 moments, 8 bytes per trained parameter.
        - loss chunk: ``CHUNK_COPIES x rows x W`` float32 values, never ``M x W``.
        - gradients in flight: gradients of the projections, which the loss computes in its forward pass. There is one
          set in addition to ``.grad``, and two sets when micro-batches accumulate.
        """
        head, shape = self.head, self.shape
        tokens = phase.micro_batch_size * phase.seq_len
        states = tokens * shape.hidden_size * (1 + head.feature_layers) * self.base_bytes
        computed = tokens * shape.layer_width() * self.base_bytes + self._mask(phase)
        return {
            "base weights": shape.base_parameters * self.base_bytes,
            "head weights": head.parameters * FLOAT32,
            "gradients": head.trainable * FLOAT32,
            "optimiser": head.trainable * 2 * FLOAT32,
            "base activations": states + (0 if phase.store_hidden_states else computed),
            "head activations": tokens * head.activations_per_token * FLOAT32,
            "loss chunk": self._loss_chunk(tokens, head.draft_vocab_size),
            "gradients in flight": (2 if phase.grad_accum_steps > 1 else 1) * head.projections * FLOAT32,
        }

    def _mask(self, phase: PhaseConfig) -> int:
        """Return the bytes of the attention mask: ``rows T^2`` values in the base's dtype, and as many booleans."""
        return phase.micro_batch_size * phase.seq_len**2 * (self.base_bytes + 1)

    def _loss_chunk(self, tokens: int, vocab_size: int) -> int:
        return CHUNK_COPIES * min(tokens, chunk_rows(vocab_size, self.device)) * vocab_size * FLOAT32

    def _sharded(self, memory: dict[str, int], phase: PhaseConfig, mode: str) -> dict[str, int]:
        """Return ``memory`` under sharding ``mode``, with N shards and ``c`` bytes per value that the head computes.

        - base weights, ``full``: the tables, the final norm, and 1/N of the layers (none if offloaded). Gathered
          layers: ``GATHERED_LAYERS`` layers. A trained base has a second copy of the layers.
        - head weights, gradients, optimiser: 1/N of the trained parameters. Gathered head: ``c`` bytes per parameter.
        - gradients in flight: while they are reduced, full size in ``c`` bytes and again in float32.
        - head activations: ``c`` bytes per value, without the values that checkpointing recomputes.
        """
        head, shape, sharded = self.head, self.shape, dict(memory)
        compute_bytes = PRECISIONS["float32" if self.shard.precision == AUTO else self.shard.precision].itemsize
        stored = head.activations_per_token - (head.recomputable_per_token if self.shard.checkpointing else 0)
        sharded["head activations"] = phase.micro_batch_size * phase.seq_len * stored * compute_bytes
        shards = 1 if mode == "none" else self.shards
        if mode != "none" or compute_bytes < FLOAT32:
            shard = -(-head.trainable // shards)
            sharded["head weights"] -= (head.trainable - shard) * FLOAT32
            sharded["gradients"] = shard * FLOAT32
            sharded["optimiser"] = shard * 2 * FLOAT32
            sharded["gathered head"] = head.trainable * compute_bytes
            sharded["gradients in flight"] = head.trainable * (compute_bytes + FLOAT32)
        if mode == "full":
            layers = shape.all_layers_parameters * self.base_bytes
            copies = 1 if self.lora is None else 2
            sharded["base weights"] -= layers
            sharded["base weights"] += 0 if self.shard.offload_base else copies * layers // shards
            sharded["gathered layers"] = GATHERED_LAYERS * shape.layer_parameters * self.base_bytes
        return sharded

    def _adapted(self, memory: dict[str, int], phase: PhaseConfig, lora: LoraSettings) -> dict[str, int]:
        """Return the entries of ``memory`` that change when the run trains the base, in float32, for M tokens.

        All phases hold the adapters' weights. A phase that trains the base also holds:

        - gradients and optimiser: 4 and 8 bytes per adapter parameter.
        - base activations: the hidden states, the mask, and the values stored for the backward pass. These are
          ``M L kept_bytes``, or with checkpointing every layer's input (``M L D`` values) and one layer's stored
          values. The gradients in one layer add ``M layer_width`` values, and the base's loss four ``M D`` copies.
        - an adapter on the output head: the merged matrix for the base's loss, its gradient, and the merged matrix that
          the heads compare with. These are ``3 V D`` values; merging needs ``V D`` float32 values more.
        - loss chunk: the base's loss covers the whole vocabulary.
        """
        shape, adapters, base_bytes = self.shape, self.adapters, self.base_bytes
        weights = {"adapter weights": adapters * FLOAT32}
        if not phase.train_base:
            return weights
        tokens, width = phase.micro_batch_size * phase.seq_len, shape.hidden_size * base_bytes
        layer = shape.kept_bytes(lora, base_bytes)
        stored = shape.num_layers * width + layer if lora.checkpointing else shape.num_layers * layer
        output = shape.vocab_size * shape.hidden_size * (3 * base_bytes + FLOAT32) if LM_HEAD in lora.targets else 0
        activations = tokens * (stored + shape.layer_width() * base_bytes + 5 * width)
        return weights | {
            "gradients": memory["gradients"] + adapters * FLOAT32,
            "optimiser": memory["optimiser"] + adapters * 2 * FLOAT32,
            "base activations": activations + self._mask(phase) + output,
            "loss chunk": max(memory["loss chunk"], self._loss_chunk(tokens, shape.vocab_size)),
        }

    @property
    def disk(self) -> dict[str, int]:
        """Bytes on disk by purpose: 4 per token id, 2 D per token and layer of hidden states, one checkpoint."""
        width = self.shape.hidden_size * CACHED
        sizes = {"answers": self.answer_tokens * TOKEN_ID}
        storing = {name: phase for name, phase in self.phases.items() if phase.store_hidden_states}
        with_answers = self.data.answers.decoded_here and any(p.corpus == "answers" for p in storing.values())
        if with_answers:
            sizes["hidden states of answers"] = self.answer_tokens * width
        for name, phase in storing.items():
            tokens = self.data.text.max_tokens if phase.corpus == "text" else self.answer_tokens
            # Final states are stored with the answers, so rows only add the states of early layers.
            states = self.head.feature_layers + (phase.corpus == "text" or not with_answers)
            if states:
                sizes[f"hidden states of {name}"] = tokens * width * states
        sizes["one checkpoint"] = (self.head.parameters + self.adapters + 2 * self.trained) * FLOAT32
        return sizes


def print_estimate(run: RunConfig) -> None:
    """Print the costs of a run on the number of processes that the launcher started."""
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console(highlight=False)
    console.print(f"[bold]{run.name}[/bold]: {run.base.name or run.base.transformers_config().model_type}")
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    run = replace(run, shard=with_launcher_settings(os.environ, run.shard))
    console.print(render(Estimate(run, devices, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))))


def render(estimate: Estimate) -> Group:
    """Return the estimate as tables for a console."""
    phases = list(estimate.phases)
    parameters = _table("parameters", "count")
    parameters.add_row("base" if estimate.adapters else "base, frozen", f"{estimate.shape.base_parameters:,}")
    parameters.add_row("head", f"{estimate.head.parameters:,}")
    parameters.add_row("head per drafted position", f"{estimate.head.parameters // estimate.head.positions:,}")
    if estimate.adapters:
        parameters.add_row("adapters of the base", f"{estimate.adapters:,}")
    parameters.add_row("trained", f"{estimate.trained:,}")
    tokens = _table(f"tokens on {estimate.devices} device{'s' * (estimate.devices > 1)}", "read", "trained, at most")
    for name in phases:
        tokens.add_row(name, f"{estimate.tokens(name):,}", f"{estimate.trained_tokens(name):,}")
    memory = _table("memory per device", *phases)
    by_phase = [estimate.memory(name) for name in phases]
    for purpose in by_phase[0]:
        memory.add_row(purpose, *(size(bytes_by_purpose[purpose]) for bytes_by_purpose in by_phase))
    memory.add_section()
    memory.add_row("total", *(size(estimate.total(name)) for name in phases))
    modes = _table("total, by what is sharded", *phases)
    for mode in SHARD_MODES:
        modes.add_row(f"shard={mode}", *(size(estimate.total(name, mode)) for name in phases))
    disk = _table("disk, at most", "size")
    for purpose, count in estimate.disk.items():
        disk.add_row(purpose, size(count))
    return Group(parameters, tokens, memory, *([modes] if estimate.devices > 1 else []), disk)


def size(count: int) -> str:
    """Return a number of bytes as text in binary units, such as ``1.5 GiB``."""
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
