"""A base's weights and tokenizer as transformers gives them: loaded, dequantised, or random."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from drafthead.data.embedded import smollm2_folder
from drafthead.data.errors import UserError
from drafthead.models import attention
from drafthead.models.base_config import BROKEN, EMBEDDED, BaseConfig, check_architecture, could_not_load


def load_weights(
    config: BaseConfig, device: torch.device, progress: Callable[[str], None]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The stock model that ``config`` names, with our attention, on ``device``, and its tokenizer.

    Args:
        config: whose adapter is not merged here.
        device: decides the dtype, too, where the config leaves it open.
        progress: hears of slow first-time work.

    Raises:
        UserError: it cannot be found, it lacks weights, or its architecture is refused.
    """
    dtype = getattr(torch, config.dtype if config.dtype != "auto" else _default_dtype(device))
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    made = _random(config, dtype) if config.random else _stored(config, dtype, progress)
    return made[0].to(device), made[1]


def _random(config: BaseConfig, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerBase]:
    settings = config.transformers_config()
    check_architecture(settings, config.max_context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention.register())
    return model, config.load_tokenizer(config.name)


def _stored(
    config: BaseConfig, dtype: torch.dtype, progress: Callable[[str], None]
) -> tuple[Any, PreTrainedTokenizerBase]:
    folder = str(smollm2_folder(progress)) if config.name == EMBEDDED else config.name
    options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.gguf_file:
        # Dequantised on load: a GGUF model that counts as quantised can neither be saved nor prepacked.
        options |= {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        tokenizer = config.load_tokenizer(folder)
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.register(), output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise  # the files are not to blame
    except BROKEN as error:
        raise UserError(could_not_load(config.name, error)) from None
    if missing := sorted(found["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise UserError(
            f"base model {config.name!r} lacks {len(missing)} weights, {missing[0]} for one; copy or download it again"
        )
    return model, tokenizer


def _default_dtype(device: torch.device) -> str:
    return "float32" if device.type == "cpu" else "bfloat16"
