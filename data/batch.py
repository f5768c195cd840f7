"""Types of training and decoding: batches, hidden states, metrics.

``x_t`` is the token at position t. ``h_t`` is the hidden state at position t after the base's final norm; the base's
output head turns it into p(x_{t+1}). Draft position k (1-based) predicts ``x_{t+1+k}``.

Shape legend: B batch, T time, N tree nodes (root included), K draft positions, V target vocabulary,
W draft vocabulary, D hidden size of the base, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

NO_DOCUMENT = -1  # document id of padding


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """B rows of T tokens, each with one or several documents: runs of equal ``document_ids``. Batches stay in host
    memory, where indices are computed without waiting for a device. What reads their tokens on the device moves them
    itself."""

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64, from 0 in every document
    document_ids: Tensor  # [B, T] int64, ``NO_DOCUMENT`` on padding
    loss_mask: Tensor  # [B, T] bool: True for tokens that may be targets
    weights: Tensor | None = None  # [B, T, K] float >= 0; [..., k - 1] as a target of draft position k; None: 1

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], trained_from: int = 0, padding: int = 0) -> "TrainBatch":
        """Return a batch of one row: the token ids of ``documents``, then ``padding`` padding tokens. In every
        document, the tokens from position ``trained_from`` (from 0) on may be targets."""
        positions = [(n, p) for n, document in enumerate(documents) for p in range(len(document))]
        return cls(
            input_ids=torch.tensor([[token for document in documents for token in document] + [0] * padding]),
            position_ids=torch.tensor([[p for _, p in positions] + [0] * padding]),
            document_ids=torch.tensor([[n for n, _ in positions] + [NO_DOCUMENT] * padding]),
            loss_mask=torch.tensor([[p >= trained_from for _, p in positions] + [False] * padding]),
        )

    def next_tokens(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the target of draft position ``k`` (from 1; 0 is the base's own next token) at every position t. The
        first tensor, [B, T] int64, has ``x_{t+1+k}``, or 0 past the row's end. The second, [B, T] bool, is True if
        tokens t to t+1+k are in one document and ``x_{t+1+k}`` may be a target."""
        shift = k + 1
        tokens = torch.zeros_like(self.input_ids)
        valid = torch.zeros_like(self.loss_mask)
        if shift < self.input_ids.shape[1]:
            tokens[:, :-shift] = self.input_ids[:, shift:]
            same = self.document_ids[:, :-shift] == self.document_ids[:, shift:]
            # Documents are contiguous: if both ends are in one document, so are all tokens between them.
            same &= self.document_ids[:, shift:] != NO_DOCUMENT
            valid[:, :-shift] = same & self.loss_mask[:, shift:]
        return tokens, valid

    def to(self, device: torch.device | str) -> "TrainBatch":  # without waiting for the copy
        return TrainBatch(**{k: v.to(device, non_blocking=True) for k, v in vars(self).items() if v is not None})


@dataclass(frozen=True, kw_only=True)
class HiddenStatesSpec:
    """Choice of the base's hidden states that a head reads in addition to the final one."""

    layers: tuple[int, ...] = ()  # their outputs are concatenated on the last axis; 1: first layer, 0: embedding


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Hidden states of the frozen base for a batch, without gradients."""

    final: Tensor  # [B, T, D], after the final norm
    layers: Tensor | None = None  # [B, T, D * L]: outputs of the L layers in ``HiddenStatesSpec.layers``, if any

    @classmethod
    def split(cls, values: Tensor, width: int) -> "HiddenStates":
        """Split values [..., D * (1 + L)] into the final state, which comes first, and L layers; ``width`` is D."""
        return cls(final=values[..., :width], layers=values[..., width:] if values.shape[-1] > width else None)

    @classmethod
    def join(cls, parts: Sequence["HiddenStates"]) -> "HiddenStates":
        """Join states of consecutive positions."""
        layers = [states.layers for states in parts if states.layers is not None]
        return cls(
            final=torch.cat([states.final for states in parts], 1), layers=torch.cat(layers, 1) if layers else None
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "HiddenStates":
        """Return new states with ``change`` applied to ``final`` and, unless None, ``layers``."""
        return HiddenStates(final=change(self.final), layers=None if self.layers is None else change(self.layers))

    def span(self, start: int, count: int) -> "HiddenStates":
        """Return the states of the ``count`` positions (T axis) from index ``start`` on; fewer at the rows' end."""
        return self.map(lambda states: states[:, start : start + count])

    def layer(self, index: int) -> Tensor:
        """Return the states [B, T, D] of the layer at ``index`` (from 0) in ``HiddenStatesSpec.layers``."""
        assert self.layers is not None
        width = self.final.shape[-1]
        return self.layers[..., index * width : (index + 1) * width]


BaseHidden = HiddenStates | None
"""The base's states at committed tokens, as ``Drafter.spec`` asks for; None without a base."""


def pad_rows(rows: Sequence[HiddenStates]) -> HiddenStates:
    """Join hidden states of single rows ([1, T, ...], T varies) to one batch, padded with zeros."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    layers = [row.layers[0] for row in rows if row.layers is not None]
    return HiddenStates(final=pad([row.final[0] for row in rows]), layers=pad(layers) if layers else None)


@dataclass(frozen=True)
class Ratio:
    """A metric as numerator and denominator, which add up over micro-batches and ranks."""

    num: float
    den: float

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.num + other.num, self.den + other.den)

    @property
    def value(self) -> float:  # nan if nothing was counted
        return self.num / self.den if self.den else float("nan")


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A head's loss on a micro-batch, as sums without averaging."""

    loss_sum: Tensor  # scalar float32, over trained tokens; to be divided by the sum of all ``tokens`` of a step
    tokens: Tensor  # scalar int64: largest number of trained tokens at any one draft position, usually the first
    sums: Tensor  # [len(names), 2] float64: numerators and denominators of the metrics, still on the device
    names: tuple[str, ...]

    def ratios(self) -> dict[str, Ratio]:  # by name, on the host; waits for the device
        return {n: Ratio(num, den) for n, (num, den) in zip(self.names, self.sums.tolist(), strict=True)}
