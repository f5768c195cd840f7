"""DSpark (DeepSeek's DeepSpec, 2026): a few layers draft a whole block in one pass, and a Markov head corrects it.

A block has P slots at the positions after t. The input of the first slot is the embedding of ``x_{t+1}``, that of the
others a mask token. Every layer attends to the block and to the context: the base's hidden states up to t, which ``fc``
maps to one state per token for all layers. The context's keys and values are stored between steps. Drafting is
therefore one pass over P slots, whatever the depth::

    context  h_0 .. h_t  |  slot 0: x_{t+1}   slot 1: mask   slot 2: mask
    drafts               |  x_{t+2}           x_{t+3}        x_{t+4}

A slot does not know which tokens were drafted before it. The Markov head therefore adds ``W2 W1[x]`` to the slot's
logits, where x is the token before the draft, ``W1[x]`` a vector of ``markov_rank`` numbers, and W2 a matrix. Every
node of a tree thus has its own distribution. A confidence head reads the slot's output and ``W1[x]``, and predicts how
likely the draft is accepted.

Related heads: ``markov_rank: 0`` gives DFlash, and ``causal: true`` JetSpec's block. Both set ``anchor_predicts:
false``, so that slot 0 drafts nothing. Weights have the names of DeepSpec's checkpoints, except for the Markov head.

Differences from the reference code: layers can start as the base's last layers, and the Markov table can be a
projection of the base's embedding (``tied_markov``). Random initial weights are worse on small data
(``docs/dev/log.md``). All anchors are trained unless ``places`` limits their number. The head can have a draft
vocabulary. ``reads_state`` and the induction head are our additions.

Shape legend: B batch, T time, S anchors, P slots of a block, D width.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.heads.parts import attention_layer
from drafthead.models.heads.parts.attention_layer import AnchorContext, HeadDecoderLayer, HeadRMSNorm, Layer
from drafthead.models.heads.parts.draft_head import DraftHead, DraftPositions
from drafthead.models.heads.parts.head_session import HeadSession, LayerCache
from drafthead.models.heads.parts.targets import DraftTargets, has_next
from drafthead.models.heads.parts.windows import WindowConfig
from drafthead.models.kernels.fused import FusedRMSNorm, fresh_copy, rotate
from drafthead.models.kernels.linear import joined_linear, reads_in
from drafthead.models.token_tree import causal_mask
from drafthead.settings.schema import Positive, settings


@settings(kw_only=True)
class DSparkConfig(WindowConfig):
    """Settings of :class:`DSparkHead`."""

    num_draft_tokens: DraftPositions = 7
    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Decoder layers of the head."""
    layers: list[int] | None = None
    """Layers of the base whose outputs form the context; 1 is the first. With null, as published: as many as the head
    has layers, spread from layer 2 to layer L - 2 of L (one layer: the middle one)."""
    markov_rank: Annotated[int, Field(ge=0, le=1024)] = 64
    """Rank of the Markov head's correction by the previous token. 0 turns it off, as in DFlash. DeepSpec uses 256."""
    causal: bool | Literal["sliding"] = False
    """Let each slot attend only to itself and to earlier slots of its block, as in JetSpec. ``sliding`` does so only
    in layers with a window, as in z-lab's heads that also have full layers."""
    anchor_predicts: bool = True
    """Predict the first draft at slot 0, whose input is the last committed token. With false, slot 0 drafts nothing, as
    in DFlash and JetSpec."""
    confidence: bool = True
    mask_token: int | None = None
    """Token id of the mask token, the input of all slots after the first. It must not occur in text. With null, an
    unused id of the base's tokenizer."""
    copy_layers: bool = True
    """Start the layers as copies of the base's last layers. With false, they start at random and initially add nothing
    to their inputs."""
    reads_state: bool = False
    """Add the base's last hidden state to the input of every slot. The untrained head then equals the base's next-token
    head (our addition; no export format has it)."""
    intermediate_size: Positive | None = None
    """Inner width of the MLPs. With null, the base's."""
    places: Positive | None = None
    """Maximum number of anchors (positions from which drafts are made) that a micro-batch trains. They are drawn at
    random. With null, all anchors are trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal == "sliding" and self.window is None:
            raise ValueError("head.causal=sliding needs head.window; set it, or give true or false")
        if self.layers is not None and not self.layers:
            raise ValueError("head.layers must name at least one layer, or be null")
        if self.copy_layers and (self.reads_state or self.intermediate_size is not None):
            other = "reads_state" if self.reads_state else "intermediate_size"
            raise ValueError(f"head.copy_layers cannot be combined with head.{other}; set head.copy_layers=false")

    @property
    def starts_from_layers(self) -> bool:
        return self.copy_layers

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return spread_layers(num_layers, self.num_layers) if self.layers is None else tuple(self.layers)

    def check_layers(self, num_layers: int) -> None:
        super().check_layers(num_layers)
        if self.copy_layers and self.num_layers > num_layers:
            what = f"head.num_layers={self.num_layers} cannot start as copies: the base has {num_layers}"
            raise UserError(f"{what}; lower head.num_layers or set head.copy_layers=false")

    @property
    def attention_layers(self) -> int:
        return self.num_layers

    def is_causal(self, window: int | None) -> bool:
        """Return True if slots attend to earlier ones only, in layers with this ``window``."""
        return window is not None if self.causal == "sliding" else bool(self.causal)

    @property
    def slots(self) -> int:
        return self.num_draft_tokens + (not self.anchor_predicts)


class DSparkHead(DraftHead):
    """Qwen3-like layers that draft a block of tokens in one pass, with a Markov head and a confidence head."""

    config: DSparkConfig
    reads_drafts = False
    attends = True
    low_rank_name = "markov_out"

    def __init__(self, config: DSparkConfig, base: BaseParts, d2t: Tensor | None) -> None:
        if config.mask_token is None:
            config = replace(config, mask_token=base.unused_token)
        super().__init__(config, base, d2t)
        self.first_slot = int(not config.anchor_predicts)  # index of the slot that drafts the first token
        width, inner = base.hidden_size, config.intermediate_size
        self.fc = nn.Linear(len(self.spec.layers) * width, width, bias=False, device=base.device)
        self.hidden_norm = HeadRMSNorm(base)
        self.layers = nn.ModuleList(
            HeadDecoderLayer(base, inner, qk_norm=True, layer_idx=n, window=window)
            for n, window in enumerate(config.windows)
        )
        self.norm = HeadRMSNorm(base)
        self.slot_state: nn.Linear | None = None
        if config.reads_state:
            self.slot_state = nn.Linear(width, width, bias=False, device=base.device)
            self.slot_offset = nn.Parameter(torch.zeros(config.slots, width, device=base.device))
        with torch.no_grad():
            # Select the deepest of the states that are read.
            deepest = self.spec.layers.index(max(self.spec.layers))
            attention_layer.start_as_base(self.fc, self.norm, base, deepest, is_final=self.slot_state is not None)
            if self.slot_state is not None:
                self.slot_state.weight.zero_()
        self.projections = self.lm_heads(0)

    @torch.no_grad()
    def initialise(self) -> None:
        if not self.config.copy_layers:
            return
        base = self.base_model
        for number, layer in enumerate(self.decoder_layers, start=base.num_layers - self.config.num_layers):
            copy_layer(fresh_copy(base.model.model.layers[number], base.model_config, 0, number), layer)
        self.hidden_norm.weight.copy_(self.decoder_layers[0].input_layernorm.weight)

    @property
    def decoder_layers(self) -> list[HeadDecoderLayer]:
        return [cast(HeadDecoderLayer, layer) for layer in self.layers]

    @property
    def anchor_limit(self) -> int | None:
        return self.config.places if self.training else None

    def fuse(self, states: Tensor) -> Tensor:
        """Map the base's concatenated states to the context: [..., layers * D] -> [..., D]."""
        return cast(Tensor, self.hidden_norm(self.fc(states.to(reads_in(self.fc)))))

    def block(self, first_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the first layer's inputs at the P slots of blocks, [..., P, D]. ``first_tokens`` [...] int64 are the
        inputs ``x_{t+1}`` of slot 0. ``reads_state`` adds the base's final states ``hidden`` [..., D]."""
        assert self.config.mask_token is not None
        tokens = torch.full((*first_tokens.shape, self.config.slots), self.config.mask_token, device=hidden.device)
        tokens[..., 0] = first_tokens
        embedded = self.embed(tokens)
        if self.slot_state is None:
            return embedded
        projected: Tensor = self.slot_state(F.rms_norm(embedded, embedded.shape[-1:]))
        return hidden[..., None, :].to(projected.dtype) + projected + self.slot_offset

    def seen_slots(self, window: int | None, device: torch.device) -> Tensor:
        """Return the attention mask within a block, in layers with this ``window``, [P, P] bool: [i, j] is true if slot
        i attends to slot j."""
        seen = causal_mask(self.config.slots, device)
        return seen if self.config.is_causal(window) else torch.ones_like(seen)

    def open(self, rows: int, cache: TreeCache | None = None) -> "DSparkSession":
        return DSparkSession(self, rows)

    # There are two passes over blocks. Training runs the blocks of all anchors at once, which must not see each other.
    # Drafting runs one block over the cache (``DSparkSession.block_inputs``).

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        depth = len(draft_targets.valid)
        assert base_hidden.layers is not None
        # Nothing is drafted after the last token of a document, and its states may be NaN.
        fused = self.fuse(torch.where(has_next(batch.document_ids)[..., None], base_hidden.layers, 0.0))
        context = AnchorContext(batch, draft_targets)
        first_tokens = context.at_anchors(batch.input_ids.roll(-1, 1))
        blocks = self.block(first_tokens, context.at_anchors(base_hidden.final).nan_to_num())  # [A, P, D]
        x, fused = blocks.flatten(0, 1)[None], fused.flatten(0, 1)[None]
        offsets = torch.arange(1, self.config.slots + 1, device=x.device)
        for layer, window in zip(self.decoder_layers, self.config.windows, strict=True):
            # Layers do not change the context: each computes its keys and values from the same fused states.
            key, value = layer.self_attn.keys_values(fused, context.positions)
            x = context.read_block(layer, x, key, value, offsets, self.seen_slots(window, x.device))
        slots: Tensor = self.norm(x[0]).unflatten(0, (-1, self.config.slots))
        return slots[:, self.first_slot : self.first_slot + depth].transpose(0, 1)

    def sink_states(self, hidden: Tensor, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        return hidden


def context_reader(layers: list[HeadDecoderLayer], dtype: torch.dtype | None) -> Layer:
    """Return a function that writes keys and values of the context [B, T, D] for all ``layers`` into the cache. One
    matrix product computes them, because they depend only on the context and not on lower layers. The function returns
    the context unchanged. ``dtype`` is that of the packed weights (None: the trained dtype)."""
    attentions = [layer.self_attn for layer in layers]
    product = joined_linear([linear for a in attentions for linear in (a.k_proj, a.v_proj)], dtype)
    norms = [FusedRMSNorm(a.k_norm) for a in attentions]
    head_dim = attentions[0].head_dim

    def read(context: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
        cos_sin = attentions[0].rotation(context, positions)
        states = product(context).unflatten(-1, (2 * len(layers), -1, head_dim))
        for n, norm in enumerate(norms):
            key = rotate(norm(states[:, :, 2 * n]), *cos_sin)
            cache.update(key.transpose(1, 2), states[:, :, 2 * n + 1].transpose(1, 2), n)
        return context

    return read


class DSparkSession(HeadSession):
    """A session with a cache of the context's keys and values for all layers."""

    inference_head: DSparkHead

    def __init__(self, head: DSparkHead, rows: int) -> None:
        weight, dtype = head.fc.weight, head.config.inference_dtype(head.base)
        reader = head.packed.get("context", lambda: context_reader(head.decoder_layers, dtype))
        shape = head.decoder_layers[0].self_attn.cache_shape(weight.dtype, weight.device, len(head.layers))
        fuse = head.inference().fuse
        self.context = LayerCache(
            [reader], shape, rows, lambda base_hidden: fuse(cast(Tensor, base_hidden.layers)), head.config.windows
        )
        super().__init__(head, rows, self.context)

    def block_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        head = self.inference_head
        slots = head.block(last_token, hidden)
        out = self.context.read_block(slots, head.seen_slots, head.decoder_layers)
        return cast(Tensor, head.norm(out[:, head.first_slot : head.first_slot + depth]))

    def draft_sinks(self) -> Tensor:
        return self._inputs


@torch.no_grad()
def copy_layer(stock: Any, layer: HeadDecoderLayer) -> None:
    """Copy the weights of a base's decoder layer ``stock`` into ``layer``, in float32 and without biases. Reject layers
    unlike Llama's. If the base has no query and key norms, those of ``layer`` start with the average size of the base's
    queries and keys as their scale."""
    weights = {name: value for name, value in stock.state_dict().items() if not name.endswith("proj.bias")}
    for name in ("input_layernorm", "post_attention_layernorm"):
        if isinstance(getattr(stock, name, None), GemmaRMSNorm):
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + 1
    names, norms = layer.state_dict().keys(), {f"self_attn.{name}_norm.weight": name for name in ("q", "k")}
    missing, others = names - weights.keys(), weights.keys() - names
    if not missing <= norms.keys() or not all(name.startswith(("self_attn.", "mlp.")) for name in others):
        what = f"head.copy_layers=true copies layers like Llama's, which {type(stock).__name__} is not"
        raise UserError(f"{what}; set head.copy_layers=false")
    layer.load_state_dict(weights, strict=False)
    for key in missing:
        rows = getattr(layer.self_attn, f"{norms[key]}_proj").weight * layer.input_layernorm.weight
        getattr(layer.self_attn, f"{norms[key]}_norm").weight.fill_(rows.square().sum(1).mean().sqrt())


def spread_layers(layers: int, count: int) -> tuple[int, ...]:
    """Return the default of ``head.layers`` for a base of L = ``layers`` layers: ``count`` numbers, from 1. As in
    published heads, one layer is L // 2 + 1, and several are spread evenly from 2 to L - 2. In small bases, a layer may
    occur several times."""
    if count == 1:
        return (layers // 2 + 1,)
    spread = (round(1 + n * (layers - 4) / (count - 1)) + 1 for n in range(count))
    return tuple(sorted(min(layers, max(1, layer)) for layer in spread))
