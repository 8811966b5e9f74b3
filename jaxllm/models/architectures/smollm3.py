"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.config_reader import ConfigReader, read_windows, write_layer_types
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
}


def _read_rope_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """`rope_layers` from `no_rope_layers`, which has 1 for layers with a rotary embedding."""
    every = reader.integer("no_rope_layer_interval", 4)
    if every < 1:
        raise ConfigError(f"config key 'no_rope_layer_interval' must be at least 1, got {every}; fix it")
    usual = tuple(int((layer + 1) % every != 0) for layer in range(layers))
    flags = reader.integers("no_rope_layers") or usual
    if len(flags) != layers or not set(flags) <= {0, 1}:
        raise ConfigError(
            f"config key 'no_rope_layers' must be {layers} times 0 or 1, one per layer, got {flags!r:.80}"
        )
    return tuple(map(bool, flags))


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    layers = max(fields["layers"], 0)
    rope_layers = _read_rope_layers(reader, layers)
    window = reader.optional_integer("sliding_window")
    if not reader.flag("use_sliding_window", False):
        window = None
    slides = [window is not None and not turned for turned in rope_layers]
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="smollm3",
        **fields,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        ffn_bias=reader.flag("mlp_bias", False),
        rope_layers=rope_layers,
        attention_windows=read_windows(reader, layers=layers, window=window, slides=slides),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    windows = cfg.attention_windows
    return {
        **write_llama_fields(cfg),
        "attention_bias": cfg.qkv_bias,
        "mlp_bias": cfg.ffn_bias,
        "no_rope_layers": [int(flag) for flag in cfg.rope_layers or (True,) * cfg.layers],
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "layer_types": write_layer_types(windows),
    }


SMOLLM3 = Architecture(
    model_type="smollm3",
    read_config=_read,
    write_config=_write,
    class_name="SmolLM3ForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=LLAMA.layer_tensors,
    # Left over from Qwen2's configs; it has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)
