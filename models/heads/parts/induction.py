"""An induction head (Olsson et al., 2209.11895): drafts what followed earlier occurrences of the last two tokens.

A path is the committed text followed by drafts. From the last two tokens of a path, the head attends to every
pair of neighbours in the context and copies the code (a vector of r numbers) of the token after the pair. A low-rank
projection adds that code to the draft logits. In the context ``a b c ... a b``, both tokens of the path ``a b`` match,
so ``c`` gets the highest score.

An attention layer learns to copy late (``docs/dev/log.md``), while this head copies from the start: codes are random
projections of the base's embeddings, so the code of a token matches itself and hardly any other code. The low-rank
projection starts as the codes of the draft vocabulary. If nothing matches, the attention goes to a sink, which copies
nothing; only its score depends on a hidden state. Everything else depends on token ids only, so the context needs no
forward pass, and every node of a tree has a prediction of its own.

Shape legend: B rows, T tokens of the context, A anchors, S anchors of a span, F frontier nodes, K draft positions, D
width, r rank, W draft vocabulary, V target vocabulary.
"""

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.data.batch import BaseHidden, TrainBatch
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.drafter import SessionPart, last_valid, take_rows
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.system.devices import on_device

SHARPNESS = (16.0, 6.0)
"""Initial attention scores of a match of the last token, and of the token before it."""
SINK = 10.0
"""Initial attention score of the sink: below a match, above the chance similarity of different tokens' codes."""
BOOST = 8.0
"""Initial increase of the logit of a copied token."""
INITIAL_ROOM = 256
"""A full cache is enlarged to twice its tokens plus this number."""
LAST, BEFORE, COPIED = range(3)
"""Indices of a token's three codes: as the last token of a path, as the token before it, and as the copied token."""


class InductionHead(nn.Module):
    """Attention from a path's last two tokens to all pairs of neighbours in the context. The output is the average
    code, a vector of r numbers, of the tokens after the pairs, by attention weight."""

    def __init__(self, base: BaseParts, rank: int) -> None:
        super().__init__()
        self.rank, width, device = rank, base.hidden_size, base.device
        self._embedding = (base.embedding,)  # the base's: in a tuple, so that it is not a parameter of this module
        self.table: Tensor | None = None
        """[V, 3, r]: ``codes`` of all token ids, only in an inference copy."""
        self.codes_proj = nn.Linear(width, 3 * rank, device=device)
        self.sink = nn.Linear(width, 1, device=device)
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS, device=device))
        with torch.no_grad():
            sample = torch.arange(min(len(base.embedding), 8192), device=device)
            nn.init.normal_(self.codes_proj.weight, std=width**-0.5)
            # Centred, so that codes of different tokens are about orthogonal.
            self.codes_proj.bias.copy_(-self.codes_proj.weight @ self._embed(sample).mean(0))
            nn.init.zeros_(self.sink.weight)
            nn.init.constant_(self.sink.bias, SINK)

    def inference(self, dtype: torch.dtype | None = None) -> "InductionHead":
        """Return a copy that looks codes up in ``table``."""
        twin = copy(self)
        with torch.no_grad():
            ids = torch.arange(len(self._embedding[0]), device=self.sharpness.device)
            twin.table = torch.cat([self.codes(chunk) for chunk in torch.split(ids, 8192)])
        return twin

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings scaled to RMS 1: [...] -> [..., D]."""
        embedded = F.embedding(tokens, self._embedding[0]).to(self.sharpness.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def codes(self, tokens: Tensor) -> Tensor:
        """Return the LAST, BEFORE and COPIED codes of tokens: [...] -> [..., 3, r]."""
        if self.table is not None:
            return self.table[tokens]
        return F.rms_norm(self.codes_proj(self._embed(tokens)).unflatten(-1, (3, -1)), (self.rank,))

    def projection(self, ids: Tensor, scale: float) -> Tensor:
        """Return rows [n, r] of the low-rank projection for the target ids ``ids`` [n]: their scaled codes. The weight
        of the draft vocabulary starts with these rows. They are divided by ``scale``, by which the logits are
        multiplied later."""
        return self.codes(ids)[:, COPIED] * (BOOST / (self.rank * scale))

    def forward(
        self, last: Tensor, before: Tensor, state: Tensor, context: Tensor, seen: Tensor, paired: Tensor
    ) -> Tensor:
        """Return the average code of the tokens that the paths of S anchors copy at K draft positions, [K, S, r].

        Args:
            last: [K, S, r] LAST codes of the paths' last tokens.
            before: [K, S, r] BEFORE codes of the tokens before them.
            state: [K or 1, S, D] hidden states from which the sink's score is computed.
            context: [T, 3, r] codes of the context.
            seen: [S, T] bool: True for tokens that may be copied. Token 0 is never copied.
            paired: [T] bool: True for tokens with at least two tokens of their document before them.
        """
        # Column j - 1 is the score of copying token j. It compares token j - 1 with the path's last token, and token
        # j - 2 with the token before the last.
        one, two = self.sharpness / self.rank
        scores = (one * last) @ context[:-1, LAST].t()
        pairs = (two * before) @ context[:-2, BEFORE].t()
        scores = scores + F.pad(pairs.masked_fill(~paired[2:], 0.0), (1, 0))[..., : scores.shape[-1]]
        sinks = self.sink(state).to(scores.dtype).expand(len(scores), -1, -1)
        scores = torch.cat([scores.masked_fill(~seen[:, 1:], -torch.inf), sinks], -1)
        weights = scores.float().softmax(-1)[..., :-1].to(context.dtype)
        return weights @ context[1:, COPIED]

    def at_anchors(self, batch: TrainBatch, states: Tensor, draft_targets: DraftTargets) -> Tensor:
        """Return the copied codes at all draft positions of all anchors, [K, A, r]. The sink's score comes from
        ``states`` [K or 1, A, D]."""
        codes, after = self.codes(batch.input_ids.flatten()), draft_targets.last_read
        last, before = codes[:, LAST][after], codes[:, BEFORE][after - 1]
        states, paired = states.nan_to_num().to(self.sharpness.dtype), batch.position_ids.flatten() > 1
        copied = [last[:, :0]]  # without anchors there is no span
        for span in draft_targets.seen.spans(len(after)):
            keys = torch.arange(span.keys.start, span.keys.stop, device=codes.device)
            seen = span.seen & (keys > span.first[:, None])  # nothing precedes a document's first token
            queries = (values[:, span.queries] for values in (last, before, states))
            # Recomputed in the backward pass; otherwise every span would store its scores.
            context = codes[span.keys], seen, paired[span.keys]
            copied.append(checkpoint(self, *queries, *context, use_reentrant=False))
        return torch.cat(copied, 1)


class InductionContext(SessionPart):
    """The induction head in drafting: keys and values of the committed tokens, read for one tree level after the other.

    One product ``keys @ query`` gives the summed scores for matches of the last token and of the token before. The key
    of position j is the LAST code of token j - 1, the BEFORE code of token j - 2 and a 0. Its value is the COPIED code
    of token j. For the tokens ``a b c d``::

        position       0       1            2            3
        key      [0, 0, 1]  [a, 0, 0]   [b, a, 0]   [c, b, 0]
        value          0       b            c            d

    Position 0 is the sink. The 1 in its key selects the sink's score, the last number of the query; its value is zero.
    The result equals that of ``InductionHead.forward``, in fewer operations.
    """

    def __init__(self, head: InductionHead, rows: int) -> None:
        self._head, self._lengths = head, [0] * rows
        self._keys = self._values = self._sinks = head.sharpness.new_zeros(rows, 0, 0)
        self._before = head.sharpness.new_zeros(rows, 1, head.rank)
        self._tokens = torch.zeros(rows, 0, dtype=torch.int64, device=self._keys.device)

    @torch.inference_mode()
    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: BaseHidden = None, nodes: Tensor | None = None
    ) -> None:
        head, (rows, new), rank = self._head, tokens.shape, self._head.rank
        if max(self._lengths) + new + 2 > self._keys.shape[1]:
            capacity, known = 2 * (max(self._lengths) + new) + INITIAL_ROOM, self._keys.shape[1]
            keys, values = (self._keys.new_zeros(rows, capacity, size) for size in (2 * rank + 1, rank))
            keys[:, 0, -1], ids = 1.0, self._tokens.new_zeros(rows, capacity)
            if known:
                keys[:, :known], values[:, :known], ids[:, :known] = self._keys, self._values, self._tokens
            self._keys, self._values, self._tokens = keys, values, ids
        codes, (one, two) = head.codes(tokens), head.sharpness / rank
        # Tokens beyond a row's count are written behind its new length, and the next tokens overwrite them.
        at: list[tuple[Any, Any]]
        if rows == 1:  # writing to a slice is faster than by an index
            start = self._lengths[0]
            at = [(0, slice(start + n, start + n + new)) for n in range(3)]
        else:
            row = torch.arange(rows, device=tokens.device)[:, None]
            first = on_device(self._lengths, tokens.device)[:, None] + torch.arange(new, device=tokens.device)
            at = [(row, first + n) for n in range(3)]
        self._keys[(*at[1], slice(rank))] = codes[..., LAST, :] * one
        self._keys[(*at[2], slice(rank, -1))] = codes[..., BEFORE, :] * two
        self._values[at[0]] = codes[..., COPIED, :]
        self._tokens[at[0]] = tokens
        self._values[:, 0] = 0.0
        self._before = last_valid(codes[..., None, BEFORE, :], counts, self._before)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._keys, self._values, self._before, self._tokens = (
            take_rows(t, rows) for t in (self._keys, self._values, self._before, self._tokens)
        )

    def rollback(self, lengths: list[int]) -> None:
        self._lengths = list(lengths)
        if max(lengths):
            last = last_valid(self._tokens, lengths, self._tokens[:, 0])
            self._before = self._head.codes(last)[:, None, BEFORE]

    def start(self, states: Tensor) -> None:
        """Start a tree whose level i (from 0) has the sink's score of ``states[:, i]`` ([B, n, D]); later levels use
        the last one."""
        self._sinks, self._above, self._level = self._head.sink(states), self._before, 0
        self._mask: Tensor | None = None
        if len(self._lengths) > 1:
            positions = torch.arange(max(self._lengths), device=states.device)
            padded = (positions >= on_device(self._lengths, states.device)[:, None]) & (positions > 0)
            self._mask = torch.where(padded, -torch.inf, 0.0).to(self._keys.dtype)[:, None]

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the copied code that predicts the children of each of a level's F nodes, [B, F, r]. ``parents`` [B, F]
        int64 are indices on the level above; 0 for the root."""
        codes, level, total = self._head.codes(tokens), min(self._level, self._sinks.shape[1] - 1), max(self._lengths)
        before = self._above.gather(1, parents[..., None].expand(-1, -1, self._above.shape[-1]))
        sink = self._sinks[:, level, None].expand(-1, tokens.shape[1], -1)
        scores = torch.bmm(torch.cat([codes[..., LAST, :], before, sink], -1), self._keys[:, :total].transpose(1, 2))
        if self._mask is not None:
            scores = scores + self._mask
        self._above, self._level = codes[..., BEFORE, :], self._level + 1
        return torch.bmm(scores.softmax(-1), self._values[:, :total])
