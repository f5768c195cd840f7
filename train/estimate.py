"""What a run will cost (``mode=estimate``): parameters, trained tokens, memory per GPU, disk. No weights are loaded.

Memory is a sum of the tensors that the code keeps at the peak of a training step. Allocator fragmentation, the CUDA
context and workspaces of matrix products come on top: keep about 10 % and 1 GiB free.
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
"""Layers of a sharded base that are gathered at a time: the one that computes, and the next one."""
TOKEN_ID = 4
"""Bytes of a token id on disk (int32)."""
CACHED = 2
"""Bytes of a value of a cached hidden state (float16)."""
CHUNK_COPIES = 4
"""Matrices of a loss chunk's size alive at its peak: logits, their exponentials, the gradient, the target's."""


class Estimate:
    """The costs of a run on ``devices`` processes of type ``device``, of which ``per_node`` (or all) are on one node.

    Sizes in bytes.
    """

    def __init__(self, run: RunConfig, devices: int = 1, per_node: int | None = None, device: str = "cuda") -> None:
        config, head = run.base.transformers_config(), run.head_config()
        check_architecture(config, run.base.max_context)
        self.shape, self.head = ModelShape.from_config(config), head.size(config)
        self.lora = head.lora() if run.trains_base else None
        self.phases, self.data, self.shard = run.phases, run.data, run.shard
        self.devices, self.device = devices, device
        self.shards = (per_node or devices) if run.shard.hybrid else devices
        """Devices that share one copy of what is sharded."""
        self.base_bytes = 4 if run.base.dtype == "float32" or (run.base.dtype == "auto" and device == "cpu") else 2
        """Bytes of a parameter of the base."""

    @property
    def adapters(self) -> int:
        """Parameters of the base's adapters."""
        return 0 if self.lora is None else self.shape.adapter_parameters(self.lora)

    @property
    def trained(self) -> int:
        """Parameters that a phase trains: of the head, and of the base's adapters."""
        return self.head.trainable + self.adapters

    @property
    def answer_tokens(self) -> int:
        """Tokens of prompts and answers, an upper bound: each as long as allowed."""
        corpus = self.data.answers
        prompts = corpus.prompts + corpus.self_prompted
        return prompts * (corpus.max_prompt_tokens + corpus.sampler.max_new_tokens)

    def tokens(self, name: str) -> int:
        """Positions that a phase reads on all devices."""
        p = self.phases[name]
        return p.steps * p.grad_accum_steps * p.micro_batch_size * p.seq_len * self.devices

    def trained_tokens(self, name: str) -> int:
        """Positions that a phase trains: all of text, the answers' part of answers; an upper bound."""
        answer, prompt = self.data.answers.sampler.max_new_tokens, self.data.answers.max_prompt_tokens
        share = 1.0 if self.phases[name].corpus == "text" else answer / (answer + prompt)
        return round(self.tokens(name) * share)

    def total(self, name: str, mode: str | None = None) -> int:
        """Bytes that a device needs in a phase; see ``memory``."""
        return sum(self.memory(name, mode).values())

    def memory(self, name: str, mode: str | None = None) -> dict[str, int]:
        """Bytes of a device by part at the peak of a step of a phase, with ``shard.mode`` or another ``mode``."""
        phase, mode = self.phases[name], mode or self.shard.mode
        found = self._sharded(self._unsharded(phase), phase, mode)
        return found if self.lora is None else {**found, **self._adapted(found, phase, self.lora)}

    def _unsharded(self, phase: PhaseConfig) -> dict[str, int]:
        """Memory with float32 and without sharding; M is the tokens of a micro-batch.

        - base activations: ``M x layer_width + M D`` values (a layer's peak and the hidden states), and the mask of the
          packed documents. A cached phase keeps the ``M D`` alone.
        - optimiser: two float32 moments, 8 bytes a trained parameter.
        - loss chunk: ``CHUNK_COPIES x rows x W`` float32, never ``M x W``.
        - gradients in flight: those of the projections, which the loss makes in its forward pass: one set beside
          ``.grad``, two when micro-batches accumulate.
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
        """``rows T^2`` in the base's dtype and once more as bools."""
        return phase.micro_batch_size * phase.seq_len**2 * (self.base_bytes + 1)

    def _loss_chunk(self, tokens: int, vocab_size: int) -> int:
        return CHUNK_COPIES * min(tokens, chunk_rows(vocab_size, self.device)) * vocab_size * FLOAT32

    def _sharded(self, memory: dict[str, int], phase: PhaseConfig, mode: str) -> dict[str, int]:
        """``memory`` on a device of ``mode``; N shards, c bytes the head computes with.

        - base weights, ``full``: the tables and the final norm, and 1/N of the layers (none of them when offloaded);
          gathered layers: ``GATHERED_LAYERS`` of them. A base that is trained has a second copy with its own layers.
        - head weights, gradients, optimiser: 1/N of what is trained. Gathered head: ``c`` bytes a trained parameter.
        - gradients in flight: while they are reduced, full size in ``c`` bytes and once more in float32.
        - head activations: ``c`` bytes a value, without those that checkpointing computes again.
        """
        head, shape, found = self.head, self.shape, dict(memory)
        compute_bytes = PRECISIONS["float32" if self.shard.precision == AUTO else self.shard.precision].itemsize
        kept = head.activations_per_token - (head.recomputable_per_token if self.shard.checkpointing else 0)
        found["head activations"] = phase.micro_batch_size * phase.seq_len * kept * compute_bytes
        shards = 1 if mode == "none" else self.shards
        if mode != "none" or compute_bytes < FLOAT32:
            part = -(-head.trainable // shards)
            found["head weights"] -= (head.trainable - part) * FLOAT32
            found["gradients"] = part * FLOAT32
            found["optimiser"] = part * 2 * FLOAT32
            found["gathered head"] = head.trainable * compute_bytes
            found["gradients in flight"] = head.trainable * (compute_bytes + FLOAT32)
        if mode == "full":
            layers = shape.all_layers_parameters * self.base_bytes
            copies = 1 if self.lora is None else 2
            found["base weights"] -= layers
            found["base weights"] += 0 if self.shard.offload_base else copies * layers // shards
            found["gathered layers"] = GATHERED_LAYERS * shape.layer_parameters * self.base_bytes
        return found

    def _adapted(self, memory: dict[str, int], phase: PhaseConfig, lora: LoraSettings) -> dict[str, int]:
        """The parts of ``memory`` that are others in a run that trains the base, all float32; M as above.

        All phases hold the adapters' weights. Those that train the base also have:

        - gradients and optimiser: 4 and 8 bytes a parameter of the adapters.
        - base activations: the hidden states and the mask; what every layer keeps, ``M L kept_bytes``, or with
          checkpointing every layer's input, ``M L D`` values, and what one layer keeps; the gradients in one layer,
          ``M layer_width`` values; and four copies of ``M D`` values around the base's own loss.
        - an adapter on the output head: the sum of both for the base's loss and its gradient, and the same sum for the
          heads to compare with, ``3 V D`` values, and ``V D`` in float32 on the way.
        - loss chunk: the base's loss is over the whole vocabulary.
        """
        shape, adapters, base_bytes = self.shape, self.adapters, self.base_bytes
        found = {"adapter weights": adapters * FLOAT32}
        if not phase.train_base:
            return found
        tokens, width = phase.micro_batch_size * phase.seq_len, shape.hidden_size * base_bytes
        layer = shape.kept_bytes(lora, base_bytes)
        kept = shape.num_layers * width + layer if lora.checkpointing else shape.num_layers * layer
        output = shape.vocab_size * shape.hidden_size * (3 * base_bytes + FLOAT32) if LM_HEAD in lora.targets else 0
        activations = tokens * (kept + shape.layer_width() * base_bytes + 5 * width)
        return found | {
            "gradients": memory["gradients"] + adapters * FLOAT32,
            "optimiser": memory["optimiser"] + adapters * 2 * FLOAT32,
            "base activations": activations + self._mask(phase) + output,
            "loss chunk": max(memory["loss chunk"], self._loss_chunk(tokens, shape.vocab_size)),
        }

    @property
    def disk(self) -> dict[str, int]:
        """Bytes on disk by purpose: ids 4 a token, hidden states 2 D a token and layer, a checkpoint with moments."""
        width = self.shape.hidden_size * CACHED
        found = {"answers": self.answer_tokens * TOKEN_ID}
        storing = {name: phase for name, phase in self.phases.items() if phase.store_hidden_states}
        with_answers = self.data.answers.decoded_here and any(p.corpus == "answers" for p in storing.values())
        if with_answers:
            found["hidden states of answers"] = self.answer_tokens * width
        for name, phase in storing.items():
            tokens = self.data.text.max_tokens if phase.corpus == "text" else self.answer_tokens
            states = self.head.feature_layers + (phase.corpus == "text" or not with_answers)
            if states:
                found[f"hidden states of {name}"] = tokens * width * states
        found["one checkpoint"] = (self.head.parameters + self.adapters + 2 * self.trained) * FLOAT32
        return found


def print_estimate(run: RunConfig) -> None:
    """Print the costs of a run on as many processes as the launcher started."""
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console(highlight=False)
    console.print(f"[bold]{run.name}[/bold]: {run.base.name or run.base.transformers_config().model_type}")
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    run = replace(run, shard=with_launcher_settings(os.environ, run.shard))
    console.print(render(Estimate(run, devices, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))))


def render(estimate: Estimate) -> Group:
    """The estimate as tables for a console."""
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
    parts = [estimate.memory(name) for name in phases]
    for part in parts[0]:
        memory.add_row(part, *(size(found[part]) for found in parts))
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
