"""The parts of a frozen base that heads, formats and losses read: everything but its layers.

Shape legend: D width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafthead.data.text.chat import Message, prompt_ids, user_turn
from drafthead.errors import UserError
from drafthead.models.base import base_config
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.fingerprint import fingerprint
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parity import logit_scale, stock_pass
from drafthead.models.base.structure import attention_sizes, llama_like, of_first_layers
from drafthead.models.base.text_model import text_config
from drafthead.models.cache.layers import CacheShape, KeyValueShape
from drafthead.models.kernels.linear import KernelTable
from drafthead.models.kernels.private_apis import other_base
from drafthead.system.devices import device_of, graphs_of


class BaseParts:
    """A frozen base without its layers, enough to train heads on given hidden states, draft from them, and convert
    heads. ``BaseModel`` adds the layers.
    """

    def __init__(self, model: Any, tokenizer: Any, config: BaseConfig) -> None:
        """Freeze a stock ``model`` in place and take its parts, whatever its layers are."""
        settings = model.config
        llama_like(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.name = config.name or f"random-{settings.model_type}"
        self.model_config: Any = settings
        self.generation_config = model.generation_config
        self.hidden_size: int = settings.hidden_size
        self.vocab_size: int = settings.vocab_size
        self.num_layers: int = settings.num_hidden_layers
        limit = base_config.context_limit(settings)
        self.max_context: int = config.max_context or settings.max_position_embeddings
        """Largest number of tokens of a prompt and its answer."""
        if limit is not None:
            self.max_context = min(self.max_context, limit.positions)
        self.input_embeddings: nn.Embedding = model.get_input_embeddings()
        self.final_norm: nn.Module = model.model.norm
        self.rotary: Any = getattr(model.model, "rotary_emb", None)  # None in families without a rotary embedding
        self.output_layer = model.get_output_embeddings()  # module of the output head, without scale and soft-cap
        if self.output_layer is None or self.output_layer.bias is not None:
            what = f"{settings.model_type} has no output head without bias, which draft heads need"
            raise UserError(f"{what}; {other_base()}")
        weight = self.output_layer.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.rounding_dtype = torch.bfloat16 if getattr(model, "is_quantized", False) else self.dtype
        """Dtype whose rounding errors matrix products have: bfloat16 with quantised weights."""
        attends = getattr(settings, "num_attention_heads", None) is not None
        sizes = attention_sizes(settings) if attends else None
        shape = sizes and KeyValueShape(sizes, sizes)
        self.cache_shape = CacheShape(layers=(shape,) * self.num_layers, dtype=self.dtype, device=self.device)
        self.lm_head = LMHead(weight=weight.detach(), softcap=getattr(settings, "final_logit_softcapping", None))
        self.fingerprint = ""
        self.uses_graphs = config.graphs == "always" or (config.graphs == "auto" and graphs_of(self.device) is not None)
        self.kernels: KernelTable | None = None  # fastest kernel for each number of input rows; None if not compared
        self.prepacked = 0  # number of linear layers that are packed for few rows

    @classmethod
    def of_checkpoint(
        cls,
        config: BaseConfig,
        device: torch.device | str | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> "BaseParts":
        """Read the parts of the checkpoint, and the rows of its layers that identify it. GGUF files, adapters and
        random bases are loaded whole, before the layers are dropped."""
        model, tokenizer = base_config.load_weights(config, device_of(device), progress, layers=0)
        return _measured(model, tokenizer, config)

    @classmethod
    def of_tensors(
        cls, config: BaseConfig, *, embedding: Tensor, lm_head: Tensor | None = None, norm: Tensor | None = None
    ) -> "BaseParts":
        """Take tensors that somebody else owns, such as an engine, without a copy.

        Args:
            config: names the checkpoint; its config, tokenizer and the rows that identify it are read.
            embedding: [V or more, D] input embedding; rows that an engine adds to the vocabulary are ignored.
            lm_head: [V or more, D] output head; None: the embedding.
            norm: [D] weight of the final norm, as stored in the checkpoint; None: the family's norm has no weight.
        """
        if not config.has_whole_tensors:
            raise UserError("parts cannot be made of an engine's tensors for a random, GGUF or adapted base; load it")
        folder = config.folder()
        settings = text_config(config.transformers_config())
        model = llama_like(base_config.build_empty(config, of_first_layers(settings, 0), dtype=embedding.dtype))
        vocabulary = len(model.get_input_embeddings().weight)
        given = {model.get_input_embeddings(): embedding, model.get_output_embeddings(): lm_head}
        for module, weight in given.items():
            module.weight = nn.Parameter((embedding if weight is None else weight)[:vocabulary], requires_grad=False)
        if norm is not None:
            model.model.norm.weight = nn.Parameter(norm, requires_grad=False)
        # No part of a base has the other weights, such as position embeddings.
        device = embedding.device
        model._apply(lambda each: torch.zeros_like(each, device=device) if each.is_meta else each.to(device))
        model.config = settings
        return _measured(model, config.load_tokenizer(folder), config)

    def scaled_head(self, logits: Tensor, final: Tensor) -> LMHead:
        """Return the output head with the scale that gives the stock ``logits`` [1, T, V] of ``final`` states."""
        with torch.inference_mode():
            product = self.output_layer(final)
        scale = logit_scale(self.model_config, self.lm_head, product, logits, self.rounding_dtype)
        return replace(self.lm_head, scale=scale)

    def identity(self) -> dict[str, Any]:
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
        """Input embedding table [V, D]."""
        return self.input_embeddings.weight

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        configured = self.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None)

    @property
    def unused_token(self) -> int:
        """Id that never occurs in text: an embedding without a token, else a special token that chats do not use.
        Without either, the last id; without a tokenizer, 0."""
        tokenizer = self.tokenizer
        if tokenizer is None or len(tokenizer) < self.vocab_size:
            return 0 if tokenizer is None else len(tokenizer)
        used = {*self.eos_ids, *self.prompt_ids(user_turn("")), tokenizer.pad_token_id, tokenizer.bos_token_id}
        special = [*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder]
        return max((i for i in special if i not in used and i < self.vocab_size), default=self.vocab_size - 1)

    def prompt_ids(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of ``messages`` and of the start of the answer, by the chat template with
        ``variables``."""
        return prompt_ids(self.tokenizer, messages, {**self.config.chat_template_kwargs, **(variables or {})})


def _measured(model: Any, tokenizer: Any, config: BaseConfig) -> BaseParts:
    """Return the parts of a stock model with fingerprint and logit scale."""
    parts = BaseParts(model, tokenizer, config)
    whole = model
    if config.has_whole_tensors:
        whole = llama_like(base_config.meta_model(config, model.config))
        tensors = base_config.checkpoint_tensors(config, whole)
        names = {id(module): name for name, module in whole.named_modules()}

        def first_rows(layer: nn.Module, count: int) -> Tensor:
            return tensors.read(f"{names[id(layer)]}.weight", slice(count)).to(parts.dtype)

        parts.fingerprint = fingerprint(whole, ends=model, first_rows=first_rows)
    else:
        parts.fingerprint = fingerprint(model)
    parts.num_layers = len(whole.model.layers)
    logits, final = stock_pass(model, torch.arange(3, 7, device=parts.device)[None])
    parts.lm_head = parts.scaled_head(logits, final)
    return parts
