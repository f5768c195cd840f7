"""DSpark and DFlash as a GGUF file that llama.cpp loads (``--spec-type draft-dspark``, ``draft-dflash``).

Names, shapes and meanings are those of llama.cpp's ``dflash`` architecture (build 11434)::

    fc.weight [D, n D]   enc.output_norm.weight [D]: after fc   output_norm.weight [D]   blk.{i}.*: Qwen3's
    DSpark also: markov_w1.weight [V, r]   markov_w2.weight [W, r]   conf_proj.weight [1, D + r], conf_proj.bias
    with a draft vocabulary: output.weight [W, D]   d2t [W], target ids

n is the number of base layers that the head reads, r the Markov head's rank, and W the size of the draft vocabulary.

``target_layers`` numbers the inputs of layers, so its ids are one larger than config.json's ``target_layer_ids``, which
number outputs. The file contains the base's tokenizer, which defines the mask token.
"""

from typing import Any

from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.dspark import CONFIDENCE, W1, W2, BlockFormat, DSparkFormat, unsupported_markov
from drafthead.models.formats.format import Unsupported
from drafthead.models.formats.gguf.gguf_files import (
    NO_WINDOW,
    GgufFile,
    GgufLayout,
    add_tokenizer,
    rope_factors,
    split_name,
)
from drafthead.models.formats.llama_layer import NO_WINDOW_ONLY, layer_config
from drafthead.models.heads.dspark import DSparkHead

MASK = "tokenizer.ggml.mask_token_id"


class DSparkGgufFormat(GgufLayout, BlockFormat):
    """DSpark or DFlash as ``head.gguf``. As in llama.cpp, a file with a Markov head is DSpark."""

    name = "gguf_dspark"
    title = "DSpark or DFlash (GGUF for llama.cpp)"
    outer = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        W1: "markov_w1.weight",
        W2: "markov_w2.weight",
        f"{CONFIDENCE}.weight": "conf_proj.weight",
        f"{CONFIDENCE}.bias": "conf_proj.bias",
    }
    needed = frozenset({"block_size", "target_layers"})
    accepted = frozenset({"attention.causal", "sample_from_anchor", "has_confidence_head", "logit_scale"})
    other_keys = DSparkFormat.other_keys
    only = {**DSparkFormat.only, **NO_WINDOW_ONLY}
    fixed = {**BlockFormat.fixed, "window": NO_WINDOW}

    def has_markov(self, config: dict[str, Any]) -> bool:
        return bool(config.get("markov_rank"))

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        if not head.config.markov_rank:
            yield from unsupported_markov(head)
        try:
            split_name(head.base.tokenizer)
            rope_factors(layer_config(head.base))
        except UserError as error:
            other = "dspark" if head.config.markov_rank else "dflash"
            how = f"export to={other}, and convert that with convert_hf_to_gguf.py --target-model-dir BASE"
            yield str(error).split("; use")[0], how

    def keys(self, config: dict[str, Any]) -> dict[str, Any]:
        inner = config["dflash_config"]
        keys = {
            "target_layers": [layer + 1 for layer in inner["target_layer_ids"]],
            "block_size": config["block_size"],
            "attention.causal": inner["causal"],
            MASK: inner["mask_token_id"],
        }
        if "markov_rank" in config:
            keys["sample_from_anchor"] = config["sample_from_anchor"]
            keys["has_confidence_head"] = config["enable_confidence_head"]
        return keys | {key: config[key] for key in ["logit_scale"] if key in config}

    def config_of(self, keys: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        config = {
            "block_size": keys["block_size"],
            "is_causal": keys.get("attention.causal", False),
            "mask_token_id": keys.get(MASK),
            "target_layer_ids": [layer - 1 for layer in keys["target_layers"]],
            "sample_from_anchor": keys.get("sample_from_anchor", True),
            "confidence_head_with_markov": True,
        }
        if W2 in tensors:
            config["markov_rank"] = tensors[W2].shape[1]
        return config | {key: keys[key] for key in ["logit_scale"] if key in keys}

    def add_vocabulary(self, file: GgufFile, base: BaseParts) -> None:
        add_tokenizer(file.writer, base)
