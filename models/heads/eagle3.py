"""EAGLE-3 (Li et al., 2503.01840): one decoder layer that drafts from the base's features and then from its own.

The hidden states of three layers of the base are projected to one feature ``f_t``. The layer reads it together with
the embedding of ``x_{t+1}`` and predicts ``x_{t+2}``. For the next draft, its output stands for ``f_{t+1}``, which the
base has not computed yet, and so on. Training runs the same steps (the training-time test), so the layer learns to
read its own output. Drafts come from the head's own projection over a draft vocabulary.

Differences from the reference code:

- The loss covers trained tokens only; there, the mean includes padding.
- The untrained head is about the base's next-token head; there, it is random.
- Attention stays inside a document.
- All targets are imitated; there, only those at which the base's most likely token can be drafted.
- The induction head is our addition. EAGLE-2's trees (2406.16858) are ``DynamicTree``, for any head.

``parallel`` is P-EAGLE (2602.01469): deeper positions read a learnt state and a mask token instead of the layer's own
output. So all positions are drafted in one pass, which can have several layers. All anchors and depths are trained;
the paper samples depths.

Shape legend: B batch, T time, S anchors, F frontier nodes, K draft positions, n targets, D width, W draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.settings import Positive, settings
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, last_valid, take_rows
from drafthead.models.heads.parts.attention_layer import (
    HeadAttention,
    HeadDecoderLayer,
    HeadMLP,
    HeadRMSNorm,
)
from drafthead.models.heads.parts.draft_head import DraftPositions
from drafthead.models.heads.parts.layer_cache import LayerCache
from drafthead.models.heads.parts.multi_position import CopyingConfig, CopyingHead, CopyingSession
from drafthead.models.heads.parts.targets import DraftTargets, anchors_of, has_next
from drafthead.models.kernels.attention import document_mask
from drafthead.models.kernels.linear import reads_in
from drafthead.models.token_tree import causal_mask


class EagleLayer(nn.Module):
    """Layer with attention over [norm(embedding), norm(feature)] and an MLP, both added to the feature.

    Weights have the names of published checkpoints.
    """

    def __init__(self, base: BaseModel, inner: int | None, qk_norm: bool, norm_before_residual: bool) -> None:
        """Create a layer that initially returns the feature unchanged.

        Args:
            base: model that the head drafts for.
            inner: width of the MLP; None: the base's.
            qk_norm: see ``HeadAttention``.
            norm_before_residual: add to the normed feature instead of the feature.
        """
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = HeadAttention(base, 2 * base.hidden_size, qk_norm)
        self.mlp = HeadMLP(base, inner)
        self.input_layernorm = HeadRMSNorm(base)
        self.hidden_norm = HeadRMSNorm(base)
        self.post_attention_layernorm = HeadRMSNorm(base)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def forward(self, pairs: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
        """Map concatenated embeddings and features [B, F, 2 D] to [B, F, D]; see ``HeadAttention.forward``."""
        embedded, feature = pairs.chunk(2, -1)
        return self.add_mlp(feature, self.self_attn(self.normed(embedded, feature), positions, mask, cache))

    def normed(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Return the attention's input from embeddings and features [B, T, D]: [B, T, 2 D]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def unroll(
        self,
        feature: Tensor,
        embedded: Callable[[int, Tensor], Tensor],
        positions: Tensor,
        mask: Tensor,
        anchors: Tensor,
        steps: int,
        between: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Run the training-time test: draft ``steps`` tokens from every anchor at once.

        Step 0 is causal attention over the context. Step i reads the true token and the layer's output of step i - 1,
        one position later. It sees the context up to its anchor, which step 0 has made keys and values of, and the
        earlier steps of the same anchor. With ``a0`` the query at anchor t = 1 of step 0, and ``a1, a2`` its next
        steps::

            keys:   context 0  1  2  3    a1 a2
            a0              x  x  .  .    .  .
            a1              x  x  .  .    x  .
            a2              x  x  .  .    x  x

        Args:
            feature: [B, T, D] features of the context.
            embedded: (i, anchors [B, S]) -> [B, S, D], the embedding of the token that step i reads.
            positions: [B, T] int64.
            mask: [B, 1, T, T] additive.
            anchors: [B, S] int64 positions to draft from; keys and values of the context are made for all T.
            steps: at least 1.
            between: output of a step [B, S, D] -> the next step's feature.

        Returns:
            The outputs [B, S, D] of each step.
        """
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        everywhere = torch.arange(feature.shape[1], device=anchors.device).expand(len(anchors), -1)
        query, context_key, context_value = self.step_states(embedded(0, everywhere), feature, positions)
        seen = mask[:, 0][rows, anchors][:, None]
        query = query.transpose(1, 2)[rows, anchors].transpose(1, 2)
        attended = self.self_attn.output(query, context_key, context_value, seen)
        outputs = [self.add_mlp(feature[rows, anchors], attended)]
        step_kv: list[tuple[Tensor, Tensor]] = []
        for step in range(1, steps):
            feature = between(outputs[-1])
            query, *kv = self.step_states(embedded(step, anchors), feature, positions[rows, anchors] + step)
            step_kv.append((kv[0], kv[1]))
            keys, values = (torch.stack(states, 3) for states in zip(*step_kv, strict=True))
            block_query = query[:, :, :, None]  # one query per anchor
            attended = self.self_attn.output_of_blocks(block_query, context_key, context_value, seen, keys, values)
            outputs.append(self.add_mlp(feature, attended))
        return outputs

    def step_states(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of embeddings and features [B, T, D]; see ``HeadAttention.states``."""
        return self.self_attn.states(self.normed(embedded, feature), positions)

    def add_mlp(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from its feature and the attention's output: [B, S, D]."""
        hidden = (self.hidden_norm(feature) if self.norm_before_residual else feature) + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


@settings(kw_only=True)
class Eagle3Config(CopyingConfig):
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
    """Feed the layer's output to the next step after the final norm, as later checkpoints do. As published, it is fed
    before the norm."""

    parallel: bool = False
    """Draft all positions in one pass (P-EAGLE). ``ttt_steps`` of them are trained."""
    num_layers: int = 1
    """Decoder layers, 1 to 16. More than one needs ``parallel``."""
    mask_token: int | None = None
    """Token id whose embedding deeper positions read, with ``parallel``. It must not occur in text. With null, it is
    chosen from the base's tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("head.fc_norm and head.norm_before_fc exclude each other; leave one of them out")
        if self.parallel and self.norm_output:
            raise ValueError(
                "head.parallel has no next step to read what head.norm_output norms; leave one of them out"
            )
        if not 1 <= self.num_layers <= 16 or (self.num_layers > 1 and not self.parallel):
            raise ValueError(f"head.num_layers must be in [1, 16], and 1 without head.parallel, got {self.num_layers}")
        if not 1 <= self.ttt_steps <= self.num_draft_tokens:
            raise ValueError(
                f"head.ttt_steps must be in [1, head.num_draft_tokens={self.num_draft_tokens}], got {self.ttt_steps}"
            )

    @property
    def trained_positions(self) -> int:
        return self.ttt_steps

    def check_layers(self, num_layers: int) -> None:
        if self.layers is not None and not all(0 <= layer <= num_layers for layer in self.layers):
            raise UserError(f"head.layers must be in [0, {num_layers}], got {list(self.layers)}")

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "Eagle3Head":
        return Eagle3Head(self, base, d2t)


class Eagle3Head(CopyingHead):
    """EAGLE-3's fused features, decoder layer, final norm and projection; weights have the names of its checkpoints."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, base: BaseModel, d2t: Tensor | None) -> None:
        if config.parallel and config.mask_token is None:
            config = replace(config, mask_token=base.unused_token)
        super().__init__(config, base, d2t)
        width = base.hidden_size
        layers = published_layers(base.num_layers) if config.layers is None else tuple(config.layers)
        config.check_layers(base.num_layers)
        self.spec = HiddenStatesSpec(layers=layers)
        sources = max(1, len(layers))
        self.input_norm = HeadRMSNorm(base, sources * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(HeadRMSNorm(base) for _ in range(sources)) if config.fc_norm else None
        self.fc = nn.Linear(sources * width, width, bias=False, device=base.device)
        self.midlayer = EagleLayer(base, config.intermediate_size, config.qk_norm, config.norm_before_residual)
        self.layers = nn.ModuleDict(
            {
                str(n): HeadDecoderLayer(base, config.intermediate_size, config.qk_norm, layer_idx=n)
                for n in range(1, config.num_layers)
            }
        )
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, sources * width, device=base.device))
        self.norm = HeadRMSNorm(base)
        self.lm_head: nn.Linear | None = None
        if config.own_lm_head:
            self.lm_head = nn.Linear(width, len(self.d2t), bias=False, device="meta")
            rows = self.target_lm_head.weight.detach().float()
            # Checkpoints have neither a scale nor a soft-cap, so the scale goes into the weight.
            self.lm_head.weight = nn.Parameter(rows * self.target_lm_head.scale)
        self._start_as_base(layers.index(max(layers)) if layers else None)
        self.projections = self.shared_projection()

    @torch.no_grad()
    def _start_as_base(self, deepest: int | None) -> None:
        """Start as the base's next-token prediction from its deepest state that the head reads.

        ``fc`` starts as that state, the layer as the identity, and the final norm as the base's.
        """
        width = self.base.hidden_size
        self.fc.weight.zero_()
        start = width * (deepest or 0)
        self.fc.weight[:, start : start + width] = torch.eye(width)
        # The norm of ones gives its scale in any convention (Gemma stores the distance from one). A final state has
        # been normed once already, so that norm's scale starts as the final state's size.
        scale = self.base.model.model.norm(torch.ones_like(self.target_lm_head.weight[0])).float()
        self.norm.weight.copy_(scale.square().mean().sqrt() if deepest is None else scale)

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        upper = [(layer, method) for layer in self.layers.values() for method in ("states", "add_mlp")]
        return [(self.midlayer, "step_states"), (self.midlayer, "add_mlp"), *upper]

    def projection(self, k: int) -> LMHead:
        return super().projection(k) if self.lm_head is None else LMHead(weight=self.lm_head.weight)

    def _sources(self, base_hidden: HiddenStates) -> Tensor:
        """Return the base's states that are fused to a feature, [..., sources * D]."""
        return (base_hidden.final if base_hidden.layers is None else base_hidden.layers).to(reads_in(self.fc))

    def fuse(self, sources: Tensor) -> Tensor:
        """Fuse the base's states to features: [..., sources * D] -> [..., D]."""
        if self.input_norm is not None:
            sources = self.input_norm(sources)
        if self.fc_norm is not None:
            chunks = sources.chunk(len(self.fc_norm), -1)
            sources = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        fused: Tensor = self.fc(sources)
        return fused

    def masked(self, count: int) -> Tensor:
        """Return the mask input that P-EAGLE reads at every position after the first, [count, 2 D]."""
        token = torch.tensor(self.config.mask_token, device=self.base.device)
        feature = self.fuse(self.mask_hidden[0, 0])
        return torch.cat([self.embed(token), feature], -1).expand(count, -1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the base's embeddings, frozen: [...] -> [..., D]."""
        return F.embedding(tokens, self.base.embedding).to(reads_in(self.fc))

    def project(self, normed: Tensor) -> Tensor:
        """Return draft logits for inference, unscaled if an induction head adds to them: [..., D] -> [..., W]."""
        logits: Tensor = self.projections.logits(normed) if self.lm_head is None else self.lm_head(normed)
        return logits

    def open(self, rows: int, cache: TreeCache | None = None) -> "EagleSession":
        return EagleSession(self, rows)

    # Training ------------------------------------------------------------------------------------------------

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        steps, (_, time) = len(draft_targets.valid), batch.input_ids.shape
        if len(draft_targets.target_idx) == 0:
            return self.fc.weight.new_zeros(steps, 0, self.base.hidden_size)
        # The last token of a document has no next token to pair with, and its states may be NaN.
        sources = torch.where(has_next(batch.document_ids)[..., None], self._sources(base_hidden), 0.0)
        feature = self.fuse(sources)
        anchors, slots = anchors_of(draft_targets, batch.input_ids)
        row_starts = torch.arange(len(anchors), device=anchors.device)[:, None] * time
        flat = batch.input_ids.flatten()

        def embedded(step: int, at: Tensor) -> Tensor:
            return self.embed(flat[(row_starts + at + 1 + step).clamp(max=len(flat) - 1)])

        mask = document_mask(batch.document_ids, feature.dtype)
        if self.config.parallel:
            everywhere = torch.arange(time, device=anchors.device).expand(len(anchors), -1)
            outputs = self._at_once(feature, embedded(0, everywhere), batch.position_ids, mask, anchors, steps)
        else:
            unroll = self.midlayer.unroll
            outputs = unroll(feature, embedded, batch.position_ids, mask, anchors, steps, self._next_feature)
        pairs = zip(outputs, draft_targets.source_idx, strict=True)
        return torch.stack([self.norm(out.flatten(0, 1)[slots[sources]]) for out, sources in pairs])

    def _at_once(
        self, feature: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, anchors: Tensor, steps: int
    ) -> list[Tensor]:
        """Return the outputs [B, S, D] of ``steps`` draft positions at ``anchors`` in P-EAGLE's single pass.

        The first position is causal attention over the context. Position i (from 0) is i tokens later and reads the
        mask input. It sees the context up to its anchor and the positions of its anchor from 1 to i.

        So every layer runs twice: over the context [B, T], and over the P = steps - 1 masked positions of all anchors
        [B, S P]. The second run also attends to the keys and values of the first. See ``EagleLayer.unroll`` for the
        arguments and a drawing of the mask.
        """
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        count, block = steps - 1, (-1, steps - 1)
        masked = self.masked(count).expand(*anchors.shape, -1, -1).flatten(1, 2)  # [B, S P, 2 D]
        mask_token, drafted = masked.chunk(2, -1)
        later = positions[rows, anchors][..., None] + torch.arange(1, steps, device=anchors.device)
        order = causal_mask(count, anchors.device)
        seen = mask[:, 0][rows, anchors][:, None]
        context = feature
        layers: list[EagleLayer | HeadDecoderLayer] = [self.midlayer]
        layers += [cast(HeadDecoderLayer, layer) for layer in self.layers.values()]

        def states(layer: nn.Module, tokens: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert isinstance(layer, EagleLayer | HeadDecoderLayer)
            return layer.step_states(tokens, x, at) if isinstance(layer, EagleLayer) else layer.states(x, at)

        for layer in layers:
            query, key, value = states(layer, embedded, context, positions)
            context = layer.add_mlp(context, layer.self_attn.output(query, key, value, mask))
            if not count:
                continue
            masked_states = states(layer, mask_token, drafted, later.flatten(1))
            query, block_key, block_value = (torch.unflatten(x, 2, block) for x in masked_states)
            attended = layer.self_attn.output_of_blocks(query, key, value, seen, block_key, block_value, order)
            drafted = layer.add_mlp(drafted, attended)
        first = context[rows, anchors]
        return [first, *(torch.unflatten(drafted, 1, block).unbind(2) if count else ())]

    def _next_feature(self, out: Tensor) -> Tensor:
        """Return the feature of the next step from an output [B, S, D]."""
        feature: Tensor = self.norm(out) if self.config.norm_output else out
        return feature


def published_layers(count: int) -> tuple[int, int, int]:
    """Return the layers that EAGLE-3 reads of a base of ``count``: 2, L // 2 and L - 3, where 1 is the first.

    The reference code stores the inputs of these layers counted from 0. The input of layer n counted from 0 is the
    output of the n-th layer, transformers' ``hidden_states[n]``.
    """
    return min(2, count), count // 2, max(0, count - 3)


class EagleSession(CopyingSession):
    """A session that pairs each token ``x_{t+1}`` with the feature ``f_t`` before it.

    A level reads its parents' outputs as features. In P-EAGLE, all levels are one pass.
    """

    drafter: Eagle3Head
    model: Eagle3Head
    context: LayerCache

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        super().__init__(head, rows)
        weight, width = head.fc.weight, head.base.hidden_size
        shape = head.midlayer.self_attn.cache_shape(weight.dtype, weight.device, head.config.num_layers)
        first, *upper = self.model.midlayer, *self.model.layers.values()

        def layers(pairs: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
            x: Tensor = first(pairs, positions, mask, cache)
            for layer in upper:
                x = layer(x, positions, mask, cache)
            return x

        self.context = LayerCache(layers, shape, rows)
        self._feature = weight.new_full((rows, width), torch.nan)
        """[B, D] feature of the last token that the base has read; its next token is not committed yet."""

    @torch.inference_mode()
    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        assert base_hidden is not None
        before = fused = self.model.fuse(self.model._sources(base_hidden))
        if max(self.lengths) > 0:
            pairs, pair_counts = tokens, counts
            before = torch.cat([self._feature[:, None], fused[:, :-1]], 1)
        else:  # the prompt's first token has no feature before it
            pairs, pair_counts, before = tokens[:, 1:], [count - 1 for count in counts], fused[:, :-1]
        super().commit(tokens, counts, base_hidden)
        self.context.commit(torch.cat([self.model.embed(pairs), before], -1), pair_counts)
        self._feature = last_valid(fused, counts)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self._feature = take_rows(self._feature, rows)

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._above: Tensor | None = None  # [B, F, D] features of the level above
        if self.drafter.config.parallel:
            model = self.model
            root = torch.cat([model.embed(last_token), self._feature], -1)[:, None]
            masked = model.masked(draft_config.depth - 1).expand(len(last_token), -1, -1)
            out = self.context.start(torch.cat([root, masked], 1))
            self._logits, self._position = model.project(model.norm(out)), 0

    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        model = self.model
        if model.config.parallel:
            self._position += 1
            return self._logits[:, self._position - 1, None]
        if self._above is None:
            out = self.context.start(torch.cat([model.embed(tokens), self._feature[:, None]], -1))
        else:
            rows = torch.arange(len(parents), device=parents.device)[:, None]
            out = self.context.expand(torch.cat([model.embed(tokens), self._above[rows, parents]], -1), parents)
        normed: Tensor = model.norm(out)
        self._above = normed if model.config.norm_output else out
        return model.project(normed)
