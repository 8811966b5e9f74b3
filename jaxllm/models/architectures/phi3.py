"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k, v in one tensor, gate and up in another, and optionally a
partial rotary embedding. The long-context variants (longrope) are refused.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import (
    LLAMA_NORM_TENSORS,
    LLAMA_TOP_TENSORS,
    read_llama_shape,
    write_llama_shape,
)
from jaxllm.models.config_reader import ConfigReader, read_rope, write_partial_rope
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_shape(reader, _DEFAULTS)
    rope = read_rope(reader, head_dim=fields["head_dim"], window_tokens=fields["window_tokens"])
    if rope.kind != "default":
        raise ConfigError(
            f"rope scaling {rope.kind!r} is not supported for phi3, where transformers takes it for "
            "longrope or refuses it; use a checkpoint without rope scaling"
        )
    window = reader.optional_integer("sliding_window")
    return ModelConfig(
        model_type="phi3", **fields, rope=rope, attention_windows=(window or 0,) * fields["layers"]
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_shape(cfg),
        "sliding_window": cfg.attention_windows[0] or None,
        **write_partial_rope(cfg.rope, cfg.head_dim),
    }


PHI3 = Architecture(
    model_type="phi3",
    read_config=_read,
    write_config=_write,
    class_name="Phi3ForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=(
        *LLAMA_NORM_TENSORS,
        Tensor("self_attn.qkv_proj.weight", ("attn.q", "attn.k", "attn.v")),
        Tensor("self_attn.o_proj.weight", ("attn.o",), transposed=True),
        Tensor("mlp.gate_up_proj.weight", ("ffn.gate", "ffn.up")),
        Tensor("mlp.down_proj.weight", ("ffn.down",), transposed=True),
    ),
)
