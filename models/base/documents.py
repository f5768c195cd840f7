"""Documents of packed rows, arranged as rows of their own for bases with recurrent layers.

The state of a recurrent layer would pass from a document of a packed row to the next one. Therefore each document
becomes a row, padded at its end. Layers read from left to right, so the padding changes nothing before it. Documents of
similar lengths form a group, which is one pass.

Shape legend: B rows, T tokens of a row, N = B * T tokens of the batch, R documents of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.models.kernels.packed import PackedMask

SHORTEST = 0.75  # of a group's longest document: at most a quarter of a pass is padding


@dataclass(frozen=True)
class DocumentRows:
    """Documents that a pass reads, in host memory."""

    tokens: Tensor  # [R, T] int64 number of each token among the N of the batch; padding repeats a document's last one
    document_ids: Tensor  # [R, T] int64: 1, and 0 for padding


def document_rows(document_ids: Tensor) -> list[DocumentRows]:
    """Return the documents of packed rows [B, T] as groups of rows."""
    starts = PackedMask.of(document_ids).starts
    lengths = starts.diff()
    order = lengths.argsort(descending=True, stable=True).tolist()
    groups, begin = [], 0
    while begin < len(order):
        longest, end = int(lengths[order[begin]]), begin + 1
        while end < len(order) and lengths[order[end]] >= SHORTEST * longest:
            end += 1
        chosen, offsets = torch.tensor(order[begin:end]), torch.arange(longest)
        inside = offsets < lengths[chosen, None]
        tokens = starts[chosen, None] + torch.minimum(offsets, lengths[chosen, None] - 1)
        groups.append(DocumentRows(tokens, inside.long()))
        begin = end
    return groups


def read_by_document(
    run: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]], ids: Tensor, positions: Tensor, document_ids: Tensor
) -> list[Tensor]:
    """Call ``run`` with the token ids, positions and document ids of rows of one document each; return its outputs
    [..., D] as outputs [B, T, D] of the packed rows, with gradients."""
    groups = document_rows(document_ids)
    indices = [group.tokens.to(ids.device, non_blocking=True) for group in groups]
    parts = [
        run(ids.flatten()[index], positions.flatten()[index], group.document_ids)
        for group, index in zip(groups, indices, strict=True)
    ]
    slots = torch.empty(ids.numel(), dtype=torch.int64)  # of each token of the batch among the groups' tokens
    inside = torch.cat([group.document_ids.flatten() for group in groups]).nonzero()[:, 0]
    slots[torch.cat([group.tokens.flatten() for group in groups])[inside]] = inside
    slots = slots.to(ids.device, non_blocking=True)
    joined = (torch.cat([output.flatten(0, 1) for output in outputs]) for outputs in zip(*parts, strict=True))
    return [output[slots].view(*ids.shape, -1) for output in joined]
