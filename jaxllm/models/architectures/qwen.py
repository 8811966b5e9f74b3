"""Qwen2, Qwen2.5 and Qwen3, dense and with experts: Llama with biases of q, k and v, or with norms of every
head's query and key, and optional sliding windows."""

from typing import Any

from jaxllm.models.architectures.llama import (
    ATTENTION_BIAS,
    LLAMA_LAYER,
    LLAMA_TOP,
    QK_NORMS,
    llama_keys,
)
from jaxllm.models.config_parts import (
    SPARSE_LAYERS,
    Fields,
    experts,
    fixed,
    keys,
    one_window,
    only,
    rope,
    windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

_DENSE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
}


def _upper_layers(reader: ConfigReader, fields: Fields) -> list[bool]:
    first = reader.integer("max_window_layers", 28)
    return [layer >= first for layer in range(fields["layers"])]


_UPPER_WINDOWS = windows(4096, _upper_layers, switch=True)
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    parts=(llama_keys(**_DENSE_DEFAULTS), rope(), _UPPER_WINDOWS, fixed(qkv_bias=True)),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    parts=(
        llama_keys(**_DENSE_DEFAULTS, head_dim=128),
        rope(),
        _UPPER_WINDOWS,
        ATTENTION_BIAS,
        fixed(qk_norm=True),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER + QK_NORMS,
)

_PARTS = ("gate", "up", "down")
SEPARATE_EXPERTS = {f"mlp.experts.{{expert}}.{part}_proj": f"experts.{part}" for part in _PARTS}
QWEN_MOE_LAYER = (*LLAMA_LAYER, *QK_NORMS, *tensors({"mlp.gate": "router", **SEPARATE_EXPERTS}))
# Experts in all or some layers, and an optional sliding window for all layers.
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    parts=(
        # Qwen3-Coder's folders have these as well.
        only("use_qk_norm", (True,), "queries and keys are normalized"),
        only("qkv_bias", (False,), "biases of attention are said by attention_bias"),
        only("shared_expert_intermediate_size", (0, None), "no expert is shared"),
        llama_keys(**_MOE_DEFAULTS, intermediate_size=6144, num_key_value_heads=4),
        rope(),
        ATTENTION_BIAS,
        one_window(4096, switch=True),
        fixed(qk_norm=True),
        experts("num_experts", 128),
        keys(
            num_experts_per_tok=(8, "experts_per_token"),
            moe_intermediate_size=(768, "expert_ffn_size"),
            norm_topk_prob=(False, "normalize_expert_weights"),
        ),
        SPARSE_LAYERS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=QWEN_MOE_LAYER,
    # A window is for all layers, so this key has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)


def _some_lower_layers(reader: ConfigReader, fields: Fields) -> list[bool]:
    """Every second of the lower layers, as transformers has it."""
    first = reader.integer("max_window_layers", 28)
    return [layer % 2 == 0 and layer < first for layer in range(fields["layers"])]


SHARED_EXPERT = {
    "mlp.shared_expert_gate": "shared.score",
    **{f"mlp.shared_expert.{part}_proj": f"shared.{part}" for part in _PARTS},
}
# Qwen1.5-MoE as well: with a shared expert for all tokens, multiplied by a separate score.
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    parts=(
        llama_keys(**_MOE_DEFAULTS, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16),
        rope(),
        windows(4096, _some_lower_layers, switch=True),
        experts("num_experts", 60),
        keys(
            qkv_bias=(True, "qkv_bias"),
            num_experts_per_tok=(4, "experts_per_token"),
            moe_intermediate_size=(1408, "expert_ffn_size"),
            shared_expert_intermediate_size=(5632, "shared_expert_size"),
            norm_topk_prob=(False, "normalize_expert_weights"),
        ),
        SPARSE_LAYERS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=QWEN_MOE_LAYER + tensors(SHARED_EXPERT),
)
