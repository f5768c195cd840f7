"""The types that cross folder boundaries: frozen dataclasses, no ``nn.Module``, no I/O.

Positions follow one convention everywhere. ``h_t`` is the base's hidden state after its final norm at
position t, having read ``x_t``; the base's own head turns it into p(x_{t+1}). Draft position k (1-based)
predicts ``x_{t+1+k}``.

Shape legend: B batch, T time, N tree nodes (root included), K drafted positions, V target vocabulary,
W draft vocabulary, D base width, R rows.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from drafthead.data.token_tree import TreeShape

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

    def draft_targets(self, depth: int) -> tuple[Tensor, Tensor]:
        """Targets of draft position ``depth`` at every t.

        Args:
            depth: k >= 1; 0 gives the base's own next-token targets.

        Returns:
            targets [B, T] int64: ``x_{t+1+k}`` (0 where there is none), and valid [B, T] bool: the tokens
            from t to t+1+k lie in one document and ``x_{t+1+k}`` is trained.
        """
        shift = depth + 1
        targets = torch.zeros_like(self.input_ids)
        valid = torch.zeros_like(self.loss_mask)
        if shift < self.input_ids.shape[1]:
            targets[:, :-shift] = self.input_ids[:, shift:]
            same = self.document_ids[:, :-shift] == self.document_ids[:, shift:]
            # Documents are contiguous, so equal ends mean that everything between lies in it too.
            inside = same & (self.document_ids[:, shift:] != NO_DOCUMENT)
            valid[:, :-shift] = inside & self.loss_mask[:, shift:]
        return targets, valid

    def to(self, device: torch.device | str) -> "TrainBatch":
        """The same batch on ``device``."""
        return TrainBatch(**{k: v.to(device) for k, v in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which hidden states of the base a head reads, besides the final one that every head gets."""

    layers: tuple[int, ...] = ()
    """Outputs of these layers (1 is the first, 0 the embedding), concatenated on the last axis."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Hidden states of the frozen base, detached."""

    final: Tensor
    """[B, T, D] after the final norm."""
    layers: Tensor | None = None
    """[B, T, D * len(spec.layers)], or None when the spec names no layers."""

    @classmethod
    def split(cls, values: Tensor, width: int) -> "Features":
        """Features of [..., D * (1 + len(spec.layers))] values: the final state, then the layers; ``width`` is D."""
        return cls(final=values[..., :width], layers=values[..., width:] if values.shape[-1] > width else None)

    def layer(self, place: int) -> Tensor:
        """[B, T, D] of the spec's layer number ``place``."""
        assert self.layers is not None
        width = self.final.shape[-1]
        return self.layers[..., place * width : (place + 1) * width]


class Siblings(Enum):
    """How the children of a node were obtained; losslessness under sampling depends on it."""

    DETERMINISTIC = "deterministic"
    """A function of the prefix (top-k): verified with a one-hot draft distribution."""
    WITH_REPLACEMENT = "with_replacement"
    """Independent samples of q."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Samples of q, renormalised after each."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted token trees, one per row, ready to verify.

    A trial is one candidate child with the law it was drawn from. Losslessness under sampling hangs on the laws, so
    they belong to the trials and not to the nodes: in a tree merged of several drafters a node may be tried twice,
    each time against another law.
    """

    tokens: Tensor
    """[B, N] int64; column 0 is the root, the last committed token; padding holds any token."""
    shape: TreeShape
    siblings: Siblings
    """How the trials that have a law were drawn. Trials without one are deterministic."""
    laws: Tensor | None = None
    """[B, Q, V] float: the drafter's distributions after warping, exactly those that were sampled; None: all trials
    are deterministic."""
    law_of: Tensor | None = None
    """[R, N, S] int64: row of ``laws`` that the s-th trial at a node was drawn from, -1 for a deterministic one."""
    confidence: Tensor | None = None
    """[B, N] float: probability that the drafter gives a node after its parent, 1 for the root; None if unknown."""
    begun: "BegunPass | None" = None
    """What the drafter has already computed of the target's pass over these nodes."""

    def __post_init__(self) -> None:
        if (self.laws is None) != (self.law_of is None):
            raise ValueError("a proposal needs both laws and law_of, or neither")
        if self.laws is not None and self.siblings is Siblings.DETERMINISTIC:
            raise ValueError("deterministic siblings have no law; say how the trials with a law were drawn")


@dataclass(frozen=True, kw_only=True)
class BegunPass:
    """The first layers of the target's pass over a proposal, done while drafting (early exit).

    Their keys and values lie in the target's cache already, behind what is committed and in the order of the nodes.
    """

    layers: int
    """How many layers are done."""
    hidden: Tensor
    """[B, N, D] what they put out."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verification accepted. The committed tokens of the step are the accepted drafts and the bonus."""

    nodes: Tensor
    """[B, 1 + D] int64: root and accepted nodes in order, padded with 0; D is at most the depth of the trees."""
    accepted: Tensor
    """[B] int64: accepted drafts, root excluded."""
    bonus: Tensor
    """[B] int64: the target's own token after the last accepted one."""
    laws: Tensor | None = None
    """[B, 1 + D, V] float: the target's laws after the accepted nodes, zeros behind them; None unless asked for."""


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


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One draft-and-verify step of one sequence. Times in seconds."""

    position: int
    """Answer tokens committed before the step."""
    proposed: int
    """Drafted nodes, root excluded."""
    depth: int
    """Longest drafted path offered."""
    accepted: int
    """Drafts accepted by the rule, before truncation."""
    committed: int
    """Tokens committed: accepted + bonus, less what EOS or max_new_tokens cut off."""
    entropy: float = float("nan")
    """Nats: of the target's unwarped law of the step's first token."""
    draft_s: float
    verify_s: float
    total_s: float
    """The whole step; ``total_s - draft_s - verify_s`` is the loop's overhead."""


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """One decoded answer and how it came about. Times in seconds."""

    tokens: list[int]
    """Committed answer tokens, EOS included when reached."""
    steps: list[StepRecord]
    prefill_s: float
    """Reading the prompt; yields the first token, which belongs to no step."""
    total_s: float
