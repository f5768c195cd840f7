"""Masks for sliding-window and chunked attention, from the distance between positions.

The position of a tree node is its depth after the prefix, not its index in the cache: two siblings are at the same
distance from every key. A trimmed cache holds fewer keys for layers with a window, but all that the window may reach.

Shape legend: R rows or 1, T queries, K keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from drafthead.errors import UserError
from drafthead.models.kernels.packed import PackedMask

Masks = Tensor | PackedMask | dict[str, Any] | None
"""The decoder's mask argument: one mask (additive, or of packed rows), or one per layer type; None means causal."""
SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types with a window -> config keys of its size."""
FULL = "full_attention"
RECURRENT = ("linear", "conv", "mamba", "recurrent", "hybrid", "rwkv", "lstm")
"""Name fragments of layer types with a recurrent state, beside keys and values (``hybrid``) or instead of them."""


@dataclass(frozen=True)
class Window:
    """The positions that a query sees: the last ``size`` up to its own, or if ``chunked`` those up to its own in its
    chunk. Chunks are blocks of ``size`` positions, the first from 0."""

    size: int
    chunked: bool

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return a mask [R, T, K], true for keys that a query sees, from positions of queries [R, T] and keys [R, K].
        Keys after the query are not excluded. For size 3, the query at 7 sees 5, 6, 7; chunked, it sees 6, 7."""
        # One comparison, without temporaries of the result's size, which is large for long prompts.
        if self.chunked:
            return (queries // self.size)[:, :, None] == (keys // self.size)[:, None]
        return (queries - self.size)[:, :, None] < keys[:, None]


@dataclass(frozen=True)
class Windows:
    """The attention windows of a base's layers. A base without windows has None instead."""

    by_kind: dict[str, Window | None]
    """Layer type -> window; None: full attention, or a window that covers the longest context."""
    recurrent: tuple[str, ...]  # layer types whose mask is None, because it would hide padding from their state
    single: bool  # all layers are alike (no ``layer_types``), and the decoder expects one mask
    by_layer: tuple[int, ...]  # number of positions that each layer sees; 0 means all

    @property
    def smallest(self) -> int:
        """Longest context that no window affects."""
        return min(window.size for window in self.by_kind.values() if window is not None)

    def masks(
        self,
        mask: Tensor | None,
        queries: Tensor,
        keys: Tensor,
        dtype: torch.dtype,
        held: tuple[Tensor | None, Tensor] | None = None,
    ) -> Masks:
        """Return a mask per layer type (one if ``single``) from ``mask`` [R, 1, T, K] of full attention (None: causal).
        ``queries`` [R, T] and ``keys`` [R, K] are positions. ``dtype`` is that of new masks if ``mask`` is None.
        ``held``: mask and key positions for layers with a window, if a trimmed cache holds fewer keys for them."""
        masks: dict[str, Any] = {}
        window_mask, window_keys = held or (mask, keys)
        for kind, window in self.by_kind.items():
            if window is None:
                masks[kind] = mask
                continue
            seen, within = window.sees(queries, window_keys), window_mask
            if within is None:  # a causal mask
                seen &= window_keys[:, None] <= queries[:, :, None]
                within = torch.zeros((), dtype=dtype, device=seen.device)
            masks[kind] = within.masked_fill(~seen[:, None], -torch.inf)
        return next(iter(masks.values())) if self.single else masks | dict.fromkeys(self.recurrent)

    def packed(self, mask: PackedMask) -> PackedMask | dict[str, PackedMask | None]:
        """Return the ``masks`` for packed rows."""
        kinds = self.by_kind.items()
        masks = {kind: mask if window is None else mask.within(window.size, window.chunked) for kind, window in kinds}
        return next(iter(masks.values())) if self.single else masks | dict.fromkeys(self.recurrent)

    def alike(self, mask: Tensor | None) -> Masks:
        """Return one mask for all layer types, for contexts up to ``smallest``."""
        return mask if self.single else dict.fromkeys(self.by_kind, mask) | dict.fromkeys(self.recurrent)


def recurrent_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the layer types of a config that have a recurrent state."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    return [kind for kind in kinds if kind not in SIZES and any(name in kind for name in RECURRENT)]


def windows_of(config: PreTrainedConfig, context: int) -> Windows | None:
    """Return the windows that matter within ``context`` positions, or None."""
    kinds = getattr(config, "layer_types", None)
    if single := kinds is None:
        kinds = [next((kind for kind, key in SIZES.items() if getattr(config, key, None) is not None), FULL)]
    by_kind: dict[str, Window | None] = {} if single else {FULL: None}
    recurrent = tuple(recurrent_kinds(config))
    for kind in kinds:
        size = getattr(config, SIZES[kind], None) if kind in SIZES else None
        # With size 1, stock caches and stock masks disagree on the positions; with 0, stock modules fail.
        if kind in SIZES and (not isinstance(size, int) or size < 2):
            what = f"{config.model_type} has layers of type {kind} but {SIZES[kind]}={size}, which must be at least 2"
            raise UserError(f"{what}; correct its config")
        if kind not in recurrent:
            by_kind[kind] = None if size is None or size >= context else Window(size, kind == "chunked_attention")
    if not any(by_kind.values()):
        return None
    windows = [by_kind.get(kind) for kind in kinds] * (config.num_hidden_layers if single else 1)
    return Windows(by_kind, recurrent, single, tuple(0 if window is None else window.size for window in windows))


@contextmanager
def shortened(config: PreTrainedConfig, size: int) -> Iterator[None]:
    """Limit the config's windows to ``size`` positions inside the ``with`` block."""
    stock = {key: getattr(config, key, None) for key in SIZES.values()}
    try:
        for key, value in stock.items():
            if isinstance(value, int) and value > size:
                setattr(config, key, size)
        yield
    finally:
        for key, value in stock.items():
            if value is not None:
                setattr(config, key, value)
