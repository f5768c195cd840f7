"""The attention that every base runs with: SDPA that never copies grouped keys and values, sinks and soft caps.

transformers' own ``sdpa`` path repeats the keys and values of grouped-query models for every masked pass, which
at batch 48 costs five times the attention itself (``docs/log.md``). What changes the result and is not known here is
an error: a base whose attention is more than this is refused when it is loaded.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, E head width, F width of values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from drafthead.data.utils.errors import UserError
from drafthead.models.token_tree import causal_mask

NAME = "drafthead"
_LENGTHS = "document_lengths"
"""Attribute of a mask: lengths of the documents of every row."""
HARMLESS = frozenset(
    (
        *("sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    )
)
"""Keywords that change nothing here: the mask, which we make, has the window, and every query sees causally."""
MAX_SCORES = 2**26
"""Scores that are held at once where they are computed one by one."""
_captured: list[Tensor] | None = None


@contextmanager
def captured_queries() -> Iterator[list[Tensor]]:
    """The rotated queries [B, heads, T, E] of every layer, in order, of the passes in this block."""
    global _captured
    _captured = []
    try:
        yield _captured
    finally:
        _captured = None


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, H, T, E] queries over [B, G, S, E] states; no mask means causal. [B, T, H, F].

    ``s_aux``: [H] a logit for each head that takes part in the softmax and has no value (a sink); ``softcap``: scores
    become ``softcap * tanh(score / softcap)``.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in HARMLESS]
    if unknown or is_causal is False:
        kind, what = getattr(getattr(module, "config", None), "model_type", type(module).__name__), "is_causal=False"
        raise UserError(
            f"the attention of {kind} uses {(unknown or [what])[0]!r}, which is not known here; choose another base"
        )
    if _captured is not None:
        _captured.append(query)
    if s_aux is not None or softcap is not None:
        return _explicit(query, key, value, attention_mask, dropout, scaling, s_aux, softcap).transpose(1, 2), None
    if (lengths := getattr(attention_mask, _LENGTHS, None)) is not None and key.shape[2] == query.shape[2]:
        return _per_document(module, query, key, value, lengths, dropout, scaling), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        # CUDA's fused kernels take grouped heads only without a mask; the copy is cheaper than their fallback.
        groups = query.shape[1] // key.shape[1]
        key, value, grouped = repeat_kv(key, groups), repeat_kv(value, groups), False
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2), None


def _per_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[list[int]],
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Causal attention within every document of packed rows [B, heads, T, E]: nothing between documents is computed."""
    rows = []
    for row, row_lengths in enumerate(lengths):
        parts = zip(*(torch.split(x[row : row + 1], row_lengths, 2) for x in (query, key, value)), strict=True)
        rows.append(torch.cat([grouped_sdpa(module, q, k, v, None, dropout, scaling)[0] for q, k, v in parts], 1))
    return torch.cat(rows)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """As ``grouped_sdpa`` with the scores written out, for some queries at a time: [B, H, T, F]."""
    rows, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    if mask is None and queries > 1:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_()
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
        mask = mask[None, None]
    query = (query * (width**-0.5 if scaling is None else scaling)).view(rows, groups, -1, queries, width)
    block = max(1, MAX_SCORES // (rows * heads * keys))
    found = []
    for start in range(0, queries, block):
        scores = query[:, :, :, start : start + block] @ key[:, :, None].transpose(3, 4)  # [B, G, H / G, t, S]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask[:, :, None, start : start + block]
        scores = scores.float()
        if sinks is not None:
            sink = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found.append(F.dropout(weights.to(value.dtype), dropout) @ value[:, :, None])
    return torch.cat(found, 3).flatten(1, 2)


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T] additive, of ``document_ids`` [B, T]: a token sees itself and what is before it in its document.

    On a CPU the mask also carries the documents' lengths, and our attention goes by those; a model that changes the
    mask drops them, and attends by the mask.
    """
    time, device = document_ids.shape[1], document_ids.device
    seen = document_ids[:, :, None] == document_ids[:, None, :]
    seen &= causal_mask(time, device)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]
    if device.type == "cpu":
        setattr(mask, _LENGTHS, [row.unique_consecutive(return_counts=True)[1].tolist() for row in document_ids])
    return mask


def register() -> str:
    """Make the attention known to transformers; returns the name to pass as ``attn_implementation``."""
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
