"""Updates that would do harm are skipped, counted, and end the run when they become many."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from drafthead.train.config import HISTORY, LossSpikeConfig


class LossSpikeFilter:
    """Judges the steps of one phase. Every process judges the same reduced numbers, so all of them agree."""

    def __init__(self, config: LossSpikeConfig, losses: Iterable[float | None] = ()) -> None:
        """``losses`` is what an earlier guard of the phase remembered."""
        self.config = config
        self._losses: deque[float | None] = deque(losses, maxlen=config.window)

    @property
    def losses(self) -> list[float | None]:
        """Losses of the latest steps, None for a skipped one: all that a resumed run needs."""
        return list(self._losses)

    @property
    def skipped(self) -> int:
        """Skipped updates among the latest steps."""
        return sum(loss is None for loss in self._losses)

    @property
    def too_many(self) -> bool:
        """Whether more were skipped than the recipe allows."""
        return self.skipped > self.config.limit

    def skip_reason(self, loss: float, grad_norm: float) -> str | None:
        """Why the step's update must be skipped; None when it may be done. Call it once a step.

        Args:
            loss: mean over the trained tokens of all processes.
            grad_norm: of its gradient, before clipping.
        """
        found = None
        usual = [kept for kept in self._losses if kept is not None]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            found = f"the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}"
        elif self.config.spike and len(usual) >= HISTORY and loss > self.config.spike * median(usual) > 0:
            found = f"the loss is {loss:.4g}, over {self.config.spike:g} times the median of {median(usual):.4g}"
        self._losses.append(loss if found is None else None)
        return found
