"""The frozen base model: stock transformers modules, driven for hidden states, plain decoding and tree verification.

Shape legend: B batch, T time, N tree nodes, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.data.text.chat import Message, prompt_ids, user_turn
from drafthead.data.utils.errors import UserError
from drafthead.models.base import adapter
from drafthead.models.base.base_config import BaseConfig, check_architecture, context_limit, load_weights
from drafthead.models.base.layers import attention_sizes, capture_hidden_states, last_layers, llama_like
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parity import Expected, check, logit_scale, measured_sizes
from drafthead.models.base.windows import Masks, windows_of
from drafthead.models.cache.kv_cache import CacheShape, KVCache, RaggedCache, TreeMasks
from drafthead.models.cache.static_cache import StaticKVCache, StaticModel, chain_shape
from drafthead.models.kernels import attention
from drafthead.models.kernels.choice import choose_kernels, worth_measuring
from drafthead.models.kernels.fused import fuse_modules
from drafthead.models.kernels.linear import MEASURED_ROWS, KernelTable, prepack_linears
from drafthead.models.token_tree import TreeShape, causal_mask


@dataclass(frozen=True, kw_only=True)
class PartialForward:
    """The first layers of the target's pass over a proposal, computed while drafting (early exit).

    Their keys and values are in the target's cache already: after the committed tokens, in the order of the nodes.
    """

    layers: int
    """How many layers are computed."""
    hidden: Tensor
    """[B, N, D] their output."""


NO_LAYERS = HiddenStatesSpec()
CHANGE_TEXT = (
    *("repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens", "num_beams", "sequence_bias"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "guidance_scale", "stop_strings"),
)
"""Keys of a generation config that transformers heeds at temperature 0, and nothing here does."""
TRIAL_CONTEXT = 200
"""Tokens in the cache when kernels are timed."""


class BaseModel:
    """A frozen causal LM. Nothing here computes a gradient, and the model is never saved."""

    def __init__(self, model: Any, tokenizer: Any, config: BaseConfig) -> None:
        settings = model.config
        check_architecture(settings, config.max_context)
        self.model = llama_like(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.name = config.name or f"random-{settings.model_type}"
        self.hidden_size: int = settings.hidden_size
        self.vocab_size: int = settings.vocab_size
        self.num_layers = len(self.model.model.layers)
        limit = context_limit(settings)
        self.max_context: int = config.max_context or settings.max_position_embeddings
        """Positions that a text may have."""
        if limit is not None:
            self.max_context = min(self.max_context, limit.positions)
        self._limited = limit is not None
        for module in self.model.modules():
            # Llama 4's is 1 within the limit, and otherwise counts places in a pass, which are not those in a tree.
            if getattr(module, "attn_temperature_tuning", False):
                module.attn_temperature_tuning = False
        self.windows = windows_of(settings, self.max_context)
        lm_head = model.get_output_embeddings()
        if lm_head is None or lm_head.bias is not None:
            raise UserError(f"{settings.model_type} has no bias-free output head; draft heads are initialised from one")
        self.dtype, self.device = lm_head.weight.dtype, lm_head.weight.device
        self.rounds_to = torch.bfloat16 if getattr(model, "is_quantized", False) else self.dtype
        """What products are rounded to: with quantised weights 16 bits, whatever the rest is in."""
        counted = self.device.type == "meta"  # a base without weights, to know the sizes of a head on it
        self.fingerprint = "" if counted else adapter.fingerprint(model)
        kv_heads, head_dim = attention_sizes(settings)
        self.cache_shape = CacheShape(
            layers=self.num_layers, heads=kv_heads, head_dim=head_dim, dtype=self.dtype, device=self.device
        )
        expected = None
        if not counted:
            # Before layers are replaced: the stock modules with their own attention say what is right.
            self.cache_shape = replace(self.cache_shape, **measured_sizes(self))
            expected = Expected.of(self)
        head = LMHead(weight=lm_head.weight.detach(), softcap=getattr(settings, "final_logit_softcapping", None))
        self.lm_head = head if expected is None else replace(head, scale=logit_scale(self, head, expected))
        self._wrapped_attention: str | None = None
        self._tree_masks = TreeMasks()
        self._last_layers: dict[int, Any] = {}
        self.uses_graphs = config.graphs == "always" or (config.graphs == "auto" and self.device.type == "cuda")
        self._static: StaticModel | None = None
        measured = config.kernels == "auto" and worth_measuring(self.model)
        self.kernels = KernelTable() if config.prepack and measured else None
        """Which kernel multiplies how many rows, where that is measured."""
        # Only the layers: other code may read the final norm's weight.
        fused = fuse_modules(self.model.model.layers, table=self.kernels) if config.prepack else 0
        self.prepacked = fused + (prepack_linears(self.model, table=self.kernels) if config.prepack else 0)
        self._lm_head = self.model.get_output_embeddings()
        if self.kernels is not None:
            self._choose_kernels(self.kernels)
        if expected is not None:
            check(self, expected)

    @classmethod
    def load(
        cls,
        config: BaseConfig,
        device: torch.device | str = "cpu",
        progress: Callable[[str], None] = lambda line: None,
    ) -> "BaseModel":
        """Load or build the base that ``config`` names; ``progress`` gets a line about slow first-time work."""
        model, tokenizer = load_weights(config, torch.device(device), progress)
        if config.adapter is not None:
            model = adapter.merge(llama_like(model), config.adapter)
        return cls(model, tokenizer, config)

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any) -> "BaseModel":
        """A model that is loaded already. It is frozen and given our attention, and otherwise left as it is."""
        stock = model.config._attn_implementation
        model.set_attn_implementation(attention.register())
        wrapped = cls(model, tokenizer, BaseConfig(name=model.config.name_or_path, prepack=False))
        wrapped._wrapped_attention = stock
        return wrapped

    def _choose_kernels(self, table: KernelTable) -> None:
        context = min(TRIAL_CONTEXT, self.max_context // 2)
        cache = self.new_cache(context + max(MEASURED_ROWS))
        tokens = torch.zeros(1, context, dtype=torch.long, device=self.device)
        self.forward(tokens, cache)

        def verify(rows: int) -> None:
            self.verify_logits(tokens[:, :rows], chain_shape(rows), cache)
            cache.crop()

        choose_kernels(table, self.model, verify, (self.model.config.model_type, self.cache_shape, self.hidden_size))

    def stock(self) -> Any:
        """Another copy of the model, as transformers loads it: its modules and its attention are the stock ones."""
        if self._wrapped_attention is not None:
            model = deepcopy(self.model)
            model.set_attn_implementation(self._wrapped_attention)
            return model
        model, _ = load_weights(self.config, self.device, lambda line: None, own_attention=True)
        if self.config.adapter is not None:
            model = adapter.merge(llama_like(model), self.config.adapter)
        return model.eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """What a corpus or a head stores about the base it was made with."""
        return {
            "name": self.name,
            "revision": self.config.revision,
            "fingerprint": self.fingerprint,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
            "recipe": self.config.saved(),
        }

    @property
    def embedding(self) -> Tensor:
        """The input embedding table, [V, D]."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None)

    @property
    def ignored_settings(self) -> list[str]:
        """Settings of its generation config with which transformers' greedy text is not that of the largest logits."""
        values = {key: getattr(self.model.generation_config, key, None) for key in CHANGE_TEXT}
        given = {key: value for key, value in values.items() if value not in (None, 0, 1, [])}
        return [f"{key}={value}" if isinstance(value, int | float) else key for key, value in given.items()]

    @property
    def unused_token(self) -> int:
        """An id that no text has: an embedding without a token, or a special token that no turn of a chat has."""
        tokenizer = self.tokenizer
        if tokenizer is None or len(tokenizer) < self.vocab_size:
            return 0 if tokenizer is None else len(tokenizer)
        spoken = {*self.eos_ids, *self.prompt_ids(user_turn("")), tokenizer.pad_token_id, tokenizer.bos_token_id}
        special = [*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder]
        return max((i for i in special if i not in spoken and i < self.vocab_size), default=self.vocab_size - 1)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of ``messages`` and of the start of the answer, by the chat template and its settings."""
        return prompt_ids(self.tokenizer, messages, self.config.chat_template_kwargs)

    def new_cache(self, capacity: int, nodes: int | None = None) -> KVCache:
        """An empty cache for one row.

        With ``nodes``, the most that are pending at once, layers with a window keep only what it needs, if that is less
        than ``capacity``; the cache can then not go back to an earlier position. One of static shapes keeps all: a
        graph reads and writes fixed places.
        """
        if not self.uses_graphs:
            return KVCache(self._trimmed(capacity, nodes), capacity)
        if self._static is None:
            # Neither holds this object, whose memory so is free as soon as it is let go.
            head, product = self.lm_head, self._lm_head
            logits = lambda h: head.scale_and_cap(product(h))  # noqa: E731
            windowed = None if self.windows is None else self.windows.masks
            self._static = StaticModel(self.cache_shape, self.model.model, logits, windowed)
        return self._static.cache(capacity)

    def new_slots(self, rows: int, capacity: int, nodes: int | None = None) -> RaggedCache:
        """An empty cache for ``rows`` rows of lengths of their own; ``nodes`` as of ``new_cache``."""
        return RaggedCache(self._trimmed(capacity, nodes), rows, capacity)

    def _trimmed(self, capacity: int, nodes: int | None) -> CacheShape:
        if self.windows is None or nodes is None:
            return self.cache_shape
        return self.cache_shape.trimmed(self.windows.by_layer, capacity, nodes)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache | RaggedCache,
        counts: Tensor | None = None,
        spec: HiddenStatesSpec = NO_LAYERS,
    ) -> HiddenStates:
        """Append committed tokens to ``cache``; returns the hidden states after each of them.

        ``counts`` [B] int64: how many of the T tokens each row has; the rest is padding.
        """
        new = tokens_BT.shape[1]
        if isinstance(cache, StaticKVCache) and cache.fits(new) and not spec.layers:
            (hidden,) = cache.run(tokens_BT, chain_shape(new))
            cache.commit(counts)
            return HiddenStates(final=hidden)
        mask = None
        positions = cache.positions(torch.arange(new, device=self.device)[None])
        cache.reserve(new, committed=True)
        if isinstance(cache, RaggedCache) or (cache.length and new > 1):
            mask = cache.mask(causal_mask(new, self.device)[None], self.dtype)
        masks = mask if self.windows is None else self._windowed(mask, cache, positions, None)
        found = self._decoder(tokens_BT, positions, masks, cache, spec)
        cache.commit(counts)
        return found

    @torch.inference_mode()
    def verify(
        self,
        tokens_BN: Tensor,
        shape: TreeShape,
        cache: KVCache | RaggedCache,
        spec: HiddenStatesSpec = NO_LAYERS,
        partial_forward: PartialForward | None = None,
    ) -> HiddenStates:
        """One pass over the last N nodes of token trees after the committed prefixes; returns their hidden states.

        Nodes before those N have been read by earlier calls. All states stay pending in ``cache`` until
        ``cache.commit_path`` or ``cache.crop``. With ``partial_forward`` the first layers are done.
        """
        new = tokens_BN.shape[1]
        if (static := _static(cache, shape, new, spec, partial_forward)) is not None:
            return HiddenStates(final=static.run(tokens_BN, shape)[0])
        positions = cache.positions(shape.depths[:, -new:])
        cache.reserve(new)
        if isinstance(cache, KVCache) and shape.tree is not None and new == len(shape):
            mask = self._tree_masks.mask(shape.tree, shape, cache)
        else:
            mask = cache.mask(shape.ancestors[:, -new:], self.dtype)
        masks = mask if self.windows is None else self._windowed(mask, cache, positions, shape.depths)
        return self._decoder(tokens_BN, positions, masks, cache, spec, partial_forward)

    @torch.inference_mode()
    def verify_logits(
        self,
        tokens_BN: Tensor,
        shape: TreeShape,
        cache: KVCache | RaggedCache,
        spec: HiddenStatesSpec = NO_LAYERS,
        partial_forward: PartialForward | None = None,
    ) -> tuple[HiddenStates, Tensor]:
        """``verify`` and the logits after every node [B, N, V], by one graph where there are graphs."""
        if (static := _static(cache, shape, tokens_BN.shape[1], spec, partial_forward)) is not None:
            final, logits = static.run(tokens_BN, shape, with_logits=True)
            return HiddenStates(final=final), logits
        hidden = self.verify(tokens_BN, shape, cache, spec, partial_forward)
        return hidden, self.logits(hidden.final)

    def synchronise(self) -> None:
        """Wait for the device, so that wall-clock times are of work done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """The base's next-token logits of [..., D] hidden states: [..., V]."""
        return self.lm_head.scale_and_cap(self._lm_head(hidden))

    @torch.no_grad()
    def hidden_states(self, batch: TrainBatch, spec: HiddenStatesSpec) -> HiddenStates:
        """Hidden states of packed rows; a token sees its own document only. Detached, on the base's device."""
        if self._limited and (last := int(batch.position_ids.max())) >= self.max_context:
            raise UserError(f"a text of {last + 1} tokens exceeds the context of {self.max_context}; shorten the rows")
        ids, positions = batch.input_ids.to(self.device), batch.position_ids.to(self.device)
        masks = self.document_masks(batch.document_ids.to(self.device), positions, self.dtype)
        with capture_hidden_states(self.model, spec.layers) as states:
            out = self.model.model(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=False)
        return _hidden_states(out.last_hidden_state, states, spec)

    def document_masks(self, document_ids: Tensor, position_ids: Tensor, dtype: torch.dtype) -> Masks:
        """What the decoder takes as mask for packed rows ([B, T] each): a token sees its own document only."""
        mask = attention.document_mask(document_ids, dtype)
        return mask if self.windows is None else self.windows.masks(mask, position_ids, position_ids, dtype)

    def _windowed(
        self, mask: Tensor | None, cache: KVCache | RaggedCache, positions: Tensor, depths: Tensor | None
    ) -> Masks:
        """The masks of all kinds of layer for a pass at ``positions``; ``depths`` of pending nodes, None: a chain."""
        assert self.windows is not None
        if isinstance(cache, KVCache) and cache.length + cache.pending <= self.windows.smallest:
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
        cache: KVCache | RaggedCache,
        spec: HiddenStatesSpec,
        partial_forward: PartialForward | None = None,
    ) -> HiddenStates:
        options = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if partial_forward is None:
            with capture_hidden_states(self.model, spec.layers) as states:
                out = self.model.model(input_ids=tokens, **options)
        else:
            done = partial_forward.layers
            if done not in self._last_layers:
                self._last_layers[done] = last_layers(self, done)
            with capture_hidden_states(self.model, [i for i in spec.layers if i > done]) as states:
                out = self._last_layers[done](inputs_embeds=partial_forward.hidden, **options)
            states[done] = partial_forward.hidden
        return _hidden_states(out.last_hidden_state, states, spec)


def _static(
    cache: KVCache | RaggedCache,
    shape: TreeShape,
    new: int,
    spec: HiddenStatesSpec,
    partial_forward: PartialForward | None,
) -> StaticKVCache | None:
    """The cache, if a captured graph can run the pass: over a whole tree and all layers."""
    whole = new == len(shape) and not (spec.layers or partial_forward)
    return cache if whole and isinstance(cache, StaticKVCache) and cache.fits(new) else None


def _hidden_states(final: Tensor, states: dict[int, Tensor], spec: HiddenStatesSpec) -> HiddenStates:
    return HiddenStates(final=final, layers=torch.cat([states[i] for i in spec.layers], -1) if spec.layers else None)
