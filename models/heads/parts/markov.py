"""The table of a Markov correction: a low-rank code of the token before, which is added to a head's logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.models.base.base_model import BaseModel


class TiedMarkov(nn.Linear):
    """The Markov table as a projection of the base's embedding at unit RMS; an inference copy stores the table."""

    def __init__(self, base: BaseModel, rank: int) -> None:
        super().__init__(base.hidden_size, rank, bias=False, device=base.device)
        self._embedding = (base.embedding,)  # the base's: in a tuple, so that it is not a parameter of this module

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] int64 to [..., r]."""
        embedded = F.embedding(tokens, self._embedding[0]).to(self.weight.dtype)
        return super().forward(F.rms_norm(embedded, embedded.shape[-1:]))

    @torch.no_grad()
    def inference(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """Return the table of all ids, [V, r]."""
        ids = torch.arange(len(self._embedding[0]), device=self.weight.device)
        table = torch.cat([self(chunk) for chunk in torch.split(ids, 8192)])
        return nn.Embedding(len(table), table.shape[1], _weight=table)
