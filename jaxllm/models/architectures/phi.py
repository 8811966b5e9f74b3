"""Phi-1, Phi-1.5 and Phi-2: one layer norm, which attention and the feed-forward block both read, a rotary
embedding over a part of each head, and biases everywhere, also of the head."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA_ATTENTION_TENSORS, split_heads
from jaxllm.models.config_reader import ConfigReader, read_rope, write_partial_rope
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("qk_layernorm", (None, False), "layer norms of queries and keys are not implemented")
    # The head has a bias, so that transformers cannot share it either.
    reader.only("tie_word_embeddings", (None, False), "the head is a parameter of its own")
    hidden = reader.integer("hidden_size", 2048)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.optional_integer("num_key_value_heads")
    head_dim = split_heads(hidden, heads)
    window_tokens = reader.integer("max_position_embeddings", 2048)
    return ModelConfig(
        model_type="phi",
        vocab_size=reader.integer("vocab_size", 51200),
        hidden_size=hidden,
        layers=reader.integer("num_hidden_layers", 24),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        ffn_size=reader.integer("intermediate_size", 8192),
        window_tokens=window_tokens,
        activation=read_activation(reader, "hidden_act", "gelu_new"),
        gated_ffn=False,
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        rope=read_rope(reader, head_dim=head_dim, window_tokens=window_tokens, partial=0.5),
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        parallel_blocks=True,
        head_bias=True,
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
        **write_partial_rope(cfg.rope, cfg.head_dim),
    }


PHI = Architecture(
    model_type="phi",
    read_config=_read,
    write_config=_write,
    class_name="PhiForCausalLM",
    top_tensors=(
        Tensor("embed_tokens.weight", ("embed.tokens",)),
        Tensor("final_layernorm.weight", ("final_norm.scale",)),
        Tensor("final_layernorm.bias", ("final_norm.bias",)),
        Tensor("lm_head.weight", ("head",), in_body=False),
        Tensor("lm_head.bias", ("head_bias",), in_body=False),
    ),
    layer_tensors=(
        Tensor("input_layernorm.weight", ("attn_norm.scale",)),
        Tensor("input_layernorm.bias", ("attn_norm.bias",)),
        *LLAMA_ATTENTION_TENSORS[:-2],
        Tensor("self_attn.dense.weight", ("attn.o",), transposed=True),
        Tensor("self_attn.dense.bias", ("attn.o_bias",)),
        Tensor("mlp.fc1.weight", ("ffn.up",)),
        Tensor("mlp.fc1.bias", ("ffn.up_bias",)),
        Tensor("mlp.fc2.weight", ("ffn.down",), transposed=True),
        Tensor("mlp.fc2.bias", ("ffn.down_bias",)),
    ),
    inert_keys=frozenset({"embd_pdrop", "resid_pdrop"}),
)
