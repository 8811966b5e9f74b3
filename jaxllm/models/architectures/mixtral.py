"""Mixtral: Mistral with experts in every layer, their weights normalized over each token's choice."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_NORM_TENSORS,
    LLAMA_TOP_TENSORS,
    read_llama_fields,
    write_llama_fields,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

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
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}


def read_experts(reader: ConfigReader, default: int) -> int:
    """Number of experts of a layer: `num_local_experts`, or `num_experts` in some configs.

    Raises:
      ConfigError: the number is 0, or both keys exist and differ.
    """
    local, named = (reader.optional_integer(key) for key in ("num_local_experts", "num_experts"))
    if None not in (local, named) and local != named:
        raise ConfigError(
            f"config keys 'num_local_experts' ({local}) and 'num_experts' ({named}) are one number; keep one"
        )
    experts = next((each for each in (local, named) if each is not None), default)
    if experts < 1:
        raise ConfigError(
            f"the config has {experts} experts; a model without experts takes its dense family's model_type"
        )
    return experts


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, _DEFAULTS)
    window = reader.optional_integer("sliding_window", None)
    return ModelConfig(
        model_type="mixtral",
        **fields,
        attention_windows=(window or 0,) * fields["layers"],
        experts=read_experts(reader, 8),
        experts_per_token=reader.integer("num_experts_per_tok", 2),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_fields(cfg),
        "sliding_window": cfg.attention_windows[0] or None,
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
    }


MIXTRAL = Architecture(
    model_type="mixtral",
    read_config=_read,
    write_config=_write,
    class_name="MixtralForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=(
        *LLAMA_NORM_TENSORS,
        *LLAMA_ATTENTION_TENSORS,
        Tensor("block_sparse_moe.gate.weight", ("router",)),
        Tensor("block_sparse_moe.experts.{expert}.w1.weight", ("experts.gate",)),
        Tensor("block_sparse_moe.experts.{expert}.w3.weight", ("experts.up",)),
        Tensor("block_sparse_moe.experts.{expert}.w2.weight", ("experts.down",), transposed=True),
    ),
)
