"""Settings of heads whose attention layers see only the latest tokens (a sliding window).

Beyond the length of the rows that a head was trained on, acceptance drops. A window keeps every distance between query
and key within the trained ones, and it bounds the memory and the time of drafting. A query sees as many keys as the
window has tokens, its own included, by position as in serving engines. Training and drafting apply the same rule. The
draft positions of an anchor always see each other, as far as the head allows. The induction head has no window.
"""

from dataclasses import field, replace
from typing import Annotated

from pydantic import Field

from drafthead.errors import UserError
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.settings.schema import settings

SHORTEST_WINDOW = 2  # tokens; of fewer, a query would not see the token before it


@settings(kw_only=True)
class WindowConfig(DraftHeadConfig):
    """Base class of the settings of heads that can have a sliding window."""

    window: Annotated[int, Field(ge=SHORTEST_WINDOW)] | None = None
    """Tokens that a query of the head's attention layers sees, its own included (a sliding window). With null, all. It
    must be above ``num_draft_tokens``."""
    full_layers: list[int] = field(default_factory=list)
    """Layers of the head, 0 is the first, that see all tokens despite ``window``."""

    def __post_init__(self) -> None:
        count = self.attention_layers
        if self.window is not None and self.window <= self.num_draft_tokens:
            what = f"head.window must be above head.num_draft_tokens={self.num_draft_tokens}"
            raise ValueError(f"{what}, got {self.window}")
        if not all(0 <= layer < count for layer in self.full_layers):
            raise ValueError(f"head.full_layers must be in [0, {count - 1}], got {self.full_layers}")
        if self.full_layers and self.window is None:
            raise ValueError("head.full_layers needs head.window; without a window, all layers see all tokens")

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention to the context."""
        return 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None: the layer sees all tokens."""
        layers = range(self.attention_layers)
        return tuple(None if layer in self.full_layers else self.window for layer in layers)


def with_window(drafter: Drafter, window: int) -> DraftHead:
    """Return a head with the weights of ``drafter``, whose layers see only the latest ``window`` tokens when it drafts.
    Reject drafters without such layers, and heads that were trained with a window."""
    settings = drafter.config if isinstance(drafter, DraftHead) else None
    if not isinstance(drafter, DraftHead) or not isinstance(settings, WindowConfig):
        kind = type(drafter).__name__ if settings is None else settings.head_type
        raise UserError(f"window={window} is for heads whose layers attend (eagle3, dspark), not {kind}; leave it out")
    if settings.window is not None:
        what = f"window={window} is for heads trained without one, but this head has head.window={settings.window}"
        raise UserError(f"{what}; leave it out")
    try:
        config = replace(settings, window=window)
    except ValueError as error:
        raise UserError(str(error).replace("head.window", "window")) from None
    reduced = drafter.d2t if len(drafter.d2t) < drafter.base.vocab_size else None
    head = config.build(drafter.base, reduced, start=False)
    head.load_state_dict(drafter.state_dict(), assign=True)
    head.tree, head.batch_trees, head.tree_costs = drafter.tree, drafter.batch_trees, drafter.tree_costs
    head.prefers_cost = drafter.prefers_cost
    return head.eval()
