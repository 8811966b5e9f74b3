"""LFM2: layers of short gated convolutions, and layers with attention over normalized queries and keys."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import StateConfig
from jaxllm.models.architectures.llama import split_heads
from jaxllm.models.config_reader import (
    ConfigReader,
    read_rope,
    read_state_layers,
    refuse_partial,
    write_rope,
    write_state_types,
)
from jaxllm.models.translate import Architecture, Tensor

_CONV = "conv"


def _read_ffn_size(reader: ConfigReader) -> int:
    """The neurons of a layer; configs have one and a half times as many, before rounding up."""
    size = reader.integer("intermediate_size", 12288)
    size = reader.integer("block_ff_dim", size)
    multiplier = reader.optional_number("block_ffn_dim_multiplier", 1.0)
    multiple = reader.integer("block_multiple_of", 256)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if multiplier is None:
        return size
    if multiple < 1:
        raise ConfigError(f"config key 'block_multiple_of' must be positive, got {multiple}; fix it")
    return -(-int(multiplier * size) // multiple) * multiple


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("block_use_swiglu", (True,), "feed-forward blocks are gated")
    reader.only("use_pos_enc", (True,), "layers with attention have rotary embeddings")
    hidden, layers = reader.integer("hidden_size", 2560), reader.integer("num_hidden_layers", 32)
    heads = reader.integer("num_attention_heads", 32)
    head_dim, window = split_heads(hidden, heads), reader.integer("max_position_embeddings", 128000)
    rope = read_rope(reader, head_dim=head_dim, window_tokens=window, theta=1e6)
    refuse_partial(rope, head_dim)
    attends = reader.integers("full_attn_idxs") or range(max(layers, 0))
    tied = reader.flag("tie_word_embeddings", True)
    marked = read_state_layers(reader, _CONV, [layer not in attends for layer in range(max(layers, 0))])
    taps, biased = reader.integer("conv_L_cache", 3), reader.flag("conv_bias", False)
    states = StateConfig(kind="short_conv", taps=taps, bias=biased)
    return ModelConfig(
        model_type="lfm2",
        vocab_size=reader.integer("vocab_size", 65536),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        ffn_size=_read_ffn_size(reader),
        window_tokens=window,
        norm_eps=reader.number("norm_eps", 1e-5),
        rope=rope,
        qk_norm=True,
        tied_head=reader.flag("tie_embedding", tied),
        states=states if marked else None,
        state_layers=marked,
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    states = cfg.states
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "intermediate_size": cfg.ffn_size,
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": cfg.window_tokens,
        "norm_eps": cfg.norm_eps,
        **({} if states is None else {"conv_L_cache": states.taps, "conv_bias": states.bias}),
        "tie_word_embeddings": cfg.tied_head,
        "layer_types": write_state_types(cfg.state_layers, cfg.layers, _CONV),
        **({} if cfg.rope is None else write_rope(cfg.rope)),
    }


LFM2 = Architecture(
    model_type="lfm2",
    read_config=_read,
    write_config=_write,
    class_name="Lfm2ForCausalLM",
    top_tensors=(
        Tensor("embed_tokens.weight", ("embed.tokens",)),
        Tensor("embedding_norm.weight", ("final_norm.scale",)),
        Tensor("lm_head.weight", ("head",), in_body=False),
    ),
    layer_tensors=(
        Tensor("operator_norm.weight", ("attn_norm.scale",)),
        Tensor("operator_norm.weight", ("state_norm.scale",)),
        Tensor("self_attn.q_proj.weight", ("attn.q",)),
        Tensor("self_attn.k_proj.weight", ("attn.k",)),
        Tensor("self_attn.v_proj.weight", ("attn.v",)),
        Tensor("self_attn.out_proj.weight", ("attn.o",), transposed=True),
        Tensor("self_attn.q_layernorm.weight", ("attn.q_norm.scale",)),
        Tensor("self_attn.k_layernorm.weight", ("attn.k_norm.scale",)),
        Tensor("conv.in_proj.weight", ("state.input_gate", "state.output_gate", "state.value")),
        Tensor("conv.in_proj.bias", ("state.input_gate_bias", "state.output_gate_bias", "state.value_bias")),
        Tensor("conv.conv.weight", ("state.conv",), depthwise=True),
        Tensor("conv.conv.bias", ("state.conv_bias",)),
        Tensor("conv.out_proj.weight", ("state.o",), transposed=True),
        Tensor("conv.out_proj.bias", ("state.o_bias",)),
        Tensor("ffn_norm.weight", ("ffn_norm.scale",)),
        Tensor("feed_forward.w1.weight", ("ffn.gate",)),
        Tensor("feed_forward.w3.weight", ("ffn.up",)),
        Tensor("feed_forward.w2.weight", ("ffn.down",), transposed=True),
    ),
    # Keys of the authors' own code; they repeat other keys, or describe the initialization.
    inert_keys=frozenset(
        {
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta",
        }
    ),
)  # fmt: skip
