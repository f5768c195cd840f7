"""EAGLE-3 (Li et al., 2503.01840): one decoder layer that drafts from the base's features and then from its own.

The hidden states of three layers of the base are projected to one feature ``f_t``. The decoder layer reads ``f_t`` and
the embedding of ``x_{t+1}``, and predicts ``x_{t+2}``. For the next draft, its output replaces ``f_{t+1}``, which the
base has not computed yet, and so on. Training runs the same steps (the training-time test), so the layer learns to
read its own output. The head has its own projection to a draft vocabulary.

Differences from the reference code:

- The loss covers trained tokens only; there, the mean includes padding.
- The untrained head is approximately the base's next-token head, with smaller logits; there, it is random.
- Attention stays inside a document.
- All targets are trained; there, only those at which the base's most likely token is in the draft vocabulary.
- The induction head is our addition. EAGLE-2's trees (2406.16858) are ``DynamicTree``, for any head.

``parallel`` is P-EAGLE (2602.01469): deeper positions read a learnt state and a mask token instead of the layer's own
output. All positions are therefore drafted in one pass, which can have several layers. All anchors and depths are
trained; the paper samples depths.

Shape legend: B batch, T time, S anchors, K draft positions, D width.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parts import BaseParts
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.heads.parts.attention_layer import AnchorContext, HeadDecoderLayer, HeadRMSNorm, start_as_base
from drafthead.models.heads.parts.copying_start import start_copying
from drafthead.models.heads.parts.draft_head import Attend
from drafthead.models.heads.parts.pair_head import START_SIZE, DraftingLayers, PairHead, PairHeadConfig, PairSession
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.heads.parts.windows import WindowConfig
from drafthead.models.kernels.linear import reads_in
from drafthead.models.token_tree import causal_mask
from drafthead.settings.schema import Positive, PositiveFloat, settings


class EagleLayer(HeadDecoderLayer):
    """Decoder layer whose inputs [..., 2 D] are a token's embedding and a feature, each of which is normalised. Its
    output is added to the feature, or with ``norm_before_residual`` to the normalised feature. The untrained layer adds
    zero. Weights have the names of published checkpoints."""

    def __init__(self, base: BaseParts, config: "Eagle3Config") -> None:
        attention = {"qk_norm": config.qk_norm, "rope_theta": config.rope_theta, "window": config.windows[0]}
        super().__init__(base, config.intermediate_size, input_width=2 * base.hidden_size, **attention)
        self.hidden_norm = HeadRMSNorm(base)
        self.norm_before_residual = config.norm_before_residual

    def normed(self, x: Tensor) -> Tensor:
        embedded, feature = x.chunk(2, -1)
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def residual(self, x: Tensor) -> Tensor:
        feature = x.chunk(2, -1)[1]
        return self.hidden_norm(feature) if self.norm_before_residual else feature


@settings(kw_only=True)
class Eagle3Config(PairHeadConfig, WindowConfig):
    """Settings of :class:`Eagle3Head`."""

    layers: list[int] | None = None
    """Layers of the base whose outputs form the feature; 1 is the first. With null, 2, L // 2 and L - 3 of L layers, as
    published. An empty list uses the final hidden state instead, as in EAGLE-1."""
    own_lm_head: bool = True
    """Train a projection to the vocabulary, which starts as the base's. With false, the base's is shared and frozen."""
    intermediate_size: Positive | None = None
    """Inner width of the MLP. With null, the base's."""
    norm_before_fc: bool = False
    """Normalise the concatenated states before the projection, as later checkpoints do."""
    fc_norm: bool = False
    """Normalise each layer's states before concatenation (EAGLE-3.1, 2605.09992)."""
    norm_before_residual: bool = False
    """Add the layer's output to the normalised feature, as some checkpoints do."""
    qk_norm: bool = False
    """Normalise queries and keys of each attention head before rotation, as Qwen3 does."""
    rope_theta: PositiveFloat | None = None
    """Theta of the layer's own rotary embedding, without scaling, as many published heads have it. With null, the
    layer rotates as the base does."""

    starts_copying: bool = False
    """Start with attention that drafts what followed earlier occurrences of the newest token (an induction head). Layer
    0 then takes the place of the first of ``layers``."""
    parallel: bool = False
    """Draft all positions in one pass (P-EAGLE). ``ttt_steps`` of them are trained."""
    num_layers: int = 1
    """Decoder layers, 1 to 16. More than one needs ``parallel``."""
    mask_token: int | None = None
    """Token id whose embedding deeper positions read, with ``parallel``. It must not occur in text. With null, an
    unused id of the base's tokenizer."""

    def __post_init__(self) -> None:
        WindowConfig.__post_init__(self)
        PairHeadConfig.__post_init__(self)
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("head.fc_norm and head.norm_before_fc exclude each other; leave one of them out")
        if self.parallel and self.norm_output:
            what = "head.parallel and head.norm_output exclude each other: no next step reads an output"
            raise ValueError(f"{what}; leave one out")
        if not 1 <= self.num_layers <= 16 or (self.num_layers > 1 and not self.parallel):
            raise ValueError(f"head.num_layers must be in [1, 16], and 1 without head.parallel, got {self.num_layers}")
        count = 3 if self.layers is None else len(self.layers)
        if self.starts_copying and (self.parallel or count < 2):
            other = (
                "head.parallel" if self.parallel else f"head.layers={self.layers}, which names fewer than two layers"
            )
            raise ValueError(f"head.starts_copying cannot be combined with {other}; leave one out")

    @property
    def attention_layers(self) -> int:
        return self.num_layers

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        layers = published_layers(num_layers) if self.layers is None else tuple(self.layers)
        return (0, *layers[1:]) if self.starts_copying else layers


class Eagle3Head(PairHead):
    """EAGLE-3's fused features, decoder layer, final norm and projection; weights have the names of its checkpoints."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, base: BaseParts, d2t: Tensor | None) -> None:
        if config.parallel and config.mask_token is None:
            config = replace(config, mask_token=base.unused_token)
        super().__init__(config, base, d2t)
        width = base.hidden_size
        fused = max(1, len(self.spec.layers))
        self.input_norm = HeadRMSNorm(base, fused * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(HeadRMSNorm(base) for _ in range(fused)) if config.fc_norm else None
        self.fc = nn.Linear(fused * width, width, bias=False, device=base.device)
        self.midlayer = EagleLayer(base, config)
        self.layers, inner = nn.ModuleDict(), config.intermediate_size
        attention = {"qk_norm": config.qk_norm, "rope_theta": config.rope_theta}
        for n, window in list(enumerate(config.windows))[1:]:
            self.layers[str(n)] = HeadDecoderLayer(base, inner, layer_idx=n, window=window, **attention)
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, fused * width, device=base.device))
        self.norm = HeadRMSNorm(base)
        self.lm_head: nn.Linear | None = None
        if config.own_lm_head:
            self.lm_head = nn.Linear(width, len(self.d2t), bias=False, device="meta")
            rows = self.target_lm_head.weight.detach().float()
            # Checkpoints have neither a scale nor a soft-cap, so the scale goes into the weight.
            self.lm_head.weight = nn.Parameter(rows * self.target_lm_head.scale)
        # Start as the base's next-token head over the deepest layer's state; the decoder layer starts as the identity.
        layers = self.spec.layers
        start_as_base(self.fc, self.norm, base, layers.index(max(layers)) if layers else 0, is_final=not layers)
        with torch.no_grad():
            self.norm.weight.mul_(START_SIZE)
        self.projections = self.lm_heads(0)
        self.reads_drafts = not config.parallel

    def initialise(self) -> None:
        if self.config.starts_copying:
            norms = "each" if self.fc_norm else "all" if self.input_norm else None
            arguments = self.projection(0).weight, self.d2t, self.spec.layers, norms
            start_copying(self.midlayer.self_attn, self.fc, self.base, *arguments)

    @property
    def scaling(self) -> LMHead:
        return LMHead(weight=self.target_lm_head.weight) if self.config.own_lm_head else self.target_lm_head

    def projection(self, k: int) -> LMHead:
        return super().projection(k) if self.lm_head is None else LMHead(weight=self.lm_head.weight)

    def fuse(self, states: Tensor) -> Tensor:
        states = states.to(reads_in(self.fc))
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return cast(Tensor, self.fc(states))

    def masked(self, count: int) -> Tensor:
        """Return P-EAGLE's inputs at ``count`` draft positions after the first, [count, 2 D]. All are equal: the
        embedding of the mask token, and a learnt feature."""
        assert self.config.mask_token is not None
        token = torch.full((), self.config.mask_token, device=self.base.device)  # filled there, without a wait
        feature = self.fuse(self.mask_hidden[0, 0])
        return torch.cat([self.embed(token), feature], -1).expand(count, -1)

    def open(self, rows: int, cache: TreeCache | None = None) -> "EagleSession":
        return EagleSession(self, rows)

    @property
    def decoder_layers(self) -> list[HeadDecoderLayer]:
        return [cast(HeadDecoderLayer, layer) for layer in (self.midlayer, *self.layers.values())]

    def start(self, context: AnchorContext, pairs: Tensor) -> Attend:
        return context.start(self.midlayer, pairs)

    def drafting_layers(self) -> DraftingLayers:
        count, weight = self.config.num_layers, self.fc.weight
        shape = self.midlayer.self_attn.cache_shape(weight.dtype, weight.device, count)
        return DraftingLayers(self.inference().decoder_layers, shape, self.config.windows)

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        if not self.config.parallel:
            return super().hidden_at_positions(batch, base_hidden, draft_targets)
        pairs = self.context_pairs(batch, base_hidden)[1]
        context = AnchorContext(batch, draft_targets)
        slots: Tensor = self.norm(self._at_once(context, pairs, len(draft_targets.valid)))
        return slots.transpose(0, 1)

    # P-EAGLE has two passes. Training drafts from all anchors at once. Decoding drafts from one anchor, for which
    # causal attention over the cache is enough (``EagleSession.block_inputs``).

    def _at_once(self, context: AnchorContext, pairs: Tensor, steps: int) -> Tensor:
        """Return the last layer's outputs for K = ``steps`` draft positions at all anchors, [A, K, D]. Position 0 is
        part of the context, whose inputs are ``pairs`` [B, T, 2 D], and is computed with it, by causal attention.
        Position i > 0 stands i tokens after its anchor and reads ``masked``. It sees the context up to its anchor, and
        the positions 1 to i of the same anchor. Every layer therefore runs twice: over the context, and over the K - 1
        masked positions of all anchors."""
        anchors = context.anchors
        masked = self.masked(steps - 1).expand(len(anchors), -1, -1).flatten(0, 1)[None]  # [1, A (K - 1), 2 D]
        pairs = pairs.flatten(0, 1)[None]
        offsets, order = torch.arange(1, steps, device=anchors.device), causal_mask(steps - 1, anchors.device)
        for layer in self.decoder_layers:
            query, key, value = layer.states(pairs, context.positions)
            mask = context.masks(layer.self_attn.window)[0]
            pairs = layer.add_mlp(pairs, layer.self_attn.output(query, key, value, mask))
            if steps > 1:
                masked = context.read_block(layer, masked, key, value, offsets, order)
        first = context.at_anchors(pairs)[:, None]
        return first if steps == 1 else torch.cat([first, torch.unflatten(masked[0], 0, (-1, steps - 1))], 1)


def published_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of a base with L = ``count`` layers whose outputs EAGLE-3 reads: 2, L // 2 and L - 3, from 1,
    limited to [0, L]. Number n is transformers' ``hidden_states[n]``; 0 is the embedding. The reference code counts
    from 0 and stores the input of layer n, which is the same state."""
    return min(2, count), count // 2, max(0, count - 3)


class EagleSession(PairSession):
    """A session of an EAGLE-3 head."""

    inference_head: Eagle3Head

    def block_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        head = self.inference_head
        root = torch.cat([head.embed(last_token), hidden], -1)[:, None]
        masked = head.masked(depth - 1).expand(len(last_token), -1, -1)
        return cast(Tensor, head.norm(self.context.start(torch.cat([root, masked], 1))))

    def draft_logits(self, x: Tensor, k: int | None) -> Tensor:
        lm_head = self.inference_head.lm_head
        return cast(Tensor, super().draft_logits(x, k) if lm_head is None else lm_head(x))
