"""The attention that every base runs with: SDPA that never copies grouped keys and values.

transformers' own ``sdpa`` path repeats the keys and values of grouped-query models for every masked pass, which
at batch 48 costs five times the attention itself (``docs/log.md``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "drafthead"
_LENGTHS = "document_lengths"
"""Attribute of a mask: lengths of the documents of every row."""


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, heads, T, E] queries over [B, kv_heads, S, E] states; no mask means causal. [B, T, heads, E]."""
    if (lengths := getattr(attention_mask, _LENGTHS, None)) is not None and key.shape[2] == query.shape[2]:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return _per_document(module, query, key, value, lengths, options), None
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        # Refused at load for the bases we know; transformers' own path says which backend would support it.
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
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
    options: dict[str, Any],
) -> Tensor:
    """Causal attention within every document of packed rows [B, heads, T, E]: nothing between documents is computed."""
    rows = []
    for row, row_lengths in enumerate(lengths):
        parts = zip(*(torch.split(x[row : row + 1], row_lengths, 2) for x in (query, key, value)), strict=True)
        rows.append(torch.cat([grouped_sdpa(module, q, k, v, None, **options)[0] for q, k, v in parts], 1))
    return torch.cat(rows)


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T] additive, of ``document_ids`` [B, T]: a token sees itself and what is before it in its document.

    On a CPU the mask also carries the documents' lengths, and our attention goes by those; a model that changes the
    mask drops them, and attends by the mask.
    """
    time, device = document_ids.shape[1], document_ids.device
    seen = document_ids[:, :, None] == document_ids[:, None, :]
    seen &= torch.ones(time, time, dtype=torch.bool, device=device).tril_()
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]
    if device.type == "cpu":
        setattr(mask, _LENGTHS, [row.unique_consecutive(return_counts=True)[1].tolist() for row in document_ids])
    return mask


def register() -> str:
    """Make the attention known to transformers; returns the name to pass as ``attn_implementation``."""
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
