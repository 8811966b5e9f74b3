"""Qwen3-MoE: Qwen3 with experts in all or some layers, and an optional sliding window for all layers."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import read_llama_fields, write_llama_fields
from jaxllm.models.architectures.mixtral import read_experts
from jaxllm.models.architectures.qwen3 import QWEN3
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

EXPERT_TENSORS = (
    Tensor("mlp.experts.{expert}.gate_proj.weight", ("experts.gate",)),
    Tensor("mlp.experts.{expert}.up_proj.weight", ("experts.up",)),
    Tensor("mlp.experts.{expert}.down_proj.weight", ("experts.down",), transposed=True),
)


def read_sparse_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """`sparse_layers`: every `decoder_sparse_step`-th layer, without those of `mlp_only_layers`."""
    step = reader.integer("decoder_sparse_step", 1)
    if step < 1:
        raise ConfigError(f"config key 'decoder_sparse_step' must be at least 1, got {step}; fix it")
    dense = set(reader.integers("mlp_only_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _read(reader: ConfigReader) -> ModelConfig:
    # Qwen3-Coder's folders have these as well.
    reader.only("use_qk_norm", (True,), "queries and keys are normalized")
    reader.only("qkv_bias", (False,), "biases of attention are said by attention_bias")
    reader.only("shared_expert_intermediate_size", (0, None), "no expert is shared")
    fields = read_llama_fields(reader, _DEFAULTS)
    attention_bias = reader.flag("attention_bias", False)
    window = reader.optional_integer("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    return ModelConfig(
        model_type="qwen3_moe",
        **fields,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        attention_windows=(window or 0,) * fields["layers"],
        experts=read_experts(reader, 128),
        experts_per_token=reader.integer("num_experts_per_tok", 8),
        expert_ffn_size=reader.integer("moe_intermediate_size", 768),
        normalize_expert_weights=reader.flag("norm_topk_prob", False),
        sparse_layers=read_sparse_layers(reader, fields["layers"]),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    window = cfg.attention_windows[0]
    return {
        **write_llama_fields(cfg),
        "attention_bias": cfg.qkv_bias,
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_ffn_size,
        "norm_topk_prob": cfg.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(cfg.layers) if not cfg.is_sparse(layer)],
    }


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    read_config=_read,
    write_config=_write,
    class_name="Qwen3MoeForCausalLM",
    top_tensors=QWEN3.top_tensors,
    layer_tensors=(
        *QWEN3.layer_tensors,
        Tensor("mlp.gate.weight", ("router",)),
        *EXPERT_TENSORS,
    ),
    # A window is for all layers, so this key has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)
