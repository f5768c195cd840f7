"""Layers that see a part of the text: sliding windows and chunks, as masks by distance in positions.

A layer with a window gets a mask of its own. Nodes of a tree stand at their depth after the prefix, wherever in the
cache they lie. A trimmed cache holds fewer keys for these layers: all that a window may need of what is committed, so
rejected drafts cost nothing here.

Shape legend: R rows or 1, T queries, K keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from drafthead.data.utils.errors import UserError

Masks = Tensor | dict[str, Tensor | None] | None
"""What a decoder takes: one additive mask, or one for each of its kinds of layer; None means causal."""
SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layer with a window, and the key of a config that holds its size."""
FULL = "full_attention"


@dataclass(frozen=True)
class Window:
    """The last ``size`` positions, or those of the query's own chunk of ``size``."""

    size: int
    chunked: bool

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [R, T] and [R, K], keys never after their query -> [R, T, K] bool."""
        # Nothing of the size of the result but the result: the first read of a long prompt makes it large.
        if self.chunked:
            return (queries // self.size)[:, :, None] == (keys // self.size)[:, None]
        return (queries - self.size)[:, :, None] < keys[:, None]


@dataclass(frozen=True)
class Windows:
    """The windows of a base. Bases without one have no such object, and nothing of this happens in their steps."""

    by_kind: dict[str, Window | None]
    """Of every kind of layer; None sees all."""
    single: bool
    """Whether all layers are of one kind, which then takes a mask and no mapping."""
    by_layer: tuple[int, ...]
    """Positions that every layer sees, 0: all."""

    @property
    def smallest(self) -> int:
        """Positions up to which no window hides anything."""
        return min(window.size for window in self.by_kind.values() if window is not None)

    def masks(
        self,
        mask: Tensor | None,
        queries: Tensor,
        keys: Tensor,
        dtype: torch.dtype,
        held: tuple[Tensor | None, Tensor] | None = None,
    ) -> Masks:
        """The masks of all kinds of layer, of the mask of a layer that sees all ([R, 1, T, K], None: causal).

        ``queries`` [R, T] and ``keys`` [R, K] are positions; ``dtype`` is of masks that are made anew; ``held``: the
        mask and the keys of layers with a window, where these hold fewer.
        """
        found: dict[str, Tensor | None] = {}
        seen, places = held or (mask, keys)
        for kind, window in self.by_kind.items():
            found[kind] = mask if window is None else _narrowed(seen, window, queries, places, dtype)
        return next(iter(found.values())) if self.single else found

    def alike(self, mask: Tensor | None) -> Masks:
        """The same mask for every kind of layer: where all positions are below ``smallest``."""
        return mask if self.single else dict.fromkeys(self.by_kind, mask)


def _narrowed(mask: Tensor | None, window: Window, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    seen = window.sees(queries, keys)
    if mask is None:
        seen &= keys[:, None] <= queries[:, :, None]
        mask = torch.zeros((), dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen[:, None], -torch.inf)


def windows_of(config: PreTrainedConfig, context: int) -> Windows | None:
    """The windows that matter within ``context`` positions, by transformers' own rules; None where there is none."""
    kinds = getattr(config, "layer_types", None)
    if single := kinds is None:
        kinds = [next((kind for kind, key in SIZES.items() if getattr(config, key, None) is not None), FULL)]
    found: dict[str, Window | None] = {} if single else {FULL: None}
    for kind in kinds:
        size = getattr(config, SIZES[kind], None) if kind in SIZES else None
        # Of 1, stock caches keep other positions than stock masks show; of 0, stock modules fail.
        if kind in SIZES and (not isinstance(size, int) or size < 2):
            raise UserError(
                f"{config.model_type} has layers of type {kind} but {SIZES[kind]}={size}, which must be at least 2; "
                "correct its config"
            )
        found[kind] = None if size is None or size >= context else Window(size, kind == "chunked_attention")
    if not any(found.values()):
        return None
    windows = [found[kind] for kind in kinds] * (config.num_hidden_layers if single else 1)
    return Windows(found, single, tuple(0 if window is None else window.size for window in windows))


@contextmanager
def shortened(config: PreTrainedConfig, size: int) -> Iterator[None]:
    """The config with no window larger than ``size``, for as long as the context lasts."""
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
