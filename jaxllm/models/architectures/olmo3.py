"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and a rotary embedding for each kind of
layer."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA_TOP_TENSORS, read_llama_shape, write_llama_shape
from jaxllm.models.architectures.olmo2 import OLMO2_DEFAULTS, OLMO2_LAYER_TENSORS, POST_NORMS_ONLY
from jaxllm.models.config_reader import (
    FULL,
    SLIDING,
    ConfigReader,
    read_ropes_by_layer,
    read_windows,
    write_layer_types,
    write_rope,
)
from jaxllm.models.translate import Architecture


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_shape(reader, OLMO2_DEFAULTS)
    base = reader.number("rope_theta", 5e5)
    rope, local_rope = read_ropes_by_layer(reader, fields, {FULL: base, SLIDING: base})
    attention_bias = reader.flag("attention_bias", False)
    layers = max(fields["layers"], 0)
    return ModelConfig(
        model_type="olmo3",
        **fields,
        **POST_NORMS_ONLY,
        joint_qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        rope=rope,
        local_rope=local_rope,
        attention_windows=read_windows(
            reader,
            layers=layers,
            window=reader.optional_integer("sliding_window", 4096),
            slides=[(layer + 1) % 4 != 0 for layer in range(layers)],
        ),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    ropes = {FULL: cfg.rope, SLIDING: cfg.local_rope}
    sections = {kind: write_rope(rope) for kind, rope in ropes.items() if rope is not None}
    return {
        **write_llama_shape(cfg),
        "attention_bias": cfg.qkv_bias,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                **each.get("rope_scaling", {}),
                "rope_theta": each["rope_theta"],
            }
            for kind, each in sections.items()
        },
        "sliding_window": max(cfg.attention_windows) or None,
        "layer_types": write_layer_types(cfg.attention_windows),
    }


OLMO3 = Architecture(
    model_type="olmo3",
    read_config=_read,
    write_config=_write,
    class_name="Olmo3ForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=OLMO2_LAYER_TENSORS,
)
