"""Batches of one phase: which rows a step trains on, and their features."""

from collections.abc import Mapping

import datasets
import numpy as np

from drafthead.data.contracts import Features, FeatureSpec, TrainBatch
from drafthead.data.feature_cache import FeatureCache
from drafthead.data.packing import collate
from drafthead.models.base import BaseModel
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora import Corpora

UNSEEN_MOST = 64
"""Rows of text that a tuned base is measured on, at most."""


class PhaseData:
    """Rows with features. A step's rows depend on nothing but the seed and the step, so resuming needs no position."""

    def __init__(self, rows: datasets.Dataset, base: BaseModel, spec: FeatureSpec, cache: FeatureCache | None) -> None:
        self.rows, self.base, self.spec, self.cache = rows, base, spec, cache
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def load(self, numbers: list[int]) -> tuple[TrainBatch, Features]:
        """The rows ``numbers`` and their features, on the base's device."""
        batch = collate(self.rows, numbers)
        if self.cache is None:
            features = self.base.features(batch, self.spec)
        else:
            values = self.cache.read(numbers).to(self.base.device)
            features = Features.split(values, self.base.hidden_size)
        return batch.to(self.base.device), features

    def numbers(self, seed: int, first: int, count: int) -> list[int]:
        """Row numbers ``first`` to ``first + count`` of the endless stream of reshuffled epochs."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, len(self.rows))
            if (seed, epoch) not in self._orders:
                self._orders = {(seed, epoch): np.random.default_rng([seed, epoch]).permutation(len(self.rows))}
            found.append(int(self._orders[(seed, epoch)][place]))
        return found


def open_phase(corpora: Corpora, name: str, phase: PhaseConfig, spec: FeatureSpec) -> PhaseData:
    """Rows of a phase's corpus, with cached features when the phase asks for them."""
    if phase.corpus == "text":
        rows, prompts = corpora.text_rows(phase.row_length), None
        if phase.train_base:
            rows = rows.select(range(len(rows) - _kept_aside(rows)))
    else:
        rows, prompts = corpora.generation_rows(phase.row_length, held_out=False)
    cache = None
    if phase.cached:
        cache = corpora.cached_features(rows, name, spec, prompts)
    return PhaseData(rows, corpora.base, spec, cache)


def open_held_out(
    corpora: Corpora, row_length: int, spec: FeatureSpec, cached: bool, reader: BaseModel | None = None
) -> PhaseData:
    """The held-out answers, with features of the corpora's base, on disk if ``cached`` and else computed anew.

    Another ``reader``, such as the tuned base, always reads them anew.
    """
    rows, prompts = corpora.generation_rows(row_length, held_out=True)
    if reader is not None and reader is not corpora.base:
        return PhaseData(rows, reader, spec, None)
    cache = corpora.cached_features(rows, "held-out", spec, prompts) if cached else None
    return PhaseData(rows, corpora.base, spec, cache)


def unseen_text(corpora: Corpora, phases: Mapping[str, PhaseConfig]) -> datasets.Dataset | None:
    """Rows of the text corpus that no phase has trained the base on; None for a run without text.

    What a phase trains the heads alone on may be among them: the base has not learnt it.
    """
    reading = [p for p in phases.values() if p.corpus == "text"]
    tuning = [p for p in reading if p.train_base]
    if not reading:
        return None
    rows = corpora.text_rows((tuning or reading)[0].row_length)
    return rows.select(range(len(rows) - (_kept_aside(rows) if tuning else min(len(rows), UNSEEN_MOST)), len(rows)))


def _kept_aside(rows: datasets.Dataset) -> int:
    """How many of the last text rows phases with ``train_base`` leave out: a tenth."""
    return min(UNSEEN_MOST, max(1, len(rows) // 10))
