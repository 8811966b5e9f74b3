"""GPT-2: layer norms, learned positions, a plain feed-forward, biases everywhere.

Its linear layers are stored as `[in, out]` (Conv1D), transposed against all other architectures.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import split_heads
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation


def _read(reader: ConfigReader) -> ModelConfig:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        reader.only(key, (None, False), "the shared decoder has no such attention")
    hidden, heads = reader.integer("n_embd", 768), reader.integer("n_head", 12)
    head_dim = split_heads(hidden, heads)
    ffn = reader.optional_integer("n_inner")
    return ModelConfig(
        model_type="gpt2",
        vocab_size=reader.integer("vocab_size", 50257),
        hidden_size=hidden,
        layers=reader.integer("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn_size=4 * hidden if ffn is None else ffn,
        window_tokens=reader.integer("n_positions", 1024),
        activation=read_activation(reader, "activation_function", "gelu_new"),
        gated_ffn=False,
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        learned_positions=True,
        attention_scale=head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        tied_head=reader.flag("tie_word_embeddings", True),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "n_embd": cfg.hidden_size,
        "n_layer": cfg.layers,
        "n_head": cfg.heads,
        "n_inner": cfg.ffn_size,
        "n_positions": cfg.window_tokens,
        "activation_function": write_activation(cfg.activation),
        "layer_norm_epsilon": cfg.norm_eps,
        "scale_attn_weights": cfg.attention_scale == cfg.head_dim**-0.5,
        "tie_word_embeddings": cfg.tied_head,
    }


GPT2 = Architecture(
    model_type="gpt2",
    read_config=_read,
    write_config=_write,
    class_name="GPT2LMHeadModel",
    top_tensors=(
        Tensor("wte.weight", ("embed.tokens",)),
        Tensor("wpe.weight", ("embed.positions",)),
        Tensor("ln_f.weight", ("final_norm.scale",)),
        Tensor("ln_f.bias", ("final_norm.bias",)),
        Tensor("lm_head.weight", ("head",), in_body=False),
    ),
    layer_tensors=(
        Tensor("ln_1.weight", ("attn_norm.scale",)),
        Tensor("ln_1.bias", ("attn_norm.bias",)),
        Tensor("attn.c_attn.weight", ("attn.q", "attn.k", "attn.v"), transposed=True),
        Tensor("attn.c_attn.bias", ("attn.q_bias", "attn.k_bias", "attn.v_bias")),
        Tensor("attn.c_proj.weight", ("attn.o",)),
        Tensor("attn.c_proj.bias", ("attn.o_bias",)),
        Tensor("ln_2.weight", ("ffn_norm.scale",)),
        Tensor("ln_2.bias", ("ffn_norm.bias",)),
        Tensor("mlp.c_fc.weight", ("ffn.up",), transposed=True),
        Tensor("mlp.c_fc.bias", ("ffn.up_bias",)),
        Tensor("mlp.c_proj.weight", ("ffn.down",)),
        Tensor("mlp.c_proj.bias", ("ffn.down_bias",)),
    ),
    layer_prefix="h.{}.",
    prefixes=("transformer.", ""),
    # Upcasting and reordering only change rounding; n_ctx repeats n_positions; the summary head belongs to
    # another class.
    inert_keys=frozenset(
        [
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ]
    ),
    # The causal mask, which older checkpoints contain.
    buffers=(".attn.bias", ".attn.masked_bias"),
)
