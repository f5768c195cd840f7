"""Hydra and Hydra++ heads as their authors save them.

    hydra_mlp.{k}.0.linear|res_connection.weight [D, (k + 2) D], .bias [D]     the first block of head k
    hydra_mlp.{k}.{j}.linear.weight [D, D], .bias [D]                          further blocks, one module in their code
    hydra_lm_head.{k}.weight [V, D], .bias [V]
    prefix_embeding_layer.layers.0.*, prefix_embeding_layer.norm.weight        Hydra++ (hydra_head_arch: prefix-mlp)

So the authors' code (``hydra/model/hydra_heads``) names the modules of a "mlp" head. Those of "prefix-mlp" have a
dropout before each: block j is module ``2 j + 1`` there, and the output layer ``hydra_lm_head.{k}.1``. Either is read
for both. Its loader reads ``hydra_lm_head.pt`` and is not strict, so what a file lacks stays random: an output layer
without a bias is written with one of zeros. The prefix layer's own embedding, which nothing reads, is left out.
"""

import re
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Engine, Format, Unsupported, unsupported_vocabulary
from drafthead.models.formats.medusa import tied
from drafthead.models.heads.hydra import HydraBlocks, HydraConfig, HydraHead

PREFIX = "prefix_embeding_layer."
"""As the authors spell it."""


class HydraFormat(Format):
    """``config.json`` and ``hydra_lm_head.safetensors``."""

    name = "hydra"
    title = "Hydra and Hydra++"
    weights_file = "hydra_lm_head.safetensors"
    head_config = HydraConfig
    engines = (
        Engine("the authors' code", "its loader reads hydra_lm_head.pt: save these tensors there with torch.save"),
        Engine("vLLM", "never"),
        Engine("SGLang", "never"),
    )
    required = {"hydra_num_heads": "num_draft_tokens", "hydra_num_layers": "num_layers"}
    optional = {"dropout_rate": "dropout"}
    sizes = {}
    other_keys = frozenset({"hydra_head_arch", "grounded_heads"})

    def unsupported(self, head: HydraHead) -> Unsupported:
        yield from unsupported_vocabulary(head)
        if head.config.unit_embeddings:
            yield "it reads embeddings of unit length, the format as they are", "head.unit_embeddings=false"
        if head.target_lm_head.scale != 1.0 or head.target_lm_head.softcap is not None:
            what = f"{head.base.name} scales or caps its logits, and the format does not"
            yield what, "another base; no setting avoids it"

    def tensors(self, head: HydraHead) -> dict[str, Tensor]:
        prefixed, width = head.config.prefix_layer, head.base.hidden_size
        found: dict[str, Tensor] = {}
        for name, parameter in head.prefix.named_parameters() if head.prefix else ():
            found[PREFIX + (name if name == "norm.weight" else f"layers.0.{name}")] = parameter
        for k in range(head.depth):
            blocks = cast(HydraBlocks, head.blocks[k])
            for j in range(head.config.num_layers):
                for name, parameter in blocks[min(j, len(blocks) - 1)].named_parameters():
                    found[f"{_block(k, j, prefixed)}.{name.replace('residual', 'res_connection')}"] = parameter
            if head.config.own_lm_head:
                # Our bias is one more column of the weight.
                weight = head.output_head(k).weight
                found[f"{_output(k, prefixed)}.weight"] = weight[:, :width]
                if head.config.projection_bias:
                    found[f"{_output(k, prefixed)}.bias"] = weight[:, width]
        return found

    def derived_tensors(self, head: HydraHead) -> dict[str, Tensor]:
        """An output layer with a bias for every head: the base's, with zeros, where a head has none of its own."""
        weight = head.target_lm_head.weight
        layer = {"weight": weight, "bias": torch.zeros_like(weight[:, 0])}
        names = [_output(k, head.config.prefix_layer) for k in range(head.depth)]
        return {f"{name}.{part}": value for name in names for part, value in layer.items()}

    def config(self, head: HydraHead) -> dict[str, Any]:
        architecture = "prefix-mlp" if head.config.prefix_layer else "mlp"
        return {**super().config(head), "hydra_head_arch": architecture, "grounded_heads": True}

    def matches(self, config: dict[str, Any]) -> bool:
        return "hydra_num_heads" in config

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """With one naming of both variants, without what the base has, and with a bias in every output layer."""
        config, tensors = checkpoint.config, {}
        architecture, grounded = config.get("hydra_head_arch", "mlp"), config.get("grounded_heads", True)
        if architecture not in ("mlp", "prefix-mlp") or not grounded:
            raise UserError(
                f"{checkpoint.source} has hydra_head_arch {architecture!r} and grounded_heads {grounded!r}; heads here "
                "are grounded ones of mlp or prefix-mlp"
            )
        for name, value in checkpoint.tensors.items():
            if name.endswith(("rotary_emb.inv_freq", "embed_tokens.weight")):
                continue
            if not name.startswith(("hydra_mlp.", "hydra_lm_head.")):
                name = re.sub(r"^.*?(?=layers\.0\.|norm\.weight$)", PREFIX, name)
            tensors[name] = value
        prefixed = _is_prefixed(checkpoint)
        counts_dropouts = "hydra_mlp.0.1.res_connection.weight" in tensors
        if counts_dropouts != prefixed:
            tensors = {_renumbered(name, counts_dropouts): value for name, value in tensors.items()}
        for k in range(checkpoint.integer("hydra_num_heads")):
            weight = tensors.get(f"{_output(k, prefixed)}.weight")
            if weight is not None:
                tensors.setdefault(f"{_output(k, prefixed)}.bias", weight.new_zeros(len(weight)))
        return checkpoint.updated(tensors=tensors)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        found, prefixed = super().settings(checkpoint), _is_prefixed(checkpoint)
        heads, layers = found["num_draft_tokens"], found["num_layers"]
        biases = (checkpoint.tensors.get(f"{_output(k, prefixed)}.bias") for k in range(heads))
        # The first block has a shape of its own.
        further = ([f"{_block(k, j, prefixed)}.linear" for j in range(1, layers)] for k in range(heads))
        return {
            **found,
            "prefix_layer": prefixed,
            "projection_bias": any(bias is not None and bool(bias.any()) for bias in biases),
            "tie_blocks": tied(checkpoint.tensors, further),
        }


def _is_prefixed(checkpoint: PublishedCheckpoint) -> bool:
    return checkpoint.config.get("hydra_head_arch") == "prefix-mlp"


def _block(k: int, j: int, prefixed: bool) -> str:
    """Module name of block j of head k."""
    return f"hydra_mlp.{k}.{2 * j + 1 if prefixed else j}"


def _output(k: int, prefixed: bool) -> str:
    """Module name of the output layer of head k."""
    return f"hydra_lm_head.{k}.1" if prefixed else f"hydra_lm_head.{k}"


def _renumbered(name: str, counts_dropouts: bool) -> str:
    """A name with dropout modules counted instead of not counted, or the other way round."""
    kind, *path = name.split(".")
    if kind == "hydra_mlp":
        number = int(path[1]) // 2 if counts_dropouts else 2 * int(path[1]) + 1
        return ".".join([kind, path[0], str(number), *path[2:]])
    if kind == "hydra_lm_head":
        return ".".join([kind, path[0], *(path[2:] if counts_dropouts else ["1", *path[1:]])])
    return name
