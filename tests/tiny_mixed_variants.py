"""Configs of tiny transformers models with mixed layers, as `tiny_variants` has them of other models."""

from typing import Any

from tests.tiny_variants import FIRST_IMAGE_ID, VARIANTS, VOCAB

_GEMMA4 = {
    **VARIANTS["llama"][1],
    "num_hidden_layers": 7,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    # The last three attend to the keys and values of the second and of the fourth.
    "layer_types": ["sliding_attention", "full_attention"] * 2
    + ["full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
MIXED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text": ("Gemma4Text", _GEMMA4),
    "gemma4_text-keys-as-values": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_text-experts": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}
MIXED_ARCHITECTURES = ("gemma4_text",)
MIXED_WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "Gemma4",
        {
            "text_config": {key: value for key, value in _GEMMA4.items() if key != "tie_word_embeddings"},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 16,
            },
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 4],
                "output_proj_dims": 16,
            },
            "image_token_id": FIRST_IMAGE_ID,
            "audio_token_id": FIRST_IMAGE_ID + 1,
            "video_token_id": FIRST_IMAGE_ID + 2,
        },
    ),
}
