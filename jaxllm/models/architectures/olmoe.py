"""OLMoE: experts in every layer, one RMS norm over the queries of all heads and one over all keys."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import read_llama_fields, write_llama_fields
from jaxllm.models.architectures.mixtral import read_experts
from jaxllm.models.architectures.qwen3_moe import QWEN3_MOE
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="olmoe",
        **fields,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        joint_qk_norm=True,
        qkv_clip=reader.optional_number("clip_qkv") or 0.0,
        experts=read_experts(reader, 64),
        experts_per_token=reader.integer("num_experts_per_tok", 8),
        normalize_expert_weights=reader.flag("norm_topk_prob", False),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_fields(cfg),
        "attention_bias": cfg.qkv_bias,
        "clip_qkv": cfg.qkv_clip or None,
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "norm_topk_prob": cfg.normalize_expert_weights,
    }


OLMOE = Architecture(
    model_type="olmoe",
    read_config=_read,
    write_config=_write,
    class_name="OlmoeForCausalLM",
    top_tensors=QWEN3_MOE.top_tensors,
    layer_tensors=QWEN3_MOE.layer_tensors,
)
