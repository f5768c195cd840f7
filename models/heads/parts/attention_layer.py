"""Attention, MLP and norm of a head's own decoder layers. Their weights have the names of Llama checkpoints.

The method ``inference`` of attention, MLP and norm returns a fast version for drafting, with packed copies of weights.

Shape legend: B batch, T time, N = B * T tokens, A anchors, S anchors of a span, P draft positions of each, H query
heads, G key/value heads, E head width, I input width, D base width.
"""

from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any, TypeVar, TypeVarTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafthead.data.batch import TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import attention_sizes, smallest
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape, KeyValueShape
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels.attention import packed_attention
from drafthead.models.kernels.fused import FusedAttention, FusedMLP, FusedRMSNorm, rotate
from drafthead.models.kernels.linear import can_prepack
from drafthead.models.kernels.packed import OwnMask, PackedMask

Layer = Callable[[Tensor, Tensor, Tensor | None, TreeCache], Tensor]
"""Runs a layer in drafting. Maps inputs [B, T, I], positions [B, T], an additive mask (None: every query sees all keys)
and a cache, into which it writes keys and values, to outputs [B, T, D]."""
Mask = Tensor | PackedMask | None
Module = TypeVar("Module", bound=nn.Module)
Output = TypeVar("Output")
Inputs = TypeVarTuple("Inputs")


def recomputed(method: Callable[[Module, *Inputs], Output]) -> Callable[[Module, *Inputs], Output]:
    """Let the backward pass call ``method`` again, instead of storing activations, if ``gradient_checkpointing``."""

    @wraps(method)
    def call(module: Module, *inputs: *Inputs) -> Output:
        # Without gradients, ``checkpoint`` would read random states, which waits for the device.
        if not (module.gradient_checkpointing and torch.is_grad_enabled()):
            return method(module, *inputs)
        return cast(Output, checkpoint(method, module, *inputs, use_reentrant=False))

    return call


class HeadAttention(nn.Module):
    """Grouped-query attention without biases, with the base's numbers of heads, head width and rotary embedding. If the
    base rotates differently from Llama, Llama's rotary embedding with the base's theta is used."""

    gradient_checkpointing = False  # set by ``shard.checkpointing``, as in transformers' layers

    def __init__(
        self,
        base: BaseParts,
        input_width: int | None = None,
        qk_norm: bool = False,
        layer_idx: int = 0,
        rope_theta: float | None = None,
        window: int | None = None,
    ) -> None:
        """Create the weights in float32 on the base's device; reject a base without rotary embedding.

        Args:
            base: the frozen base.
            input_width: width I of the inputs; None: the base's hidden size.
            qk_norm: normalise queries and keys of each attention head before rotation, as Qwen3 does.
            layer_idx: index of this layer, from 0, in the cache that its head drafts with.
            rope_theta: theta of a Llama rotary embedding without scaling; None: the base's rotary embedding.
            window: tokens that a query sees, its own included; None: all. Only masks depend on it.
        """
        super().__init__()
        if base.rotary is None:
            what = f"{base.model_config.model_type} has no rotary embedding, which a head's attention needs"
            raise UserError(f"{what}; choose a head without attention (medusa, hydra, mlp_speculator)")
        heads, (kv_heads, head_dim) = base.model_config.num_attention_heads, attention_sizes(base.model_config)
        rotary = _rotary(base, heads, head_dim, rope_theta)
        width = input_width or base.hidden_size
        self.kv_heads, self.grouped, self.window = kv_heads, heads != kv_heads, window
        # Attributes that FusedAttention reads from a stock module.
        self.layer_idx, self.head_dim, self.scaling = layer_idx, head_dim, head_dim**-0.5
        with torch.device(base.device):
            self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
            self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
            self.o_proj = nn.Linear(heads * head_dim, base.hidden_size, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = HeadRMSNorm(base, head_dim), HeadRMSNorm(base, head_dim)
        self._rotary = (rotary,)  # the base's: in a tuple, so that it is not a submodule

    def cache_shape(self, dtype: torch.dtype, device: torch.device, layers: int = 1) -> CacheShape:
        sizes = self.kv_heads, self.head_dim
        return CacheShape(layers=(KeyValueShape(sizes, sizes),) * layers, dtype=dtype, device=device)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, E] at ``positions`` [B, T], in the dtype of ``x``."""
        return cast(tuple[Tensor, Tensor], self._rotary[0](x, position_ids=positions))

    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, H, T, E], rotated keys [B, G, T, E] and values [B, G, T, E] of ``x`` [B, T, I]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        return rotate(query, *self.rotation(x, positions)).transpose(1, 2), *self.keys_values(x, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys [B, G, T, E] and values [B, G, T, E] of inputs ``x`` [B, T, I]."""
        key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.k_proj, self.v_proj))
        if hasattr(self, "k_norm"):
            key = self.k_norm(key)
        return rotate(key, *self.rotation(x, positions)).transpose(1, 2), value.transpose(1, 2)

    @recomputed
    def forward(self, x: Tensor, positions: Tensor, mask: Mask, cache: TreeCache | None = None) -> Tensor:
        """Return the attention's output after its output projection, [B, T, D].

        Args:
            x: [B, T, I] inputs.
            positions: [B, T] int64 positions for the rotary embedding.
            mask: [B, 1, T, keys] additive, or of packed rows, or None if every query sees all keys.
            cache: cache in which T positions were reserved by ``begin``; None in training.
        """
        query, key, value = self.states(x, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return self.output(query, key, value, mask)

    def output(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend with the results of ``states`` and apply the output projection: [B, T, D]."""
        if isinstance(mask, PackedMask):
            return self.join(packed_attention(query, key, value, mask))
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped))

    def join(self, attended: Tensor) -> Tensor:
        """Join the outputs of all attention heads: [B, H, T, E] -> [B, T, D]."""
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def inference(self, dtype: torch.dtype | None = None) -> Layer:
        """Return an equal function with weights packed in ``dtype`` (None: their dtype, packed if this device can)."""
        if dtype is None and not can_prepack(self.q_proj.weight):
            return self.forward
        fused = FusedAttention(self, dtype)
        return lambda x, positions, mask, cache: fused(x, self.rotation(x, positions), mask, cache)[0]


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm of a draft head's own layers, with the base's epsilon and float32 statistics."""

    eps: float

    def __init__(self, base: BaseParts, width: int | None = None) -> None:
        super().__init__(width or base.hidden_size, norm_eps(base), device=base.device)

    def inference(self, dtype: torch.dtype | None = None) -> nn.Module:
        return FusedRMSNorm(self)


class HeadMLP(nn.Module):
    """MLP of a head's own decoder layers, ``down(silu(gate(x)) * up(x))``, without biases."""

    act_fn = staticmethod(F.silu)

    def __init__(self, base: BaseParts, inner: int | None = None) -> None:
        """``inner`` is the inner width; None: the smallest of the base's layers, or four times the hidden size."""
        super().__init__()
        width, device = base.hidden_size, base.device
        inner = inner or smallest(base.model_config, "intermediate_size") or 4 * width
        self.gate_proj = nn.Linear(width, inner, bias=False, device=device)
        self.up_proj = nn.Linear(width, inner, bias=False, device=device)
        self.down_proj = nn.Linear(inner, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    def inference(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return an equal MLP that computes gate and up in one matrix product, with weights packed in ``dtype``."""
        return FusedMLP(self, dtype)


def _rotary(base: BaseParts, heads: int, head_dim: int, theta: float | None) -> nn.Module:
    """Return the base's rotary embedding if it rotates like Llama's, else a new one, as always with a ``theta``."""
    if theta is None and rotates_like_llama(base, head_dim):
        return cast(nn.Module, base.rotary)
    settings = LlamaConfig(
        hidden_size=base.hidden_size,
        num_attention_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=base.max_context,
        rope_parameters=head_rope(base) if theta is None else {"rope_type": "default", "rope_theta": theta},
    )
    with torch.device(base.device):
        rotary: nn.Module = LlamaRotaryEmbedding(settings)
    return rotary


def rotates_like_llama(base: BaseParts, head_dim: int) -> bool:
    """Return True if the base's rotary embedding rotates like Llama's. Other models rotate only some channels, pair
    neighbouring channels, return complex numbers, or rotate differently in layers with a sliding window."""
    try:
        probe = torch.zeros(1, 1, base.hidden_size, dtype=base.dtype, device=base.device)
        position = torch.ones(1, 1, dtype=torch.int64, device=base.device)
        cos_sin = base.rotary(probe, position_ids=position)
        if isinstance(cos_sin, Tensor) or not all(values.shape == (1, 1, head_dim) for values in cos_sin):
            return False
        # Llama pairs channel i with i + E / 2, so both halves have the same angles.
        return base.device.type == "meta" or all(torch.equal(*values.chunk(2, -1)) for values in cos_sin)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return False


def head_rope(base: BaseParts) -> dict[str, Any]:
    """Return the base's ``rope_parameters`` if it rotates like Llama, else its theta (of full attention)."""
    config = base.model_config
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rotates_like_llama(base, attention_sizes(config)[1]):
        return ropes
    rope = ropes.get("full_attention") or next((rope for rope in ropes.values() if isinstance(rope, dict)), ropes)
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return {"rope_type": "default", "rope_theta": float(theta)}


class HeadDecoderLayer(nn.Module):
    """Pre-norm decoder layer: norm, attention, residual; norm, MLP, residual. It starts as the identity."""

    gradient_checkpointing = False

    def __init__(self, base: BaseParts, inner: int | None = None, **attention: Any) -> None:
        """``inner`` is the inner width of the MLP, and ``attention`` are arguments of ``HeadAttention``."""
        super().__init__()
        self.input_layernorm = HeadRMSNorm(base)
        self.self_attn = HeadAttention(base, **attention)
        self.post_attention_layernorm = HeadRMSNorm(base)
        self.mlp = HeadMLP(base, inner)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor, positions: Tensor, mask: Mask, cache: TreeCache | None = None) -> Tensor:
        return self.add_mlp(x, self.self_attn(self.normed(x), positions, mask, cache))

    @recomputed
    def states(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``HeadAttention.states`` of the layer's inputs ``x`` [B, T, I]."""
        return self.self_attn.states(self.normed(x), positions)

    def normed(self, x: Tensor) -> Tensor:
        """Return the attention's inputs [B, T, I] from those of the layer."""
        return cast(Tensor, self.input_layernorm(x))

    def residual(self, x: Tensor) -> Tensor:
        """Return the residual stream [B, T, D], to which attention is added, from the layer's inputs [B, T, I]."""
        return x

    @recomputed
    def add_mlp(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the outputs [B, T, D] from the inputs ``x`` [B, T, I] and the attention's outputs [B, T, D]."""
        hidden = self.residual(x) + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class AnchorContext:
    """Attention of the draft positions of all anchors at once, in training; drafting uses ``LayerCache``.

    A draft position sees the context up to its anchor, and draft positions of the same anchor: in ``start`` those up to
    itself, in ``read_block`` those that its argument ``seen`` allows. The context sees itself causally. An example of
    ``start`` (x: seen), for the anchor t = 1, with draft positions a0 (at the anchor itself), a1 and a2::

        keys:   context 0  1  2  3    a1 a2
        a0              x  x  .  .    .  .
        a1              x  x  .  .    x  .
        a2              x  x  .  .    x  x

    If the layer has a window of 2 tokens, each query sees one token of the context less than the query before it: a0
    sees 0 and 1, a1 sees 1, a2 sees none. Draft positions of an anchor see each other whatever the window.

    The rows of the batch are read as one row of N tokens.
    """

    def __init__(self, batch: TrainBatch, draft_targets: DraftTargets) -> None:
        self.anchors, self._mask, self._seen = draft_targets.anchors, draft_targets.mask, draft_targets.seen
        self._masks: dict[int | None, tuple[PackedMask, PackedMask]] = {}
        self.positions = batch.position_ids.reshape(1, -1)  # [1, N] int64

    def masks(self, window: int | None) -> tuple[PackedMask, PackedMask]:
        """Return the keys that each token of the context sees in layers with this ``window``, and those that each
        anchor sees."""
        if window not in self._masks:
            both = self._mask, self._seen
            self._masks[window] = (
                both if window is None else (both[0].within(window, False), both[1].within(window, False))
            )
        return self._masks[window]

    def at_anchors(self, values: Tensor) -> Tensor:
        """Select the anchors: [B, T, ...] -> [A, ...]."""
        return values.flatten(0, 1)[self.anchors]

    def start(self, layer: HeadDecoderLayer, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Run ``layer`` over the context's ``inputs`` [B, T, I], and return the function ``attend`` for ``advance``.
        The first call of that function computes draft position 0 at all anchors, the second call position 1, and so on:
        [A, I] -> [A, D]. Position 0 stands in the context, so its queries, keys and values are those of the context.
        The inputs of the first call are only read by the residual connection."""
        query, key, value = layer.states(inputs.flatten(0, 1)[None], self.positions)
        query, window = query[:, :, self.anchors], layer.self_attn.window
        block: list[tuple[Tensor, Tensor]] = []
        steps = count()

        def step(x: Tensor) -> Tensor:
            if not (n := next(steps)):
                return layer.add_mlp(x[None], layer.self_attn.output(query, key, value, self.masks(window)[1]))[0]
            new_query, *new = layer.states(x[None], self.positions[:, self.anchors] + n)
            block.append((new[0], new[1]))
            keys, values = (torch.stack(states, 3) for states in zip(*block, strict=True))
            offset = torch.full((1,), n, device=x.device)
            attended = self.attend_blocks(window, offset, new_query[:, :, :, None], key, value, keys, values)
            return layer.add_mlp(x[None], layer.self_attn.join(attended))[0]

        return step

    def start_stock(
        self, layers: Callable[[Tensor, Tensor, Any, Any], Tensor], inputs: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Run transformers' own ``layers`` over the context's ``inputs`` [B, T, I], and return ``attend`` as ``start``
        does. They compute keys and values themselves, of any kind, so the context is one more input of each pass."""
        cache, steps = _GrowingStates(), count()
        mask = self.masks(None)[0]
        first = self.at_anchors(layers(inputs.flatten(0, 1)[None], self.positions, mask, cache))

        def step(x: Tensor) -> Tensor:
            if not (n := next(steps)) or not len(x):  # stock layers cannot read 0 tokens
                return first
            offset = torch.full((1,), n, device=x.device)
            return layers(x[None], self.positions[:, self.anchors] + n, AnchorMask(self, offset), cache)[0]

        return step

    def read_block(
        self, layer: HeadDecoderLayer, x: Tensor, key: Tensor, value: Tensor, offsets: Tensor, seen: Tensor
    ) -> Tensor:
        """Run ``layer`` over a block of P draft positions at each anchor, [1, A P, I] -> [1, A P, D].

        Args:
            layer: the layer.
            x: [1, A P, I] its inputs at the blocks.
            key, value: [1, G, N, E] of the context.
            offsets: [P] int64 distance of each draft position from the anchor.
            seen: [P, P] bool mask within a block: [i, j] is true if position i attends to position j.
        """
        positions = (self.positions[0, self.anchors, None] + offsets).reshape(1, -1)
        query, keys, values = (torch.unflatten(s, 2, (-1, len(seen))) for s in layer.states(x, positions))
        window = layer.self_attn.window
        attended = self.attend_blocks(window, offsets, query, key, value, keys, values, seen)
        return layer.add_mlp(x, layer.self_attn.join(attended))

    def attend_blocks(
        self,
        window: int | None,
        offsets: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return ``attend_block`` for queries [1, H, A, P, E] of all anchors, in a layer with this ``window``:
        [1, H, A P, F]. The backward pass recomputes the scores; stored ones would take P numbers for each layer,
        anchor, key and attention head."""
        attended = [query.new_zeros(query.shape[1], 0, query.shape[3], value.shape[-1])]  # without anchors: no span
        for span in self.masks(window)[1].spans(query.shape[1] * query.shape[3]):
            mask = span.seen if window is None else span.seen_within(window, offsets)
            context = (states[0][:, span.keys] for states in (key, value))
            blocks = (states[0][:, span.queries] for states in (keys, values))
            arguments = query[0][:, span.queries], *context, mask, *blocks, seen
            attended.append(checkpoint(attend_block, *arguments, use_reentrant=False))
        return torch.cat(attended, 1).flatten(1, 2)[None]


class AnchorMask(OwnMask):
    """The mask of one draft position of every anchor, as ``AnchorContext.start`` shows it. The keys of a pass are those
    of the N tokens of the context, followed by the A keys of each draft position so far."""

    def __init__(self, context: AnchorContext, offset: Tensor) -> None:
        """``offset`` [1] int64 is the distance of the draft position from its anchor."""
        self._context, self._offset = context, offset

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 1, len(self._context.anchors), self._context.positions.shape[1]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        tokens, anchors = self._context.positions.shape[1], len(self._context.anchors)
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        keys, values = (torch.unflatten(s[:, :, tokens:], 2, (-1, anchors)).transpose(2, 3) for s in (key, value))
        states = query[:, :, :, None], key[:, :, :tokens], value[:, :, :tokens], keys, values
        return self._context.attend_blocks(None, self._offset, *states)


class _GrowingStates:
    """A cache, as transformers' layers use it, that returns all states of earlier passes with gradients."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, ...]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, kwargs: object = None) -> tuple[Tensor, ...]:
        new, before = (key, value), self._states.get(layer_idx)
        self._states[layer_idx] = new if before is None else tuple(map(_join, before, new))
        return self._states[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._states[layer_idx][0].shape[2] if layer_idx in self._states else 0


def _join(before: Tensor, new: Tensor) -> Tensor:
    return torch.cat([before, new], 2)


def attend_block(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    mask: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the attention of draft positions over the context and over the draft positions of the same anchor.

    Each query has T + Q keys, those of the context and those of its own block, and one softmax over all of them. The
    scores of both are computed separately, because all anchors share the context's keys, while a block's keys serve one
    anchor. Example: T = 3, anchors t = 0 and t = 1, blocks of Q = 2, causal ``seen``. The second block's queries see::

        context  block of t = 0   block of t = 1
        x x .        . .              x .
        x x .        . .              x x

    Args:
        query: [H, S, P, E], P queries at each of S anchors; the result has this shape, too.
        context_key, context_value: [G, T, E], and values may have another width F, as those of the result.
        mask: [S, T] or [S, P, T] bool: True for keys of the context that the anchors, or the queries, see.
        keys, values: [G, S, Q, E] of the Q draft positions of each anchor.
        seen: [P, Q] bool mask of a block's queries over its keys; None: every query sees all of them.
    """
    groups, time = context_key.shape[:2]
    heads, count, block, width = query.shape
    # R = H / G query heads share a key head; for the product with the context they are R * S * P queries of one head.
    query = query.reshape(groups, -1, width) * width**-0.5
    grouped = (groups, heads // groups, count, block)
    hidden = ~(mask if mask.ndim == 3 else mask[:, None])
    to_context = (query @ context_key.transpose(1, 2)).view(*grouped, time).masked_fill(hidden, -torch.inf)
    to_block = torch.einsum("grspe,gsqe->grspq", query.view(*grouped, width), keys)
    if seen is not None:
        to_block = to_block.masked_fill(~seen, -torch.inf)
    scores = torch.cat([to_context, to_block], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(query.dtype)
    out = (weights[..., :time].flatten(1, 3) @ context_value).view(*grouped, -1)
    out += torch.einsum("grspq,gsqe->grspe", weights[..., time:], values)
    return out.flatten(0, 1)


def norm_scale(base: BaseParts) -> Tensor:
    """Return the scale [D] of the base's final norm, its output for ones. (Gemma stores scale - 1.)"""
    return cast(Tensor, base.final_norm(torch.ones_like(base.embedding[0])).float())


@torch.no_grad()
def start_as_base(fc: nn.Linear, norm: HeadRMSNorm, base: BaseParts, deepest: int, is_final: bool) -> None:
    """Initialise ``fc`` to select the input state with index ``deepest``, and ``norm`` to the base's final norm. A
    final state of the base (``is_final``) has already passed the final norm, so ``norm`` then starts with one scale for
    all channels, which keeps the state's size."""
    width, scale = base.hidden_size, norm_scale(base)
    fc.weight.zero_()
    fc.weight[:, deepest * width : (deepest + 1) * width] = torch.eye(width)
    norm.weight.copy_(scale.square().mean().sqrt() if is_final else scale)


def norm_eps(base: BaseParts) -> float:
    return float(getattr(base.model_config, "rms_norm_eps", None) or 1e-6)
