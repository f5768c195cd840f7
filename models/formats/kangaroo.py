"""Kangaroo's adapter as its authors save it: a Llama config of one layer, and a layer without an MLP.

The authors' code (``kangaroo/adapter.py``) reads ``pytorch_model.bin`` and takes the exit layer from its command line;
here it stands in the config. Training checkpoints of theirs may carry more than the adapter.
"""

from typing import Any

from torch import Tensor

from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Engine, Format, Shape, Unsupported, assign, unsupported_vocabulary
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

    def unsupported(self, head: KangarooHead) -> list[Unsupported]:
        return unsupported_vocabulary(head)

    def pack(self, head: KangarooHead) -> PublishedCheckpoint:
        config = {
            **layer_config(head.base),
            "exit_layer": head.config.exit_layer,
            "num_tokens": head.config.num_draft_tokens,
            "threshold": head.confidence_threshold,
        }
        return PublishedCheckpoint(config, _tensors(head))

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        width = artefact.integer("hidden_size")
        norms: dict[str, Shape] = {"layers.0.input_layernorm.weight": (width,), "norm.weight": (width,)}
        return norms | attention_layout(artefact, ATTENTION, width)

    def matches(self, config: dict[str, Any]) -> bool:
        return "exit_layer" in config and config.get("num_hidden_layers") == 1

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """Without the frequencies of the rotary embedding, which the base has."""
        kept = {k: v for k, v in artefact.tensors.items() if not k.endswith("rotary_emb.inv_freq")}
        return artefact.with_notes(tensors=kept)

    def settings(self, artefact: PublishedCheckpoint) -> KangarooConfig:
        default = KangarooConfig()
        return KangarooConfig(
            exit_layer=artefact.integer("exit_layer"),
            num_draft_tokens=artefact.config.get("num_tokens", default.num_draft_tokens),
            confidence_threshold=artefact.config.get("threshold", default.confidence_threshold),
        )

    def load_weights(self, head: KangarooHead, artefact: PublishedCheckpoint) -> None:
        require_same_layer(artefact, head.base)
        assign(_tensors(head), artefact)


def _tensors(head: KangarooHead) -> dict[str, Tensor]:
    return {
        "layers.0.input_layernorm.weight": head.input_layernorm.weight,
        **attention_tensors(head.self_attn, ATTENTION),
        "norm.weight": head.norm.weight,
    }
