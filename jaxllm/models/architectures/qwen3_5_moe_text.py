"""Qwen3.5-MoE (texts): Qwen3.5 with experts in all layers, and a shared expert for all tokens."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.mixtral import read_experts
from jaxllm.models.architectures.qwen2_moe import SHARED_EXPERT_TENSORS
from jaxllm.models.architectures.qwen3_5_text import (
    INERT_KEYS,
    LAYER_TENSORS,
    TOP_TENSORS,
    read_qwen3_5_fields,
    write_qwen3_5_fields,
)
from jaxllm.models.architectures.qwen3_moe import EXPERT_TENSORS
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("norm_topk_prob", (True,), "the weights of chosen experts are divided by their sum")
    reader.only("decoder_sparse_step", (1,), "all layers have experts")
    reader.only("mlp_only_layers", (None, []), "all layers have experts")
    neurons = reader.integer("moe_intermediate_size", 512)
    return ModelConfig(
        model_type="qwen3_5_moe_text",
        # No layer has that block.
        **read_qwen3_5_fields(reader, {**_DEFAULTS, "intermediate_size": neurons}),
        experts=read_experts(reader, 256),
        experts_per_token=reader.integer("num_experts_per_tok", 8),
        expert_ffn_size=neurons,
        shared_expert_size=reader.integer("shared_expert_intermediate_size", 512),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_qwen3_5_fields(cfg),
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_ffn_size,
        "shared_expert_intermediate_size": cfg.shared_expert_size,
    }


QWEN3_5_MOE_TEXT = Architecture(
    model_type="qwen3_5_moe_text",
    read_config=_read,
    write_config=_write,
    class_name="Qwen3_5MoeForCausalLM",
    top_tensors=TOP_TENSORS,
    layer_tensors=(
        *LAYER_TENSORS,
        Tensor("mlp.gate.weight", ("router",)),
        # As its authors write them, and as transformers does.
        Tensor("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True),
        Tensor("mlp.experts.down_proj", ("experts.down",), stacked=True, transposed=True),
        *EXPERT_TENSORS,
        *SHARED_EXPERT_TENSORS,
    ),
    inert_keys=INERT_KEYS,
)
