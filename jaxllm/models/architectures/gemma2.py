"""Gemma 2: norms before and after each block that multiply by 1 + w, scaled embeddings, soft-capped scores
and logits, a sliding window in every other layer. The parts shared with Gemma 3 are here too.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_FFN_TENSORS,
    read_llama_shape,
    write_llama_shape,
)
from jaxllm.models.config_reader import (
    ConfigReader,
    read_rope,
    read_windows,
    refuse_partial,
    write_layer_types,
    write_rope,
)
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

GEMMA_TOP_TENSORS = (
    Tensor("embed_tokens.weight", ("embed.tokens",)),
    Tensor("norm.weight", ("final_norm.scale",), plus_one=True),
    Tensor("lm_head.weight", ("head",), in_body=False),
)
GEMMA_LAYER_TENSORS = (
    Tensor("input_layernorm.weight", ("attn_norm.scale",), plus_one=True),
    *LLAMA_ATTENTION_TENSORS,
    Tensor("self_attn.q_norm.weight", ("attn.q_norm.scale",), plus_one=True),
    Tensor("self_attn.k_norm.weight", ("attn.k_norm.scale",), plus_one=True),
    Tensor("post_attention_layernorm.weight", ("attn_post_norm.scale",), plus_one=True),
    Tensor("pre_feedforward_layernorm.weight", ("ffn_norm.scale",), plus_one=True),
    *LLAMA_FFN_TENSORS,
    Tensor("post_feedforward_layernorm.weight", ("ffn_post_norm.scale",), plus_one=True),
)
# Older configs have `hidden_act` as well; transformers only reads `hidden_activation`.
GEMMA_INERT_KEYS = frozenset({"hidden_act"})


def read_gemma_fields(reader: ConfigReader, defaults: dict[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that Gemma 2 and 3 spell the same way."""
    reader.only("use_bidirectional_attention", (None, False), "the decoder attends to past tokens alone")
    fields = read_llama_shape(reader, defaults, activation_key="hidden_activation")
    attention_bias = reader.flag("attention_bias", False)
    scalar = reader.number("query_pre_attn_scalar", 256)
    if scalar <= 0 or fields["hidden_size"] < 1:
        raise ConfigError(
            "config keys 'query_pre_attn_scalar' and 'hidden_size' must be positive, got "
            f"{scalar} and {fields['hidden_size']}; fix them"
        )
    return {
        **fields,
        "attention_scale": scalar**-0.5,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "post_norms": True,
    }


def write_gemma_fields(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_gemma_fields`, and the layers' windows."""
    return {
        **write_llama_shape(cfg, activation_key="hidden_activation"),
        "query_pre_attn_scalar": round(cfg.attention_scale**-2),
        "final_logit_softcapping": cfg.logit_softcap or None,
        "attention_bias": cfg.qkv_bias,
        "sliding_window": max(cfg.attention_windows) or None,
        "layer_types": write_layer_types(cfg.attention_windows),
    }


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_gemma_fields(reader, _DEFAULTS)
    rope = read_rope(reader, head_dim=fields["head_dim"], window_tokens=fields["window_tokens"])
    refuse_partial(rope, fields["head_dim"])
    layers = fields["layers"]
    return ModelConfig(
        model_type="gemma2",
        **fields,
        rope=rope,
        attention_softcap=reader.optional_number("attn_logit_softcapping", 50.0) or 0.0,
        logit_softcap=reader.optional_number("final_logit_softcapping", 30.0) or 0.0,
        attention_windows=read_windows(
            reader,
            layers=layers,
            window=reader.optional_integer("sliding_window", 4096),
            slides=[layer % 2 == 0 for layer in range(layers)],
        ),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_gemma_fields(cfg),
        **({} if cfg.rope is None else write_rope(cfg.rope)),
        "attn_logit_softcapping": cfg.attention_softcap or None,
    }


GEMMA2 = Architecture(
    model_type="gemma2",
    read_config=_read,
    write_config=_write,
    class_name="Gemma2ForCausalLM",
    top_tensors=GEMMA_TOP_TENSORS,
    layer_tensors=GEMMA_LAYER_TENSORS,
    inert_keys=GEMMA_INERT_KEYS,
)
