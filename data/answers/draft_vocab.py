"""The reduced draft vocabulary, chosen from token counts. V target vocabulary, W draft vocabulary."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from drafthead.data.utils.errors import UserError


def draft_vocabulary(counts: npt.NDArray[np.integer], size: int, always: Iterable[int]) -> npt.NDArray[np.int64]:
    """The ``size`` most frequent token ids, ``always`` among them.

    A head that scores W ids instead of V reads W / V of the projection; an id outside it is never drafted, so
    the output stays exact and only acceptance can suffer (see ``coverage``). Ties go to the lower id.

    ``counts`` [V]: occurrences of each id, for instance in the base's own answers; ``always``: ids to keep whatever
    their count, which are part of ``size``. Returns [W] int64, ascending; fewer than ``size`` if fewer were seen.
    """
    kept = np.unique(np.fromiter(always, dtype=np.int64))
    if len(kept) > size:
        raise UserError(f"draft vocabulary size {size} cannot hold the {len(kept)} ids to keep; raise it")
    by_count = np.argsort(-counts.astype(np.int64), kind="stable")
    frequent = by_count[counts[by_count] > 0]
    frequent = frequent[~np.isin(frequent, kept)][: size - len(kept)]
    return np.sort(np.concatenate([kept, frequent])).astype(np.int64)


def coverage(counts: npt.NDArray[np.integer], ids: npt.NDArray[np.integer]) -> float:
    """Share of the counted tokens whose id is among ``ids``, in [0, 1]; nan when nothing was counted."""
    total = int(counts.sum())
    return float(counts[ids].sum()) / total if total else float("nan")
