"""The frozen base model: stock transformers modules, driven for hidden states, plain decoding and tree verification.

Shape legend: B batch, T time, N tree nodes, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig, check_architecture, context_limit, load_shards, load_weights
from drafthead.models.base.documents import read_by_document
from drafthead.models.base.fingerprint import fingerprint
from drafthead.models.base.parity import DENSE, PASSED, StockResults, check_against_stock, check_key, measured_shape
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import capture_hidden_states, last_layers
from drafthead.models.base.text_model import build, followed_modules
from drafthead.models.base.windows import Masks, recurrent_kinds, windows_of
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.static_cache import StaticKVCache, StaticModel
from drafthead.models.kernels import attention
from drafthead.models.kernels.choice import choose_kernels, restore, worth_measuring
from drafthead.models.kernels.fused import fuse_modules
from drafthead.models.kernels.linear import MEASURED_ROWS, KernelTable, can_prepack, prepack_linears
from drafthead.models.kernels.packed import PackedMask
from drafthead.models.kernels.private_apis import CACHE
from drafthead.models.kernels.recurrence import follow_trees
from drafthead.models.token_tree import TokenTree, TreeShape, causal_mask
from drafthead.system.devices import device_of, synchronise


@dataclass(frozen=True, kw_only=True)
class PartialForward:
    """Outputs of the target's first layers for a drafted tree, computed while drafting (early exit). Their keys and
    values are in the target's cache: after the committed tokens, in the order of the nodes."""

    layers: int  # number of computed layers
    hidden: Tensor  # [B, N, D] output of the last of them


NO_LAYERS = HiddenStatesSpec()
TRIAL_CONTEXT = 200  # committed tokens in the cache when kernels are timed


class BaseModel(BaseParts):
    """A frozen causal LM: its weights get no gradients, and no method saves it."""

    def __init__(self, model: Any, tokenizer: Any, config: BaseConfig) -> None:
        """Freeze ``model`` in place, and measure its cache sizes and logit scale, except on the meta device. Refuse
        architectures that cannot verify token trees. :meth:`load` and :meth:`wrap` also compare it with stock
        transformers."""
        check_architecture(model.config, config.max_context)
        super().__init__(model, tokenizer, config)
        self._names_of_parts = tuple(vars(self))
        self.model, settings = model, model.config
        self.num_layers = len(model.model.layers)
        self._limited = context_limit(settings) is not None
        for module in self.model.modules():
            # Llama 4 scales attention by the index in the pass, which is not the position of a tree node. Within the
            # context limit the factor is 1.
            if getattr(module, "attn_temperature_tuning", False):
                module.attn_temperature_tuning = False
        self.windows = windows_of(settings, self.max_context)
        self.recurrent = recurrent_kinds(settings)
        """Layer types with a recurrent state."""
        if self.recurrent:
            self._follow_trees()
        self.stock_results: StockResults | None = None
        """Results of the stock modules, until :func:`check_against_stock` has compared them."""
        if self.device.type == "meta":
            # Experts in float32 have no operator for tensors without memory; then attention's shape is assumed.
            with suppress(UserError):
                self.cache_shape = measured_shape(self) if self.recurrent else self.cache_shape
        else:
            self.fingerprint = fingerprint(model)
            self.cache_shape = measured_shape(self)
            self.stock_results = stock = StockResults.of(self)
            self.lm_head = self.scaled_head(stock.logits[:1], stock.final)
        self.lock = RLock()
        """Held during a decoding step, because threads share CUDA graphs and packed copies of weights."""
        self.dense_masks = check_key(self, DENSE) in PASSED
        """True if layers compute with masks, so that packed rows need tensors of size [T, T]."""
        self._wrapped_attention: str | None = None
        self._tree_masks: dict[TokenTree, Tensor] = {}
        self._last_layers: dict[int, Any] = {}
        self._static: StaticModel | None = None

    def _follow_trees(self) -> None:
        """Make the functions of recurrent layers follow token trees; refuse settings with which they cannot."""
        kind = self.model.config.model_type
        if getattr(self.model, "use_kernels", False):
            what = f"use_kernels=True may replace whole recurrent layers of {kind}, which drafthead then cannot follow"
            raise UserError(f"{what}; load the model without it")
        if self.config.graphs == "always":
            raise UserError(f"the recurrent layers of {kind} have no passes of fixed shapes; set base.graphs=auto")
        self.uses_graphs = False
        for module in followed_modules(self.model.config, self.recurrent):
            follow_trees(module)

    @classmethod
    def load(
        cls,
        config: BaseConfig,
        device: torch.device | str | None = None,
        progress: Callable[[str], None] = lambda line: None,
        shard: Callable[[Any], torch.device] | None = None,
    ) -> "BaseModel":
        """Load or build the base on ``device`` (None: this process's); reject it if its logits differ from stock
        transformers. ``progress`` is called before slow first-time work. With ``shard``, the layers are sharded before
        they are read (see :func:`load_shards`); all processes must then call this, and run the base, at the same
        time."""
        if shard is None:
            model, tokenizer = load_weights(config, device_of(device), progress)
        else:
            model, tokenizer = load_shards(config, device_of(device), shard, progress)
        base = cls(model, tokenizer, config)
        fuse_for_cpu(base)
        check_against_stock(base)  # it covers the fused modules, and a base that fails is not timed
        choose_cpu_kernels(base)
        return base

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any) -> "BaseModel":
        """Wrap a loaded model: freeze it and set drafthead's attention, in place; reject it if its logits change."""
        stock = model.config._attn_implementation
        model.set_attn_implementation(attention.register())
        wrapped = cls(model, tokenizer, BaseConfig(name=model.config.name_or_path, prepack=False))
        wrapped._wrapped_attention = stock
        check_against_stock(wrapped)
        return wrapped

    def stock(self) -> Any:
        """Return a new copy of the model as transformers loads it."""
        if self._wrapped_attention is not None:
            model = deepcopy(self.model)
            model.set_attn_implementation(self._wrapped_attention)
            return model
        model, _ = load_weights(self.config, self.device, lambda line: None, stock_attention=True)
        return model.eval().requires_grad_(False)

    def parts(self) -> BaseParts:
        """Return the base without its layers, which can then be freed; tensors are shared."""
        parts = BaseParts.__new__(BaseParts)
        vars(parts).update({name: getattr(self, name) for name in self._names_of_parts})
        return parts

    def new_cache(self, capacity: int, nodes: int | None = None, rows: int = 1) -> TreeCache:
        """Return an empty cache for ``rows`` rows of up to ``capacity`` positions.

        ``nodes`` is the largest number of pending tree nodes. If given, sliding-window layers store only the positions
        that the window needs, and the cache cannot return to an earlier position. With None, or one row and CUDA
        graphs, they store all.
        """
        if not self.uses_graphs or rows > 1:
            shape = self.cache_shape
            if self.windows is not None and nodes is not None:
                shape = shape.trimmed(self.windows.by_layer, capacity, nodes)
            return TreeCache.empty(shape, capacity, rows)
        if self._static is None:
            # Neither closure references self, so the model can be freed.
            head, product = self.lm_head, self.output_layer
            logits = lambda h: head.scale_and_cap(product(h))  # noqa: E731
            windowed = None if self.windows is None else self.windows.masks
            self._static = StaticModel(self.cache_shape, self.model.model, logits, windowed)
        return StaticKVCache(self._static, capacity)

    @torch.inference_mode()
    def forward(
        self, tokens_BT: Tensor, cache: TreeCache, counts: list[int] | None = None, spec: HiddenStatesSpec = NO_LAYERS
    ) -> HiddenStates:
        """Append committed tokens [B, T] to ``cache``, and return the hidden states after each of them. ``counts`` are
        the tokens in each row before its padding; None: T."""
        new = tokens_BT.shape[1]
        if isinstance(cache, StaticKVCache) and cache.fits(new) and not spec.layers:
            (final,) = cache.run(tokens_BT, TokenTree.chain(new - 1).shape)
            cache.commit(counts)
            return HiddenStates(final=final)
        mask = None  # causal attention, which needs no mask in the first pass and for single tokens
        committed = counts is None or min(counts) == new
        cache.begin(new, committed, None if committed else TokenTree.chain(new - 1).shape_on(self.device))
        positions = cache.positions(torch.arange(new, device=self.device)[None])
        if cache.rows > 1 or (cache.length and new > 1):
            mask = cache.mask(causal_mask(new, self.device)[None], self.dtype)
        masks = mask if self.windows is None else self._windowed(mask, cache, positions, None)
        hidden = self._decoder(tokens_BT, positions, masks, cache, spec)
        cache.commit(counts)
        return hidden

    @torch.inference_mode()
    def verify(
        self, tokens_BN: Tensor, shape: TreeShape, cache: TreeCache, partial_forward: PartialForward | None = None
    ) -> HiddenStates:
        """Run the last N nodes of token trees, [B, N], after the committed prefixes; return their hidden states.

        ``shape`` has the whole trees; earlier calls have run the nodes before those N. Keys and values stay pending in
        ``cache`` until ``cache.commit_path`` or ``cache.crop``. ``partial_forward`` replaces the first layers' pass.

        Each node attends to the committed prefix and to its ancestors, and its position is the prefix length plus its
        depth. Example: a root 0 with children 1 and 2 after a prefix of 10 tokens has the positions 10, 11, 11. Node 2
        attends to nodes 0 and 2, but not to 1.
        """
        return self._verify(tokens_BN, shape, cache, NO_LAYERS, partial_forward)[0]

    @torch.inference_mode()
    def verify_logits(
        self,
        tokens_BN: Tensor,
        shape: TreeShape,
        cache: TreeCache,
        spec: HiddenStatesSpec = NO_LAYERS,
        partial_forward: PartialForward | None = None,
    ) -> tuple[HiddenStates, Tensor]:
        """Run :meth:`verify`; also return the logits after every node, [B, N, V]."""
        hidden, logits = self._verify(tokens_BN, shape, cache, spec, partial_forward, with_logits=True)
        return hidden, self.logits(hidden.final) if logits is None else logits

    def _verify(
        self,
        tokens_BN: Tensor,
        shape: TreeShape,
        cache: TreeCache,
        spec: HiddenStatesSpec,
        partial_forward: PartialForward | None,
        with_logits: bool = False,
    ) -> tuple[HiddenStates, Tensor | None]:
        """Compute :meth:`verify`; ``with_logits`` also returns the logits if a CUDA graph computes them."""
        new = tokens_BN.shape[1]
        # A graph runs a whole tree through all layers, and returns no states of single layers.
        whole = new == len(shape) and not (spec.layers or partial_forward)
        if whole and isinstance(cache, StaticKVCache) and cache.fits(new):
            final, *logits = cache.run(tokens_BN, shape, with_logits)
            return HiddenStates(final=final), logits[0] if logits else None
        cache.begin(new, shape=shape)
        positions = cache.positions(shape.depths[:, -new:])
        if cache.rows == 1 and shape.tree is not None and new == len(shape):
            mask = cache.static_mask(shape.tree, shape, self._tree_masks)
        else:
            mask = cache.mask(shape.ancestors[:, -new:], self.dtype)
        masks = mask if self.windows is None else self._windowed(mask, cache, positions, shape.depths)
        return self._decoder(tokens_BN, positions, masks, cache, spec, partial_forward), None

    def synchronise(self) -> None:
        synchronise(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to next-token logits [..., V]."""
        return self.lm_head.scale_and_cap(self.output_layer(hidden))

    @torch.no_grad()
    def hidden_states(self, batch: TrainBatch, spec: HiddenStatesSpec) -> HiddenStates:
        """Return hidden states of packed rows, without gradients; tokens see only earlier ones of their document."""
        if self._limited and (last := int(batch.position_ids.max())) >= self.max_context:
            what = f"a document of {last + 1} tokens exceeds the context of {self.max_context}"
            raise UserError(f"{what}; lower phases.*.seq_len")
        final, states = self.run_packed(self.model, batch, spec.layers)
        return _hidden_states(final, states, spec)

    def run_packed(self, model: Any, batch: TrainBatch, layers: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Run packed rows through ``model``, this base's or a trainable copy; return the final hidden states [B, T, D]
        and the outputs of ``layers``."""

        def run(ids: Tensor, positions: Tensor, document_ids: Tensor) -> list[Tensor]:
            masks = self.packed_masks(PackedMask.of(document_ids, self.device))
            with capture_hidden_states(model, layers) as states:
                out = model.model(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=False)
            return [out.last_hidden_state, *(states[layer] for layer in layers)]

        ids, positions = (x.to(self.device, non_blocking=True) for x in (batch.input_ids, batch.position_ids))
        if self.recurrent:
            final, *states = read_by_document(run, ids, positions, batch.document_ids)
        else:
            final, *states = run(ids, positions, batch.document_ids)
        return final, dict(zip(layers, states, strict=True))

    def packed_masks(self, mask: PackedMask) -> Masks:
        """Return the decoder's mask argument for packed rows."""
        if not any(self.cache_shape.layers):
            return None
        masks = mask if self.windows is None else self.windows.packed(mask)
        if not self.dense_masks:
            return masks
        if isinstance(masks, PackedMask):
            return masks.dense(self.dtype)
        return {kind: packed and packed.dense(self.dtype) for kind, packed in masks.items()}

    def _windowed(self, mask: Tensor | None, cache: TreeCache, positions: Tensor, depths: Tensor | None) -> Masks:
        """Return the masks of all layer types for queries at ``positions``, from the ``mask`` of full attention.
        ``positions`` are [B or 1, T]. ``depths`` are those of all pending tree nodes; None: the nodes are a chain."""
        assert self.windows is not None
        # While everything fits into the smallest window, all layer types share one mask.
        if cache.rows == 1 and cache.length + cache.pending <= self.windows.smallest:
            return self.windows.alike(mask)
        if depths is None:
            depths = torch.arange(cache.pending, device=self.device)[None]
        keys = cache.key_positions(depths)
        return self.windows.masks(mask, positions, keys, self.dtype, cache.held(mask, keys))

    def _decoder(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Masks,
        cache: TreeCache,
        spec: HiddenStatesSpec,
        partial_forward: PartialForward | None = None,
    ) -> HiddenStates:
        mask = mask if any(self.cache_shape.layers) else None  # without attention, it would hide padding
        options = {"position_ids": positions, "attention_mask": mask, CACHE: cache, "use_cache": True}
        if partial_forward is None:
            with capture_hidden_states(self.model, spec.layers) as states:
                out = self.model.model(input_ids=tokens, **options)
        else:
            done = partial_forward.layers
            if done not in self._last_layers:
                self._last_layers[done] = last_layers(self.model, self.cache_shape, done)
            with capture_hidden_states(self.model, [i for i in spec.layers if i > done]) as states:
                out = self._last_layers[done](inputs_embeds=partial_forward.hidden, **options)
            states[done] = partial_forward.hidden
        return _hidden_states(out.last_hidden_state, states, spec)


COUNTING = BaseConfig(max_context=16, prepack=False)  # for a base without weights, to count parameters


def meta_base(
    settings: PreTrainedConfig, config: BaseConfig = COUNTING, dtype: torch.dtype = torch.float32
) -> BaseModel:
    """Return a base without weights; only the language model is built."""
    with torch.device("meta"):
        model: Any = build(settings)
    model.set_attn_implementation(attention.register())
    return BaseModel(model.to(dtype), None, config)


def fuse_for_cpu(base: BaseModel) -> None:
    """With ``config.prepack``, fuse and prepack float32 CPU linear layers in place, which may compile a kernel."""
    config, model = base.config, base.model
    if not config.prepack:
        return
    table = base.kernels = KernelTable() if config.kernels == "auto" and worth_measuring(model) else None
    # The final norm is not fused, because heads read its weight.
    base.prepacked = fuse_modules(model.model.layers, table=table) + prepack_linears(model, table=table)
    base.output_layer = model.get_output_embeddings()


def choose_cpu_kernels(base: BaseModel) -> None:
    """Fill ``base.kernels``, unless it is None, by timing kernels, or with the choice that an earlier load stored."""
    table, model = base.kernels, base.model
    if table is None:
        return
    context = min(TRIAL_CONTEXT, base.max_context // 2)
    tokens = torch.zeros(1, context, dtype=torch.long, device=base.device)

    @cache
    def prompt_cache() -> TreeCache:  # only when something is measured: a stored choice needs no pass
        prompt = base.new_cache(context + max(MEASURED_ROWS))
        base.forward(tokens, prompt)
        return prompt

    def verify(rows: int) -> None:
        base.verify_logits(tokens[:, :rows], TokenTree.chain(rows - 1).shape, prompt_cache())
        prompt_cache().crop()

    choose_kernels(table, model, verify, _kernel_shape(base))


def restore_kernels(parts: BaseParts) -> bool:
    """Take the choice of kernels that an earlier load of the base stored; return False if there is none yet."""
    if not (parts.config.prepack and parts.config.kernels == "auto" and can_prepack(parts.lm_head.weight)):
        return True
    table = KernelTable()
    if not restore(table, _kernel_shape(parts)):
        return False
    parts.kernels = table
    return True


def _kernel_shape(base: BaseParts) -> tuple[object, ...]:
    return base.model_config.model_type, base.cache_shape, base.hidden_size


def _hidden_states(final: Tensor, states: dict[int, Tensor], spec: HiddenStatesSpec) -> HiddenStates:
    return HiddenStates(final=final, layers=torch.cat([states[i] for i in spec.layers], -1) if spec.layers else None)
