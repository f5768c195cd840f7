"""Kangaroo's adapter as its authors save it: a Llama config of one layer, and a layer without an MLP.

The authors' code (``kangaroo/adapter.py``) reads ``pytorch_model.bin`` and takes the exit layer from its command line;
here it stands in the config. Training checkpoints of theirs may carry more than the adapter.
"""

from typing import Any

from torch import Tensor

from drafthead.models.formats.checkpoint import Artefact
from drafthead.models.formats.contract import Engine, Format, Obstacle, Shape, assign, vocabulary_obstacles
from drafthead.models.formats.tensors import (
    CONFIG_KEYS,
    attention_layout,
    attention_tensors,
    layer_config,
    require_same_layer,
)
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead

ATTENTION = "layers.0.self_attn."


class KangarooFormat(Format):
    """``config.json`` and ``model.safetensors`` with the adapter; the output head is the base's."""

    name = "kangaroo"
    title = "Kangaroo adapter"
    head = KangarooHead
    engines = (
        Engine("the authors' code", "its loader reads pytorch_model.bin: save these tensors there with torch.save"),
        Engine("vLLM", "never"),
        Engine("SGLang", "never"),
        Engine("TGI", "never"),
    )
    config_keys = CONFIG_KEYS | {"exit_layer", "num_tokens", "threshold"}

    def obstacles(self, head: KangarooHead) -> list[Obstacle]:
        return vocabulary_obstacles(head)

    def pack(self, head: KangarooHead) -> Artefact:
        config = {
            **layer_config(head.base),
            "exit_layer": head.config.exit_layer,
            "num_tokens": head.config.num_tokens,
            "threshold": head.stop_below,
        }
        return Artefact(config, _tensors(head))

    def layout(self, artefact: Artefact) -> dict[str, Shape]:
        width = artefact.integer("hidden_size")
        norms: dict[str, Shape] = {"layers.0.input_layernorm.weight": (width,), "norm.weight": (width,)}
        return norms | attention_layout(artefact, ATTENTION, width)

    def recognises(self, config: dict[str, Any]) -> bool:
        return "exit_layer" in config and config.get("num_hidden_layers") == 1

    def repaired(self, artefact: Artefact) -> Artefact:
        """Without the frequencies of the rotary embedding, which the base has."""
        kept = {k: v for k, v in artefact.tensors.items() if not k.endswith("rotary_emb.inv_freq")}
        return artefact.with_notes(tensors=kept)

    def settings(self, artefact: Artefact) -> KangarooConfig:
        default = KangarooConfig()
        return KangarooConfig(
            exit_layer=artefact.integer("exit_layer"),
            num_tokens=artefact.config.get("num_tokens", default.num_tokens),
            threshold=artefact.config.get("threshold", default.threshold),
        )

    def fill(self, head: KangarooHead, artefact: Artefact) -> None:
        require_same_layer(artefact, head.base)
        assign(_tensors(head), artefact)


def _tensors(head: KangarooHead) -> dict[str, Tensor]:
    return {
        "layers.0.input_layernorm.weight": head.input_layernorm.weight,
        **attention_tensors(head.self_attn, ATTENTION),
        "norm.weight": head.norm.weight,
    }
