"""Qwen3.5 (texts), dense and with experts: the gated delta rule in three of four layers, and attention with
an output gate."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.layer_configs import StateConfig
from jaxllm.models.architectures.gemma import GEMMA_TOP
from jaxllm.models.architectures.llama import ATTENTION_BIAS, LLAMA_FFN, llama_keys
from jaxllm.models.architectures.qwen import SEPARATE_EXPERTS, SHARED_EXPERT
from jaxllm.models.config_parts import (
    FULL,
    Fields,
    Part,
    all_but_each,
    experts,
    fixed,
    keys,
    only,
    partial_rope,
    read_state_layers,
    write_state_layers,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors

_LINEAR = "linear_attention"
_STATE_KEYS = {
    "linear_conv_kernel_dim": ("taps", 4),
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
}


def _read_states(reader: ConfigReader, fields: Fields) -> Fields:
    linear = all_but_each(reader.integer("full_attention_interval", 4, least=1), fields["layers"])
    types = [_LINEAR if each else FULL for each in linear]
    sizes: Fields = {field: reader.integer(key, size) for key, (field, size) in _STATE_KEYS.items()}
    states = StateConfig(kind="delta_rule", **sizes)
    return read_state_layers(reader, _LINEAR, types, states)


def _write_states(cfg: ModelConfig) -> dict[str, Any]:
    states = cfg.states
    sizes = {} if states is None else {key: getattr(states, of) for key, (of, _) in _STATE_KEYS.items()}
    return {**sizes, **write_state_layers(cfg, _LINEAR)}


_CHECKS = (
    only("attn_output_gate", (True,), "attention has an output gate"),
    only("hidden_act", ("silu", "swish"), "the delta rule reads its inputs through it, too"),
)
_PARTS = (
    partial_rope(0.25),
    ATTENTION_BIAS,
    Part(_read_states, _write_states),
    fixed(qk_norm=True, attention_gate=True),
)
# Of all layers, but for feed-forward blocks.
_LAYER = (
    *tensors({"input_layernorm": "attn_norm"}, plus_one=True),
    *tensors(
        {
            "input_layernorm": "state_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
        },
        plus_one=True,
    ),
    *tensors({"self_attn.q_proj": "attn.q attn.gate"}, by_head=True),
    *tensors(
        {
            **{f"self_attn.{part}_proj": f"attn.{part}" for part in "kvo"},
            "linear_attn.in_proj_qkv": "state.q state.k state.v",
            "linear_attn.in_proj_z": "state.gate",
            "linear_attn.in_proj_b": "state.correction",
            "linear_attn.norm": "state.norm",
            "linear_attn.out_proj": "state.o",
        }
    ),
    # Not by `tensors`: a bias of it would have the name of the decay's.
    Tensor("linear_attn.in_proj_a.weight", ("state.decay",)),
    Tensor("linear_attn.conv1d.weight", ("state.conv",), depthwise=True),
    Tensor("linear_attn.dt_bias", ("state.decay_bias",)),
    Tensor("linear_attn.A_log", ("state.decay_log",)),
)
# Layers that predict further tokens are not read; states are computed in float32 anyway.
_INERT_KEYS = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}

QWEN3_5_TEXT = Architecture(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    parts=(*_CHECKS, llama_keys(**_DEFAULTS, intermediate_size=12288, num_key_value_heads=4), *_PARTS),
    top_tensors=GEMMA_TOP,
    layer_tensors=_LAYER + LLAMA_FFN,
    inert_keys=_INERT_KEYS,
)
# Experts in all layers, and a shared expert for all tokens.
QWEN3_5_MOE_TEXT = Architecture(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    parts=(
        only("norm_topk_prob", (True,), "the weights of chosen experts are divided by their sum"),
        only("decoder_sparse_step", (1,), "all layers have experts"),
        only("mlp_only_layers", (None, []), "all layers have experts"),
        *_CHECKS,
        llama_keys(**_DEFAULTS, hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2),
        experts("num_experts", 256),
        keys(
            num_experts_per_tok=(8, "experts_per_token"),
            moe_intermediate_size=(512, "expert_ffn_size"),
            shared_expert_intermediate_size=(512, "shared_expert_size"),
        ),
        # No layer has that block.
        Part(
            lambda reader, fields: {
                "ffn_size": reader.integer("intermediate_size", fields["expert_ffn_size"])
            }
        ),
        *_PARTS,
    ),
    top_tensors=GEMMA_TOP,
    layer_tensors=(
        *_LAYER,
        *tensors({"mlp.gate": "router", **SHARED_EXPERT}),
        # As its authors write them, and as transformers does.
        Tensor("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True),
        Tensor("mlp.experts.down_proj", ("experts.down",), stacked=True, transposed=True),
        *tensors(SEPARATE_EXPERTS),
    ),
    inert_keys=_INERT_KEYS,
)
