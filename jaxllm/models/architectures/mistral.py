"""Mistral: Llama with one sliding window for all layers (or none) and no biases; Ministral 3, and Mixtral."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA_ATTENTION, LLAMA_LAYER, LLAMA_NORMS, LLAMA_TOP, llama_keys
from jaxllm.models.config_parts import (
    Fields,
    Part,
    experts,
    keys,
    one_window,
    read_rope,
    refuse_partial,
    rope,
    rope_parameters,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    parts=(
        llama_keys(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072),
        rope(),
        one_window(4096),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)

# The defaults of transformers for a config of Ministral 3 without scaling.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read_growing_rope(reader: ConfigReader, fields: Fields) -> Fields:
    found = read_rope(reader, fields, theta=1e6, usual=_ROPE, growth=True)
    refuse_partial(found, fields["head_dim"])
    return {"rope": found}


def _write_growing_rope(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.rope is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    further = {
        "llama_4_scaling_beta": cfg.rope.query_growth,
        "original_max_position_embeddings": cfg.rope.original_window_tokens or cfg.window_tokens,
    }
    return {"rope_parameters": rope_parameters(cfg.rope) | further}


# Mistral with YaRN, and queries that grow with the logarithm of the position.
MINISTRAL3 = Architecture(
    model_type="ministral3",
    class_name="Ministral3ForCausalLM",
    parts=(
        llama_keys(
            vocab_size=131072, intermediate_size=14336, num_hidden_layers=34, num_key_value_heads=8,
            head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5,
        ),
        Part(_read_growing_rope, _write_growing_rope),
        one_window(),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)  # fmt: skip

# Mistral with experts in every layer, their weights normalized over each token's choice.
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    parts=(
        llama_keys(
            intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
        ),
        rope(1e6),
        one_window(),
        experts("num_local_experts", 8),
        keys(num_experts_per_tok=(2, "experts_per_token")),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *LLAMA_ATTENTION,
        *tensors(
            {
                "block_sparse_moe.gate": "router",
                "block_sparse_moe.experts.{expert}.w1": "experts.gate",
                "block_sparse_moe.experts.{expert}.w3": "experts.up",
                "block_sparse_moe.experts.{expert}.w2": "experts.down",
            }
        ),
    ),
)
