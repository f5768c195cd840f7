"""EAGLE-3 as serving engines load it: ``LlamaForCausalLMEagle3`` with offsets from draft ids to target ids.

    fc.weight [D, 3 D]   midlayer.*   norm.weight [D]   lm_head.weight [W, D]   d2t [W]   t2d [V]

``d2t`` holds offsets: target = draft id + d2t[draft id]; ``t2d`` marks the target ids that can be drafted. Engines
share the target's embedding when there is none in the file. SGLang skips names that it does not know, so a misnamed
tensor would stay random: ``check`` compares all of them.

Which hidden states are fused is said by nobody here: left out, vLLM and SGLang both take the inputs of the layers 2,
L // 2 and L - 3. Said, SGLang adds one to each and vLLM does not (from memory), so other layers are refused.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Engine, Format, Shape, Unsupported, assign
from drafthead.models.formats.tensors import (
    CONFIG_KEYS,
    attention_layout,
    attention_tensors,
    layer_config,
    require_same_layer,
)
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head, published_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Format(Format):
    """``config.json`` and ``model.safetensors``, names without a ``model.`` prefix."""

    name = "eagle3"
    title = "EAGLE-3 (LlamaForCausalLMEagle3)"
    head = Eagle3Head
    engines = (
        Engine(
            "vLLM", "0.33.0 loads it (llama_eagle3.py), for targets that give it hidden states of layers", current=True
        ),
        Engine("SGLang", "loads it as EAGLE3 (llama_eagle3.py)", current=True),
        Engine("TensorRT-LLM", "not established: its source was not read"),
        Engine("TGI", "no"),
    )
    config_keys = CONFIG_KEYS | {
        "architectures",
        "intermediate_size",
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_output",
        "fc_norm",
        "eagle_config",
        LAYER_IDS,
        "layers",
        "num_tokens",
        "ttt_steps",
    }

    def pack(self, head: Eagle3Head) -> PublishedCheckpoint:
        base, settings = head.base, head.config
        output = head.output_head(0)
        config = {
            **layer_config(base),
            "architectures": [ARCHITECTURES[0]],
            "intermediate_size": head.midlayer.mlp.gate_proj.out_features,
            "draft_vocab_size": len(head.d2t),
            "target_hidden_size": base.hidden_size,
            "norm_before_residual": False,
            "norm_output": settings.norm_output,
            "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": settings.norm_before_fc},
            "num_tokens": settings.num_draft_tokens,
            "ttt_steps": settings.ttt_steps,
        }
        tensors = _parameters(head)
        if head.lm_head is None:
            tensors["lm_head.weight"] = output.weight * output.scale
        tensors["d2t"] = head.d2t - torch.arange(len(head.d2t), device=head.d2t.device)
        tensors["t2d"] = head.t2d >= 0
        return PublishedCheckpoint(config, tensors)

    def unsupported(self, head: Eagle3Head) -> list[Unsupported]:
        found, agreed = [], list(published_layers(head.base.num_layers))
        if list(head.spec.layers) != agreed:
            found.append(
                Unsupported(
                    f"it reads the layers {list(head.spec.layers)}, and engines agree on {agreed} alone",
                    "head.layers=null",
                )
            )
        if head.lm_head is None and head.target_lm_head.softcap is not None:
            found.append(
                Unsupported(
                    f"{head.base.name} caps its logits, and the format does not cap those of the base's projection",
                    "head.own_lm_head=true",
                )
            )
        return found

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        # Keys of later checkpoints, which vLLM knows; who ignores them drafts badly, and SGLang may.
        later = [key for key in ("norm_before_fc", "norm_output") if getattr(head.config, key)]
        if not later:
            return self.engines
        said = f"not established with {' and '.join(later)}; train with "
        said += " ".join(f"head.{key}=false" for key in later)
        return tuple(replace(e, support=said, current=False) if e.name == "SGLang" else e for e in self.engines)

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        width, inner = artefact.integer("hidden_size"), artefact.integer("intermediate_size")
        rows, sources = artefact.integer("draft_vocab_size"), 3 * artefact.integer("target_hidden_size")
        wanted: dict[str, Shape] = {
            "fc.weight": (width, sources),
            **{f"midlayer.{norm}.weight": (width,) for norm in NORMS},
            **attention_layout(artefact, "midlayer.self_attn.", 2 * width),
            "midlayer.mlp.gate_proj.weight": (inner, width),
            "midlayer.mlp.up_proj.weight": (inner, width),
            "midlayer.mlp.down_proj.weight": (width, inner),
            "norm.weight": (width,),
            "lm_head.weight": (rows, width),
            "d2t": (rows,),
            "t2d": (artefact.integer("vocab_size"),),
        }
        if _eagle_config(artefact).get("norm_before_fc"):
            wanted["input_norm.weight"] = (sources,)
        if "embed_tokens.weight" in artefact.tensors:
            wanted["embed_tokens.weight"] = (artefact.integer("vocab_size"), width)
        return wanted

    def matches(self, config: dict[str, Any]) -> bool:
        return bool(set(config.get("architectures") or []) & set(ARCHITECTURES))

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """With the names of the first checkpoints, what the config leaves out, and ``t2d`` as ``d2t`` implies it."""
        names = {name: name.removeprefix("model.").replace("layers.0.", "midlayer.") for name in artefact.tensors}
        tensors = {names[name]: value for name, value in artefact.tensors.items() if "rotary_emb" not in name}
        config = dict(artefact.config)
        config.setdefault("target_hidden_size", config.get("hidden_size"))
        if not config.get("draft_vocab_size"):
            config["draft_vocab_size"] = config.get("vocab_size")
        rows = config["draft_vocab_size"]
        if rows == config.get("vocab_size") and isinstance(rows, int):
            tensors.setdefault("d2t", torch.zeros(rows, dtype=torch.int64))
        if "d2t" in tensors and isinstance(config.get("vocab_size"), int):
            # Engines ignore t2d, so it is derived; what a file says may be missing or wrong.
            marks = torch.zeros(config["vocab_size"], dtype=torch.bool)
            ids = _targets(tensors["d2t"])
            marks[ids[(ids >= 0) & (ids < len(marks))]] = True
            tensors["t2d"] = marks
        return artefact.with_notes(config=config, tensors=tensors)

    def settings(self, artefact: PublishedCheckpoint) -> Eagle3Config:
        found, default = artefact.config, Eagle3Config()
        for key in ("norm_before_residual", "fc_norm"):
            if found.get(key):
                raise UserError(f"{artefact.source} sets {key}, and heads here have no such norm; they cannot run it")
        reduced = artefact.integer("draft_vocab_size") < artefact.integer("vocab_size")
        tokens = found.get("num_tokens", default.num_draft_tokens)
        return Eagle3Config(
            num_draft_tokens=tokens,
            ttt_steps=found.get("ttt_steps", min(default.ttt_steps, tokens)),
            layers=found.get("layers"),
            intermediate_size=artefact.integer("intermediate_size"),
            norm_before_fc=bool(_eagle_config(artefact).get("norm_before_fc")),
            norm_output=bool(found.get("norm_output")),
            draft_vocab_size=artefact.integer("draft_vocab_size") if reduced else None,
        )

    def vocabulary(self, artefact: PublishedCheckpoint) -> Tensor | None:
        reduced = artefact.integer("draft_vocab_size") < artefact.integer("vocab_size")
        return _targets(artefact.tensors["d2t"]) if reduced else None

    def load_weights(self, head: Eagle3Head, artefact: PublishedCheckpoint) -> None:
        require_same_layer(artefact, head.base)
        _require_known_layers(artefact, head)
        embedding = artefact.tensors.get("embed_tokens.weight")
        own = head.base.embedding
        if embedding is not None and not torch.allclose(embedding.to(own), own, rtol=2**-7, atol=1e-6):
            raise UserError(
                f"{artefact.source} has an embedding that is not {head.base.name}'s, and heads here read the base's; "
                "name the base that it was trained for"
            )
        assign(_parameters(head), artefact)


def _parameters(head: Eagle3Head) -> dict[str, Tensor]:
    layer = head.midlayer
    tensors = {
        "fc.weight": head.fc.weight,
        **{f"midlayer.{norm}.weight": getattr(layer, norm).weight for norm in NORMS},
        **attention_tensors(layer.self_attn, "midlayer.self_attn."),
        **{f"midlayer.mlp.{part}.weight": getattr(layer.mlp, part).weight for part in MLP},
        "norm.weight": head.norm.weight,
    }
    if head.lm_head is not None:
        tensors["lm_head.weight"] = head.lm_head.weight
    if head.input_norm is not None:
        tensors["input_norm.weight"] = head.input_norm.weight
    return tensors


def _require_known_layers(artefact: PublishedCheckpoint, head: Eagle3Head) -> None:
    said = _eagle_config(artefact).get(LAYER_IDS) or artefact.config.get(LAYER_IDS)
    usual = list(published_layers(head.base.num_layers))
    # vLLM's way to count, and SGLang's, which adds one.
    if said and "layers" not in artefact.config and list(said) not in (usual, [layer - 1 for layer in usual]):
        raise UserError(
            f"{artefact.source} reads the layers {said}, and engines differ in what they count from; say which they "
            "are with config.layers=[a,b,c], where 1 is the output of the first layer"
        )


def _eagle_config(artefact: PublishedCheckpoint) -> dict[str, Any]:
    found = artefact.config.get("eagle_config")
    return found if isinstance(found, dict) else {}


def _targets(offsets: Tensor) -> Tensor:
    """Offsets -> the target ids [W] int64."""
    return offsets.long() + torch.arange(len(offsets))
