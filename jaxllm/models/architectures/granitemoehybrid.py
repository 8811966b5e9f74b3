"""Granite 4 without Mamba layers and experts: `granite` in the words of its hybrid family.

Models with Mamba layers or experts are refused.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.granite import GRANITE_DEFAULTS, read_multipliers, write_multipliers
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_NORM_TENSORS,
    LLAMA_TOP_TENSORS,
    read_llama_shape,
    write_llama_shape,
)
from jaxllm.models.config_reader import ConfigReader, read_rope, refuse_partial, write_rope
from jaxllm.models.translate import Architecture, Tensor

# The kind of an attention layer, as versions of transformers spell it.
_ATTENTION = ("attention", "full_attention")


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_shape(reader, GRANITE_DEFAULTS)
    layers = max(fields["layers"], 0)
    for key in ("layer_types", "layers_block_type"):
        every = [[kind] * layers for kind in _ATTENTION]
        if key == "layers_block_type":
            every.append(None)
        reader.only(key, every, "Mamba layers are not implemented")
    reader.require("layer_types", "without it all layers are Mamba layers, which are not implemented")
    reader.only("num_local_experts", (0,), "experts beside a shared block are not implemented")
    reader.require("num_local_experts", "without it the model has experts, which are not implemented")
    reader.only("position_embedding_type", (None, "rope", "nope"), "positions are rotary, or there are none")
    fields["ffn_size"] = reader.integer("shared_intermediate_size", 1024)
    rope = read_rope(reader, head_dim=fields["head_dim"], window_tokens=fields["window_tokens"])
    refuse_partial(rope, fields["head_dim"])
    rotary = reader.optional_text("position_embedding_type") == "rope"
    return ModelConfig(
        model_type="granitemoehybrid", **read_multipliers(reader, fields), rope=rope if rotary else None
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_shape(cfg),
        **write_multipliers(cfg),
        "shared_intermediate_size": cfg.ffn_size,
        "num_local_experts": 0,
        # transformers checks the sizes of Mamba layers even if there are none.
        "mamba_n_heads": 1,
        "layer_types": ["full_attention"] * cfg.layers,
        "position_embedding_type": "nope" if cfg.rope is None else "rope",
        **({} if cfg.rope is None else write_rope(cfg.rope)),
    }


GRANITEMOEHYBRID = Architecture(
    model_type="granitemoehybrid",
    read_config=_read,
    write_config=_write,
    class_name="GraniteMoeHybridForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=(
        *LLAMA_NORM_TENSORS,
        *LLAMA_ATTENTION_TENSORS,
        Tensor("shared_mlp.input_linear.weight", ("ffn.gate", "ffn.up")),
        Tensor("shared_mlp.output_linear.weight", ("ffn.down",), transposed=True),
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
