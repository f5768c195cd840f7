# The head of docs/tutorials/new_head.md. To use it: cp examples/custom_head.py models/heads/my_head.py, write the
# YAML that the tutorial shows, and train: drafthead train head=my_head phases=cpu data=smollm2 name=my_head
# Time and result: the tutorial's; on a random tiny model the whole run takes under a minute (24 November 2026).

"""One residual MLP per draft position, over the base's final hidden state."""

from torch import Tensor, nn

from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import Attend, DraftHead, DraftHeadConfig, States
from drafthead.models.heads.parts.head_session import HeadSession
from drafthead.settings.schema import settings


@settings(kw_only=True)
class MyHeadConfig(DraftHeadConfig):
    """Settings of :class:`MyHead`."""

    width: int = 512
    """Hidden width of the MLPs."""


class MyHead(DraftHead):
    """One residual MLP per draft position; the base's output projection, frozen, serves all of them."""

    config: MyHeadConfig
    session_class = HeadSession
    reads_drafts = False

    def __init__(self, config: MyHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        d, w = base.hidden_size, config.width
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(d, w), nn.SiLU(), nn.Linear(w, d)) for _ in range(config.num_draft_tokens)
        ).to(base.device)
        self.projections = self.lm_heads(0)

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        """Return what the projection of position k reads, [..., D], and the state for the next position."""
        (h,) = states
        return h + self.mlps[k](h), states
