"""EAGLE-3 (Li et al., 2503.01840): one decoder layer that drafts from the base's features and then from its own.

The hidden states of three layers of the base are projected to one feature ``f_t``. The layer reads it together with
the embedding of ``x_{t+1}`` and predicts ``x_{t+2}``; what it puts out takes the place of ``f_{t+1}``, which the base
has not computed yet, for the next draft, and so on. Training goes through the same steps (the training-time test), so
that the layer learns to read its own output. Drafts come from a projection of its own over a draft vocabulary.

Differences from the reference code: losses are of trained tokens only (there, the mean runs over padding too), the
head starts as about the base's next-token head instead of at random, attention stays inside a document, and the
distribution to imitate is that of every target, also where the base's likeliest token cannot be drafted; an induction
head is ours. Trees are those of any head; EAGLE-2's (2406.16858) are ``DynamicTree``.

``parallel`` is P-EAGLE (2602.01469): deeper positions read a learnt state and a mask token instead of the layer's own
output, so all of them are one pass of as many layers as one likes. All places and depths are trained, where the paper
samples depths.

Shape legend: B batch, T time, S places that are drafted from, F frontier nodes, K draft positions, n targets, D width,
W draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError, check_limits
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.drafter import DraftConfig, DraftState, last_valid
from drafthead.models.decoding.growth import DraftPass
from drafthead.models.heads.parts.attention_layer import (
    HeadAttention,
    HeadDecoderLayer,
    HeadMLP,
    HeadRMSNorm,
    attend_block,
)
from drafthead.models.heads.parts.layer_cache import LayerKVCache, PendingInputs
from drafthead.models.heads.parts.multi_position import CopyingConfig, CopyingHead, HeadState, LevelDraftPass
from drafthead.models.heads.parts.targets import DraftTargets, drafting_places, has_next
from drafthead.models.kernels.attention import document_mask
from drafthead.models.kernels.linear import reads_in
from drafthead.models.token_tree import causal_mask


class EagleLayer(nn.Module):
    """Attention over [norm(embedding); norm(feature)], MLP, both added to the feature; names as in checkpoints."""

    def __init__(self, base: BaseModel, inner: int | None, qk_norm: bool, norm_before_residual: bool) -> None:
        """For ``base``, with an MLP of width ``inner`` or the base's; what it adds to may be the normed feature."""
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = HeadAttention(base, 2 * base.hidden_size, qk_norm)
        self.mlp = HeadMLP(base, inner)
        self.input_layernorm = HeadRMSNorm(base)
        self.hidden_norm = HeadRMSNorm(base)
        self.post_attention_layernorm = HeadRMSNorm(base)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):  # an untrained layer adds nothing to the feature
            nn.init.zeros_(last.weight)

    def forward(self, pairs: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache) -> Tensor:
        """Drafting: [B, F, 2 D] embeddings and features, side by side -> [B, F, D]; arguments of ``HeadAttention``."""
        embedded, feature = pairs.chunk(2, -1)
        return self.add_mlp(feature, self.self_attn(self.normed(embedded, feature), positions, mask, cache))

    def normed(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention reads of embeddings and features [B, T, D]: [B, T, 2 D]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def unroll(
        self,
        feature: Tensor,
        embedded: Callable[[int, Tensor], Tensor],
        positions: Tensor,
        mask: Tensor,
        places: Tensor,
        steps: int,
        between: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """The training-time test: the ``steps`` outputs [B, S, D] when it drafts so many tokens from every place.

        Step 0 is causal attention over the text. Step i reads the true token and the layer's own output of step
        i - 1, one position later; besides the text up to its place it sees only the steps of its own place, which
        are diagonals of keys and values.

        Args:
            feature: [B, T, D] of the text.
            embedded: (i, places [B, S]) -> [B, S, D], embedding of the token that step i reads at these places.
            positions: [B, T] int64.
            mask: [B, 1, T, T] additive.
            places: [B, S] int64 the positions to draft from; keys and values of the text are made for all T.
            steps: at least 1.
            between: [B, S, D] output of a step -> the feature that the next one reads.
        """
        rows = torch.arange(len(places), device=places.device)[:, None]
        everywhere = torch.arange(feature.shape[1], device=places.device).expand(len(places), -1)
        states = self.step_states(embedded(0, everywhere), feature, positions)
        query, text_key, text_value = states
        seen = mask[:, 0][rows, places][:, None]
        query = query.transpose(1, 2)[rows, places].transpose(1, 2)
        attended = self.self_attn.output(query, text_key, text_value, seen)
        found = [self.add_mlp(feature[rows, places], attended)]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, steps):
            feature = between(found[-1])
            query, key, value = self.step_states(embedded(step, places), feature, positions[rows, places] + step)
            own.append((key, value))
            keys, values = (torch.stack(part, 3) for part in zip(*own, strict=True))
            # Without recomputing its scores every step would keep a matrix of S times T for each head.
            out: Tensor = checkpoint(
                attend_block, query[:, :, :, None], text_key, text_value, seen, keys, values, use_reentrant=False
            )
            attended = self.self_attn.join(out[:, :, :, 0])
            found.append(self.add_mlp(feature, attended))
        return found

    def step_states(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``HeadAttention.states`` of pairs [B, T, D] at ``positions`` [B, T]."""
        return self.self_attn.states(self.normed(embedded, feature), positions)

    def add_mlp(self, feature: Tensor, attended: Tensor) -> Tensor:
        """What the layer puts out, of its feature and what attention adds to it: [B, S, D]."""
        hidden = (self.hidden_norm(feature) if self.norm_before_residual else feature) + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


@dataclass(kw_only=True)
class Eagle3Config(CopyingConfig):
    """Settings of :class:`Eagle3Head`."""

    num_draft_tokens: int = 7
    ttt_steps: int = 7
    """Steps of the training-time test: how many of the K positions are trained. Deeper drafts read the layer's own
    output more often than it was trained for."""
    layers: list[int] | None = None
    """Whose outputs (1 is the first layer) make the feature; null: 2, L // 2 and L - 3 of L layers, as published. An
    empty list takes the final hidden state instead, which EAGLE-1 reads."""
    own_lm_head: bool = True
    """True: a projection of its own, which starts as the base's. False: the base's, frozen and shared."""
    intermediate_size: int | None = None
    """Inner width of the MLP; null: the base's."""
    norm_before_fc: bool = False
    """Norm the concatenated states before they are projected, as later checkpoints do."""
    fc_norm: bool = False
    """Norm each layer's states before they are concatenated (EAGLE-3.1, 2605.09992)."""
    norm_before_residual: bool = False
    """The layer adds to the normed feature instead of the feature, as some checkpoints do."""
    qk_norm: bool = False
    """Norm every attention head's queries and keys before they are rotated, as Qwen3's layers do."""
    norm_output: bool = False
    """A step reads the layer's output after the final norm, as later checkpoints do; published: before it."""

    parallel: bool = False
    """P-EAGLE: all positions in one pass; ``ttt_steps`` of them are trained."""
    num_layers: int = 1
    """Decoder layers; more than one needs ``parallel``."""
    mask_token: int | None = None
    """Of ``parallel``: id whose embedding deeper positions read; null: one that no text has, chosen from the base's
    tokenizer."""

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
        check_limits(self, "head.", intermediate_size="[1, inf)")

    @property
    def trained_positions(self) -> int:
        return self.ttt_steps

    def check_layers(self, num_layers: int) -> None:
        if self.layers is not None and not all(0 <= layer <= num_layers for layer in self.layers):
            raise UserError(f"head.layers must be in [0, {num_layers}], got {list(self.layers)}")

    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "Eagle3Head":
        return Eagle3Head(self, base, d2t)


@dataclass
class EagleState(HeadState):
    """What the layer has read, and the feature that waits for its token."""

    text: PendingInputs
    """Pairs of a feature ``f_t`` and the token ``x_{t+1}``."""
    feature: Tensor
    """[B, D] the feature of the last token that the base has read; NaN before there is one."""
    started: bool = False
    """Whether the base has read anything."""


class Eagle3Head(CopyingHead):
    """EAGLE-3's fused features, decoder layer, final norm and projection; names of weights as in its checkpoints."""

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
            # Scaled here and not capped: checkpoints have no place for either.
            self.lm_head.weight = nn.Parameter(rows * self.target_lm_head.scale)
        self._start_as_base(layers.index(max(layers)) if layers else None)
        self._shared = self.shared_projection()

    @torch.no_grad()
    def _start_as_base(self, deepest: int | None) -> None:
        """Begin with the base's prediction of the next token, as far as its deepest state that is read has it.

        The layer starts as the identity, so the feature is that state, and the final norm as the base's.
        """
        width = self.base.hidden_size
        self.fc.weight.zero_()
        start = width * (deepest or 0)
        self.fc.weight[:, start : start + width] = torch.eye(width)
        # Gemma stores a norm's scale as its distance from one. The final state has been normed once already.
        scale = self.base.model.model.norm(torch.ones_like(self.target_lm_head.weight[0])).float()
        self.norm.weight.copy_(scale.square().mean().sqrt() if deepest is None else scale)

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        upper = [(layer, method) for layer in self.layers.values() for method in ("states", "add_mlp")]
        return [(self.midlayer, "step_states"), (self.midlayer, "add_mlp"), *upper]

    def num_calls(self, name: str) -> int:
        return self.config.ttt_steps if name.startswith(("midlayer.", "layers.")) else 1

    def projection(self, k: int) -> LMHead:
        return self.target_lm_head if self.lm_head is None else LMHead(weight=self.lm_head.weight)

    def _read(self, base_hidden: HiddenStates) -> Tensor:
        """[..., sources * D] the base's states that make the feature."""
        return (base_hidden.final if base_hidden.layers is None else base_hidden.layers).to(reads_in(self.fc))

    def fuse(self, read: Tensor) -> Tensor:
        """[..., sources * D] -> [..., D] features."""
        if self.input_norm is not None:
            read = self.input_norm(read)
        if self.fc_norm is not None:
            parts = read.chunk(len(self.fc_norm), -1)
            read = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(read)
        return fused

    def masked(self, count: int) -> Tensor:
        """The pairs that positions after the first read with ``parallel``: [count, 2 D], all alike."""
        token = torch.tensor(self.config.mask_token, device=self.base.device)
        feature = self.fuse(self.mask_hidden[0, 0])
        return torch.cat([self.embed(token), feature], -1).expand(count, -1)

    def embed(self, tokens: Tensor) -> Tensor:
        """The base's embeddings, frozen: [...] -> [..., D]."""
        return F.embedding(tokens, self.base.embedding).to(reads_in(self.fc))

    def project(self, normed: Tensor) -> Tensor:
        """Draft logits for inference, before they are scaled beside an induction head: [..., D] -> [..., W]."""
        logits: Tensor = self._shared.logits(normed) if self.lm_head is None else self.lm_head(normed)
        return logits

    # Drafting ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def init_state(self, batch: int) -> EagleState:
        weight, width = self.fc.weight, self.base.hidden_size
        shape = self.midlayer.self_attn.cache_shape(weight.dtype, weight.device, self.config.num_layers)
        first, *upper = self.inference().midlayer, *self.inference().layers.values()

        def layers(pairs: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache) -> Tensor:
            x: Tensor = first(pairs, positions, mask, cache)
            for layer in upper:
                x = layer(x, positions, mask, cache)
            return x

        cache = LayerKVCache(layers, shape)
        text = PendingInputs.none(cache, batch, weight.new_empty(2 * width))
        seen = super().init_state(batch)
        feature = weight.new_full((batch, width), torch.nan)
        return EagleState(hidden=seen.hidden, copied=seen.copied, text=text, feature=feature)

    @torch.inference_mode()
    def update(
        self, state: DraftState, tokens: Tensor, base_hidden: HiddenStates | None, counts: Tensor | None = None
    ) -> EagleState:
        assert isinstance(state, EagleState) and base_hidden is not None
        seen = super().update(state, tokens, base_hidden, counts)
        fused = self.inference().fuse(self._read(base_hidden))
        before, paired = fused[:, :-1], counts
        if state.started:
            before = torch.cat([state.feature[:, None], before], 1)
        else:  # nothing comes before the first token
            tokens, paired = tokens[:, 1:], None if counts is None else counts - 1
        text = state.text.append(torch.cat([self.embed(tokens), before], -1), paired)
        feature = last_valid(fused, counts)
        return EagleState(hidden=seen.hidden, copied=seen.copied, text=text, feature=feature, started=True)

    @torch.inference_mode()
    def levels(self, state: DraftState, last_token: Tensor, draft_config: DraftConfig) -> DraftPass:
        assert isinstance(state, EagleState)
        if not self.config.parallel:
            return _EagleDraftPass(self, state)
        root = torch.cat([self.embed(last_token), state.feature], -1)[:, None]
        head = self.inference()
        masked = head.masked(draft_config.depth - 1).expand(len(last_token), -1, -1)
        out = state.text.cache.prefill_block(state.text, torch.cat([root, masked], 1))
        return LevelDraftPass(head.project(head.norm(out)))

    # Training ------------------------------------------------------------------------------------------------

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        steps, (_, time) = len(draft_targets.valid), batch.input_ids.shape
        if len(draft_targets.target_idx) == 0:
            return self.fc.weight.new_zeros(steps, 0, self.base.hidden_size)
        read = self._read(base_hidden)
        # Where no token of the document follows there is no pair, and the states may be NaN.
        read = torch.where(has_next(batch.document_ids)[..., None], read, 0.0)
        feature = self.fuse(read)
        places, slots = drafting_places(draft_targets, batch.input_ids)
        row_starts = torch.arange(len(places), device=places.device)[:, None] * time
        flat = batch.input_ids.flatten()

        def embedded(step: int, at: Tensor) -> Tensor:
            return self.embed(flat[(row_starts + at + 1 + step).clamp(max=len(flat) - 1)])

        mask = document_mask(batch.document_ids, feature.dtype)
        if self.config.parallel:
            everywhere = torch.arange(time, device=places.device).expand(len(places), -1)
            found = self._at_once(feature, embedded(0, everywhere), batch.position_ids, mask, places, steps)
            return self._normed(found, slots, draft_targets)
        found = self.midlayer.unroll(feature, embedded, batch.position_ids, mask, places, steps, self._feature)
        return self._normed(found, slots, draft_targets)

    def _normed(self, found: list[Tensor], slots: Tensor, draft_targets: DraftTargets) -> Tensor:
        """[K, n, D] of the outputs [B, S, D] of every position at all places."""
        return torch.stack(
            [
                self.norm(out.flatten(0, 1)[slots[sources]])
                for out, sources in zip(found, draft_targets.source_idx, strict=True)
            ]
        )

    def _at_once(
        self, feature: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, places: Tensor, steps: int
    ) -> list[Tensor]:
        """P-EAGLE's pass: the outputs [B, S, D] of ``steps`` positions at ``places``; arguments as of ``unroll``.

        Position 0 is causal attention over the text. Position i stands i later, and sees the text up to its place and
        the positions of its own place up to itself.
        """
        rows = torch.arange(len(places), device=places.device)[:, None]
        count, block = steps - 1, (-1, steps - 1)
        own = self.masked(count).expand(*places.shape, -1, -1).flatten(1, 2)  # [B, S P, 2 D]
        own_token, own_feature = own.chunk(2, -1)
        later = positions[rows, places][..., None] + torch.arange(1, steps, device=places.device)
        order = causal_mask(count, places.device)
        seen = mask[:, 0][rows, places][:, None]
        text, drafted = feature, own_feature
        layers: list[EagleLayer | HeadDecoderLayer] = [self.midlayer]
        layers += [cast(HeadDecoderLayer, layer) for layer in self.layers.values()]

        def states(layer: nn.Module, tokens: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert isinstance(layer, EagleLayer | HeadDecoderLayer)
            return layer.step_states(tokens, x, at) if isinstance(layer, EagleLayer) else layer.states(x, at)

        for layer in layers:
            query, key, value = states(layer, embedded, text, positions)
            text = layer.add_mlp(text, layer.self_attn.output(query, key, value, mask))
            if not count:
                continue
            parts = states(layer, own_token, drafted, later.flatten(1))
            query, own_key, own_value = (torch.unflatten(part, 2, block) for part in parts)
            out: Tensor = checkpoint(
                attend_block, query, key, value, seen, own_key, own_value, order, use_reentrant=False
            )
            drafted = layer.add_mlp(drafted, layer.self_attn.join(out.flatten(2, 3)))
        first = text[rows, places]
        return [first, *(torch.unflatten(drafted, 1, block).unbind(2) if count else ())]

    def _feature(self, out: Tensor) -> Tensor:
        """What the next step reads of a step's output."""
        normed: Tensor = self.norm(out) if self.config.norm_output else out
        return normed


def published_layers(count: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 reads of a base of ``count``: the inputs of the layers 2, L // 2 and L - 3 from 0.

    The input of layer n counted from 0 is the output of the n-th layer, which is ``hidden_states[n]`` of transformers.
    """
    return min(2, count), count // 2, max(0, count - 3)


class _EagleDraftPass:
    """Every level reads its parents' outputs as features."""

    def __init__(self, head: Eagle3Head, state: EagleState) -> None:
        self._head, self._read = head, state.text.reader()
        self._above = state.feature[:, None]  # [B, F, D] features of the frontier

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        pairs = torch.cat([self._head.embed(tokens), self._above[rows, parents]], -1)
        out = self._read(pairs, parents)
        head = self._head.inference()
        normed: Tensor = head.norm(out)
        self._above = normed if head.config.norm_output else out
        return head.project(normed)
