"""A saved head with more draft ids, for answers with tokens that it could not draft."""

from dataclasses import replace

import torch
from torch import Tensor

from drafthead.models.heads.parts.draft_head import DraftHead


def with_more_ids(head: DraftHead, ids: Tensor) -> DraftHead:
    """Return ``head`` with the target ids ``ids`` [n] int64 added to its draft vocabulary, or ``head`` itself if it has
    all of them.

    Weights with a row per draft id keep the rows of the former ids; other rows are those of a new head. Its tree is
    left out, because it was chosen for fewer candidates.
    """
    known = head.d2t.cpu()
    added = ids[~torch.isin(ids, known)]
    if not len(added) or len(known) == head.vocab_size:
        return head
    d2t = torch.sort(torch.cat([known, added])).values
    wide = replace(head.config, draft_vocab_size=len(d2t)).build(head.base, d2t)
    rows = torch.searchsorted(d2t, known)
    former = head.state_dict()
    weights = {name: value for name, value in wide.state_dict().items() if name != "d2t"}
    for name, value in weights.items():
        if value.shape == former[name].shape:
            value.copy_(former[name])
        else:
            value[rows.to(value.device)] = former[name]
    if wide.induction is not None and wide.low_rank is not None:
        # A new head has other codes.
        new = (~torch.isin(d2t, known)).to(head.d2t.device)
        copied = wide.induction.projection(wide.d2t[new], wide.scaling.scale).detach()
        wide.low_rank.weight.data[new, head.config.markov_rank :] = copied
    return wide.eval()
