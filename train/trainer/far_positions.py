"""Rows whose positions skip ahead, so that short rows train the attention of long contexts (PoSE, 2309.10400).

A document's positions skip a random distance before a random token. Its later tokens then see the earlier ones from far
away, as in a document of up to ``span`` tokens::

    token       a b c d e
    position    0 1 2 3 4
    with skip   0 1 7 8 9     a cut before c, and a skip of 5

Only the head reads these positions: the base's hidden states are those of the real ones. An equal offset of all
positions would train nothing, because rotary attention depends on distances alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from drafthead.data.batch import NO_DOCUMENT, TrainBatch
from drafthead.errors import UserError
from drafthead.models.heads.parts.attention_layer import head_rope
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.trainer.batches import Batch

BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose angles depend on the longest position


def check_span(name: str, head: DraftHead, span: int) -> None:
    """Reject a ``phases.NAME.position_span`` that the head's rotary embedding cannot read."""
    rope, longest = head_rope(head.base).get("rope_type", "default"), head.base.max_context
    if rope in BY_LENGTH:
        what = f"phases.{name}.position_span needs rotations that depend on distances alone, but those of"
        raise UserError(f"{what} {head.base.name} ({rope}) depend on the longest position; leave it out")
    if span > longest:
        what = f"phases.{name}.position_span={span} exceeds the context of {head.base.name}"
        raise UserError(f"{what}; give up to {longest}")


def spread(batches: Iterable[Batch], span: int) -> Iterator[Batch]:
    for batch, states in batches:
        yield with_skips(batch, span), states


def with_skips(batch: TrainBatch, span: int) -> TrainBatch:
    """Return the batch with one skip per document, up to the position ``span`` - 1. Skips come from torch's random
    numbers, which checkpoints hold."""
    positions, real = batch.position_ids, batch.document_ids != NO_DOCUMENT
    # Number of each token's document in the batch; padding gets any number, and is not changed.
    documents = ((positions == 0) & real).flatten().cumsum(0).clamp_(min=1) - 1
    lengths = torch.bincount(documents[real.flatten()], minlength=int(documents.max()) + 1)
    cuts = 1 + (torch.rand(len(lengths)) * (lengths - 1)).long()
    skips = (torch.rand(len(lengths)) * (span - lengths + 1).clamp(min=1)).long()
    after = (positions.flatten() >= cuts[documents]) & real.flatten()
    return replace(batch, position_ids=positions + torch.where(after, skips[documents], 0).view(positions.shape))
