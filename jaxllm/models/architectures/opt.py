"""OPT: layer norms, learned positions with two rows of padding, a plain feed-forward.

The 350m model, with norms after each block and narrower embeddings, is refused.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import split_heads
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation

# PyTorch's default, which OPT uses without a config key.
_NORM_EPS = 1e-5


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("do_layer_norm_before", (True,), "norms after each block (opt-350m) are not implemented")
    reader.only("_remove_final_layer_norm", (None, False), "the shared decoder ends in a norm")
    reader.only("layer_norm_elementwise_affine", (True,), "norms without weights are not implemented")
    hidden = reader.integer("hidden_size", 768)
    embedding = reader.optional_integer("word_embed_proj_dim")
    if embedding not in (None, hidden):
        raise ConfigError(
            f"config key 'word_embed_proj_dim' is {embedding} and hidden_size is {hidden}; projected "
            "embeddings (opt-350m) are not implemented: use another OPT size"
        )
    heads = reader.integer("num_attention_heads", 12)
    bias = reader.flag("enable_bias", True)
    return ModelConfig(
        model_type="opt",
        vocab_size=reader.integer("vocab_size", 50272),
        hidden_size=hidden,
        layers=reader.integer("num_hidden_layers", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=split_heads(hidden, heads),
        ffn_size=reader.integer("ffn_dim", 3072),
        window_tokens=reader.integer("max_position_embeddings", 2048),
        activation=read_activation(reader, "activation_function", "relu"),
        gated_ffn=False,
        norm="layer",
        norm_eps=_NORM_EPS,
        learned_positions=True,
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=bias,
        tied_head=reader.flag("tie_word_embeddings", True),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "ffn_dim": cfg.ffn_size,
        "max_position_embeddings": cfg.window_tokens,
        "activation_function": write_activation(cfg.activation),
        "do_layer_norm_before": True,
        "enable_bias": cfg.qkv_bias,
        "tie_word_embeddings": cfg.tied_head,
        "word_embed_proj_dim": cfg.hidden_size,
    }


OPT = Architecture(
    model_type="opt",
    read_config=_read,
    write_config=_write,
    class_name="OPTForCausalLM",
    top_tensors=(
        Tensor("embed_tokens.weight", ("embed.tokens",)),
        Tensor("embed_positions.weight", ("embed.positions",), skip_rows=2),
        Tensor("final_layer_norm.weight", ("final_norm.scale",)),
        Tensor("final_layer_norm.bias", ("final_norm.bias",)),
        Tensor("lm_head.weight", ("head",), in_body=False),
    ),
    layer_tensors=(
        Tensor("self_attn_layer_norm.weight", ("attn_norm.scale",)),
        Tensor("self_attn_layer_norm.bias", ("attn_norm.bias",)),
        Tensor("self_attn.q_proj.weight", ("attn.q",)),
        Tensor("self_attn.q_proj.bias", ("attn.q_bias",)),
        Tensor("self_attn.k_proj.weight", ("attn.k",)),
        Tensor("self_attn.k_proj.bias", ("attn.k_bias",)),
        Tensor("self_attn.v_proj.weight", ("attn.v",)),
        Tensor("self_attn.v_proj.bias", ("attn.v_bias",)),
        Tensor("self_attn.out_proj.weight", ("attn.o",), transposed=True),
        Tensor("self_attn.out_proj.bias", ("attn.o_bias",)),
        Tensor("final_layer_norm.weight", ("ffn_norm.scale",)),
        Tensor("final_layer_norm.bias", ("ffn_norm.bias",)),
        Tensor("fc1.weight", ("ffn.up",)),
        Tensor("fc1.bias", ("ffn.up_bias",)),
        Tensor("fc2.weight", ("ffn.down",), transposed=True),
        Tensor("fc2.bias", ("ffn.down_bias",)),
    ),
    prefixes=("model.decoder.", "decoder.", ""),
)
