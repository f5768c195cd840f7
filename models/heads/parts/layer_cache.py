"""Keys and values of a head's own attention layers, for the context and for the nodes being drafted.

Hydra++'s prefix layer, Kangaroo's adapter and the layers of EAGLE-3 and DSpark read one input per committed token.

Shape legend: B rows, P slots of a block, F nodes, I input width, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.models.cache.kv_cache import CacheShape, TreeCache
from drafthead.models.decoding.node_cache import NodeCache, PendingNodes
from drafthead.models.heads.parts.attention_layer import Layer
from drafthead.models.token_tree import causal_mask


class LayerCache(NodeCache):
    """Keys and values of layers for the rows of a batch."""

    def __init__(self, layer: Layer, shape: CacheShape, rows: int) -> None:
        """Read inputs [B, F, I] by ``layer``, which may stand for several; ``shape`` counts its layers."""

        def run(inputs: Tensor, cache: TreeCache, counts: list[int] | None, nodes: PendingNodes | None) -> Tensor:
            new, device = inputs.shape[1], inputs.device
            ancestors = causal_mask(new, device)[None] if nodes is None else nodes.ancestors[:, -new:]
            # A node's position is its depth below the context: the number of its ancestors but itself.
            cache.begin(new)
            positions = cache.positions(ancestors.sum(-1) - 1).expand(len(inputs), -1)
            out = layer(inputs, positions, cache.mask(ancestors, shape.dtype), cache)
            if nodes is None:
                cache.commit(counts)
            return out

        super().__init__(run, shape, rows, lambda capacity: TreeCache.empty(shape, capacity))

    def read_block(self, x: Tensor, seen: Tensor, layers: Sequence[Layer]) -> Tensor:
        """Run ``layers`` over a block after the context, [B, P, D] -> [B, P, D], and drop its keys and values.

        ``seen`` [1, P, P] bool are the slots that each slot sees, later ones included.
        """
        self._catch_up()
        rows, count = x.shape[:2]
        self._reserve(count)
        cache = self.cache
        cache.begin(count)
        positions = cache.positions(torch.arange(count, device=x.device)[None]).expand(rows, -1)
        mask = cache.mask(seen, x.dtype)
        for layer in layers:
            x = layer(x, positions, mask, cache)
        cache.crop()
        return x
