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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import TrainBatch
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.draft_cache import TokenBuffer
from drafthead.models.heads.common.targets import DraftTargets, drafting_places
from drafthead.models.kernels.attention import document_mask

SHARPNESS = (16.0, 6.0)
"""Score of the same last token, and of the same token before it, in an untrained head."""
SINK = 10.0
"""Score of the sink: below a match, above what codes of other tokens reach by chance."""
BOOST = 8.0
"""What a match adds to the draft logit of the token that followed."""


class InductionHead(nn.Module):
    """Attention from a path's last two tokens over every two tokens of the text and the one after them."""

    def __init__(self, base: BaseModel, rank: int) -> None:
        """Codes of ``rank`` numbers; the score of the sink is a projection of a state of the base's width."""
        super().__init__()
        width, device = base.hidden_size, base.device
        self._embedding = (base.embedding,)  # the base's: in a tuple, it is no part of this module
        self._table: Tensor | None = None
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
        """The same with the codes of all ids in a table, [V, 3, r]."""
        twin = copy(self)
        with torch.no_grad():
            ids = torch.arange(len(self._embedding[0]), device=self.sharpness.device)
            twin._table = torch.cat([self.codes(part) for part in torch.split(ids, 8192)])
        return twin

    def _read(self, tokens: Tensor) -> Tensor:
        """The base's embeddings at unit RMS: [...] -> [..., D]."""
        embedded = F.embedding(tokens, self._embedding[0]).to(self.sharpness.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def codes(self, tokens: Tensor) -> Tensor:
        """A token's codes as the last one, as the one before it, and as what is copied: [...] -> [..., 3, r]."""
        if self._table is not None:
            return self._table[tokens]
        return F.rms_norm(self.codes_proj(self._read(tokens)).unflatten(-1, (3, -1)), (self.rank,))

    @torch.no_grad()
    def start_projection(self, d2t: Tensor) -> Tensor:
        """[W, r] what the projection of what is copied begins as."""
        return self.codes(d2t)[:, 2] * (BOOST / self.rank)

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
        reader = self.in_training(batch, places)
        found = [reader.read(k, state).flatten(0, 1) for k in range(depth)]
        return torch.stack([out[slots[idx]] for out, idx in zip(found, draft_targets.source_idx, strict=True)])

    def in_training(self, batch: TrainBatch, places: Tensor) -> "InductionPlaces":
        """To be read at ``places`` [B, S] of packed rows."""
        return InductionPlaces(self, batch, places)


class InductionPlaces:
    """An induction head over the text of a training batch, as it is seen from some places."""

    def __init__(self, head: InductionHead, batch: TrainBatch, places: Tensor) -> None:
        self._head, self._places, self._codes = head, places, head.codes(batch.input_ids)
        self._rows = torch.arange(len(places), device=places.device)[:, None]
        causal = document_mask(batch.document_ids, torch.float32)[:, 0][self._rows, places] == 0
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


class InductionReader:
    """Reads one step's nodes level by level, as ``InductionHead.forward`` does, in few operations."""

    def __init__(self, head: InductionHead, text: TokenBuffer) -> None:
        """For an inference copy of a head; ``text``: all tokens but the root."""
        self._head, codes = head, head.codes(text.tokens)
        self._scale = (head.sharpness / head.rank).repeat_interleave(head.rank)
        earlier = F.pad(codes[:, :-2, 1], (0, 0, 1, 0))[:, : text.longest - 1]
        self._keys = torch.cat([codes[:, :-1, 0], earlier], -1).transpose(1, 2)  # [B, 2 r, T - 1]
        self._values = F.pad(codes[:, 1:, 2], (0, 0, 0, 1))  # the sink's value is zero
        positions = torch.arange(1, text.longest, device=codes.device)[None]
        padded = positions >= text.lengths[:, None]
        self._mask = torch.where(padded, -torch.inf, 0.0).to(codes.dtype)[:, None] if padded.any() else None
        self._above = codes[torch.arange(len(codes), device=codes.device), text.lengths - 1][:, None]

    def read(self, tokens: Tensor, parents: Tensor, state: Tensor) -> Tensor:
        """What is copied after nodes ([B, F] tokens and places of their parents in the level before): [B, F, r]."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before, self._above = self._above[rows, parents], self._head.codes(tokens)
        scores = (torch.cat([self._above[..., 0, :], before[..., 1, :]], -1) * self._scale) @ self._keys
        if self._mask is not None:
            scores = scores + self._mask
        return torch.cat([scores, self._head.sink(state)], -1).softmax(-1) @ self._values
