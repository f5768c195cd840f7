"""An induction head (Olsson et al., 2209.11895) for draft heads: what followed the last two tokens the last times.

It attends from the last two tokens of a path to the two before every token of the text, and gives that token's code,
which a projection of low rank adds to the draft logits. A layer of attention learns to copy late (``docs/log.md``);
this one copies from the start: codes are random projections of the base's embeddings, so that a token agrees with
itself and hardly with others, and the projection begins as the codes of the draft vocabulary. A sink takes the weight
where nothing agrees. It reads ids alone, so the text needs no pass, and every node of a tree has a prediction of its
own.

Shape legend: B rows, T tokens of the text, S places that are drafted from, F frontier nodes, D width, r rank, W draft
vocabulary.
"""

from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import TrainBatch
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.draft_cache import TokenBuffer
from drafthead.models.decoding.drafter import DraftState
from drafthead.models.heads.parts.targets import DraftTargets, drafting_places

SHARPNESS = (16.0, 6.0)
"""Score of the same last token, and of the same token before it, in an untrained head."""
SINK = 10.0
"""Score of the sink: below a match, above what codes of other tokens reach by chance."""
BOOST = 8.0
"""What a match adds to the draft logit of the token that followed."""
INITIAL_ROOM = 256
"""Positions to begin with, after twice what is read first."""


class InductionHead(nn.Module):
    """Attention from a path's last two tokens over every two tokens of the text and the one after them."""

    def __init__(self, base: BaseModel, rank: int) -> None:
        """Codes of ``rank`` numbers; the score of the sink is a projection of a state of the base's width."""
        super().__init__()
        width, device = base.hidden_size, base.device
        self._embedding = (base.embedding,)  # the base's: in a tuple, it is no part of this module
        self.table: Tensor | None = None
        """Of an inference copy: [V, 3, r] the codes of all ids."""
        self.codes_proj = nn.Linear(width, 3 * rank, device=device)
        self.sink = nn.Linear(width, 1, device=device)
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS, device=device))
        with torch.no_grad():
            some = torch.arange(min(len(base.embedding), 8192), device=device)
            nn.init.normal_(self.codes_proj.weight, std=width**-0.5)
            self.codes_proj.bias.copy_(-self.codes_proj.weight @ self._read(some).mean(0))
            nn.init.zeros_(self.sink.weight)
            nn.init.constant_(self.sink.bias, SINK)

    @property
    def rank(self) -> int:
        return self.codes_proj.out_features // 3

    def inference(self, dtype: torch.dtype | None = None) -> "InductionHead":
        """The same with the codes of all ids in a table."""
        twin = copy(self)
        with torch.no_grad():
            ids = torch.arange(len(self._embedding[0]), device=self.sharpness.device)
            twin.table = torch.cat([self.codes(part) for part in torch.split(ids, 8192)])
        return twin

    def _read(self, tokens: Tensor) -> Tensor:
        """The base's embeddings at unit RMS: [...] -> [..., D]."""
        embedded = F.embedding(tokens, self._embedding[0]).to(self.sharpness.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def codes(self, tokens: Tensor) -> Tensor:
        """A token's codes as the last one, as the one before it, and as what is copied: [...] -> [..., 3, r]."""
        if self.table is not None:
            return self.table[tokens]
        return F.rms_norm(self.codes_proj(self._read(tokens)).unflatten(-1, (3, -1)), (self.rank,))

    @torch.no_grad()
    def start_projection(self, d2t: Tensor, scale: float) -> Tensor:
        """[W, r] what the projection of what is copied begins as; its product will be multiplied by ``scale``."""
        return self.codes(d2t)[:, 2] * (BOOST / (self.rank * scale))

    def forward(
        self, last: Tensor, before: Tensor, state: Tensor, text: Tensor, seen: Tensor, paired: Tensor
    ) -> Tensor:
        """What is copied: [B, F, r].

        Args:
            last: [B, F, 3, r] codes of the paths' last tokens.
            before: [B, F, 3, r] of the ones before them.
            state: [B, F, D] the score of the sink is read from.
            text: [B, T, 3, r] codes of the text.
            seen: [B, F or 1, T] bool, which of its tokens may be copied; of the first nothing is said.
            paired: [B or 1, T] bool, which of them follow two tokens of their document.
        """
        one, two = self.sharpness / self.rank
        scores = (one * last[..., 0, :]) @ text[:, :-1, 0].transpose(1, 2)  # by the token before each
        pairs = (two * before[..., 1, :]) @ text[:, :-2, 1].transpose(1, 2)  # by the one before that
        scores = scores + F.pad(pairs.masked_fill(~paired[:, None, 2:], 0.0), (1, 0))[..., : scores.shape[-1]]
        scores = torch.cat([scores.masked_fill(~seen[..., 1:], -torch.inf), self.sink(state).to(scores.dtype)], -1)
        weights = scores.float().softmax(-1)[..., :-1].to(text.dtype)
        return weights @ text[:, 1:, 2]

    def at_targets(self, batch: TrainBatch, final: Tensor, draft_targets: DraftTargets) -> Tensor:
        """What is copied for every target, [K, n, r]; the sink's score is read from the base's ``final`` [B, T, D]."""
        depth = len(draft_targets.valid)
        if len(draft_targets.target_idx) == 0:
            return final.new_zeros(depth, 0, self.rank)
        places, slots = drafting_places(draft_targets, batch.input_ids)
        rows = torch.arange(len(places), device=places.device)[:, None]
        state = final[rows, places].nan_to_num().to(self.sharpness.dtype)
        reader = InductionPlaces(self, batch, places)
        found = [reader.read(k, state).flatten(0, 1) for k in range(depth)]
        return torch.stack([out[slots[idx]] for out, idx in zip(found, draft_targets.source_idx, strict=True)])


class InductionPlaces:
    """An induction head over the packed rows of a training batch, as they are seen from ``places`` [B, S]."""

    def __init__(self, head: InductionHead, batch: TrainBatch, places: Tensor) -> None:
        self._head, self._places, self._codes = head, places, head.codes(batch.input_ids)
        self._rows = torch.arange(len(places), device=places.device)[:, None]
        documents = batch.document_ids
        causal = documents[:, None] == documents.gather(1, places)[..., None]
        causal &= torch.arange(documents.shape[1], device=places.device) <= places[..., None]
        self._seen = causal & (batch.position_ids > 0)[:, None]  # nothing stands before a document's first token
        self._paired = batch.position_ids > 1

    def read(self, k: int, state: Tensor) -> Tensor:
        """What is copied for draft position k (0-based), with the true tokens before it: [B, S, D] -> [B, S, r]."""
        most = self._codes.shape[1] - 1
        before, last = (self._codes[self._rows, (self._places + k + n).clamp(max=most)] for n in (0, 1))
        # Without recomputing its scores every position would keep a matrix of S times T.
        text = (self._codes, self._seen, self._paired)
        found: Tensor = checkpoint(self._head, last, before, state, *text, use_reentrant=False)
        return found


class InductionCache:
    """Keys and values of the text, kept between steps: only tokens that are new are looked up.

    A token is the value at its own position, and a part of the keys at the next one and at the one after that. Position
    0, which is never copied, is the sink: its value is zero, and its key has a last column that takes the sink's score.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None  # that the codes are of
        self._tokens = torch.zeros(0, 0, dtype=torch.int64)
        self._keys = self._values = torch.zeros(0, 0, 0)

    def select(self, rows: list[int]) -> "InductionCache":
        """Of these rows only: begun anew."""
        return InductionCache()

    @torch.inference_mode()
    def read(self, head: InductionHead, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, 2 r + 1] keys and [B, T, r] values of ``tokens`` [B, T], for an inference copy of a head."""
        assert head.table is not None
        (rows, total), rank = tokens.shape, head.rank
        if self._table is not head.table or len(self._tokens) != rows:
            self._table, self._tokens, self._keys = head.table, tokens[:, :0], head.table.new_zeros(rows, 0, 0)
        if total + 2 > self._keys.shape[1]:
            self._resize(2 * total + INITIAL_ROOM, self._tokens.shape[1])
        if len(places := self._changed(tokens)):
            codes, (one, two) = head.codes(tokens[:, places]), head.sharpness / rank
            self._keys[:, places + 1, :rank] = codes[..., 0, :] * one
            self._keys[:, places + 2, rank:-1] = codes[..., 1, :] * two
            self._values[:, places] = codes[..., 2, :]
            self._values[:, 0] = 0.0
        self._tokens = tokens
        return self._keys[:, :total], self._values[:, :total]

    def _changed(self, tokens: Tensor) -> Tensor:
        """[n] the positions at which some row holds something else than ``tokens``: codes depend on ids alone."""
        total, width = tokens.shape[1], min(self._tokens.shape[1], tokens.shape[1])
        changed = torch.ones(total, dtype=torch.bool, device=tokens.device)
        changed[:width] = (self._tokens[:, :width] != tokens[:, :width]).any(0)
        return changed.nonzero()[:, 0]

    def _resize(self, capacity: int, known: int) -> None:
        assert self._table is not None
        rows, rank = len(self._tokens), self._table.shape[-1]
        keys, values = (self._table.new_zeros(rows, capacity, size) for size in (2 * rank + 1, rank))
        keys[:, 0, -1] = 1.0
        if known:
            keys[:, : known + 2], values[:, :known] = self._keys[:, : known + 2], self._values[:, :known]
        self._keys, self._values = keys, values


@dataclass
class InductionText(DraftState):
    """What every row has committed, for an induction head."""

    tokens: TokenBuffer
    cache: InductionCache

    @classmethod
    def none(cls, rows: int) -> "InductionText":
        """Nothing yet."""
        return cls(tokens=TokenBuffer.none(rows), cache=InductionCache())

    def append(self, head: InductionHead | None, tokens: Tensor, counts: Tensor | None) -> "InductionText":
        """With the first ``counts`` ([B], default all) of ``tokens`` ([B, T]); for an inference copy of a head."""
        assert head is not None
        state = InductionText(tokens=self.tokens.append(tokens, counts), cache=self.cache)
        if self.tokens.longest == 0:  # the prompt: belongs to the prefill, and not to the first step
            state.cache.read(head, state.tokens.tokens)
        return state


class InductionReader:
    """Reads one step's nodes level by level, as ``InductionHead.forward`` does, in few operations."""

    def __init__(self, head: InductionHead | None, text: InductionText, states: Tensor) -> None:
        """For an inference copy of a head; ``text``: all tokens but the root.

        ``states``: [B, n, D] the sink's score is read from, of each level; the last one serves all after it.
        """
        assert head is not None
        known = text.tokens
        keys, self._values = text.cache.read(head, known.tokens)
        self._head, self._keys = head, keys.transpose(1, 2)
        self._sinks = head.sink(states)
        self._mask: Tensor | None = None
        if len(keys) > 1:
            positions = torch.arange(known.longest, device=keys.device)
            padded = (positions >= known.lengths[:, None]) & (positions > 0)
            self._mask = torch.where(padded, -torch.inf, 0.0).to(keys.dtype)[:, None]
        self._above = head.codes(known.tokens.gather(1, known.lengths[:, None] - 1))[..., 1, :]
        self._level = 0

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """What is copied after nodes ([B, F] tokens and places of their parents in the level before): [B, F, r]."""
        codes, level = self._head.codes(tokens), min(self._level, self._sinks.shape[1] - 1)
        before = self._above.gather(1, parents[..., None].expand(-1, -1, self._above.shape[-1]))
        sink = self._sinks[:, level, None].expand(-1, tokens.shape[1], -1)
        scores = torch.bmm(torch.cat([codes[..., 0, :], before, sink], -1), self._keys)
        if self._mask is not None:
            scores = scores + self._mask
        self._above, self._level = codes[..., 1, :], self._level + 1
        return torch.bmm(scores.softmax(-1), self._values)
