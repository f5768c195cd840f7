"""Config keys of a head's Llama-style decoder layer, and their comparison with the base's layers.

A head's layer takes its numbers of attention heads, rotary embedding and norm epsilon from the base. A published layer
must therefore have the same values as the base.
"""

import math
from typing import Any

from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import attention_sizes
from drafthead.models.base.windows import FULL
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.format import Format
from drafthead.models.heads.parts.attention_layer import head_rope, norm_eps
from drafthead.models.heads.parts.windows import WindowConfig

LAYER_KEYS = frozenset(
    "model_type num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "rope_theta rope_scaling rope_parameters".split()
)
"""Keys of a Llama config that an import uses, apart from ``hidden_size``, ``vocab_size`` and ``intermediate_size``."""
ROPE_SECTIONS = dict.fromkeys(("rope_parameters", "rope_scaling"), "rope_theta|partial_rotary_factor")
"""Objects inside a Llama config -> their keys that may also be at the top level: an entry of ``Format.sections``."""
LAYER_ONLY: dict[str, tuple[Any, ...]] = {
    **Format.only,
    **dict.fromkeys("hidden_act hidden_activation".split(), ("silu", "swish")),
    **dict.fromkeys("attention_bias mlp_bias qkv_bias bias".split(), (False,)),
    **dict.fromkeys("attention_sink_bias add_swa_attention_sink_bias mla_use_nope".split(), (False,)),
    **dict.fromkeys("is_neox_style rope_is_neox_style".split(), (True,)),
    **dict.fromkeys("attention_value_scale embedding_multiplier input_embedding_scale".split(), (1.0,)),
    **dict.fromkeys("logits_scaling output_multiplier partial_rotary_factor residual_multiplier".split(), (1.0,)),
    **dict.fromkeys("attn_logit_softcapping final_logit_softcapping".split(), (0.0,)),
    **dict.fromkeys("attention_multiplier query_pre_attn_scalar q_lora_rank kv_lora_rank".split(), ()),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), ()),
}
"""Keys of decoder layers that change the drafts -> the only values that a head's layers support (``Format.only``)."""
SLIDING = "sliding_attention"
WINDOW_ONLY: dict[str, tuple[Any, ...]] = {"layer_types": (FULL, SLIDING)}
NO_WINDOW_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_sliding_window", "use_swa"), (False,)),
    "layer_types": (FULL,),
    "sliding_window": (),
}
"""``Format.only`` of layers that cannot have a window, and ``WINDOW_ONLY`` of those that can."""
WINDOW_KEYS = frozenset(
    "layer_types sliding_window use_sliding_window max_window_layers use_swa swa_window_size".split()
)


def layer_config(base: BaseParts, rope_theta: float | None = None) -> dict[str, Any]:
    """Return the config of a Llama with one decoder layer like the base's, without ``intermediate_size``.
    ``rope_theta`` is the layer's own rotation, without scaling."""
    settings = base.model_config
    kv_heads, head_dim = attention_sizes(settings)
    theta, scaling = _rotation(head_rope(base)) if rope_theta is None else (rope_theta, None)
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
        "max_position_embeddings": settings.max_position_embeddings,  # not max_context, a setting of the run
        "tie_word_embeddings": False,
    }


def window_config(config: WindowConfig) -> dict[str, Any]:
    """Return the keys of a published config that hold the windows of a head's layers."""
    if config.window is None:
        return {}
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    # Qwen3's config drops the size without use_sliding_window.
    return {"layer_types": kinds, "sliding_window": config.window, "use_sliding_window": True}


def window_settings(checkpoint: PublishedCheckpoint, layers: int) -> dict[str, Any]:
    """Return ``window`` and ``full_layers`` of a published head with ``layers`` layers, as vLLM 0.32.0 resolves them:
    ``use_swa`` gives every layer a window if ``layer_types`` gives none, and ``swa_window_size`` precedes
    ``sliding_window``."""
    config = checkpoint.config
    kinds, size = config.get("layer_types"), config.get("swa_window_size") or config.get("sliding_window")
    if kinds is None:
        if config.get("sliding_window") and "use_sliding_window" not in config and not config.get("use_swa"):
            what = f"{checkpoint.source} has sliding_window {size}, but does not say which layers have it"
            raise UserError(f"{what}; set config.layer_types=[{','.join([SLIDING] * layers)}], or {FULL}")
        # The rule of Qwen3's config, with its default.
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else layers
        kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    if len(kinds) != layers:
        what = f"{checkpoint.source} has {len(kinds)} layer_types, but {layers} layers"
        raise UserError(f"{what}; set config.layer_types=[...] with a value for each layer")
    if config.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * layers
    if SLIDING not in kinds:
        return {}
    if type(size) is not int:
        what = f"{checkpoint.source} has layers with a window, but sliding_window {size!r}"
        raise UserError(f"{what}; set config.sliding_window=TOKENS")
    return {"window": size, "full_layers": [layer for layer, kind in enumerate(kinds) if kind == FULL]}


def layer_rotation(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling (None: none) of the rotary embedding in a published Llama config."""
    sections = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    return _rotation({**sections, "rope_theta": config.get("rope_theta")})


def require_same_layer(checkpoint: PublishedCheckpoint, base: BaseParts, rope_theta: float | None = None) -> None:
    config, expected = checkpoint.config, layer_config(base, rope_theta)
    heads = checkpoint.integer("num_attention_heads")
    theta, scaling = layer_rotation(config)
    published = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or base.hidden_size // heads,
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
    by_layer = any(isinstance(value, dict) for value in scaling.values())
    kind = rope.get("rope_type") or rope.get("type") or ("one for each type of layer" if by_layer else "default")
    return float(rope.get("rope_theta") or 10000.0), None if kind == "default" else {**scaling, "rope_type": kind}
