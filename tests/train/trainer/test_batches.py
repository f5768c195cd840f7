"""Rows are read one micro-batch ahead."""

import threading

import numpy as np
import torch

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import pack
from drafthead.train.trainer.batches import PhaseData
from support import TinyBase


def test_the_next_rows_are_read_meanwhile_and_no_more(tiny_base: TinyBase) -> None:
    documents = Documents.of([np.full(16, n + 3, np.int32) for n in range(6)])
    data = PhaseData(pack(documents, 16, split=False), tiny_base(), HiddenStatesSpec())
    original_read, asked, done = data.read, [], threading.Semaphore(0)

    def watched(numbers: list[int]) -> tuple[TrainBatch, torch.Tensor | None]:
        batch = original_read(numbers)
        asked.append((numbers[0], threading.current_thread() is threading.main_thread()))
        done.release()
        return batch

    data.read = watched  # type: ignore[method-assign]
    stream = data.stream([n] for n in range(5))
    next(stream)
    for _ in range(2):
        assert done.acquire(timeout=10)
    assert asked == [(0, False), (1, False)]
    stream.close()
