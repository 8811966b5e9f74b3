"""ERNIE 4.5 (dense): Llama with a rotary embedding of neighbouring dimensions (2i, 2i+1) of each head."""

import dataclasses
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
_TURNED = ("attn.q", "attn.q_bias", "attn.k", "attn.k_bias")


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    biases = reader.flag("use_bias", False)
    return ModelConfig(model_type="ernie4_5", **fields, qkv_bias=biases, o_bias=biases, ffn_bias=biases)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), "use_bias": cfg.qkv_bias}


ERNIE4_5 = Architecture(
    model_type="ernie4_5",
    read_config=_read,
    write_config=_write,
    class_name="Ernie4_5ForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=tuple(
        dataclasses.replace(tensor, interleaved=tensor.params[0] in _TURNED) for tensor in LLAMA.layer_tensors
    ),
)
