"""The transformers class of a checkpoint's language model, also inside a composite (vision-language) checkpoint.

Shape legend: B rows, T tokens, V vocabulary.
"""

import struct
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast

from drafthead.errors import UserError
from drafthead.models.kernels.private_apis import CACHE, other_base
from drafthead.models.kernels.recurrence import can_follow

LOAD_ERRORS = (
    *(OSError, ImportError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(SafetensorError, StrictDataclassError, struct.error, AssertionError),
)
"""Errors that transformers and its libraries raise for missing, damaged or contradictory files."""
EXTRA_PARAMETERS = 10_000_000
"""Parameters that a config may always describe in addition to a multiple of those in its file, for small files and for
tensors that a new head copies from the base. The bound rejects a config that would exhaust memory."""
SMALLEST_TENSOR = 10_000  # parameters that a smaller tensor counts as, for the memory of its module
LISTED, LONGEST = ("_layers", "n_layer", "_labels", "block_count", "attention_types"), 10_000
"""Ends of the names of settings for which transformers makes lists, and the longest list that is allowed."""
INNER_NAMES = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.": "model.",
}
"""Weight names in composite checkpoints -> names in a separate language model."""


class TextModel:
    """A decoder with an output head, for language models that transformers offers only inside composite models.
    ``text_class`` adds the family's base class, which initialises weights."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, input_ids: Tensor | None = None, logits_to_keep: int = 0, **options: Any) -> Any:
        """Return a ``CausalLMOutputWithPast`` with logits [B, T, V], of the last ``logits_to_keep`` tokens (0: all)."""
        options.pop("labels", None)
        out = self.model(input_ids=input_ids, **options)
        hidden = out.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else out.last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **{CACHE: getattr(out, CACHE)})


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's config: ``config``, or a part of it in a composite checkpoint."""
    inner = cast(PreTrainedConfig, config.get_text_config(decoder=True))
    for key in ("vocab_size", "hidden_size", "tie_word_embeddings"):  # some checkpoints state them only at the top
        if not getattr(inner, key, None) and getattr(config, key, None):
            setattr(inner, key, getattr(config, key))
    return inner


def text_class(config: PreTrainedConfig) -> Any:
    """Return transformers' causal LM class for ``config``, or a class that adds an output head to its decoder."""
    known = AutoModelForCausalLM._model_mapping
    inner = text_config(config)
    if type(inner) in known:
        classes = known[type(inner)]
        return classes if isinstance(classes, type) else classes[0]
    try:
        decoder: Any = AutoModel._model_mapping[type(inner)]
    except KeyError:
        raise UserError(f"{inner.model_type} has no causal language model in transformers; {other_base()}") from None
    family = decoder.__bases__[0]
    if not hasattr(decoder, "get_input_embeddings") or getattr(inner, "is_encoder_decoder", False):
        raise UserError(f"{inner.model_type} has no text decoder that can be used alone; {other_base()}")
    return type(f"{family.__name__}Text", (TextModel, family, GenerationMixin), {"config_class": type(inner)})


def followed_modules(config: PreTrainedConfig, kinds: Collection[str]) -> list[ModuleType]:
    """Return the modules of a config's classes whose functions for recurrent layer types ``kinds`` are known."""
    modules = dict.fromkeys(sys.modules[each.__module__] for each in text_class(config).__mro__)
    return [module for module in modules if can_follow(module, kinds)]


def inner_names(config: PreTrainedConfig) -> dict[str, str] | None:
    """Return the renaming of a composite checkpoint's weights for its language model; None for other checkpoints."""
    if (inner := text_config(config)) is config:
        return None
    # Rules for stacking the weights of experts are looked up by model type. Renamings are not taken over: Llava's
    # would also rename the weights of every Llama that is saved later.
    rules = get_checkpoint_conversion_mapping(config.model_type) or []
    rules = [rule for rule in rules if isinstance(rule, WeightConverter)]
    if rules and get_checkpoint_conversion_mapping(inner.model_type) is None:
        register_checkpoint_conversion_mapping(inner.model_type, rules)
    return INNER_NAMES


def build(config: PreTrainedConfig, **options: Any) -> Any:
    """Build a language model with random weights (none on the meta device)."""
    return text_class(config)._from_config(text_config(config), **options)


def check_lengths(value: Any, source: str, key: str = "") -> None:
    """Reject settings of a model for which transformers would make very long lists."""
    for name, item in value.items() if isinstance(value, dict) else ():
        check_lengths(item, source, str(name))
    for item in value if isinstance(value, list) else ():
        check_lengths(item, source, key)
    if isinstance(value, int) and value > LONGEST and key.endswith(LISTED):
        raise UserError(f"{source} has {key!r}: {value}, but at most {LONGEST:,} is read; correct it")


@contextmanager
def parameter_limit(most: int, error: UserError) -> Iterator[None]:
    """Raise ``error`` as soon as the block has built more than ``most`` parameters on the meta device, so that a config
    with a million layers is rejected before it takes memory."""
    total, thread = 0, threading.get_ident()

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is not None and tensor.is_meta and threading.get_ident() == thread:
            total += max(tensor.numel(), SMALLEST_TENSOR)
            if total > most:
                raise error

    with (
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ):
        yield
