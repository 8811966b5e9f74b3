"""Qwen2, Qwen2.5 and Qwen3, dense and with experts: Llama with biases of q, k and v, or with norms of every
head's query and key, and optional sliding windows."""

from typing import Any

from jaxllm.config import ModelConfig
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
    Part,
    experts,
    fixed,
    keys,
    one_window,
    only,
    read_windows,
    rope,
    write_windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

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


def _switched_window(reader: ConfigReader) -> tuple[int | None, int]:
    """The window, None unless it is switched on, and `max_window_layers`."""
    window, first = reader.optional_integer("sliding_window", 4096), reader.integer("max_window_layers", 28)
    return window if reader.flag("use_sliding_window", False) else None, first


def _read_upper_windows(reader: ConfigReader, fields: Fields) -> Fields:
    """Full up to `max_window_layers`, sliding from there on if switched on."""
    window, first = _switched_window(reader)
    slides = [window is not None and layer >= first for layer in range(fields["layers"])]
    return {"attention_windows": read_windows(reader, window, slides)}


def _write_upper_windows(cfg: ModelConfig) -> dict[str, Any]:
    first = next((layer for layer, window in enumerate(cfg.attention_windows) if window), cfg.layers)
    return {
        "use_sliding_window": any(cfg.attention_windows),
        "max_window_layers": first,
        **write_windows(cfg),
    }


_UPPER_WINDOWS = Part(_read_upper_windows, _write_upper_windows)
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

SEPARATE_EXPERTS = (
    Tensor("mlp.experts.{expert}.gate_proj.weight", ("experts.gate",)),
    Tensor("mlp.experts.{expert}.up_proj.weight", ("experts.up",)),
    Tensor("mlp.experts.{expert}.down_proj.weight", ("experts.down",), transposed=True),
)
QWEN_MOE_LAYER = (*LLAMA_LAYER, *QK_NORMS, Tensor("mlp.gate.weight", ("router",)), *SEPARATE_EXPERTS)
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


def _read_lower_windows(reader: ConfigReader, fields: Fields) -> Fields:
    """Every second of the lower layers slides if switched on, as transformers has it."""
    window, first = _switched_window(reader)
    layers = range(max(fields["layers"], 0))
    slides = [window is not None and layer % 2 == 0 and layer < first for layer in layers]
    return {"attention_windows": read_windows(reader, window, slides)}


def _write_lower_windows(cfg: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": any(cfg.attention_windows), **write_windows(cfg)}


SHARED_EXPERT = (
    Tensor("mlp.shared_expert_gate.weight", ("shared.score",)),
    Tensor("mlp.shared_expert.gate_proj.weight", ("shared.gate",)),
    Tensor("mlp.shared_expert.up_proj.weight", ("shared.up",)),
    Tensor("mlp.shared_expert.down_proj.weight", ("shared.down",), transposed=True),
)
# Qwen1.5-MoE as well: with a shared expert for all tokens, multiplied by a separate score.
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    parts=(
        llama_keys(**_MOE_DEFAULTS, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16),
        rope(),
        Part(_read_lower_windows, _write_lower_windows),
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
    layer_tensors=QWEN_MOE_LAYER + SHARED_EXPERT,
)
