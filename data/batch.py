"""What training reads and returns: batches, hidden states, metrics.

``h_t`` is the hidden state of the base after its final norm at position t, having read ``x_t``; the base's own head
turns it into p(x_{t+1}). Draft position k (1-based) predicts ``x_{t+1+k}``.

Shape legend: B batch, T time, N tree nodes (root included), K drafted positions, V target vocabulary,
W draft vocabulary, D base width, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DOCUMENT = -1
"""Document id of padding."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Packed rows. A document is a run of equal ``document_ids`` inside one row."""

    input_ids: Tensor
    """[B, T] int64."""
    position_ids: Tensor
    """[B, T] int64, starts at 0 in every document."""
    document_ids: Tensor
    """[B, T] int64, ``NO_DOCUMENT`` on padding."""
    loss_mask: Tensor
    """[B, T] bool: this token is trained (may be a target)."""
    weights: Tensor | None = None
    """[B, T, K] float >= 0: weight of this token as the target of draft position k (1-based: column k - 1), on top of
    the loss's own; 0: not trained there. None: all 1."""

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], trained_from: int = 0, padding: int = 0) -> "TrainBatch":
        """One row of documents side by side, each trained from that position on, and so much padding."""
        places = [(n, p) for n, document in enumerate(documents) for p in range(len(document))]
        return cls(
            input_ids=torch.tensor([[token for document in documents for token in document] + [0] * padding]),
            position_ids=torch.tensor([[p for _, p in places] + [0] * padding]),
            document_ids=torch.tensor([[n for n, _ in places] + [NO_DOCUMENT] * padding]),
            loss_mask=torch.tensor([[p >= trained_from for _, p in places] + [False] * padding]),
        )

    def draft_targets(self, depth: int) -> tuple[Tensor, Tensor]:
        """Targets of draft position ``depth`` k at every t; 0 gives the base's own next-token targets.

        Targets [B, T] int64: ``x_{t+1+k}`` (0 where there is none), and valid [B, T] bool: the tokens from t to t+1+k
        lie in one document and ``x_{t+1+k}`` is trained.
        """
        shift = depth + 1
        targets = torch.zeros_like(self.input_ids)
        valid = torch.zeros_like(self.loss_mask)
        if shift < self.input_ids.shape[1]:
            targets[:, :-shift] = self.input_ids[:, shift:]
            same = self.document_ids[:, :-shift] == self.document_ids[:, shift:]
            # Documents are contiguous, so equal ends mean that everything between lies in it too.
            same &= self.document_ids[:, shift:] != NO_DOCUMENT
            valid[:, :-shift] = same & self.loss_mask[:, shift:]
        return targets, valid

    def to(self, device: torch.device | str) -> "TrainBatch":
        """The same batch on ``device``."""
        moved = {k: v.to(device) for k, v in vars(self).items() if v is not None}
        return TrainBatch(**moved)


@dataclass(frozen=True, kw_only=True)
class HiddenStatesSpec:
    """Which hidden states of the base a head reads, besides the final one that every head gets."""

    layers: tuple[int, ...] = ()
    """Outputs of these layers (1 is the first, 0 the embedding), concatenated on the last axis."""


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Hidden states of the frozen base, detached."""

    final: Tensor
    """[B, T, D] after the final norm."""
    layers: Tensor | None = None
    """[B, T, D * len(spec.layers)], or None when the spec names no layers."""

    @classmethod
    def split(cls, values: Tensor, width: int) -> "HiddenStates":
        """From [..., D * (1 + len(spec.layers))] values: the final state, then the layers; ``width`` is D."""
        return cls(final=values[..., :width], layers=values[..., width:] if values.shape[-1] > width else None)

    def map(self, change: Callable[[Tensor], Tensor]) -> "HiddenStates":
        """``change`` applied to both tensors."""
        return HiddenStates(final=change(self.final), layers=None if self.layers is None else change(self.layers))

    def span(self, start: int, count: int) -> "HiddenStates":
        """``count`` positions from ``start``."""
        return self.map(lambda part: part[:, start : start + count])

    def layer(self, place: int) -> Tensor:
        """[B, T, D] of the spec's layer number ``place``."""
        assert self.layers is not None
        width = self.final.shape[-1]
        return self.layers[..., place * width : (place + 1) * width]


def pad_rows(rows: Sequence[HiddenStates]) -> HiddenStates:
    """Hidden states of single rows ([1, T, ...], each of its own length) as one batch, padded with zeros."""

    def pad(parts: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([part[0] for part in parts], batch_first=True)

    layers = [row.layers for row in rows if row.layers is not None]
    return HiddenStates(final=pad([row.final for row in rows]), layers=pad(layers) if layers else None)


@dataclass(frozen=True)
class Ratio:
    """A metric that adds up over micro-batches and ranks; divide last."""

    num: float
    den: float

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.num + other.num, self.den + other.den)

    @property
    def value(self) -> float:
        """``num / den``; nan when nothing was counted."""
        return self.num / self.den if self.den else float("nan")


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A head's loss on a micro-batch. Nothing in it is averaged."""

    loss_sum: Tensor
    """Scalar float32: sum over trained tokens; divide once, by the global ``tokens``."""
    tokens: Tensor
    """Scalar int64: tokens trained at draft position 1."""
    sums: Tensor
    """[len(names), 2] float64 numerators and denominators of the metrics ``names``; no host synchronisation."""
    names: tuple[str, ...]

    def ratios(self) -> dict[str, Ratio]:
        """The metrics on the host (synchronises)."""
        return {n: Ratio(num, den) for n, (num, den) in zip(self.names, self.sums.tolist(), strict=True)}
