"""Tiny configurations of the families that ``bases.py`` compares, with the family's kinds of layers.

Windows and chunks have 32 positions, fewer than the longest prompt. Names with ``_full`` have windows as large as the
whole context.
"""

from typing import Any

SIZES: dict[str, Any] = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    **{"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "num_shared_experts": 1},
}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "head_dim": 8},
}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {"sliding_window": 32, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
ENDS_FULL: dict[str, Any] = {"sliding_window": 32, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}
WIDE = {"sliding_window": 4096}


def rope(kind: str, factor: float | None = None, original: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return rotary settings; ``original`` is the context length before scaling by ``factor``."""
    known = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": original}
    return {key: value for key, value in known.items() if value is not None} | settings


ROPE = rope("default")
LONGROPE = rope("longrope", 8.0, 64, short_factor=[1.0] * 8, long_factor=[1.0 + n / 2 for n in range(8)])
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1},
    **{"image_size": 28, "patch_size": 14, "num_heads": 2, "embed_dim": 32, "out_hidden_size": 64, "head_dim": 16},
}
DEEPSTACK = {"deepstack_visual_indexes": [0]}
MROPE = {**ROPE, "mrope_section": [2, 3, 3]}


def shape(model_type: str, *groups: dict[str, Any], without: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """Return a transformers config in the form of ``base.shape``."""
    config = {"model_type": model_type, **SIZES}
    for group in groups:
        config |= group
    return {key: value for key, value in (config | settings).items() if key not in without}


def composite(
    model_type: str, text: dict[str, Any], vision: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the config of a composite of a text and a vision model."""
    models = {"text_config": text, "vision_config": VISION | (vision or {})}
    return {"model_type": model_type, **models, "tie_word_embeddings": False, **more}


GEMMA4 = {
    **{"global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    **{"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 300, "use_double_wide_mlp": False},
}
LLAMA4 = {**EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 8192}
LLAMA4_CHUNK = {**LLAMA4, "attention_chunk_size": 32}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512}
INDEXED = {"index_topk": 16, "index_head_dim": 8, "index_n_heads": 2}
GRANITE = {"logits_scaling": 8.0}
PHI3_LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}

PLAIN = (
    "llama ministral3 qwen2 qwen3 gemma smollm3 glm glm4 stablelm nemotron olmo olmo2 helium seed_oss ernie4_5 apertus "
    "arcee bitnet diffllama doge internlm3 jais2 nanochat iquestcoder gpt_neox phi persimmon biogpt"
).split()
CONV, LINEAR = {"layer_types": ["conv", FULL, "conv", "conv"]}, {"layer_types": ["linear_attention", FULL] * 2}
DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    **{"linear_num_heads": 4, "linear_head_dim": 8},
}
MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16},
    **{"attn_layer_indices": [1], "mamba_d_ssm": 128},
}
NEMOTRON_H: dict[str, Any] = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16},
    **{"moe_shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "moe", FULL, "linear_attention"]},
}
RECURRENT = "falcon_mamba mamba recurrent_gemma".split()
OF_EXPERTS = (
    "qwen2_moe qwen3_moe olmoe flex_olmo glm4_moe ernie4_5_moe hy_v3 laguna mellum minimax_m2 solar_open "
    "deepseek_v4 minimax"
).split()
LATENT_EXPERTS = "deepseek_v2 deepseek_v3 glm4_moe_lite axk1".split()
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    **{"olmo3": {}, "exaone4": {}, "gemma3_text": {"query_pre_attn_scalar": 16}},
    **{"cohere2": {"logit_scale": 0.25}, "granite_swa": {"logits_scaling": 8.0}},
}
"""Families that mix layers with and without a window; each also has a ``_full`` configuration."""

SHAPES: dict[str, dict[str, Any]] = {
    **{name: shape(name) for name in (*PLAIN, *RECURRENT)},
    **{name: shape(name, EXPERTS) for name in OF_EXPERTS},
    **{name: shape(name, EXPERTS, LATENT) for name in LATENT_EXPERTS},
    **{name: shape(name, MIXED, more) for name, more in WITH_WINDOWS.items()},
    **{f"{name}_full": shape(name, MIXED, WIDE, more) for name, more in WITH_WINDOWS.items()},
    **{f"{name}_window": shape(name, EXPERTS, MIXED) for name in ("mellum", "laguna", "exaone_moe")},
    **{name: shape(name, sliding_window=None) for name in ("phi3", "starcoder2")},
    **{f"{name}_window": shape(name, sliding_window=32) for name in ("phi3", "starcoder2", "doge")},
    **{name: shape(name, EXPERTS, sliding_window=None) for name in ("mixtral", "phimoe")},
    **{f"{name}_window": shape(name, EXPERTS, sliding_window=32) for name in ("mixtral", "phimoe")},
    **{f"{n}_window": shape(n, MIXED, use_sliding_window=True, max_window_layers=2) for n in ("qwen2", "qwen3")},
    **{n: composite(n, shape(f"{n}_text", rope_parameters=MROPE)) for n in ("qwen2_vl", "qwen2_5_vl", "glm4v")},
    # Llama and its relatives: one kind of layer
    "llama_bias": shape("llama", attention_bias=True, mlp_bias=True),
    "llama_tied": shape("llama", tie_word_embeddings=True),
    "llama_rope3": shape("llama", rope_parameters=rope("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama_yarn": shape("llama", rope_parameters=rope("yarn", 4.0, 128)),
    "llama_linear": shape("llama", rope_parameters=rope("linear", 4.0)),
    "llama_dynamic": shape("llama", rope_parameters=rope("dynamic", 4.0)),
    "mistral_full": shape("mistral", sliding_window=None),
    "phi3_longrope": shape("phi3", PHI3_LONG, sliding_window=None),
    "phi4_mini": shape("phi3", sliding_window=None, partial_rotary_factor=0.75, head_dim=16),
    "granite": shape("granite", GRANITE, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1),
    "cohere": shape("cohere", logit_scale=0.0625),
    "cohere_scale1": shape("cohere", logit_scale=1.0),
    "hunyuan_dense": shape("hunyuan_v1_dense"),
    "cwm": shape("cwm", sliding_window=4096),
    "exaone4_1b": shape("exaone4", sliding_window=None, layer_types=[FULL] * 4),
    "hyperclovax": shape("hyperclovax", logits_scaling=0.125, embedding_multiplier=2.0),
    "minicpm3": shape("minicpm3", LATENT, dim_model_base=16, scale_emb=2, scale_depth=1.4),
    "gpt_bigcode": shape("gpt_bigcode", GPT, multi_query=True),
    "gpt_bigcode_heads": shape("gpt_bigcode", GPT, multi_query=False),
    "vaultgemma": shape("vaultgemma", MIXED, query_pre_attn_scalar=16),
    # Windows and chunks
    "mistral": shape("mistral", sliding_window=32),
    "mistral_wide": shape("mistral", WIDE),
    "ministral": shape("ministral", MIXED),
    "starcoder2_wide": shape("starcoder2", WIDE),
    "gemma2": shape("gemma2", MIXED, query_pre_attn_scalar=16),
    "gemma2_nosoftcap": shape("gemma2", MIXED, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3n_text": shape("gemma3n_text", MIXED, num_kv_shared_layers=0, hidden_size_per_layer_input=8),
    "cwm_window": shape("cwm", MIXED),
    "smollm3_window": shape("smollm3", MIXED, use_sliding_window=True),
    "qwen3_moe_window": shape("qwen3_moe", EXPERTS, use_sliding_window=True, sliding_window=32),
    # Sinks
    "gpt_oss": shape("gpt_oss", EXPERTS, MIXED),
    "gpt_oss_full": shape("gpt_oss", EXPERTS, MIXED, WIDE),
    "granitemoe_swa": shape("granitemoe_swa", EXPERTS, MIXED, logits_scaling=8.0),
    # Mixtures of experts
    "granitemoe": shape("granitemoe", EXPERTS, GRANITE),
    "granitemoeshared": shape("granitemoeshared", EXPERTS, GRANITE, shared_intermediate_size=32),
    "granitemoehybrid_attention": shape(
        *("granitemoehybrid", EXPERTS, GRANITE, {"shared_intermediate_size": 32}),
        layer_types=["attention"] * 4,
        position_embedding_type="rope",
    ),
    "dots1": shape("dots1", EXPERTS, num_key_value_heads=4),
    "hunyuan_moe": shape("hunyuan_v1_moe", EXPERTS),
    "jetmoe": shape("jetmoe", EXPERTS, kv_channels=16),
    "afmoe": shape("afmoe", EXPERTS, WIDE, num_dense_layers=1),
    "afmoe_window": shape("afmoe", EXPERTS, MIXED, num_dense_layers=1),
    "minimax_m2_partial": shape("minimax_m2", EXPERTS, partial_rotary_factor=0.5),
    "exaone_moe": shape("exaone_moe", EXPERTS, MIXED, WIDE),
    "cohere2_moe": shape("cohere2_moe", EXPERTS, MIXED, logit_scale=0.25),
    # Latent attention, layers of different widths
    "kimi_k2": shape("deepseek_v3", EXPERTS, LATENT, n_shared_experts=2, routed_scaling_factor=2.8),
    "youtu": shape("youtu", LATENT),
    "longcat_flash": shape(
        "longcat_flash", EXPERTS, LATENT, num_layers=2, expert_ffn_hidden_size=32, ffn_hidden_size=96
    ),
    "mimo_v2_flash": shape("mimo_v2_flash", EXPERTS, MIXED, v_head_dim=24, swa_head_dim=16, swa_v_head_dim=24),
    "gemma4": shape("gemma4_text", GEMMA4, ENDS_FULL),
    "gemma4_full": shape("gemma4_text", GEMMA4, ENDS_FULL, WIDE),
    "gemma4_31b": shape("gemma4_text", GEMMA4, ENDS_FULL, attention_k_eq_v=True),
    "gemma4_e2b": shape(
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        sliding_window=32,
        num_hidden_layers=6,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
    ),
    "gemma4_same_width": shape("gemma4_text", {**GEMMA4, "global_head_dim": 16}, ENDS_FULL),
    "gemma4_moe": shape("gemma4_text", GEMMA4, EXPERTS, ENDS_FULL, enable_moe_block=True, top_k_experts=2),
    # Llama 4
    "llama4_text": shape("llama4_text", LLAMA4),
    "llama4_text_chunk": shape("llama4_text", LLAMA4_CHUNK),
    "llama4_text_scaled": shape("llama4_text", LLAMA4_CHUNK, floor_scale=80),
    # The text models of composite checkpoints
    "gemma3": composite("gemma3", shape("gemma3_text", MIXED, query_pre_attn_scalar=16), mm_tokens_per_image=4),
    "gemma4_vision": composite(
        "gemma4", shape("gemma4_text", GEMMA4, ENDS_FULL), {"global_head_dim": 16, "num_key_value_heads": 2}
    ),
    "mistral3": composite("mistral3", shape("mistral", sliding_window=None), {"model_type": "pixtral"}),
    "mistral3_window": composite("mistral3", shape("mistral", sliding_window=32), {"model_type": "pixtral"}),
    "ministral3_vision": composite("mistral3", shape("ministral3"), {"model_type": "pixtral"}),
    "mistral4": composite("mistral3", shape("mistral4", EXPERTS, LATENT), {"model_type": "pixtral"}),
    "qwen3_vl": composite("qwen3_vl", shape("qwen3_vl_text", rope_parameters=MROPE), DEEPSTACK),
    "qwen3_vl_moe": composite("qwen3_vl_moe", shape("qwen3_vl_moe_text", EXPERTS, rope_parameters=MROPE), DEEPSTACK),
    "llama4": composite(
        "llama4", shape("llama4_text", LLAMA4_CHUNK), {"vision_output_dim": 32, "projector_output_dim": 32}
    ),
    "glm4v_moe": composite(
        "glm4v_moe", shape("glm4v_moe_text", EXPERTS, rope_parameters={**MROPE, "mrope_section": [2, 1, 1]})
    ),
    "llava_llama": composite("llava", shape("llama"), {"model_type": "clip_vision_model", "projection_dim": 16}),
    "paligemma": composite("paligemma", shape("gemma"), {"model_type": "siglip_vision_model", "projection_dim": 64}),
    # Not structured like Llama, or without a plain cache
    "gpt2": shape("gpt2", GPT),
    "gptj": shape("gptj", GPT, rotary_dim=8),
    "opt": shape("opt", ffn_dim=96, word_embed_proj_dim=64),
    "bloom": shape("bloom", n_head=4, n_layer=4),
    "mpt": shape("mpt", d_model=64, n_heads=4, n_layers=4, max_seq_len=512),
    "falcon": shape("falcon", without=("head_dim",)),
    "xglm": shape("xglm", d_model=64, attention_heads=4, num_layers=4, ffn_dim=96),
    "modernbert_decoder": shape("modernbert-decoder"),
    **{name: shape(name, EXPERTS, LATENT, INDEXED) for name in ("deepseek_v32", "glm_moe_dsa")},
    "minimax_attention": shape("minimax", EXPERTS, layer_types=[FULL] * 4),
    # Recurrent
    "lfm2": shape("lfm2", CONV, block_multiple_of=32),
    "lfm2_moe": shape("lfm2_moe", EXPERTS, CONV, num_dense_layers=1),
    "lfm3": shape("lfm3", layer_types=["conv", SLIDING, "conv", FULL], sliding_window=32),
    "qwen3_5_text": shape("qwen3_5_text", DELTA, LINEAR),
    "qwen3_5": composite("qwen3_5", shape("qwen3_5_text", DELTA, LINEAR)),
    "qwen3_5_moe": composite("qwen3_5_moe", shape("qwen3_5_moe_text", DELTA, EXPERTS, LINEAR)),
    "qwen3_next": shape("qwen3_next", DELTA, EXPERTS, LINEAR),
    "olmo_hybrid": shape("olmo_hybrid", {**DELTA, "linear_num_key_heads": 4}, LINEAR),
    "kimi_linear": shape("kimi_linear", DELTA, EXPERTS, LATENT, LINEAR),
    "bailing_hybrid": shape("bailing_hybrid", EXPERTS, LATENT, LINEAR),
    "bamba": shape("bamba", MAMBA2),
    "granitemoehybrid": shape("granitemoehybrid", MAMBA2, EXPERTS, GRANITE, LINEAR, shared_intermediate_size=32),
    "granitemoehybrid_dense": shape("granitemoehybrid", MAMBA2, LINEAR, num_local_experts=0),
    "nemotron_h": shape("nemotron_h", EXPERTS, NEMOTRON_H),
    "falcon_h1": shape("falcon_h1", MAMBA2),
    "falcon_h1_norm": shape("falcon_h1", MAMBA2, mamba_rms_norm=True),
    "zamba2": shape("zamba2", MAMBA2, layers_block_type=["linear_attention", "hybrid"] * 2, mamba_ngroups=2),
    "jamba": shape("jamba", EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "mamba2": shape("mamba2", num_heads=8, expand=2),
    "rwkv": shape("rwkv", attention_hidden_size=64),
    "xlstm": shape("xlstm", num_heads=4),
    "zaya": shape("zaya", EXPERTS, num_experts_per_tok=1),
}
"""The configurations by name."""

AFTER: dict[str, str] = {
    **{"llama_rope3": "Llama-3.1-405B", "llama": "Vicuna-33B", "llama_yarn": "Yarn-Llama-2-70B", "cwm": "cwm (32B)"},
    **{"mistral_full": "Mistral-Large-2411 (123B)", "mistral": "Mistral-7B-v0.1", "mixtral": "Mixtral-8x22B"},
    **{"qwen2": "Qwen2.5-72B", "qwen3": "Qwen3-32B", "qwen3_moe": "Qwen3-235B-A22B", "qwen2_moe": "Qwen2-57B-A14B"},
    **{"gemma": "gemma-7b", "gemma2": "gemma-2-27b", "gemma3_text": "gemma-3-1b", "gemma3": "gemma-3-27b"},
    **{"gemma4_31b": "gemma-4-31B", "gemma4_e2b": "gemma-4-E2B", "gemma3n_text": "gemma-3n-E4B"},
    **{"gpt_oss": "gpt-oss-120b", "deepseek_v2": "DeepSeek-V2 (236B)", "deepseek_v3": "DeepSeek-V3 (671B)"},
    **{"kimi_k2": "Kimi-K2 (1T)", "glm4": "GLM-4-32B", "glm4_moe": "GLM-4.5 (355B)", "glm4_moe_lite": "GLM-4.7-Flash"},
    **{"phi3": "Phi-3-medium-4k (14B)", "phi3_longrope": "Phi-3-medium-128k (14B)", "phimoe": "Phi-3.5-MoE"},
    **{"llama4": "Llama-4-Maverick", "mistral3": "Mistral-Small-3.2-24B", "qwen2_5_vl": "Qwen2.5-VL-72B"},
    **{"qwen3_vl": "Qwen3-VL-32B", "qwen3_vl_moe": "Qwen3-VL-235B-A22B", "olmo3": "Olmo-3-32B", "olmo2": "OLMo-2-32B"},
    **{"exaone4": "EXAONE-4.0-32B", "exaone4_1b": "EXAONE-4.0-1.2B", "cohere": "c4ai-command-r-plus (104B)"},
    **{"cohere2": "c4ai-command-a (111B)", "granite": "granite-3.3-8b", "granitemoe": "granite-3.1-3b-a800m"},
    **{"seed_oss": "Seed-OSS-36B", "smollm3": "SmolLM3-3B", "starcoder2_wide": "starcoder2-15b"},
    **{"minimax_m2": "MiniMax-M2", "ernie4_5_moe": "ERNIE-4.5-300B-A47B", "hunyuan_moe": "Hunyuan-A13B"},
    **{"nemotron": "Minitron-8B", "glm4v_moe": "GLM-4.5V", "qwen3_next": "Qwen3-Next-80B-A3B"},
    **{"lfm2": "LFM2-2.6B", "lfm2_moe": "LFM2-8B-A1B", "qwen3_5_text": "Qwen3.5-27B", "bamba": "Bamba-9B-v2"},
    **{"kimi_linear": "Kimi-Linear-48B-A3B", "granitemoehybrid": "granite-4.0-h-small", "falcon_h1": "Falcon-H1-34B"},
    **{"jamba": "AI21-Jamba-Large-1.7 (398B)"},
    **{"nemotron_h": "Nemotron-H-56B"},
    **{"gpt_bigcode": "starcoder (15B)", "dots1": "dots.llm1 (142B)"},
}
"""The largest known checkpoint on the Hub with the configuration's kinds of layers."""
