"""gpt-oss: experts with biases and a clamped gate, a sink logit per head, a sliding window in every other
layer."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_NORM_TENSORS,
    LLAMA_TOP_TENSORS,
    read_llama_shape,
    write_llama_shape,
)
from jaxllm.models.architectures.mixtral import read_experts
from jaxllm.models.config_reader import (
    ConfigReader,
    read_rope_section,
    read_windows,
    refuse_partial,
    sole_rope_section,
    write_layer_types,
    write_rope,
)
from jaxllm.models.translate import Architecture, Tensor
from jaxllm.nn.layers import CLAMP, CLAMPED_SLOPE

_DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("hidden_act", ("silu",), "it names the clamped gate of the experts")
    reader.only("swiglu_alpha", (CLAMPED_SLOPE,), "experts have this slope alone")
    reader.only("swiglu_limit", (CLAMP,), "experts are clamped there alone")
    # Written by the first version of the config, and read by none.
    reader.accept("initial_context_length")
    reader.accept("experts_per_token")
    fields: dict[str, Any] = {**read_llama_shape(reader, _DEFAULTS), "activation": "clamped_swiglu"}
    section = sole_rope_section(reader)
    theta = reader.number("rope_theta", 150000.0)
    rope = read_rope_section(
        section if section.keys() else ConfigReader(_ROPE),
        theta=theta,
        head_dim=fields["head_dim"],
        window_tokens=fields["window_tokens"],
    )
    refuse_partial(rope, fields["head_dim"])
    layers, attention_bias = fields["layers"], reader.flag("attention_bias", True)
    return ModelConfig(
        model_type="gpt_oss",
        **fields,
        rope=rope,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sink_logits=True,
        attention_windows=read_windows(
            reader,
            layers=layers,
            window=reader.optional_integer("sliding_window", 128),
            slides=[layer % 2 == 0 for layer in range(layers)],
        ),
        experts=read_experts(reader, 128),
        experts_per_token=reader.integer("num_experts_per_tok", 4),
        expert_bias=True,
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.rope is not None
    return {
        **write_llama_shape(cfg),
        # Without one the class scales.
        "rope_scaling": {"rope_type": "default"},
        **write_rope(cfg.rope),
        "attention_bias": cfg.qkv_bias,
        "sliding_window": max(cfg.attention_windows) or None,
        "layer_types": write_layer_types(cfg.attention_windows),
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
    }


_BOTH = ("experts.gate", "experts.up")
_BIASES = ("expert_gate_bias", "expert_up_bias")
GPT_OSS = Architecture(
    model_type="gpt_oss",
    read_config=_read,
    write_config=_write,
    class_name="GptOssForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=(
        *LLAMA_NORM_TENSORS,
        *LLAMA_ATTENTION_TENSORS,
        Tensor("self_attn.sinks", ("attn.sink_logits",)),
        Tensor("mlp.router.weight", ("router",)),
        Tensor("mlp.router.bias", ("router_bias",)),
        Tensor("mlp.experts.gate_up_proj", _BOTH, stacked=True, alternating=True, transposed=True),
        Tensor("mlp.experts.gate_up_proj_bias", _BIASES, stacked=True, alternating=True),
        Tensor("mlp.experts.down_proj", ("experts.down",), stacked=True),
        Tensor("mlp.experts.down_proj_bias", ("expert_down_bias",), stacked=True),
    ),
)
