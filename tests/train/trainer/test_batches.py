"""Rows are read one micro-batch ahead."""

import threading

import datasets
import torch

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.train.trainer.batches import PhaseData
from support import TinyBase


def test_the_next_rows_are_read_meanwhile_and_no_more(tiny_base: TinyBase) -> None:
    rows = {
        "input_ids": [[n + 3] * 16 for n in range(6)],
        "position_ids": [list(range(16))] * 6,
        "document_ids": [[0] * 16] * 6,
        "loss_mask": [[True] * 16] * 6,
    }
    data = PhaseData(datasets.Dataset.from_dict(rows), tiny_base(), HiddenStatesSpec())
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
