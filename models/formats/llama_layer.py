"""Config keys of a head's Llama-style decoder layer, and their comparison with the base's layers.

A head's layer takes its numbers of attention heads, rotary embedding and norm epsilon from the base. A published layer
must therefore have the same values as the base.
"""

import math
from typing import Any

from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.structure import attention_sizes
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.heads.parts.attention_layer import head_rope, norm_eps

LAYER_KEYS = frozenset(
    "model_type num_hidden_layers num_attention_heads num_key_value_heads head_dim attention_bias rms_norm_eps "
    "rope_theta rope_scaling rope_parameters".split()
)
"""Keys of a Llama config that an import uses, apart from ``hidden_size``, ``vocab_size`` and ``intermediate_size``."""


def layer_config(base: BaseModel) -> dict[str, Any]:
    """Return the config of a Llama with one decoder layer like the base's; the key ``intermediate_size`` is missing."""
    settings = base.model.config
    kv_heads, head_dim = attention_sizes(settings)
    theta, scaling = _rotation(head_rope(base))
    return {
        "model_type": "llama",
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": float(f"{norm_eps(base):.6g}"),  # float32 turns 1e-05 into 9.9999997e-06
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": base.max_context,
        "tie_word_embeddings": False,
    }


def require_same_layer(checkpoint: PublishedCheckpoint, base: BaseModel) -> None:
    """Reject a checkpoint whose layer differs from the base's in attention heads, rotary embedding or norm epsilon."""
    config, expected = checkpoint.config, layer_config(base)
    heads = checkpoint.integer("num_attention_heads")
    rope = config.get("rope_parameters")
    rope = rope or {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    theta, scaling = _rotation(rope)
    published = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or base.hidden_size // heads,
        "attention_bias": config.get("attention_bias", False),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    for key, value in published.items():
        near = isinstance(value, float) and math.isclose(value, expected[key], rel_tol=1e-4)
        if value != expected[key] and not near:
            what = f"has a layer with {key} {value}, but {base.name} has {expected[key]}"
            raise checkpoint.wrong_base(f"{what}. A head's layer must match its base")


def _rotation(rope: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling (None: none) of a rotary embedding, without keys that have no effect."""
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type") and v is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return float(rope.get("rope_theta") or 10000.0), None if kind == "default" else {**scaling, "rope_type": kind}
