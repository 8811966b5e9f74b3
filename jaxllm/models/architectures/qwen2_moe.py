"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in all or some layers, and a shared expert for all tokens,
multiplied by a separate score."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import read_llama_fields, write_llama_fields
from jaxllm.models.architectures.mixtral import read_experts
from jaxllm.models.architectures.qwen3_moe import QWEN3_MOE, read_sparse_layers
from jaxllm.models.config_reader import ConfigReader, read_windows, write_layer_types
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SHARED_EXPERT_TENSORS = (
    Tensor("mlp.shared_expert_gate.weight", ("shared.score",)),
    Tensor("mlp.shared_expert.gate_proj.weight", ("shared.gate",)),
    Tensor("mlp.shared_expert.up_proj.weight", ("shared.up",)),
    Tensor("mlp.shared_expert.down_proj.weight", ("shared.down",), transposed=True),
)


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    layers = max(fields["layers"], 0)
    window = reader.optional_integer("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    # Every second of the lower layers slides, as transformers has it.
    first = reader.integer("max_window_layers", 28)
    slides = [window is not None and layer % 2 == 0 and layer < first for layer in range(layers)]
    return ModelConfig(
        model_type="qwen2_moe",
        **fields,
        qkv_bias=reader.flag("qkv_bias", True),
        attention_windows=read_windows(reader, layers=layers, window=window, slides=slides),
        experts=read_experts(reader, 60),
        experts_per_token=reader.integer("num_experts_per_tok", 4),
        expert_ffn_size=reader.integer("moe_intermediate_size", 1408),
        shared_expert_size=reader.integer("shared_expert_intermediate_size", 5632),
        normalize_expert_weights=reader.flag("norm_topk_prob", False),
        sparse_layers=read_sparse_layers(reader, layers),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    windows = cfg.attention_windows
    return {
        **write_llama_fields(cfg),
        "qkv_bias": cfg.qkv_bias,
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "layer_types": write_layer_types(windows),
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_ffn_size,
        "shared_expert_intermediate_size": cfg.shared_expert_size,
        "norm_topk_prob": cfg.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(cfg.layers) if not cfg.is_sparse(layer)],
    }


QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    read_config=_read,
    write_config=_write,
    class_name="Qwen2MoeForCausalLM",
    top_tensors=QWEN3_MOE.top_tensors,
    layer_tensors=(
        *QWEN3_MOE.layer_tensors,
        *SHARED_EXPERT_TENSORS,
    ),
)
