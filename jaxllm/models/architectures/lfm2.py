"""LFM2: layers of short gated convolutions, and layers with attention over normalized queries and keys."""

from jaxllm.models.architectures.llama import HEAD
from jaxllm.models.config_parts import Fields, Part, fixed, keys, only, rope, state_layers
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors


def _read_ffn_size(reader: ConfigReader) -> int:
    """The neurons of a layer; configs have one and a half times as many, before rounding up."""
    size = reader.integer("intermediate_size", 12288)
    size = reader.integer("block_ff_dim", size)
    multiplier = reader.optional_number("block_ffn_dim_multiplier", 1.0)
    multiple = reader.integer("block_multiple_of", 256, least=1)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if multiplier is None:
        return size
    return -(-int(multiplier * size) // multiple) * multiple


def _usual_states(reader: ConfigReader, fields: Fields) -> list[bool]:
    layers = range(max(fields["layers"], 0))
    attends = reader.integers("full_attn_idxs") or layers
    return [layer not in attends for layer in layers]


LFM2 = Architecture(
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    parts=(
        only("block_use_swiglu", (True,), "feed-forward blocks are gated"),
        only("use_pos_enc", (True,), "layers with attention have rotary embeddings"),
        keys(
            vocab_size=(65536, "vocab_size"),
            hidden_size=(2560, "hidden_size"),
            num_hidden_layers=(32, "layers"),
            num_attention_heads=(32, "heads"),
            num_key_value_heads=(8, "kv_heads"),
            max_position_embeddings=(128000, "window_tokens"),
            norm_eps=(1e-5, "norm_eps"),
            tie_word_embeddings=(True, "tied_head"),
        ),
        rope(1e6),
        state_layers(
            "short_conv", "conv", _usual_states, taps=("conv_L_cache", 3), bias=("conv_bias", False)
        ),
        Part(
            lambda reader, fields: {
                "ffn_size": _read_ffn_size(reader),
                "tied_head": reader.flag("tie_embedding", fields["tied_head"]),
            },
            lambda cfg: {"intermediate_size": cfg.ffn_size, "block_auto_adjust_ff_dim": False},
        ),
        fixed(qk_norm=True),
    ),
    top_tensors=tensors({"embed_tokens": "embed.tokens", "embedding_norm": "final_norm"}) + HEAD,
    layer_tensors=(
        *tensors({"operator_norm": "attn_norm"}),
        *tensors(
            {
                "operator_norm": "state_norm",
                **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
                "self_attn.out_proj": "attn.o",
                **{f"self_attn.{part}_layernorm": f"attn.{part}_norm" for part in "qk"},
                "conv.in_proj": "state.input_gate state.output_gate state.value",
                "conv.out_proj": "state.o",
                "ffn_norm": "ffn_norm",
                "feed_forward.w1": "ffn.gate",
                "feed_forward.w3": "ffn.up",
                "feed_forward.w2": "ffn.down",
            }
        ),
        Tensor("conv.conv.weight", ("state.conv",), depthwise=True),
        Tensor("conv.conv.bias", ("state.conv_bias",)),
    ),
    # Keys of the authors' own code; they repeat other keys, or describe the initialization.
    inert_keys=frozenset(
        {
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta",
        }
    ),
)  # fmt: skip
