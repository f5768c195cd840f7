"""DSpark and DFlash as engines load them: layers over the base's fused hidden states that draft a block in one pass.

    fc.weight [D, n D]   hidden_norm.weight [D]   norm.weight [D]   layers.{i}.*: Qwen3's, with q_norm and k_norm
    DSpark also: markov_head.markov_w1.weight [V, r]   markov_head.markov_w2.weight [W, r]   confidence_head.proj.*
    with a draft vocabulary: lm_head.weight [W, D]   d2t [W], offsets: target = draft id + d2t[draft id]

to=dspark is DeepSpec's layout (``Qwen3DSparkModel``), to=dflash z-lab's (``DFlashDraftModel``). The base's embedding is
never written, and of its output head only the drafted rows: engines share the target's. ``target_layer_ids`` counts
layer outputs from 0. ``dflash_config.causal`` is always written, because engines have different defaults.

Blocks must be as long as in training (``block_size``). Every slot attends to the others, so an engine that drafts
fewer tokens computes different drafts.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint, to_offsets
from drafthead.models.formats.format import Engine, Format, Unsupported, require_base_tensor, unsupported_layers, vllm
from drafthead.models.formats.llama_layer import LAYER_KEYS, layer_config, require_same_layer
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead, TiedMarkov, spread_layers

NAMES = {
    "markov_in.weight": "markov_head.markov_w1.weight",
    "markov_out.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
"""Our names of weights -> published names that differ."""
W1 = NAMES["markov_in.weight"]
CONFIDENCE = (NAMES["confidence.weight"], NAMES["confidence.bias"])
SHARED, OUTPUT = "embed_tokens.weight", "lm_head.weight"
LLAMACPP = Engine("llama.cpp", "its converter reads it (build 11434, its source); to=gguf_dspark writes the file")
MASK_FILE = "mask_embedding.pt"
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_value_scale", "input_embedding_scale", "output_multiplier"), (1.0,)),
    **dict.fromkeys(("use_sliding_window", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias"), (False,)),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), (True,)),
    "final_logit_softcapping": (0.0,),
    "partial_rotary_factor": (1.0,),
    "hidden_act": ("silu",),
}
"""Keys that engines obey -> the only values that heads here support."""


class _BlockFormat(Format):
    """Common base of both layouts."""

    head_config = DSparkConfig
    engines: ClassVar[tuple[Engine, ...]]
    architecture: ClassVar[str]
    other_keys = LAYER_KEYS | {
        *("architectures", "intermediate_size", "draft_vocab_size", "block_size", "mask_token_id", "target_layer_ids"),
        *("dflash_config", "layer_types", "is_causal", "logit_scale", *ONLY),
    }
    ignored_tensors = frozenset({SHARED, OUTPUT})

    def tensors(self, head: DSparkHead) -> dict[str, Tensor]:
        derived = "markov_in.weight" if head.config.tied_markov else ""
        return {NAMES.get(name, name): weight for name, weight in head.named_parameters() if name != derived}

    def derived_tensors(self, head: DSparkHead) -> dict[str, Tensor]:
        """Return a tied Markov table, and with a draft vocabulary its offsets and output rows."""
        tensors = {}
        if head.config.markov_rank and head.config.tied_markov:
            tensors[W1] = cast(TiedMarkov, head.markov_in).inference().weight
        if len(head.d2t) < head.base.vocab_size:
            tensors[OUTPUT] = head.target_lm_head.weight
            tensors["d2t"] = to_offsets(head.d2t)
        return tensors

    def config(self, head: DSparkHead) -> dict[str, Any]:
        config = head.config
        ids = [layer - 1 for layer in head.spec.layers]
        scale = head.target_lm_head.scale
        return {
            **layer_config(head.base),
            "model_type": "qwen3",
            "architectures": [self.architecture],
            "num_hidden_layers": config.num_layers,
            "layer_types": ["full_attention"] * config.num_layers,
            "num_target_layers": head.base.num_layers,
            "intermediate_size": head.decoder_layers[0].mlp.gate_proj.out_features,
            "draft_vocab_size": len(head.d2t),
            "block_size": config.slots,
            "dflash_config": {"mask_token_id": config.mask_token, "target_layer_ids": ids, "causal": config.causal},
            **({} if scale == 1.0 else {"logit_scale": scale}),
        }

    def unsupported(self, head: DSparkHead) -> Unsupported:
        if head.config.reads_state:
            yield "its slots begin as the base's state (ours)", "head.reads_state=false head.copy_layers=true"
        yield from unsupported_layers(head, spread_layers(head.base.num_layers, head.config.num_layers))
        if head.target_lm_head.softcap is not None:
            yield f"{head.base.name} caps its logits, and the format does not", "another base"

    def engines_for(self, head: DSparkHead) -> tuple[Engine, ...]:
        engines = {engine.name: engine for engine in self.engines}
        reduced = not head.config.markov_rank and len(head.d2t) < head.base.vocab_size
        if "llama.cpp" in engines and (reduced or layer_config(head.base)["rope_scaling"]):
            what = "a DFlash head's draft vocabulary" if reduced else "the scaling of the rotation"
            engines["llama.cpp"] = Engine(
                "llama.cpp", f"its converter leaves out {what}; to=gguf_dspark writes the file"
            )
        return tuple(engines.values())

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        if (folder / MASK_FILE).exists():
            raise UserError(
                f"{folder} has a separate embedding for mask tokens ({MASK_FILE}), which heads here do not support"
            )
        return super().read_files(folder)

    def matches(self, config: dict[str, Any]) -> bool:
        return self.architecture in (config.get("architectures") or [])

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Fill in config keys that may be missing or inside ``dflash_config``, and refuse unsupported values."""
        config, tensors = dict(checkpoint.config), dict(checkpoint.tensors)
        inner = config.get("dflash_config") or {}
        for key in ("mask_token_id", "target_layer_ids", "block_size"):
            if config.get(key) is None:
                config[key] = inner.get(key)
        for key, values in ONLY.items():
            for section in (config, inner, config.get("rope_parameters") or {}):
                if (value := section.get(key)) is not None and value not in values:
                    raise UserError(f"{checkpoint.source} has {key} {value!r}, which heads here do not support")
        if config.get("is_causal") is None:
            config["is_causal"] = bool(inner.get("causal", inner.get("causal_head", False)))
        config["draft_vocab_size"] = config.get("draft_vocab_size") or config.get("vocab_size")
        if any(kind != "full_attention" for kind in config.get("layer_types") or []):
            raise UserError(f"{checkpoint.source} has layers with a sliding window, which heads here do not support")
        tensors.pop("t2d", None)  # for training; engines read d2t
        return checkpoint.updated(config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        config, ids = checkpoint.config, checkpoint.config.get("target_layer_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= -1 for i in ids):
            raise UserError(
                f"{checkpoint.source} has target_layer_ids {ids!r}, expected a list of layers, the first is 0"
            )
        mask, size = config.get("mask_token_id"), checkpoint.integer("vocab_size")
        if type(mask) is not int or not 0 <= mask < size:
            raise UserError(f"{checkpoint.source} has mask_token_id {mask!r}, expected a token's id below {size}")
        return {
            "num_layers": checkpoint.integer("num_hidden_layers"),
            "layers": [i + 1 for i in ids],
            "mask_token": mask,
            "causal": config["is_causal"],
            "intermediate_size": checkpoint.width("intermediate_size", "layers.0.mlp.gate_proj.weight"),
            "tied_markov": False,
            "copy_layers": False,
        }

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        return checkpoint.offset_vocabulary()

    def require_same(self, checkpoint: PublishedCheckpoint, head: DSparkHead) -> None:
        require_same_layer(checkpoint, head.base)
        base_scale = head.target_lm_head.scale
        scale = checkpoint.config.get("logit_scale", base_scale)
        if not math.isclose(scale, base_scale, rel_tol=1e-6):
            raise UserError(
                f"{checkpoint.source} scales its logits by {scale}, {head.base.name} by {base_scale}; "
                "name the base that it was trained for"
            )
        for name, expected in ((SHARED, head.base.embedding), (OUTPUT, head.target_lm_head.weight)):
            require_base_tensor(checkpoint, head.base, name, expected)


class DSparkFormat(_BlockFormat):
    """DeepSpec's layout, ``config.json`` and ``model.safetensors``, with the plain ("vanilla") Markov head."""

    name = "dspark"
    title = "DSpark (Qwen3DSparkModel)"
    architecture = "Qwen3DSparkModel"
    engines: ClassVar[tuple[Engine, ...]] = (
        replace(vllm("dspark"), support="0.32.0 loads it in its runner for GPUs (its source; not run)"),
        Engine("SGLang", "has DSPARK since mid 2026 (its threads; not run)"),
        LLAMACPP,
    )
    other_keys = _BlockFormat.other_keys | {
        *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        "sample_from_anchor",
    }

    def config(self, head: DSparkHead) -> dict[str, Any]:
        config = super().config(head)
        inner = config["dflash_config"]
        return {
            **config,
            # DeepSpec has these keys at the top level, vLLM and llama.cpp accept both.
            **{key: inner[key] for key in ("mask_token_id", "target_layer_ids")},
            "markov_rank": head.config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": head.config.confidence,
            "confidence_head_with_markov": head.config.confidence,
            "sample_from_anchor": head.config.anchor_predicts,
        }

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        if not head.config.markov_rank:
            yield "it has no Markov head", "head.markov_rank=64; or to=dflash"

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        checkpoint = super().normalize(checkpoint)
        config, tensors = checkpoint.config, checkpoint.tensors
        if (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise UserError(f"{checkpoint.source} has a Markov head of type {kind}; drafthead supports only vanilla")
        if not config.get("confidence_head_with_markov"):
            # Its input is narrower than ours. Drafts do not depend on the confidence head, so it is left out.
            tensors = {name: value for name, value in tensors.items() if name not in CONFIDENCE}
        return checkpoint.updated(config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        anchor = bool(checkpoint.config.get("sample_from_anchor", True))
        return {
            **super().settings(checkpoint),
            "num_draft_tokens": checkpoint.integer("block_size") - (not anchor),
            "anchor_predicts": anchor,
            "markov_rank": checkpoint.integer("markov_rank"),
            "confidence": CONFIDENCE[0] in checkpoint.tensors,
        }


class DFlashFormat(_BlockFormat):
    """z-lab's layout, ``config.json`` and ``model.safetensors``; with ``causal``, JetSpec's."""

    name = "dflash"
    title = "DFlash (DFlashDraftModel)"
    architecture = "DFlashDraftModel"
    engines: ClassVar[tuple[Engine, ...]] = (
        vllm("dflash"),
        Engine("SGLang", "loads it as DFLASH, without a draft vocabulary (its source; not run)"),
        LLAMACPP,
    )

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        if head.config.markov_rank or head.config.confidence:
            what = "it has a Markov or a confidence head"
            other = "; or to=dspark" if head.config.markov_rank else ""
            yield what, f"head.markov_rank=0 head.confidence=false{other}"
        if head.config.anchor_predicts:
            yield "its anchor's slot drafts", "head.anchor_predicts=false"

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        absent = {"markov_rank": 0, "confidence": False, "anchor_predicts": False}
        return {**super().settings(checkpoint), **absent, "num_draft_tokens": checkpoint.integer("block_size") - 1}
