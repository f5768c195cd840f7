"""The types that cross folder boundaries: frozen dataclasses, no ``nn.Module``, no I/O.

Positions follow one convention everywhere. ``h_t`` is the base's hidden state after its final norm at
position t, having read ``x_t``; the base's own head turns it into p(x_{t+1}). Draft position k (1-based)
predicts ``x_{t+1+k}``.

Shape legend: B batch, T time, N tree nodes (root included), K drafted positions, V target vocabulary,
W draft vocabulary, D base width, R rows.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

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
    row_ids: Tensor
    """[B] int64: number of the row in its corpus, the key of the feature cache."""

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
    """Outputs of these layers (0 is the embedding), concatenated on the last axis."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Hidden states of the frozen base, detached."""

    final: Tensor
    """[B, T, D] after the final norm."""
    layers: Tensor | None = None
    """[B, T, D * len(spec.layers)], or None when the spec names no layers."""


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """The shape of a token tree. Node 0 is the root: the last committed token, not yet read by the base.

    A chain of K drafts is the tree with parents (-1, 0, 1, ..., K-1) and ranks (0, 0, ..., 0).
    """

    parents: tuple[int, ...]
    """Parent of each node, -1 for the root; a parent stands before its children."""
    ranks: tuple[int, ...]
    """Which of its drafter's candidates a node takes, 0 is the likeliest; 0 for the root."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise ValueError(
                f"a tree needs one rank per parent, got {len(self.parents)} parents and {len(self.ranks)} ranks"
            )
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"node 0 must be the root with parent -1, got parents {self.parents[:4]}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; a parent must stand before its child")
        if any(rank < 0 for rank in self.ranks):
            raise ValueError(f"ranks must be >= 0, got {min(self.ranks)}")
        if len(set(self.paths)) != len(self.paths):
            raise ValueError("two nodes of the tree are the same path of ranks")

    @classmethod
    def chain(cls, depth: int) -> "TokenTree":
        """``depth`` drafts, one after the other."""
        return cls(parents=tuple(range(-1, depth)), ranks=(0,) * (depth + 1))

    @classmethod
    def from_paths(cls, paths: "list[tuple[int, ...]]") -> "TokenTree":
        """The tree of Medusa's ``choices``: every node as the path of ranks from the root.

        Raises:
            ValueError: a path's parent path is missing.
        """
        ordered = sorted(set(paths) - {()}, key=lambda p: (len(p), p))
        index: dict[tuple[int, ...], int] = {(): 0}
        for path in ordered:
            index[path] = len(index)
        missing = [p for p in ordered if p[:-1] not in index]
        if missing:
            raise ValueError(f"tree path {list(missing[0])} has no parent {list(missing[0][:-1])}; add it")
        return cls(parents=(-1, *(index[p[:-1]] for p in ordered)), ranks=(0, *(p[-1] for p in ordered)))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Per node, its ranks from the root; the root's is ()."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    @cached_property
    def depths(self) -> Tensor:
        """[N] int64, 0 for the root."""
        return torch.tensor([len(p) for p in self.paths])

    @cached_property
    def ancestors(self) -> Tensor:
        """[N, N] bool: column j is row i itself or one of its ancestors."""
        ancestors = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
        return ancestors

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return max(len(p) for p in self.paths)


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
    """A drafted token tree, ready to verify."""

    tokens: Tensor
    """[B, N] int64; column 0 is the root, the last committed token."""
    tree: TokenTree
    siblings: Siblings


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verification accepted. The committed tokens of the step are the accepted drafts and the bonus."""

    nodes: Tensor
    """[B, 1 + tree.depth] int64: root and accepted nodes in order, padded with 0."""
    accepted: Tensor
    """[B] int64: accepted drafts, root excluded."""
    bonus: Tensor
    """[B] int64: the target's own token after the last accepted one."""


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
