"""GPT-2, OPT, BART, mBART and Marian: layer norms, a plain feed-forward block, biases everywhere.

GPT-2, OPT and BART have learned positions. BART, an encoder-decoder, has a layer norm after each sum. mBART
has norms before each block, and one after the last layer of each side. Marian is BART with sinusoidal
positions, which are computed, and without norms of embeddings.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import HEAD
from jaxllm.models.config_parts import Fields, Part, fixed, keys, only, split_heads
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors


def _bart_keys(vocab_size: int, **own: Any) -> tuple[Part, ...]:
    """The keys of the family: with the class's default of `vocab_size`, and `own`, the fields in which its
    members differ."""
    plain = keys(
        vocab_size=(vocab_size, "vocab_size"),
        d_model=(1024, "hidden_size"),
        decoder_layers=(12, "layers"),
        decoder_attention_heads=(16, "heads"),
        decoder_ffn_dim=(4096, "ffn_size"),
        max_position_embeddings=(1024, "window_tokens"),
        activation_function=("gelu", "activation"),
    )
    # PyTorch's default epsilon, which these models use without a config key.
    shared: Fields = {"gated_ffn": False, "norm": "layer", "norm_eps": 1e-5, **own}
    shared |= dict.fromkeys(("qkv_bias", "o_bias", "ffn_bias"), True)
    tied = keys(tie_word_embeddings=(True, "tied_head"))
    return plain, fixed(**shared), Part(_read_encoder, _write_encoder), tied, fixed(head_bias=True)


def _read_encoder(reader: ConfigReader, fields: Fields) -> Fields:
    hidden, heads = fields["hidden_size"], reader.integer("encoder_attention_heads", 16)
    scale = hidden**0.5 if reader.flag("scale_embedding", False) else 1.0
    sizes: Fields = {
        "layers": reader.integer("encoder_layers", 12),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": split_heads(hidden, heads),
        "ffn_size": reader.integer("encoder_ffn_dim", 4096),
    }
    encoder = ModelConfig(**{**fields, **sizes, "embed_scale": scale, "tied_head": True})
    return {"encoder": encoder, "embed_scale": scale}


def _write_encoder(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return {
        "is_encoder_decoder": True,
        "scale_embedding": cfg.embed_scale != 1.0,
        "encoder_layers": cfg.encoder.layers,
        "encoder_attention_heads": cfg.encoder.heads,
        "encoder_ffn_dim": cfg.encoder.ffn_size,
    }


def _attention(name: str, ours: str) -> tuple[Tensor, ...]:
    products = {f"{name}.{part}_proj": f"{ours}.{part}" for part in "qkv"}
    return tensors({f"{name}_layer_norm": f"{ours}_norm", **products, f"{name}.out_proj": f"{ours}.o"})


SELF_ATTENTION = _attention("self_attn", "attn")
FEED_FORWARD = tensors({"final_layer_norm": "ffn_norm", "fc1": "ffn.up", "fc2": "ffn.down"})
_SIDES = {"encoder": "encoder.", "decoder": ""}


def _of_sides(names: dict[str, str]) -> dict[str, str]:
    return {f"{side}.{name}": ours + own for side, ours in _SIDES.items() for name, own in names.items()}


BART = Architecture(
    model_type="bart",
    class_name="BartForConditionalGeneration",
    parts=(
        only("is_encoder_decoder", (True,), "an encoder without a decoder gives no text"),
        *_bart_keys(50265, learned_positions=True, embed_norm=True, norm_after=True, final_norm=False),
    ),
    top_tensors=(
        Tensor("shared.weight", ("embed.tokens",)),
        # Two rows of padding.
        *tensors(_of_sides({"embed_positions": "embed.positions"}), skip_rows=2),
        *tensors(_of_sides({"layernorm_embedding": "embed.norm", "layer_norm": "final_norm"})),
        Tensor("lm_head.weight", ("head",), in_body=False),
        Tensor("final_logits_bias", ("head_bias",), in_body=False, one_row=True),
    ),
    layer_tensors=SELF_ATTENTION + _attention("encoder_attn", "cross") + FEED_FORWARD,
    layer_prefix="decoder.layers.{}.",
    inert_keys=frozenset(
        {
            "add_bias_logits", "add_final_layer_norm", "classif_dropout", "decoder_layerdrop",
            "encoder_layerdrop", "extra_pos_embeddings", "gradient_checkpointing", "normalize_before",
            "normalize_embedding", "num_hidden_layers", "save_step", "static_position_embeddings",
        }
    ),
    buffers=("encoder.version", "decoder.version"),
    # Both sides have the one token embedding.
    copies={f"{side}.embed_tokens.weight": "embed.tokens" for side in _SIDES},
    encoder_tensors=SELF_ATTENTION + FEED_FORWARD,
    encoder_prefix="encoder.layers.{}.",
)  # fmt: skip
MBART = dataclasses.replace(
    BART,
    model_type="mbart",
    class_name="MBartForConditionalGeneration",
    parts=(BART.parts[0], *_bart_keys(50265, learned_positions=True, embed_norm=True)),
)


def _positions(cfg: ModelConfig) -> np.ndarray:
    """Position embeddings, `[window, D]`: sines, then cosines."""
    frequencies = 10000.0 ** -(np.arange(0, cfg.hidden_size, 2) / cfg.hidden_size)
    angles = np.arange(cfg.window_tokens)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


MARIAN = dataclasses.replace(
    BART,
    model_type="marian",
    class_name="MarianMTModel",
    parts=(
        BART.parts[0],
        only(
            "share_encoder_decoder_embeddings",
            (True,),
            "encoder and decoder have to share one token embedding",
        ),
        *_bart_keys(58101, sinusoidal_positions=True, norm_after=True, final_norm=False),
        only(
            "decoder_vocab_size",
            lambda fields: (None, fields["vocab_size"]),
            "encoder and decoder share one vocabulary",
        ),
    ),
    computed={f"{side}.embed_positions.weight": _positions for side in _SIDES},
)


_BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
_SHARED: dict[str, Any] = {"gated_ffn": False, "norm": "layer", "learned_positions": True}


def _read_sizes(reader: ConfigReader, fields: Fields) -> Fields:
    ffn, scaled = reader.optional_integer("n_inner"), reader.flag("scale_attn_weights", True)
    return {
        "ffn_size": 4 * fields["hidden_size"] if ffn is None else ffn,
        "attention_scale": fields["head_dim"] ** -0.5 if scaled else 1.0,
    }


_NO_SUCH = "the shared decoder has no such attention"
GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    parts=(
        only("scale_attn_by_inverse_layer_idx", (None, False), _NO_SUCH),
        only("add_cross_attention", (None, False), _NO_SUCH),
        keys(
            vocab_size=(50257, "vocab_size"),
            n_embd=(768, "hidden_size"),
            n_layer=(12, "layers"),
            n_head=(12, "heads"),
            n_positions=(1024, "window_tokens"),
            activation_function=("gelu_new", "activation"),
            layer_norm_epsilon=(1e-5, "norm_eps"),
            tie_word_embeddings=(True, "tied_head"),
        ),
        Part(
            _read_sizes,
            lambda cfg: {
                "n_inner": cfg.ffn_size,
                "scale_attn_weights": cfg.attention_scale == cfg.head_dim**-0.5,
            },
        ),
        fixed(**_SHARED, **_BIASES),
    ),
    top_tensors=tensors({"wte": "embed.tokens", "wpe": "embed.positions", "ln_f": "final_norm"}) + HEAD,
    # Linear layers are stored as `[in, out]` (Conv1D), transposed against all other architectures.
    layer_tensors=tensors(
        {
            "ln_1": "attn_norm",
            "attn.c_attn": "attn.q attn.k attn.v",
            "attn.c_proj": "attn.o",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn.up",
            "mlp.c_proj": "ffn.down",
        },
        turned=True,
    ),
    layer_prefix="h.{}.",
    prefixes=("transformer.", ""),
    # Upcasting and reordering only change rounding; n_ctx repeats n_positions; the summary head belongs to
    # another class.
    inert_keys=frozenset(
        {
            "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    ),
    # The causal mask, which older checkpoints contain.
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


# The 350m model, with norms after each block and narrower embeddings, is refused.
OPT = Architecture(
    model_type="opt",
    class_name="OPTForCausalLM",
    parts=(
        only("do_layer_norm_before", (True,), "norms after each block (opt-350m) are not implemented"),
        only("_remove_final_layer_norm", (None, False), "the shared decoder ends in a norm"),
        only("layer_norm_elementwise_affine", (True,), "norms without weights are not implemented"),
        keys(
            vocab_size=(50272, "vocab_size"),
            hidden_size=(768, "hidden_size"),
            num_hidden_layers=(12, "layers"),
            num_attention_heads=(12, "heads"),
            ffn_dim=(3072, "ffn_size"),
            max_position_embeddings=(2048, "window_tokens"),
            activation_function=("relu", "activation"),
            enable_bias=(True, *_BIASES),
            tie_word_embeddings=(True, "tied_head"),
        ),
        only(
            "word_embed_proj_dim",
            lambda fields: (None, fields["hidden_size"]),
            "projected embeddings (opt-350m) are not implemented; use another OPT size",
        ),
        # PyTorch's default epsilon, which OPT uses without a config key.
        fixed(**_SHARED, norm_eps=1e-5),
    ),
    top_tensors=(
        *tensors({"embed_tokens": "embed.tokens", "final_layer_norm": "final_norm"}),
        # Two rows of padding.
        *tensors({"embed_positions": "embed.positions"}, skip_rows=2),
        *HEAD,
    ),
    layer_tensors=SELF_ATTENTION + FEED_FORWARD,
    prefixes=("model.decoder.", "decoder.", ""),
)
