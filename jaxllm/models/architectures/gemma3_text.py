"""Gemma 3, text only: Gemma 2 with norms on every head's query and key instead of capped scores, five
sliding layers to one full one, and a rotary embedding for each kind of layer.
"""

from typing import Any

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.gemma2 import (
    GEMMA_INERT_KEYS,
    GEMMA_LAYER_TENSORS,
    GEMMA_TOP_TENSORS,
    read_gemma_fields,
    write_gemma_fields,
)
from jaxllm.models.config_reader import (
    FULL,
    SLIDING,
    ConfigReader,
    read_ropes_by_layer,
    read_windows,
    write_rope,
)
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _read_ropes(reader: ConfigReader, fields: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full and of sliding layers."""
    bases = {
        FULL: reader.number("rope_theta", 1e6),
        SLIDING: reader.number("rope_local_base_freq", 1e4),
    }
    return read_ropes_by_layer(reader, fields, bases)


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only(
        "attn_logit_softcapping", (None,), "transformers ignores it for Gemma 3, so its meaning is open"
    )
    fields = read_gemma_fields(reader, _DEFAULTS)
    rope, local_rope = _read_ropes(reader, fields)
    layers = fields["layers"]
    # The key has an underscore if transformers 5 wrote it.
    pattern = reader.integer("_sliding_window_pattern", 6)
    pattern = reader.integer("sliding_window_pattern", pattern)
    if pattern < 1:
        raise ConfigError(f"config key 'sliding_window_pattern' must be at least 1, got {pattern}")
    return ModelConfig(
        model_type="gemma3_text",
        **fields,
        rope=rope,
        local_rope=local_rope,
        qk_norm=True,
        logit_softcap=reader.optional_number("final_logit_softcapping", None) or 0.0,
        attention_windows=read_windows(
            reader,
            layers=layers,
            window=reader.optional_integer("sliding_window", 4096),
            slides=[(layer + 1) % pattern != 0 for layer in range(layers)],
        ),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    written = write_gemma_fields(cfg)
    if cfg.rope is not None:
        written |= write_rope(cfg.rope)
    if cfg.local_rope is not None:
        written["rope_local_base_freq"] = cfg.local_rope.theta
    return written


GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    read_config=_read,
    write_config=_write,
    class_name="Gemma3ForCausalLM",
    top_tensors=GEMMA_TOP_TENSORS,
    layer_tensors=GEMMA_LAYER_TENSORS,
    inert_keys=GEMMA_INERT_KEYS,
)
