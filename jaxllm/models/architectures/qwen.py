"""Qwen2, Qwen2.5 and Qwen3, dense and with experts: Llama with biases of q, k and v, or with norms of every
head's query and key, and optional sliding windows. Qwen3.5 (texts): the gated delta rule in three of four
layers, and attention with an output gate."""

from collections.abc import Callable
from typing import Any

from jaxllm.models.architectures.gemma import GEMMA_TOP
from jaxllm.models.architectures.llama import (
    ATTENTION_BIAS,
    LLAMA_FFN,
    LLAMA_LAYER,
    LLAMA_TOP,
    QK_NORMS,
    llama_keys,
)
from jaxllm.models.config_parts import (
    SPARSE_LAYERS,
    Fields,
    Part,
    all_but_each,
    experts,
    fixed,
    keys,
    only,
    partial_rope,
    rope,
    state_layers,
    windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors

_DENSE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
}


def _windows(slides: Callable[[int, int], bool]) -> Part:
    """Windows of the layers for which `slides` is true, by their number and `max_window_layers`."""

    def usual(reader: ConfigReader, fields: Fields) -> list[bool]:
        first = reader.integer("max_window_layers", 28)
        return [slides(layer, first) for layer in range(fields["layers"])]

    return windows(4096, usual, switch=True)


_UPPER_WINDOWS = _windows(lambda layer, first: layer >= first)
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    parts=(llama_keys(**_DENSE_DEFAULTS), rope(), _UPPER_WINDOWS, fixed(qkv_bias=True)),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    parts=(
        llama_keys(**_DENSE_DEFAULTS, head_dim=128),
        rope(),
        _UPPER_WINDOWS,
        ATTENTION_BIAS,
        fixed(qk_norm=True),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER + QK_NORMS,
)

_PARTS = ("gate", "up", "down")
SEPARATE_EXPERTS = {f"mlp.experts.{{expert}}.{part}_proj": f"experts.{part}" for part in _PARTS}
QWEN_MOE_LAYER = (*LLAMA_LAYER, *QK_NORMS, *tensors({"mlp.gate": "router", **SEPARATE_EXPERTS}))
# Experts in all or some layers, and an optional sliding window for all layers.
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    parts=(
        # Qwen3-Coder's folders have these as well.
        only("use_qk_norm", (True,), "queries and keys are normalized"),
        only("qkv_bias", (False,), "biases of attention are said by attention_bias"),
        only("shared_expert_intermediate_size", (0, None), "no expert is shared"),
        llama_keys(**_MOE_DEFAULTS, intermediate_size=6144, num_key_value_heads=4),
        rope(),
        ATTENTION_BIAS,
        windows(4096, switch=True),
        fixed(qk_norm=True),
        experts("num_experts", 128),
        keys(
            num_experts_per_tok=(8, "experts_per_token"),
            moe_intermediate_size=(768, "expert_ffn_size"),
            norm_topk_prob=(False, "normalize_expert_weights"),
        ),
        SPARSE_LAYERS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=QWEN_MOE_LAYER,
    # A window is for all layers, so this key has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)


SHARED_EXPERT = {
    "mlp.shared_expert_gate": "shared.score",
    **{f"mlp.shared_expert.{part}_proj": f"shared.{part}" for part in _PARTS},
}
# Qwen1.5-MoE as well: with a shared expert for all tokens, multiplied by a separate score.
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    parts=(
        llama_keys(**_MOE_DEFAULTS, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16),
        rope(),
        # Every second of the lower layers, as transformers has it.
        _windows(lambda layer, first: layer % 2 == 0 and layer < first),
        experts("num_experts", 60),
        keys(
            qkv_bias=(True, "qkv_bias"),
            num_experts_per_tok=(4, "experts_per_token"),
            moe_intermediate_size=(1408, "expert_ffn_size"),
            shared_expert_intermediate_size=(5632, "shared_expert_size"),
            norm_topk_prob=(False, "normalize_expert_weights"),
        ),
        SPARSE_LAYERS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=QWEN_MOE_LAYER + tensors(SHARED_EXPERT),
)


_CHECKS = (
    only("attn_output_gate", (True,), "attention has an output gate"),
    only("hidden_act", ("silu", "swish"), "the delta rule reads its inputs through it, too"),
)
_SHARED_PARTS = (
    partial_rope(0.25),
    ATTENTION_BIAS,
    state_layers(
        "delta_rule",
        "linear_attention",
        lambda reader, fields: all_but_each(
            reader.integer("full_attention_interval", 4, least=1), fields["layers"]
        ),
        taps=("linear_conv_kernel_dim", 4),
        key_heads=("linear_num_key_heads", 16),
        value_heads=("linear_num_value_heads", 32),
        key_dim=("linear_key_head_dim", 128),
        value_dim=("linear_value_head_dim", 128),
    ),
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
    parts=(*_CHECKS, llama_keys(**_DEFAULTS, intermediate_size=12288, num_key_value_heads=4), *_SHARED_PARTS),
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
        *_SHARED_PARTS,
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
