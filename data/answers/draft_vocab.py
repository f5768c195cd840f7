"""The reduced draft vocabulary, chosen by token counts. V target vocabulary, W draft vocabulary."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from drafthead.errors import UserError

SMALLEST = 16  # ids


def draft_vocabulary(counts: npt.NDArray[np.integer], size: int, always: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return W token ids, [W] int64 ascending: ``always`` and the most frequent others by ``counts`` [V], up to
    ``size`` in all. A head that scores W ids instead of V reads only W / V of its output matrix. Other ids are never
    drafted, so the output stays exact, but acceptance can decrease. Among equally frequent ids the lower one is taken.
    If too few ids have a count above 0, W is less than ``size``, but at least ``SMALLEST``. If ``always`` has more than
    ``size`` ids, raise a ``UserError``."""
    required = np.unique(np.fromiter(always, dtype=np.int64))
    if len(required) > size:
        raise UserError(f"draft_vocab_size={size} cannot hold the {len(required)} required ids; raise draft_vocab_size")
    ranked = counts.astype(np.int64)
    ranked[required] = np.iinfo(np.int64).max
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return np.sort(chosen[: max(SMALLEST, int((ranked > 0).sum()))])
