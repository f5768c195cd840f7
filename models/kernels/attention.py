"""The attention of every base: SDPA with grouped keys and values, sinks, soft caps and packed rows.

transformers' own ``sdpa`` copies the keys and values of grouped-query models in every masked pass. On a CPU at batch 48
this costs five times the attention itself (``docs/dev/log.md``), so here they are copied on other devices only. A
keyword that would change the result and is not implemented raises an error, so bases that use it are refused at load.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, E head width, F width of values.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from drafthead.errors import UserError
from drafthead.models.kernels.compiled import attend
from drafthead.models.kernels.packed import MAX_SCORES, OwnMask, PackedMask
from drafthead.models.kernels.private_apis import other_base

NAME = "drafthead"
# Keywords that ``grouped_sdpa`` ignores, such as ``sliding_window``: the mask already applies the window.
HARMLESS = frozenset(
    "sliding_window position_ids cache_position use_cache return_dict logits_to_keep output_attentions "
    "output_hidden_states output_router_logits".split()
)
_no_varlen: set[torch.device] = set()  # devices on which the kernel for documents of different lengths has failed
_captured: ContextVar[list[Tensor] | None] = ContextVar("captured", default=None)


class Options(NamedTuple):
    """Arguments of ``grouped_sdpa``, which describes them; ``sinks`` is its ``s_aux``."""

    dropout: float = 0.0
    scaling: float | None = None
    sinks: Tensor | None = None
    softcap: float | None = None


PLAIN = Options()


@contextmanager
def captured_queries() -> Iterator[list[Tensor]]:
    """Yield a list that gets the queries [B, H, T, E], after rotary embedding, of each ``grouped_sdpa`` call in the
    ``with`` block, by this thread."""
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
    attention_mask: Tensor | OwnMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    compiled: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (attention [B, T, H, F] of queries over keys and values, None), as transformers expects.

    Args:
        module: the attention layer; error messages name its model type.
        query: [B, H, T, E].
        key: [B, G, S, E].
        value: [B, G, S, F].
        attention_mask: additive or bool, [B or 1, 1, T, S], or a mask of our own. None: causal attention if T = S,
            and all keys seen if T = 1.
        dropout: probability of dropping an attention weight.
        scaling: factor that multiplies the scores; None: 1 / sqrt(E).
        s_aux: [H] sinks: a logit per head that takes part in the softmax and has no value (gpt-oss).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        is_causal: False raises a UserError.
        compiled: use the attention compiled for this CPU if it can compute this.
        kwargs: other keywords of transformers; a UserError is raised unless they are ``HARMLESS`` or None.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in HARMLESS]
    if unknown or is_causal is False:
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        keyword = (unknown or ["is_causal=False"])[0]
        raise UserError(f"the attention of {kind} uses {keyword!r}, which is not supported; {other_base()}")
    if (queries := _captured.get()) is not None:
        queries.append(query)
    options = Options(dropout, scaling, s_aux, softcap)
    if isinstance(attention_mask, PackedMask):
        return packed_attention(query, key, value, attention_mask, options, compiled).transpose(1, 2), None
    if isinstance(attention_mask, OwnMask):
        if sinks_or_caps := [name for name in ("sinks", "softcap") if getattr(options, name) is not None]:
            what = f"a head cannot train a layer whose attention has {sinks_or_caps[0]}"
            raise UserError(f"{what}; choose a head with layers of its own (eagle3, dspark)")
        # AFMoE takes a view of the result.
        return attention_mask.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if compiled and options == Options(scaling=scaling):
        if (out := attend(query, key, value, attention_mask, _scale(query, options))) is not None:
            return out, None
    return _attend(query, key, value, attention_mask, options).transpose(1, 2), None


def _scale(query: Tensor, options: Options) -> float:
    return query.shape[-1] ** -0.5 if options.scaling is None else options.scaling


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:  # [B, H, T, F]
    if options.sinks is not None or options.softcap is not None:
        return _explicit(query, key, value, mask, options)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        # CUDA's fused kernels take grouped heads only without a mask. Copying is cheaper than their fallback.
        groups = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=mask is None and query.shape[2] > 1,
        scale=options.scaling,
        enable_gqa=grouped,
    )


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, options: Options = PLAIN, compiled: bool = False
) -> Tensor:
    """Return the attention [B, H, T, F] of packed rows, span by span, or by one kernel for all documents. The arguments
    are those of ``grouped_sdpa``. With B = 1, the queries may be only some of the tokens."""
    shape = query.shape[0], query.shape[2]
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [N, heads, width]
    plain = not options.dropout and options.sinks is None and options.softcap is None
    out = _varlen(query, key, value, mask, options.scaling) if plain else None
    if out is None:
        outputs = [] if mask.spans() else [query]
        for span in mask.spans():
            parts = query[span.queries], key[span.keys], value[span.keys]
            q, k, v = (states.transpose(0, 1)[None] for states in parts)
            fast = attend(q, k, v, None, _scale(q, options)) if compiled and plain and span.causal else None
            if fast is None:
                seen = None if span.causal else span.seen[None, None]
                fast = _attend(q, k, v, seen, options).transpose(1, 2)
            outputs.append(fast[0])
        out = torch.cat(outputs)
    return out.view(*shape, *out.shape[1:]).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scaling: float | None) -> Tensor | None:
    """Return the attention [N, H, E] of all documents by flash attention (16-bit tensors on CUDA); None if there is no
    such kernel. If it fails, a warning says so once per device."""
    device = query.device
    fits = device.type == "cuda" and query.itemsize == 2 and query.shape[0::2] == value.shape[0::2]
    if not fits or device in _no_varlen:
        return None
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and only for CUDA

    window = -1 if mask.window is None else mask.window - 1
    sizes = mask.cumulative, mask.cumulative, mask.longest, mask.longest
    grouped = query.shape[1] != key.shape[1]
    try:
        options: dict[str, Any] = {"scale": scaling, "window_size": (window, 0), "enable_gqa": grouped}
        out = varlen_attn(query, key, value, *sizes, **options)
        return out if isinstance(out, Tensor) else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _no_varlen.add(device)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"packed rows are read document by document, because flash attention failed on {device}: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None


def _explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Compute ``grouped_sdpa`` as [B, H, T, F] from explicit scores, one block of queries at a time."""
    dropout, scaling, sinks, softcap = options
    rows, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    positions = torch.arange(keys, device=query.device)
    query = (query * (width**-0.5 if scaling is None else scaling)).view(rows, groups, -1, queries, width)
    block = max(1, MAX_SCORES // (rows * heads * keys))
    outputs = []
    for start in range(0, queries, block):
        span = slice(start, start + block)
        scores = query[:, :, :, span] @ key[:, :, None].transpose(3, 4)  # [B, G, H / G, t, S]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask[:, :, None, span]
        elif mask is not None or queries > 1:
            seen = positions <= positions[span, None] if mask is None else mask[:, :, None, span]
            scores = scores.masked_fill(~seen, -torch.inf)
        scores = scores.float()
        if sinks is not None:
            sink = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outputs.append(F.dropout(weights.to(value.dtype), dropout) @ value[:, :, None])
    return torch.cat(outputs, 3).flatten(1, 2)


def register() -> str:
    """Register the attention with transformers and return its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
