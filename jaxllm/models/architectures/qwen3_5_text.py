"""Qwen3.5 (dense, texts): the gated delta rule in three of four layers, and attention with an output gate."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import StateConfig
from jaxllm.models.architectures.llama import LLAMA_FFN_TENSORS, read_llama_shape, write_llama_shape
from jaxllm.models.config_reader import (
    ConfigReader,
    read_rope,
    read_state_layers,
    write_partial_rope,
    write_state_types,
)
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LINEAR = "linear_attention"
TOP_TENSORS = (
    Tensor("embed_tokens.weight", ("embed.tokens",)),
    Tensor("norm.weight", ("final_norm.scale",), plus_one=True),
    Tensor("lm_head.weight", ("head",), in_body=False),
)
# Of all layers, but for feed-forward blocks.
LAYER_TENSORS = (
    Tensor("input_layernorm.weight", ("attn_norm.scale",), plus_one=True),
    Tensor("input_layernorm.weight", ("state_norm.scale",), plus_one=True),
    Tensor("post_attention_layernorm.weight", ("ffn_norm.scale",), plus_one=True),
    Tensor("self_attn.q_proj.weight", ("attn.q", "attn.gate"), by_head=True),
    Tensor("self_attn.q_proj.bias", ("attn.q_bias", "attn.gate_bias"), by_head=True),
    Tensor("self_attn.k_proj.weight", ("attn.k",)),
    Tensor("self_attn.k_proj.bias", ("attn.k_bias",)),
    Tensor("self_attn.v_proj.weight", ("attn.v",)),
    Tensor("self_attn.v_proj.bias", ("attn.v_bias",)),
    Tensor("self_attn.o_proj.weight", ("attn.o",), transposed=True),
    Tensor("self_attn.o_proj.bias", ("attn.o_bias",)),
    Tensor("self_attn.q_norm.weight", ("attn.q_norm.scale",), plus_one=True),
    Tensor("self_attn.k_norm.weight", ("attn.k_norm.scale",), plus_one=True),
    Tensor("linear_attn.in_proj_qkv.weight", ("state.q", "state.k", "state.v")),
    Tensor("linear_attn.in_proj_z.weight", ("state.gate",)),
    Tensor("linear_attn.in_proj_b.weight", ("state.correction",)),
    Tensor("linear_attn.in_proj_a.weight", ("state.decay",)),
    Tensor("linear_attn.conv1d.weight", ("state.conv",), depthwise=True),
    Tensor("linear_attn.dt_bias", ("state.decay_bias",)),
    Tensor("linear_attn.A_log", ("state.decay_log",)),
    Tensor("linear_attn.norm.weight", ("state.norm.scale",)),
    Tensor("linear_attn.out_proj.weight", ("state.o",), transposed=True),
)
# Layers that predict further tokens are not read; states are computed in float32 anyway.
INERT_KEYS = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


def read_qwen3_5_fields(reader: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Shared fields of ModelConfig of the dense models and the mixtures; for `defaults` see
    `read_llama_shape`."""
    reader.only("attn_output_gate", (True,), "attention has an output gate")
    reader.only("hidden_act", ("silu", "swish"), "the delta rule reads its inputs through it, too")
    fields = read_llama_shape(reader, defaults)
    every = reader.integer("full_attention_interval", 4)
    if every < 1:
        raise ConfigError(f"config key 'full_attention_interval' must be at least 1, got {every}; fix it")
    usual = [(layer + 1) % every != 0 for layer in range(max(fields["layers"], 0))]
    biased = reader.flag("attention_bias", False)
    states = StateConfig(
        kind="delta_rule",
        taps=reader.integer("linear_conv_kernel_dim", 4),
        key_heads=reader.integer("linear_num_key_heads", 16),
        value_heads=reader.integer("linear_num_value_heads", 32),
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
    )
    marked = read_state_layers(reader, _LINEAR, usual)
    shape = {"head_dim": fields["head_dim"], "window_tokens": fields["window_tokens"]}
    return {
        **fields,
        "rope": read_rope(reader, **shape, partial=0.25),
        "qk_norm": True,
        "qkv_bias": biased,
        "o_bias": biased,
        "attention_gate": True,
        "states": states if marked else None,
        "state_layers": marked,
    }


def write_qwen3_5_fields(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of config.json of `read_qwen3_5_fields`."""
    states, sizes = cfg.states, dict[str, int]()
    if states is not None:
        sizes = {
            "linear_conv_kernel_dim": states.taps,
            "linear_num_key_heads": states.key_heads,
            "linear_num_value_heads": states.value_heads,
            "linear_key_head_dim": states.key_dim,
            "linear_value_head_dim": states.value_dim,
        }
    return {
        **write_llama_shape(cfg),
        **write_partial_rope(cfg.rope, cfg.head_dim),
        **sizes,
        "attention_bias": cfg.qkv_bias,
        "layer_types": write_state_types(cfg.state_layers, cfg.layers, _LINEAR),
    }


def _read(reader: ConfigReader) -> ModelConfig:
    return ModelConfig(model_type="qwen3_5_text", **read_qwen3_5_fields(reader, _DEFAULTS))


QWEN3_5_TEXT = Architecture(
    model_type="qwen3_5_text",
    read_config=_read,
    write_config=write_qwen3_5_fields,
    class_name="Qwen3_5ForCausalLM",
    top_tensors=TOP_TENSORS,
    layer_tensors=(*LAYER_TENSORS, *LLAMA_FFN_TENSORS),
    inert_keys=INERT_KEYS,
)
