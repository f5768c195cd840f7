"""Whether answers came from the base: how many of their tokens it would choose itself."""

from collections.abc import Iterable

import torch

from drafthead.data.contracts import Ratio
from drafthead.data.generations import Generation
from drafthead.models.base import BaseModel


@torch.inference_mode()
def agreement(base: BaseModel, answers: Iterable[Generation]) -> float:
    """Share of the answers' tokens, in [0, 1], that are the base's likeliest after the tokens before them.

    Of greedy answers by the same weights all are, but for ties and rounding (bfloat16, a quantised server).
    """
    agreed = tokens = 0
    for answer in answers:
        ids = torch.from_numpy(answer.input_ids).long().to(base.device)
        hidden = base.read(ids[None, :-1], base.new_cache(len(ids) - 1))[0, answer.boundary - 1 :]
        agreed += int((base.logits(hidden).argmax(-1) == ids[answer.boundary :]).sum())
        tokens += len(ids) - answer.boundary
    return Ratio(agreed, tokens).value
