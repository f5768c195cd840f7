"""Kangaroo's adapter as its authors save it: a Llama config of one layer, and a layer without an MLP.

The authors' code (``kangaroo/adapter.py``) reads ``pytorch_model.bin`` and takes the exit layer from its command line;
here the config names it. Their training checkpoints may contain more than the adapter.
"""

from typing import Any

from torch import Tensor

from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Engine, Format, Unsupported, unsupported_vocabulary
from drafthead.models.formats.llama_layer import LAYER_KEYS, layer_config, require_same_layer
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead


class KangarooFormat(Format):
    """Layout with ``config.json`` and ``model.safetensors``; the output head is the base's."""

    name = "kangaroo"
    title = "Kangaroo adapter"
    head_config = KangarooConfig
    engines = (
        Engine("the authors' code", "its loader reads pytorch_model.bin: save these tensors there with torch.save"),
        Engine("vLLM", "never"),
        Engine("SGLang", "never"),
        Engine("TGI", "never"),
    )
    required = {"exit_layer": "exit_layer"}
    optional = {"num_tokens": "num_draft_tokens", "threshold": "confidence_threshold"}
    other_keys = LAYER_KEYS

    def unsupported(self, head: KangarooHead) -> Unsupported:
        return unsupported_vocabulary(head)

    def tensors(self, head: KangarooHead) -> dict[str, Tensor]:
        """Return our parameters, with ``layers.0.`` before all names but the final norm's."""
        return {n if n == "norm.weight" else f"layers.0.{n}": p for n, p in head.named_parameters()}

    def config(self, head: KangarooHead) -> dict[str, Any]:
        return {**layer_config(head.base), **super().config(head), "threshold": head.confidence_threshold}

    def matches(self, config: dict[str, Any]) -> bool:
        return "exit_layer" in config and config.get("num_hidden_layers") == 1

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Drop the rotary frequencies, which are the base's."""
        tensors = {k: v for k, v in checkpoint.tensors.items() if not k.endswith("rotary_emb.inv_freq")}
        return checkpoint.updated(tensors=tensors)

    def require_same(self, checkpoint: PublishedCheckpoint, head: KangarooHead) -> None:
        require_same_layer(checkpoint, head.base)
