"""A small causal LM made of some of the base's layers, trained to draft for it (2211.17192, 2302.01318).

It reads tokens, not hidden states. The base's embedding and output head are frozen and shared. Copies of a few decoder
layers and of the final norm are trained, as in DistilBERT and Distil-Whisper.

Shape legend: B batch, T time, D width.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import drafting_layers, with_layers
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.node_cache import LMSession
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig, DraftPositions
from drafthead.models.heads.parts.head_session import HeadSession
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels.fused import fresh_copy
from drafthead.settings.schema import settings


@settings(kw_only=True)
class DraftLMConfig(DraftHeadConfig):
    """Settings of :class:`DraftLM`."""

    one_prediction = True
    needs_layers = True
    num_draft_tokens: DraftPositions = 5
    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Decoder layers of the draft model."""
    from_layers: list[int] | None = None
    """Layers of the base to start from, in order; 0 is the first. With null, spread evenly from first to last (one
    layer: the first), over the layers without a recurrent state."""
    intermediate_size: Annotated[int, Field(ge=16)] | None = None
    """Inner width of each layer's MLP. A smaller width than the base's keeps its channels with the largest weights. A
    larger width adds channels that have no effect at first. With null, the base's. Depths and widths of equal total
    size are compared in docs/results/draft_shapes.md (2402.01528)."""

    def __post_init__(self) -> None:
        if self.from_layers is not None and len(self.from_layers) != self.num_layers:
            what = f"head.from_layers must name {self.num_layers} layers (head.num_layers)"
            raise ValueError(f"{what}, got {self.from_layers}")

    def check_layers(self, num_layers: int) -> None:
        if self.from_layers is not None and not all(0 <= source < num_layers for source in self.from_layers):
            raise UserError(f"head.from_layers must be in [0, {num_layers}), got {list(self.from_layers)}")


class DraftLM(DraftHead):
    """A few trained decoder layers between the base's embedding and its output head."""

    config: DraftLMConfig
    base: BaseModel
    reads_base = False

    def __init__(self, config: DraftLMConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self._sources = config.from_layers or spread_sources(base, config.num_layers)
        check_sources(base, self._sources)
        stock, settings = base.model.model.layers, base.model_config
        self.layers = nn.ModuleList(fresh_copy(stock[s], settings, n, s) for n, s in enumerate(self._sources))
        if config.intermediate_size is not None:
            for layer in self.layers:
                resize_mlp(getattr(layer, "mlp", None), config.intermediate_size)
        self.norm = deepcopy(base.final_norm).float().requires_grad_(True)
        self._trunk = with_layers(base, self.layers, self.norm, torch.float32, self._sources)
        self.projections = self.lm_heads(0)

    def open(self, rows: int, cache: TreeCache | None = None) -> "DraftLMSession":
        return DraftLMSession(self, rows)

    def inference_trunk(self) -> BaseModel:
        if not self.base.prepacked:
            return self._trunk
        layers = drafting_layers(self.base, self.layers, self.config.inference_dtype(self.base))
        return with_layers(self.base, layers, self.norm, torch.float32, self._sources)

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        decoder, dtype = self._trunk.model.model, next(self.parameters()).dtype
        out = decoder(
            inputs_embeds=decoder.get_input_embeddings()(batch.input_ids).to(dtype),
            position_ids=batch.position_ids,
            attention_mask=self._trunk.packed_masks(draft_targets.mask),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state.flatten(0, 1)[draft_targets.last_read]
        return hidden

    def sink_states(self, hidden: Tensor, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        return hidden[:1]  # all positions use the draft LM's state at ``x_{t+1}``


class DraftLMSession(HeadSession):
    """A session in which a causal LM computes the logits of each tree level; optional parts add to the logits."""

    def __init__(self, head: DraftLM, rows: int) -> None:
        trunk = head.packed.get("trunk", head.inference_trunk)
        self._lm = LMSession(head, trunk, rows, lambda hidden: hidden)
        super().__init__(head, rows, self._lm)

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._lm.start(last_token, draft_config)

    def draft_sinks(self) -> None:
        return None

    def level(self, k: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        x = self._lm.expand(tokens, parents)
        if k == 0 and self.copied is not None:
            self.copied.start(x)
        return x, self.draft_logits(x, k)


def spread_sources(base: BaseModel, count: int) -> list[int]:
    """Return ``count`` layers of ``base`` without a recurrent state, spread evenly from first to last."""
    shape, usable = base.cache_shape, list(range(base.num_layers))
    if shape.states:
        usable = [n for n in usable if shape.layers[n] and not shape.states[n]] or usable
    last, steps = len(usable) - 1, max(1, count - 1)
    return [usable[round(n * last / steps)] for n in range(count)]


def check_sources(base: BaseModel, sources: Sequence[int]) -> None:
    """Reject recurrent layers, whose state would pass between packed documents in training."""
    states, kind = base.cache_shape.states, base.model_config.model_type
    if recurrent := [n for n in sources if states and states[n]]:
        what = f"layers {recurrent} of {kind} are recurrent, and a draft LM needs attention layers"
        raise UserError(f"{what}; name others with head.from_layers, or choose another head")


@torch.no_grad()
def resize_mlp(mlp: Any, width: int) -> None:
    """Change the inner width of a gated MLP to ``width``, in place; reject MLPs unlike Llama's. A smaller MLP keeps the
    channels with the largest weights; new channels of a larger one output zero."""
    linears: list[Any] = [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    gate, up, down = linears
    if not all(isinstance(linear, nn.Linear) for linear in linears) or not gate.bias is up.bias is None:
        raise UserError("head.intermediate_size is for gated MLPs without biases, unlike this base's; leave it out")
    old_width = gate.weight.shape[0]
    if width <= old_width:
        size = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
        channels = size.topk(width).indices.sort().values
        weights = [gate.weight[channels], up.weight[channels], down.weight[:, channels]]
    else:
        added = [torch.randn_like(w[:1].expand(width - old_width, -1)) * w.std() for w in (gate.weight, up.weight)]
        weights = [torch.cat([gate.weight, added[0]]), torch.cat([up.weight, added[1]])]
        weights.append(torch.nn.functional.pad(down.weight, (0, width - old_width)))
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight = nn.Parameter(weight.contiguous())
        linear.out_features, linear.in_features = weight.shape
