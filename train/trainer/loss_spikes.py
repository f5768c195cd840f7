"""Detection of harmful updates: losses that are not finite, or far above recent losses."""

import math
from statistics import median
from typing import Annotated

from pydantic import Field

from drafthead.settings.schema import require, settings

HISTORY = 16  # losses needed to use their median; before, only updates that are not finite are skipped


@settings(kw_only=True)
class LossSpikeConfig:
    """Limits on the updates that a phase may skip."""

    spike: float = 5.0
    """Skip an update if its loss exceeds this multiple of the recent median. 0 turns this off. An update whose loss or
    gradient is not finite is always skipped."""
    window: Annotated[int, Field(ge=HISTORY)] = 100
    """Number of latest steps over which the median is taken and skipped updates are counted."""
    limit: int = 10
    """Largest number of updates that may be skipped within the window. One more ends the run with an error; earlier
    checkpoints stay, but no new one is saved."""

    def __post_init__(self) -> None:
        require(self.spike == 0 or 1 < self.spike < math.inf, "spike", "> 1, or 0 to skip nothing finite", self.spike)
        require(0 <= self.limit < self.window, "limit", "in [0, loss_spikes.window)", self.limit)


def skip_reason(config: LossSpikeConfig, losses: list[float | None], loss: float, grad_norm: float) -> str | None:
    """Return the reason to skip the update of a training step, or None to apply it, and add the step to ``losses``.
    These are the losses of the phase's latest ``config.window`` steps, oldest first, with None for a skipped update.
    ``loss`` is the mean per trained token, and ``grad_norm`` the norm before clipping. Both are reduced over the
    processes, so all processes decide alike."""
    reason = None
    recent = [previous for previous in losses if previous is not None]
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        reason = f"the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}"
    elif config.spike and len(recent) >= HISTORY and loss > config.spike * median(recent) > 0:
        reason = f"the loss is {loss:.4g}, over {config.spike:g} times the median of {median(recent):.4g}"
    # A skipped loss must not raise the median, or a diverging run would be accepted step by step.
    losses.append(loss if reason is None else None)
    del losses[: -config.window]
    return reason
