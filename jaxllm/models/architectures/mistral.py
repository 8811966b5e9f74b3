"""Mistral: Llama with one sliding window for all layers (or none) and no biases."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    window = reader.optional_integer("sliding_window", 4096)
    return ModelConfig(model_type="mistral", **fields, attention_windows=(window or 0,) * fields["layers"])


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), "sliding_window": cfg.attention_windows[0] or None}


MISTRAL = Architecture(
    model_type="mistral",
    read_config=_read,
    write_config=_write,
    class_name="MistralForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=LLAMA.layer_tensors,
)
