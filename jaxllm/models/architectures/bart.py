"""BART, mBART and Marian: encoder-decoders with biases everywhere.

BART has learned positions and a layer norm after each sum. mBART has norms before each block, and one after
the last layer of each side. Marian is BART with sinusoidal positions, which are computed, and without norms
of embeddings.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.config_parts import (
    Fields,
    Part,
    only,
    read_activation,
    split_heads,
    write_activation,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, linears, norms


def _keys(vocab_size: int, **own: Any) -> Part:
    """The keys of the family: with the class's default of `vocab_size`, and `own`, the fields in which its
    members differ."""

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        hidden = reader.integer("d_model", 1024)
        shared: Fields = {
            "vocab_size": reader.integer("vocab_size", vocab_size),
            "hidden_size": hidden,
            "window_tokens": reader.integer("max_position_embeddings", 1024),
            "activation": read_activation(reader, "activation_function", "gelu"),
            "gated_ffn": False,
            "norm": "layer",
            # PyTorch's default, which these models use without a config key.
            "norm_eps": 1e-5,
            "embed_scale": hidden**0.5 if reader.flag("scale_embedding", False) else 1.0,
            **dict.fromkeys(("qkv_bias", "o_bias", "ffn_bias"), True),
            **own,
        }

        def side(name: str) -> Fields:
            heads = reader.integer(f"{name}_attention_heads", 16)
            return {
                **shared,
                "layers": reader.integer(f"{name}_layers", 12),
                "heads": heads,
                "kv_heads": heads,
                "head_dim": split_heads(hidden, heads),
                "ffn_size": reader.integer(f"{name}_ffn_dim", 4096),
            }

        encoder = ModelConfig(model_type=fields["model_type"], tied_head=True, **side("encoder"))
        tied = reader.flag("tie_word_embeddings", True)
        return {**side("decoder"), "encoder": encoder, "tied_head": tied, "head_bias": True}

    return Part(read, _write)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    written: dict[str, Any] = {
        "is_encoder_decoder": True,
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.hidden_size,
        "max_position_embeddings": cfg.window_tokens,
        "activation_function": write_activation(cfg.activation),
        "scale_embedding": cfg.embed_scale != 1.0,
        "tie_word_embeddings": cfg.tied_head,
    }
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg)):
        sizes = {"layers": side.layers, "attention_heads": side.heads, "ffn_dim": side.ffn_size}
        written |= {f"{name}_{key}": size for key, size in sizes.items()}
    return written


def _attention(name: str, ours: str) -> tuple[Tensor, ...]:
    return (
        *norms({f"{name}_layer_norm": f"{ours}_norm"}),
        *linears({f"{name}.{part}_proj": f"{ours}.{part}" for part in "qkv"}),
        *linears({f"{name}.out_proj": f"{ours}.o"}),
    )


_FEED_FORWARD = norms({"final_layer_norm": "ffn_norm"}) + linears({"fc1": "ffn.up", "fc2": "ffn.down"})
_SIDES = {"encoder": "encoder.", "decoder": ""}
BART = Architecture(
    model_type="bart",
    class_name="BartForConditionalGeneration",
    parts=(
        only("is_encoder_decoder", (True,), "an encoder without a decoder gives no text"),
        _keys(50265, learned_positions=True, embed_norm=True, norm_after=True, final_norm=False),
    ),
    top_tensors=(
        Tensor("shared.weight", ("embed.tokens",)),
        *(
            tensor
            for side, ours in _SIDES.items()
            for tensor in (
                # Two rows of padding.
                Tensor(f"{side}.embed_positions.weight", (f"{ours}embed.positions",), skip_rows=2),
                *norms({f"{side}.layernorm_embedding": f"{ours}embed.norm"}),
                *norms({f"{side}.layer_norm": f"{ours}final_norm"}),
            )
        ),
        Tensor("lm_head.weight", ("head",), in_body=False),
        Tensor("final_logits_bias", ("head_bias",), in_body=False, one_row=True),
    ),
    layer_tensors=_attention("self_attn", "attn") + _attention("encoder_attn", "cross") + _FEED_FORWARD,
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
    encoder_tensors=_attention("self_attn", "attn") + _FEED_FORWARD,
    encoder_prefix="encoder.layers.{}.",
)  # fmt: skip
MBART = dataclasses.replace(
    BART,
    model_type="mbart",
    class_name="MBartForConditionalGeneration",
    parts=(BART.parts[0], _keys(50265, learned_positions=True, embed_norm=True)),
)


def _one_vocabulary(reader: ConfigReader, fields: Fields) -> Fields:
    vocabulary = (None, fields["vocab_size"])
    reader.only("decoder_vocab_size", vocabulary, "encoder and decoder share one vocabulary")
    return {}


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
        _keys(58101, sinusoidal_positions=True, norm_after=True, final_norm=False),
        Part(_one_vocabulary),
    ),
    computed={f"{side}.embed_positions.weight": _positions for side in _SIDES},
)
