"""Kangaroo's adapter as its authors save it: a Llama config of one layer, and a layer without an MLP.

The authors' code (``kangaroo/adapter.py``) reads ``pytorch_model.bin`` and takes the exit layer from its command line.
This format has it in the config. The authors' training checkpoints may contain more than the adapter.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Format
from drafthead.models.formats.llama_layer import (
    LAYER_KEYS,
    LAYER_ONLY,
    NO_WINDOW_ONLY,
    ROPE_SECTIONS,
    layer_config,
    require_same_layer,
)
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead


class KangarooFormat(Format):
    """Format of Kangaroo's adapter: ``config.json`` and ``model.safetensors``, without the base's output head."""

    name = "kangaroo"
    title = "Kangaroo adapter"
    head_config = KangarooConfig
    required = {"exit_layer": "exit_layer"}
    optional = {"num_tokens": "num_draft_tokens", "threshold": "confidence_threshold"}
    other_keys = LAYER_KEYS
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {**LAYER_ONLY, **NO_WINDOW_ONLY, "num_hidden_layers": (1,)}
    harmless = frozenset({"intermediate_size"})  # the layer has no MLP
    sections: ClassVar[Mapping[str, str]] = ROPE_SECTIONS
    renames = {r"^(?!norm\.)": "layers.0."}

    def config(self, head: KangarooHead) -> dict[str, Any]:
        return {**layer_config(head.base), **super().config(head), "threshold": head.confidence_threshold}

    def matches(self, config: dict[str, Any]) -> bool:
        return "exit_layer" in config and config.get("num_hidden_layers") == 1

    def require_same(self, checkpoint: PublishedCheckpoint, head: KangarooHead) -> None:
        require_same_layer(checkpoint, head.base)
