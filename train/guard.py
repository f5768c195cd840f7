"""Updates that would do harm are skipped, counted, and end the run when they become many."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from drafthead.data.errors import UserError

HISTORY = 16
"""Losses before the median says anything: until then only what is not finite is skipped."""


@dataclass(kw_only=True)
class GuardConfig:
    """Which updates are skipped, and how many may be."""

    spike: float = 5.0
    """An update is skipped when its loss exceeds this many times the median of the latest ones; 0: only when the loss
    or its gradient is not finite."""
    window: int = 100
    """Latest steps of the phase that the median and the count are taken over."""
    limit: int = 10
    """Updates that may be skipped among them; one more ends the run, with the weights of the last good update."""

    def __post_init__(self) -> None:
        if self.spike != 0 and not 1 < self.spike < math.inf:
            raise UserError(f"guard.spike must be > 1, or 0 to skip nothing finite, got {self.spike}")
        if self.window < HISTORY:
            raise UserError(f"guard.window must be at least {HISTORY}, got {self.window}")
        if not 0 <= self.limit < self.window:
            raise UserError(f"guard.limit must be in [0, guard.window), got {self.limit}")


class Guard:
    """Judges the steps of one phase. Every process judges the same reduced numbers, so all of them agree."""

    def __init__(self, config: GuardConfig, losses: Iterable[float | None] = ()) -> None:
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

    def objection(self, loss: float, grad_norm: float) -> str | None:
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
