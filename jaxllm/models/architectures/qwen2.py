"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window in the upper layers."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.config_reader import ConfigReader, read_windows, write_layer_types
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def read_qwen_windows(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """`attention_windows`: full up to `max_window_layers`, sliding from there on if switched on."""
    window = reader.optional_integer("sliding_window", 4096)
    first = reader.integer("max_window_layers", 28)
    if not reader.flag("use_sliding_window", False):
        window = None
    slides = [window is not None and layer >= first for layer in range(layers)]
    return read_windows(reader, layers=layers, window=window, slides=slides)


def write_qwen_windows(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_qwen_windows`."""
    windows = cfg.attention_windows
    first = next((layer for layer, window in enumerate(windows) if window), cfg.layers)
    return {
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "max_window_layers": first,
        "layer_types": write_layer_types(windows),
    }


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    windows = read_qwen_windows(reader, fields["layers"])
    return ModelConfig(model_type="qwen2", **fields, qkv_bias=True, attention_windows=windows)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), **write_qwen_windows(cfg)}


QWEN2 = Architecture(
    model_type="qwen2",
    read_config=_read,
    write_config=_write,
    class_name="Qwen2ForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=LLAMA.layer_tensors,
)
