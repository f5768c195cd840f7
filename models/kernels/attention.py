"""The attention of every base: SDPA with grouped keys and values, sinks and soft caps.

transformers' own ``sdpa`` copies the keys and values of grouped-query models in every masked pass. On a CPU at batch 48
this costs five times the attention itself (``docs/dev/log.md``), so here they are copied on other devices only. A
keyword that would change the result and is not implemented raises an error, so bases that use it are refused at load.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, E head width, F width of values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from drafthead.errors import UserError
from drafthead.models.kernels.private_apis import other_base
from drafthead.models.token_tree import causal_mask

NAME = "drafthead"
_LENGTHS = "document_lengths"
"""Name of the mask attribute that holds the document lengths of every row."""
HARMLESS = frozenset(
    (
        *("sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    )
)
"""Keywords that ``grouped_sdpa`` ignores, such as ``sliding_window``: the mask already applies the window."""
MAX_SCORES = 2**26
"""Largest number of attention scores in memory at once when they are computed explicitly."""
_captured: ContextVar[list[Tensor] | None] = ContextVar("captured", default=None)


@contextmanager
def captured_queries() -> Iterator[list[Tensor]]:
    """Yield a list that gets the queries [B, H, T, E], after rotary embedding, of each attention call.

    This covers all calls of ``grouped_sdpa`` in the ``with`` block, by this thread.
    """
    queries: list[Tensor] = []
    token = _captured.set(queries)
    try:
        yield queries
    finally:
        _captured.reset(token)


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
    """Return (attention [B, T, H, F] of queries over keys and values, None), as transformers expects.

    Args:
        module: the attention layer; error messages name its model type.
        query: [B, H, T, E].
        key: [B, G, S, E].
        value: [B, G, S, F].
        attention_mask: additive, [B or 1, 1, T, S]. None: causal attention if T = S, and all keys seen if T = 1.
        dropout: probability of dropping an attention weight.
        scaling: factor that multiplies the scores; None: 1 / sqrt(E).
        s_aux: [H] sinks: a logit per head that takes part in the softmax and has no value (gpt-oss).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        is_causal: False is refused.
        kwargs: other keywords of transformers; refused unless ``HARMLESS`` or None.

    Raises:
        UserError: the layer uses a keyword that is not implemented here.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in HARMLESS]
    if unknown or is_causal is False:
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        keyword = (unknown or ["is_causal=False"])[0]
        raise UserError(f"the attention of {kind} uses {keyword!r}, which is not supported; {other_base()}")
    if (queries := _captured.get()) is not None:
        queries.append(query)
    if s_aux is not None or softcap is not None:
        return _explicit(query, key, value, attention_mask, dropout, scaling, s_aux, softcap).transpose(1, 2), None
    if (lengths := getattr(attention_mask, _LENGTHS, None)) is not None and key.shape[2] == query.shape[2]:
        # Attend within each document of packed rows, without computing scores across documents.
        rows = []
        for row, row_lengths in enumerate(lengths):
            split = zip(*(torch.split(x[row : row + 1], row_lengths, 2) for x in (query, key, value)), strict=True)
            rows.append(torch.cat([grouped_sdpa(module, q, k, v, None, dropout, scaling)[0] for q, k, v in split], 1))
        return torch.cat(rows), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        # CUDA's fused kernels take grouped heads only without a mask. Copying is cheaper than their fallback.
        groups = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
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
    """Compute ``grouped_sdpa`` as [B, H, T, F] from explicit scores, one block of queries at a time."""
    rows, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    if mask is None and queries > 1:
        mask = _additive(causal_mask(keys, query.device)[None, :queries], query.dtype)
    query = (query * (width**-0.5 if scaling is None else scaling)).view(rows, groups, -1, queries, width)
    block = max(1, MAX_SCORES // (rows * heads * keys))
    outputs = []
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
        outputs.append(F.dropout(weights.to(value.dtype), dropout) @ value[:, :, None])
    return torch.cat(outputs, 3).flatten(1, 2)


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, T, T] in which a token sees itself and earlier tokens of its document.

    ``document_ids`` is [B, T]. On a CPU the mask also has the document lengths as an attribute, and our attention uses
    these instead. If a model changes the mask, the copy has no such attribute, and the mask itself is used.
    """
    time, device = document_ids.shape[1], document_ids.device
    seen = document_ids[:, :, None] == document_ids[:, None, :]
    seen &= causal_mask(time, device)
    mask = _additive(seen, dtype)
    if device.type == "cpu":
        setattr(mask, _LENGTHS, [row.unique_consecutive(return_counts=True)[1].tolist() for row in document_ids])
    return mask


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask [B, T, S], True for keys that a query sees, to an additive mask [B, 1, T, S]."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def register() -> str:
    """Register the attention with transformers and return its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
