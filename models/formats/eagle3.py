"""EAGLE-3 as serving engines load it: ``LlamaForCausalLMEagle3`` with offsets from draft ids to target ids.

    fc.weight [D, 3 D]   midlayer.*   norm.weight [D]   lm_head.weight [W, D]   d2t [W]   t2d [V]

``d2t`` holds offsets: target = draft id + d2t[draft id]; ``t2d`` marks the target ids that can be drafted. Engines
share the target's embedding when there is none in the file. SGLang skips names that it does not know, so a misnamed
tensor would stay random: ``check`` compares all of them.

Two engines count the hidden states that are fused in two ways, and read them in two places of the config. At the top
level the id k is ``hidden_states[k]`` of transformers, what goes into layer k counted from 0 (vLLM and llama.cpp's
converter); inside ``eagle_config`` it is what layer k puts out (SGLang adds one). Both are written, and each is read
in its place's way. vLLM 0.32.0 reads the inner ids where the outer ones are missing, and does not add one.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.format import Engine, Format, Unsupported, require_bases_own, vllm
from drafthead.models.formats.llama_layer import LAYER_KEYS, layer_config, require_same_layer
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
SGLANG = Engine(
    "SGLang",
    "loads it as EAGLE3 (its source, read in 2026; not run)",
    current=True,
    serve="python -m sglang.launch_server --model-path {base} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path {folder} --speculative-num-steps {drafts} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {nodes}",
)
LLAMACPP_CONVERTER = Engine(
    "llama.cpp",
    "its converter reads the folder (build 11434, run 22 November 2026); to=gguf writes the same tensors directly",
    current=True,
    serve="python convert_hf_to_gguf.py {folder} --target-model-dir {base} --outfile head.gguf",
)


class Eagle3Format(Format):
    """``config.json`` and ``model.safetensors``, names without a ``model.`` prefix."""

    name = "eagle3"
    title = "EAGLE-3 (LlamaForCausalLMEagle3)"
    head_config = Eagle3Config
    engines: ClassVar[tuple[Engine, ...]] = (
        vllm("eagle3"),
        SGLANG,
        LLAMACPP_CONVERTER,
        Engine("TensorRT-LLM", "reads it (its source); the layers are set on its side: eagle3_layers_to_capture"),
        Engine("TGI", "no"),
    )
    optional = {
        "norm_output": "norm_output",
        "fc_norm": "fc_norm",
        "norm_before_residual": "norm_before_residual",
        "num_tokens": "num_draft_tokens",
        "ttt_steps": "ttt_steps",
    }
    sizes = {"target_hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    other_keys = LAYER_KEYS | {
        *("architectures", "hidden_size", "intermediate_size", "draft_vocab_size"),
        *("eagle_config", "layers", "norm_before_fc", LAYER_IDS),
    }
    ignored_tensors = frozenset({EMBEDDING})

    def tensors(self, head: Eagle3Head) -> dict[str, Tensor]:
        """Ours have the published names."""
        return dict(head.named_parameters())

    def derived_tensors(self, head: Eagle3Head) -> dict[str, Tensor]:
        """The draft vocabulary as offsets and as marks; the base's output head where the head has none of its own."""
        output = head.output_head(0)
        return {
            "lm_head.weight": output.weight * output.scale,
            "d2t": to_offsets(head.d2t),
            "t2d": head.t2d >= 0,
        }

    def config(self, head: Eagle3Head) -> dict[str, Any]:
        return {
            **layer_config(head.base),
            **super().config(head),
            "architectures": [ARCHITECTURES[0]],
            "intermediate_size": head.midlayer.mlp.gate_proj.out_features,
            "draft_vocab_size": len(head.d2t),
            "target_hidden_size": head.base.hidden_size,
            "norm_before_fc": head.config.norm_before_fc,  # where llama.cpp's converter and speculators files have it
            LAYER_IDS: list(head.spec.layers),
            "num_aux_hidden_states": len(head.spec.layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": head.config.norm_before_fc,
                LAYER_IDS: [layer - 1 for layer in head.spec.layers],
            },
        }

    def unsupported(self, head: Eagle3Head) -> Unsupported:
        layers, count = list(head.spec.layers), head.base.num_layers
        if not layers or sorted(set(layers)) != layers or layers[0] < 1 or layers[-1] >= count:
            # Engines join the states in the order of the layers, and count the last one's before or after the norm.
            what = f"it reads the layers {layers}, and engines join them in ascending order, of 1 to {count - 1}"
            yield what, "head.layers=null"
        if head.config.qk_norm:
            what = "it norms queries and keys, and the layer of this format is Llama's, which does not"
            yield what, "head.qk_norm=false"
        if head.config.parallel:
            yield "it drafts all positions in one pass", "head.parallel=false head.num_layers=1"
        if head.lm_head is None and head.target_lm_head.softcap is not None:
            what = f"{head.base.name} caps its logits, and the format does not cap those of the base's output head"
            yield what, "head.own_lm_head=true"

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        # An engine that ignores a key loads the head and drafts badly, without a word.
        found = {engine.name: engine for engine in self.engines}
        if head.config.norm_output:
            found["SGLang"] = replace(SGLANG, support="reads norm_output in versions of 2026 (its source; not run)")
            found["llama.cpp"] = _ignores("llama.cpp", "norm_output", "the state before the norm is fed on")
        if head.config.norm_before_fc:
            found["SGLang"] = _ignores("SGLang", "norm_before_fc", "input_norm.weight is skipped")
        if head.config.fc_norm:
            found["SGLang"] = replace(SGLANG, support="reads fc_norm in versions of 2026 (its source; not run)")
            found["llama.cpp"] = _ignores("llama.cpp", "fc_norm", "the states are not normed")
        if head.config.norm_before_residual:
            found["SGLang"] = _ignores("SGLang", "norm_before_residual", "the residual is the state before the norm")
        if len(head.spec.layers) != 3:
            found["llama.cpp"] = Engine("llama.cpp", "no: it reads exactly 3 layers")
        return tuple(found.values())

    def matches(self, config: dict[str, Any]) -> bool:
        return bool(set(config.get("architectures") or []) & set(ARCHITECTURES))

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """With the names of the first checkpoints, what the config leaves out, and ``t2d`` as ``d2t`` implies it."""
        names = {name: name.removeprefix("model.").replace("layers.0.", "midlayer.") for name in checkpoint.tensors}
        tensors = {names[name]: value for name, value in checkpoint.tensors.items() if "rotary_emb" not in name}
        config = dict(checkpoint.config)
        config.setdefault("target_hidden_size", config.get("hidden_size"))
        if not config.get("draft_vocab_size"):
            config["draft_vocab_size"] = config.get("vocab_size")
        rows = config["draft_vocab_size"]
        if rows == config.get("vocab_size") and isinstance(rows, int):
            tensors.setdefault("d2t", torch.zeros(rows, dtype=torch.int64))
        if "d2t" in tensors and isinstance(config.get("vocab_size"), int):
            # Engines ignore t2d, so it is derived; what a file says may be missing or wrong.
            marks = torch.zeros(config["vocab_size"], dtype=torch.bool)
            ids = from_offsets(tensors["d2t"])
            marks[ids[(ids >= 0) & (ids < len(marks))]] = True
            tensors["t2d"] = marks
        checkpoint = checkpoint.updated(config=config, tensors=tensors)
        if self._layers(checkpoint) is None:
            note = "its config.json names no layers: taken for 2, L // 2 and L - 3, as published; or say config.layers"
            checkpoint = checkpoint.updated(note)
        return checkpoint

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        config, default = checkpoint.config, Eagle3Config()
        found = super().settings(checkpoint)
        found.setdefault("ttt_steps", min(default.ttt_steps, found.get("num_draft_tokens", default.num_draft_tokens)))
        return {
            **found,
            "layers": self._layers(checkpoint),
            "intermediate_size": checkpoint.width("intermediate_size", "midlayer.mlp.gate_proj.weight"),
            "norm_before_fc": bool(_eagle_config(checkpoint).get("norm_before_fc", config.get("norm_before_fc"))),
        }

    def _layers(self, checkpoint: PublishedCheckpoint) -> list[int] | None:
        """The layers as ``head.layers`` counts them, from either place of the config; None: it names none."""
        if "layers" in checkpoint.config:  # ours, by which an import can be corrected
            layers: list[int] | None = checkpoint.config["layers"]
            return layers
        outer, inner = checkpoint.config.get(LAYER_IDS), _eagle_config(checkpoint).get(LAYER_IDS)
        for ids in (outer, inner):
            if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
                raise UserError(f"{checkpoint.source} has {LAYER_IDS} {ids!r}, expected a list of whole numbers")
        by_place = [list(outer)] if outer else []
        by_place += [[i + 1 for i in inner]] if inner else []
        if len(by_place) == 2 and by_place[0] != by_place[1]:
            raise UserError(
                f"{checkpoint.source} has {LAYER_IDS} {outer} at the top level, which is the layers {by_place[0]}, "
                f"and {inner} in eagle_config, which is {by_place[1]}: engines would read different ones; say which it "
                "was trained on with config.layers=[a,b,c], where 1 is the output of the first layer"
            )
        return by_place[0] if by_place else None

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        size = checkpoint.width("draft_vocab_size", "lm_head.weight")
        if size >= checkpoint.integer("vocab_size"):
            return None
        checkpoint.width("draft_vocab_size", "d2t")
        return from_offsets(checkpoint.tensors["d2t"])

    def require_same(self, checkpoint: PublishedCheckpoint, head: Eagle3Head) -> None:
        require_same_layer(checkpoint, head.base)
        require_bases_own(checkpoint, head.base, EMBEDDING, head.base.embedding)


def _ignores(engine: str, key: str, how: str) -> Engine:
    return Engine(engine, f"ignores {key} silently: {how}, and drafts are bad; train with head.{key}=false")


def _eagle_config(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    found = checkpoint.config.get("eagle_config")
    return found if isinstance(found, dict) else {}
