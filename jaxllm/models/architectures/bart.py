"""BART, mBART and Marian: encoder-decoders with biases everywhere.

BART has learned positions and a layer norm after each sum. mBART has norms before each block, and one after
the last layer of each side. Marian is BART with sinusoidal positions, which are computed, and without norms
of embeddings.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.config_parts import Fields, Part, fixed, keys, only, split_heads
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors


def _keys(vocab_size: int, **own: Any) -> tuple[Part, ...]:
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
        *_keys(50265, learned_positions=True, embed_norm=True, norm_after=True, final_norm=False),
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
    parts=(BART.parts[0], *_keys(50265, learned_positions=True, embed_norm=True)),
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
        *_keys(58101, sinusoidal_positions=True, norm_after=True, final_norm=False),
        only(
            "decoder_vocab_size",
            lambda fields: (None, fields["vocab_size"]),
            "encoder and decoder share one vocabulary",
        ),
    ),
    computed={f"{side}.embed_positions.weight": _positions for side in _SIDES},
)
