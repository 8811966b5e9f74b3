"""Qwen3 (dense): Qwen2's windows, RMS norms on every head's query and key, optional biases."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.architectures.qwen2 import read_qwen_windows, write_qwen_windows
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="qwen3",
        **fields,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        attention_windows=read_qwen_windows(reader, fields["layers"]),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_fields(cfg),
        **write_qwen_windows(cfg),
        "attention_bias": cfg.qkv_bias,
    }


QWEN3 = Architecture(
    model_type="qwen3",
    read_config=_read,
    write_config=_write,
    class_name="Qwen3ForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=(
        *LLAMA.layer_tensors,
        Tensor("self_attn.q_norm.weight", ("attn.q_norm.scale",)),
        Tensor("self_attn.k_norm.weight", ("attn.k_norm.scale",)),
    ),
)
