"""EXAONE 4: norms of each block's output instead of its input, norms of every head's query and key; if some
layers have a sliding window, the full ones have no rotary embedding."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import LLAMA_TOP_TENSORS, read_llama_fields, write_llama_fields
from jaxllm.models.architectures.olmo2 import OLMO2_LAYER_TENSORS, POST_NORMS_ONLY
from jaxllm.models.config_reader import ConfigReader, read_windows, write_layer_types
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _read_slides(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Whether each layer slides by `sliding_window_pattern`: a number n (all but each n-th), or a repeated
    string of letters, L for sliding and G for full; the last layer is then full."""
    pattern = reader.integer_or_text("sliding_window_pattern", 4)
    if window is None or not pattern:
        return [False] * layers
    if isinstance(pattern, int):
        if pattern < 1:
            raise ConfigError(f"config key 'sliding_window_pattern' must be at least 1, got {pattern}")
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not set(pattern) <= {"L", "G"}:
        raise ConfigError(
            f"config key 'sliding_window_pattern' is {pattern!r:.80}; give a number, or letters L and G"
        )
    return [layer < layers - 1 and pattern[layer % len(pattern)] == "L" for layer in range(layers)]


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    layers = max(fields["layers"], 0)
    window = reader.optional_integer("sliding_window", 4096)
    windows = read_windows(reader, layers=layers, window=window, slides=_read_slides(reader, layers, window))
    return ModelConfig(
        model_type="exaone4",
        **fields,
        **POST_NORMS_ONLY,
        attention_windows=windows,
        rope_layers=() if window is None else tuple(each > 0 for each in windows),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    windows = cfg.attention_windows
    return {
        **write_llama_fields(cfg),
        # Any length means that full layers have no rotary embedding.
        "sliding_window": max(windows) or (cfg.window_tokens if cfg.rope_layers else None),
        "layer_types": write_layer_types(windows),
    }


EXAONE4 = Architecture(
    model_type="exaone4",
    read_config=_read,
    write_config=_write,
    class_name="Exaone4ForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=OLMO2_LAYER_TENSORS,
)
