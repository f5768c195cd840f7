"""The reduced draft vocabulary, chosen by token counts. V target vocabulary, W draft vocabulary."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from drafthead.errors import UserError

SMALLEST = 16
"""Smallest draft vocabulary, in ids."""


def draft_vocabulary(counts: npt.NDArray[np.integer], size: int, always: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return up to ``size`` token ids: those in ``always``, and the most frequent others.

    A head that scores W ids instead of V reads only W / V of its output matrix. Ids outside of the W are never drafted.
    The output therefore stays exact, but acceptance can decrease. Among equally frequent ids the lower id is taken.

    Args:
        counts: [V] occurrences of each id, for instance in the base's own answers.
        size: W. A ``UserError`` is raised if ``always`` has more ids.
        always: ids to include whatever their count is.

    Returns:
        [W] int64, ascending; fewer than ``size`` ids, but at least ``SMALLEST``, if too few have a count above 0.
    """
    required = np.unique(np.fromiter(always, dtype=np.int64))
    if len(required) > size:
        raise UserError(f"draft_vocab_size={size} cannot hold the {len(required)} required ids; raise draft_vocab_size")
    ranked = counts.astype(np.int64)
    ranked[required] = np.iinfo(np.int64).max
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return np.sort(chosen[: max(SMALLEST, int((ranked > 0).sum()))])
