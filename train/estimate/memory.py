"""Costs of a run (``mode=estimate``): parameters, trained tokens, memory per GPU, disk. No weights are loaded. The
memory of a step is found by running the step on tensors without memory (``fake_step.py``). Fragmentation of the
allocator, the CUDA context and the workspaces of matrix products are not included: keep about 10 % and 1 GiB free."""

from dataclasses import replace

import numpy as np
import torch
from rich.console import Group
from rich.table import Table

from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import one_row
from drafthead.models.base.base_model import meta_base
from drafthead.models.heads.parts.attention_layer import HeadAttention
from drafthead.models.heads.parts.losses import CHUNK_BYTES
from drafthead.train.config import RunConfig
from drafthead.train.corpora.states import PASS_TOKENS
from drafthead.train.distributed.sharding import AUTO, PRECISIONS, SHARD_MODES, checkpoint_activations
from drafthead.train.estimate.fake_step import FakeFloats, StepMemory

FLOAT32 = 4
GATHERED_LAYERS = 2  # of a sharded base at the same time: the current one and the next one
TOKEN_ID = 4  # bytes on disk (int32)
CACHED = 2  # bytes per value of a stored hidden state (float16 or bfloat16)


class Estimate:
    """Parameters, trained tokens, memory and disk of a run on ``devices`` devices (processes) of the type ``device``.
    Every node has ``per_node`` of the devices (None: all are on one node). Sizes are in bytes."""

    def __init__(self, run: RunConfig, devices: int = 1, per_node: int | None = None, device: str = "cuda") -> None:
        self.phases, self.data, self.shard, self.trains_base = run.phases, run.data, run.shard, run.trains_base
        self.devices, self.device = devices, device
        # Devices that share one copy of the sharded tensors.
        self.shards = (per_node or devices) if run.shard.hybrid else devices
        in_float32 = run.base.dtype == "float32" or (run.base.dtype == "auto" and device == "cpu")
        config = replace(run.base, prepack=False)
        dtype = torch.float32 if in_float32 else torch.bfloat16
        self.base = meta_base(run.base.transformers_config(), config, dtype)
        self.head = run.head_config().without_weights(self.base)
        self.head.train()
        self.head_parameters = self.head.num_parameters()  # without the base's adapters
        if run.trains_base:
            self.head.train_base(now=True)
        self.adapters = self.head.num_parameters() - self.head_parameters
        self.trained = sum(p.numel() for p in self.head.parameters() if p.requires_grad)  # adapters included
        self.precision = PRECISIONS["float32" if run.shard.precision == AUTO else run.shard.precision]
        self._steps: dict[tuple[str, bool], StepMemory] = {}
        self._fake = FakeFloats()
        for tensor in (*self.base.model.state_dict().values(), self.head.target_lm_head.weight):
            self._fake.count(tensor)
        self.base_bytes = self._fake.live  # with a copy of its output head over the draft vocabulary
        self.layers = [sum(map(_bytes, layer.parameters())) for layer in self.base.model.model.layers]
        self.reads_texts = not (run.data.states.url or run.data.offline.folder)  # with the whole base, to store states
        self.without_layers = {
            name for name, phase in run.phases.items() if run.drops_layers and phase.store_hidden_states
        }
        adapted = {p for decoder in self.head.tuned_decoders() for p in decoder.parameters()}
        for parameter in self.head.parameters():
            if parameter not in adapted:
                parameter.data = parameter.data.to(self.precision)
            self._fake.count(parameter)
        if run.shard.checkpointing:
            checkpoint_activations(self.head)

    @property
    def answer_tokens(self) -> int:  # of prompts and answers, at their largest lengths
        corpus = self.data.answers
        prompts = corpus.prompts + corpus.self_prompted
        return prompts * (corpus.max_prompt_tokens + corpus.sampler.max_new_tokens)

    def rows_per_step(self, name: str) -> int:
        return self.phases[name].rows(self.devices)

    def tokens(self, name: str) -> int:
        phase = self.phases[name]
        return phase.steps * self.rows_per_step(name) * phase.seq_len

    def trained_tokens(self, name: str) -> int:
        return round(self.tokens(name) * self.trained_share(name))

    def trained_share(self, name: str) -> float:
        """Estimate the trained share of tokens: all of text, and answers without prompts, at their largest lengths."""
        answer, prompt = self.data.answers.sampler.max_new_tokens, self.data.answers.max_prompt_tokens
        return 1.0 if self.phases[name].corpus == "text" else answer / (answer + prompt)

    def operations(self, name: str) -> float:
        step, phase = self._step(name, accumulates=False), self.phases[name]
        share = self.trained_share(name)
        of_micro_batch = step.base_operations + share * (step.operations - step.base_operations)
        return of_micro_batch * phase.steps * self.rows_per_step(name) / phase.micro_batch_size

    def steps(self) -> dict[str, StepMemory]:
        return {name: self._step(name, accumulates=False) for name in self.phases}

    def total(self, name: str, mode: str | None = None) -> int:
        return sum(self.memory(name, mode).values())

    def memory(self, name: str, mode: str | None = None) -> dict[str, int]:
        """Return a device's bytes by purpose at the peak of a step of the phase ``name``, from a step on meta tensors.
        ``mode`` replaces ``shard.mode`` unless None. With N shards, a device holds:

        - of the base's layers: none if hidden states are stored and the head needs no layers. Else all, or if the mode
          is ``full`` 1/N (none if offloaded), and ``GATHERED_LAYERS`` whole layers. If the run trains the base, there
          are two copies of the layers, of which it holds 1/N each.
        - of the head: 1/N of its weights, gradients and moments in float32, and all weights in its computing dtype.
        - the larger of two: what the forward and backward passes store, or the head's gradients in float32, which are
          summed over the processes after the activations were freed.
        """
        phase, mode = self.phases[name], mode or self.shard.mode
        wrapped = mode != "none" or self.precision != torch.float32
        accumulates = phase.micro_batches(self.devices, self.rows_per_step(name)) > 1
        step = self._step(name, accumulates=accumulates and not wrapped)
        adapters = self.adapters * FLOAT32
        base = self.base_bytes - (sum(self.layers) if name in self.without_layers else 0)
        memory = {"base weights": base, "head weights": self.head_parameters * FLOAT32}
        if adapters:
            memory["adapter weights"] = adapters
        trained = self.trained - self.adapters
        if not wrapped:
            return memory | {"optimiser": step.optimiser, "activations, gradients": step.step}
        shards = 1 if mode == "none" else self.shards
        moments = 2 * adapters if phase.train_base else 0
        shard = -(-trained // shards) * FLOAT32
        gathered = trained * self.precision.itemsize
        memory["head weights"] += shard - trained * FLOAT32
        memory["gradient shard"] = shard
        memory["optimiser"] = moments + (step.optimiser - moments) * FLOAT32 // self.precision.itemsize // shards
        memory["gathered head"] = gathered
        memory["activations, gradients"] = max(step.loss, trained * FLOAT32)
        if mode == "full":
            layers = [] if name in self.without_layers else self.layers
            memory["base weights"] -= sum(layers)
            memory["base weights"] += 0 if self.shard.offload_base else (1 + self.trains_base) * sum(layers) // shards
            memory["gathered layers"] = GATHERED_LAYERS * max(layers, default=0)
        return memory

    def reading(self, name: str) -> int:
        """Return the bytes of the whole base and of a pass that computes hidden states for the phase to store."""
        tokens = min(max(PASS_TOKENS, self.phases[name].seq_len), self.base.max_context)
        batch = one_row(Documents.of([np.zeros(tokens, np.int32)]), [0])
        weights = self._fake.peak = self._fake.live
        with self._fake:
            self.base.hidden_states(batch, self.head.spec)
        return self.base_bytes + self._fake.peak - weights

    def read_operations(self, tokens: int) -> int:
        """Return the floating-point operations of the base to read one text of ``tokens`` tokens."""
        before = self._fake.operations
        with self._fake:
            self.base.hidden_states(one_row(Documents.of([np.zeros(tokens, np.int32)]), [0]), self.head.spec)
        return self._fake.operations - before

    def dense_masks(self, name: str) -> int:
        """Return the bytes that masks [T, T] of packed rows would add in the phase ``name``; none are made."""
        phase, windows, head = self.phases[name], self.base.windows, self.head
        of_base = 1 if windows is None else len(set(windows.by_kind.values()))
        attends = not head.reads_base or any(isinstance(module, HeadAttention) for module in head.modules())
        of_token = (attends + head.attends) * self.precision.itemsize
        if not phase.store_hidden_states:
            of_token += of_base * self.base.dtype.itemsize
        return phase.micro_batch_size * phase.seq_len**2 * of_token

    def _step(self, name: str, accumulates: bool) -> StepMemory:
        if (name, accumulates) not in self._steps:
            if self.trains_base:
                self.head.train_base(now=self.phases[name].train_base)
            CHUNK_BYTES["meta"] = CHUNK_BYTES.get(self.device, CHUNK_BYTES["accelerator"])
            self._steps[name, accumulates] = StepMemory(self.head, self.phases[name], self._fake, accumulates)
        return self._steps[name, accumulates]

    @property
    def disk(self) -> dict[str, int]:  # upper bounds in bytes, by purpose
        width = self.base.hidden_size * CACHED
        sizes = {"answers": self.answer_tokens * TOKEN_ID}
        storing = {name: phase for name, phase in self.phases.items() if phase.store_hidden_states}
        with_answers = self.data.answers.decoded_here and any(p.corpus == "answers" for p in storing.values())
        if with_answers:
            sizes["hidden states of answers"] = self.answer_tokens * width
        for name, phase in storing.items():
            if phase.corpus == "answers" and self.data.offline.folder:
                continue  # read where they are
            if self.data.states.is_used and not self.data.states.keep:
                continue  # computed while training
            tokens = self.data.text.max_tokens if phase.corpus == "text" else self.answer_tokens
            # Final states are stored with the answers, so rows only add the states of early layers.
            states = len(self.head.spec.layers) + (phase.corpus == "text" or not with_answers)
            if states:
                sizes[f"hidden states of {name}"] = tokens * width * states
        sizes["one checkpoint"] = (self.head_parameters + self.adapters + 2 * self.trained) * FLOAT32
        return sizes


def render(estimate: Estimate) -> Group:
    phases = list(estimate.phases)
    parameters = _table("parameters", "count")
    parameters.add_row("base" if estimate.adapters else "base, frozen", f"{estimate.base.model.num_parameters():,}")
    parameters.add_row("head", f"{estimate.head_parameters:,}")
    if estimate.adapters:
        parameters.add_row("adapters of the base", f"{estimate.adapters:,}")
    parameters.add_row("trained", f"{estimate.trained:,}")
    tokens = _table(f"tokens on {estimate.devices} device{'s' * (estimate.devices > 1)}", "read", "trained, about")
    for name in phases:
        tokens.add_row(name, f"{estimate.tokens(name):,}", f"{estimate.trained_tokens(name):,}")
    memory = _table("memory per device", *phases)
    by_phase = [estimate.memory(name) for name in phases]
    for purpose in by_phase[0]:
        memory.add_row(purpose, *(size(bytes_by_purpose[purpose]) for bytes_by_purpose in by_phase))
    memory.add_section()
    memory.add_row("total", *(size(estimate.total(name)) for name in phases))
    if estimate.without_layers and estimate.reads_texts:
        reading = [size(estimate.reading(name)) if name in estimate.without_layers else "" for name in phases]
        memory.add_row("before: hidden states", *reading)
    memory.add_row("not made: masks [T, T]", *(size(estimate.dense_masks(name)) for name in phases))
    modes = _table("total, by what is sharded", *phases)
    for mode in SHARD_MODES:
        modes.add_row(f"shard={mode}", *(size(estimate.total(name, mode)) for name in phases))
    disk = _table("disk, at most", "size")
    for purpose, count in estimate.disk.items():
        disk.add_row(purpose, size(count))
    return Group(parameters, tokens, memory, *([modes] if estimate.devices > 1 else []), disk)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def size(count: int) -> str:
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
