"""EAGLE-3 as serving engines load it: ``LlamaForCausalLMEagle3`` with offsets from draft ids to target ids.

    fc.weight [D, 3 D]   midlayer.*   norm.weight [D]   lm_head.weight [W, D]   d2t [W]   t2d [V]

``d2t`` holds offsets: target = draft id + d2t[draft id]; ``t2d`` marks the target ids that can be drafted. Engines
share the target's embedding when there is none in the file. SGLang skips names that it does not know, so a misnamed
tensor would stay random: ``check`` compares all of them.

The config does not name the hidden states that are fused: vLLM and SGLang then both take the inputs of the layers 2,
L // 2 and L - 3. If it did, SGLang would add one to each and vLLM not (from memory), so other layers are refused.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Engine, Format, Unsupported, is_the_bases
from drafthead.models.formats.llama_layer import LAYER_KEYS, layer_config, require_same_layer
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head, published_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"


class Eagle3Format(Format):
    """``config.json`` and ``model.safetensors``, names without a ``model.`` prefix."""

    name = "eagle3"
    title = "EAGLE-3 (LlamaForCausalLMEagle3)"
    head, head_config = Eagle3Head, Eagle3Config
    engines = (
        Engine(
            "vLLM", "0.33.0 loads it (llama_eagle3.py), for targets that give hidden states of layers", current=True
        ),
        Engine("SGLang", "loads it as EAGLE3 (llama_eagle3.py)", current=True),
        Engine("TensorRT-LLM", "not established: its source was not read"),
        Engine("TGI", "no"),
    )
    optional = {"norm_output": "norm_output", "num_tokens": "num_draft_tokens", "ttt_steps": "ttt_steps"}
    sizes = {"target_hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    other_keys = LAYER_KEYS | {
        *("architectures", "hidden_size", "intermediate_size", "draft_vocab_size", "norm_before_residual", "fc_norm"),
        *("eagle_config", "layers", LAYER_IDS),
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
            "d2t": head.d2t - torch.arange(len(head.d2t), device=head.d2t.device),
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
            "norm_before_residual": False,
            "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": head.config.norm_before_fc},
        }

    def unsupported(self, head: Eagle3Head) -> list[Unsupported]:
        found, agreed = [], list(published_layers(head.base.num_layers))
        if list(head.spec.layers) != agreed:
            what = f"it reads the layers {list(head.spec.layers)}, and engines agree on {agreed} alone"
            found.append(Unsupported(what, "head.layers=null"))
        if head.lm_head is None and head.target_lm_head.softcap is not None:
            what = f"{head.base.name} caps its logits, and the format does not cap those of the base's output head"
            found.append(Unsupported(what, "head.own_lm_head=true"))
        return found

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        # Keys of later checkpoints, which vLLM knows; who ignores them drafts badly, and SGLang may.
        later = [key for key in ("norm_before_fc", "norm_output") if getattr(head.config, key)]
        if not later:
            return self.engines
        support = f"not established with {' and '.join(later)}; train with "
        support += " ".join(f"head.{key}=false" for key in later)
        return tuple(replace(e, support=support, current=False) if e.name == "SGLang" else e for e in self.engines)

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
            ids = _targets(tensors["d2t"])
            marks[ids[(ids >= 0) & (ids < len(marks))]] = True
            tensors["t2d"] = marks
        return checkpoint.updated(config=config, tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        config, default = checkpoint.config, Eagle3Config()
        for key in ("norm_before_residual", "fc_norm"):
            if config.get(key):
                raise UserError(f"{checkpoint.source} sets {key}, and heads here have no such norm; they cannot run it")
        found = super().settings(checkpoint)
        found.setdefault("ttt_steps", min(default.ttt_steps, found.get("num_draft_tokens", default.num_draft_tokens)))
        ids = self.vocabulary(checkpoint)
        return {
            **found,
            "layers": config.get("layers"),
            "intermediate_size": checkpoint.width("intermediate_size", "midlayer.mlp.gate_proj.weight"),
            "norm_before_fc": bool(_eagle_config(checkpoint).get("norm_before_fc")),
            "draft_vocab_size": None if ids is None else len(ids),
        }

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        size = checkpoint.width("draft_vocab_size", "lm_head.weight")
        if size >= checkpoint.integer("vocab_size"):
            return None
        checkpoint.width("draft_vocab_size", "d2t")
        return _targets(checkpoint.tensors["d2t"])

    def require_same(self, checkpoint: PublishedCheckpoint, head: Eagle3Head) -> None:
        require_same_layer(checkpoint, head.base)
        layers = _eagle_config(checkpoint).get(LAYER_IDS) or checkpoint.config.get(LAYER_IDS)
        usual = list(published_layers(head.base.num_layers))
        # vLLM's way to count, and SGLang's, which adds one.
        if layers and "layers" not in checkpoint.config and list(layers) not in (usual, [i - 1 for i in usual]):
            raise UserError(
                f"{checkpoint.source} reads the layers {layers}, and engines differ in what they count from; say which "
                "they are with config.layers=[a,b,c], where 1 is the output of the first layer"
            )
        embedding = checkpoint.tensors.get(EMBEDDING)
        if embedding is not None and not is_the_bases(embedding, head.base.embedding):
            raise UserError(
                f"{checkpoint.source} has an embedding that is not {head.base.name}'s, and heads here read the base's; "
                "name the base that it was trained for"
            )


def _eagle_config(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    found = checkpoint.config.get("eagle_config")
    return found if isinstance(found, dict) else {}


def _targets(offsets: Tensor) -> Tensor:
    """Offsets -> the target ids [W] int64."""
    return offsets.long() + torch.arange(len(offsets))
