"""The rank of each token of an answer among a head's candidates."""

import numpy as np
import numpy.typing as npt
import torch

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.heads.parts.draft_head import DraftHead

WIDTH = 10  # candidates per draft position that a tree may use, as in Medusa
Ranks = npt.NDArray[np.int64]
"""[T, K]: rank (from 0) of the answer's token among the candidates for draft position k+1, in a step from position t;
-1 after the answer's end. A rank of at least the number of candidates means that the token is not among them."""


def answer_ranks(head: DraftHead, batch: TrainBatch, base_hidden: HiddenStates) -> list[Ranks]:
    """Return the ranks of each answer's tokens among the head's candidates.

    ``batch`` holds packed documents, each a prompt and an answer. Documents without a position where a step may start
    are left out. The first step drafts from the prompt's last position: the base's logits there give the first answer
    token, which belongs to the prefill.
    """
    ranks = head.candidate_ranks(batch, base_hidden, top=WIDTH).cpu()
    answers = []
    for row in range(ranks.shape[0]):
        documents, counts = torch.unique_consecutive(batch.document_ids[row].cpu(), return_counts=True)
        start = 0
        for document, length in zip(documents.tolist(), counts.tolist(), strict=True):
            span = slice(start, start + length)
            start += length
            document_ranks = ranks[row, span].numpy()
            drafted = np.flatnonzero(document_ranks[:, 0] >= 0)
            trained = np.flatnonzero(batch.loss_mask[row, span].cpu().numpy())
            first = max(0, int(trained[0]) - 1) if len(trained) else length
            if document >= 0 and len(drafted) and first <= drafted[-1]:
                answers.append(document_ranks[first : drafted[-1] + 1])
    return answers
