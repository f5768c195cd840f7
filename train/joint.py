"""After phases that trained the base along: the tuned base, and what tuning cost it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from drafthead.data.batch import TrainBatch
from drafthead.data.text.packing import collate
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.metrics.base_quality import Fidelity, compare_bases, judge, quality_table
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import ADAPTER
from drafthead.models.heads.common.contract import DraftHead
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.trainer.batches import unseen_text

QUALITY = "quality.json"


def with_tuned_base(run: RunConfig, head: DraftHead, folder: Path) -> DraftHead:
    """Save ``head`` with its adapter into ``folder``, and load it as any user will: with the adapter merged."""
    head.save_pretrained(folder)
    tuned = BaseModel.load(replace(run.base, adapter=str(folder / ADAPTER)), head.base.device)
    return DraftHead.from_pretrained(folder, tuned)


def measure_quality(
    run: RunConfig, tuned: BaseModel, corpora: Corpora, folder: Path, display: Display
) -> dict[str, Any]:
    """Compare the tuned base with the corpora's untouched one on text and answers that tuning has not seen.

    The result is printed, and kept as ``quality.json`` in the run folder and beside the head.
    """
    rows = {"answers": corpora.generation_rows(run.answer_row_length, held_out=True)[0]}
    text = unseen_text(corpora, run.phases)
    if text is not None:
        rows = {"text": text, **rows}
    found: dict[str, Fidelity] = {k: compare_bases(corpora.base, tuned, _batches(r)) for k, r in rows.items()}
    quality = judge(found, run.gate)
    for place in (folder, folder / "head"):
        write_json(place / QUALITY, quality)
    display.console.print(quality_table(quality))
    return quality


def _batches(rows: datasets.Dataset) -> Iterator[TrainBatch]:
    for number in range(len(rows)):
        yield collate(rows, [number])


def check_gate(quality: dict[str, Any], folder: Path) -> None:
    """End a run whose base has gone too far; everything is saved by then.

    Raises:
        UserError: a limit of the recipe's gate is exceeded.
    """
    if not quality["passed"]:
        raise UserError(
            f"the quality gate failed: {'; '.join(quality['failures'])}. The head is saved in {folder / 'head'} and "
            "works, but its base is not what it was. Lower the learning rate or the steps of the phases with "
            "train_base, or head.heads_weight, and start over with resume=false; or move the gate's limits"
        )
