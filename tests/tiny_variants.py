"""Configs of tiny transformers models: one per architecture and interesting variant, and wrappers."""

from collections.abc import Mapping
from typing import Any

VOCAB = 96
WINDOW = 64
# Ids of multimodal models from here on stand for images.
FIRST_IMAGE_ID = 90
# Head size 16 has wavelengths from 6 to 20,000: of such a window some are kept, some blended, some
# interpolated.
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# The window is so long that both ends of the ramp fall between dimensions 0 and 8.
YARN_ROPE_IN_FULL = {
    **YARN_ROPE, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 2.0,
    "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
# Short, so that queries grow within the prompt.
_GROWING_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
}  # fmt: skip
_SLOW_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_ROPE_OF_AXES = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
}  # fmt: skip
_ROPE_OF_PARTS = {**_ROPE_OF_AXES, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}

_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": WINDOW,
}  # fmt: skip
_TEXT = {**_LLAMA, "head_dim": 16}
_TWO_OF_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3_MOE = {**_TEXT, **_TWO_OF_FOUR}
_QWEN2_MOE = {**_LLAMA, **_TWO_OF_FOUR, "shared_expert_intermediate_size": 40}
_QWEN3_5 = {
    **_TEXT, "tie_word_embeddings": False, "num_hidden_layers": 5, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_QWEN3_5_MOE = {
    **{key: value for key, value in _QWEN3_5.items() if key != "intermediate_size"},
    **_TWO_OF_FOUR, "num_hidden_layers": 4, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_GEMMA = {**_TEXT, "query_pre_attn_scalar": 24, "sliding_window": 5}
# The last three of seven layers attend to the keys and values of the second and of the fourth.
_GEMMA4 = {
    **_LLAMA, "num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2
    + ["full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 4.0, "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE = {
    **_LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    "logits_scaling": 4.0, "pad_token_id": 0,
}  # fmt: skip
_GRANITE_HYBRID = {
    **_GRANITE, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2, "num_local_experts": 0,
    "shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_expand": 2, "mamba_d_head": 16,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW}
_OPT = {
    "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": WINDOW,
}  # fmt: skip
Variant = tuple[str, dict[str, Any]]


def _of(family: str, base: Mapping[str, Any] = _LLAMA, **keys: Any) -> Variant:
    return family, {**base, **keys}


def _turned(**parameters: Any) -> Variant:
    return _of("Llama", _TEXT, rope_parameters={"rope_theta": 10000.0, **parameters})


def _windowed(**keys: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, **keys}


# Name of the variant, which begins with the architecture's: transformers' class without its suffix, and the
# config's keys.
VARIANTS: dict[str, Variant] = {
    "llama": _of("Llama", tie_word_embeddings=True),
    "llama-untied-biases": _of("Llama", attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": _turned(**LLAMA3_ROPE),
    "llama-linear-rope": _turned(rope_type="linear", factor=3.0),
    "llama-yarn": _turned(**YARN_ROPE),
    "llama-yarn-mscale": _turned(**YARN_ROPE_IN_FULL),
    "mistral": _of("Mistral", _TEXT, sliding_window=5),
    "mistral-full": _of("Mistral", sliding_window=None, num_key_value_heads=4),
    "qwen2": _of("Qwen2", tie_word_embeddings=True),
    "qwen2-sliding": _of("Qwen2", **_windowed(sliding_window=4, max_window_layers=1)),
    "qwen3": _of("Qwen3", _TEXT, attention_bias=True),
    "mixtral": _of("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-one-of-three": _of("Mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=5),
    "olmoe": _of("Olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=1.5),
    "qwen3_moe": _of("Qwen3Moe", _QWEN3_MOE, norm_topk_prob=True),
    "qwen3_moe-one": _of("Qwen3Moe", _QWEN3_MOE, num_experts_per_tok=1, tie_word_embeddings=True),
    "qwen3_moe-one-normalized": _of(
        "Qwen3Moe", _QWEN3_MOE, num_experts_per_tok=1, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "qwen3_moe-some-dense": _of(
        "Qwen3Moe", _QWEN3_MOE, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3],
        attention_bias=True, **_windowed(sliding_window=6),
    ),
    "gemma": _of("Gemma", _TEXT, hidden_act="gelu", attention_bias=True),
    "stablelm": _of("StableLm", hidden_size=64, use_qkv_bias=True),
    "ernie4_5": _of("Ernie4_5", _TEXT, use_bias=True),
    "exaone4": _of("Exaone4", num_hidden_layers=4, sliding_window=5, sliding_window_pattern=2),
    # transformers needs the types where there is no window.
    "exaone4-full": _of("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "granite": _of("Granite", _GRANITE, rms_norm_eps=1e-2, attention_bias=True, mlp_bias=True),
    "granitemoehybrid": _of("GraniteMoeHybrid", _GRANITE_HYBRID, position_embedding_type="rope"),
    "granitemoehybrid-nope": _of("GraniteMoeHybrid", _GRANITE_HYBRID),
    "ministral3": _of(
        "Ministral3", _TEXT, pad_token_id=0, sliding_window=9, rope_parameters=_GROWING_ROPE
    ),
    "olmo2": _of("Olmo2", attention_bias=True),
    "olmo3": _of(
        "Olmo3", num_hidden_layers=4, sliding_window=5,
        rope_parameters={
            "full_attention": {**YARN_ROPE, "rope_theta": 1e4}, "sliding_attention": _SLOW_ROPE,
        },
    ),
    "phi": _of("Phi", partial_rotary_factor=0.5),
    "qwen2_moe": _of("Qwen2Moe", _QWEN2_MOE),
    "qwen2_moe-some-dense": _of(
        "Qwen2Moe", _QWEN2_MOE, num_hidden_layers=4, num_experts_per_tok=1, norm_topk_prob=True,
        decoder_sparse_step=2, qkv_bias=False, **_windowed(sliding_window=5, max_window_layers=3),
    ),
    "smollm3": _of("SmolLM3", num_hidden_layers=5, no_rope_layer_interval=2, pad_token_id=0),
    "smollm3-sliding": _of(
        "SmolLM3", num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1], attention_bias=True, pad_token_id=0,
        **_windowed(sliding_window=5),
    ),
    "gemma2": _of("Gemma2", _GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": _of(
        "Gemma3Text", _GEMMA, num_hidden_layers=4, sliding_window_pattern=3, final_logit_softcapping=4.0
    ),
    "gemma3-linear-rope": _of(
        "Gemma3Text", _GEMMA, layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": _SLOW_ROPE,
        },
    ),
    "phi3": _of("Phi3", sliding_window=6, pad_token_id=0),
    "phi3-partial": _of("Phi3", rope_parameters={"partial_rotary_factor": 0.5}, pad_token_id=0),
    "gpt_oss": _of(
        "GptOss", _TEXT, num_hidden_layers=3, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={**YARN_ROPE, "rope_theta": 150000.0, "truncate": False},
    ),
    "gpt2": _of("GPT2", _GPT2),
    "gpt2-unscaled-untied": _of(
        "GPT2", _GPT2, scale_attn_weights=False, n_inner=40, tie_word_embeddings=False
    ),
    "opt": _of("OPT", _OPT),
    "opt-untied-no-bias": _of(
        "OPT", _OPT, enable_bias=False, tie_word_embeddings=False, activation_function="gelu"
    ),
    # State layers.
    "lfm2": _of(
        "Lfm2", tie_word_embeddings=True, num_hidden_layers=4, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "lfm2-biases": _of(
        "Lfm2", num_hidden_layers=5, intermediate_size=90, block_multiple_of=16,
        layer_types=["full_attention", "conv", "full_attention", "conv", "conv"],
        conv_bias=True, conv_L_cache=5, tie_word_embeddings=False,
    ),
    "qwen3_5_text": _of("Qwen3_5Text", _QWEN3_5),
    "qwen3_5_text-biases": _of(
        "Qwen3_5Text", _QWEN3_5, num_hidden_layers=3, linear_num_value_heads=2, linear_value_head_dim=12,
        layer_types=["full_attention", "linear_attention", "full_attention"], linear_conv_kernel_dim=2,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "qwen3_5_moe_text": _of("Qwen3_5MoeText", _QWEN3_5_MOE),
    # Mixed layers.
    "gemma4_text": _of("Gemma4Text", _GEMMA4),
    "gemma4_text-keys-as-values": _of(
        "Gemma4Text", _GEMMA4, num_hidden_layers=6, layer_types=None, num_kv_shared_layers=0,
        use_double_wide_mlp=False, hidden_size_per_layer_input=0, final_logit_softcapping=None,
        attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=False,
        rope_parameters={
            "sliding_attention": _SLOW_ROPE,
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma4_text-experts": _of(
        "Gemma4Text", _GEMMA4, num_hidden_layers=3, num_kv_shared_layers=0, use_double_wide_mlp=False,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=24,
    ),
}  # fmt: skip

# d_kv is not d_model / num_heads; buckets are so few that a source of a test goes past the distance of the
# last one.
_T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "max_position_embeddings": WINDOW, "decoder_start_token_id": 2,
}  # fmt: skip
_MARIAN = {**_BART, "pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1, "scale_embedding": True}
# Encoder-decoders, as `VARIANTS`.
ENCODER_DECODERS: dict[str, Variant] = {
    "t5": _of("T5", _T5),
    "t5-gated-untied": _of("T5", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _of("MT5", _T5, feed_forward_proj="gated-gelu"),
    "bart": _of("Bart", _BART, forced_bos_token_id=0),
    "bart-scaled": _of("Bart", _BART, scale_embedding=True, activation_function="relu"),
    "mbart": _of("MBart", _BART, scale_embedding=True),
    "marian": _of("Marian", _MARIAN, activation_function="swish"),
    # The capacity is less than the tokens of a source that visit the most popular expert.
    "switch_transformers": _of(
        "SwitchTransformers", _T5, num_layers=4, num_decoder_layers=4, num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2, num_experts=4, expert_capacity=3,
    ),
}  # fmt: skip

# Multimodal models whose text model is read.
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 14,
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
WRAPPERS: dict[str, Variant] = {
    "gemma3": _of(
        "Gemma3", {}, text_config={**_GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
        vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=90, boi_token_index=91,
        eoi_token_index=92,
    ),
    "mistral3": _of(
        "Mistral3", {}, text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**_SIGLIP, "model_type": "pixtral"}, image_token_index=90, tie_word_embeddings=False,
    ),
    "qwen3_vl": _of(
        "Qwen3VL", _QWEN_IDS, text_config={**_TEXT, "rope_parameters": _ROPE_OF_AXES},
        vision_config={**_QWEN_VISION, "deepstack_visual_indexes": [0]}, tie_word_embeddings=True,
    ),
    "smolvlm": _of(
        "SmolVLM", {}, text_config={**_TEXT, "model_type": "llama"}, vision_config=_SIGLIP,
        image_token_id=90, pad_token_id=0,
    ),
    **{
        name: _of(
            family, _QWEN_IDS, vision_config=_QWEN_VISION,
            text_config={**text, "num_hidden_layers": 4, "rope_parameters": _ROPE_OF_PARTS},
        )
        for name, family, text in (
            ("qwen3_5", "Qwen3_5", _QWEN3_5), ("qwen3_5_moe", "Qwen3_5Moe", _QWEN3_5_MOE),
        )
    },
    "gemma4": _of(
        "Gemma4", {},
        text_config={key: value for key, value in _GEMMA4.items() if key != "tie_word_embeddings"},
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
        },
        audio_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4], "output_proj_dims": 16,
        },
        image_token_id=90, audio_token_id=91, video_token_id=92,
    ),
}  # fmt: skip
