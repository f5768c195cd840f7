"""DSpark and DFlash as engines load them: layers over the base's fused hidden states that draft a block in one pass.

    fc.weight [D, n D]   hidden_norm.weight [D]   norm.weight [D]   layers.{i}.*: Qwen3's, with q_norm and k_norm
    DSpark also: markov_head.markov_w1.weight [V, r]   markov_head.markov_w2.weight [W, r]   confidence_head.proj.*
    with a gated Markov head: markov_head.gate_proj.* [r, D + r]
    with a draft vocabulary: lm_head.weight [W, D]   d2t [W], offsets: target = draft id + d2t[draft id]

n is the number of base layers that the head reads, r the Markov head's rank, and W the size of the draft vocabulary.

to=dspark is DeepSpec's layout (``Qwen3DSparkModel``), to=dflash z-lab's (``DFlashDraftModel``). The base's embedding is
never written, and its output head only as the rows of a draft vocabulary, because engines share the target's.
``target_layer_ids`` counts layer outputs from 0. ``dflash_config.causal`` is written because engines have different
defaults, except if only the layers with a window are causal, which is vLLM's default for ``layer_types`` with windows.

Blocks must be as long as in training (``block_size``) unless the head is causal: every slot (draft position of a block)
attends to all others, so an engine that drafts fewer tokens computes different drafts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.windows import FULL
from drafthead.models.formats.checkpoint import PublishedCheckpoint, to_offsets
from drafthead.models.formats.format import Engine, Fixed, Format, Unsupported
from drafthead.models.formats.llama_layer import (
    LAYER_KEYS,
    LAYER_ONLY,
    ROPE_SECTIONS,
    SLIDING,
    WINDOW_KEYS,
    WINDOW_ONLY,
    layer_config,
    require_same_layer,
    window_config,
    window_settings,
)
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead, spread_layers
from drafthead.models.heads.parts.draft_head import TiedMarkov

MARKOV = {"markov_in": "markov_head.markov_w1", "markov_out": "markov_head.markov_w2"}
W1, W2 = (f"{name}.weight" for name in MARKOV.values())
GATE = "markov_head.gate_proj"
CONFIDENCE = "confidence_head.proj"
SHARED, OUTPUT = "embed_tokens.weight", "lm_head.weight"
MASK_FILE = "mask_embedding.pt"
CAUSAL = ("is_causal", "causal", "causal_head")
"""Config keys that mean the same: draft positions attend to earlier ones only. Engines and JetSpec differ."""


class BlockFormat(Format):
    """Base class of the layouts of DSpark (with a Markov head) and DFlash (without)."""

    head_config = DSparkConfig
    architecture: ClassVar[str]
    renames = {
        rf"^{ours}\.": f"{theirs}."
        for ours, theirs in {**MARKOV, "markov_gate": GATE, "confidence": CONFIDENCE}.items()
    }
    ignored_tensors = frozenset({SHARED, OUTPUT, "t2d"})  # t2d is for training; engines read d2t
    other_keys = LAYER_KEYS | {
        *WINDOW_KEYS,
        *("architectures", "intermediate_size", "draft_vocab_size", "block_size", "mask_token_id", "target_layer_ids"),
        *("dflash_config", *CAUSAL, "logit_scale", "num_target_layers"),
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **LAYER_ONLY,
        **WINDOW_ONLY,
        **dict.fromkeys("sample_from_anchor shift_label fc_norm".split(), (False,)),
        "projector_type": ("dflash",),
    }
    sections: ClassVar[Mapping[str, str]] = {"dflash_config": ".*", **ROPE_SECTIONS}
    fixed = {"reads_state": Fixed(False, "its slots start from the base's state (ours)", also="head.copy_layers=true")}
    parts = frozenset({"markov_rank", "confidence"})
    vocabulary_advice: ClassVar[str | None] = None

    def has_markov(self, config: dict[str, Any]) -> bool:
        return False

    def tensors(self, head: DSparkHead) -> dict[str, Tensor]:
        tensors = super().tensors(head)
        if head.config.tied_markov:  # the parameter is the table's projection; the table itself is derived from it
            tensors.pop(W1, None)
        return tensors

    def derived_tensors(self, head: DSparkHead) -> dict[str, Tensor]:
        """Return a tied Markov head's table; with a draft vocabulary also ``d2t`` and its rows of the output head."""
        tensors = {}
        if head.config.markov_rank and head.config.tied_markov:
            tensors[W1] = cast(TiedMarkov, head.markov_in).inference().weight
        if len(head.d2t) < head.base.vocab_size:
            tensors |= {OUTPUT: head.target_lm_head.weight, "d2t": to_offsets(head.d2t)}
        return tensors

    def config(self, head: DSparkHead) -> dict[str, Any]:
        config, scale = head.config, head.target_lm_head.scale
        ids = {"mask_token_id": config.mask_token, "target_layer_ids": [layer - 1 for layer in head.spec.layers]}
        settings = {
            **layer_config(head.base),
            "model_type": "qwen3",
            "architectures": [(DSparkFormat if config.markov_rank else DFlashFormat).architecture],
            "num_hidden_layers": config.num_layers,
            "layer_types": [FULL] * config.num_layers,
            **window_config(config),
            "num_target_layers": head.base.num_layers,
            "intermediate_size": head.decoder_layers[0].mlp.gate_proj.out_features,
            "draft_vocab_size": len(head.d2t),
            "block_size": config.slots,
            "dflash_config": {**ids, "causal": config.causal},
        }
        if config.window is not None:
            settings["dflash_config"]["swa_window_size"] = config.window
        if config.causal == "sliding":
            del settings["dflash_config"]["causal"]  # vLLM's default where layer_types names windows
        if scale != 1.0:
            settings["logit_scale"] = scale
        if config.causal is True:
            settings["is_causal"] = True  # SGLang reads no other key
        if config.markov_rank:
            # DeepSpec has the ids at the top level, vLLM and llama.cpp accept both.
            settings |= {
                **ids,
                "markov_rank": config.markov_rank,
                "markov_head_type": "gated" if config.markov_gate else "vanilla",
            }
            settings |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), config.confidence)
            settings["sample_from_anchor"] = config.anchor_predicts
        return settings

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        yield from self.unsupported_layers(head, spread_layers(head.base.num_layers, head.config.num_layers))
        yield from self.unsupported_logits(head)

    def engines_for(self, head: DSparkHead) -> tuple[Engine, ...]:
        reduced = not head.config.markov_rank and len(head.d2t) < head.base.vocab_size
        what = "a DFlash head's draft vocabulary" if reduced else "the scaling of the rotation"
        limited = Engine("llama.cpp", f"its converter leaves out {what}; to=gguf_dspark writes the file")
        leaves_out = reduced or layer_config(head.base)["rope_scaling"]
        return tuple(
            limited if leaves_out and engine.name == "llama.cpp" else engine.of(head.config) for engine in self.engines
        )

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        if (folder / MASK_FILE).exists():
            raise _unknown(str(folder), f"a separate embedding for mask tokens ({MASK_FILE})")
        return super().read_files(folder)

    def matches(self, config: dict[str, Any]) -> bool:
        return self.architecture in (config.get("architectures") or [])

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Fill in missing config keys, and leave out a confidence head whose input is not ours."""
        checkpoint = super().normalize(checkpoint)
        config, tensors, notes = dict(checkpoint.config), checkpoint.tensors, []
        if len({bool(config[key]) for key in CAUSAL if key in config}) > 1:
            given = ", ".join(f"{key} {config[key]}" for key in CAUSAL if key in config)
            raise UserError(f"{checkpoint.source} says {given}; set the one it was trained with by config.is_causal")
        if not any(key in config for key in CAUSAL) and SLIDING in config.get("layer_types", []):
            # vLLM's default for layers with a window
            config["is_causal"] = True if FULL not in config["layer_types"] else "sliding"
        config["is_causal"] = next((value for key in CAUSAL if (value := config.get(key))), False)
        config["draft_vocab_size"] = config.get("draft_vocab_size") or config.get("vocab_size")
        reads_table, is_gated = config.get("confidence_head_with_markov"), config.get("markov_head_type") == "gated"
        if self.has_markov(config) and (is_gated or not reads_table):
            # Its input is not ours. Drafts do not depend on the confidence head.
            kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONFIDENCE)}
            if len(kept) < len(tensors):
                what = "reads the Markov table without the gate" if reads_table else "does not read the Markov table"
                notes = [f"its confidence head, which {what}, is left out"]
            tensors = kept
        return checkpoint.updated(*notes, config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        config, ids = checkpoint.config, checkpoint.config.get("target_layer_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= -1 for i in ids):
            expected = "a list of layers from 0; set config.target_layer_ids=[a,b,c]"
            raise UserError(f"{checkpoint.source} has target_layer_ids {ids!r}, expected {expected}")
        mask, size = config.get("mask_token_id"), checkpoint.integer("vocab_size")
        if type(mask) is not int or not 0 <= mask < size:
            expected = f"a token's id below {size}; set config.mask_token_id"
            raise UserError(f"{checkpoint.source} has mask_token_id {mask!r}, expected {expected}")
        markov = self.has_markov(config)
        anchor = markov and bool(config.get("sample_from_anchor", True))
        return {
            **super().settings(checkpoint),
            **window_settings(checkpoint, checkpoint.integer("num_hidden_layers")),
            "num_layers": checkpoint.integer("num_hidden_layers"),
            "num_draft_tokens": checkpoint.integer("block_size") - (not anchor),
            "layers": [i + 1 for i in ids],
            "mask_token": mask,
            "causal": config["is_causal"],
            "intermediate_size": checkpoint.width("intermediate_size", "layers.0.mlp.gate_proj.weight"),
            "tied_markov": False,
            "copy_layers": False,
            "anchor_predicts": anchor,
            "markov_rank": checkpoint.integer("markov_rank") if markov else 0,
            "markov_gate": markov and config.get("markov_head_type") == "gated",
            "confidence": markov and f"{CONFIDENCE}.weight" in checkpoint.tensors,
        }

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        return checkpoint.offset_vocabulary()

    def require_same(self, checkpoint: PublishedCheckpoint, head: DSparkHead) -> None:
        require_same_layer(checkpoint, head.base)
        checkpoint.require_scale(head.base)
        layers = checkpoint.config.get("num_target_layers", head.base.num_layers)
        if layers != head.base.num_layers:
            what = f"was made for a base of {layers} layers (num_target_layers), but {head.base.name} has"
            raise checkpoint.wrong_base(f"{what} {head.base.num_layers}")
        for name, expected in ((SHARED, head.base.embedding), (OUTPUT, head.target_lm_head.weight)):
            checkpoint.require_base_tensor(head.base, name, expected)


class DSparkFormat(BlockFormat):
    """DeepSpec's format of DSpark: ``config.json``, ``model.safetensors``, a plain ("vanilla") or gated Markov head."""

    name = "dspark"
    title = "DSpark (Qwen3DSparkModel)"
    architecture = "Qwen3DSparkModel"
    other_keys = BlockFormat.other_keys | {*("markov_rank", "enable_confidence_head", "confidence_head_with_markov")}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **BlockFormat.only,
        "sample_from_anchor": (False, True),
        "projector_type": ("dspark",),
        "markov_head_type": ("vanilla", "gated"),
    }
    parts = BlockFormat.parts | {"markov_gate"}

    def has_markov(self, config: dict[str, Any]) -> bool:
        return True

    def engines_for(self, head: DSparkHead) -> tuple[Engine, ...]:
        engines = super().engines_for(head)
        if head.config.markov_gate:
            plain = "loads only a plain Markov head (its source): head.markov_gate=false"
            engines = tuple(Engine(e.name, plain) if e.name != "SGLang" else e for e in engines)
        if len(head.d2t) == head.base.vocab_size:
            return engines
        refuses = Engine("SGLang", "0.5.23 refuses a Markov head with a draft vocabulary (its source)")
        return tuple(refuses if engine.name == "SGLang" else engine for engine in engines)

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        if not head.config.markov_rank:
            yield "it has no Markov head", "head.markov_rank=64; or to=dflash"
        if head.config.markov_gate and head.config.confidence:
            yield "its confidence head reads the gated table, the format's the table", "head.confidence=false"


class DFlashFormat(BlockFormat):
    """z-lab's format of DFlash: ``config.json`` and ``model.safetensors``; with ``causal``, JetSpec's."""

    name = "dflash"
    title = "DFlash (DFlashDraftModel)"
    architecture = "DFlashDraftModel"

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        yield from unsupported_markov(head)


class TransformersFormat(DFlashFormat):
    """DFlash as an ``assistant_model`` of transformers, whose class for it is ``MuseGlimmerAssistantModel``."""

    name = "transformers"
    title = "DFlash (assistant_model of transformers)"
    architecture = "MuseGlimmerAssistantModel"
    renames = {**DFlashFormat.renames, r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
    fixed = {**DFlashFormat.fixed, "window": Fixed(None, "its layers have a sliding window, whose edge differs there")}
    vocabulary_advice = "head.draft_vocab_size=null"

    def config(self, head: DSparkHead) -> dict[str, Any]:
        config = super().config(head)
        ids = config.pop("dflash_config")
        rope = {"rope_type": "default", **(config.pop("rope_scaling") or {}), "rope_theta": config.pop("rope_theta")}
        names: dict[str, Any] = {"model_type": "muse_glimmer_assistant", "architectures": [self.architecture]}
        names |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # otherwise Muse Glimmer's
        return {**config, **names, "rope_parameters": rope, **{key: ids[key] for key in ids if key != "causal"}}

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from super().unsupported(head)
        if head.config.causal:
            yield "its draft positions attend to earlier ones only", "head.causal=false"


def _unknown(source: str, what: str) -> UserError:
    return UserError(f"{source} has {what}, which drafthead does not support; choose another head")


def unsupported_markov(head: DSparkHead) -> Unsupported:
    """Yield what DFlash cannot express, if ``head`` has it: a Markov or confidence head, or ``anchor_predicts``."""
    if head.config.markov_rank or head.config.confidence:
        other = "; or to=dspark" if head.config.markov_rank else ""
        yield "it has a Markov or a confidence head", f"head.markov_rank=0 head.confidence=false{other}"
    if head.config.anchor_predicts:
        yield "it predicts the first draft at the anchor", "head.anchor_predicts=false"
