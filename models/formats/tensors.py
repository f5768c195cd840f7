"""What the formats of heads with a Llama-style layer of their own share: its config keys, its names and its shapes."""
# What the formats of heads made of residual blocks (Medusa, Hydra) share.

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.contract import Shape
from drafthead.models.heads.common.attention_layer import AttentionShape, HeadAttention, norm_eps


def rows_of(artefact: PublishedCheckpoint, name: str, heads: str) -> int:
    """Rows of a tensor; ``heads`` says whose it is.

    Raises:
        UserError: there is no such tensor.
    """
    if name not in artefact.tensors:
        raise UserError(f"{artefact.source} has no tensor {name}; these are no {heads} heads")
    return len(artefact.tensors[name])


def tied(tensors: Mapping[str, Tensor], heads: Iterable[Sequence[str]]) -> bool:
    """True when heads have several blocks that may be one (``heads``: the names of each one's), and they are."""
    return all(len(names) > 1 and all(_equal(tensors, names[0], other) for other in names[1:]) for names in heads)


def _equal(tensors: Mapping[str, Tensor], one: str, other: str) -> bool:
    """Whether two linear layers have the same values; a bias may be missing."""
    pairs = [(tensors.get(f"{one}.{part}"), tensors.get(f"{other}.{part}")) for part in ("weight", "bias")]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


CONFIG_KEYS = frozenset(
    {
        "model_type",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
)
"""What is read of a Llama config."""
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_config(base: BaseModel) -> dict[str, Any]:
    """Keys of a Llama config of one layer like the base's, with rotary keys that old and new loaders read."""
    shape, settings = AttentionShape.of(base), base.model.config
    theta, scaling = _rotation(getattr(settings, "rope_parameters", None) or {})
    return {
        "model_type": "llama",
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": float(f"{norm_eps(base):.6g}"),  # a float32 of another file format may be 9.9999997e-06
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": base.max_context,
        "tie_word_embeddings": False,
    }


def require_same_layer(artefact: PublishedCheckpoint, base: BaseModel) -> None:
    """Refuse a layer whose attention would be another one beside this base, which lends its rotary embedding.

    Raises:
        UserError: heads, rotation or the norm's epsilon differ.
    """
    found, wanted = artefact.config, layer_config(base)
    heads = artefact.integer("num_attention_heads")
    rope = found.get("rope_parameters") or {**(found.get("rope_scaling") or {}), "rope_theta": found.get("rope_theta")}
    theta, scaling = _rotation(rope)
    said = {
        "num_attention_heads": heads,
        "num_key_value_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or artefact.integer("hidden_size") // heads,
        "attention_bias": found.get("attention_bias", False),
        "rms_norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    for key, value in said.items():
        near = isinstance(value, float) and math.isclose(value, wanted[key], rel_tol=1e-4)
        if value != wanted[key] and not near:
            raise UserError(
                f"{artefact.source} has a layer with {key} {value}, {base.name} one with {wanted[key]}; name the base "
                "that it was trained for"
            )


def attention_layout(artefact: PublishedCheckpoint, prefix: str, input_width: int) -> dict[str, Shape]:
    """Names and shapes of the layer's attention."""
    heads, width = artefact.integer("num_attention_heads"), artefact.integer("hidden_size")
    head_dim = artefact.config.get("head_dim") or width // heads
    keys = (artefact.config.get("num_key_value_heads") or heads) * head_dim
    return {
        f"{prefix}q_proj.weight": (heads * head_dim, input_width),
        f"{prefix}k_proj.weight": (keys, input_width),
        f"{prefix}v_proj.weight": (keys, input_width),
        f"{prefix}o_proj.weight": (width, heads * head_dim),
    }


def attention_tensors(attention: HeadAttention, prefix: str) -> dict[str, Tensor]:
    """The tensors of an attention by their published names (the parameters themselves)."""
    return {f"{prefix}{part}.weight": getattr(attention, part).weight for part in PARTS}


def _rotation(rope: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta, and the scaling without what says nothing."""
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type") and v is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return float(rope.get("rope_theta") or 10000.0), None if kind == "default" else {**scaling, "rope_type": kind}
