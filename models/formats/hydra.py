"""Hydra and Hydra++ heads as their authors save them.

    hydra_mlp.{k}.0.linear|res_connection.weight [D, (k + 2) D], .bias [D]     the first block of head k
    hydra_mlp.{k}.{j}.linear.weight [D, D], .bias [D]                          further blocks, one module in their code
    hydra_lm_head.{k}.weight [V, D], .bias [V]
    prefix_embeding_layer.layers.0.*, prefix_embeding_layer.norm.weight        Hydra++ (hydra_head_arch: prefix-mlp)

So the authors' code (``hydra/model/hydra_heads``) names the modules of a "mlp" head. Those of "prefix-mlp" have a
dropout before each: block j is module ``2 j + 1`` there, and the projection ``hydra_lm_head.{k}.1``. Either is read for
both. Its loader reads ``hydra_lm_head.pt`` and is not strict, so what a file lacks stays random: a projection without
a bias is written with one of zeros. The prefix layer's own embedding, which nothing reads, is left out.
"""

import re
from typing import Any, cast

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Engine, Format, Shape, Unsupported, assign, unsupported_vocabulary
from drafthead.models.formats.tensors import attention_tensors, rows_of, tied
from drafthead.models.heads.hydra import HydraBlocks, HydraConfig, HydraHead, PrefixLayer

PREFIX = "prefix_embeding_layer."
"""As the authors spell it."""
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


class HydraFormat(Format):
    """``config.json`` and ``hydra_lm_head.safetensors``."""

    name = "hydra"
    title = "Hydra and Hydra++"
    weights_file = "hydra_lm_head.safetensors"
    head = HydraHead
    engines = (
        Engine("the authors' code", "its loader reads hydra_lm_head.pt: save these tensors there with torch.save"),
        Engine("vLLM", "never"),
        Engine("SGLang", "never"),
    )
    config_keys = frozenset(
        {"hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "dropout_rate"}
    )

    def unsupported(self, head: HydraHead) -> list[Unsupported]:
        found = unsupported_vocabulary(head)
        if head.config.unit_embeddings:
            what = "it reads embeddings of unit length, and the format reads them as they are"
            found.append(Unsupported(what, "head.unit_embeddings=false"))
        if head.target_lm_head.scale != 1.0 or head.target_lm_head.softcap is not None:
            what = f"{head.base.name} scales or caps its logits, and the format does not"
            found.append(Unsupported(what, "another base; no setting avoids it"))
        return found

    def pack(self, head: HydraHead) -> PublishedCheckpoint:
        settings, target_lm_head = head.config, head.target_lm_head
        config = {
            "hydra_num_heads": head.depth,
            "hydra_num_layers": settings.num_layers,
            "hydra_head_arch": "prefix-mlp" if settings.prefix_layer else "mlp",
            "grounded_heads": True,
            "dropout_rate": settings.dropout,
        }
        tensors = _named(head)
        for k in range(head.depth):
            name = _projection(k, settings.prefix_layer)
            # The format has projections of each head's own, with a bias.
            tensors.setdefault(f"{name}.weight", target_lm_head.weight)
            tensors.setdefault(f"{name}.bias", torch.zeros_like(target_lm_head.weight[:, 0]))
        return PublishedCheckpoint(config, tensors)

    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        heads, layers = artefact.integer("hydra_num_heads"), artefact.integer("hydra_num_layers")
        prefixed = _is_prefixed(artefact.config)
        width, vocabulary = (_rows(artefact, f"{of(0, prefixed)}.weight") for of in (_first_block, _projection))
        wanted: dict[str, Shape] = {}
        for k in range(heads):
            for j in range(layers):
                for part in ("linear",) if j else ("linear", "res_connection"):
                    name = f"{_block(k, j, prefixed)}.{part}"
                    wanted[f"{name}.weight"] = (width, width if j else (k + 2) * width)
                    wanted[f"{name}.bias"] = (width,)
            wanted[f"{_projection(k, prefixed)}.weight"] = (vocabulary, width)
            if f"{_projection(0, prefixed)}.bias" in artefact.tensors:
                wanted[f"{_projection(k, prefixed)}.bias"] = (vocabulary,)
        if prefixed:
            wanted |= _prefix_layout(artefact, width)
        return wanted

    def matches(self, config: dict[str, Any]) -> bool:
        return "hydra_num_heads" in config

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """With one naming of both variants, without what the base has, and without biases that are all zero.

        Raises:
            UserError: heads that are not grounded, or of another architecture.
        """
        config, tensors = artefact.config, {}
        architecture, grounded = config.get("hydra_head_arch", "mlp"), config.get("grounded_heads", True)
        if architecture not in ("mlp", "prefix-mlp") or not grounded:
            raise UserError(
                f"{artefact.source} has hydra_head_arch {architecture!r} and grounded_heads {grounded!r}; heads here "
                "are grounded ones of mlp or prefix-mlp"
            )
        for name, value in artefact.tensors.items():
            if name.endswith(("rotary_emb.inv_freq", "embed_tokens.weight")):
                continue
            if not name.startswith(("hydra_mlp.", "hydra_lm_head.")):
                name = re.sub(r"^.*?(?=layers\.0\.|norm\.weight$)", PREFIX, name)
            tensors[name] = value
        tensors = _in_order(tensors, _is_prefixed(artefact.config))
        biases = [name for name in tensors if name.startswith("hydra_lm_head.") and name.endswith(".bias")]
        if not any(tensors[name].any() for name in biases):
            tensors = {name: value for name, value in tensors.items() if name not in biases}
        return artefact.with_notes(tensors=tensors)

    def sizes(self, artefact: PublishedCheckpoint) -> dict[str, int]:
        return {
            "hidden_size": _rows(artefact, f"{_first_block(0, _is_prefixed(artefact.config))}.weight"),
            "vocab_size": _rows(artefact, f"{_projection(0, _is_prefixed(artefact.config))}.weight"),
        }

    def settings(self, artefact: PublishedCheckpoint) -> HydraConfig:
        config, layers = artefact.config, artefact.integer("hydra_num_layers")
        heads, prefixed = artefact.integer("hydra_num_heads"), _is_prefixed(artefact.config)
        # The first block has a shape of its own.
        repeated = ([f"{_block(k, j, prefixed)}.linear" for j in range(1, layers)] for k in range(heads))
        return HydraConfig(
            num_draft_tokens=heads,
            num_layers=layers,
            prefix_layer=prefixed,
            dropout=float(config.get("dropout_rate", 0.0)),
            projection_bias=f"{_projection(0, prefixed)}.bias" in artefact.tensors,
            tie_blocks=tied(artefact.tensors, repeated),
        )

    def load_weights(self, head: HydraHead, artefact: PublishedCheckpoint) -> None:
        assign(_named(head), artefact)


def _named(head: HydraHead) -> dict[str, Tensor]:
    """A head's parameters by their published names; of projections with a bias, views."""
    found: dict[str, Tensor] = {} if head.prefix is None else _named_prefix(head.prefix)
    prefixed = head.config.prefix_layer
    for k in range(head.depth):
        blocks = cast(HydraBlocks, head.blocks[k])
        for j in range(head.config.num_layers):
            module = blocks[min(j, len(blocks) - 1)]
            for name, parameter in module.named_parameters():
                found[f"{_block(k, j, prefixed)}.{name.replace('residual', 'res_connection')}"] = parameter
        if head.config.own_lm_head:
            weight, width = head.output_head(k).weight, head.base.hidden_size
            found[f"{_projection(k, prefixed)}.weight"] = weight[:, :width]
            if head.config.projection_bias:
                found[f"{_projection(k, prefixed)}.bias"] = weight[:, width]
    return found


def _named_prefix(prefix: PrefixLayer) -> dict[str, Tensor]:
    layer = f"{PREFIX}layers.0."
    return {
        **{f"{layer}{norm}.weight": getattr(prefix, norm).weight for norm in NORMS},
        **attention_tensors(prefix.self_attn, f"{layer}self_attn."),
        **{f"{layer}mlp.{part}.weight": getattr(prefix.mlp, part).weight for part in MLP},
        f"{PREFIX}norm.weight": prefix.norm.weight,
    }


def _prefix_layout(artefact: PublishedCheckpoint, width: int) -> dict[str, Shape]:
    """The config says nothing of the layer's sizes: they are the base's, and compared with it when it is attached."""
    layer = f"{PREFIX}layers.0."
    queries, keys = (
        _rows(artefact, f"{layer}self_attn.q_proj.weight"),
        _rows(artefact, f"{layer}self_attn.k_proj.weight"),
    )
    inner = _rows(artefact, f"{layer}mlp.gate_proj.weight")
    return {
        **{f"{layer}{norm}.weight": (width,) for norm in NORMS},
        f"{layer}self_attn.q_proj.weight": (queries, width),
        f"{layer}self_attn.k_proj.weight": (keys, width),
        f"{layer}self_attn.v_proj.weight": (keys, width),
        f"{layer}self_attn.o_proj.weight": (width, queries),
        f"{layer}mlp.gate_proj.weight": (inner, width),
        f"{layer}mlp.up_proj.weight": (inner, width),
        f"{layer}mlp.down_proj.weight": (width, inner),
        f"{PREFIX}norm.weight": (width,),
    }


def _is_prefixed(config: dict[str, Any]) -> bool:
    return config.get("hydra_head_arch") == "prefix-mlp"


def _block(k: int, j: int, prefixed: bool) -> str:
    """Module name of block j of head k."""
    return f"hydra_mlp.{k}.{2 * j + 1 if prefixed else j}"


def _first_block(k: int, prefixed: bool) -> str:
    return f"{_block(k, 0, prefixed)}.linear"


def _projection(k: int, prefixed: bool) -> str:
    """Module name of the projection of head k."""
    return f"hydra_lm_head.{k}.1" if prefixed else f"hydra_lm_head.{k}"


def _in_order(tensors: dict[str, Tensor], prefixed: bool) -> dict[str, Tensor]:
    """With module numbers as they should be, whether or not the file counts dropouts."""
    counts = "hydra_mlp.0.1.res_connection.weight" in tensors
    if counts == prefixed:
        return tensors

    def renamed(name: str) -> str:
        kind, *path = name.split(".")
        if kind == "hydra_mlp":
            return ".".join([kind, path[0], str(int(path[1]) // 2 if counts else 2 * int(path[1]) + 1), *path[2:]])
        if kind == "hydra_lm_head":
            return ".".join([kind, path[0], *(path[2:] if counts else ["1", *path[1:]])])
        return name

    return {renamed(name): value for name, value in tensors.items()}


def _rows(artefact: PublishedCheckpoint, name: str) -> int:
    return rows_of(artefact, name, "Hydra")
