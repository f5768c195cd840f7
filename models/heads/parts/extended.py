"""A saved head with more draft ids, for answers with tokens that it could not draft, or with more draft positions."""

from dataclasses import replace

import torch
from torch import Tensor

from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig


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


def with_settings(head: DraftHead, config: DraftHeadConfig) -> DraftHead:
    """Return ``head`` with the settings ``config``, which differ in settings that no weight depends on, or have more
    draft positions.

    Former positions keep their weights. A weight with a row per position repeats its last row, and blocks of further
    positions are those of a new head. Train the head: its former positions may attend to the further ones.
    """
    d2t = None if config.draft_vocab_size is None else head.d2t
    deep, weights = config.build(head.base, d2t, start=not config.starts_from_layers), head.state_dict()
    for name, value in deep.state_dict().items():
        if (known := weights.get(name)) is not None:
            value.copy_(torch.cat([known, known[-1:].expand(len(value) - len(known), *known.shape[1:])]))
    return deep.eval()
