"""MTP (DeepSeek-V3, 2412.19437): one more decoder layer of the base's own class, which drafts several tokens in turn.

Many large models are published with such layers, under the names MTP or NextN. With the embedding e, the base's state
``h_t`` and the layer's norms, the state ``s_t`` predicts ``x_{t+2}``::

    u_t = eh_proj [ enorm(e(x_{t+1})) ; hnorm(h_t) ]
    s_t = norm(block(u_t))

The next draft reads ``s_t`` in place of ``h_{t+1}``. Embedding and output head are the base's. Training unrolls these
steps (FastMTP, 2509.18362), as EAGLE-3's training-time test does. DeepSeek trains one step per layer.

The block is a stock layer, so it may have latent attention or experts. A new head starts as the base's next-token head:
the block is a copy of the base's last layer that adds nothing at first, and ``eh_proj`` selects the state.
``drafthead import`` reads the layer of a checkpoint instead.

Differences from FastMTP: draft positions attend to the states of the base for the context, as in drafting; the draft
vocabulary does not depend on the language. The induction head is our addition.

Shape legend: D width.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import drafting_layers, with_layers
from drafthead.models.base.structure import shallow_copy, without_embedding
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape
from drafthead.models.heads.parts.attention_layer import AnchorContext, HeadRMSNorm, start_as_base
from drafthead.models.heads.parts.draft_head import Attend, DraftPositions
from drafthead.models.heads.parts.pair_head import START_SIZE, DraftingLayers, PairHead, PairHeadConfig
from drafthead.models.kernels.fused import fresh_copy
from drafthead.models.kernels.linear import PackedCopies
from drafthead.models.kernels.private_apis import CACHE
from drafthead.settings.schema import settings

OTHER_HEAD = "choose a head with layers of its own (eagle3, dspark)"
OUTPUTS = re.compile(r"(?:^|\.)(o_proj|down_proj)(?:\.|$)")  # the last projections of attention and of MLPs


@settings(kw_only=True)
class MtpConfig(PairHeadConfig):
    """Settings of :class:`MtpHead`."""

    needs_layers = True
    num_draft_tokens: DraftPositions = 3
    ttt_steps: int = 3
    """Draft positions that are trained, one after the other. At most ``num_draft_tokens``."""
    norm_output: bool = True
    """Let the next draft read the state after the last norm. With false, it reads the block's output."""
    before_final_norm: bool = False
    """Read the base's state before its final norm. An import measures which one the layer was trained on."""

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,) if self.before_final_norm else ()


class StockLayers(nn.ModuleList):
    """Layers of transformers. They stay in evaluation mode, because their activation checkpointing drops caches."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def inference(self, dtype: torch.dtype | None = None) -> Self:
        """Return self, because ``MtpHead.drafting_layers`` packs them."""
        return self


class MtpHead(PairHead):
    """Norms, projection and stock decoder layer of an MTP module."""

    config: MtpConfig
    base: BaseModel

    def __init__(self, config: MtpConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__(config, base, d2t)
        self.source = last_full_layer(base)
        stock = base.model.model.layers[self.source]
        self.enorm, self.hnorm, self.norm = (HeadRMSNorm(base) for _ in range(3))
        self.eh_proj = nn.Linear(2 * base.hidden_size, base.hidden_size, bias=False, device=base.device)
        self.layers = StockLayers([fresh_copy(stock, base.model_config, 0, self.source)])
        self._trunk = self._decoder_over(self.layers)  # in a tuple, so that it is not a submodule
        start_as_zero(self.layers[0])
        start_as_base(self.eh_proj, self.norm, base, deepest=1, is_final=True)
        with torch.no_grad():
            self.norm.weight.mul_(START_SIZE)
        self.projections = self.lm_heads(0)

    def _decoder_over(self, layers: nn.ModuleList) -> tuple[Any, CacheShape]:
        """Return the base's decoder with ``layers`` alone, without a final norm, and the shape of its cache."""
        view = with_layers(self.base, layers, nn.Identity(), torch.float32, [self.source])
        return without_embedding(view.model.model), view.cache_shape

    def reading(self, before_final_norm: bool, norm_output: bool) -> "MtpHead":
        """Return a head with these settings and the same weights."""
        twin: MtpHead = shallow_copy(self)
        twin.config = replace(self.config, before_final_norm=before_final_norm, norm_output=norm_output)
        twin.spec = HiddenStatesSpec(layers=twin.config.read_layers(self.base.num_layers))
        twin.packed = PackedCopies()
        return twin

    def fuse(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def start(self, context: AnchorContext, pairs: Tensor) -> Attend:
        return context.start_stock(partial(self.read, self._trunk[0]), pairs)

    def drafting_layers(self) -> DraftingLayers:
        dtype = self.config.inference_dtype(self.base)
        decoder, _ = self.packed.get(
            "decoder", lambda: self._decoder_over(drafting_layers(self.base, self.layers, dtype))
        )
        return DraftingLayers([partial(self.inference().read, decoder)], self._trunk[1])

    def read(self, decoder: Any, pairs: Tensor, positions: Tensor, mask: Any, cache: TreeCache) -> Tensor:
        """Run the block over ``pairs`` [B, T, 2 D], with keys and values in ``cache``; return its outputs [B, T, D]."""
        embedded, feature = pairs.chunk(2, -1)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(feature)], -1))
        windows = self.base.windows
        masks = mask if windows is None else windows.alike(mask)
        options = {"position_ids": positions, "attention_mask": masks, CACHE: cache, "use_cache": True}
        out: Tensor = decoder(inputs_embeds=x, **options).last_hidden_state
        return out


def last_full_layer(base: BaseModel) -> int:
    """Return the index, from 0, of the base's last layer with attention and without a window; refuse a base without
    one. A recurrent state would pass between packed documents in training."""
    shape, windows = base.cache_shape, base.windows
    window_of = windows.by_layer if windows is not None else (0,) * base.num_layers
    states = shape.states or (None,) * base.num_layers
    full = [n for n in range(base.num_layers) if shape.layers[n] and not states[n] and not window_of[n]]
    if not full or base.dense_masks:
        why = "computes with masks" if full else "has no layer with full attention"
        raise UserError(f"{base.model_config.model_type} {why}, so a head cannot train its layers; {OTHER_HEAD}")
    return full[-1]


@torch.no_grad()
def start_as_zero(layer: nn.Module) -> None:
    """Let a stock decoder layer add nothing to its input. Refuse one without projections of the usual names."""
    found = {match[1]: parameter for name, parameter in layer.named_parameters() if (match := OUTPUTS.search(name))}
    if len(found) < 2:
        raise UserError(f"{type(layer).__name__} lacks o_proj or down_proj, so mtp cannot start as it; {OTHER_HEAD}")
    for name, parameter in layer.named_parameters():
        if OUTPUTS.search(name):
            parameter.zero_()
