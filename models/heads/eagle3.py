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

from drafthead.data.batch import BaseHidden, HiddenStates, TrainBatch
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parts import BaseParts
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import last_valid, map_active, take_rows
from drafthead.models.heads.parts.attention_layer import AnchorContext, HeadDecoderLayer, HeadRMSNorm, start_as_base
from drafthead.models.heads.parts.copying_start import start_copying
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftPositions, States
from drafthead.models.heads.parts.head_session import HeadSession, LayerCache
from drafthead.models.heads.parts.targets import DraftTargets, has_next
from drafthead.models.heads.parts.windows import WindowConfig
from drafthead.models.kernels.linear import reads_in
from drafthead.models.token_tree import causal_mask
from drafthead.settings.schema import Positive, PositiveFloat, settings
from drafthead.system.devices import on_device

START_SIZE = 0.3
"""Size of an untrained head's logits, in that of the base's. They predict the token that the head reads, and not the
one after it. With the base's certainty, training spends its first 30 steps on unlearning that."""


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
class Eagle3Config(WindowConfig):
    """Settings of :class:`Eagle3Head`."""

    num_draft_tokens: DraftPositions = 7
    ttt_steps: int = 7
    """Steps of the training-time test: the number of draft positions that are trained. At most ``num_draft_tokens``.
    Deeper drafts read the layer's own output more often than in training."""
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
    norm_output: bool = False
    """Let the next step read the layer's output after the final norm, as in later checkpoints. With false, it reads the
    output before the norm, as published."""

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
        super().__post_init__()
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
        if not 1 <= self.ttt_steps <= self.num_draft_tokens:
            what = f"head.ttt_steps must be in [1, head.num_draft_tokens={self.num_draft_tokens}]"
            raise ValueError(f"{what}, got {self.ttt_steps}")

    @property
    def trained_positions(self) -> int:
        return self.ttt_steps

    @property
    def attention_layers(self) -> int:
        return self.num_layers

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        layers = published_layers(num_layers) if self.layers is None else tuple(self.layers)
        return (0, *layers[1:]) if self.starts_copying else layers


class Eagle3Head(DraftHead):
    """EAGLE-3's fused features, decoder layer, final norm and projection; weights have the names of its checkpoints."""

    config: Eagle3Config
    attends = True

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

    def _layer_states(self, base_hidden: HiddenStates) -> Tensor:
        """Return the inputs of ``fuse``, [..., layers * D]."""
        return (base_hidden.final if base_hidden.layers is None else base_hidden.layers).to(reads_in(self.fc))

    def fuse(self, states: Tensor) -> Tensor:
        """Map the base's concatenated states to the feature ``f_t``: [..., layers * D] -> [..., D]."""
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

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        out = attend(torch.cat([self.embed(tokens), states[0]], -1))
        normed: Tensor = self.norm(out)
        return normed, (normed if self.config.norm_output else out,)

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        steps = len(draft_targets.valid)
        # The last token of a document has no next token, and its states may be NaN.
        states = torch.where(has_next(batch.document_ids)[..., None], self._layer_states(base_hidden), 0.0)
        feature, context = self.fuse(states), AnchorContext(batch, draft_targets)
        pairs = torch.cat([self.embed(batch.input_ids.roll(-1)), feature], -1)
        if not self.config.parallel:
            step = context.start(self.midlayer, pairs)
            return self.unroll(context.at_anchors(feature), batch, draft_targets, step)
        slots: Tensor = self.norm(self._at_once(context, pairs, steps))
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
            pairs = layer.add_mlp(pairs, layer.self_attn.output(query, key, value, context.masks(layer)[0]))
            if steps > 1:
                masked = context.read_block(layer, masked, key, value, offsets, order)
        first = context.at_anchors(pairs)[:, None]
        return first if steps == 1 else torch.cat([first, torch.unflatten(masked[0], 0, (-1, steps - 1))], 1)


def published_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of a base with L = ``count`` layers whose outputs EAGLE-3 reads: 2, L // 2 and L - 3, from 1,
    limited to [0, L]. Number n is transformers' ``hidden_states[n]``; 0 is the embedding. The reference code counts
    from 0 and stores the input of layer n, which is the same state."""
    return min(2, count), count // 2, max(0, count - 3)


class EagleContext(LayerCache):
    """Keys and values of layers that read each token's embedding together with the feature of the token before."""

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        self._head, weight = head.inference(), head.fc.weight
        shape = head.midlayer.self_attn.cache_shape(weight.dtype, weight.device, head.config.num_layers)
        super().__init__(self._head.decoder_layers, shape, rows, windows=head.config.windows)
        self.feature = weight.new_zeros(rows, head.base.hidden_size)
        """[B, D] feature of the last token that the base has read; zeros in an empty row. The head reads it with the
        embedding of the tree's root."""
        self._is_empty = [True] * rows

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        head = self._head
        assert base_hidden is not None
        fused = map_active(lambda states: head.fuse(head._layer_states(states)), base_hidden, counts)
        before = torch.cat([self.feature[:, None], fused[:, :-1]], 1)
        pairs = torch.cat([head.embed(tokens), before], -1)
        # A prompt's first token has no feature before it, so its pair is left out.
        skipped = [int(empty and count > 0) for empty, count in zip(self._is_empty, counts, strict=True)]
        if any(skipped):
            index = on_device(skipped, pairs.device)[:, None] + torch.arange(pairs.shape[1], device=pairs.device)
            index = index.clamp(max=pairs.shape[1] - 1)
            pairs = pairs.gather(1, index[..., None].expand(-1, -1, pairs.shape[2]))
        self.append(pairs, [count - skip for count, skip in zip(counts, skipped, strict=True)])
        self.feature = last_valid(fused, counts, self.feature)
        self._is_empty = [empty and not count for empty, count in zip(self._is_empty, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.feature, self._is_empty = take_rows(self.feature, rows), [self._is_empty[row] for row in rows]

    def rollback(self, lengths: list[int]) -> None:
        super().rollback(lengths)
        self._is_empty = [length == 0 for length in lengths]


class EagleSession(HeadSession):
    """A session of an EAGLE-3 head."""

    inference_head: Eagle3Head
    context: EagleContext

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        self.context = EagleContext(head, rows)
        super().__init__(head, rows, self.context)

    def draft_hidden(self) -> Tensor:
        return self.context.feature

    def block_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        head = self.inference_head
        root = torch.cat([head.embed(last_token), hidden], -1)[:, None]
        masked = head.masked(depth - 1).expand(len(last_token), -1, -1)
        return cast(Tensor, head.norm(self.context.start(torch.cat([root, masked], 1))))

    def draft_logits(self, x: Tensor, k: int | None) -> Tensor:
        lm_head = self.inference_head.lm_head
        return cast(Tensor, super().draft_logits(x, k) if lm_head is None else lm_head(x))
