"""What benchmarks/train_step.py measures with, and the rows that it measures on."""

from pathlib import Path
from time import perf_counter

import datasets
import numpy as np
import torch
from loss_memory import PeakMemory

from drafthead.data.answers.hidden_states import HiddenStateCache
from drafthead.data.text.chat import Document
from drafthead.data.text.packing import pack
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.contract import DraftHead
from drafthead.train.config import PhaseConfig

PARTS = ("data", "base", "head", "optimiser")
ROWS = 32
"""Different rows, at least; steps repeat them."""


class Memory:
    """Peak memory since the last ``restart``, bytes: allocated on a GPU; on a CPU resident, above what was before.

    On a CPU a thread watches it while in the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._watch = PeakMemory()
        self._before = PeakMemory.resident()

    def __enter__(self) -> "Memory":
        if self.device.type != "cuda":
            self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type != "cuda":
            self._watch.__exit__(*error)

    def restart(self) -> None:
        """Forget the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._watch.peak = 0

    def peak(self) -> int:
        """The highest since."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(self._watch.peak, PeakMemory.resident()) - self._before


class Clock:
    """Seconds and peak memory between marks; waits for the device at each."""

    def __init__(self, base: BaseModel, memory: Memory) -> None:
        self.base, self.memory = base, memory
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.peaks = dict.fromkeys(PARTS, 0)
        self._last = 0.0

    def start(self) -> None:
        """Begin after whatever went before."""
        self.base.synchronise()
        self.memory.restart()
        self._last = perf_counter()

    def mark(self, part: str, waited: float = 0.0) -> None:
        """All since the last mark was ``part``, but for ``waited`` seconds that were for data."""
        self.base.synchronise()
        now = perf_counter()
        self.seconds[part] += now - self._last - waited
        self.seconds["data"] += waited
        self.peaks[part] = max(self.peaks[part], self.memory.peak())
        self.start()


def random_rows(phase: PhaseConfig, vocabulary: int) -> datasets.Dataset:
    """Full rows of random tokens, one document each, all of them trained."""
    random = np.random.default_rng(0)
    count = max(ROWS, phase.micro_batch_size * phase.grad_accum_steps)
    length = phase.seq_len
    documents = (
        Document(random.integers(0, vocabulary, length, dtype=np.int32), np.ones(length, dtype=np.bool_))
        for _ in range(count)
    )
    return pack(documents, length, split=False)


def random_cache(folder: Path, rows: datasets.Dataset, head: DraftHead) -> HiddenStateCache:
    """A cache of random features for ``rows``."""
    length, width = len(rows[0]["input_ids"]), head.base.hidden_size * (1 + len(head.spec.layers))
    dtype = "bfloat16" if head.base.dtype == torch.bfloat16 else "float16"
    cache = HiddenStateCache.create(folder, len(rows), length, width, dtype, {"benchmark": "train_step"})
    for row in cache.missing_rows():
        cache.write([row], torch.randn(1, length, width))
    return cache
