"""Configs of tiny transformers models: one per architecture and interesting variant, and wrappers."""

from typing import Any

VOCAB = 96
WINDOW = 64
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Head size 16 has wavelengths from 6 to 20,000: some are kept, some blended, some interpolated.
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ROPE_IN_FULL = {
    **YARN_ROPE,
    # Long enough that both ends of the ramp fall between dimensions 0 and 8.
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
}
_QWEN3_MOE = {
    **_LLAMA,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
    "pad_token_id": 0,
}
_GRANITE_HYBRID = {
    **_LLAMA,
    **_GRANITE,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_expand": 2,
    "mamba_d_head": 16,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW}
_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": WINDOW,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, **parameters}}


# Name of the variant: transformers' class without its suffix, and the config's keys.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama-untied-biases": ("Llama", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {**_LLAMA, **_rope(**LLAMA3_ROPE)}),
    "llama-linear-rope": ("Llama", {**_LLAMA, **_rope(rope_type="linear", factor=3.0)}),
    "llama-yarn": ("Llama", {**_LLAMA, **_rope(**YARN_ROPE)}),
    "llama-yarn-mscale": ("Llama", {**_LLAMA, **_rope(**YARN_ROPE_IN_FULL)}),
    "mistral": ("Mistral", {**_LLAMA, "head_dim": 16, "sliding_window": 5}),
    "mistral-full": ("Mistral", {**_LLAMA, "sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-sliding": (
        "Qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-one-of-three": (
        "Mixtral",
        {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5},
    ),
    "olmoe": ("Olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.5}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-one": ("Qwen3Moe", {**_QWEN3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen3_moe-one-normalized": (
        "Qwen3Moe",
        {**_QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe-some-dense": (
        "Qwen3Moe",
        {
            **_QWEN3_MOE,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "gemma": ("Gemma", {**_LLAMA, "head_dim": 16, "hidden_act": "gelu", "attention_bias": True}),
    "stablelm": ("StableLm", {**_LLAMA, "hidden_size": 64, "use_qkv_bias": True}),
    "ernie4_5": ("Ernie4_5", {**_LLAMA, "head_dim": 16, "use_bias": True}),
    "exaone4": (
        "Exaone4",
        {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "exaone4-full": (
        "Exaone4",
        # transformers needs the types where there is no window.
        {**_LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "granite": (
        "Granite",
        {**_LLAMA, **_GRANITE, "rms_norm_eps": 1e-2, "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoehybrid": ("GraniteMoeHybrid", {**_GRANITE_HYBRID, "position_embedding_type": "rope"}),
    "granitemoehybrid-nope": ("GraniteMoeHybrid", _GRANITE_HYBRID),
    "ministral3": (
        "Ministral3",
        {
            **_LLAMA,
            "head_dim": 16,
            "pad_token_id": 0,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                # Short, so that queries grow within the prompt.
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "olmo2": ("Olmo2", {**_LLAMA, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {**YARN_ROPE, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi": ("Phi", {**_LLAMA, "partial_rotary_factor": 0.5}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2_moe-some-dense": (
        "Qwen2Moe",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {**_LLAMA, "num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "smollm3-sliding": (
        "SmolLM3",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {**_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3, "final_logit_softcapping": 4.0},
    ),
    "gemma3-linear-rope": (
        "Gemma3Text",
        {
            **_GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": ("Phi3", {**_LLAMA, "sliding_window": 6, "pad_token_id": 0}),
    "phi3-partial": (
        "Phi3",
        {**_LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}, "pad_token_id": 0},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2-unscaled-untied": (
        "GPT2",
        {**_GPT2, "scale_attn_weights": False, "n_inner": 40, "tie_word_embeddings": False},
    ),
    "opt": ("OPT", _OPT),
    "opt-untied-no-bias": (
        "OPT",
        {**_OPT, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
}
ARCHITECTURE_VARIANTS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "gemma", "gemma2", "gemma3",
    "phi3", "gpt2", "opt", "stablelm", "ernie4_5", "exaone4", "granite", "granitemoehybrid", "ministral3",
    "olmo2", "olmo3", "phi", "qwen2_moe", "smollm3",
)  # fmt: skip

_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    # Not d_model / num_heads.
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    # So few that a source of a test goes past the distance of the last one.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": WINDOW,
    "decoder_start_token_id": 2,
}
_MARIAN = {**_BART, "pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1, "scale_embedding": True}
# Encoder-decoders, as `VARIANTS`.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5-gated-untied": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", {**_BART, "forced_bos_token_id": 0}),
    "bart-scaled": ("Bart", {**_BART, "scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("MBart", {**_BART, "scale_embedding": True}),
    "marian": ("Marian", {**_MARIAN, "activation_function": "swish"}),
    "switch_transformers": (
        "SwitchTransformers",
        {
            **_T5,
            "num_layers": 4,
            "num_decoder_layers": 4,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "num_experts": 4,
            # Fewer than the tokens of a source that visit the most popular expert.
            "expert_capacity": 3,
        },
    ),
}

# Multimodal models whose text model is read: ids from here on stand for images.
FIRST_IMAGE_ID = 90
_TEXT = {**_LLAMA, "head_dim": 16}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "patch_size": 14,
}
_ROPE_OF_AXES = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**_GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_SIGLIP, "model_type": "pixtral"},
            "image_token_index": 90,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE_OF_AXES},
            "vision_config": _QWEN_VISION,
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
            "tie_word_embeddings": True,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": _SIGLIP,
            "image_token_id": 90,
            "pad_token_id": 0,
        },
    ),
}
