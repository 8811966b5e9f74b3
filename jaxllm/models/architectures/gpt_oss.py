"""gpt-oss: experts with biases and a clamped gate, a sink logit per head, a sliding window in every other
layer."""

from jaxllm.models.architectures.llama import LLAMA_ATTENTION, LLAMA_NORMS, LLAMA_TOP, llama_keys
from jaxllm.models.config_parts import every_other, experts, fixed, keys, only, rope, windows
from jaxllm.models.translate import Architecture, Tensor, tensors
from jaxllm.nn.layers import CLAMP, CLAMPED_SLOPE

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


_BOTH = ("experts.gate", "experts.up")
_BIASES = ("expert_gate_bias", "expert_up_bias")
GPT_OSS = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    parts=(
        only("hidden_act", ("silu",), "it names the clamped gate of the experts"),
        only("swiglu_alpha", (CLAMPED_SLOPE,), "experts have this slope alone"),
        only("swiglu_limit", (CLAMP,), "experts are clamped there alone"),
        llama_keys(
            vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
            num_attention_heads=64, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
        rope(150000.0, usual=_ROPE),
        experts("num_local_experts", 128),
        keys(
            attention_bias=(True, "qkv_bias", "o_bias"),
            num_experts_per_tok=(4, "experts_per_token"),
        ),
        fixed(activation="clamped_swiglu", sink_logits=True, expert_bias=True),
        windows(128, every_other),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *LLAMA_ATTENTION,
        Tensor("self_attn.sinks", ("attn.sink_logits",)),
        *tensors({"mlp.router": "router"}),
        Tensor("mlp.experts.gate_up_proj", _BOTH, stacked=True, alternating=True, transposed=True),
        Tensor("mlp.experts.gate_up_proj_bias", _BIASES, stacked=True, alternating=True),
        Tensor("mlp.experts.down_proj", ("experts.down",), stacked=True),
        Tensor("mlp.experts.down_proj_bias", ("expert_down_bias",), stacked=True),
    ),
    # Written by the first version of the config, and read by none.
    inert_keys=frozenset({"initial_context_length", "experts_per_token"}),
)  # fmt: skip
