"""Granite 3 and 4 (dense): Llama whose embeddings, residual branches, scores and logits are multiplied by
numbers of the config.

A residual branch times r equals a residual stream divided by r: norms cancel the factor if their epsilon is
divided by r², so that embeddings times e / r account for it exactly.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import LLAMA, read_llama_fields, write_llama_fields
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture

GRANITE_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def read_multipliers(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with Granite's multipliers.

    Raises:
      ConfigError: a multiplier is not positive.
    """
    multipliers = {
        key: reader.number(key, 1.0)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    }
    for key, value in multipliers.items():
        if not 1e-6 <= value <= 1e6:
            raise ConfigError(f"config key {key!r} must be in [1e-6, 1e6], got {value}; fix it")
    residual = multipliers["residual_multiplier"]
    attention_bias = reader.flag("attention_bias", False)
    return {
        **fields,
        "norm_eps": fields["norm_eps"] / residual**2,
        "embed_scale": multipliers["embedding_multiplier"] / residual,
        "attention_scale": multipliers["attention_multiplier"],
        "logit_scale": 1.0 / multipliers["logits_scaling"],
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
    }


def write_multipliers(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_multipliers`; the same model without a residual multiplier."""
    return {
        "embedding_multiplier": cfg.embed_scale,
        "residual_multiplier": 1.0,
        "attention_multiplier": cfg.attention_scale,
        "logits_scaling": 1.0 / cfg.logit_scale,
        "attention_bias": cfg.qkv_bias,
    }


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_multipliers(reader, read_llama_fields(reader, GRANITE_DEFAULTS))
    return ModelConfig(model_type="granite", **fields, ffn_bias=reader.flag("mlp_bias", False))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), **write_multipliers(cfg), "mlp_bias": cfg.ffn_bias}


GRANITE = Architecture(
    model_type="granite",
    read_config=_read,
    write_config=_write,
    class_name="GraniteForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=LLAMA.layer_tensors,
)
