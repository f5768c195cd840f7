"""Hydra and Hydra++ heads as their authors save them.

    hydra_mlp.{k}.0.linear|res_connection.weight [D, (k + 2) D], .bias [D]     the first block of head k
    hydra_mlp.{k}.{j}.linear.weight [D, D], .bias [D]                          further blocks, which share one module
    hydra_lm_head.{k}.weight [V, D], .bias [V]
    prefix_embeding_layer.layers.0.*, prefix_embeding_layer.norm.weight        Hydra++ (hydra_head_arch: prefix-mlp)

These are the module names of a "mlp" head in the authors' code (``hydra/model/hydra_heads``). A "prefix-mlp" head has
a dropout before each module: block j is module ``2 j + 1``, and the output layer is ``hydra_lm_head.{k}.1``. Imports
accept both ways of numbering for both kinds of head. The authors' loader reads ``hydra_lm_head.pt`` and leaves missing
tensors random, so an output layer without a bias is written with a bias of zeros. The prefix layer's unused embedding
is left out.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Fixed, Format, Unsupported
from drafthead.models.formats.medusa import tied
from drafthead.models.heads.hydra import HydraBlocks, HydraConfig, HydraHead
from drafthead.models.heads.parts.draft_head import DraftHead

PREFIX = "prefix_embeding_layer."  # misspelt as in the authors' code


class HydraFormat(Format):
    """Format of Hydra and Hydra++: ``config.json`` and ``hydra_lm_head.safetensors``."""

    name = "hydra"
    title = "Hydra and Hydra++"
    weights_file = "hydra_lm_head.safetensors"
    head_config = HydraConfig
    required = {"hydra_num_heads": "num_draft_tokens", "hydra_num_layers": "num_layers"}
    optional = {"dropout_rate": "dropout"}
    sizes = {}
    constants = {"grounded_heads": True}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Format.only,
        "hydra_head_arch": ("mlp", "prefix-mlp"),
        "grounded_heads": (True,),
        "hidden_state_offset": (0,),
    }
    fixed = {"unit_embeddings": Fixed(False, "it normalises embeddings to unit length, and the format's heads do not")}
    # Files spell the prefix layer's name in several ways; only what follows it is fixed.
    aliases = {r"^(?!hydra_mlp\.|hydra_lm_head\.).*?(?=layers\.0\.|norm\.weight$)": PREFIX}
    left_out = rf"{Format.left_out}|embed_tokens\.weight$"

    def unsupported(self, head: HydraHead) -> Unsupported:
        yield from super().unsupported(head)
        yield from self.unsupported_logits(head, scaled=True)

    def tensors(self, head: HydraHead) -> dict[str, Tensor]:
        width = head.base.hidden_size
        tensors: dict[str, Tensor] = {}
        for name, parameter in head.prefix.named_parameters() if head.prefix else ():
            tensors[PREFIX + (name if name == "norm.weight" else f"layers.0.{name}")] = parameter
        for k in range(head.depth):
            blocks = cast(HydraBlocks, head.blocks[k])
            for j in range(head.config.num_layers):
                for name, parameter in blocks[min(j, len(blocks) - 1)].named_parameters():
                    tensors[f"hydra_mlp.{k}.{j}.{name.replace('residual', 'res_connection')}"] = parameter
            if head.config.own_lm_head:
                # Our bias is the last column of the weight.
                weight = head.output_head(k).weight
                tensors[f"hydra_lm_head.{k}.weight"] = weight[:, :width]
                if head.config.projection_bias:
                    tensors[f"hydra_lm_head.{k}.bias"] = weight[:, width]
        return tensors

    def derived_tensors(self, head: HydraHead) -> dict[str, Tensor]:
        """Return the base's output weight and a zero bias for every head; a head's own tensors replace them."""
        weight = head.target_lm_head.weight
        layer = {"weight": weight, "bias": torch.zeros_like(weight[:, 0])}
        return {f"hydra_lm_head.{k}.{key}": value for k in range(head.depth) for key, value in layer.items()}

    def config(self, head: HydraHead) -> dict[str, Any]:
        architecture = "prefix-mlp" if head.config.prefix_layer else "mlp"
        return {**super().config(head), "hydra_head_arch": architecture}

    def checkpoint(self, head: DraftHead, dtype: torch.dtype | None, base_name: str | None) -> PublishedCheckpoint:
        """Return what to publish; with a prefix layer, dropouts are numbered as modules too."""
        checkpoint = super().checkpoint(head, dtype, base_name)
        if checkpoint.config["hydra_head_arch"] == "mlp":
            return checkpoint
        return checkpoint.updated(tensors={_with_dropouts(n): tensor for n, tensor in checkpoint.tensors.items()})

    def matches(self, config: dict[str, Any]) -> bool:
        return "hydra_num_heads" in config

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Number modules without dropouts, and add missing output biases (zeros)."""
        checkpoint = super().normalize(checkpoint)
        tensors = dict(checkpoint.tensors)
        if "hydra_mlp.0.1.res_connection.weight" in tensors:  # the file counts dropouts
            tensors = {_without_dropouts(name): tensor for name, tensor in tensors.items()}
        for k in range(checkpoint.integer("hydra_num_heads")):
            if (weight := tensors.get(f"hydra_lm_head.{k}.weight")) is not None:
                tensors.setdefault(f"hydra_lm_head.{k}.bias", weight.new_zeros(len(weight)))
        return checkpoint.updated(tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        settings = super().settings(checkpoint)
        heads, layers = range(settings["num_draft_tokens"]), range(1, settings["num_layers"])
        biases = (checkpoint.tensors.get(f"hydra_lm_head.{k}.bias") for k in heads)
        return {
            **settings,
            "prefix_layer": checkpoint.config.get("hydra_head_arch") == "prefix-mlp",
            "projection_bias": any(bias is not None and bool(bias.any()) for bias in biases),
            # The first block has another shape, so only the further ones can be tied.
            "tie_blocks": tied(checkpoint.tensors, ([f"hydra_mlp.{k}.{j}.linear" for j in layers] for k in heads)),
        }


def _with_dropouts(name: str) -> str:
    """Number modules as in a "prefix-mlp" head, where a dropout stands before each module."""
    name = re.sub(r"^(hydra_lm_head\.\d+)", r"\1.1", name)
    return re.sub(r"^(hydra_mlp\.\d+)\.(\d+)", lambda found: f"{found[1]}.{2 * int(found[2]) + 1}", name)


def _without_dropouts(name: str) -> str:
    """Undo ``_with_dropouts``."""
    name = re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)
    return re.sub(r"^(hydra_mlp\.\d+)\.(\d+)", lambda found: f"{found[1]}.{int(found[2]) // 2}", name)
