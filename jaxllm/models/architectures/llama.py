"""Llama (1 to 3.x), and the parts shared with architectures derived from it: keys, defaults, tensor names."""

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_reader import ConfigReader, read_rope, refuse_partial, write_rope
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation

# The Hugging Face class's defaults for absent keys.
_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

LLAMA_TOP_TENSORS = (
    Tensor("embed_tokens.weight", ("embed.tokens",)),
    Tensor("norm.weight", ("final_norm.scale",)),
    Tensor("lm_head.weight", ("head",), in_body=False),
)
LLAMA_ATTENTION_TENSORS = (
    Tensor("self_attn.q_proj.weight", ("attn.q",)),
    Tensor("self_attn.q_proj.bias", ("attn.q_bias",)),
    Tensor("self_attn.k_proj.weight", ("attn.k",)),
    Tensor("self_attn.k_proj.bias", ("attn.k_bias",)),
    Tensor("self_attn.v_proj.weight", ("attn.v",)),
    Tensor("self_attn.v_proj.bias", ("attn.v_bias",)),
    Tensor("self_attn.o_proj.weight", ("attn.o",), transposed=True),
    Tensor("self_attn.o_proj.bias", ("attn.o_bias",)),
)
LLAMA_FFN_TENSORS = (
    Tensor("mlp.gate_proj.weight", ("ffn.gate",)),
    Tensor("mlp.gate_proj.bias", ("ffn.gate_bias",)),
    Tensor("mlp.up_proj.weight", ("ffn.up",)),
    Tensor("mlp.up_proj.bias", ("ffn.up_bias",)),
    Tensor("mlp.down_proj.weight", ("ffn.down",), transposed=True),
    Tensor("mlp.down_proj.bias", ("ffn.down_bias",)),
)
LLAMA_NORM_TENSORS = (
    Tensor("input_layernorm.weight", ("attn_norm.scale",)),
    Tensor("post_attention_layernorm.weight", ("ffn_norm.scale",)),
)


def read_llama_shape(
    reader: ConfigReader, defaults: Mapping[str, Any], *, activation_key: str = "hidden_act"
) -> dict[str, Any]:
    """Fields of ModelConfig with the same keys in all architectures derived from Llama, without rotary
    embedding.

    `defaults` are the Hugging Face class's own, keyed as in config.json.
    """
    hidden = reader.integer("hidden_size", defaults["hidden_size"])
    heads = reader.integer("num_attention_heads", defaults["num_attention_heads"])
    kv_heads = reader.optional_integer("num_key_value_heads", defaults["num_key_value_heads"])
    head_dim = reader.optional_integer("head_dim", defaults["head_dim"])
    return {
        "vocab_size": reader.integer("vocab_size", defaults["vocab_size"]),
        "hidden_size": hidden,
        "layers": reader.integer("num_hidden_layers", defaults["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": split_heads(hidden, heads) if head_dim is None else head_dim,
        "ffn_size": reader.integer("intermediate_size", defaults["intermediate_size"]),
        "window_tokens": reader.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        "activation": read_activation(reader, activation_key, defaults[activation_key]),
        "norm_eps": reader.number("rms_norm_eps", defaults["rms_norm_eps"]),
        "tied_head": reader.flag("tie_word_embeddings", defaults["tie_word_embeddings"]),
    }


def read_llama_fields(reader: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`read_llama_shape` and one rotary embedding over whole heads."""
    fields = read_llama_shape(reader, defaults)
    rope = read_rope(
        reader,
        head_dim=fields["head_dim"],
        window_tokens=fields["window_tokens"],
        theta=defaults.get("rope_theta", 10000.0),
    )
    refuse_partial(rope, fields["head_dim"])
    return {**fields, "rope": rope}


def write_llama_shape(cfg: ModelConfig, *, activation_key: str = "hidden_act") -> dict[str, Any]:
    """The inverse of `read_llama_shape`."""
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_size,
        "max_position_embeddings": cfg.window_tokens,
        activation_key: write_activation(cfg.activation),
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied_head,
    }


def write_llama_fields(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_llama_fields`."""
    return {**write_llama_shape(cfg), **({} if cfg.rope is None else write_rope(cfg.rope))}


def split_heads(hidden_size: int, heads: int) -> int:
    """Head size of a config without `head_dim`.

    Raises:
      ConfigError: the hidden size does not divide into heads.
    """
    if heads < 1 or hidden_size < heads or hidden_size % heads:
        raise ConfigError(
            f"hidden size {hidden_size} does not divide into {heads} heads; correct the config or give "
            "its head_dim"
        )
    return hidden_size // heads


def _read(reader: ConfigReader) -> ModelConfig:
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="llama",
        **read_llama_fields(reader, _DEFAULTS),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        ffn_bias=reader.flag("mlp_bias", False),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), "attention_bias": cfg.qkv_bias, "mlp_bias": cfg.ffn_bias}


LLAMA = Architecture(
    model_type="llama",
    read_config=_read,
    write_config=_write,
    class_name="LlamaForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=LLAMA_NORM_TENSORS + LLAMA_ATTENTION_TENSORS + LLAMA_FFN_TENSORS,
    # In Falcon3's configs besides `hidden_act`; it is not read.
    inert_keys=frozenset({"activation"}),
)
