"""Bootstrap intervals."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def bootstrap_interval(
    rows: Floats, statistic: Callable[[Floats], Floats], seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """Return the bounds of the 95 % percentile bootstrap interval of a statistic of ``rows`` [rows, columns]. Whole
    rows are drawn. ``statistic`` gets the column sums of every resample, [resamples, columns], and returns one value
    per resample. With fewer than two rows, both bounds are NaN."""
    if len(rows) < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(len(rows), size=(resamples, len(rows)))
    low, high = np.percentile(statistic(rows[drawn].sum(1)), (2.5, 97.5))
    return float(low), float(high)
