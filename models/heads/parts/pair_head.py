"""Heads that read pairs of a token's embedding and the feature of the token before it: EAGLE-3 and MTP.

At position t, a decoder layer reads the embedding of ``x_{t+1}`` and a feature ``f_t`` of the base's states, and
predicts ``x_{t+2}``. For the next draft, its output replaces ``f_{t+1}``, which the base has not computed yet, and so
on. Training runs the same steps (EAGLE-3's training-time test), so the layer learns to read its own output.

Shape legend: B batch, T time, A anchors, D width, I width of the base's states that are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafthead.data.batch import BaseHidden, HiddenStates, TrainBatch
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape
from drafthead.models.decoding.drafter import last_valid, map_active, take_rows
from drafthead.models.heads.parts.attention_layer import AnchorContext, Layer
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftHeadConfig, DraftPositions, States
from drafthead.models.heads.parts.head_session import HeadSession, LayerCache
from drafthead.models.heads.parts.targets import DraftTargets, has_next
from drafthead.settings.schema import settings
from drafthead.system.devices import on_device

START_SIZE = 0.3
"""Size of an untrained head's logits, in that of the base's. They predict the token that the head reads, and not the
one after it. With the base's certainty, training spends its first 30 steps on unlearning that."""


@settings(kw_only=True)
class PairHeadConfig(DraftHeadConfig):
    """Settings that EAGLE-3 and MTP share."""

    num_draft_tokens: DraftPositions = 7
    ttt_steps: int = 7
    """Steps of the training-time test: the number of draft positions that are trained. At most ``num_draft_tokens``.
    Deeper drafts read the layer's own output more often than in training."""
    norm_output: bool = False
    """Let the next step read the layer's output after the final norm, as in later checkpoints. With false, it reads the
    output before the norm, as published."""

    def __post_init__(self) -> None:
        if not 1 <= self.ttt_steps <= self.num_draft_tokens:
            what = f"head.ttt_steps must be in [1, head.num_draft_tokens={self.num_draft_tokens}]"
            raise ValueError(f"{what}, got {self.ttt_steps}")

    @property
    def trained_positions(self) -> int:
        return self.ttt_steps


class DraftingLayers(NamedTuple):
    """Layers that run one after the other in drafting, the shape of their cache, and the window of each (None: all)."""

    layers: Sequence[Layer]
    shape: CacheShape
    windows: Sequence[int | None] | None = None


class PairHead(DraftHead):
    """A head whose layers read pairs [..., 2 D]: an embedding and the feature of the token before."""

    config: PairHeadConfig
    norm: nn.Module  # of the last layer's output
    attends = True

    def fuse(self, states: Tensor) -> Tensor:
        """Map the base's states to the feature ``f_t``: [..., I] -> [..., D]."""
        raise NotImplementedError

    def start(self, context: AnchorContext, pairs: Tensor) -> Attend:
        """Run the layers over the ``pairs`` [B, T, 2 D] of the context, and return ``attend`` for ``advance``."""
        raise NotImplementedError

    def drafting_layers(self) -> DraftingLayers:
        """Return the layers that read pairs in drafting."""
        raise NotImplementedError

    def context_pairs(self, batch: TrainBatch, base_hidden: HiddenStates) -> tuple[Tensor, Tensor]:
        """Return the features [B, T, D] of a batch, and its pairs [B, T, 2 D]."""
        # The last token of a document has no next token, and its states may be NaN.
        followed = has_next(batch.document_ids)[..., None]
        feature = self.fuse(torch.where(followed, _states(base_hidden), 0.0))
        return feature, torch.cat([self.embed(batch.input_ids.roll(-1)), feature], -1)

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        context = AnchorContext(batch, draft_targets)
        feature, pairs = self.context_pairs(batch, base_hidden)
        return self.unroll(context.at_anchors(feature), batch, draft_targets, self.start(context, pairs))

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        out = attend(torch.cat([self.embed(tokens), states[0]], -1))
        normed: Tensor = self.norm(out)
        return normed, (normed if self.config.norm_output else out,)

    def open(self, rows: int, cache: TreeCache | None = None) -> "PairSession":
        return PairSession(self, rows)


def _states(base_hidden: HiddenStates) -> Tensor:
    """Return the states [..., I] that the head reads: those of its ``spec.layers``, or the final ones without any."""
    return base_hidden.final if base_hidden.layers is None else base_hidden.layers


class PairContext(LayerCache):
    """Keys and values of layers that read each token's embedding together with the feature of the token before."""

    def __init__(self, head: PairHead, rows: int) -> None:
        drafting = head.drafting_layers()
        super().__init__(drafting.layers, drafting.shape, rows, windows=drafting.windows)
        self._head = head.inference()
        self.feature = next(head.parameters()).new_zeros(rows, head.base.hidden_size)
        """[B, D] feature of the last token that the base has read; zeros in an empty row. The head reads it with the
        embedding of the tree's root."""
        self._is_empty = [True] * rows

    def commit(self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden, nodes: Tensor | None = None) -> None:
        head = self._head
        assert base_hidden is not None
        fused = map_active(lambda hidden: head.fuse(_states(hidden)), base_hidden, counts)
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


class PairSession(HeadSession):
    """A session of a head that reads pairs."""

    context: PairContext

    def __init__(self, head: PairHead, rows: int) -> None:
        self.context = PairContext(head, rows)
        super().__init__(head, rows, self.context)

    def draft_hidden(self) -> Tensor:
        return self.context.feature
