"""EAGLE-3 as serving engines load it: ``LlamaForCausalLMEagle3`` with offsets from draft ids to target ids.

    fc.weight [D, 3 D]   midlayer.*   norm.weight [D]   lm_head.weight [W, D]   d2t [W]   t2d [V]

``d2t`` holds offsets: target = draft id + d2t[draft id]; ``t2d`` marks the target ids that can be drafted. Engines
share the target's embedding if the file has none. SGLang silently skips unexpected names, so a misnamed tensor would
stay random. Imports therefore compare all names.

There are two ways to number the layers that a head reads, each under its own config key. At the top level, id k is
``hidden_states[k]`` of transformers: the input of layer k, counted from 0 (vLLM and llama.cpp's converter). Inside
``eagle_config``, id k is the output of layer k (SGLang adds one). For example, the outputs of the layers 2, 14 and 25
(counted from 1) are [2, 14, 25] at the top level and [1, 13, 24] inside. Both are written. vLLM 0.32.0 reads the inner
ids if the outer ones are missing, without adding one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats import llama_layer
from drafthead.models.formats.checkpoint import PublishedCheckpoint, to_offsets
from drafthead.models.formats.format import Engine, Fixed, Format, Unsupported
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head, published_layers
from drafthead.models.heads.parts.draft_head import DraftHead

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_THETA = "own_rope_theta"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class Eagle3Format(Format):
    """Format of EAGLE-3 heads: ``config.json`` and ``model.safetensors``, with names without a ``model.`` prefix."""

    name = "eagle3"
    title = "EAGLE-3 (LlamaForCausalLMEagle3)"
    head_config = Eagle3Config
    aliases = {r"^model\.": "", r"layers\.0\.": "midlayer."}
    optional = {
        "norm_output": "norm_output",
        "fc_norm": "fc_norm",
        "norm_before_residual": "norm_before_residual",
        "norm_before_fc": "norm_before_fc",  # at the top level for llama.cpp's converter and speculators
        "num_tokens": "num_draft_tokens",
        "ttt_steps": "ttt_steps",
    }
    sizes = {"target_hidden_size": "hidden_size", **Format.sizes}
    other_keys = llama_layer.LAYER_KEYS | {
        *llama_layer.WINDOW_KEYS,
        *("architectures", "intermediate_size", "draft_vocab_size", "num_aux_hidden_states"),
        *("eagle_config", "layers", LAYER_IDS),
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **llama_layer.LAYER_ONLY,
        **llama_layer.WINDOW_ONLY,
        **dict.fromkeys("num_hidden_layers parallel_draft_step logit_scale".split(), (1,)),
        **dict.fromkeys("use_aux_hidden_state use_input_layernorm_in_first_layer use_last_layernorm".split(), (True,)),
        **dict.fromkeys("next_layer_regular is_causal".split(), (True,)),
        **dict.fromkeys("tie_word_embeddings use_mtp_layernorm".split(), (False,)),
    }
    harmless = frozenset({"has_lm_head", "parallel_draft_heads_num_layers"})
    sections: ClassVar[Mapping[str, str]] = {"eagle_config": f"(?!{LAYER_IDS}).*", **llama_layer.ROPE_SECTIONS}
    ignored_tensors = frozenset({EMBEDDING})
    optional_tensors = frozenset({OUTPUT, "d2t", "t2d"})
    fixed = {
        "qk_norm": Fixed(False, "it normalises queries and keys, and this format's Llama layer does not"),
        "parallel": Fixed(False, "it drafts all positions in one pass", also="head.num_layers=1"),
    }
    vocabulary_advice = None

    def derived_tensors(self, head: Eagle3Head) -> dict[str, Tensor]:
        output = head.output_head(0)
        return {OUTPUT: output.weight * output.scale, "d2t": to_offsets(head.d2t), "t2d": head.t2d >= 0}

    def config(self, head: Eagle3Head) -> dict[str, Any]:
        return {
            **llama_layer.layer_config(head.base, head.config.rope_theta),
            **super().config(head),
            **llama_layer.window_config(head.config),
            "architectures": [ARCHITECTURES[0]],
            "intermediate_size": head.midlayer.mlp.gate_proj.out_features,
            "draft_vocab_size": len(head.d2t),
            LAYER_IDS: list(head.spec.layers),
            "num_aux_hidden_states": len(head.spec.layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": head.config.norm_before_fc,
                LAYER_IDS: [layer - 1 for layer in head.spec.layers],
            },
        }

    def unsupported(self, head: Eagle3Head) -> Unsupported:
        yield from super().unsupported(head)
        yield from self.unsupported_layers(head, published_layers(head.base.num_layers), first=0)
        if head.lm_head is None:
            yield from self.unsupported_logits(head, instead="head.own_lm_head=true")

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        refused = {}
        if len(head.spec.layers) != 3:
            refused["llama.cpp"] = "no: it reads exactly 3 layers"
        if 0 in head.spec.layers:
            refused["SGLang"] = "no: it cannot read layer 0, the embedding (its source for Llama)"
        return tuple(
            Engine(e.name, refused[e.name]) if e.current and e.name in refused else e.of(head.config)
            for e in self.engines
        )

    def matches(self, config: dict[str, Any]) -> bool:
        kinds = set(config.get("architectures") or [])
        # EAGLE's authors write the base's architecture.
        authors = kinds == {"LlamaForCausalLM"} and "draft_vocab_size" in config
        return bool(kinds & set(ARCHITECTURES)) or authors

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        checkpoint = super().normalize(checkpoint)
        config, notes = dict(checkpoint.config), []
        if "layers" not in config:  # our own key, for correcting an import
            inner = config.get("eagle_config", {}).get(LAYER_IDS)
            config["layers"] = layers = _layers(config.get(LAYER_IDS), inner, checkpoint.source)
            if layers and config.get("num_aux_hidden_states", len(layers)) != len(layers):
                given = f"num_aux_hidden_states {config['num_aux_hidden_states']}, but names the layers {layers}"
                raise UserError(f"{checkpoint.source} has {given}; set config.layers=[a,b,c]")
        config.setdefault("target_hidden_size", config.get("hidden_size"))
        config["draft_vocab_size"] = config.get("draft_vocab_size") or config.get("vocab_size")
        if config["layers"] is None:
            what = "the common 2, L // 2 and L - 3 of L are assumed (or set config.layers)"
            notes.append(f"its config.json names no layers; {what}")
        if "num_tokens" not in config:
            default = Eagle3Config().num_draft_tokens
            notes.append(f"its config.json names no number of drafts; {default} are assumed (or set config.num_tokens)")
        return checkpoint.updated(*notes, config=config)

    def attach(self, checkpoint: PublishedCheckpoint, base: BaseParts) -> DraftHead:
        """Build the head; a layer that rotates without scaling, and unlike the base, keeps its own theta."""
        theta, scaling = llama_layer.layer_rotation(checkpoint.config)
        expected = llama_layer.layer_config(base)
        if scaling is None and (theta, None) != (expected["rope_theta"], expected["rope_scaling"]):
            checkpoint = checkpoint.updated(config={**checkpoint.config, OWN_THETA: theta})
        return super().attach(checkpoint, base)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        default, settings = Eagle3Config(), super().settings(checkpoint)
        num_draft_tokens = settings.get("num_draft_tokens", default.num_draft_tokens)
        settings.setdefault("ttt_steps", min(default.ttt_steps, num_draft_tokens))
        return {
            **settings,
            **llama_layer.window_settings(checkpoint, 1),
            "layers": checkpoint.config["layers"],
            "own_lm_head": OUTPUT in checkpoint.tensors,
            "rope_theta": checkpoint.config.get(OWN_THETA),
            "intermediate_size": checkpoint.width("intermediate_size", "midlayer.mlp.gate_proj.weight"),
        }

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        ids = checkpoint.offset_vocabulary()
        if ids is not None or OUTPUT in checkpoint.tensors:  # engines use the target's output head instead
            checkpoint.width("draft_vocab_size", OUTPUT)
        return ids

    def require_same(self, checkpoint: PublishedCheckpoint, head: Eagle3Head) -> None:
        llama_layer.require_same_layer(checkpoint, head.base, head.config.rope_theta)
        checkpoint.require_base_tensor(head.base, EMBEDDING, head.base.embedding)


def _layers(outer: Any, inner: Any, source: str) -> list[int] | None:
    """Return the layers that a head reads, where 1 is the output of the first layer, from the ids at the config's top
    level and in ``eagle_config``; None without ids."""
    for ids in (outer, inner):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise UserError(f"{source} has {LAYER_IDS} {ids!r}, expected whole numbers; set config.layers=[a,b,c]")
    layers = [i + 1 for i in inner or []]
    if outer and inner and outer != layers:
        given = f"{outer} at the top level (layers {outer}) and {inner} in eagle_config (layers {layers})"
        raise UserError(f"{source} has {LAYER_IDS} {given}; set those it was trained on with config.layers=[a,b,c]")
    return outer or layers or None
