"""The vocabulary projections of a head's draft positions, and the table of its Markov correction.

Shape legend: B batch, K draft positions, D width, V target vocabulary, W draft vocabulary, r rank.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parts import BaseParts
from drafthead.models.kernels.linear import PackedCopies, inference_linear


class DraftLMHeads(nn.Module):
    """Projections of the draft positions to the draft vocabulary: ``count`` trained ones, or the base's frozen one.
    Position k (0-based) uses projection k, or the last one."""

    def __init__(self, target_lm_head: LMHead, count: int, draft_dtype: torch.dtype | None, scaled: bool) -> None:
        """Create ``count`` trained projections, which start as ``target_lm_head``; with 0, all positions share it.
        ``draft_dtype`` is that of the packed copies for drafting (None: the trained dtype). With ``scaled`` false,
        ``logits`` applies no scale and soft-cap, because the session first adds other terms."""
        super().__init__()
        self._draft_dtype, self._scaled = draft_dtype, scaled
        weight = target_lm_head.weight.detach().float()
        self.weights = nn.ParameterList(nn.Parameter(weight.clone()) for _ in range(count))
        self._target_lm_head = target_lm_head
        self.packed = PackedCopies()

    def head(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based) for the loss."""
        if not len(self.weights):
            return self._target_lm_head
        return replace(self._target_lm_head, weight=self.weights[min(k, len(self.weights) - 1)])

    def logits(self, hidden: Tensor, k: int | None = 0) -> Tensor:
        """Return the logits of draft position k (0-based), [..., D] -> [..., W]; with k None, of positions 0 to K - 1,
        [B, K, D] -> [B, K, W]."""
        if k is None and len(self.weights) > 1:
            return torch.stack([self.logits(hidden[:, n], n) for n in range(hidden.shape[1])], 1)
        k = min(k or 0, max(0, len(self.weights) - 1))  # None is left if all positions share one projection
        weight = self.head(k).weight
        linear = self.packed.get(k, lambda: inference_linear(weight, dtype=self._draft_dtype))
        product: Tensor = linear(hidden.to(weight.dtype))
        return self._target_lm_head.scale_and_cap(product) if self._scaled else product


class TiedMarkov(nn.Linear):
    """The Markov correction's input: a trained projection of the base's embedding, scaled to RMS 1, to r numbers.
    Drafting uses the table [V, r] of all tokens, computed once."""

    def __init__(self, base: BaseParts, rank: int) -> None:
        super().__init__(base.hidden_size, rank, bias=False, device=base.device)
        self._embedding = (base.embedding,)  # the base's: in a tuple, so that it is not a parameter of this module

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self._embedding[0]).to(self.weight.dtype)
        return super().forward(F.rms_norm(embedded, embedded.shape[-1:]))

    @torch.no_grad()
    def inference(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """Return the outputs for all V token ids as an embedding."""
        ids = torch.arange(len(self._embedding[0]), device=self.weight.device)
        table = torch.cat([self(chunk) for chunk in torch.split(ids, 8192)])
        return nn.Embedding(len(table), table.shape[1], _weight=table)
