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
}
STATE_ARCHITECTURES = ("lfm2", "qwen3_5_text")
STATE_WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": {
                **_QWEN3_5,
                "num_hidden_layers": 4,
                "rope_parameters": {
                    **WRAPPERS["qwen3_vl"][1]["text_config"]["rope_parameters"],
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                },
            },
            "vision_config": {
                key: value
                for key, value in WRAPPERS["qwen3_vl"][1]["vision_config"].items()
                if key != "deepstack_visual_indexes"
            },
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
        },
    ),
}
