"""Granite 3 and 4 (dense): Llama whose embeddings, residual branches, scores and logits are multiplied by
numbers of the config.

A residual branch times r equals a residual stream divided by r: norms cancel the factor if their epsilon is
divided by r², so that embeddings times e / r account for it exactly.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import (
    ATTENTION_BIAS,
    LLAMA_ATTENTION,
    LLAMA_LAYER,
    LLAMA_NORMS,
    LLAMA_TOP,
    MLP_BIAS,
    llama_keys,
)
from jaxllm.models.config_parts import FULL, Fields, Part, only, rope
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors


def _read_multipliers(reader: ConfigReader, fields: Fields) -> Fields:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, logits = (reader.number(key, 1.0, low=1e-6, high=1e6) for key in names)
    return {
        "norm_eps": fields["norm_eps"] / residual**2,
        "embed_scale": embedding / residual,
        "attention_scale": attention,
        "logit_scale": 1.0 / logits,
    }


def _write_multipliers(cfg: ModelConfig) -> dict[str, Any]:
    """The same model without a residual multiplier."""
    return {
        "embedding_multiplier": cfg.embed_scale,
        "residual_multiplier": 1.0,
        "attention_multiplier": cfg.attention_scale,
        "logits_scaling": 1.0 / cfg.logit_scale,
    }


_MULTIPLIERS = Part(_read_multipliers, _write_multipliers)
GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    parts=(llama_keys(), rope(), _MULTIPLIERS, ATTENTION_BIAS, MLP_BIAS),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)


def _read_hybrid(reader: ConfigReader, fields: Fields) -> Fields:
    layers = max(fields["layers"], 0)
    # The kind of an attention layer, as versions of transformers spell it.
    every = [[kind] * layers for kind in ("attention", FULL)]
    reader.only("layer_types", every, "Mamba layers are not implemented")
    reader.only("layers_block_type", [*every, None], "Mamba layers are not implemented")
    reader.require("layer_types", "without it all layers are Mamba layers, which are not implemented")
    reader.require("num_local_experts", "without it the model has experts, which are not implemented")
    rotary = reader.optional_text("position_embedding_type") == "rope"
    found: Fields = {"ffn_size": reader.integer("shared_intermediate_size", 1024)}
    return found if rotary else found | {"rope": None}


def _write_hybrid(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "shared_intermediate_size": cfg.ffn_size,
        "num_local_experts": 0,
        # transformers checks the sizes of Mamba layers even if there are none.
        "mamba_n_heads": 1,
        "layer_types": [FULL] * cfg.layers,
        "position_embedding_type": "nope" if cfg.rope is None else "rope",
    }


# `granite` in the words of its hybrid family; models with Mamba layers or experts are refused.
GRANITEMOEHYBRID = Architecture(
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    parts=(
        only("num_local_experts", (0,), "experts beside a shared block are not implemented"),
        only("position_embedding_type", (None, "rope", "nope"), "positions are rotary, or there are none"),
        llama_keys(),
        rope(),
        Part(_read_hybrid, _write_hybrid),
        _MULTIPLIERS,
        ATTENTION_BIAS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *LLAMA_ATTENTION,
        *tensors(
            {"shared_mlp.input_linear": "ffn.gate ffn.up", "shared_mlp.output_linear": "ffn.down"}
        ),
    ),
    # Of Mamba layers and experts, which the model does not have.
    inert_keys=frozenset(
        {
            "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
            "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "num_experts_per_tok",
            "time_step_limit", "init_method", "normalization_function",
        }
    ),
)  # fmt: skip
