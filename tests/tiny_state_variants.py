"""Configs of tiny transformers models with state layers, as `tiny_variants` has them of other models."""

from typing import Any

from tests.tiny_variants import VARIANTS, WRAPPERS

_LLAMA = VARIANTS["llama"][1]
_QWEN3_5 = {
    **_LLAMA,
    "tie_word_embeddings": False,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN3_5_MOE = {
    **{key: value for key, value in _QWEN3_5.items() if key != "intermediate_size"},
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
STATE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-biases": (
        "Lfm2",
        {
            **_LLAMA,
            "num_hidden_layers": 5,
            "intermediate_size": 90,
            "block_multiple_of": 16,
            "layer_types": ["full_attention", "conv", "full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", _QWEN3_5),
    "qwen3_5_text-biases": (
        "Qwen3_5Text",
        {
            **_QWEN3_5,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", _QWEN3_5_MOE),
}
STATE_ARCHITECTURES = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text")
_IMAGE_IDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_ROPE = {
    **WRAPPERS["qwen3_vl"][1]["text_config"]["rope_parameters"],
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}
_VISION = {
    key: value
    for key, value in WRAPPERS["qwen3_vl"][1]["vision_config"].items()
    if key != "deepstack_visual_indexes"
}
STATE_WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (
        family,
        {
            "text_config": {**text, "num_hidden_layers": 4, "rope_parameters": _ROPE},
            "vision_config": _VISION,
            **_IMAGE_IDS,
        },
    )
    for model_type, family, text in (
        ("qwen3_5", "Qwen3_5", _QWEN3_5),
        ("qwen3_5_moe", "Qwen3_5Moe", _QWEN3_5_MOE),
    )
}
