"""StableLM: Llama with layer norms and a rotary embedding over the first quarter of each head.

The 12B model, with norms on queries and keys and parallel blocks, is refused.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA_ATTENTION_TENSORS, LLAMA_FFN_TENSORS, split_heads
from jaxllm.models.config_reader import ConfigReader, read_rope, write_partial_rope
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("use_parallel_residual", (None, False), "parallel blocks (12B) are not implemented")
    reader.only("qk_layernorm", (None, False), "layer norms of queries and keys (12B) are not implemented")
    hidden = reader.integer("hidden_size", 2560)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.optional_integer("num_key_value_heads", 32)
    head_dim = split_heads(hidden, heads)
    window_tokens = reader.integer("max_position_embeddings", 4096)
    return ModelConfig(
        model_type="stablelm",
        vocab_size=reader.integer("vocab_size", 50304),
        hidden_size=hidden,
        layers=reader.integer("num_hidden_layers", 32),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        ffn_size=reader.integer("intermediate_size", 6912),
        window_tokens=window_tokens,
        activation=read_activation(reader, "hidden_act", "silu"),
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        rope=read_rope(reader, head_dim=head_dim, window_tokens=window_tokens, partial=0.25),
        qkv_bias=reader.flag("use_qkv_bias", False),
        tied_head=reader.flag("tie_word_embeddings", False),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "intermediate_size": cfg.ffn_size,
        "max_position_embeddings": cfg.window_tokens,
        "hidden_act": write_activation(cfg.activation),
        "layer_norm_eps": cfg.norm_eps,
        "use_qkv_bias": cfg.qkv_bias,
        "tie_word_embeddings": cfg.tied_head,
        **write_partial_rope(cfg.rope, cfg.head_dim),
    }


STABLELM = Architecture(
    model_type="stablelm",
    read_config=_read,
    write_config=_write,
    class_name="StableLmForCausalLM",
    top_tensors=(
        Tensor("embed_tokens.weight", ("embed.tokens",)),
        Tensor("norm.weight", ("final_norm.scale",)),
        Tensor("norm.bias", ("final_norm.bias",)),
        Tensor("lm_head.weight", ("head",), in_body=False),
    ),
    layer_tensors=(
        Tensor("input_layernorm.weight", ("attn_norm.scale",)),
        Tensor("input_layernorm.bias", ("attn_norm.bias",)),
        *LLAMA_ATTENTION_TENSORS,
        Tensor("post_attention_layernorm.weight", ("ffn_norm.scale",)),
        Tensor("post_attention_layernorm.bias", ("ffn_norm.bias",)),
        *LLAMA_FFN_TENSORS,
    ),
)
